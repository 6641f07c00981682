"""``optimizer.step()``, which scripts and frameworks call in place of ``engine.step()``, or beside it."""

import copy
import itertools

import pytest
import strata
import torch
from comparison import adamw
from plain_torch import PlainTrainer, exact_square_roots
from ranks import run_ranks
from tiny_models import (
    DTYPES, config_of, differences, full_parameters, loss_of, make_batches, make_engine, make_model, rank_and_world,
)


def _by_closure(engine, tokens):
    def closure():
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        return loss

    assert engine.optimizer.step(closure).requires_grad


def _after_backward(*calls):
    def step(engine, tokens):
        engine.backward(loss_of(engine, tokens))
        for call in calls:
            call(engine)

    return step


def _found(engine, tokens):
    engine.scale(loss_of(engine, tokens)).backward()
    engine.optimizer.step()


def _engine(engine):
    engine.step()


def _optimizer(engine):
    engine.optimizer.step()


WAYS = {
    "the optimizer alone": _after_backward(_optimizer),
    "the engine, then the optimizer": _after_backward(_engine, _optimizer),
    "the optimizer, then the engine": _after_backward(_optimizer, _engine),
    "both, twice": _after_backward(_engine, _optimizer, _optimizer),
    "a backward that autograd runs": _found,
    "a closure": _by_closure,
}


def _ways(stages, accumulations, dtypes, ways):
    """Training has the bits of plain torch, whether the script asks the engine or the optimizer to step."""
    rank, world = rank_and_world()
    grid = itertools.product(stages, accumulations, dtypes, ways, (adamw, lambda p: torch.optim.SGD(p, lr=0.05)))
    for stage, accumulation, dtype, way, rule in grid:
        reference = PlainTrainer(make_model(), world, rule, dtype=DTYPES[dtype], accumulation=accumulation)
        model = make_model()
        engine = make_engine(
            model, config_of(stage, dtype, accumulation, optimizer=False), optimizer=rule(model.parameters()),
            lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0),
        )
        for index, tokens in enumerate(make_batches(2 * accumulation, world), 1):
            reference.micro_step(tokens, loss_of)
            with exact_square_roots():
                WAYS[way](engine, tokens[rank])
            if index % accumulation == 0:
                reference.step()
            assert engine.micro_steps == index and engine.global_steps == index // accumulation
            assert engine.was_step_applied() == (index % accumulation == 0)
            assert engine.lr_scheduler.last_epoch == engine.global_steps
            case = (stage, accumulation, dtype, way)
            assert differences(full_parameters(model), reference.values()) == [], case
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_stepping_the_optimizer_updates_as_stepping_the_engine(world):
    run_ranks(world, _ways, (3, world % 3), (2,), ("bf16",) if world == 2 else ("fp32",), list(WAYS))


def _mistakes():
    rank, world = rank_and_world()
    tokens = make_batches(1, world)[0][rank]
    model = make_model()
    client = adamw(model.parameters())
    engine = make_engine(model, config_of(1, optimizer=False), optimizer=client)
    before = full_parameters(model)
    engine.optimizer.step()  # no gradients: torch's do nothing
    assert engine.micro_steps == 0 and differences(full_parameters(model), before) == []
    with pytest.raises(strata.UsageError, match="without a backward pass"):
        engine.step()
    engine.backward(loss_of(engine, tokens))
    engine.optimizer.step()
    with pytest.raises(strata.UsageError, match="without a backward pass"):
        engine.optimizer.step()
    engine.step()  # the optimizer has made this update already
    assert engine.global_steps == 1
    engine.backward(loss_of(engine, tokens))
    engine.step()
    with pytest.raises(strata.UsageError, match="without a backward pass"):
        engine.step()

    before = full_parameters(model)
    engine.backward(loss_of(engine, tokens))
    client.step()  # the script's own variable
    assert engine.global_steps == 3 and len(differences(full_parameters(model), before)) > 5
    optimizer = engine.optimizer
    engine.destroy(keep_values=True)
    with pytest.raises(strata.UsageError, match="destroyed"):
        optimizer.step()
    before = copy.deepcopy(model.state_dict())
    loss_of(model, tokens).backward()
    client.step()  # plain torch again
    assert len(differences(dict(model.state_dict()), dict(before))) > 5


def test_a_step_without_a_backward_pass_is_an_error_but_where_the_other_has_done_it():
    run_ranks(2, _mistakes)


def _skipped():
    """A step of gradients that are not finite is skipped as by the engine."""
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(2, "fp16"))
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)  # wraps optimizer.step
    before = full_parameters(engine.module)
    engine.backward(loss_of(engine, make_batches(1, world)[0][rank]) * float("inf"))
    engine.optimizer.step()
    assert engine.skipped_steps == 1 and not engine.was_step_applied() and engine.optimizer.overflow
    assert differences(full_parameters(engine.module), before) == []
    engine.optimizer.step = engine.optimizer.step  # as Accelerate does
    engine.backward(loss_of(engine, make_batches(1, world)[0][rank]))
    engine.optimizer.step()
    scheduler.step()
    assert engine.was_step_applied() and len(differences(full_parameters(engine.module), before)) > 5


def test_the_optimizer_skips_a_step_as_the_engine_does():
    run_ranks(2, _skipped)


def test_backward_returns_the_loss_divided_by_the_accumulation_steps():
    """As with DeepSpeed; scripts add it up and log it."""
    tokens = make_batches(1, 1)[0][0]
    engine = make_engine(make_model(), config_of(1, accumulation=4))
    loss = loss_of(engine, tokens)
    assert engine.backward(loss).item() == loss.item() / 4
    engine.step()
    loss = loss_of(engine, tokens)
    assert engine.backward(loss, scale_wrt_gas=False).item() == loss.item()


SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}}


def test_a_learning_rate_that_is_a_tensor_is_filled():
    """Compiled steps, and optimizers that refuse a float, hold the tensor."""
    tokens = make_batches(1, 1)[0][0]
    model = make_model()
    rate = torch.tensor(0.5)
    engine = make_engine(model, config_of(1, optimizer=False, scheduler=SCHEDULE),
                         optimizer=torch.optim.SGD(model.parameters(), lr=rate))
    rates = []
    for _ in range(4):
        engine.backward(loss_of(engine, tokens))
        engine.step()
        rates.append(rate.item())
        assert engine.optimizer.param_groups[0]["lr"] is rate
    assert rates == pytest.approx([0.0, 0.0025, 0.005, 0.0075]) and engine.get_lr() == rates[-1:]
    engine.set_lr(0.25)
    assert rate.item() == 0.25 and engine.optimizer.param_groups[0]["lr"] is rate
