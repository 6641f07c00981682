"""Hugging Face jobs under sequence parallelism, by accelerate's ParallelismConfig:

    strata run --num_gpus N sequence_jobs.py FOLDER NAME CASE...

writes FOLDER/NAME.rank<n>.json: by case, losses, gradient norms and an evaluation of FOLDER/model. A case is
SIZE-STAGE or SIZE-STAGE-WHAT; "plain" and "plain-lora" are one rank without an engine.
"""

import functools
import json
import os
import sys

import torch
import transformers
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from peft import LoraConfig, get_peft_model
from sequence_models import VOCABULARY
from strata.integrations.transformers import StrataTrainer
from strata.sequence.exchange import group_loss
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

STEPS, ROWS = 4, 64


class Rows(torch.utils.data.Dataset):
    def __init__(self, number=ROWS, tokens=16, uneven=False):
        generator = torch.Generator().manual_seed(5)
        self.ids, self._uneven = torch.randint(0, VOCABULARY, (number, tokens), generator=generator), uneven

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        labels = self.ids[index].clone()
        if self._uneven:
            labels[: int(index) % 11] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def _config(stage):
    return {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
        "gradient_clipping": "auto", "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip


def _model(folder):
    return AutoModelForCausalLM.from_pretrained(os.path.join(os.path.dirname(folder), "model"))


def _loop(folder, accumulation, size, stage):
    """Accelerate's own loop, whose loaders are all cut: the losses of training and of evaluation, of whole rows."""
    world = int(os.environ["WORLD_SIZE"])
    settings = _settings(size, stage, world)
    config = settings["deepspeed"] | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation,
                                      "gradient_clipping": 0.5}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
                              parallelism_config=settings["parallelism_config"],
                              kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    model = _model(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    loaders = [torch.utils.data.DataLoader(rows, batch_size=2) for rows in (Rows(), Rows(8, 13))]
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
    losses, norms = [], []
    for number, batch in enumerate(loaders[0]):
        with accelerator.accumulate(model):
            loss = group_loss(model(**batch).loss, batch["shift_labels"], model.sequence)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if number % accumulation == accumulation - 1:
            norms.append(float(model.get_global_grad_norm()))
        if len(norms) == STEPS:
            break
    model.eval()
    with torch.no_grad():
        evaluated = [group_loss(model(**batch).loss, batch["shift_labels"], model.sequence).item()
                     for batch in loaders[1]]
    means = [sum(losses[i : i + accumulation]) / accumulation for i in range(0, len(losses), accumulation)]
    return {"losses": means, "norms": norms, "evaluated": sum(evaluated) / len(evaluated)}


def _trainer(folder, accumulation, lora=False, uneven=False, make=Trainer, **more):
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, learning_rate=1e-2,
        max_grad_norm=0.5, logging_steps=1, report_to=[], use_cpu=True, seed=9, disable_tqdm=True,
        lr_scheduler_type="constant", train_sampling_strategy="sequential",
        **{"max_steps": STEPS, "save_strategy": "no"} | more)  # fmt: skip
    model = _model(folder)
    if lora:
        torch.manual_seed(4)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return make(model=model, args=arguments, train_dataset=Rows(uneven=uneven), eval_dataset=Rows(8, 13))


def _found(trainer):
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"losses": [entry["loss"] for entry in logs], "norms": [float(entry["grad_norm"]) for entry in logs],
            "evaluated": trainer.evaluate()["eval_loss"]}


def _settings(size, stage, world):
    return {"deepspeed": _config(stage),
            "parallelism_config": ParallelismConfig(sp_backend="deepspeed", sp_size=size, dp_shard_size=world // size)}


def _run_case(folder, case, world):
    AcceleratorState._reset_state(True)
    kind, *what = case.split("-")
    settings, accumulation = {}, 4
    if kind != "plain":
        size, stage = int(kind), int(what.pop(0))
        accumulation, settings = 4 * size // world, _settings(size, stage, world)
        if "offload" in what:
            settings["deepspeed"]["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if what == ["resumed"]:
        first = _trainer(folder, accumulation, save_strategy="steps", save_steps=2, **settings)
        first.train()
        second = _trainer(folder, accumulation, **settings)
        second.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))
        return _found(second)
    if what == ["loop"]:
        return _loop(folder, accumulation, size, stage)
    if "strata" in what:
        config = {"zero_optimization": settings["deepspeed"]["zero_optimization"],
                  "strata": {"sequence_parallel": {"size": size}}}  # fmt: skip
        settings = {"make": functools.partial(StrataTrainer, strata_config=config)}
    trainer = _trainer(folder, accumulation, lora="lora" in what, uneven="uneven" in what, **settings)
    trainer.train()
    found = _found(trainer)
    found["predicted"] = trainer.predict(Rows(4, 11)).metrics["test_loss"]
    tokens = trainer.model.generate(Rows(1, 9).ids, max_new_tokens=6, do_sample=False, use_cache=True)
    return found | {"generated": tokens.tolist()}


def main(arguments):
    """Runs the cases; writes what this rank found."""
    transformers.utils.logging.set_verbosity_error()
    folder, name, *cases = arguments
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    found = {case: _run_case(os.path.join(folder, f"{name}-{case}"), case, world) for case in cases}
    with open(os.path.join(folder, f"{name}.rank{rank}.json"), "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1:])
