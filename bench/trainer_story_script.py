"""Scripts as users write them for Trainer and TRL with a JSON of DeepSpeed's; nothing in them knows of Strata.

    strata run --num_gpus 2 bench/trainer_story_script.py trainer MODEL OUT --deepspeed JSON [--steps 4] ...
    torchrun --nproc-per-node 2 bench/trainer_story_script.py grpo MODEL OUT --deepspeed JSON [--whole] ...

*trainer*: transformers' Trainer, the whole model. *grpo*: TRL's GRPOTrainer, a LoRA adapter of PEFT's, or with --whole
the whole model; every step generates, and all completions have --length tokens.

Every rank writes lines of JSON: one before the first step, one after it, one after every step from the second on; rank
0 writes what Trainer logs. Seconds of the start are those since the process started.
"""

import argparse
import os
import time

import torch
from story_rank import began, tell
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

RANK = int(os.environ.get("RANK", "0"))


class Watch(TrainerCallback):
    """Writes the lines.

    Args:
        parts: {name: time} of what came before training.
    """

    def __init__(self, parts):
        self.parts, self.began = parts, began()

    def on_train_begin(self, args, state, control, **_):
        self._start({"ready": self._now()})

    def on_step_begin(self, args, state, control, **_):
        self.step_began = self._now()

    def on_step_end(self, args, state, control, **_):
        now, step = self._now(), state.global_step
        if step == 1:
            peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            self._start({"first_step": now}, torch_peak=peak)
        tell({"rank": RANK, "step": step, "seconds": now - self.step_began})

    def on_log(self, args, state, control, logs=None, **_):
        names = ("loss", "grad_norm", "reward", "completions/mean_length", "completions/min_length")
        if RANK == 0 and "loss" in logs:
            tell({"logged": state.global_step} | {name: logs[name] for name in names if name in logs})

    def _start(self, parts, **more):
        self.parts |= parts
        tell({"rank": RANK, "parts": {name: at - self.began for name, at in self.parts.items()}} | more)

    def _now(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.time()


class Tokens(torch.utils.data.Dataset):
    """Random tokens, the same for every engine."""

    def __init__(self, count, length, vocabulary):
        generator = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(vocabulary, (count, length), generator=generator)

    def __len__(self):
        return len(self._tokens)

    def __getitem__(self, index):
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def reward(completion_ids, **_):
    """[float]: two completions rarely get the same reward."""
    return [sum(number * token for number, token in enumerate(tokens, 1)) % 97 / 97 for tokens in completion_ids]


def common_arguments(a):
    """The arguments that TrainingArguments and GRPOConfig share."""
    return dict(
        output_dir=a.out, deepspeed=a.deepspeed, max_steps=a.steps, per_device_train_batch_size=a.batch,
        gradient_accumulation_steps=1, learning_rate=1e-5, max_grad_norm=1.0, bf16=True, gradient_checkpointing=True,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=a.cpu,
        dataloader_pin_memory=not a.cpu, lr_scheduler_type="constant",
    )  # fmt: skip


def whole_model_trainer(a, parts):
    args = TrainingArguments(**common_arguments(a))
    parts["arguments"] = time.time()
    model = AutoModelForCausalLM.from_pretrained(a.model)
    parts["from_pretrained"] = time.time()
    model.config.use_cache = False
    data = Tokens(64, a.length, min(model.config.vocab_size, 50000))
    return Trainer(model=model, args=args, train_dataset=data)


def grpo_trainer(a, parts):
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    parts["import"] = time.time()
    args = GRPOConfig(
        num_generations=a.batch, steps_per_generation=1, max_completion_length=a.length, beta=0.0,
        generation_kwargs={"min_new_tokens": a.length}, **common_arguments(a),
    )  # fmt: skip
    parts["arguments"] = time.time()
    model = AutoModelForCausalLM.from_pretrained(a.model)
    parts["from_pretrained"] = time.time()
    adapter = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return GRPOTrainer(
        model=model, args=args, reward_funcs=reward, processing_class=AutoTokenizer.from_pretrained(a.model),
        train_dataset=Dataset.from_dict({"prompt": [f"The number after {n} is" for n in range(10, 74)]}),
        peft_config=None if a.whole else adapter,
    )  # fmt: skip


def main():
    parts = {"import": time.time()}
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["trainer", "grpo"])
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--deepspeed")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    a = parser.parse_args()
    if a.cpu:  # Accelerate leaves ranks without accelerators unconnected
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
    trainer = (whole_model_trainer if a.kind == "trainer" else grpo_trainer)(a, parts)
    parts["trainer"] = time.time()
    trainer.add_callback(Watch(parts))
    trainer.train()


main()
