"""bench/bench_loss.py: each loss and its gradients are torch's, and a wrong one fails."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

IS_CUDA = os.environ.get("STRATA_TEST_DEVICE") == "cuda"
pytestmark = pytest.mark.skipif(IS_CUDA, reason="the benches are tried on the CPU")
BENCH = Path(__file__).resolve().parents[2] / "bench" / "bench_loss.py"
SMALL = ["--device=cpu", "--vocabulary=700", "--tokens=96", "--rounds=1", "--product=64"]


def test_all_compute_the_same_loss(tmp_path):
    figures = tmp_path / "figures.json"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    done = subprocess.run([sys.executable, str(BENCH), *SMALL, "--widths", "32", "48", "--json", str(figures)],
                          env=environment, text=True, check=False, capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(figures.read_text())
    assert told["rate"] > 0 and list(told["widths"]) == ["32", "48"]
    for width, of in told["widths"].items():
        assert of["limit"] == pytest.approx(6 * 700 * 96 * int(width) / told["rate"])
        assert {"strata", "torch"} <= set(of["of"])
        assert all(0 < one["least"] <= one["median"] and one["apart"] < 2e-2 for one in of["of"].values())


def test_another_gradient_fails(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCH.parent))
    bench = importlib.import_module("bench_loss")
    monkeypatch.setattr(bench, "strata_loss", lambda *tensors: 1.1 * bench.torch_loss(*tensors))
    monkeypatch.setattr(sys, "argv", ["bench_loss.py", *SMALL, "--widths=32", "--contestants", "strata", "torch"])
    assert bench.main() == 1
    assert "FAILED: gradients of strata" in capsys.readouterr().out
