"""The account of start-up: complete, the same on every rank, written by one; and the lines that users see."""

import gc
import io
import json
import logging
import os
import re
import threading

import pytest
import strata
import torch
from devices import ON_GPU, ranks_at_most
from hf_models import MODELS
from ranks import run_ranks
from rich.console import Console
from strata.views import start_up
from strata.views.start_up import ProgressBar, StartUpClock, merged
from strata.views.tables import start_up_tables
from tiny_models import config_of, make_engine, make_model

KEYS = {
    "tier", "reason", "reading", "placement", "world_size", "seconds", "phases", "link_gb_per_s", "device_growth_bytes",
    "host_peak_bytes", "pinned_bytes", "collectives",
}
PHASE_KEYS = {"name", "seconds", "bytes", "gb_per_s", "of_link"}
TIERS = {"device_copy", "device_grow", "distributed", "host"}


def _config(stage=3, **init):
    return config_of(stage, strata={"init": init})


def _say_all(folder):
    """Lines of the logger "strata", and a working folder of this rank's own."""
    own = folder / os.environ.get("RANK", "0")
    own.mkdir()
    os.chdir(own)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("strata").addHandler(handler)
    logging.getLogger("strata").setLevel(logging.INFO)
    return lines


def _live(folder, stage):
    lines = _say_all(folder)
    engine = make_engine(make_model(), _config(stage, report="start.json"))
    return engine.init_report, lines, os.path.exists("start.json") and json.load(open("start.json"))


def _from_files(folder, checkpoint):
    lines = _say_all(folder)
    engine, *_ = strata.load_pretrained(checkpoint, _config(2, report="start.json"))
    return engine.init_report, lines, os.path.exists("start.json") and json.load(open("start.json"))


def _assert_account(answers):
    """Asserts the properties of every start-up's report; returns rank 0's report and its phases by name."""
    report, lines, written = answers[0]
    assert report.keys() == KEYS
    assert all(phase.keys() == PHASE_KEYS for phase in report["phases"])
    assert all(other == report for other, _, _ in answers)
    assert written == report and not any(file for _, _, file in answers[1:])
    assert report["world_size"] == len(answers)
    names = [phase["name"] for phase in report["phases"]]
    assert len(set(names)) == len(names) and names[0] == "connect" and names[-1] == "other"
    seconds = sum(phase["seconds"] for phase in report["phases"])
    assert all(phase["seconds"] >= 0 for phase in report["phases"])
    # With several ranks, each phase is that of the slowest rank.
    assert seconds >= report["seconds"] - 1e-6
    assert len(answers) > 1 or seconds == pytest.approx(report["seconds"])
    assert report["host_peak_bytes"] > 1 << 20 and report["device_growth_bytes"] >= 0
    assert ON_GPU or report["pinned_bytes"] == 0
    said = [line for line in lines if "start-up" in line]
    assert any(f"tier {report['tier']}: {report['reason']}" in line for line in said), said
    assert not any("start-up" in line for _, others, _ in answers[1:] for line in others)
    return report, {phase["name"]: phase for phase in report["phases"]}


@pytest.mark.parametrize("world", [1, 2])
def test_a_live_model_gives_an_account_of_its_start(tmp_path, world):
    report, phases = _assert_account(run_ranks(world, _live, tmp_path, 3))
    assert report["tier"] in TIERS and report["reason"]
    assert report["reading"] is None
    assert report["collectives"]["name"] and report["collectives"]["probe"] is None
    assert {"make optimizer", "make engine"} <= phases.keys()


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_gives_an_account_of_its_start(tmp_path, world):
    world = ranks_at_most(world)
    MODELS["qwen3"].build().save_pretrained(tmp_path / "model")
    report, phases = _assert_account(run_ranks(world, _from_files, tmp_path, tmp_path / "model"))
    assert report["tier"] == "born_flat"
    assert {"open checkpoint", "build model", "plan", "make engine", "read", "all-gather"} <= phases.keys()
    size = os.path.getsize(tmp_path / "model" / "model.safetensors")
    assert size / world / 2 < phases["read"]["bytes"] <= size  # each rank reads the files that it is responsible for
    assert phases["read"]["gb_per_s"] > 0
    reading = report["reading"]  # the files are small: nothing is timed
    assert reading["way"] == "buffered" and reading["reason"] and reading["direct_gb_per_s"] is None


