"""SFT, DPO and GRPO of TRL at stage 3, under the ``deepspeed`` of this process or under ``StrataTrainerMixin``; or of
plain TRL.

    torchrun ... trl_jobs.py FOLDER NAME deepspeed|strata|plain CASE...

writes FOLDER/NAME.rank<n>.json: by case, losses and gradient norms of each step.
"""

import functools
import importlib
import itertools
import json
import os
import sys
import textwrap
import warnings

import datasets.fingerprint
import torch
import transformers
from accelerate.state import AcceleratorState
from datasets import Dataset
from deepspeed_over_gloo import deepspeed_over_gloo
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

STEPS = int(os.environ.get("STRATA_TRAINER_STEPS", "6"))
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 16,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
LINES = [line for line in open(textwrap.__file__, encoding="utf-8").read().split("\n") if 20 < len(line) < 60][:24]
DATA = {
    "sft": {"text": LINES},
    "dpo": {"prompt": [t[:8] for t in LINES], "chosen": [t[8:] for t in LINES], "rejected": [t[::-1] for t in LINES]},
    "grpo": {"prompt": [t[:8] for t in LINES]},
}


def byte_tokenizer():
    """Two tokens of its own, and one a byte."""
    letters = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>",
                                   model_input_names=["input_ids", "attention_mask"])  # fmt: skip


def save_model(path, tokenizer):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def reward(completions, **_):
    """Hardly ever the same for two texts: without a difference there is nothing to learn."""
    return [float(sum(number * ord(letter) for number, letter in enumerate(text, 1)) % 97) for text in completions]


def trainer_of(way, kind, path, tokenizer, adapter, out):
    common = {
        "output_dir": out, "deepspeed": CONFIG if way == "deepspeed" else None, "use_cpu": True, "max_steps": STEPS,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "logging_steps": 1, "report_to": [],
        "disable_tqdm": True, "bf16": False, "dataloader_pin_memory": False, "save_strategy": "no",
        "learning_rate": 1e-3, "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    given = {
        "model": path,
        "train_dataset": Dataset.from_dict(DATA[kind]),
        "processing_class": tokenizer,
        "peft_config": adapter,
    }
    if kind == "sft":
        return trainer_class(way, SFTTrainer)(args=SFTConfig(max_length=32, **common), **given)
    if kind == "dpo":
        return trainer_class(way, DPOTrainer)(args=DPOConfig(max_length=48, **common), **given)
    common["learning_rate"] = 1e-2 if adapter else 2e-3  # the loss is how far the model has gone
    if transformers.__version__.startswith("4."):
        common["gradient_checkpointing"] = False  # DDP does not take that of TRL's versions for transformers 4
    args = GRPOConfig(max_completion_length=8, num_generations=2, beta=1.0, **common)
    return trainer_class(way, GRPOTrainer)(args=args, reward_funcs=reward, **given)


def trainer_class(way, base):
    """``base``, or a subclass of it that trains sharded."""
    if way != "strata":
        return base
    from strata.integrations.transformers import StrataTrainerMixin

    sharded = type("Sharded", (StrataTrainerMixin, base), {})
    zero = {"stage": 3, "stage3_param_persistence_threshold": 16}
    return functools.partial(sharded, strata_config={"zero_optimization": zero})


def begin(way):
    """Sets the ranks up; the version of the library."""
    if way == "deepspeed":
        deepspeed = deepspeed_over_gloo()
        deepspeed.init_distributed(dist_backend="gloo")
        return deepspeed.__version__
    torch.distributed.init_process_group("gloo")
    return importlib.import_module("strata" if way == "strata" else "torch").__version__


def main(command):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    numbers = itertools.count()  # names for data that is in memory: datasets would pickle functions to find some
    datasets.fingerprint.Hasher.hash = classmethod(lambda cls, value: f"{next(numbers):016x}")
    datasets.fingerprint.Hasher.update = lambda self, value: None
    datasets.fingerprint.update_fingerprint = lambda *_: f"{next(numbers):016x}"
    folder, name, way, *cases = command
    tokenizer, told, path = byte_tokenizer(), {"version": begin(way)}, f"{folder}/{name}-model"
    if torch.distributed.get_rank() == 0:
        save_model(path, tokenizer)
    torch.distributed.barrier()
    for case in cases:
        transformers.set_seed(5)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if "-lora" in case else None
        trainer = trainer_of(way, case.partition("-")[0], path, tokenizer, lora, f"{folder}/{name}-{case}")
        trainer.train()
        assert way != "strata" or trainer.engine.zero_optimization_stage() == 3
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        told[case] = {"losses": [s["loss"] for s in steps], "norms": [s["grad_norm"] for s in steps]}
        trainer.save_model(f"{folder}/{name}-{case}/final")
        AcceleratorState._reset_state(reset_partial_state=way == "deepspeed")
    with open(f"{folder}/{name}.rank{os.environ['RANK']}.json", "w", encoding="utf-8") as file:
        json.dump(told, file)


if __name__ == "__main__":
    main(sys.argv[1:])
