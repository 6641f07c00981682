"""Rules place single parameters, or the engine places all of them; and the table of placements."""

import io
import logging
import os

import pytest
import torch
from devices import ON_GPU, shares_a_gpu
from offloaded_training import (
    all_offloaded,
    make_model,
    run_gathering_together,
    train_steps,
    whole_states,
    whole_weights,
)
from ranks import run_ranks
from rich.console import Console

import strata
from strata.views.tables import offloads, placement_tables


def _placed(folder):
    """Rules for single parameters, and a share of the states: the same training, held where the rules say."""
    rules = {"placement": [
        {"match": "0.*", "param": "host", "optimizer": "nvme"}, {"larger_than": "8KB", "optimizer": "host"},
    ]}
    found = []
    cases = [({}, "none", 1.0), (rules, "none", 1.0), ({}, "cpu", 0.3), (rules, "cpu", 0.5)]
    for strata_section, states, ratio in cases:
        config = all_offloaded("none", states, folder)
        config["zero_optimization"]["offload_optimizer"]["ratio"] = ratio
        engine, *_ = strata.initialize(model=make_model(), config=config | {"strata": strata_section})
        losses = train_steps(engine, 3)
        report = engine.memory_report()
        for tier in ("device", "host"):
            foreseen = engine.memory_forecast(tier)
            for kind in ("weights", "optimizer state", "master weights"):
                assert report.get((tier, kind), (0, 0))[1] == foreseen[kind], (strata_section, ratio, tier, kind)
        if strata_section:
            assert report["host", "weights"][1] > 0 and report["nvme", "optimizer state"][0] > 0
        if strata_section or ratio < 1:
            assert report["host", "optimizer state"][1] > 0
        if ratio == 0.3:
            assert report["device", "optimizer state"][1] > report["host", "optimizer state"][1]
        found.append((losses, whole_weights(engine), whole_states(engine)))
        engine.destroy()
    for losses, *values in found[1:]:
        assert losses == found[0][0]
        for mine, theirs in zip(values, found[0][1:]):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


@pytest.mark.parametrize("world", [1, 2])
def test_rules_place_single_parameters(world, tmp_path):
    run_gathering_together(world, _placed, str(tmp_path))