@pytest.mark.parametrize("read", ["auto", "buffered", "direct"])
def test_every_way_of_reading_gives_the_same_weights(tmp_path, read):
    model = MODELS["qwen3"].build()
    model.save_pretrained(tmp_path / "model")
    engine, *_ = strata.load_pretrained(tmp_path / "model", _config(2, read=read))
    expected = model.state_dict()
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter.detach().cpu(), expected[name].to(parameter.dtype)), name
    reading = engine.init_report["reading"]
    assert reading["way"] == "buffered" or read == "direct"
    assert read == "auto" or reading["reason"] in ("as configured", "no direct reads to be had here")
    engine.destroy()


def test_progress_ends_at_the_whole_of_a_phase(tmp_path, monkeypatch):
    MODELS["qwen3"].build().save_pretrained(tmp_path / "model")
    calls = []
    monkeypatch.setattr(StartUpClock, "progress", lambda *_: lambda *call: calls.append(call))
    engine, *_ = strata.load_pretrained(tmp_path / "model", _config())
    read = [call for call in calls if call[0] == "read"]
    assert all(0 < done <= total for _, done, total in read)
    assert read[-1][1] == read[-1][2] > 0
    engine.destroy()


def test_later_work_does_not_change_the_account(tmp_path):
    MODELS["qwen3"].build().save_pretrained(tmp_path / "model")
    engine, *_ = strata.load_pretrained(tmp_path / "model", _config())
    before = json.dumps(engine.init_report)
    strata.load_weights(engine, tmp_path / "model")
    assert json.dumps(engine.init_report) == before
    engine.destroy()


@pytest.mark.parametrize("path, problem", [("", "folder"), ("{here}", "folder"), ("{here}/no/x.json", "no folder")])
def test_a_report_that_cannot_be_written_is_refused_before_the_model_is_touched(tmp_path, path, problem):
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    path = path.format(here=tmp_path)
    with pytest.raises(strata.ConfigError, match=f"strata.init.report: .*{problem}.*found '{path}'"):
        make_engine(model, _config(report=path))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before))


def test_a_report_that_is_lost_at_the_end_is_a_warning_and_leaves_nothing(tmp_path, caplog, monkeypatch):
    path = tmp_path / "start.json"
    monkeypatch.setattr(start_up, "_show", lambda _: path.mkdir())  # after the look at the start, before the file
    engine = make_engine(make_model(), _config(report=str(path)))
    assert "start.json' could not be written: " in caplog.text
    assert engine.init_report.keys() == KEYS
    assert os.listdir(tmp_path) == ["start.json"] and os.listdir(path) == []
    engine.destroy()


def test_a_link_that_waits_beside_the_report_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "start.json.partial").symlink_to(victim)
    make_engine(make_model(), _config(report=str(tmp_path / "start.json"))).destroy()
    assert victim.read_text() == "untouched"
    assert json.loads((tmp_path / "start.json").read_text()).keys() == KEYS
    assert not (tmp_path / "start.json").is_symlink()
    victim.unlink()
    victim.touch()  # as the umask has it
    assert (tmp_path / "start.json").stat().st_mode == victim.stat().st_mode


# --- lines that users see ---


def _account(**seconds):
    phases = [{"name": n, "seconds": s, "bytes": b} for n, (s, b) in seconds.items()]
    return {
        "tier": "device_grow", "reason": "r", "reading": None, "placement": None,
        "seconds": sum(s for s, _ in seconds.values()), "phases": phases,
        "device_growth_bytes": 3 << 30, "host_peak_bytes": 1 << 30, "pinned_bytes": 64 << 20, "link_gb_per_s": None,
    }


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_during_a_start_and_is_left_as_it_was(monkeypatch, enabled):
    seen = []
    engine_class = strata.initialize.__globals__["Engine"]
    monkeypatch.setitem(strata.initialize.__globals__, "Engine",
                        lambda *args: seen.append(gc.isenabled()) or engine_class(*args))
    (gc.enable if enabled else gc.disable)()
    try:
        make_engine(make_model(), config_of(2)).destroy()
        with pytest.raises(strata.ConfigError):
            make_engine(make_model(), config_of(2, zero_optimization={"stage": 7}))
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert seen == [False]


@pytest.mark.parametrize("frozen", [True, False])
def test_what_a_start_has_made_is_not_young_and_what_was_kept_from_the_collector_still_is(frozen):
    gc.collect()
    if frozen:
        gc.freeze()
    kept = gc.get_freeze_count()
    young = [[]]
    try:
        make_engine(make_model(), config_of(2)).destroy()
        assert not frozen or gc.get_freeze_count() > kept // 2  # those that were freed are gone
        assert any(entry is young for entry in gc.get_objects(generation=2)) != frozen
    finally:
        gc.unfreeze()


