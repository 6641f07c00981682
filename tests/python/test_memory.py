"""Bytes held at stage 3, by the ledger: a 1/N part of everything, and the declared live bytes on top."""

import pytest
import strata
import torch
from ranks import run_ranks
from soak import each_once
from tiny_models import TinyModel, config_of, loss_of, make_batches, make_engine, make_model, rank_and_world, train_step

WIDTH, BLOCKS = 64, 6


def _kinds(engine):
    """{kind: bytes held}, without the kernels' workspace."""
    report = engine.memory_report().items()
    return {kind: held for (tier, kind), (held, _) in report if held and kind not in ("total", "workspace")}


def _steps(engine, steps, seed=1):
    rank, world = rank_and_world()
    for tokens in make_batches(steps, world, seed=seed):
        train_step(engine, tokens[rank])


def _shares(dtype, live_bytes):
    _, world = rank_and_world()
    config = config_of(3, dtype, live_bytes=live_bytes)
    engine = make_engine(make_model(width=WIDTH, blocks=BLOCKS), config)
    width = 2 if dtype == "bf16" else 4
    units = engine.core.units()
    numel = sum(p.ds_numel for p in engine.module.parameters())
    shard = sum(u["shard_numel"] for u in units)
    # Padding: a parameter starts at a multiple of 256 bytes of its unit, a shard is one.
    aligned = 256 // width
    padding = sum(aligned * (len(u["params"]) / world + 1) for u in units)
    assert numel / world <= shard <= numel / world + padding
    engine.core.reset_memory_peaks()
    _steps(engine, 4)
    largest = max(u["flat_bytes"] for u in units)
    return {
        "shard": shard, "width": width, "largest": largest, "units": units,
        "peaks": {kind: peak for (_, kind), (_, peak) in engine.memory_report().items() if peak},
    }


@each_once({"world": [3, 2], "dtype": ["fp32", "bf16"]})
def test_each_rank_holds_its_share(world, dtype):
    live = 100_000
    for told in run_ranks(world, _shares, dtype, live):
        shard, peaks = told["shard"], told["peaks"]
        assert peaks["weights"] <= told["width"] * shard + 4096 * len(told["units"])  # units start on pages
        # Beside bf16 weights, their remainders: 17 bits each, a unit's in whole lines of the cache.
        masters = 17 * shard // 8 if dtype == "bf16" else 0
        assert masters <= peaks.get("master weights", 0) <= masters + 63 * len(told["units"]) * bool(masters)
        assert peaks["optimizer state"] == 8 * shard
        assert peaks["gathered weights"] <= max(live, 2 * told["largest"])
        assert 4 * shard <= peaks["gradient shards"] <= 4 * shard + 4096 * len(told["units"])


def _born_sharded():
    config = config_of(3, live_bytes=1)
    with strata.zero.Init(config_dict_or_path=config):
        model = make_model(TinyModel, width=WIDTH, blocks=BLOCKS)
    engine = make_engine(model, config)
    _, world = rank_and_world()
    units = engine.core.units()
    return {
        "whole": 4 * sum(p.ds_numel for p in model.parameters()),
        "shard": 4 * sum(u["shard_numel"] for u in units),
        "largest": max(u["flat_bytes"] for u in units),
        "peaks": {kind: peak for (_, kind), (_, peak) in engine.memory_report().items()},
    }


def test_a_model_that_is_built_sharded_is_never_whole():
    for told in run_ranks(2, _born_sharded):
        assert told["peaks"]["gathered weights"] <= 2 * told["largest"]


def _steady(live_bytes, accumulation):
    config = config_of(3, "bf16", accumulation, live_bytes=live_bytes)
    engine = make_engine(make_model(width=WIDTH, blocks=BLOCKS), config)
    _steps(engine, 3 * accumulation)
    engine.core.reset_memory_peaks()
    before, peaks = _kinds(engine), None
    for seed in range(3):
        _steps(engine, accumulation, seed)
        rank, world = rank_and_world()
        with torch.no_grad():
            loss_of(engine, make_batches(1, world)[0, rank])
        report = {kind: peak for (tier, kind), (_, peak) in engine.memory_report().items() if tier == "device"}
        # How many gradients are on their way at once depends on when reductions end.
        del report["gradients"], report["total"]
        assert peaks is None or report == peaks, "a later step took more than an earlier one"
        peaks = report
    after = _kinds(engine)
    return before, after, engine.memory_forecast()


@each_once({"accumulation": [1, 3], "live_bytes": ["auto", 100_000, 1]})
def test_steps_allocate_nothing_new(live_bytes, accumulation):
    for before, after, forecast in run_ranks(2, _steady, live_bytes, accumulation):
        growing = {k: (before.get(k, 0), v) for k, v in after.items() if v > before.get(k, 0)}
        assert not growing or set(growing) <= {"gathered weights", "gradients"}
        assert all(held <= forecast[kind] for kind, held in after.items())


