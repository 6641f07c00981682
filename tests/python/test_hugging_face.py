"""Trainer, Accelerate and PEFT over ``deepspeed``, once DeepSpeed itself and once Strata in its place.

Each library runs all cases in one job a world size; Strata's jobs start as its users start them. A case has six steps;
`make soak` has more cases, of twenty steps (STRATA_TRAINER_STEPS). The comparison is in fp32: both compute the same
forward and backward, and differ in the last bits of the norm and the update (measured: 2e-7 relative).
"""

import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from devices import ON_GPU
from hf_jobs import STEPS, main
from hf_models import llama
from launching import environment_of, forked, run, told_by_ranks, torchrun, with_pth
from safetensors.torch import load_file
from soak import ALL
from strata.checkpoint.supported_transformers import adapter
from test_command_line import find_program
from transformers import AutoModelForCausalLM

pytestmark = [
    pytest.mark.xdist_group("hugging_face"),
    pytest.mark.skipif(ON_GPU, reason="compared with DeepSpeed on the CPU"),
]
SCRIPT = Path(__file__).with_name("hf_jobs.py")
CASES = {2: ["loop-3", "trainer-2", "trainer-3", "lora-3"]}
if ALL:
    CASES = {1: ["trainer-2", "trainer-3", "lora-3", "loop-3"],
             2: [*CASES[2], "trainer-3-offload", "loop-1", "trainer-1", "lora-2", "olora-3"]}  # fmt: skip
