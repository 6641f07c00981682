"""fp32 and bf16: a step whose gradients are not finite is skipped on every rank, counted, and logged once."""

import logging

import pytest
import strata
import torch
from comparison import adamw
from plain_torch import PlainTrainer
from ranks import run_ranks
from strata.schedule import Advance
from tiny_models import (
    DTYPES,
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

BAD = [False, True, True, False, True, False]


def _not_finite(model, tokens):
    return loss_of(model, tokens) * float("nan")


class _Told(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def _rate(step):
    return 1.0 / (step + 1)


def _train_through_bad_steps(dtype, stage, accumulation):
    rank, world = rank_and_world()
    told = _Told()
    logging.getLogger("strata").addHandler(told)
    reference = PlainTrainer(make_model(), world, adamw, DTYPES[dtype], accumulation=accumulation)
    engine, optimizer, _, scheduler = strata.initialize(
        model=make_model(),
        config=config_of(stage, dtype, accumulation=accumulation, strata={"max_skipped_steps": 2}),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, _rate),
    )
    batches = iter(make_batches((len(BAD) + 3) * accumulation, world))

    def step(bad):
        for micro in range(accumulation):
            tokens = next(batches)
            reference.micro_step(tokens, loss_of)
            # One rank alone in one micro-step is enough.
            here = bad and micro == 0 and rank == world - 1
            train_step(engine, tokens[rank], _not_finite if here else loss_of)

    for index, bad in enumerate(BAD):
        reference.optimizer.param_groups[0]["lr"] = 1e-2 * _rate(BAD[:index].count(False))
        step(bad)
        assert engine.was_step_applied() is not bad
        assert (engine.global_steps, engine.skipped_steps) == (index + 1, BAD[: index + 1].count(True))
        if bad:
            reference.drop_gradients()
        else:
            reference.step(engine.get_global_grad_norm())
        assert scheduler.last_epoch == BAD[: index + 1].count(False)
        assert optimizer.param_groups[0]["lr"] == 1e-2 * _rate(scheduler.last_epoch)
        assert differences(full_parameters(engine.module), reference.values()) == [], f"step {index}"
    assert len(told.messages) == (rank == 0), told.messages
    for message in told.messages:
        assert "First found in: unit '" in message and "skipped" in message

    step(True)
    step(True)
    with pytest.raises(strata.NumericsError, match="after 2 steps in a row.*unit '.*of rank") as error:
        step(True)
        engine.core.finish_step()
    assert "unchanged" in str(error.value)
    assert differences(full_parameters(engine.module), reference.values()) == []
    engine.destroy()
    logging.getLogger("strata").removeHandler(told)


def _all_stages(dtype):
    for stage in range(4):
        _train_through_bad_steps(dtype, stage, accumulation=1 + stage % 2)


@pytest.mark.parametrize(("world", "dtype"), [(1, "fp32"), (2, "bf16")])
def test_bad_steps_are_skipped_and_counted_until_they_are_too_many(world, dtype):
    run_ranks(world, _all_stages, dtype)


def _looks_away():
    tokens = make_batches(1, 1)[0][0]
    engine = make_engine(make_model(), config_of(2, "bf16", bf16={"enabled": True, "check_grad_overflow": False}))
    train_step(engine, tokens, _not_finite)
    return engine.was_step_applied(), engine.skipped_steps


def test_check_grad_overflow_false_looks_at_no_gradient():
    assert run_ranks(1, _looks_away) == [(True, 0)]


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, _rate),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
}


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_an_advance_of_a_scheduler_can_be_taken_back(name, tensor):
    """The engine undoes the advance where a GPU reports a skipped update only later."""
    optimizers = [
        torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=torch.tensor(0.1) if tensor else 0.1)
        for _ in range(2)
    ]
    ours, plain = (SCHEDULERS[name](optimizer) for optimizer in optimizers)
    for optimizer in optimizers:
        optimizer.step()
    for step in range(8):
        advance = Advance(ours, optimizers[0], {}, can_be_undone=True)
        if step in (0, 3, 4, 6):
            advance.undo()
        else:
            plain.step()
        assert ours.get_last_lr() == plain.get_last_lr() and ours.last_epoch == plain.last_epoch
        for key in ("lr", "betas"):
            assert optimizers[0].param_groups[0][key] == optimizers[1].param_groups[0][key]


def test_what_a_script_wrote_after_an_advance_stays():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    scheduler = SCHEDULERS["LambdaLR"](optimizer)
    optimizer.step()
    advance = Advance(scheduler, optimizer, {}, can_be_undone=True)
    optimizer.param_groups[0]["lr"] = 7.0
    advance.undo()
    assert optimizer.param_groups[0]["lr"] == 7.0
