"""Optimizer states on the host and on a drive: the bits of training do not depend on it, and memory is as foreseen."""

import gc
import json
import os
import tempfile

import pytest
import torch
from hf_models import MODELS
from offloaded_training import (
    all_offloaded,
    config_of,
    make_model,
    run_gathering_together,
    train_steps,
    whole_states,
    whole_weights,
)
from ranks import run_ranks
from soak import ALL, also

import strata

PLACES = ["none", "cpu", "nvme"]
STAGING = 3 * 2**20  # bytes: the least, which is more than the configuration below asks for
RING = 12 << 22  # bytes: through which a rank loads and saves checkpoints


def _same_bits(folder, stages, dtype):
    for stage in stages:
        found = {}
        for place in PLACES:
            engine, *_ = strata.initialize(model=make_model(), config=config_of(place, folder, stage, dtype))
            assert engine.zero_cpu_offload() == (place != "none")
            losses = train_steps(engine, 3)
            foreseen = {tier: engine.memory_forecast(tier) for tier in ("device", "host")}
            report = engine.memory_report()
            for kind in ("optimizer state", "master weights", "gradient shards"):
                held = {tier: report.get((tier, kind), (0, 0))[1] for tier in foreseen}
                assert held["host"] == foreseen["host"][kind], (place, stage, kind)
                # Scratch of reductions that end early is used again.
                assert held["device"] <= foreseen["device"][kind], (place, stage, kind)
                assert place == "none" or held["device"] == 0 or kind == "gradient shards"
            if place == "nvme":
                staged = foreseen["host"]["staging"] - RING
                assert report["host", "staging"][1] >= staged >= STAGING
            found[place] = losses, whole_weights(engine), whole_states(engine)
            engine.destroy()
        losses, weights, states = found["none"]
        for place in PLACES[1:]:
            assert found[place][0] == losses, (stage, place)
            assert all(torch.equal(a, b) for a, b in zip(found[place][1], weights)), (stage, place)
            assert all(torch.equal(a, b) for a, b in zip(found[place][2], states)), (stage, place)
        torch.distributed.barrier()
        assert os.listdir(folder) == [], "folders are removed at destroy"
        torch.distributed.barrier()


@pytest.mark.parametrize("world, dtype", [(2, "fp32"), (3, "bf16"), *also((1, "bf16"), (2, "fp16"))])
def test_the_place_changes_no_bit(world, dtype, tmp_path):
    run_ranks(world, _same_bits, str(tmp_path), [1, 2, 3] if world == 2 else [3], dtype)


def _require_those_of_the_device(found):
    """Losses and tensors by (place of weights, place of states)."""
    expected = found.pop(("none", "none"))
    for place, (losses, *values) in found.items():
        assert losses == expected[0], place
        for mine, theirs in zip(values, expected[1:]):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs)), place


def _same_bits_wherever_weights_rest(folder, dtype):
    found = {}
    for param, states in [("none", "none"), ("cpu", "none"), ("nvme", "cpu"), ("cpu", "nvme"), ("nvme", "nvme")]:
        engine, *_ = strata.initialize(model=make_model(), config=all_offloaded(param, states, folder, dtype))
        assert engine.zero_offload_param() == (None if param == "none" else {"device": param})
        losses = train_steps(engine, 3)
        report, forecast = engine.memory_report(), engine.memory_forecast("host")
        weights = {tier: report.get((tier, "weights"), (0, 0))[1] for tier in ("device", "host")}
        assert (weights["device"] == 0) == (param != "none"), (param, weights)
        assert weights["host"] == forecast["weights"] and (weights["host"] > 0) == (param == "cpu"), (param, weights)
        with torch.no_grad():
            engine.eval()
            torch.manual_seed(5)
            losses.append(engine(torch.randint(0, 3000, (2, 12))).float().sum().item())
            engine.train()
        local = [strata.utils.safe_get_local_fp32_param(p).cpu() for p in engine.module.parameters()]
        found[param, states] = losses, whole_weights(engine), whole_states(engine), local
        engine.destroy()
    _require_those_of_the_device(found)


@pytest.mark.parametrize("world, dtype", [(2, "fp16"), *also((1, "bf16"), (1, "fp32"), (2, "fp32"), (3, "bf16"))])
def test_where_weights_rest_changes_no_bit(world, dtype, tmp_path):
    run_gathering_together(world, _same_bits_wherever_weights_rest, str(tmp_path), dtype)


