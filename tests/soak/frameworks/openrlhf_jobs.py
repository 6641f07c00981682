"""OpenRLHF's strategy with a tiny actor, under the ``deepspeed`` of this process.

    torchrun ... openrlhf_jobs.py FOLDER NAME first|resumed CASE...

writes FOLDER/NAME-<phase>.rank<n>.json: by case (fp32-3) the losses of this rank's micro-batches. ``first`` takes all
steps and saves after half of them; ``resumed`` goes on from there. FOLDER/model is a checkpoint of transformers.
"""

import gc
import importlib
import importlib.machinery
import json
import os
import sys
import types
import warnings
from unittest import mock

import torch

STEPS, MIDDLE, VOCABULARY = 8, 4, 96
OPTIMIZER = {
    "optim": "adam", "adam": {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "lr_scheduler": "cosine_with_min_lr", "lr_warmup_ratio": 0.25, "max_norm": 0.5, "scheduler_steps": STEPS // 2,
}  # fmt: skip


def without_flash_attention():
    """OpenRLHF imports functions of flash-attn, which is built for GPUs alone, and calls them to pack samples."""
    names = {"bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
             "utils": (), "utils.distributed": ("all_gather",)}  # fmt: skip
    for name, functions in {"": (), **names}.items():
        module = types.ModuleType(f"flash_attn.{name}".rstrip("."))
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.__dict__.update(dict.fromkeys(functions))
        sys.modules[module.__name__] = module


def on_the_host():
    """The calls of CUDA that the strategy makes on any machine, for ranks of the CPU."""
    mesh = torch.distributed.device_mesh.init_device_mesh
    strategy = importlib.import_module("openrlhf.utils.deepspeed.deepspeed")
    return [
        mock.patch.object(torch.cuda, "set_device", lambda device: None),
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(torch.cuda, "synchronize", lambda: None),
        mock.patch.object(strategy, "init_device_mesh", lambda _, *args, **more: mesh("cpu", *args, **more)),
    ]


def strategy_of(dtype, stage):
    """OpenRLHF's strategy for two ranks, a micro-batch of 2 and an accumulation of 2."""
    module = importlib.import_module("openrlhf.utils.deepspeed.deepspeed")

    class Strategy(module.DeepspeedStrategy):
        def get_ds_train_config(self, optim_dict=None, **more):
            config = super().get_ds_train_config(optim_dict, **more)
            if optim_dict is not None:  # else DeepSpeed compiles an optimizer for minutes
                config["optimizer"]["params"]["torch_adam"] = True
            return config

    args = types.SimpleNamespace(
        local_rank=-1, train=types.SimpleNamespace(dynamic_batch_enable=False),
        ds=types.SimpleNamespace(param_dtype=dtype, zero_stage=stage, tensor_parallel_size=1),
    )  # fmt: skip
    return Strategy(seed=5, max_norm=0.5, micro_train_batch_size=2, train_batch_size=8, zero_stage=stage, args=args)


def actor_of(strategy, dtype, stage, path):
    """Read by the Actor in 16 bits, which it knows; in fp32 by the same calls."""
    models = importlib.import_module("openrlhf.models")
    config = strategy.get_ds_train_config()
    if dtype == "bf16":
        return models.Actor(path, attn_implementation="eager", param_dtype=dtype, ds_config=config)
    transformers = importlib.import_module("transformers")
    kept = transformers.integrations.HfDeepSpeedConfig(config) if stage == 3 else None
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    del kept
    actor = models.Actor(model)
    actor.packing_samples = False
    return actor


def batches(rank):
    generator = torch.Generator().manual_seed(3)
    halves = torch.randint(3, VOCABULARY, (STEPS, 2, 2, 6), generator=generator)[:, rank]
    return torch.cat([halves, halves], 2)


def train(dtype, stage, path, saved, resumed):
    """Losses of this rank's micro-batches, and norms of the steps."""
    strategy = strategy_of(dtype, stage)
    strategy.setup_distributed()
    actor, optimizer, scheduler = strategy.prepare((actor_of(strategy, dtype, stage, path), OPTIMIZER))
    policy_loss = importlib.import_module("openrlhf.models").SFTLoss()
    begin, losses, norms = 0, [], []
    if resumed:
        _, states = strategy.load_ckpt(actor.model, saved)
        begin = states["micro_batches"]
    for index, sequences in enumerate(batches(strategy.get_rank())[begin:], begin + 1):
        mask = torch.ones_like(sequences)
        log_probs = actor(sequences, attention_mask=mask, return_logprobs=True)
        loss = policy_loss(log_probs, mask[:, :-1].float())
        strategy.backward(loss, actor, optimizer)
        strategy.optimizer_step(optimizer, actor, scheduler)
        losses.append(strategy.all_reduce({"loss": loss.item()}, "sum")["loss"])
        if index % 2 == 0:
            norms.append(strategy.get_grad_norm(actor))
        if index == MIDDLE and not resumed:
            strategy.save_ckpt(actor.model, saved, tag="middle", client_state={"micro_batches": index})
    if not resumed:
        tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(path)
        strategy.save_model(actor, tokenizer, f"{saved}-model")
    actor.model.destroy()
    del actor, optimizer, scheduler
    gc.collect()
    return {"losses": losses, "norms": norms}


def main(folder, name, phase, *cases):
    warnings.simplefilter("ignore")
    deepspeed = importlib.import_module("deepspeed")
    without_flash_attention()
    deepspeed.init_distributed(dist_backend="gloo")
    told = {}
    for patch in on_the_host():
        patch.start()
    for case in cases:
        dtype, _, stage = case.partition("-")
        told[case] = train(dtype, int(stage), f"{folder}/model", f"{folder}/{name}-{case}", phase == "resumed")
    with open(f"{folder}/{name}-{phase}.rank{os.environ['RANK']}.json", "w", encoding="utf-8") as file:
        json.dump(told, file)
    torch.distributed.destroy_process_group()  # whose threads, where DeepSpeed leaves them, may abort the process


if __name__ == "__main__":
    main(*sys.argv[1:])
