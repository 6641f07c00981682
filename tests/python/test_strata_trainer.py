"""``StrataTrainer`` against plain Trainer on the same ranks, in fp32; and LoRA on fused experts, at which DeepSpeed
itself fails.

Six steps each: `make soak` has twenty (STRATA_TRAINER_STEPS). Both compute the same forward and backward, and differ
in the last bits of sums over ranks and of the update.
"""

import re
from pathlib import Path

import pytest
import torch
from devices import ON_GPU
from hf_jobs import STEPS
from hf_models import MODELS, llama
from launching import environment_of, forked, run, told_by_ranks, torchrun
from safetensors.torch import load_file
from strata_trainer_jobs import main
from transformers import AutoModelForCausalLM

pytestmark = [
    pytest.mark.xdist_group("hugging_face"),
    pytest.mark.skipif(ON_GPU, reason="compared with plain Trainer on the CPU"),
]
SCRIPT = Path(__file__).with_name("strata_trainer_jobs.py")
CASES = {1: ["full-3"], 2: ["full-1", "full-3", "evaluated-3", "lora-3", "experts-3"]}
# Plain Trainer has no stage. If it evaluates before it trains, each of its ranks then trains by itself.
PLAIN = {1: ["full-3", "evaluated-3"], 2: ["full-3", "lora-3", "experts-3"]}
EITHER = [(world, case) for world, cases in CASES.items() for case in cases]
RESUMED = ["full-3", "lora-3"]
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("strata_trainer")
    torch.manual_seed(0)
    llama().save_pretrained(path / "model")
    MODELS["qwen3_moe"].build().save_pretrained(path / "experts")
    return path


@pytest.fixture(scope="module")
def plain(folder):
    return {world: forked(world, main, folder, f"plain{world}", "plain", *cases) for world, cases in PLAIN.items()}


@pytest.fixture(scope="module")
def sharded(folder):
    told = {}
    for world, cases in CASES.items():
        more = [f"resume:{case}" for case in RESUMED] if world == 2 else ["refusals"]
        told[world] = forked(world, main, folder, f"strata{world}", "strata", *cases, *more)
    return told


@pytest.fixture(scope="module")
def in_deepspeeds_place(folder):
    command = [*torchrun(2), "-m", "strata.compat.run", SCRIPT, folder, "place2", "deepspeed", "experts-3"]
    run(command, environment_of())
    return told_by_ranks(folder, "place2", 2)


def _same(ours, theirs):
    assert len(theirs["losses"]) == 2 * STEPS and len(theirs["norms"]) == STEPS
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if name in ("best", "generated", "rates"):
            assert ours[name] == value, name
        else:
            assert ours[name] == pytest.approx(value, rel=RELATIVE), name


@pytest.mark.parametrize("world, case", EITHER)
def test_training_is_that_of_plain_trainer(sharded, plain, world, case):
    for ours, theirs in zip(sharded[world], plain[world]):
        ours = {name: value for name, value in ours[case].items() if name != "before"}
        _same(ours, theirs[case if case in theirs else "full-3"])


def test_a_model_is_evaluated_before_it_trains(sharded, plain):
    (by_plain,) = plain[1]
    for told in sharded[2]:
        assert told["evaluated-3"]["before"] == pytest.approx(by_plain["evaluated-3"]["before"], rel=RELATIVE)


@pytest.mark.soak
def test_lora_on_fused_experts_is_that_of_plain_trainer(in_deepspeeds_place, plain):
    for ours, theirs in zip(in_deepspeeds_place, plain[2]):
        _same(ours["experts-3"], theirs["experts-3"])


@pytest.mark.parametrize("case", RESUMED)
def test_training_goes_on_where_its_checkpoint_was(sharded, case):
    for told in sharded[2]:
        assert told[f"resume:{case}"]["resumed"] == told[case]["losses"][STEPS:]


@pytest.mark.parametrize("case", ["full-1", "full-3"])
def test_plain_transformers_loads_what_was_saved(sharded, folder, case):
    weights = torch.load(folder / f"strata2-{case}" / "weights.pt")
    model = AutoModelForCausalLM.from_pretrained(folder / f"strata2-{case}" / "final")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_adapters_are_saved_as_they_are(sharded, folder):
    weights = torch.load(folder / "strata2-lora-3" / "weights.pt")
    saved = load_file(folder / "strata2-lora-3" / "final" / "adapter_model.safetensors")
    assert saved
    for name, value in saved.items():
        assert torch.equal(value, weights[re.sub(r"(lora_[AB])", r"\1.default", name)]), name


SAID = {
    "difference": ["train_micro_batch_size_per_gpu=7 against per_device_train_batch_size=2",
                   "gradient_clipping=0.25 against max_grad_norm=0.5"],
    "optimizer": ["section 'optimizer'", "learning_rate"],
    "scheduler": ["section 'scheduler'", "lr_scheduler_type"],
    "batch": ["auto_find_batch_size", "per_device_train_batch_size"],
    "cast": ["bf16_full_eval"],
    "parallelism": ["parallelism_config", "strata.sequence_parallel.size"],
    "smoothing": ["label_smoothing_factor", "strata.sequence_parallel"],
}  # fmt: skip


@pytest.mark.parametrize("wrong", SAID)
def test_what_it_does_not_follow_is_said_at_once(sharded, wrong):
    for words in SAID[wrong]:
        assert words in sharded[1][0]["refusals"][wrong]


@pytest.mark.soak
def test_the_example_trains_and_goes_on_with_other_ranks(tmp_path):
    script = Path(__file__).resolve().parents[2] / "examples" / "train_strata_trainer.py"
    config = '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}'
    arguments = [
        script, "--output_dir", tmp_path, "--use_cpu", "--save_steps=6", "--learning_rate=3e-3", "--report_to=none",
        "--disable_tqdm=True", "--per_device_train_batch_size=4", "--config", config,
    ]  # fmt: skip
    losses = []
    for world, steps in ((2, 8), (1, 12)):
        text = run([*torchrun(world), *arguments, f"--max_steps={steps}"], environment_of())
        ((step, loss),) = re.findall(r"^step (\d+): loss ([\d.]+) nats", text, re.MULTILINE)
        assert int(step) == steps
        losses.append(float(loss))
    assert losses[1] < losses[0] < 5.0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "trained").config.vocab_size == 256
