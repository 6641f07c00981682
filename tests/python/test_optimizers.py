"""A script's calls around the step: param groups, optimizers of the user, schedules, boundaries."""

import math
import warnings

import pytest
import strata
import torch
from comparison import adamw, compare
from plain_torch import PlainTrainer, exact_square_roots
from ranks import run_ranks
from soak import also
from tiny_models import (
    config_of,
    differences,
    full_parameters,
    loss_of,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
    train_step,
)

CHOICES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.05, foreach=False),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=False),
}


def _optimizer_of_the_user(name):
    """Element by element is element by element: the same bits, given one square root for both."""
    rank, world = rank_and_world()
    for stage in (0, 3):
        model = make_model()
        reference = PlainTrainer(make_model(), world, CHOICES[name])
        optimizer = CHOICES[name](model.parameters())
        engine, returned, _, _ = strata.initialize(
            model=model, config=config_of(stage, optimizer=False), optimizer=optimizer
        )
        assert returned is engine.optimizer and returned.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        for tokens in make_batches(4, world):
            reference.micro_step(tokens, loss_of)
            with exact_square_roots():
                train_step(engine, tokens[rank])
            reference.step()
            assert differences(full_parameters(model), reference.values()) == []
        engine.destroy()


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_optimizers_of_torch_run_on_the_shards(name):
    run_ranks(2, _optimizer_of_the_user, name)


class _Uncorrected(torch.optim.Optimizer):
    """Adam without the correction of its moments' bias."""

    def __init__(self, parameters, decoupled):
        super().__init__(parameters, {"lr": 0.01, "decay": 0.1, "decoupled": decoupled})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                first, second = self.state[p].setdefault("moments", (torch.zeros_like(p), torch.zeros_like(p)))
                gradient = p.grad if group["decoupled"] else p.grad + group["decay"] * p
                first.mul_(0.9).add_(gradient, alpha=0.1)
                second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                if group["decoupled"]:
                    p.mul_(1 - group["lr"] * group["decay"])
                p.sub_(group["lr"] * first / (second.sqrt() + 1e-8))


def _without_bias_correction():
    rank, world = rank_and_world()
    cases = [(0, "fp32", 1, "none"), (1, "bf16", 2, "cpu"), (2, "bf16", 1, "none"), (3, "fp32", 2, "cpu")]
    for stage, dtype, accumulation, place in cases:
        decoupled = stage != 1
        config = config_of(stage, dtype, accumulation=accumulation)
        params = {"lr": 0.01, "weight_decay": 0.1, "bias_correction": False, "adam_w_mode": decoupled}
        config["optimizer"] = {"type": "Adam", "params": params}
        if place != "none":
            config["zero_optimization"]["offload_optimizer"] = {"device": place}
        reference = PlainTrainer(make_model(), world, lambda p, d=decoupled: _Uncorrected(p, d),
                                 dtype=torch.float32 if dtype == "fp32" else torch.bfloat16, accumulation=accumulation)
        model = make_model()
        engine = make_engine(model, config)
        for tokens in make_batches(3 * accumulation, world):
            reference.micro_step(tokens, loss_of)
            train_step(engine, tokens[rank])
            if engine.micro_steps % accumulation == 0:
                reference.step()
        wanted = reference.values()
        for name, value in full_parameters(model).items():
            # A correction would move the first steps by 0.09; what differs in the last bits is amplified where
            # gradients nearly cancel.
            tolerance = 3e-4 if dtype == "fp32" else 2e-2
            torch.testing.assert_close(value, wanted[name], rtol=tolerance, atol=tolerance)
        assert engine.optimizer.param_groups[0]["bias_correction"] is False
        engine.destroy()


def test_adam_of_the_configuration_may_leave_its_moments_uncorrected():
    run_ranks(2, _without_bias_correction)


class _Failing(torch.optim.SGD):
    def step(self, closure=None):
        assert all(p.grad is not None for group in self.param_groups for p in group["params"])
        raise ArithmeticError("a rule that does not converge")


def test_an_optimizer_that_fails_keeps_no_gradients():
    """Gradients are views of the engine's memory, which the engine uses again."""
    model = make_model()
    optimizer = _Failing(model.parameters(), lr=0.05)
    engine, *_ = strata.initialize(model=model, config=config_of(2, optimizer=False), optimizer=optimizer)
    with pytest.raises(ArithmeticError, match="does not converge"):
        train_step(engine, make_batches(1, 1)[0][0])
    segments = [p for group in optimizer.param_groups for p in group["params"]]
    assert segments and all(p.grad is None for p in segments)


@pytest.mark.parametrize("name", ["momentum", "adagrad", "adam"])
def test_an_optimizer_that_took_steps_is_refused(name):
    """Its state is of whole parameters; a shard of it would have to be cut out, silently or wrongly."""
    model = make_model()
    optimizer = CHOICES[name](model.parameters())
    loss_of(model, make_batches(1, 1)[0][0]).backward()
    optimizer.step()
    with pytest.raises(strata.UsageError, match=f"{type(optimizer).__name__} has taken steps already.*a new one"):
        strata.initialize(model=model, config=config_of(3, optimizer=False), optimizer=optimizer)


def _groups_of(parameters):
    parameters = list(parameters)
    return [
        {"params": parameters[0::3], "lr": 0.02, "weight_decay": 0.0},
        {"params": parameters[1::3], "lr": 0.005, "weight_decay": 0.3},
        {"params": parameters[2::3]},
    ]


def _param_groups(kind):
    _, world = rank_and_world()

    for stage in range(4):
        reference = PlainTrainer(make_model(), world, lambda p: adamw(_groups_of(p)))
        model = make_model()
        if kind == "config":
            arguments = {"model_parameters": _groups_of(model.parameters())}
        elif kind == "callable":
            arguments = {"optimizer": adamw, "model_parameters": _groups_of(model.parameters())}
        else:
            arguments = {"optimizer": adamw(_groups_of(model.parameters()))}
        config = config_of(stage, optimizer=kind == "config")
        compare(config, reference, lambda model=model: model, arguments)


@pytest.mark.parametrize("kind", ["config", "callable", *also("object")])
def test_param_groups_have_their_own_settings(kind):
    run_ranks(2, _param_groups, kind)


def _rates_by_hand():
    rank, world = rank_and_world()
    reference = PlainTrainer(make_model(), world, adamw)
    engine = make_engine(make_model(), config_of(3))
    for step, tokens in enumerate(make_batches(4, world)):
        rate = 1e-2 / (step + 1)
        engine.optimizer.param_groups[0]["lr"] = rate
        engine.optimizer.param_groups[0]["weight_decay"] = 0.1 * step
        reference.optimizer.param_groups[0].update(lr=rate, weight_decay=0.1 * step)
        reference.micro_step(tokens, loss_of)
        train_step(engine, tokens[rank])
        reference.step()
        assert differences(full_parameters(engine.module), reference.values()) == []
    assert engine.get_lr() == [1e-2 / 4]


def test_changed_rates_count_at_the_next_step():
    run_ranks(2, _rates_by_hand)


SCHEDULES = {
    "WarmupLR": ({"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"},
                 [0.0, 0.0, 0.0025, 0.005, 0.0075, 0.01]),
    "WarmupDecayLR": ({"total_num_steps": 6, "warmup_max_lr": 0.01, "warmup_num_steps": 2, "warmup_type": "linear"},
                      [0.0, 0.0, 0.005, 0.01, 0.0075, 0.005]),
    "WarmupCosineLR": ({"total_num_steps": 6, "warmup_num_steps": 2, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0,
                        "warmup_type": "linear"},
                       [0.0, 0.0, 0.005] + [0.005 * (1 + math.cos(math.pi * i / 4)) for i in (1, 2, 3)]),
    # torch's, by its class's name, as under DeepSpeed
    "CosineAnnealingLR": ({"T_max": 4}, [0.01] + [0.005 * (1 + math.cos(math.pi * i / 4)) for i in (1, 2, 3, 4, 5)]),
}


