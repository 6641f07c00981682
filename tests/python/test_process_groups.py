"""When a program ends, no thread of gloo is left, whatever still refers to an engine or to a group: such a thread could
need an interpreter that has ended."""

import atexit
import gc
import sys
from pathlib import Path
from unittest import mock

import pytest
import strata
import torch
from devices import ON_GPU
from ranks import run_ranks
from soak import each_once
from tiny_models import config_of, make_batches, make_engine, make_model, rank_and_world, train_step
from torch import distributed

pytestmark = pytest.mark.skipif(ON_GPU, reason="groups of the host")
ENDS = {
    "nothing": lambda engine: None,
    "the script destroys its groups": lambda engine: distributed.destroy_process_group(),
    "the engine is destroyed": lambda engine: engine.destroy(),
    "an exception": lambda engine: setattr(sys, "last_value", ValueError("no more data")),
}


def gloo_threads():
    """The number of this process's threads that work for groups of gloo."""
    return sum((task / "comm").read_text().startswith("pt_gloo") for task in Path("/proc/self/task").iterdir())


def _reduced(value):
    """Reduces over the default group, as scripts do: a thread of gloo releases the tensor, which Python owns."""
    tensor = torch.tensor(float(value))
    distributed.all_reduce(tensor)
    return tensor.item()


def _ends(how, collectives, own_group):
    if own_group:
        distributed.init_process_group("gloo")
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(3, strata={"collectives": collectives}))
    train_step(engine, make_batches(1, world)[0][rank])
    ring = [engine, distributed.group.WORLD]
    ring.append(ring)  # only the garbage collector frees this
    sys.modules["what this program has"] = ring
    assert _reduced(1) == world and gloo_threads() > 0
    ENDS[how](engine)
    atexit._run_exitfuncs()  # after these the interpreter goes
    left = gloo_threads()
    if collectives == "c10d":
        with pytest.raises(strata.CommError, match="have let their process group go"):
            engine._collectives.barrier()
        with pytest.raises(strata.CommError, match="have let their process group go"):
            engine._collectives.all_gather_text("")
        assert engine.world_size == world and engine.collectives_name == "gloo"
    return left


@each_once({"own_group": [True, False], "collectives": ["shm", "c10d"], "how": ENDS})
def test_no_thread_of_gloo_is_left_at_the_end(how, collectives, own_group):
    assert run_ranks(2, _ends, how, collectives, own_group) == [0, 0]


def _one_engine_after_another(drops):
    counts = []
    for _ in range(3):
        engine = make_engine(make_model(), config_of(3, strata={"collectives": "c10d"}))
        engine.module(make_batches(1, 2)[0][0])
        if not drops:
            engine.destroy()
            counts.append(gloo_threads())
        else:
            counts.append(gloo_threads())
            del engine
            gc.collect()
    return counts


@pytest.mark.parametrize("drops", [False, True], ids=["destroyed", "dropped"])
def test_threads_go_with_an_engine(drops):
    for counts in run_ranks(2, _one_engine_after_another, drops):
        assert counts == counts[:1] * 3


def _names_of_groups():
    names = []

    class Noted(distributed.PrefixStore):
        def __init__(self, name, store):
            names.append(name)
            super().__init__(name, store)

    with mock.patch.object(distributed, "PrefixStore", Noted):
        for _ in range(2):
            config = config_of(3, zero_optimization={"mics_shard_size": 2}, strata={"collectives": "c10d"})
            make_engine(make_model(), config).destroy()
    return [name for name in names if name.startswith("strata/gloo/")]


def test_a_group_has_another_name_than_one_that_is_gone():
    """Addresses of the one are in the store still."""
    names, *others = run_ranks(4, _names_of_groups)
    assert len(set(names)) == len(names) > 2
    for other in others:
        assert len(set(other)) == len(other) == len(names)
