"""zero.Init where ranks refer to different parameters while constructors run."""

import gc

import pytest
import torch
from devices import needs_a_gpu_each
from ranks import run_ranks
from strata.zero import Init
from test_zero_init import Tied
from tiny_models import config_of, differences, full_parameters, make_engine, rank_and_world
from torch import nn


class Cycle:
    """Keeps its arguments until the garbage collector runs."""

    def __init__(self, *kept):
        self.kept, self.itself = kept, self


class Referring(nn.Module):
    """On rank 1 alone, references remain to parameters that the constructor has made and read, in each of the ways."""

    def __init__(self, kept):
        super().__init__()
        rank = rank_and_world()[0]
        self.first = nn.Parameter(torch.full((6,), 1.0 + rank))
        if rank == 1:
            Cycle(self.first)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        nn.init.constant_(self.blocks[0].weight, 1.0 + rank)
        if rank == 1:
            Cycle(self.blocks[0].weight)
            try:
                self._fail(self.blocks[1].bias)
            except ValueError as error:
                kept.append(error)  # with its frames, and their references
            kept.append(self.blocks[2].weight.data[0])  # a view that outlives the constructor
        else:
            self.blocks[1].bias, self.blocks[2].weight
        nn.init.constant_(self.blocks[1].bias, 2.0 + rank)
        nn.init.constant_(self.blocks[2].weight, 3.0 + rank)
        nn.init.constant_(self.blocks[3].weight, 4.0 + rank)
        self.last = nn.Linear(4, 4)
        nn.init.constant_(self.blocks[0].weight, 5.0 + rank)

    def _fail(self, bias):
        raise ValueError(f"a bias of {bias.numel()} elements")


def _references_of_one_rank(transports):
    rank, world = rank_and_world()
    config = {**config_of(3), "strata": {"collectives": transports, "timeout_s": 30}}
    kept = []
    gc.disable()  # else it may free the cycles at any point
    with Init(config_dict_or_path=config):
        model = Referring(kept)
        dropped = nn.Sequential()
        dropped.append(model.last)
        if rank == 1:
            Cycle(dropped)
        del dropped
        orphans = Tied([])
        if rank == 1:
            Cycle(orphans)
        del orphans
        tied = Tied([])
    values = full_parameters(model)
    assert values["first"].eq(1.0).all() and values["blocks.0.weight"].eq(5.0).all()
    assert values["blocks.1.bias"].eq(2.0).all() and values["blocks.3.weight"].eq(4.0).all()
    assert values["blocks.2.weight"].eq(3.0).all()
    kept.clear()
    gc.enable()
    gc.collect()
    assert tied.head.weight is tied.embedding.weight
    engine = make_engine(model, config)
    assert differences(full_parameters(engine.module), values) == []


@needs_a_gpu_each
@pytest.mark.parametrize("world, transports", [(2, "shm"), (2, "c10d"), (3, "c10d")])
def test_references_that_one_rank_alone_has(world, transports):
    run_ranks(world, _references_of_one_rank, transports)
