"""TRL's trainers over ``deepspeed``, once DeepSpeed itself and once Strata in its place; where TRL is installed."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from launching import environment_of, run, torchrun  # noqa: E402

pytest.importorskip("trl")
SCRIPT = Path(__file__).with_name("trl_jobs.py")
CASES = ["sft", "sft-lora", "dpo", "dpo-lora", "grpo", "grpo-lora"]
# DPO divides small differences of sums; the others agree to 1e-7. Where GRPO has no advantage, its gradients are
# nearly 0.
RELATIVE = 1e-5


@pytest.fixture(scope="module", params=[1, 2])
def told(request, tmp_path_factory):
    """(Strata's, DeepSpeed's), each a list by rank."""
    folder, world = tmp_path_factory.mktemp("trl"), request.param
    ways = {"strata": ["-m", "strata.compat.run"], "deepspeed": []}
    for name, way in ways.items():
        run([*torchrun(world), *way, SCRIPT, folder, name, *CASES], environment_of())
    return [[json.loads((folder / f"{name}.rank{rank}.json").read_text()) for rank in range(world)] for name in ways]


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_deepspeed(told, case):
    for ours, theirs in zip(*told):
        assert len(theirs[case]["losses"]) == 4
        assert ours[case]["losses"] == pytest.approx(theirs[case]["losses"], rel=RELATIVE, abs=1e-9)
        assert ours[case]["norms"] == pytest.approx(theirs[case]["norms"], rel=RELATIVE, abs=1e-6)