def test_of_each_phase_the_slowest_rank_counts():
    ranks = [_account(read=(1.0, 20 * 10**9), other=(0.5, 0)), _account(read=(2.0, 10**9), compute=(1.0, 0))]
    ranks[0]["link_gb_per_s"] = 40.0
    report = merged(ranks)
    assert [p["name"] for p in report["phases"]] == ["read", "compute", "other"]
    read, compute, _ = report["phases"]
    assert (read["seconds"], read["bytes"], read["gb_per_s"], read["of_link"]) == (2.0, 20 * 10**9, 10.0, 0.25)
    assert (compute["gb_per_s"], compute["of_link"]) == (None, None)
    assert report["seconds"] == 3.0


def test_ranks_that_read_in_different_ways_are_told():
    buffered = {"way": "buffered", "reason": "b", "cached": 1.0, "buffered_gb_per_s": None, "direct_gb_per_s": None}
    direct = {"way": "direct", "reason": "d", "cached": 0.0, "buffered_gb_per_s": 1.0, "direct_gb_per_s": 3.0}
    account = _account(read=(1.0, 10**9))
    both = merged([{**account, "reading": buffered}, {**account, "reading": direct}])["reading"]
    assert both == {**direct, "way": "mixed", "reason": "b"}
    assert merged([{**account, "reading": direct}] * 2)["reading"] == direct
    assert merged([account, {**account, "reading": direct}])["reading"] == direct
    assert merged([account])["reading"] is None


def test_the_table_fits_a_narrow_terminal():
    reason = "100% cached; probe: 12.34 GB/s buffered, 10.05 direct"
    figures = dict.fromkeys(("cached", "buffered_gb_per_s", "direct_gb_per_s"))
    account = _account(**{"open checkpoint": (0.02, 0), "read": (12345.678, 61 * 10**12), "plan": (0.0, 0)})
    account["reading"] = {"way": "buffered", "reason": reason, **figures}
    report = merged([{**account, "link_gb_per_s": 55.3}] * 8)
    out = io.StringIO()
    start_up_tables(report).print(Console(file=out, width=80, force_terminal=True, color_system=None))
    for text in (out.getvalue(), start_up_tables(report).text()):
        assert "61000.000" in text and "12345.678" in text and "55.3 GB/s" in text
        assert "device +3.00 GiB, host peak 1.00 GiB, pinned 64 MiB" in text
        assert f"files read buffered: {reason}" in text
        assert "plan" not in text  # it took no time
        assert all(len(line) <= 80 for line in text.splitlines()) and "…" not in text


class _Screen:
    """A terminal and a clock."""

    def __init__(self, monkeypatch, world=1):
        self.now = 0.0
        self.out = io.StringIO()
        monkeypatch.setattr("tqdm.std.time", lambda: self.now)
        monkeypatch.setattr("sys.stderr", self.out)
        self.bar = ProgressBar(world)

    def go(self, phase, seconds, total=4 * 10**9, steps=40):
        for step in range(1, steps + 1):
            self.now += seconds / steps
            self.bar(phase, total * step // steps, total)

    def is_wiped(self):
        return re.search(r"\r +\r$", self.out.getvalue()) is not None


def test_short_phases_draw_nothing(monkeypatch):
    screen = _Screen(monkeypatch)
    for _ in range(5):
        screen.go("read", 0.9)
        screen.go("all-gather", 0.9)
    screen.bar.close()
    assert screen.out.getvalue() == ""


def test_a_long_phase_draws_its_speed_and_leaves_nothing(monkeypatch):
    screen = _Screen(monkeypatch, world=2)
    threads = threading.active_count()
    screen.go("read", 4.0)
    text = screen.out.getvalue()
    assert re.search(r"read on each rank: .*2\.\d\dG/4\.00G \[00:0\d<00:0\d, 1\.00GB/s\]", text), text
    assert screen.is_wiped() and threading.active_count() == threads
    screen.bar.close()
    assert screen.out.getvalue() == text


def test_a_phase_that_stops_half_way_is_wiped_off_at_the_end(monkeypatch):
    screen = _Screen(monkeypatch)
    for done in range(1, 30):
        screen.now += 0.1
        screen.bar("read", done, 100)
    assert not screen.is_wiped()
    screen.bar.close()
    assert screen.is_wiped()
    screen.go("read", 5.0)
    assert screen.is_wiped()


def test_a_terminal_that_goes_away_stops_nobody(monkeypatch):
    screen = _Screen(monkeypatch)
    for done in range(1, 30):
        screen.now += 0.1
        screen.bar("read", done, 100)
    screen.out.close()
    screen.go("all-gather", 4.0)
    screen.bar.close()