def _automatic(folder):
    """The engine fills device, host and drive by itself: the same training, within the budgets, and a table."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("strata").addHandler(handler)
    logging.getLogger("strata").setLevel(logging.INFO)
    layers = [torch.nn.Linear(640, 640) for _ in range(20)]
    plain = all_offloaded("none", "none", folder, stage3_max_live_parameters=0, reduce_bucket_size=1)
    auto, world = plain | {"strata": {"placement": "auto", "state_cache": 0}}, int(os.environ["WORLD_SIZE"])

    def foreseen(tier, **budgets):
        config = plain | {"strata": auto["strata"] | budgets}
        return strata.memory_forecast(torch.nn.Sequential(*layers), config, world, device="cpu", tier=tier)["total"]

    device = foreseen("device") * 2 // 3
    ring = foreseen("host")  # through which a rank loads and saves
    host = ring + (foreseen("host", device_budget=device) - ring) * 3 // 4
    budgets = {"device_budget": device, "host_budget": host}
    found = []
    for section in ({}, auto["strata"], auto["strata"] | budgets):
        torch.manual_seed(5)
        model = torch.nn.Sequential(*(torch.nn.Linear(640, 640) for _ in range(20)))
        engine, *_ = strata.initialize(model=model, config=plain | {"strata": section})
        placement = engine.init_report["placement"]
        losses = []
        for micro in range(6):
            torch.manual_seed(micro)
            loss = engine(torch.randn(4, 640, dtype=torch.bfloat16)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append((losses, whole_weights(engine), whole_states(engine)))
        if not section:
            assert placement is None
        elif section == auto["strata"]:
            assert ON_GPU or placement["budgets"]["device"] is None, "CPU ranks need a budget"
            assert not offloads(placement), "there is room for all of it"
        else:
            kinds, report = placement["kinds"], engine.memory_report()
            assert kinds["total"]["device"] <= device and kinds["total"]["host"] <= host, (kinds, budgets)
            assert all(kinds["exp_avg"][tier] > 0 for tier in ("host", "nvme")), kinds
            assert kinds["weights"]["host"] == kinds["weights"]["nvme"] == 0, "states leave the device first"
            assert placement["folders"] == {"states": folder}, "the drive holds no weights"
            assert placement["budgets"] == {"device": device, "host": host}
            for tier in ("device", "host", "nvme"):
                held = report.get((tier, "optimizer state"), (0, 0))[1]
                assert held == engine.memory_forecast(tier)["optimizer state"], tier
                assert abs(held - 2 * kinds["exp_avg"][tier]) <= 1
        engine.destroy()
    for losses, *values in found[1:]:
        assert losses == found[0][0]
        for mine, theirs in zip(values, found[0][1:]):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs))
    with pytest.raises(strata.OutOfMemoryError, match="the device does not suffice .*Wanted on each device: "):
        strata.initialize(model=torch.nn.Linear(640, 640), config=plain | {
            "strata": auto["strata"] | {"device_budget": 1000}})
    return lines


@pytest.mark.parametrize("world", [1, 2])
def test_what_goes_where_may_be_left_to_the_engine(world, tmp_path):
    if world > 1 and shares_a_gpu():
        pytest.skip("NCCL wants a GPU for each rank")
    lines, *others = run_ranks(world, _automatic, str(tmp_path))
    (table,) = [line for line in lines if line.startswith("placement:")]
    assert "together, at most" in table and f"\nstates on the drive of {tmp_path}" in table
    assert any("nothing is offloaded: placement auto" in line for line in lines)
    assert not any("placement" in line for said in others for line in said)


GIB = 2**30
KINDS = {
    "weights": (0, 2 * GIB, 0), "gathered weights": (3 * GIB, 0, 0), "master weights": (0, GIB, 100 * GIB),
    "exp_avg": (0, GIB, 3 * GIB), "exp_avg_sq": (0, GIB, 3 * GIB), "gradient shards": (GIB // 5, 40 * GIB, 0),
    "gradients": (0, 0, 0), "staging": (96 << 20, 3 * GIB, 0), "total": (6 * GIB, 48 * GIB, 106 * GIB),
}


def test_the_table_fits_a_terminal():
    placement = {
        "kinds": {kind: dict(zip(("device", "host", "nvme"), sizes)) for kind, sizes in KINDS.items()},
        "folders": {"weights": "/drive0", "states": "/drive1"},
        "rules": [
            {"rule": "*embed*: weights on host", "parameters": 12, "bytes": GIB},
            {"rule": "model.layers.*.mlp.experts.*.down_proj.weight over 2.00 MiB: states on nvme", "parameters": 0,
             "bytes": 0},
        ],
        "budgets": {"device": 20 * GIB, "host": None},
    }
    out = io.StringIO()
    placement_tables(placement, 8).print(Console(file=out, width=80, force_terminal=True, color_system=None))
    for text in (out.getvalue(), placement_tables(placement, 8).text()):
        lines = [line.split() for line in text.splitlines()]
        assert "Placement: what each of 8 ranks holds at most" in text
        assert ["what", "device", "host", "NVMe"] in lines
        assert ["master", "weights", "1.00", "GiB", "100.00", "GiB"] in lines
        assert ["together,", "at", "most", "6.00", "GiB", "48.00", "GiB", "106.00", "GiB"] in lines
        assert not any(line and line[0] == "gradients" for line in lines), "no rank holds any"
        assert ["*embed*:", "weights", "on", "host", "12", "1.00", "GiB"] in lines
        assert "states on nvme" in text
        assert "states on the drive of /drive1" in text and "device 20.00 GiB" in text
        assert all(len(line) <= 80 for line in text.splitlines()) and "…" not in text
    on_one_drive = placement | {"folders": {"weights": "/drive0", "states": "/drive0"}}
    assert "\nweights and states on the drive of /drive0\n" in placement_tables(on_one_drive, 8).text()
    assert offloads(placement) and not offloads(None)
    only_the_ring = {"staging": KINDS["staging"], "total": (0, 3 * GIB, 0)}
    assert not offloads({"kinds": {kind: dict(zip(("device", "host", "nvme"), sizes))
                                   for kind, sizes in only_the_ring.items()}})
