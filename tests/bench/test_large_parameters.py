"""The benchmarks of parameters that are larger than a device, at sizes that CPU ranks compute at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent.parent / "bench"


def _lines(*command, **environment):
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False,
                            env={**os.environ, "OMP_NUM_THREADS": "1", **environment})  # fmt: skip
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def _on_two_ranks(program, *arguments):
    return _lines("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(BENCH / program),
                  *arguments)  # fmt: skip


@pytest.mark.parametrize("source", ["file", *(pytest.param(s, marks=pytest.mark.soak) for s in ("init", "load"))])
def test_a_birth_stays_within_its_bounds_as_the_forecast_says(tmp_path, source):
    arguments = ["--size", "4096", "--tile-mib", "1", "--libraries", "strata", "--sources", source,
                 "--places", "device", "--drive", str(tmp_path)]  # fmt: skip
    (case,) = _lines(str(BENCH / "bench_deferred_init.py"), *arguments)
    assert case["source"] == source and "error" not in case, case
    assert case["step_ledger"]["device_total"] == case["forecast"]["device"] <= case["bound"]["step"]
    if source != "load":  # load_pretrained makes the optimizer's states, too
        assert case["construct_ledger"]["device_total"] <= case["bound"]["construct"]


def test_a_case_whose_rank_fails_says_why(tmp_path):
    arguments = ["--size", "64", "--tile-mib", "0.00001", "--libraries", "strata", "--sources", "init",
                 "--places", "device", "--drive", str(tmp_path)]  # fmt: skip
    (case,) = _lines(str(BENCH / "bench_deferred_init.py"), *arguments)
    assert "matrix.weight" in case["error"] and "max_gather" in case["error"]


@pytest.mark.soak
def test_a_square_and_an_embedding_train_within_their_bounds():
    for case in _on_two_ranks("large_parameters.py", "square", "--tiny", "--place", "device"):
        assert case["training"]["engine"] == case["forecast"]["device"] <= case["bound"]
    precisions = ["fp32", "bf16", "bf16-states"]
    plain, *cases = _on_two_ranks("large_parameters.py", "embedding", "--tiny", "--precision", *precisions,
                                  "--cap-gib", "0.0003")  # fmt: skip
    assert plain["agree"]
    assert [case["precision"] for case in cases] == [precision for precision in precisions for _ in range(2)]
    for before, trained in zip(cases[::2], cases[1::2]):
        assert trained["training"]["engine"] == before["forecast"]["device"]
        assert trained["falls"] and trained["under_cap"] and trained["beyond_cap"]


@pytest.mark.soak
def test_tiles_of_all_sizes_are_timed():
    lines = _on_two_ranks("bench_tiles.py", "--tiny", "--rounds", "1")
    timed = [line["case"] for line in lines if "median_ms" in line]
    assert timed == ["linear"] * 4 + ["experts"] * 4 + ["loss"] * 2 + ["loss"] * (timed.count("loss") - 2)