def _trains_from_files(source, drive):
    found = {}
    for param, states in [("none", "none"), ("none", "cpu"), ("cpu", "cpu"), ("nvme", "nvme")]:
        engine, *_ = strata.load_pretrained(source, all_offloaded(param, states, drive))
        engine.train()
        losses = []
        for step in range(4):
            torch.manual_seed(step)
            ids = torch.randint(0, 64, (2, 8)).to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found[param, states] = losses, whole_weights(engine), whole_states(engine)
        engine.destroy()
    _require_those_of_the_device(found)


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_from_files_trains_to_the_same_bits_wherever_it_rests(world, tmp_path):
    (tmp_path / "drive").mkdir()
    torch.manual_seed(0)
    MODELS["qwen3"].build().save_pretrained(tmp_path / "source")
    run_gathering_together(world, _trains_from_files, tmp_path / "source", str(tmp_path / "drive"))


def _moves_weights(drive, folder):
    for before, after in [("none", "nvme"), ("nvme", "cpu"), ("cpu", "none")]:
        engine, *_ = strata.initialize(model=make_model(), config=all_offloaded(before, "cpu", drive))
        train_steps(engine, 2)
        engine.save_checkpoint(folder, tag=before)
        engine.save_16bit_model(folder + "/whole_" + before)
        expected = train_steps(engine, 2, first=2), whole_weights(engine), whole_states(engine)
        engine.destroy()
        engine, *_ = strata.initialize(model=make_model(), config=all_offloaded(after, "nvme", drive))
        engine.load_checkpoint(folder, tag=before)
        assert train_steps(engine, 2, first=2) == expected[0], (before, after)
        for mine, theirs in zip(whole_weights(engine) + whole_states(engine), expected[1] + expected[2]):
            assert torch.equal(mine, theirs), (before, after)
        engine.destroy()


def test_checkpoints_move_between_places_of_weights(tmp_path):
    (tmp_path / "drive").mkdir()
    run_gathering_together(2, _moves_weights, str(tmp_path / "drive"), str(tmp_path / "saved"))


