"""The engine's account of its steps: the report of the last one, the timeline, and ranges of torch's profiler."""

import io
import json
import os
from collections import defaultdict
from contextlib import nullcontext

import pytest
import strata
import torch
from ranks import run_ranks
from rich.console import Console
from strata.views.tables import step_tables
from tiny_models import config_of, loss_of, make_batches, make_engine, make_model, rank_and_world

KEYS = {
    "step", "seconds", "forward_seconds", "backward_seconds", "update_seconds", "norm_seconds", "optimizer_seconds",
    "exposed_seconds", "transfers", "uses", "device_allocations", "host_waits", "offload",
    "device_memory",
}
TRANSFERS = {"gather", "reduce", "refresh"}


def _train(engine, steps, between=lambda engine, step: None):
    rank, world = rank_and_world() if "RANK" in os.environ else (0, 1)
    for step, batch in enumerate(make_batches(steps, world), start=1):
        engine.backward(loss_of(engine, batch[rank]))
        engine.step()
        between(engine, step)


def _report(stage, timed):
    engine = make_engine(make_model(), config_of(stage))
    assert engine.step_report() is None
    engine.record_steps(timed)
    _train(engine, 3)
    units = [(unit["name"], unit["flat_bytes"], unit["whole"]) for unit in engine.core.units()]
    report = engine.step_report()
    engine.destroy()
    return report, units


@pytest.mark.parametrize("stage", [2, 3])
def test_bytes_are_those_of_the_units(stage):
    for report, units in run_ranks(2, _report, stage, False):
        assert report.keys() == KEYS and report["transfers"].keys() == TRANSFERS
        assert report["step"] == 3 and report["seconds"] > 0
        gather, reduce, refresh = (report["transfers"][kind] for kind in ("gather", "reduce", "refresh"))
        whole = {name: size for name, size, stays in units if stays}
        assert refresh == {**refresh, "count": len(whole), "bytes": sum(whole.values())}
        assert reduce["count"] == len(units)
        assert reduce["bytes"] == sum(size for _, size, _ in units)  # fp32, as the weights are
        sharded = {name: size for name, size, stays in units if not stays}
        assert gather["count"] == len(sharded)  # all of them stay from forward to backward
        assert gather["bytes"] == sum(sharded.values())
        uses = report["uses"]
        assert uses["prefetched"] + uses["late"] == gather["count"]
        assert report["device_allocations"] == 0 and report["host_waits"] >= 0
        assert report["device_memory"]["total"]["bytes"] <= report["device_memory"]["total"]["peak_bytes"]
        assert report["device_memory"]["weights"]["bytes"] > 0
        assert report["exposed_seconds"] is None and gather["gb_per_s"] is None and report["offload"] is None


@pytest.mark.parametrize("stage", [2, 3])
def test_times_are_told_where_they_are_asked_for(stage):
    for report, _ in run_ranks(2, _report, stage, True):
        parts = [report[f"{part}_seconds"] for part in ("forward", "backward", "update")]
        assert all(part > 0 for part in parts) and sum(parts) <= report["seconds"]
        assert 0 < report["norm_seconds"] + report["optimizer_seconds"] <= report["update_seconds"]
        exposed = [transfer["exposed_seconds"] for transfer in report["transfers"].values()]
        assert report["exposed_seconds"] == pytest.approx(sum(exposed))
        assert report["exposed_seconds"] <= report["seconds"]
        moving = report["transfers"]["gather" if stage == 3 else "refresh"]
        crossed = moving["bytes"] / 2  # half of it is this rank's own
        assert moving["gb_per_s"] == pytest.approx(crossed / moving["seconds"] * 1e-9)


def _accumulated():
    engine = make_engine(make_model(), config_of(3, accumulation=2))
    _train(engine, 4)
    report = engine.step_report()
    engine.destroy()
    return report


def test_a_step_is_all_its_micro_steps():
    report = run_ranks(2, _accumulated)[0]
    assert report["step"] == 2
    assert report["transfers"]["reduce"]["count"] % 2 == 0


