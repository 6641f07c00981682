"""Hugging Face jobs under the ``deepspeed`` of this process: DeepSpeed, or Strata in its place.

    strata run --num_gpus N hf_jobs.py FOLDER NAME CASE...

writes FOLDER/NAME.rank<n>.json: by case, losses of this rank's micro-batches, gradient norms, and the case's other
findings. FOLDER/model is a checkpoint of transformers.
"""

import copy
import importlib
import json
import logging
import os
import sys
import warnings

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, InitProcessGroupKwargs
from deepspeed_over_gloo import deepspeed_over_gloo
from hf_models import MODELS
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.integrations import HfDeepSpeedConfig

STEPS = int(os.environ.get("STRATA_TRAINER_STEPS", "6"))
MIDDLE = STEPS // 2  # where there is a checkpoint
VOCABULARY = 96
ADAMW = {"lr": "auto", "betas": "auto", "eps": 1e-8, "weight_decay": "auto", "torch_adam": True}
WARMUP = {"type": "WarmupLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")}


def zero(stage, **more):
    """A configuration as people write it for Trainer."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": 16,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **more,
    }


def offloaded(**more):
    config = zero(3, **more)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": False}
    return config


CONFIGS = {
    "trainer-1": lambda: zero(1),
    "trainer-2": lambda: zero(2, optimizer={"type": "AdamW", "params": dict(ADAMW)}, scheduler=copy.deepcopy(WARMUP)),
    "trainer-3": lambda: zero(3),
    "trainer-3-offload": lambda: offloaded(optimizer={"type": "AdamW", "params": dict(ADAMW)}),
    "cpuadam-3": offloaded,  # Accelerate makes a DeepSpeedCPUAdam of Trainer's AdamW
    "evaluated-3": lambda: zero(3),
    "lora-3": lambda: zero(3),
    "olora-3": lambda: zero(3),
    "lora-2": lambda: zero(2),
}


class Texts(torch.utils.data.Dataset):
    """Random tokens that repeat within a text, so that there is something to learn."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        halves = torch.randint(3, VOCABULARY, (count, 8), generator=generator)
        self._rows = torch.cat([halves, halves], 1)

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class Recorder(Trainer):
    """A Trainer that keeps the loss of each of this rank's micro-batches, and norms."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        result = super().compute_loss(model, inputs, *args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        if model.training:
            self.__dict__.setdefault("losses", []).append(loss.item())
        return result

    def norms(self):
        return [entry["grad_norm"] for entry in self.state.log_history if "grad_norm" in entry]


def arguments(folder, config, **more):
    return TrainingArguments(
        output_dir=folder,
        deepspeed=config,
        use_cpu=True,
        max_steps=STEPS,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=0.5,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=7,
        **{"per_device_train_batch_size": 2, **more},
    )


def new_model(folder):
    return AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)


def prepared(model, case):
    """The model as the case trains it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    targets = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    if case.startswith("lora"):
        return get_peft_model(model, LoraConfig(**targets))
    if case.startswith("olora"):  # looks at the base's weights, copies a module, and finds a new embedding
        model.resize_token_embeddings(VOCABULARY + 4, mean_resizing=False)
        model.gradient_checkpointing_enable()
        return get_peft_model(model, LoraConfig(init_lora_weights="olora", modules_to_save=["lm_head"], **targets))
    return model


def write_weights(model, path):
    """{name: tensor} of a model under the engine, by rank 0."""
    deepspeed = importlib.import_module("deepspeed")
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        if torch.distributed.get_rank() == 0:
            torch.save({name: p.detach().clone() for name, p in model.named_parameters()}, path)


def write_merged(model, path):
    """A checkpoint of transformers with the adapters merged into a copy of the model, by rank 0."""
    deepspeed = importlib.import_module("deepspeed")
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        merged = copy.deepcopy(model).merge_and_unload()
        if torch.distributed.get_rank() == 0:
            merged.save_pretrained(path)


def run_trainer(folder, out, case):
    """Trains with evaluation, checkpoints and the best model; then predicts and generates."""
    told = {}
    more = {
        "eval_strategy": "steps", "eval_steps": MIDDLE, "save_strategy": "steps", "save_steps": MIDDLE,
        "load_best_model_at_end": True, "per_device_eval_batch_size": 2, "metric_for_best_model": "eval_loss",
    }  # fmt: skip
    args = arguments(out, CONFIGS[case](), **more)
    model = prepared(new_model(folder), case)
    data = {"train_dataset": Texts(96, 1), "eval_dataset": Texts(8, 2)}
    trainer = Recorder(args=args, model=model, **data)
    if case.startswith("evaluated"):  # by an engine of its own, of which another takes the model over
        told["before"] = trainer.evaluate()["eval_loss"]
        AcceleratorState._reset_state(reset_partial_state=True)
        trainer = Recorder(args=arguments(out, CONFIGS[case](), **more), model=model, **data)
    trainer.train()
    told["losses"], told["norms"] = trainer.losses, trainer.norms()
    told["evaluated"] = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    told["best"] = os.path.basename(trainer.state.best_model_checkpoint)
    told["again"] = trainer.evaluate()["eval_loss"]
    told["predicted"] = torch.as_tensor(trainer.predict(Texts(4, 3)).predictions).double().abs().sum().item()
    prompt = Texts(1, 4)[0]["input_ids"][None, :5]
    generated = trainer.model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False)
    told["generated"] = generated[0].tolist()
    trainer.save_model(f"{out}/final")
    write_weights(trainer.model, f"{out}/weights.pt")
    if case == "lora-3" and "strata" in importlib.import_module("deepspeed").__version__:
        write_merged(trainer.model, f"{out}/merged")
    return told