def _few_buffers(folder):
    """Hundreds of tensors, one of them far larger than a buffer: the user need not adapt buffer_count and buffer_size
    to the model."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(32, 32) for _ in range(60)]
    model = torch.nn.Sequential(torch.nn.Embedding(200_000, 32), *layers)
    config = all_offloaded("nvme", "nvme", folder, stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0)
    for section in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][section] |= {"buffer_count": 5, "buffer_size": 4096}
    with tempfile.TemporaryFile("w+") as said:
        stderr = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            engine, *_ = strata.initialize(model=model, config=config)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        said.seek(0)
        told = said.read()
    lines = [line for line in told.splitlines() if "staged through 3.00 MiB, although buffer_count times" in line]
    assert len(lines) == (2 if engine.global_rank == 0 else 0), told
    for _ in range(2):
        loss = engine(torch.arange(64).reshape(2, 32)).float().square().mean()
        engine.backward(loss)
        engine.step()
    with strata.zero.GatheredParameters(list(engine.module.parameters())):
        assert all(p.isfinite().all() for p in engine.module.parameters())
    staged = engine.memory_report()["host", "staging"][0]
    assert 0 <= staged - 2 * STAGING < 4096, "the least of each; and a few words"
    engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_buffers_follow_the_tensors(world, tmp_path):
    run_gathering_together(world, _few_buffers, str(tmp_path))


def _default_buffers(folder):
    """With the default buffers DeepSpeed takes gigabytes. The engine takes no more staging memory than caches the
    states on the drive, and does not read them again."""
    config = all_offloaded("nvme", "nvme", folder)
    for section in ("offload_param", "offload_optimizer"):
        del config["zero_optimization"][section]["buffer_count"], config["zero_optimization"][section]["buffer_size"]
    engine, *_ = strata.initialize(model=make_model(), config=config)
    train_steps(engine, 3)
    report = engine.memory_report()
    staged, peak = report["host", "staging"]
    assert staged == engine.memory_forecast("host")["staging"] - RING and peak >= staged
    on_drive = report["nvme", "total"][0]
    largest = 81 / 8 * 30_000 * 48 / engine.world_size  # bytes of the embedding's states on a rank
    kept = max(1.5 * on_drive, 2 * 3 * 1.02 * largest)  # a third of the memory that weights and states share is leased
    assert STAGING < on_drive < staged < kept + STAGING, (staged, on_drive)
    assert engine.step_report()["offload"]["links"]["read"]["bytes"] == 0
    engine.destroy()
    # One budget for both, in place of the buffers.
    engine, *_ = strata.initialize(model=make_model(), config=config | {"strata": {"staging": "7MiB"}})
    train_steps(engine, 2)
    staged = engine.memory_report()["host", "staging"][0]
    assert staged == engine.memory_forecast("host")["staging"] - RING and 0 <= staged - 7 * 2**20 < 4096
    engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_buffers_are_no_larger_than_what_is_staged(world, tmp_path):
    run_gathering_together(world, _default_buffers, str(tmp_path))


def _starts(folder):
    """Engines that come and go leave no file, descriptor or memory behind."""

    def resident():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    config = all_offloaded("nvme", "nvme", folder)
    seen = []
    starts = 100 if ALL else 60
    for start in range(starts):
        engine, *_ = strata.initialize(model=make_model(rows=3000), config=config)
        if start % 10 == 0:
            train_steps(engine, 1)
        engine.destroy()
        del engine
        if start % 20 == 19:
            gc.collect()
            seen.append((len(os.listdir("/proc/self/fd")), os.listdir(folder), resident()))
    assert {fds for fds, _, _ in seen} == {seen[0][0]}, seen
    assert all(files == [] for _, files, _ in seen), seen
    assert seen[-1][2] - seen[1][2] < (starts - 40) * 400, "kB, of starts with 4 MB of weights and states each"


def test_many_starts_leave_nothing_behind(tmp_path):
    run_ranks(1, _starts, str(tmp_path))


def _moves(drive, folder):
    """Saved with states at one place, loaded at another: training goes on as it would have."""
    for before, after in [("none", "nvme"), ("nvme", "cpu"), ("cpu", "none")]:
        engine, *_ = strata.initialize(model=make_model(), config=config_of(before, drive, 3))
        train_steps(engine, 2)
        engine.save_checkpoint(folder, tag=before)
        expected = train_steps(engine, 2, first=2), whole_weights(engine), whole_states(engine)
        engine.destroy()
        engine, *_ = strata.initialize(model=make_model(), config=config_of(after, drive, 2))
        engine.load_checkpoint(folder, tag=before)
        assert train_steps(engine, 2, first=2) == expected[0], (before, after)
        for mine, theirs in zip(whole_weights(engine) + whole_states(engine), expected[1] + expected[2]):
            assert torch.equal(mine, theirs), (before, after)
        engine.destroy()


def test_checkpoints_move_between_places(tmp_path):
    (tmp_path / "drive").mkdir()
    run_ranks(2, _moves, str(tmp_path / "drive"), str(tmp_path / "saved"))


def _bad_paths(folder):
    for path, told in [
        (folder + "/missing", "missing"),
        (folder + "/file", "file"),
    ]:
        config = config_of("nvme", path, 2)
        with pytest.raises(strata.Error, match=told):
            strata.initialize(model=make_model(), config=config)
    if torch.distributed.get_world_size() > 1:
        with pytest.raises(strata.ConfigError, match="offload_param: weights that are offloaded are sharded over all"):
            strata.initialize(model=make_model(), config=all_offloaded("cpu", "none", folder, mics_shard_size=1))


def test_what_cannot_be_is_told_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")
    run_ranks(2, _bad_paths, str(tmp_path))


def test_what_is_offloaded_is_foreseen(tmp_path):
    """The values of ``strata.memory_forecast``, for a job that does not run."""
    with torch.device("meta"):
        model = make_model()
    told = {
        place: [strata.memory_forecast(model, json.dumps(config_of(place, tmp_path, 3)), 2, tier=tier)
                for tier in ("device", "host", "nvme")]
        for place in PLACES
    }
    assert told["none"][1]["optimizer state"] == told["none"][1]["gradient shards"] == 0
    assert told["cpu"][0]["optimizer state"] == 0 < told["cpu"][1]["optimizer state"]
    assert told["cpu"][1]["optimizer state"] == told["none"][0]["optimizer state"]
    assert RING <= told["none"][1]["staging"] < RING + 4096
    assert STAGING <= told["nvme"][1]["staging"] - RING < STAGING + 4096
    assert told["nvme"][2]["total"] > told["nvme"][2]["optimizer state"] >= told["none"][0]["optimizer state"]
    assert told["none"][2]["total"] == told["cpu"][2]["total"] == 0
