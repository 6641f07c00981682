"""``zero_grad()`` drops the gradients that a step has collected, as in plain torch, by whatever name a script calls it
and wherever the gradients are. Between steps it costs nothing."""

import pytest
import strata
import torch
from comparison import adamw
from plain_torch import PlainTrainer
from ranks import run_ranks
from tiny_models import (
    DTYPES, config_of, differences, full_parameters, loss_of, make_batches, make_engine, make_model, rank_and_world,
)

OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def _by_hand(engine):
    for parameter in engine.module.parameters():
        parameter.grad = None


WAYS = (
    lambda engine: engine.zero_grad(),
    lambda engine: engine.module.zero_grad(),
    lambda engine: engine.optimizer.zero_grad(),
    _by_hand,
    lambda engine: engine.module.zero_grad(set_to_none=False),
    lambda engine: engine.zero_grad(set_to_none=False),
)


def _cases():
    for stage in (0, 1, 2, 3):
        for dtype in ("fp32", "bf16"):
            for accumulation in (1, 2):
                for more in ({}, OFFLOAD if stage else {}, {"strata": {"reduce_at": "boundary"}}):
                    yield config_of(stage, dtype, accumulation, clipping=0.5, **more), dtype, accumulation


def _not_a_number(engine, tokens):
    return loss_of(engine, tokens) * float("nan")


def _dropped(every):
    """Takes every ``every``-th case of the grid, other ones for each world size."""
    rank, world = rank_and_world()
    batches = iter(make_batches(4000, world))
    for number, (config, dtype, accumulation) in enumerate(_cases()):
        if number % every != world % every:
            continue
        reference = PlainTrainer(make_model(), world, adamw, DTYPES[dtype], 0.5, accumulation)
        engine = make_engine(make_model(), config)
        for way, drop in enumerate(WAYS):
            for _ in range(accumulation - 1):  # this one goes, too
                engine.backward(loss_of(engine, next(batches)[rank]))
                engine.step()
            engine.backward(_not_a_number(engine, next(batches)[rank]))
            drop(engine)
            good = next(batches)
            loss = loss_of(engine, good[rank])
            drop(engine)
            engine.backward(loss)
            engine.step()
            reference.micro_step(good, loss_of)
            reference.step(engine.get_global_grad_norm())
            drop(engine)  # nothing is there
            assert engine.was_step_applied() and engine.skipped_steps == 0, (config, way)
            assert engine.global_steps == way + 1 and engine.micro_steps == (way + 1) * accumulation
            assert differences(full_parameters(engine.module), reference.values()) == [], (config, way)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_batch_that_is_dropped_counts_in_no_way(world):
    run_ranks(world, _dropped, 7)


def _two_losses():
    rank, world = rank_and_world()
    for stage in (0, 1, 2, 3):
        for dtype in ("fp32", "fp16"):
            engine, other = (make_engine(make_model(), config_of(stage, dtype)) for _ in range(2))
            for tokens in make_batches(2, world):
                logits = engine(tokens[rank]).float()
                first, second = logits.square().mean(), logits.sin().mean()
                engine.backward(first * float("inf"), retain_graph=True)
                engine.module.zero_grad()
                engine.backward(second)
                other.backward(other(tokens[rank]).float().sin().mean())
                for each in (engine, other):
                    each.step()
                assert engine.loss_scale() == other.loss_scale() and engine.skipped_steps == 0
                assert differences(full_parameters(engine.module), full_parameters(other.module)) == []
            engine.destroy()
            other.destroy()


def test_the_second_loss_of_a_graph_counts_alone():
    run_ranks(2, _two_losses)


def _part_of_the_model():
    rank, world = rank_and_world()
    for stage in (0, 1, 2, 3):
        for accumulation in (1, 2):
            reference = PlainTrainer(make_model(), world, adamw, accumulation=accumulation)
            engine = make_engine(make_model(), config_of(stage, accumulation=accumulation))
            gone = {"layers.1." + name for name, _ in engine.module.layers[1].named_parameters()}
            names = [name for name, _ in engine.module.named_parameters()]
            for tokens in make_batches(2 * accumulation, world):
                reference.micro_step(tokens, loss_of)
                engine.backward(loss_of(engine, tokens[rank]))
                engine.module.layers[1].zero_grad()
                for index, name in enumerate(names):
                    if name in gone:
                        reference.sums[index].zero_()
                        reference.sums_of_groups[0][index].zero_()
                        reference.came[index] = False
                engine.step()
                if engine.is_gradient_accumulation_boundary() is (accumulation == 1):
                    reference.step(engine.get_global_grad_norm())
            assert differences(full_parameters(engine.module), reference.values()) == [], (stage, accumulation)
            engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_submodule_drops_its_own_alone(world):
    run_ranks(world, _part_of_the_model)


def _a_step_of_nothing():
    rank, world = rank_and_world()
    tokens = make_batches(3, world)
    for stage in (0, 3):
        engine, other = (make_engine(make_model(), config_of(stage)) for _ in range(2))
        engine.backward(loss_of(engine, tokens[0, rank]))
        before = full_parameters(engine.module)
        engine.zero_grad()
        engine.step()
        assert differences(full_parameters(engine.module), before) == [] and engine.get_global_grad_norm() == 0.0
        for each in (engine, other):
            each.backward(loss_of(each, tokens[1, rank]))
            each.step()
        assert differences(full_parameters(engine.module), full_parameters(other.module)) == []
        engine.destroy()
        other.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_after_it_leaves_weights_and_moments_alone(world):
    run_ranks(world, _a_step_of_nothing)


def _on_one_rank():
    rank, world = rank_and_world()
    tokens = make_batches(4, world)
    for stage in (0, 2, 3):
        engine = make_engine(make_model(), config_of(stage, accumulation=2))
        before = full_parameters(engine.module)
        engine.backward(loss_of(engine, tokens[0, rank]))
        engine.step()
        if rank == 1:
            engine.zero_grad()
        engine.backward(loss_of(engine, tokens[1, rank]))
        with pytest.raises(strata.UsageError, match="different gradients of this step.*Rank 1 differs from rank 0"):
            engine.step()
        assert differences(full_parameters(engine.module), before) == []
        if rank == 1:
            engine.zero_grad()  # of nothing
        with engine.no_sync():
            engine.backward(loss_of(engine, tokens[2, rank]))
        engine.step()
        if rank == 0:
            engine.module.zero_grad()  # a rank's own, until they are reduced
        engine.backward(loss_of(engine, tokens[3, rank]))
        engine.step()
        assert engine.was_step_applied()
        engine.destroy()


def test_what_is_reduced_is_dropped_by_all_ranks_or_none():
    run_ranks(2, _on_one_rank)


def _within_backward():
    engine = make_engine(make_model(), config_of(2))
    loss = loss_of(engine, make_batches(1, 1)[0, 0])
    engine.module.head.weight.register_hook(lambda gradient: engine.zero_grad())
    with pytest.raises(RuntimeError, match="zero_grad.. was called in backward"):
        engine.backward(loss)
    engine.destroy()


def test_it_is_refused_within_backward():
    run_ranks(1, _within_backward)