def run_resumed(folder, out, case):
    """Goes on from the checkpoint in the middle of ``run_trainer``."""
    args = arguments(out, CONFIGS[case](), save_strategy="no")
    trainer = Recorder(args=args, model=prepared(new_model(folder), case), train_dataset=Texts(96, 1))
    trainer.train(resume_from_checkpoint=f"{out}/checkpoint-{MIDDLE}")
    return {"resumed": trainer.losses}


def run_loop(folder, out, case):
    """Accelerate's own loop, with its optimizer or the configuration's."""
    stage = int(case[-1])
    config = zero(stage) | {"gradient_clipping": 0.5}
    if stage == 3:
        adamw = {"type": "AdamW", "params": ADAMW | {"betas": [0.9, 0.95]}}
        config |= {"optimizer": adamw, "scheduler": copy.deepcopy(WARMUP)}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, gradient_accumulation_steps=2),
                              gradient_accumulation_steps=2, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    model = new_model(folder)
    generator = torch.Generator().manual_seed(5)
    loader = torch.utils.data.DataLoader(Texts(96, 1), batch_size=2, shuffle=True, generator=generator)
    if stage == 3:
        optimizer = DummyOptim(model.parameters(), lr=2e-3, weight_decay=0.1)
        scheduler = DummyScheduler(optimizer, warmup_num_steps=5)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 7))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    losses, norms, rates = [], [], []
    while len(norms) < STEPS:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                rates.append(optimizer.param_groups[0]["lr"])
            if len(norms) == STEPS:
                break
    assert accelerator.unwrap_model(model) is model.module
    whole = accelerator.get_state_dict(model)
    told = {"losses": losses, "norms": norms, "rates": rates}
    if accelerator.is_main_process:
        told["weights"] = sum(value.double().abs().sum().item() for value in whole.values())
    return told


def run_loading(folder, out, case):
    """By model: names whose values under stage 3 are not those of plain ``from_pretrained``; those that are whole on
    every rank afterwards; and the messages."""
    told = {}
    for name in ("llama", "qwen3_moe", "tied", "pickled"):
        path, said = f"{out}-{name}", []
        if torch.distributed.get_rank() == 0:
            save_model(name, path)
        torch.distributed.barrier()
        handler = logging.Handler()
        handler.emit = lambda record, said=said: said.append(record.getMessage())
        logging.getLogger("strata").addHandler(handler)
        logging.getLogger("strata").setLevel(logging.WARNING)  # Trainer has set it to its own level
        alive = HfDeepSpeedConfig(zero(3))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        del alive
        logging.getLogger("strata").removeHandler(handler)
        kept = [n for n, p in model.named_parameters() if p.numel() > 0]
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        deepspeed = importlib.import_module("deepspeed")
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            own, whole = dict(model.named_parameters()), dict(plain.named_parameters())
            assert own.keys() == whole.keys(), name
            wrong = [n for n, p in own.items() if not torch.equal(p, whole[n])]
        told[name] = {"wrong": wrong, "kept": kept, "said": said}
    return told


def save_model(name, path):
    model = MODELS["qwen3_moe" if name == "qwen3_moe" else "llama"].build()
    if name == "tied":
        config = copy.deepcopy(model.config)
        config.tie_word_embeddings = True
        model = type(model)(config)
    model.save_pretrained(path, max_shard_size="20KB" if name == "llama" else "5GB")
    if name == "pickled":
        os.remove(f"{path}/model.safetensors")
        torch.save(model.state_dict(), f"{path}/pytorch_model.bin")


def main(command):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    folder, name, *cases = command
    told = {"deepspeed": deepspeed_over_gloo().__version__}
    for case in cases:
        transformers.set_seed(11)
        kind, _, of = case.rpartition(":")
        run = run_resumed if kind == "resume" else RUNS.get(of[:4], run_trainer)
        told[case] = run(folder, f"{folder}/{name}-{of}", of)
        AcceleratorState._reset_state(reset_partial_state=True)
    with open(f"{folder}/{name}.rank{os.environ.get('RANK', '0')}.json", "w", encoding="utf-8") as file:
        json.dump(told, file)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # its threads end before the process does


RUNS = {"loop": run_loop, "load": run_loading}

if __name__ == "__main__":
    main(sys.argv[1:])
