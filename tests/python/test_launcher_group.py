"""A default process group that is not the launcher's is an error that names both."""

import os

import pytest
import strata
import torch.distributed as dist
from ranks import run_ranks
from strata.compat import communication
from tiny_models import config_of, make_model, rank_and_world


def _each_alone():
    rank, _ = rank_and_world()
    own = ("has 1 ranks, of which this process is rank 0", f"WORLD_SIZE=2 and RANK={rank}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for call in (
        lambda: strata.initialize(model=make_model(), config=config_of(2)),
        lambda: strata.initialize(model=make_model(), config=config_of(2), dist_init_required=False),
        lambda: strata.zero.Init(),
        lambda: communication.init_distributed(),
    ):
        with pytest.raises(strata.UsageError) as error:
            call()
        assert all(text in str(error.value) for text in own), error.value


def test_ranks_that_would_train_each_alone():
    run_ranks(2, _each_alone)


def _numbered_otherwise():
    rank, world = rank_and_world()
    dist.init_process_group("gloo", rank=1 - rank, world_size=world)
    with pytest.raises(strata.UsageError, match=f"rank {1 - rank}, .*RANK={rank}"):
        strata.initialize(model=make_model(), config=config_of(2))
    for name in ("RANK", "WORLD_SIZE"):  # a launcher of the script's own
        del os.environ[name]
    engine, *_ = strata.initialize(model=make_model(), config=config_of(2))
    assert (engine.global_rank, engine.world_size) == (1 - rank, world)
    engine.destroy()


def test_ranks_in_another_order_than_the_launchers():
    run_ranks(2, _numbered_otherwise)


def _of_more_ranks():
    rank, world = rank_and_world()
    dist.init_process_group("gloo")
    os.environ["WORLD_SIZE"] = "1"
    with pytest.raises(strata.UsageError, match="has 2 ranks, .*WORLD_SIZE=1"):
        strata.initialize(model=make_model(), config=config_of(2))
    os.environ["WORLD_SIZE"] = "two"
    with pytest.raises(strata.UsageError, match="WORLD_SIZE of the environment must be a whole number, .*'two'"):
        strata.initialize(model=make_model(), config=config_of(2))


def test_a_launcher_that_knows_of_fewer_ranks():
    run_ranks(2, _of_more_ranks)
