"""The engines that bench_cpu.py compares: each makes a training step of the same model.

A contestant is a function (workload, rank, world_size, **settings) -> Trainer, run in a process of its own after
torch.distributed is set up (if it exchanges anything). Stage 3 means for all: weights are released after a block has
used them, in forward and in backward, and at most about three blocks are whole at once.
"""

import os
from dataclasses import dataclass
from typing import Callable


@dataclass
class Trainer:
    """step(ids) -> loss as a float; held() -> bytes by the engine's own account, or None."""

    step: Callable
    held: Callable = lambda: None


@dataclass
class Contestant:
    """A line of the table."""

    label: str
    make: Callable
    settings: dict
    exchanges: bool = True
    package: str = "torch"


def _torch_adam(parameters, workload):
    import torch

    adam = dict(workload.adam, betas=tuple(workload.adam["betas"]))
    return torch.optim.AdamW(parameters, fused=True, **adam)


def _torch_step(model, optimizer, workload, autocast=False):
    import torch

    from workload import loss_of

    def step(ids):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clipping)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def plain_torch(workload, rank, world_size):
    """A step without an exchange and without an engine."""
    model = workload.build()
    optimizer = _torch_adam(model.parameters(), workload)
    return Trainer(_torch_step(model, optimizer, workload, workload.dtype == "bf16"))


def ddp(workload, rank, world_size):
    """torch's DistributedDataParallel; in bf16 under autocast, with fp32 weights."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(workload.build(), gradient_as_bucket_view=True)
    optimizer = _torch_adam(model.parameters(), workload)
    return Trainer(_torch_step(model, optimizer, workload, workload.dtype == "bf16"))


def fsdp2(workload, rank, world_size, stage):
    """torch's fully_shard on every block and on the model."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = workload.build()
    mesh = init_device_mesh("cpu", (world_size,))
    policy = MixedPrecisionPolicy()
    if workload.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=stage == 3, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=stage == 3, mp_policy=policy)
    return Trainer(_torch_step(model, _torch_adam(model.parameters(), workload), workload))


def _json_config(workload, model, stage):
    block = workload.block_numel(model)
    config = {
        "train_micro_batch_size_per_gpu": workload.micro_batch,
        "gradient_clipping": workload.clipping,
        "optimizer": {"type": "AdamW", "params": dict(workload.adam)},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 4 * block,
            "stage3_max_live_parameters": 3 * block,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": block,
        },
    }
    if workload.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def deepspeed(workload, rank, world_size, stage):
    """DeepSpeed with torch's fused AdamW."""
    import torch

    import deepspeed as package

    model = workload.build()
    config = _json_config(workload, model, stage)
    config["optimizer"]["params"].update(torch_adam=True, fused=True)
    config["zero_optimization"]["allgather_bucket_size"] = 4 * workload.block_numel(model)
    engine, *_ = package.initialize(model=model, model_parameters=model.parameters(), config=config)
    if not isinstance(engine.basic_optimizer, torch.optim.AdamW):
        raise RuntimeError(f"DeepSpeed took {type(engine.basic_optimizer).__name__}, not torch's AdamW")
    return Trainer(_engine_step(engine))


def strata(workload, rank, world_size, stage, collectives):
    """Strata, with DeepSpeed's JSON."""
    import strata as package

    model = workload.build()
    config = _json_config(workload, model, stage)
    config["strata"] = {"collectives": collectives}
    engine, *_ = package.initialize(model=model, config=config)

    def held():
        return sum(peak for (_, kind), (_, peak) in engine.memory_report().items() if kind == "total")

    return Trainer(_engine_step(engine), held)


def _engine_step(engine):
    from workload import loss_of

    def step(ids):
        loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def contestants(stage):
    """The contestants of one stage by name, Strata's first."""
    return {
        "strata-shm": Contestant(
            f"Strata {stage}, shm", strata, {"stage": stage, "collectives": "shm"}, package="strata"
        ),
        "strata-gloo": Contestant(
            f"Strata {stage}, gloo", strata, {"stage": stage, "collectives": "c10d"}, package="strata"
        ),
        "fsdp2": Contestant(f"FSDP2 {stage}", fsdp2, {"stage": stage}),
        "deepspeed": Contestant(f"DeepSpeed {stage}", deepspeed, {"stage": stage}, package="deepspeed"),
        "ddp": Contestant("DDP", ddp, {}),
        "plain": Contestant("plain torch, nothing exchanged", plain_torch, {}, exchanges=False),
    }


def use_cores(world_size):
    """Threads a rank, before torch is imported: the cores divided among the ranks."""
    threads = max(1, (os.cpu_count() or 1) // world_size)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads
