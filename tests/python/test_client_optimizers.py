"""Optimizers of the user's: the probe of classes, its refusals, and the gradients of their groups."""

import pickle

import pytest
import strata
import torch
from plain_torch import PlainTrainer, exact_square_roots
from ranks import run_ranks
from tiny_models import (
    config_of, differences, full_parameters, loss_of, make_batches, make_engine, make_model, rank_and_world,
    train_step,
)


class Clipping(torch.optim.SGD):
    """Looks at all parameters at once."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()


class InBackward(torch.optim.Optimizer):
    """Updates each parameter as soon as its gradient is there, as LOMO does."""


def _clipping(parameters):
    """Leaves out the parameter without elements, for which the engine has no gradient."""
    return Clipping([p for p in parameters if p.numel()], lr=0.05)


def _trained_at_once(stages):
    rank, world = rank_and_world()
    for stage in stages:
        reference = PlainTrainer(make_model(), world, _clipping, accumulation=2)
        model = make_model()
        engine = make_engine(model, config_of(stage, accumulation=2, optimizer=False),
                             optimizer=_clipping(model.parameters()))
        for index, tokens in enumerate(make_batches(6, world), 1):
            reference.micro_step(tokens, loss_of)
            with exact_square_roots():
                train_step(engine, tokens[rank])
            if index % 2 == 0:
                reference.step()
            assert differences(full_parameters(model), reference.values()) == [], (stage, index)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_optimizer_that_looks_at_all_parameters_has_them_on_one_rank_and_at_stage_0(world):
    run_ranks(world, _trained_at_once, (0, 3) if world == 1 else (0,))


def _refused():
    model = make_model()
    before = torch.random.get_rng_state()
    for stage in (1, 2, 3):
        with pytest.raises(strata.UsageError, match=f"Clipping does not update.*stage 0.*found stage {stage} on 2"):
            strata.initialize(model=model, config=config_of(stage, optimizer=False),
                              optimizer=_clipping(model.parameters()))
    with pytest.raises(strata.UsageError, match="LBFGS computes the loss itself"):
        strata.initialize(model=model, config=config_of(0, optimizer=False),
                          optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(strata.UsageError, match="InBackward has no step"):
        strata.initialize(model=model, config=config_of(0, optimizer=False),
                          optimizer=InBackward(model.parameters(), {}))
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_optimizer_whose_parts_would_update_otherwise_is_refused_by_name():
    run_ranks(2, _refused)


class Own(torch.optim.Adagrad):
    """Element by element, with states from its constructor, and settings that its constructor does not know."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr, initial_accumulator_value=0.1, foreach=True)


class Wrapping(torch.optim.Optimizer):
    """Has another one work on its groups."""

    def __init__(self, params):
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        self.base.step()


def test_the_probe_takes_what_works_element_by_element():
    from strata.optimizer_probe import why_not_by_element

    parameters = list(make_model().parameters())
    rate = torch.tensor(0.1)
    for cls, settings in (
        (torch.optim.AdamW, {"fused": True}), (torch.optim.Adam, {"amsgrad": True}), (torch.optim.Adamax, {}),
        (torch.optim.SGD, {"lr": rate, "momentum": 0.9}), (torch.optim.NAdam, {"foreach": True}),
        (torch.optim.Rprop, {}), (torch.optim.ASGD, {}), (torch.optim.Adadelta, {}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.RAdam, {"maximize": True}), (strata.ops.lion.FusedLion, {}), (Wrapping, {}),
    ):  # fmt: skip
        subclass = type("Subclass", (cls,), {})
        optimizer = subclass([{"params": parameters[::2]}, {"params": parameters[1::2]}], **settings)
        assert why_not_by_element(optimizer, torch.device("cpu")) is None, cls
        assert not optimizer.state and all(p.grad is None for p in parameters)
    assert rate.item() == pytest.approx(0.1)


def _momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _whole(parameters):
    return torch.optim.Adafactor([p for p in parameters if p.numel()], lr=0.01)


def _gradients_of_groups():
    """An error where a script would clip, drop or scale nothing."""
    rank, world = rank_and_world()
    tokens = make_batches(2, world)
    for stage, rule in ((0, _momentum), (0, _whole), (3, _whole), (3, _momentum)):
        model = make_model()
        engine = make_engine(model, config_of(stage, optimizer=False), optimizer=rule(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        parts = [part for group in engine.optimizer.param_groups for part in group["params"]]
        for batch in tokens:
            assert all(part.grad is None for part in parts)
            engine.backward(loss_of(engine, batch[rank]))
            for use in (
                lambda: torch.nn.utils.clip_grad_norm_(parts, 0.1),
                lambda: [setattr(part, "grad", None) for part in parts],
                lambda: scaler.unscale_(engine.optimizer),
            ):  # fmt: skip
                with pytest.raises(strata.UsageError, match="model's own parameters.*gradient_clipping"):
                    use()
            engine.step()
            assert engine.was_step_applied()
        assert all(type(part) is torch.nn.Parameter for part in pickle.loads(pickle.dumps(parts)))
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_not_looked_for_in_the_param_groups_of_parts(world):
    run_ranks(world, _gradients_of_groups)
