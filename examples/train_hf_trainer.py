"""Trains a small model with Hugging Face's Trainer at ZeRO stage 3. The script does not mention Strata:

    strata run --num_gpus 2 examples/train_hf_trainer.py --deepspeed examples/ds_trainer.json --output_dir demo_out/hf
    STRATA_COMPAT=deepspeed torchrun --nproc-per-node 2 examples/train_hf_trainer.py ...
    deepspeed --num_gpus 2 examples/train_hf_trainer.py ...                                    (DeepSpeed itself)

Any argument of ``TrainingArguments`` may follow. Without GPUs add ``--use_cpu``. Training goes on from a checkpoint in
``--output_dir``, on any number of ranks.
"""

import os

from library_text import LibraryText, model_config, sample
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


def main():
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_config(model_config())
    trainer = Trainer(model=model, args=arguments, train_dataset=LibraryText(64), eval_dataset=LibraryText(64, 4096))
    before = get_last_checkpoint(arguments.output_dir) if os.path.isdir(arguments.output_dir) else None
    trainer.train(resume_from_checkpoint=before)
    loss = trainer.evaluate()["eval_loss"]
    text = sample(trainer.model)
    trainer.save_model(os.path.join(arguments.output_dir, "trained"))
    if trainer.is_world_process_zero():
        print(f"step {trainer.state.global_step}: loss {loss:.3f} nats a byte; it writes {text!r}")


if __name__ == "__main__":
    main()
