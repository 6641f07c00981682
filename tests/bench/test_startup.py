"""The comparison of starts: every engine on one checkpoint beside the limit, and its output when it is stopped."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.xdist_group("bench_startup"),  # one run for all
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.skipif(os.environ.get("STRATA_TEST_DEVICE") == "cuda", reason="the benches are tried on the CPU"),
]
BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.append(str(BENCH))


def _start(*command):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p), PYTHONUNBUFFERED="1")
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([sys.executable, *map(str, command)], env=environment, text=True,
                            preexec_fn=_heed_interrupts, **both)


def _heed_interrupts():
    """A process that a shell starts in the background ignores interrupts, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _compare(checkpoint, figures, *arguments):
    return _start(BENCH / "startup" / "run.py", "--model", checkpoint, "--world", 2, "--device", "cpu",
                  "--json", figures, *arguments)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from make_model import make_config, write_checkpoint  # where transformers is installed

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_checkpoint(make_config("tiny-moe"), folder, unfused=True, device="cpu")
    return folder


def test_an_engine_has_its_figures_beside_the_limit(checkpoint, tmp_path):
    comparing = _compare(checkpoint, tmp_path / "start.json", "--steps", 1, "--tokens", 16,
                         "--engines", "strata-z2,limit")  # fmt: skip
    printed, _ = comparing.communicate(timeout=300)
    assert comparing.returncode == 0, printed
    result = json.loads((tmp_path / "start.json").read_text())
    (row,) = result["engines"].values()
    assert 0 < row["load_s"] <= row["total_s"] and len(row["losses"]) == 1
    assert "\nstrata-z2 " in printed and not result["failed"] and not result["skipped"]
    limit = result["limit"]
    assert limit["stage2_s"] == limit["stage3_s"] + limit["gather_s"] > 0
    assert limit["bytes"] == sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))


@pytest.mark.soak
def test_every_turn_has_its_figures_beside_the_limit(checkpoint, tmp_path):
    comparing = _compare(checkpoint, tmp_path / "start.json", "--steps", 1, "--tokens", 16, "--ready-marks",
                         "--engines", "strata-z2,strata-host-z2,limit,strata-z2")
    printed, _ = comparing.communicate(timeout=300)
    assert comparing.returncode == 0, printed
    result = json.loads((tmp_path / "start.json").read_text())
    rows = result["engines"]
    assert list(rows) == ["strata-z2", "strata-host-z2", "strata-z2#2"]
    for name, row in rows.items():
        assert 0 < row["load_s"] <= row["total_s"] and row["host_pss_ready"] > 0
        assert len(row["losses"]) == 1
        assert f"\n{name} " in printed and f"{name}: ready in " in printed
    assert rows["strata-z2"]["initialize_s"] == 0 < rows["strata-host-z2"]["initialize_s"]
    limit, limits = result["limit"], result["limits"]
    assert list(limits) == ["limit", "limit#2"]
    assert limit["load_s"] == min(turn["load_s"] for turn in limits.values())
    assert len(limit["repetitions"]["load_s"]) == sum(len(turn["repetitions"]["load_s"]) for turn in limits.values())
    assert limit["stage2_s"] == limit["stage3_s"] + limit["gather_s"] > 0
    assert all(min(times) == limit[key] for key, times in limit["repetitions"].items() if times)
    assert printed.count("slowest s") == 2
    assert limit["bytes"] == sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    ratio = rows["strata-host-z2"]["initialize_s"] / limit["stage2_s"]
    assert f" {ratio:.2f}x " in printed  # of the limit
    assert "make engine" in printed and not result["failed"] and not result["skipped"]


@pytest.mark.soak
def test_what_there_is_is_shown_when_it_is_interrupted(checkpoint, tmp_path):
    comparing = _compare(checkpoint, tmp_path / "start.json", "--no-limit", "--engines", ",".join(["strata-z2"] * 4))
    for line in comparing.stdout:
        if line.startswith("strata-z2: ready in"):
            comparing.send_signal(signal.SIGINT)
            break
    printed, _ = comparing.communicate(timeout=300)
    assert comparing.returncode == 1, printed
    assert "interrupted" in printed and "\nstrata-z2 " in printed and "Traceback" not in printed
    result = json.loads((tmp_path / "start.json").read_text())
    turns = ["strata-z2", "strata-z2#2", "strata-z2#3", "strata-z2#4"]
    assert list(result["engines"]) + list(result["failed"]) == turns
    assert set(result["failed"].values()) == {"interrupted"}


def test_an_engine_that_nobody_knows_is_told_before_anything_starts(checkpoint, tmp_path):
    comparing = _compare(checkpoint, tmp_path / "start.json", "--engines", "strata-z9")
    printed, _ = comparing.communicate(timeout=300)
    assert comparing.returncode == 1 and "unknown engines: strata-z9; there are strata-z2" in printed
