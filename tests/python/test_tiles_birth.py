"""Memory of a process whose engine cuts parameters into tiles that are whole in zero.Init's shards, or on the host."""

from pathlib import Path

import pytest
import strata
import torch
from devices import ON_GPU
from ranks import run_ranks
from replayed_models import config_of_birth
from strata.model.tiles import tiles_of
from strata.zero import Init
from tiny_models import full_parameters
from torch import nn

MIB = 1 << 20
ROWS, WIDTH = 4096, 4096  # 64 MiB


def _bytes(*keys):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(keys))


def _config():
    config = config_of_birth("1MiB", replay_above=1 << 16)
    config["strata"]["tiles"] = {"max_gather": 2 * MIB}
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return config


def _model():
    torch.manual_seed(0)
    with Init(config_dict_or_path=_config()):
        return nn.Linear(WIDTH, ROWS, bias=False)


def _start():
    """[peak MiB, MiB in the end] of data beyond zero.Init's shards, in the second of two starts; the engine's bytes on
    the device; and whether values are the same."""
    for _ in range(2):  # buffers and libraries are there after the first
        model = _model()
        wanted = full_parameters(model)["weight"].clone()
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        before, resident = _bytes("RssAnon:", "RssShmem:"), _bytes("VmRSS:")
        engine, *_ = strata.initialize(model=model, config=_config())
        grown = [_bytes("VmHWM:") - resident, _bytes("RssAnon:", "RssShmem:") - before]
        held = engine.memory_report()["device", "total"]
        assert len(tiles_of(model.weight)) == 32
        same = torch.equal(full_parameters(model)["weight"].cpu(), wanted.cpu())
        engine.destroy()
        del engine, model, wanted
    return [each / MIB for each in grown], held, same


@pytest.mark.skipif(ON_GPU, reason="bench/bench_deferred_init.py measures it there")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_cut_holds_one_more_shard_at_the_most_and_none_in_the_end(world):
    """A second shard for a while takes less memory than the gradient and the moments take later."""
    shard = 64 / world
    for (most, end), (held, peak), same in run_ranks(world, _start):
        assert same
        assert most < shard + 8 and end < 8, (most, end)  # chunks of 1 MiB, and the memory of lists and threads
        assert held <= shard * MIB + 32 * 4096 and peak <= held + 2 * MIB