RESUMED = ["cpuadam-3", *(["trainer-2", "trainer-3", "trainer-3-offload", "olora-3"] if ALL else [])]
# DeepSpeed would compile an optimizer for the first case, which offloads both weights and states; in the second one
# engine evaluates, and then another trains. The numbers of both are those of DeepSpeed's trainer-3.
AS_STAGE_3 = ["cpuadam-3", *(["evaluated-3"] if ALL else [])]
RELATIVE = 1e-5
EITHER = [(world, case) for world, cases in CASES.items() for case in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hugging_face")
    torch.manual_seed(0)
    llama().save_pretrained(path / "model")
    return path


@pytest.fixture(scope="module")
def by_deepspeed(folder):
    if transformers.__version__.startswith("4."):
        pytest.skip("DeepSpeed 0.19.8 fails: its optimizer has fewer groups than the scheduler of transformers 4")
    return {world: forked(world, main, folder, f"deepspeed{world}", *cases) for world, cases in CASES.items()}


@pytest.fixture(scope="module")
def by_strata(folder):
    environment = with_pth(_new(folder / "site"), environment_of(STRATA_COMPAT="deepspeed"))
    if ALL:
        run([*torchrun(1), SCRIPT, folder, "strata1", *CASES[1]], environment)
    resumed = [f"resume:{case}" for case in RESUMED]
    cases = [*CASES[2], *AS_STAGE_3, *resumed, "load"]
    run([find_program(), "run", "--num_gpus=2", SCRIPT, folder, "strata2", *cases], environment_of())
    return {world: told_by_ranks(folder, f"strata{world}", world) for world in CASES}


def _new(folder):
    folder.mkdir()
    return folder


def test_each_ran_on_what_it_says(by_strata, by_deepspeed):
    assert by_deepspeed[2][0]["deepspeed"] == "0.19.8"
    for world in CASES:
        assert re.fullmatch(r"0\.19\.8\+strata\.\d+\.\d+\.\d+", by_strata[world][0]["deepspeed"])


@pytest.mark.parametrize("world, case", EITHER)
def test_training_is_that_of_deepspeed(by_strata, by_deepspeed, world, case):
    for ours, theirs in zip(by_strata[world], by_deepspeed[world]):
        ours, theirs = ours[case], theirs[case]
        assert len(theirs["losses"]) == 2 * STEPS and len(theirs["norms"]) == STEPS
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if name in ("best", "generated"):
                assert ours[name] == value, name
            else:
                assert ours[name] == pytest.approx(value, rel=RELATIVE), name


@pytest.mark.parametrize("case", AS_STAGE_3)
def test_other_ways_to_stage_3_give_its_numbers(by_strata, by_deepspeed, case):
    for ours, theirs in zip(by_strata[2], by_deepspeed[2]):
        for name in ("losses", "norms", "evaluated", "again"):
            assert ours[case][name] == pytest.approx(theirs["trainer-3"][name], rel=RELATIVE), name


@pytest.mark.parametrize("case", RESUMED)
def test_training_goes_on_where_its_checkpoint_was(by_strata, case):
    for told in by_strata[2]:
        assert told[f"resume:{case}"]["resumed"] == told[case]["losses"][STEPS:]


@pytest.mark.parametrize("case", ["trainer-3", "cpuadam-3"])
def test_plain_transformers_loads_what_trainer_saved(by_strata, folder, case):
    weights = torch.load(folder / f"strata2-{case}" / "weights.pt")
    model = AutoModelForCausalLM.from_pretrained(folder / f"strata2-{case}" / "final")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


@pytest.mark.parametrize("case", [case for case in CASES[2] if "lora" in case])
def test_adapters_are_saved_as_they_are(by_strata, folder, case):
    weights = torch.load(folder / f"strata2-{case}" / "weights.pt")
    saved = load_file(folder / f"strata2-{case}" / "final" / "adapter_model.safetensors")
    assert saved
    for name, value in saved.items():
        own = re.sub(r"(lora_[AB]|lora_embedding_[AB])", r"\1.default", name)
        if own not in weights:
            own = name.replace("lm_head.weight", "lm_head.modules_to_save.default.weight")
        if own in weights:  # else the base's embedding, which PEFT saves where it was resized
            assert torch.equal(value, weights[own]), name


def test_a_merged_copy_is_what_peft_merges(by_strata, folder):
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    wanted = PeftModel.from_pretrained(base, folder / "strata2-lora-3" / "final").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(folder / "strata2-lora-3" / "merged", dtype=torch.float32)
    own = dict(merged.named_parameters())
    for name, parameter in wanted.named_parameters():
        assert torch.equal(parameter, own[name]), name


def test_from_pretrained_reads_shards_from_the_files(by_strata):
    told = by_strata[2][0]["load"]
    for name in ("llama", "qwen3_moe", "tied", "pickled"):
        assert told[name]["wrong"] == [], name
        assert told[name]["kept"] == (["model.embed_tokens.weight"] if name == "tied" else []), name
        ties_before = name == "tied" and adapter().INITIALIZES_MISSING
        assert len(told[name]["said"]) == (ties_before or name == "pickled")
    assert "is no .safetensors file" in told["pickled"]["said"][0]


def _example(name):
    return Path(__file__).resolve().parents[2] / "examples" / name


def _loss_of(text):
    (loss,) = re.findall(r"^step \d+: loss ([\d.]+) nats", text, re.MULTILINE)
    return float(loss)


def test_the_trainer_example_trains_and_goes_on_under_another_launcher(tmp_path):
    """It begins on one rank and goes on on two: all other cases begin on two."""
    config, script = _example("ds_trainer.json"), _example("train_hf_trainer.py")
    arguments = [
        script, "--output_dir", tmp_path / "out", "--use_cpu", "--save_steps=6",
        "--learning_rate=3e-3", "--report_to=none", "--disable_tqdm=True", "--per_device_train_batch_size=4",
    ]  # fmt: skip
    start = [find_program(), "run", "--num_gpus=1", *arguments, "--deepspeed", config]
    first = run([*start, "--max_steps=8"], environment_of())
    launch = [
        sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes=2", "--num_machines=1",
        "--machine_rank=0", "--dynamo_backend=no", "--deepspeed_config_file", config,
    ]  # fmt: skip
    environment = with_pth(_new(tmp_path / "site"), environment_of(STRATA_COMPAT="deepspeed"))
    second = run([*launch, *arguments, "--max_steps=12"], environment)
    before, after = (_loss_of(text) for text in (first, second))
    assert after < before < 5.0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "trained").config.vocab_size == 256


@pytest.mark.soak
def test_the_accelerate_example_trains(tmp_path):
    config = _example("ds_config.json")
    command = [_example("train_accelerate.py"), "--steps=12", "--config", config, "--output", tmp_path]
    assert _loss_of(run([*torchrun(2), *command], environment_of())) < 5.0
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == 256