def _trace(stage, path, steps, accumulation=1, when_started=lambda: None):
    config = config_of(stage, accumulation=accumulation, strata={"trace": str(path), "trace_steps": 2})
    engine = make_engine(make_model(), config)
    when_started()
    there = []
    _train(engine, steps, lambda engine, step: there.append(os.path.exists(path)))
    units = [(unit["name"], unit["whole"]) for unit in engine.core.units()]
    engine.destroy()
    return units, there


def _spans(path):
    """{rank: {category: {name}}} and [event]."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    names = defaultdict(lambda: defaultdict(set))
    for event in events:
        names[event["pid"]][event["cat"]].add(event["name"])
    return names, events


@pytest.mark.parametrize("stage", [2, 3])
def test_the_timeline_has_every_unit_on_every_rank(stage, tmp_path):
    path = tmp_path / "trace.json"
    units, there = run_ranks(2, _trace, stage, path, 5)[0]
    assert there == [False, False, False, True, True]
    names, events = _spans(path)
    assert names.keys() == {0, 1}
    for of_rank in names.values():
        for unit, whole in units:
            brought = "refresh" if whole else "gather"
            for what in (brought, f"{brought} wait", "reduce", "reduce wait", "optimizer"):
                assert unit in of_rank[what], (unit, what)
        for scope in ("layers.0", "layers.1", "layers.2"):
            assert scope in of_rank["forward"] and scope in of_rank["backward"]
        assert "TinyModel" in of_rank["forward"]
        assert {"forward pass", "backward pass", "update", "norm"} <= of_rank.keys()
    assert {event["args"]["step"] for event in events} == {3, 4}
    assert all(event["args"]["bytes"] > 0 for event in events if event["cat"] in ("gather", "refresh", "reduce"))


def _nested(events):
    """Whether spans of one track lie within each other or apart."""
    open_ends = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while open_ends and open_ends[-1] <= event["ts"] + 1e-3:
            open_ends.pop()
        if open_ends and event["ts"] + event["dur"] > open_ends[-1] + 1e-3:
            return False
        open_ends.append(event["ts"] + event["dur"])
    return True


def test_tracks_are_what_a_viewer_can_draw(tmp_path):
    path = tmp_path / "trace.json"
    run_ranks(2, _trace, 3, path, 4)
    tracks = defaultdict(list)
    for event in _spans(path)[1]:
        tracks[event["pid"], event["tid"]].append(event)
    assert all(_nested(events) for events in tracks.values())


def test_one_rank_has_a_timeline_of_its_own(tmp_path):
    path = tmp_path / "trace.json"
    _trace(3, path, 4)
    names, _ = _spans(path)
    assert names.keys() == {0}
    assert "layers.1" in names[0]["forward"] and "layers.1" in names[0]["backward"]


def test_a_run_that_ends_before_its_timeline_begins_says_so(tmp_path, caplog):
    _trace(3, tmp_path / "trace.json", 2)
    assert "strata.trace: " in caplog.text and "within step 3" in caplog.text
    assert not (tmp_path / "trace.json").exists()


def test_a_timeline_that_cannot_be_written_is_refused_before_the_model_is_touched(tmp_path):
    with pytest.raises(strata.ConfigError, match="strata.trace: .*no folder"):
        make_engine(make_model(), config_of(3, strata={"trace": str(tmp_path / "none" / "trace.json")}))


def test_a_timeline_that_is_lost_is_a_warning(tmp_path, caplog):
    (tmp_path / "gone").mkdir()
    _trace(3, tmp_path / "gone" / "trace.json", 5, when_started=(tmp_path / "gone").rmdir)
    assert "trace.json' could not be written" in caplog.text


def _losses(stage, path, look):
    config = config_of(stage, dtype="bf16", accumulation=2)
    if look:
        config["strata"] = {**config.get("strata", {}), "trace": str(path), "trace_steps": 2}
    engine = make_engine(make_model(), config)
    engine.record_steps(look)
    rank, world = rank_and_world()
    losses = []
    for batch in make_batches(12, world):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) if look else nullcontext():
            loss = loss_of(engine, batch[rank])
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [2, 3])
def test_to_look_on_changes_nothing(stage, tmp_path):
    path = tmp_path / "trace.json"
    assert run_ranks(2, _losses, stage, path, True) == run_ranks(2, _losses, stage, path, False)


def _profiled():
    engine = make_engine(make_model(), config_of(3))
    _train(engine, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _train(engine, 1)
    engine.destroy()
    return [event.name for event in profile.events() if event.name.startswith("strata.")]


def test_ranges_of_torchs_profiler_carry_the_names_of_units():
    for names in run_ranks(2, _profiled):
        for layer in ("layers.0", "layers.1", "layers.2"):
            assert names.count(f"strata.forward {layer}") == 1
            assert names.count(f"strata.backward {layer}") == 1


def _links(folder):
    """The links in reports of steps whose optimizer states are on the host or on a drive. The staging memory holds only
    a part of the states."""
    rows = 24_000  # 4.6 MB of states a rank: more than the 3 MiB of staging that a rank has at least
    for place in ("cpu", "nvme"):
        model = torch.nn.Sequential(torch.nn.Embedding(rows, 48), torch.nn.Linear(48, 96), torch.nn.Linear(96, 40))
        offload = {"device": place, "nvme_path": folder, "buffer_count": 2, "buffer_size": 140_000}
        config = config_of(3, zero_optimization={"stage": 3, "offload_optimizer": offload})
        config["strata"] = {"trace": f"{folder}/{place}.json", "trace_steps": 1, "state_cache": 0}
        engine = make_engine(model, config)
        reports = []
        for _ in range(5):
            ids = torch.randint(0, rows, (2, 12), device=engine.device)
            engine.backward(engine(ids).square().mean())
            engine.step()
            reports.append(engine.step_report()["offload"])
        shards = [unit["flat_bytes"] // 2 for unit in engine.core.units()]  # fp32, of two ranks
        states = sum(2 * -(-size // 4096) * 4096 for size in shards)  # exp_avg and exp_avg_sq, in whole pages
        _check_links(place, engine.device.type, reports, states, folder)
        engine.destroy()


def _check_links(place, device, reports, states, folder):
    before, after = reports[-2:]
    copies = {"up", "down"} if device == "cuda" else set()
    assert after["links"].keys() == copies | ({"read", "write"} if place == "nvme" else set())
    assert after["fetch_wait_seconds"] >= 0 and 0 <= after["parts_ready"] <= after["parts"]
    for link in copies:
        assert after["links"][link]["bytes"] >= 2 * states // 3 and after["links"][link]["limit_gb_per_s"] > 0
    if place == "cpu":
        assert after["drives"] == []
        return
    pending = 3 * 2**20 if device == "cuda" else 0  # of the staging memory: states that the next step writes
    for report in (before, after):
        read, write = (report["links"][link] for link in ("read", "write"))
        assert abs(write["bytes"] - states) <= pending
        assert 0 < read["bytes"] <= states, "nothing is read that is not wanted"
        for link in (read, write):
            assert link["seconds"] > 0 and link["gb_per_s"] > 0 and 0 < link["of_limit"] <= 1
    ((old,), (new,)) = before["drives"], after["drives"]
    assert os.path.samefile(new["folder"], folder)
    assert abs(new["written_bytes"] - old["written_bytes"] - states) <= pending


def test_what_goes_to_drives_is_what_the_configuration_implies(tmp_path):
    run_ranks(2, _links, str(tmp_path))
    for place in ("cpu", "nvme"):
        names, _ = _spans(tmp_path / f"{place}.json")
        for of_rank in names.values():
            assert ({"drive read", "drive write"} <= of_rank.keys()) == (place == "nvme")


# --- lines that users see ---


def _account(timed=True):
    seconds = {"seconds": 0.0123, "exposed_seconds": 0.001} if timed else {"seconds": None, "exposed_seconds": None}
    transfer = {"count": 48, "bytes": 16 * 10**9, **seconds, "gb_per_s": 340.25 if timed else None}
    parts = ("forward", "backward", "update", "norm", "optimizer", "exposed")
    return {
        "step": 12, "seconds": 0.5, **{f"{part}_seconds": 0.05 if timed else None for part in parts},
        "transfers": {"gather": transfer, "reduce": transfer, "refresh": {**transfer, "count": 0}},
        "uses": {"kept": 1, "prefetched": 47, "late": 0}, "device_allocations": 3, "host_waits": 2,
        "offload": None,
        "device_memory": {"weights": {"bytes": 5 << 30, "peak_bytes": 6 << 30}},
    }


@pytest.mark.parametrize("timed", [True, False])
def test_the_table_fits_a_terminal(timed):
    report = _account(timed)
    out = io.StringIO()
    step_tables(report).print(Console(file=out, width=80, force_terminal=True, color_system=None))
    for text in (out.getvalue(), step_tables(report).text()):
        assert "Step 12: 500.0 ms" in text and "gathers" in text and "refreshes" not in text
        assert ("340.2" in text and "10.0%" in text) == timed
        assert "5.00 GiB" in text and "47 prefetched" in text and "host waits: 2; device allocations: 3" in text
        assert "forecast" not in text
        assert all(len(line) <= 80 for line in text.splitlines()) and "…" not in text


def test_the_table_has_a_forecast_where_there_is_one():
    report = _account(True)
    report["device_memory"]["weights"]["forecast_bytes"] = 7 << 30
    lines = step_tables(report).text().splitlines()
    assert [line.split() for line in lines if line.startswith(("device", "weights"))] == [
        ["device", "memory", "now", "peak", "forecast"], ["weights", "5.00", "GiB", "6.00", "GiB", "7.00", "GiB"],
    ]


def _link(gb, rate=None, limit=None):
    seconds = gb / rate if rate else None
    share = rate / limit if rate and limit else None
    return {"bytes": int(gb * 1e9), "seconds": seconds, "gb_per_s": rate, "limit_gb_per_s": limit, "of_limit": share}


def test_the_table_has_the_links_of_what_is_offloaded():
    report = _account(True)
    links = {"up": _link(123.4, 52.1, 55.0), "down": _link(98.7), "read": _link(987.6, 6.41), "write": _link(0.0)}
    report["offload"] = {
        "links": links, "device_lane": {"elements": 10**9, "seconds": 0.25},
        "host_lane": {"elements": 3 * 10**9, "seconds": 0.375}, "fetch_wait_seconds": 1.5,
        "cached_bytes": 12_340_000_000, "copy_wait_seconds": 0.25, "parts": 40, "parts_ready": 39,
        "drives": [{"folder": "/drives/first", "written_bytes": 12_345_600_000_000}],
    }
    out = io.StringIO()
    step_tables(report).print(Console(file=out, width=80, force_terminal=True, color_system=None))
    for text in (out.getvalue(), step_tables(report).text()):
        lines = [line.split() for line in text.splitlines()]
        assert ["link", "GB", "GB/s", "limit", "of", "limit", "busy"] in lines
        assert ["PCIe", "up", "123.400", "52.1", "55.0", "95%", "2368.5", "ms"] in lines
        assert ["PCIe", "down", "98.700"] in lines and ["drive", "write", "0.000"] in lines
        assert "waited for: drives 1500.0 ms (host), copies 250.0 ms (device)" in text
        assert "40 lent, 39 of them ready" in text
        assert "updated: 25% by the device in 250.0 ms, 75% by the host in 375.0 ms" in text
        assert "states of the host in free memory of the device: 12.340 GB" in text
        assert "written since the start: 12345.600 GB to /drives/first" in text
        assert all(len(line) <= 80 for line in text.splitlines()) and "…" not in text
    report["offload"] = {**report["offload"], "links": {}, "drives": [], "copy_wait_seconds": None}
    assert "link" not in step_tables(report).text().split() and "waited" not in step_tables(report).text()
