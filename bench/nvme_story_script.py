"""GRPO with a LoRA adapter as users write it for `accelerate launch`; the configuration puts the weights on a drive.

    accelerate launch --config_file YAML bench/nvme_story_script.py MODEL OUT DRIVE STEPS GENERATIONS TOKENS [cpu]

It does not know Strata, except that it reads the engine's report of a step if there is one. Writes a line of JSON per
step: seconds, Trainer's log of the step, and bytes over the drive's links. A line before them lists the files in DRIVE
when training begins; a line after them has torch's memory of the GPU. The adapter is saved as OUT/adapter.
"""

import json
import os
import sys
import time

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completions, **_):
    """[float]: two texts rarely get the same reward."""
    return [sum(number * ord(letter) for number, letter in enumerate(text, 1)) % 97 / 97 for text in completions]


class Watch(TrainerCallback):
    """Writes the lines. ``trainer`` is to be set."""

    def __init__(self, drive):
        self.began, self.step, self.drive, self.trainer = time.perf_counter(), {}, drive, None

    def on_train_begin(self, args, state, control, **_):
        ready = time.perf_counter() - self.began
        files = [os.path.join(folder, name) for folder, _, names in os.walk(self.drive) for name in names]
        self._tell({"ready": ready, "nvme_files": len(files), "nvme_bytes": sum(map(os.path.getsize, files)),
                    "library": sys.modules["deepspeed"].__version__})  # fmt: skip

    def on_step_begin(self, args, state, control, **_):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.step = {"step": state.global_step, "seconds": time.perf_counter() - self.began}
        report = getattr(self.trainer.model_wrapped, "step_report", dict)()
        links = (report.get("offload") or {}).get("links", {})
        self.step |= {f"{name}_bytes": links[name]["bytes"] for name in ("read", "write") if name in links}

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self._tell(self.step | {name: logs.get(name) for name in ("loss", "grad_norm", "reward")})

    def on_train_end(self, args, state, control, **_):
        self._tell({"torch_peak": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0})

    def _tell(self, line):
        os.write(1, f"{json.dumps(line)}\n".encode())


def main():
    path, out, drive = sys.argv[1:4]
    steps, generations, new_tokens = map(int, sys.argv[4:7])
    watch = Watch(drive)
    tokenizer = AutoTokenizer.from_pretrained(path)
    args = GRPOConfig(
        output_dir=out, max_steps=steps, per_device_train_batch_size=1, gradient_accumulation_steps=1,
        steps_per_generation=generations, num_generations=generations, max_completion_length=new_tokens,
        learning_rate=1e-5, max_grad_norm=1.0, bf16=True, gradient_checkpointing=True, beta=0.04, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu="cpu" in sys.argv[7:],
        dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=path, args=args, reward_funcs=reward, processing_class=tokenizer, callbacks=[watch],
        train_dataset=Dataset.from_dict({"prompt": [f"The number after {n} is" for n in range(64)]}),
        peft_config=LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )  # fmt: skip
    watch.trainer = trainer
    trainer.train()
    trainer.save_model(os.path.join(out, "adapter"))


main()
