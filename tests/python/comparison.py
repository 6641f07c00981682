"""Trains the engine and plain torch side by side."""

import pytest
import torch
from devices import to_test_device
from tiny_models import differences, full_parameters, loss_of, make_batches, make_engine, make_model, rank_and_world

NORM_TOLERANCE = 1e-13  # an fp64 sum taken in another order


def adamw(parameters):
    """The optimizer of ``config_of``."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=False)


def told(engine, loss):
    """A backward pass by the engine's own call."""
    engine.backward(loss)


def found(engine, loss):
    """A backward pass that autograd runs alone."""
    engine.scale(loss).backward()


def compare(config, reference, make=make_model, engine_kwargs=None, steps=3, loss_function=loss_of, batches=None,
            backward=told):
    """Trains both on the same batches, asserts that every loss and every weight has the same bits.

    Args:
        config: of the engine.
        reference: a PlainTrainer, still untrained.
        make: makes the engine's model, equal to the reference's.
        batches: [micro-steps, ranks, ...]; random tokens for ``steps`` optimizer steps when None.
        backward: ``told`` or ``found``.

    Returns:
        [{name: value}] after every optimizer step.
    """
    rank, world = rank_and_world()
    engine = make_engine(make(), config, **(engine_kwargs or {}))
    accumulation = engine.gradient_accumulation_steps()
    if batches is None:
        batches = make_batches(steps * accumulation, world)
    history = []
    for index, tokens in enumerate(to_test_device(batches)):
        expected = reference.micro_step(tokens, loss_function)
        loss = loss_function(engine, tokens[rank])
        backward(engine, loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        assert loss.item() == expected[rank], f"loss of micro-step {index}"
        assert boundary == ((index + 1) % accumulation == 0)
        if not boundary:
            continue
        assert engine.optimizer.overflow is False
        reference.step(engine.get_global_grad_norm())
        assert engine.get_global_grad_norm() == pytest.approx(reference.norm, rel=NORM_TOLERANCE)
        values = full_parameters(engine.module)
        assert differences(values, reference.values()) == [], f"after micro-step {index}"
        history.append(values)
    engine.destroy()
    return history
