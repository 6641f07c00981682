"""PEFT and TRL's GRPO over Strata in DeepSpeed's place, by the example that ships: on ranks that gather, and with
parameters on a drive, begun by `accelerate launch` as its users begin it."""

import copy
import re
import sys
from pathlib import Path

import pytest
from devices import ON_GPU
from launching import environment_of, run, with_pth
from safetensors.torch import load_file
from test_command_line import find_program

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "bench"))

from story_jobs import accelerate_launch  # noqa: E402

pytest.importorskip("trl")
pytest.importorskip("peft")
pytestmark = [
    pytest.mark.xdist_group("hugging_face"),
    pytest.mark.skipif(ON_GPU, reason="the same on the CPU"),
]
EXAMPLES = REPOSITORY / "examples"
SCRIPT = EXAMPLES / "train_peft_grpo.py"
ARGUMENTS = [
    "--use_cpu", "--bf16=False", "--report_to=none", "--disable_tqdm=True", "--logging_steps=1", "--save_strategy=no",
    "--per_device_train_batch_size=8", "--num_generations=8", "--max_completion_length=12", "--learning_rate=5e-2",
    "--beta=0.001", "--dataloader_pin_memory=False",
]  # fmt: skip
# Buffers that are smaller than the embedding, and fewer than there are weights: DeepSpeed's swapper asserts on both.
ON_A_DRIVE = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "nvme", "pin_memory": True, "buffer_count": 5, "buffer_size": 16384},
        "stage3_param_persistence_threshold": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def _rewards(text):
    ((first, last),) = re.findall(r"mean reward ([\d.]+) at first, ([\d.]+) at last", text)
    return float(first), float(last)


def _has_learned(folder):
    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    return len(saved) > 0 and all(value.abs().sum() > 0 for name, value in saved.items() if "lora_B" in name)


@pytest.mark.soak
def test_the_grpo_example_raises_its_reward(tmp_path):
    start = [find_program(), "run", "--num_gpus=2", SCRIPT, "--deepspeed", EXAMPLES / "ds_trainer.json"]
    text = run([*start, f"--output_dir={tmp_path}", "--max_steps=50", *ARGUMENTS], environment_of())
    first, last = _rewards(text)
    assert last > first, text
    assert _has_learned(tmp_path)


def test_it_trains_with_parameters_on_a_drive(tmp_path):
    config = copy.deepcopy(ON_A_DRIVE)
    config["zero_optimization"]["offload_param"]["nvme_path"] = str(tmp_path / "drive")
    (tmp_path / "drive").mkdir()
    (tmp_path / "site").mkdir()
    environment = with_pth(tmp_path / "site", environment_of(STRATA_COMPAT="deepspeed"))
    launch = accelerate_launch(tmp_path, config, 1)
    text = run([*launch, SCRIPT, f"--output_dir={tmp_path}", "--max_steps=3", *ARGUMENTS], environment)
    _rewards(text)
    assert _has_learned(tmp_path)
