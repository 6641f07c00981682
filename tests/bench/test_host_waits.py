"""bench/host_waits.py counts at every stage; on the CPU the count is zero."""

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent.parent.parent / "bench" / "host_waits.py"


def test_every_stage_is_counted(tmp_path):
    figures = tmp_path / "waits.json"
    command = [sys.executable, str(BENCH), "--device", "cpu", "--steps", "2", "--layers", "2", "--json", str(figures)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(figures.read_text())["host_waits"] == {str(stage): [0, 0] for stage in range(4)}
    assert [line.split()[0] for line in result.stdout.splitlines() if line.strip()[:1].isdigit()] == list("0123")
