"""Sequence parallelism through Hugging Face's door, unchanged: Trainer, PEFT and an Accelerate loop give the numbers
that Trainer gives on one rank without any engine, and so do evaluation, prediction, generation and a resumed epoch."""

import sys
from pathlib import Path

import pytest
from devices import ON_GPU
from launching import environment_of, run, told_by_ranks
from sequence_models import make_model
from soak import ALL
from test_command_line import find_program

pytestmark = [pytest.mark.xdist_group("hugging_face"), pytest.mark.skipif(ON_GPU, reason="compared on the CPU")]
SCRIPT = Path(__file__).with_name("sequence_jobs.py")
CASES = {2: ["2-2", "2-3-lora", "2-3-loop", "2-3-resumed"]}
if ALL:
    CASES = {2: [*CASES[2], "2-1", "2-3", "2-2-offload", "2-3-offload"], 4: ["4-3", "4-1"]}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequence")
    make_model("qwen3").save_pretrained(folder / "model")
    run([sys.executable, SCRIPT, folder, "alone", "plain", "plain-lora", "plain-uneven"], environment_of())
    for world, cases in CASES.items():
        run([find_program(), "run", f"--num_gpus={world}", SCRIPT, folder, f"ranks{world}", *cases], environment_of())
    # Accelerate keeps for a process that it has met DeepSpeed's name.
    run([find_program(), "run", "--num_gpus=2", SCRIPT, folder, "own", *OWN], environment_of())
    return {"plain": told_by_ranks(folder, "alone", 1)[0], "own": told_by_ranks(folder, "own", 2)} | {
        world: told_by_ranks(folder, f"ranks{world}", world) for world in CASES}


OWN = ["2-3-strata", "2-3-strata-uneven"]
OF_WORLDS = [(world, case) for world, cases in CASES.items() for case in cases]


@pytest.mark.parametrize("world, case", [*(("own", case) for case in OWN), *OF_WORLDS])
def test_numbers_are_those_of_one_rank(found, world, case):
    kind = next((kind for kind in ("lora", "uneven") if kind in case), "")
    expected = found["plain"][f"plain-{kind}".rstrip("-")]
    for rank in found[world]:
        for name, value in rank[case].items():
            if name == "generated":
                assert value == expected[name]
            else:
                assert value == pytest.approx(expected[name], abs=1e-5), name