WIDE = 256  # so that a weight of a block is larger than parameters that share a unit


def _gathered_at_a_time(sequential, more=None):
    """{name: bytes}, with the last step's use, of a model of which nothing stays gathered."""
    bounds = {"stage3_allgather_sequential": sequential, "stage3_max_live_parameters": 1}
    config = config_of(3, zero_optimization={"stage": 3, **bounds, **(more or {})})
    engine = make_engine(make_model(width=WIDE, blocks=BLOCKS), config)
    _steps(engine, 3)
    units = {unit["name"]: -(-unit["flat_bytes"] // 4096) * 4096 for unit in engine.core.units()}
    _, peak = engine.memory_report()["device", "gathered weights"]
    return {"peak": peak, "units": units, "uses": engine.step_report()["uses"]}


def test_one_by_one_the_parameter_in_use_and_the_next_are_gathered():
    for told in run_ranks(2, _gathered_at_a_time, True):
        units = told["units"]
        assert "layers.0.up.weight" in units and "layers.0.down.weight" in units
        small = sum(size for name, size in units.items() if not name.endswith(("up.weight", "down.weight")))
        assert told["peak"] <= units["layers.0.up.weight"] + units["layers.0.down.weight"] + small
    for by_blocks in run_ranks(2, _gathered_at_a_time, False):
        assert by_blocks["peak"] >= 1.5 * told["peak"]


def test_one_by_one_nothing_is_fetched_ahead_where_the_bucket_is_empty():
    for told in run_ranks(2, _gathered_at_a_time, True, {"stage3_prefetch_bucket_size": 0}):
        # Forward and backward fetch every unit, but backward does without the embedding's.
        assert told["uses"]["prefetched"] == 0 and told["uses"]["late"] == 2 * len(told["units"]) - 1


class Neighbours(torch.nn.Module):
    """Small modules that are no blocks, and so may share a unit."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return hidden


def _whole_with_bounds_of_zero():
    names = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
    bounds = dict.fromkeys((*names, "stage3_param_persistence_threshold"), 0)
    model = make_model(Neighbours)
    engine = make_engine(model, config_of(3, zero_optimization={"stage": 3, **bounds}))
    for _ in range(3):
        engine.backward(engine(torch.ones(4, WIDTH, device=engine.device)).square().mean())
        engine.step()
    sizes = {-(-unit["flat_bytes"] // 4096) * 4096 for unit in engine.core.units()}
    gathered = engine.memory_report()["device", "gathered weights"]
    return len(engine.core.units()), sizes, gathered, engine.memory_forecast()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_with_bounds_of_zero_nothing_is_whole_but_what_is_in_use(world):
    for units, sizes, (_, peak), forecast in run_ranks(world, _whole_with_bounds_of_zero):
        assert units == 8
        assert peak == forecast["gathered weights"] == (max(sizes) if world > 1 else 0)


def _kept_by_default(sequential, more=None):
    config = config_of(3, zero_optimization={"stage": 3, "stage3_allgather_sequential": sequential, **(more or {})})
    engine = make_engine(make_model(width=WIDE, blocks=BLOCKS), config)
    _steps(engine, 3)
    _, peak = engine.memory_report()["device", "gathered weights"]
    return peak, sum(unit["flat_bytes"] for unit in engine.core.units()), engine.step_report()["uses"]["kept"]


def test_what_is_not_used_again_soon_goes_though_there_is_room():
    def run(distance):
        bounds = {"stage3_max_reuse_distance": distance, "stage3_prefetch_bucket_size": 0}
        return run_ranks(2, _kept_by_default, False, bounds)[0]

    block = 4 * WIDE * WIDE
    peak, whole, kept = run(int(1e9))
    assert peak >= whole and kept > 0
    near, _, kept_near = run(3 * block)
    assert near < 0.8 * whole and 0 < kept_near < kept
    nothing, _, _ = run(0)
    assert nothing < 0.8 * near


def test_one_by_one_no_more_stays_than_is_fetched_ahead():
    """By default all of such a model stays gathered from forward to backward."""
    (by_blocks, whole, kept), _ = run_ranks(2, _kept_by_default, False)
    assert by_blocks >= whole and kept > 0
    (peak, whole, _), _ = run_ranks(2, _kept_by_default, True, {"stage3_prefetch_bucket_size": 2 * WIDE * WIDE})
    assert peak < 0.5 * whole
    (peak, whole, kept), _ = run_ranks(2, _kept_by_default, True, {"stage3_max_live_parameters": int(1e9)})
    assert peak >= whole and kept > 0
