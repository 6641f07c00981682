"""TRL's trainers, where TRL is installed: over ``deepspeed``, once DeepSpeed itself and once Strata in its place; and
with ``StrataTrainerMixin`` beside plain TRL."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from launching import environment_of, run, told_by_ranks, torchrun  # noqa: E402

pytest.importorskip("trl")
SCRIPT = Path(__file__).resolve().parents[1] / "python" / "trl_jobs.py"
CASES = ["sft", "sft-lora", "dpo", "dpo-lora", "grpo", "grpo-lora"]
STEPS = 20
RELATIVE = 1e-5
# Advantages add up to 0, so GRPO's loss is a remainder of terms near 1, as small as 2e-4.
RELATIVE_OF_GRPO = 1e-4


WAYS = {  # by kind: the arguments before the script
    "deepspeed": {"strata": ["-m", "strata.compat.run"], "deepspeed": []},
    "mixin": {"strata": [], "plain": []},
}


@pytest.fixture(scope="module", params=[(kind, world) for kind in WAYS for world in (1, 2)], ids=str)
def told(request, tmp_path_factory):
    """(Strata's, the other's), each a list by rank."""
    (kind, world), folder = request.param, tmp_path_factory.mktemp("trl")
    for name, before in WAYS[kind].items():
        way = name if kind == "mixin" else "deepspeed"
        environment = environment_of(STRATA_TRAINER_STEPS=str(STEPS))
        run([*torchrun(world), *before, SCRIPT, folder, name, way, *CASES], environment)
    both = [told_by_ranks(folder, name, world) for name in WAYS[kind]]
    if kind == "deepspeed":
        assert ["+strata" in ranks[0]["version"] for ranks in both] == [True, False]
    return both


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_the_other(told, case):
    loss = RELATIVE_OF_GRPO if case.startswith("grpo") else RELATIVE
    for ours, theirs in zip(*told):
        theirs = theirs[case]
        assert len(theirs["losses"]) == len(theirs["norms"]) == STEPS
        assert all(theirs["losses"][1:]) and all(theirs["norms"])  # else there is nothing to compare
        assert ours[case]["losses"] == pytest.approx(theirs["losses"], rel=loss, abs=0)
        assert ours[case]["norms"] == pytest.approx(theirs["norms"], rel=RELATIVE, abs=0)
