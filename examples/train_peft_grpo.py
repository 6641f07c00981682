"""Trains a LoRA adapter by GRPO, with PEFT and TRL, at ZeRO stage 3. The script does not mention Strata:

    strata run --num_gpus 2 examples/train_peft_grpo.py --deepspeed examples/ds_trainer.json --output_dir demo_out/grpo
    STRATA_COMPAT=deepspeed accelerate launch --config_file <a YAML with distributed_type: DEEPSPEED> ...

The model completes starts of lines of Python's standard library. The reward is the share of a completion that is
lower-case letters and underscores, as in names. Any argument of ``GRPOConfig`` may follow; ``--model`` is the folder of
another model whose tokens are bytes, as ``train_hf_trainer.py`` saves one. Without GPUs add ``--use_cpu``.
"""

import os
from dataclasses import dataclass, field

from datasets import Dataset
from library_text import byte_tokenizer, line_starts, model_config
from peft import LoraConfig
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import GRPOConfig, GRPOTrainer


@dataclass
class ModelArguments:
    """The model to train."""

    model: str = field(default="", metadata={"help": "folder of a model; a new one where empty"})
    lora_rank: int = field(default=8, metadata={"help": "rank of the adapter"})


def names_reward(completions, **_):
    """[float]: for each text, the share of characters that occur in names."""
    return [sum(c.islower() or c == "_" for c in text) / max(1, len(text)) for text in completions]


def main():
    arguments, own = HfArgumentParser((GRPOConfig, ModelArguments)).parse_args_into_dataclasses()
    if own.model:
        model = AutoModelForCausalLM.from_pretrained(own.model)
    else:
        model = AutoModelForCausalLM.from_config(model_config())
    trainer = GRPOTrainer(
        model=model,
        args=arguments,
        reward_funcs=names_reward,
        train_dataset=Dataset.from_dict({"prompt": line_starts(512)}),
        processing_class=byte_tokenizer(),
        peft_config=LoraConfig(r=own.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model(os.path.join(arguments.output_dir, "adapter"))
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    if trainer.is_world_process_zero():
        count = max(1, len(rewards) // 5)
        first, last = (sum(part) / count for part in (rewards[:count], rewards[-count:]))
        print(f"step {trainer.state.global_step}: mean reward {first:.3f} at first, {last:.3f} at last")


if __name__ == "__main__":
    main()
