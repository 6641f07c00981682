"""``StrataTrainerMixin`` over TRL's trainers beside plain TRL on the same ranks, in fp32; GRPO generates from shards.

All of TRL's trainers, on one and two ranks, are among the long tests.
"""

import json
from pathlib import Path

import pytest
from devices import ON_GPU
from launching import environment_of, run, torchrun

pytest.importorskip("trl")
pytest.importorskip("peft")
pytestmark = [
    pytest.mark.xdist_group("hugging_face"),
    pytest.mark.skipif(ON_GPU, reason="compared with plain TRL on the CPU"),
]
SCRIPT = Path(__file__).with_name("trl_jobs.py")
CASES = ["grpo", "grpo-lora"]
WORLD = 2
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """(Strata's, plain TRL's), each a list by rank."""
    folder = tmp_path_factory.mktemp("trl")
    for way in ("strata", "plain"):
        run([*torchrun(WORLD), SCRIPT, folder, way, way, *CASES], environment_of())
    return [[json.loads((folder / f"{way}.rank{rank}.json").read_text()) for rank in range(WORLD)]
            for way in ("strata", "plain")]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_grpo_trains_sharded_as_it_trains_whole(told, case):
    for ours, theirs in zip(*told):
        theirs = theirs[case]
        assert len(theirs["losses"]) == len(theirs["norms"]) == 20
        assert all(theirs["losses"][1:]) and all(theirs["norms"])  # else there is nothing to compare
        assert ours[case]["losses"] == pytest.approx(theirs["losses"], rel=RELATIVE, abs=0)
        assert ours[case]["norms"] == pytest.approx(theirs["norms"], rel=RELATIVE, abs=0)
