"""bench/cold.py runs every engine and reports the time of its first step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COLD = Path(__file__).parent.parent.parent / "bench" / "cold.py"


@pytest.mark.soak
def test_marks_of_two_ranks_follow_each_other(tmp_path):
    figures = tmp_path / "cold.json"
    engines = ["plain", "strata", "fsdp2"]
    command = [sys.executable, str(COLD), "--world", "2", "--rounds", "1", "--engines", *engines,
               "--json", str(figures)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    medians = json.loads(figures.read_text())["medians"]
    assert list(medians) == engines
    for name, marks in medians.items():
        assert list(marks) == ["torch", "packages", "ready", "first step"], name
        assert sorted(marks.values()) == list(marks.values()), name
        assert f"{marks['first step']:.2f}" in result.stdout