def _schedule(name):
    rank, world = rank_and_world()
    params, _ = SCHEDULES[name]
    config = config_of(2, accumulation=2, scheduler={"type": name, "params": params})
    engine, optimizer, _, scheduler = strata.initialize(model=make_model(), config=config)
    assert scheduler is engine.lr_scheduler
    rates = []
    for index, tokens in enumerate(make_batches(12, world)):
        if index % 2 == 0:
            rates.append(optimizer.param_groups[0]["lr"])
        train_step(engine, tokens[rank])
    return rates


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_schedules_of_the_configuration_move_the_rate(name):
    for rates in run_ranks(2, _schedule, name):
        assert rates == pytest.approx(SCHEDULES[name][1])  # DeepSpeed's: the first two steps are iteration 0's


def _torch_scheduler():
    rank, world = rank_and_world()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a scheduler that goes before its optimizer
        engine, optimizer, _, scheduler = strata.initialize(
            model=make_model(), config=config_of(3),
            lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
        )
        rates = []
        for tokens in make_batches(5, world):
            rates.append(optimizer.param_groups[0]["lr"])
            train_step(engine, tokens[rank])
        by_hand = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
        engine.lr_scheduler = None
        train_step(engine, tokens[rank])
        by_hand.step()
    return rates, optimizer.param_groups[0]["lr"], scheduler.last_epoch


def test_schedulers_of_torch_drive_the_returned_optimizer():
    for rates, last, epoch in run_ranks(2, _torch_scheduler):
        assert rates == pytest.approx([0.01, 0.01, 0.005, 0.005, 0.0025])
        assert epoch == 5
        assert last == pytest.approx(0.005)


def _boundaries():
    rank, world = rank_and_world()
    for stage in (1, 3):
        reference = PlainTrainer(make_model(), world, adamw, accumulation=4)
        engine = make_engine(make_model(), config_of(stage, accumulation=4))
        for index, tokens in enumerate(make_batches(4, world)):
            engine.set_gradient_accumulation_boundary(index in (1, 3))
            assert engine.is_gradient_accumulation_boundary() == (index in (1, 3))
            reference.micro_step(tokens, loss_of)
            train_step(engine, tokens[rank])
            if index in (1, 3):
                reference.step()
        assert engine.global_steps == 2 and engine.micro_steps == 4
        assert differences(full_parameters(engine.module), reference.values()) == []
        engine.destroy()


def test_the_script_may_say_what_a_boundary_is():
    run_ranks(2, _boundaries)


def _reduced_once(way):
    """Gradients that wait on their rank add up there first, so the sum is taken in another order."""
    rank, world = rank_and_world()
    for stage in range(4):
        reference = PlainTrainer(
            make_model(), world, lambda p: torch.optim.SGD(p, lr=0.05), accumulation=4
        )
        model = make_model()
        more = {"strata": {"reduce_at": "boundary"}} if way == "boundary" else {}
        engine = make_engine(
            model, config_of(stage, accumulation=4, optimizer=False, **more),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        )
        for index, tokens in enumerate(make_batches(8, world)):
            reference.micro_step(tokens, loss_of)
            loss = loss_of(engine, tokens[rank])
            if way == "no_sync" and (index + 1) % 4:
                with engine.no_sync():
                    engine.backward(loss)
            else:
                engine.backward(loss)
            engine.step()
            if (index + 1) % 4 == 0:
                reference.step()
                assert engine.get_global_grad_norm() == pytest.approx(reference.norm, rel=1e-5)
        ours = full_parameters(model)
        for name, value in reference.values().items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)
        engine.destroy()


@pytest.mark.parametrize("way", ["boundary", "no_sync"])
def test_gradients_may_wait_for_the_boundary(way):
    run_ranks(2, _reduced_once, way)
