"""bench/longest.py: the search for the longest row, and jobs that train rows of given lengths."""

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.skipif(os.environ.get("STRATA_TEST_DEVICE") == "cuda", reason="the benches are tried on the CPU"),
]
LONGEST = Path(__file__).resolve().parents[2] / "bench" / "longest.py"
sys.path.insert(0, str(LONGEST.parent))

from story_jobs import Failed, has_deepspeed  # noqa: E402


def run(folder, *options):
    """{contestant: [result]}, and what the bench has printed."""
    results = folder / "results.json"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    command = [sys.executable, LONGEST, "--shape=tiny-tied", "--device=cpu", "--as-installed", "--json", results]
    done = subprocess.run([str(part) for part in (*command, *options)], env=environment, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert done.returncode == 0, done.stdout
    told = json.loads(results.read_text())
    for of in told["tries"].values():
        for one in of:
            if one["outcome"] == "trained":
                assert len(one["losses"]) == len(one["norms"]) == 2 and one["step"] > 0 and one["host"] > 50e6
    return told, done.stdout


def test_two_ranks_that_share_a_row(tmp_path):
    told, printed = run(tmp_path, "--contestants=strata", "--world=2", "--sp=2", "--from=64", "--to=64",
                        "--device-memory", 80 * 10**9)  # fmt: skip
    assert [(one["tokens"], one["outcome"]) for one in told["tries"]["strata"]] == [(64, "trained")]
    assert told["forecasts"]["strata"]["tokens"] > 1000 and "strata plan expects of strata" in printed


@pytest.mark.soak  # DeepSpeed's operator compiles for a minute the first time
@pytest.mark.skipif(not has_deepspeed() or shutil.which("ninja") is None, reason="DeepSpeed or ninja is not installed")
def test_both_engines_search_and_train_the_same(tmp_path):
    told, printed = run(tmp_path, "--contestants", "strata", "deepspeed-alst", "--from=64", "--granule=64",
                        "--fail-above=64")  # fmt: skip
    for of in told["tries"].values():
        assert [(one["tokens"], one["outcome"]) for one in of] == [(64, "trained"), (128, "device")]
        assert "simulated" in of[1]["said"]
    ours, theirs = (told["tries"][key][0] for key in ("strata", "deepspeed-alst"))
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=2e-2)
    assert "losses differ by" in printed and "128: out of memory of the device" in printed and "FAILED" not in printed


@pytest.fixture
def longest():
    return importlib.import_module("longest")


def settings(**changed):
    return argparse.Namespace(**({"lengths": None, "first": 64, "last": 10**6, "granule": 16, "tries": 20} | changed))


def lengths_of_search(longest, most, a):
    """[int]: the rows of a search where those above ``most`` have no memory."""
    tries = []
    while (tokens := longest.next_length(tries, a)) is not None:
        tries.append({"tokens": tokens, "outcome": "trained" if tokens <= most else "device"})
    return [one["tokens"] for one in tries]


def test_lengths_double_and_then_halve_the_gap(longest):
    assert lengths_of_search(longest, 170, settings()) == [64, 128, 256, 192, 160, 176]
    assert lengths_of_search(longest, 40, settings()) == [64, 32, 48]
    assert lengths_of_search(longest, 8, settings()) == [64, 32, 16]
    assert lengths_of_search(longest, 10**6, settings(last=100)) == [64, 100]
    assert lengths_of_search(longest, 170, settings(tries=3)) == [64, 128, 256]
    assert lengths_of_search(longest, 170, settings(lengths=[512, 64, 256])) == [64, 256]
    assert longest.next_length([{"tokens": 64, "outcome": "error"}], settings()) is None


@pytest.mark.parametrize(
    ("text", "told", "outcome"),
    [
        ("it ended with 1\n", [{"ended": "device", "message": "OutOfMemoryError: 2 GiB"}], "device"),
        ("it ended with 1\n", [{"ended": "error", "message": "x"}, {"ended": "host", "message": "y"}], "host"),
        ("it did not end within 5 s\n", [], "timeout"),
        ("it ended with 1\n  exitcode  : -9 (pid: 7)\n", [], "host"),
        ("it ended with 1\nKeyError: 'x'\nend", [], "error"),
    ],
)
def test_the_end_of_a_try(longest, text, told, outcome):
    assert longest.end_of(Failed(text, told))[0] == outcome


def test_forecasts_and_losses_are_checked(longest):
    def trained(tokens, loss):
        return {"tokens": tokens, "outcome": "trained", "losses": [loss], "norms": [1.0]}

    out = {"tokens": 128, "outcome": "device"}
    assert longest.losses_agree({"strata": [trained(64, 5.0)], "deepspeed": [trained(64, 5.05), trained(128, 1.0)]})
    assert not longest.losses_agree({"strata": [trained(64, 5.0)], "deepspeed": [trained(64, 5.2)]})
    assert longest.forecasts_hold({"strata": {"tokens": 60}}, {"strata": [trained(64, 5.0), out]})
    assert not longest.forecasts_hold({"strata": {"tokens": 50}}, {"strata": [trained(64, 5.0), out]})
    assert not longest.forecasts_hold({"strata": {"tokens": 200}}, {"strata": [trained(64, 5.0), out]})
    assert longest.forecasts_hold({"strata": {"tokens": 200}}, {"strata": [trained(64, 5.0)]})


def test_a_search_goes_on_from_its_file(longest, tmp_path, monkeypatch):
    kept = tmp_path / "results.json"
    kept.write_text(json.dumps({"settings": {"world": 1}, "tries": {"strata": [{"tokens": 64, "outcome": "trained"}]}}))
    a = argparse.Namespace(resume=True, json=kept)
    assert longest.earlier(a, {"world": 1})["strata"][0]["tokens"] == 64
    with pytest.raises(SystemExit, match="other settings"):
        longest.earlier(a, {"world": 2})
    monkeypatch.setattr(longest, "run_once", lambda *_: pytest.fail("there was no time for it"))
    tries = {"strata": [{"tokens": 64, "outcome": "trained", "seconds": 30.0}]}
    longest.search(settings(within=50.0), None, None, tries, lambda: None)  # a row twice as long takes twice the time
    assert len(tries["strata"]) == 1
