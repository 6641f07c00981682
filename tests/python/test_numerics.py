"""Stages 0-3, 1 to 4 ranks, three precisions, accumulation and clipping against plain torch.

The tests assert equal bits: the loss of every micro-step on every rank, and every weight
after every optimizer step, are those of a plain torch loop that reduces in the same order, whatever the stage, the
number of ranks and the precision. That is possible because gathered weights are ordinary contiguous views (the
same kernels run on the same values), the sum over ranks is taken in rank order in fp32, and the optimizer
computes each element by itself. Only the norm is compared with a tolerance: its fp64 sum of squares is
taken by shards, in another order, which moves it by a few units of 2^-53.
"""

import itertools

import pytest
import torch
from comparison import adamw, compare
from devices import needs_a_gpu_each
from plain_torch import PlainTrainer
from ranks import run_ranks
from soak import also, each_once
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

def _matrix(dtype):
    _, world = rank_and_world()
    for accumulation, clipping in itertools.product((1, 3), (0.0, 0.05)):
        of_stage = {}
        for stage in range(4):
            reference = PlainTrainer(
                make_model(), world, adamw, DTYPES[dtype], clipping, accumulation,
                loss_scale=2.0**8 if dtype == "fp16" else 1.0,
            )
            of_stage[stage] = compare(config_of(stage, dtype, accumulation, clipping), reference)
            assert clipping == 0.0 or reference.norm > clipping, "the test must clip"
        for stage in (1, 2, 3):
            for ours, first in zip(of_stage[stage], of_stage[0]):
                assert differences(ours, first) == []


@each_once({"world": [1, 2, 3], "dtype": ["fp32", "bf16", "fp16"]})
def test_every_stage_has_the_bits_of_plain_torch(world, dtype):
    run_ranks(world, _matrix, dtype)


class OneWeight(torch.nn.Module):
    """Two parameters of one element: fewer than there are ranks."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, tokens):
        return self.linear(tokens.float().unsqueeze(-1))


def _square_loss(model, tokens):
    return model(tokens.to(torch.float32)).float().square().mean()


def _fewer_elements_than_ranks():
    _, world = rank_and_world()
    for stage in range(4):
        reference = PlainTrainer(make_model(OneWeight), world, adamw)
        compare(config_of(stage), reference, lambda: make_model(OneWeight), loss_function=_square_loss)


@pytest.mark.parametrize("world", [3, 4])
def test_fewer_elements_than_ranks(world):
    run_ranks(world, _fewer_elements_than_ranks)


def _defaults_of_torch_at_world_one(name):
    """The user's loop in its usual form: foreach where torch chooses it."""
    choose = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    }[name]
    for stage in range(4):
        reference, model = make_model(), make_model()
        optimizer = choose(reference.parameters())
        engine = make_engine(model, config_of(stage, optimizer=False), optimizer=choose(model.parameters()))
        for tokens in make_batches(5, 1)[:, 0] if name == "sgd" else make_batches(1, 1)[:, 0]:
            optimizer.zero_grad()
            expected = loss_of(reference, tokens)
            expected.backward()
            optimizer.step()
            assert train_step(engine, tokens) == expected.item()
        ours = full_parameters(model)
        for key, value in reference.named_parameters():
            if name == "sgd":
                assert torch.equal(ours[key], value), key
            # One unit in the last place of the root moves the update, at most lr, by 1.2e-7 of itself.
            torch.testing.assert_close(ours[key], value.detach(), rtol=1.2e-7, atol=2.4e-7 * 1e-2)
        engine.destroy()


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_one_rank_trains_as_torch_with_its_defaults(name):
    run_ranks(1, _defaults_of_torch_at_world_one, name)


def _dtypes_of_communication_and_accumulation():
    _, world = rank_and_world()
    for reduce_name, accum_name in (("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")):
        for stage in (0, 3):
            reference = PlainTrainer(
                make_model(), world, adamw, torch.bfloat16, accumulation=3,
                reduce_dtype=DTYPES[reduce_name], grad_accum_dtype=DTYPES[accum_name],
            )
            config = config_of(
                stage, "bf16", accumulation=3,
                communication_data_type=reduce_name, data_types={"grad_accum_dtype": accum_name},
            )
            compare(config, reference)


def test_reduced_and_accumulated_in_the_dtypes_of_the_configuration():
    run_ranks(2, _dtypes_of_communication_and_accumulation)


def _over_the_process_group():
    """Two terms have the same sum in any order, so the order of the backend gives the same bits, too."""
    _, world = rank_and_world()
    for stage in range(4):
        for dtype in ("fp32", "bf16"):
            reference = PlainTrainer(make_model(), world, adamw, DTYPES[dtype], accumulation=2)
            compare(config_of(stage, dtype, accumulation=2, strata={"collectives": "c10d"}), reference)


@needs_a_gpu_each
def test_two_ranks_over_the_process_group():
    run_ranks(2, _over_the_process_group)


def _over_peers():
    """Every rank reads its peers' memory itself."""
    _, world = rank_and_world()
    for stage in range(4):
        for dtype in ("fp32", "bf16"):
            reference = PlainTrainer(make_model(), world, adamw, DTYPES[dtype], clipping=0.05, accumulation=2)
            compare(config_of(stage, dtype, accumulation=2, clipping=0.05, strata={"collectives": "peer"}), reference)


@pytest.mark.parametrize("world", [2, *also(3)])
def test_peers(world):
    run_ranks(world, _over_peers)


def _one_parameter_at_a_time(collectives):
    _, world = rank_and_world()
    for dtype, accumulation, clipping in (("fp32", 1, 0.05), ("bf16", 2, 0.0)):
        for live in ({}, {"max_live_bytes": 1}):
            reference = PlainTrainer(make_model(), world, adamw, DTYPES[dtype], clipping, accumulation)
            config = config_of(
                3, dtype, accumulation, clipping, strata={"collectives": collectives, "unit_size": 1, **live},
                zero_optimization={"stage3_allgather_sequential": True},
            )
            compare(config, reference)


@pytest.mark.parametrize(
    "world, collectives",
    [
        (1, "auto"), (2, "auto"), (3, "auto"), (2, "peer"),
        pytest.param(2, "c10d", marks=needs_a_gpu_each),
    ],
)
def test_one_parameter_at_a_time(world, collectives):
    run_ranks(world, _one_parameter_at_a_time, collectives)
