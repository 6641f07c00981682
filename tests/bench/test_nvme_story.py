"""bench/nvme_story.py: GRPO trains with weights on a drive behind few small buffers, and reports figures of a step."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed"),
    pytest.mark.skipif(os.environ.get("STRATA_TEST_DEVICE") == "cuda", reason="the benches are tried on the CPU"),
]
STORY = Path(__file__).resolve().parents[2] / "bench" / "nvme_story.py"
sys.path.insert(0, str(STORY.parent))


@pytest.mark.soak
def test_every_step_trains_from_the_drive(tmp_path):
    figures = tmp_path / "figures.json"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    command = [sys.executable, STORY, "--steps=4", "--device=cpu", f"--drive={tmp_path}", "--json", figures]
    done = subprocess.run([str(part) for part in command], env=environment, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert done.returncode == 0, done.stdout
    told = json.loads(figures.read_text())["strata"]
    assert "+strata" in told["library"] and told["nvme_files"] > 0
    assert [line["step"] for line in told["steps"]] == [1, 2, 3, 4]
    for line in told["steps"]:
        assert line["seconds"] > 0 and line["read_bytes"] >= told["elements"] and line["grad_norm"] > 0
        assert f"{line['loss']:.3e}" in done.stdout
    assert told["host"] > 50e6 and told["device"] == 0


def test_a_job_that_leaves_nothing_on_the_drive_fails():
    nvme_story, story_jobs = (importlib.import_module(name) for name in ("nvme_story", "story_jobs"))
    memory = story_jobs.JobMemory()
    told = [{"ready": 1.0, "nvme_bytes": 100, "nvme_files": 1, "library": ""}, {"torch_peak": 0}]
    with pytest.raises(story_jobs.Failed, match="100 bytes lie on the drive, of 1000 weights"):
        nvme_story.figures_of(story_jobs.Outcome(told, 1.0, memory), 1000, "nowhere")
