"""bench/start_story.py: an unchanged script starts the same model under Strata as under DeepSpeed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.skipif(os.environ.get("STRATA_TEST_DEVICE") == "cuda", reason="the benches are tried on the CPU"),
]
STORY = Path(__file__).resolve().parents[2] / "bench" / "start_story.py"


def _run(*arguments):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    command = [sys.executable, STORY, "--tiny", "--device=cpu", "--as-installed", *arguments]
    return subprocess.run([str(part) for part in command], env=environment, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def compare(tmp_path, world, engines):
    """All start the same model from an unchanged script."""
    figures = tmp_path / "figures.json"
    done = _run(f"--world={world}", f"--model={tmp_path / 'model'}", "--json", figures, "--engines", *engines)
    assert done.returncode == 0, done.stdout
    turns = json.loads(figures.read_text())["turns"]
    assert list(turns) == engines
    for engine, (turn,) in turns.items():
        assert ("strata" in turn["deepspeed"]) == (engine == "strata")
        assert 0 < turn["initialize"] < turn["total"] < turn["command"]
        parts = sum(turn[part] for part in ("import", "from_pretrained", "initialize"))
        assert parts >= turn["total"] - 1e-3  # each the slowest rank's
        assert world * 50e6 < turn["host_all"] and turn["host_rank"] <= turn["host_all"] and turn["device"] == 0
        assert f"{turn['initialize']:.2f}" in done.stdout
    assert len({(turn["elements"], turn["sum"]) for (turn,) in turns.values()}) == 1


@pytest.mark.soak
def test_an_unchanged_script_starts(tmp_path):
    compare(tmp_path, 1, ["strata"])  # beside DeepSpeed: among the long tests


@pytest.mark.soak
def test_a_script_that_fails_says_why(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"damaged")
    done = _run(f"--model={model}", "--engines", "strata")
    assert done.returncode == 1
    assert "FAILED: strata: it ended with" in done.stdout and "config.json" in done.stdout
