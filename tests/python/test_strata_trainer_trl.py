"""``StrataTrainerMixin`` over TRL's trainers beside plain TRL on the same ranks, in fp32; GRPO generates from shards.

All of TRL's trainers, on one and two ranks, are among the long tests.
"""

import pytest
from devices import ON_GPU
from launching import forked

pytest.importorskip("trl")
pytest.importorskip("peft")
pytestmark = [
    pytest.mark.xdist_group("hugging_face"),
    pytest.mark.skipif(ON_GPU, reason="compared with plain TRL on the CPU"),
]
CASES = ["grpo", "grpo-lora"]
WORLD = 2
STEPS = 6
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """(Strata's, plain TRL's), each a list by rank."""
    from trl_jobs import main  # where TRL is installed

    folder = tmp_path_factory.mktemp("trl")
    return [forked(WORLD, main, folder, way, way, *CASES) for way in ("strata", "plain")]


@pytest.mark.parametrize("case", CASES)
def test_grpo_trains_sharded_as_it_trains_whole(told, case):
    for ours, theirs in zip(*told):
        theirs = theirs[case]
        assert len(theirs["losses"]) == len(theirs["norms"]) == STEPS
        assert all(theirs["losses"][1:]) and all(theirs["norms"])  # else there is nothing to compare
        assert ours[case]["losses"] == pytest.approx(theirs["losses"], rel=RELATIVE, abs=0)
        assert ours[case]["norms"] == pytest.approx(theirs["norms"], rel=RELATIVE, abs=0)
