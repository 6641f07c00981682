"""Trains a small model with Hugging Face's Trainer over Strata's engine, by its own name:

    torchrun --nproc-per-node 2 examples/train_strata_trainer.py --output_dir demo_out/trainer --max_steps 100

Any argument of ``TrainingArguments`` may follow. Without GPUs add ``--use_cpu``. ``--config`` names a configuration
(docs/CONFIG.md) without batch sizes, precision, optimizer and scheduler: those are Trainer's arguments. Training goes
on from a checkpoint in ``--output_dir``, on any number of ranks.
"""

import os
from dataclasses import dataclass, field

from library_text import LibraryText, model_config, sample
from strata.integrations.transformers import StrataTrainer
from transformers import AutoModelForCausalLM, HfArgumentParser, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class EngineArguments:
    """The arguments for Strata."""

    config: str | None = field(default=None, metadata={"help": "path of a configuration; stage 3 without one"})


def main():
    arguments, own = HfArgumentParser((TrainingArguments, EngineArguments)).parse_args_into_dataclasses()
    trainer = StrataTrainer(
        model=AutoModelForCausalLM.from_config(model_config()),
        args=arguments,
        train_dataset=LibraryText(64),
        eval_dataset=LibraryText(64, 4096),
        strata_config=own.config,
    )
    before = get_last_checkpoint(arguments.output_dir) if os.path.isdir(arguments.output_dir) else None
    trainer.train(resume_from_checkpoint=before)
    loss = trainer.evaluate()["eval_loss"]
    text = sample(trainer.model)
    trainer.save_model(os.path.join(arguments.output_dir, "trained"))
    if trainer.is_world_process_zero():
        print(f"step {trainer.state.global_step}: loss {loss:.3f} nats a byte; it writes {text!r}")


if __name__ == "__main__":
    main()
