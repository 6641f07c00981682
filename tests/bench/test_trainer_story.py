"""bench/trainer_story.py: unchanged scripts of Trainer and of GRPO tell their first step and later ones."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.skipif(os.environ.get("STRATA_TEST_DEVICE") == "cuda", reason="the benches are tried on the CPU"),
]
STORY = Path(__file__).resolve().parents[2] / "bench" / "trainer_story.py"
sys.path.insert(0, str(STORY.parent))
HAS_TRL = importlib.util.find_spec("trl") is not None


def compare(folder, world, engines, kinds, steps):
    """{kind: {engine: figures}} of a run in which none failed."""
    figures = folder / "figures.json"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    command = [sys.executable, STORY, "--tiny", "--device=cpu", "--as-installed", f"--world={world}", "--json", figures]
    command += ["--engines", *engines, "--kinds", *kinds, f"--steps={steps}"]
    done = subprocess.run([str(part) for part in command], env=environment, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert done.returncode == 0, done.stdout
    told = json.loads(figures.read_text())["kinds"]
    assert list(told) == kinds and not any(of["errors"] for of in told.values())
    for of in told.values():
        assert list(of["turns"]) == engines
        for (turn,) in of["turns"].values():
            ends = [turn[part] for part in ("import", "arguments", "from_pretrained", "trainer", "ready", "first_step")]
            assert 0 < ends[0] and ends == sorted(ends) and ends[-1] < turn["command"]
            assert len(turn["steps"]) == len(turn["logged"]) == steps and f"{turn['steps'][-1]:.2f}" in done.stdout
            assert turn["host_all"] >= turn["host_rank"] > 50e6 and turn["device"] == 0
    return {kind: {engine: turn for engine, (turn,) in of["turns"].items()} for kind, of in told.items()}


@pytest.mark.soak
def test_both_kinds_train(tmp_path):
    compare(tmp_path, 1, ["strata"], ["trainer", "grpo"] if HAS_TRL else ["trainer"], 2)


def test_a_job_that_is_ended_has_told_of_what_it_did():
    story_jobs = importlib.import_module("story_jobs")
    code = "import subprocess, sys, time; print('{\"step\": 1}', flush=True); subprocess.run(['sleep', '600'])"
    heard = []
    with pytest.raises(story_jobs.Failed, match="did not end within 3 s") as failed:
        story_jobs.run_job([sys.executable, "-c", code], dict(os.environ), 0, 3, heard.append)
    assert failed.value.told == [{"step": 1}] and heard == ['{"step": 1}']


def test_an_engine_that_fails_loses_nothing_that_was_done():
    story_jobs, story_turns = (importlib.import_module(name) for name in ("story_jobs", "story_turns"))
    turns, calls = story_turns.Turns(["strata", "deepspeed"]), []

    def run(engine):
        calls.append(engine)
        if len(calls) == 4:
            raise story_jobs.Failed("no room", [{"step": 1}])
        return len(calls)

    for _ in range(3):
        turns.take(run)
    assert turns.done == {"strata": [1, 3, 5], "deepspeed": [2]}
    assert turns.errors == {"deepspeed": "no room"}
    assert turns.account()["told"] == {"deepspeed": [{"step": 1}]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss": float("nan")}, "train nothing"),
        ({"grad_norm": 0.0}, "train nothing"),
        ({"completions/min_length": 3.0}, "not 4"),
        ({"logged": 2}, "not every rank told of 1 steps"),
    ],
)
def test_a_step_that_does_something_else_fails(changed, message):
    story, story_jobs = (importlib.import_module(name) for name in ("trainer_story", "story_jobs"))
    start = {"rank": 0, "parts": dict.fromkeys(story.PARTS, 1.0), "torch_peak": 0}
    logged = {"logged": 1, "loss": 1e-8, "grad_norm": 1.0, "completions/min_length": 4.0}
    wanted = SimpleNamespace(world=1, steps=1, new_tokens=4)
    step = {"rank": 0, "step": 1, "seconds": 2.0}
    assert story.figures_of([start, step, logged], "grpo", wanted)["steps"] == [2.0]
    with pytest.raises(story_jobs.Failed, match=message):
        story.figures_of([start, step, logged | changed], "grpo", wanted)
