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
STEPS = 20
RELATIVE = 1e-5
# Advantages add up to 0, and what is left of GRPO's loss is as small as 2e-4, a remainder of terms near 1.
RELATIVE_OF_GRPO = 1e-4


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
    assert ["+strata" in ranks[0]["deepspeed"] for ranks in told] == [True, False]
    loss = RELATIVE_OF_GRPO if case.startswith("grpo") else RELATIVE
    for ours, theirs in zip(*told):
        theirs = theirs[case]
        assert len(theirs["losses"]) == len(theirs["norms"]) == STEPS
        assert all(theirs["losses"][1:]) and all(theirs["norms"])  # else there is nothing to compare
        assert ours[case]["losses"] == pytest.approx(theirs["losses"], rel=loss, abs=0)
        assert ours[case]["norms"] == pytest.approx(theirs["norms"], rel=RELATIVE, abs=0)
