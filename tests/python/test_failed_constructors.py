"""A constructor that fails within zero.Init leaves nothing: no shard, no memory of the host, no file on a drive."""

import gc
import os
import time
import weakref
from pathlib import Path

import pytest
import strata
import torch
from devices import ON_GPU, needs_a_gpu_each
from ranks import run_ranks
from replayed_models import config_of_birth
from soak import each_once
from strata.deferred_init import DeferredInit
from strata.model import constructors
from strata.model.constructors import ConstructorReads, ConstructorWatch, open_reads
from strata.model.recording import Recording
from strata.zero import GatheredParameters, Init
from test_errors import error_of
from tiny_models import rank_and_world
from torch import nn

MIB = 1 << 20


def _resident():
    """Bytes of data of this process, shared memory included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


class Half(nn.Module):
    """Fails when its children are sharded, of which it has read one, written to one, and kept a view of one."""

    def __init__(self, given=None, reads=True):
        super().__init__()
        self.given = given
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))
        if reads:
            nn.init.ones_(self.layers[1].weight)
            nn.init.ones_(self.layers[0].weight)
            self.view = self.layers[0].weight.data[:2]
        self.own = nn.Parameter(torch.zeros(1024, 1024))
        self.last = nn.Linear(4, 4)
        raise ValueError("half way")


class Instead(nn.Module):
    """Does with something else when a part of it fails."""

    def __init__(self, failed):
        super().__init__()
        self.before = nn.Linear(1024, 8)
        nn.init.orthogonal_(self.before.weight)
        try:
            self.part = Half(reads=False)
        except ValueError as error:
            failed.append(error)
            self.part = nn.Linear(8, 8, bias=False)
        nn.init.constant_(self.part.weight, 3.0)


def _watched_cores():
    """Returns a list that gets a weak reference to every sharding core made from now on."""
    cores, made = [], DeferredInit._make_core

    def make(deferred, *arguments):
        core = made(deferred, *arguments)
        cores.append(weakref.ref(core))
        return core

    DeferredInit._make_core = make
    return cores


def _left_over(replay_above, place, folder):
    """Failed constructors' modules are still referenced: returns their shards, files and MiB, and the message of their
    parameters."""
    offload = {} if place == "none" else {"offload_param": {"device": place, "nvme_path": str(folder)}}
    config = config_of_birth("1MiB", replay_above, **offload)
    cores = _watched_cores()
    for _ in range(2):  # buffers and libraries are there after the first
        errors, before, count = [], _resident(), len(cores)
        with Init(config_dict_or_path=config):
            for reads in (True, False):
                with pytest.raises(ValueError, match="half way") as caught:
                    Half(reads=reads)
                errors.append(caught.value)  # whose traceback keeps the module
        alive = [core for core in cores[count:] if core() is not None]
        viewed = _module_of(errors[0])
        if alive:  # the one with a view
            assert torch.equal(viewed.view.cpu(), torch.ones(2, 1024)) and len(alive) == 1
            del viewed.view
            with Init(config_dict_or_path=config):
                pass
            alive = [core for core in cores[count:] if core() is not None]
    module = _module_of(errors[1])
    sizes = [p.numel() for p in module.parameters()]
    grown = _resident() - before
    del caught, errors[:], viewed
    said = error_of(strata.initialize, model=module, config=config) if 0 in sizes else ""
    files = [name for _, _, names in os.walk(folder) for name in names]
    return len(cores) - count, len(alive), files, grown / MIB, sizes, said


def _module_of(error):
    return error.__traceback__.tb_next.tb_frame.f_locals["module"]


@each_once({"replay_above": [0, 1 << 30], "world": [2, 3]})
def test_shards_of_a_failed_constructor_go(world, replay_above, tmp_path):
    for made, alive, _, grown, sizes, said in run_ranks(world, _left_over, replay_above, "none", tmp_path):
        assert alive == 0 and (made > 0 or replay_above == 0)
        assert set(sizes) <= {0, 4, 16, 1024, 1024 * 1024}
        if replay_above:
            assert sum(sizes) <= 1024 * 1024 + 20  # its own and the last, which were whole
            assert "are empty" in said
        if not ON_GPU:
            assert grown < 40  # five matrices of 4 MiB and two kept views; all of it is 40 of each


@needs_a_gpu_each
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_offloaded_shards_of_a_failed_constructor_go(place, tmp_path):
    for made, alive, files, _, _, _ in run_ranks(2, _left_over, 1 << 30, place, tmp_path):
        assert made > 0 and alive == 0 and files == []


def _behind(folder):
    """(Shards that are left after a failure for which rank 0 does not wait, and after the next context.)"""
    rank, _ = rank_and_world()
    constructors._PATIENCE_S = 0.0 if rank == 0 else 60.0

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)
            nn.init.ones_(self.inner.weight)  # which reads rank 0's values
            while rank == 1 and not (folder / "failed").exists():
                time.sleep(0.01)
            raise ValueError("half way")

    cores = _watched_cores()
    with Init(config_dict_or_path=config_of_birth("1MiB", 1 << 30)):
        with pytest.raises(ValueError, match="half way"):
            Late()
        left = sum(core() is not None for core in cores)
        (folder / "failed").touch()
        nn.Linear(4, 4)  # where they meet
    del cores[1:]
    return left, sum(core() is not None for core in cores)


def test_a_rank_keeps_what_one_that_is_behind_may_read(tmp_path):
    assert run_ranks(2, _behind, tmp_path) == [(1, 0), (0, 0)]


def _memory_of_one_rank():
    alive = []
    with Init(config_dict_or_path=config_of_birth("1MiB", 1 << 30)):
        try:
            Half()
        except ValueError as error:
            module = _module_of(error)
            alive = [weakref.ref(p) for p in module.parameters()]
            del module
    gc.collect()
    return len(alive), sum(reference() is not None for reference in alive)


def test_one_rank_frees_what_a_failed_constructor_made():
    assert run_ranks(1, _memory_of_one_rank) == [(11, 0)]


def _others():
    """A constructor fails. Modules built before it keep their values, and so do modules of a constructor that goes on,
    and parts that were built elsewhere."""
    rank, world = rank_and_world()
    elsewhere = nn.Linear(8, 8)
    nn.init.constant_(elsewhere.weight, 5.0)
    failed = []
    with Init(config_dict_or_path=config_of_birth("4KiB", 64)):
        first = nn.Linear(8, 8, bias=False)
        nn.init.constant_(first.weight, 2.0)
        with pytest.raises(ValueError, match="half way"):
            Half(given=nn.ModuleList([first, elsewhere]))
        model = Instead(failed)
    found = {}
    with GatheredParameters([first.weight, elsewhere.weight, *model.parameters()]):
        for name, weight in {"first": first.weight, "elsewhere": elsewhere.weight, "part": model.part.weight}.items():
            found[name] = weight.unique().tolist()
        product = model.before.weight @ model.before.weight.t()
        found["before"] = torch.allclose(product, torch.eye(8, device=product.device), atol=1e-4)
    assert len(failed) == 1
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_others_built_is_whole_after_a_failure(world):
    expected = {"first": [2.0], "elsewhere": [5.0], "part": [3.0], "before": True}
    assert run_ranks(world, _others) == [expected] * world


def _failing_ends():
    """Lets each action at the end of a context fail in turn; returns the action's class and its leftovers."""
    found = []
    for kind, name in ((Recording, "close"), (ConstructorWatch, "remove"), (ConstructorReads, "close"),
                       (DeferredInit, "close")):
        constructor, end = nn.Linear.__dict__["__init__"], getattr(kind, name)

        def ends_and_fails(self, *args, end=end, **kwargs):
            end(self, *args, **kwargs)
            raise RuntimeError("cannot end")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, name, ends_and_fails)
            with pytest.raises(RuntimeError, match="cannot end"):
                with Init(config_dict_or_path=config_of_birth("4KiB", 64)):
                    nn.Linear(8, 8)
        left = [nn.Linear.__dict__["__init__"] is not constructor, open_reads() is not None,
                "__init_subclass__" in nn.Module.__dict__, nn.Linear(8, 8).weight.numel() != 64]
        found.append((kind.__name__, left))
    return found


def test_a_context_whose_end_fails_leaves_no_patch():
    for kind, left in run_ranks(1, _failing_ends)[0]:
        assert left == [False] * 4, kind
