"""The engines whose steps are compared: Strata, FSDP2, DeepSpeed, and the floor, which exchanges nothing.

An engine is a function (context, **arguments) -> Training, called in a rank of its own. All start from the same
values: the model is built on the rank's device from the same seed, in bf16, and then sharded. Masters are fp32.
"""

import copy
from collections import namedtuple
from dataclasses import dataclass
from typing import Callable

# A line of the table. ``label`` says what is special about it.
Engine = namedtuple("Engine", "label package start arguments")

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
FLOOR = "floor"
FLOOR_PART = 1 << 29  # elements of a tensor that the floor's optimizer updates

# DeepSpeed with room: what its table of settings calls buckets, in elements.
LARGE_BUCKETS = {
    2: {"reduce_bucket_size": 1_000_000_000, "allgather_bucket_size": 2_000_000_000},
    3: {
        "reduce_bucket_size": 1_000_000_000,
        "stage3_prefetch_bucket_size": 1_000_000_000,
        "stage3_max_live_parameters": 3_000_000_000,
        "stage3_max_reuse_distance": 3_000_000_000,
        "stage3_param_persistence_threshold": 1_000_000,
    },
}


@dataclass
class Training:
    """step(ids) trains one step and returns the loss as a tensor, without waiting for the device. account() returns the
    engine's own report, a dict; memory(), the memory that it holds now. look(on), if there is one, makes it measure the
    following steps more closely."""

    step: Callable
    account: Callable = dict
    look: Callable = None
    memory: Callable = dict


def build_model(context):
    """The model with random values, the same on every rank and for every engine."""
    import torch
    from make_model import make_config
    from transformers import AutoModelForCausalLM

    torch.manual_seed(context.seed)
    attention = "eager" if context.deterministic else None  # fused kernels add up in any order when they go back
    with context.device:
        model = AutoModelForCausalLM.from_config(
            make_config(context.model, context.layers), dtype=torch.bfloat16, attn_implementation=attention
        )
    context.told["parameters"] = sum(p.numel() for p in model.parameters())
    for layer in model.model.layers if context.compile else ():
        layer.compile(mode=context.compile)
    ready_to_train(context, model)
    return model


def merged(base, changes):
    """A deep copy of the dict ``base`` with those of ``changes``, dict by dict."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def spelled_out(changes):
    """Changes of a configuration with the short forms "stage" and "zero" put where they belong."""
    rest = {key: value for key, value in changes.items() if key not in ("stage", "zero")}
    zero = dict(changes.get("zero", {}))
    if "stage" in changes:
        zero["stage"] = changes["stage"]
    return merged({"zero_optimization": zero}, rest) if zero else rest


def json_config(context, *changes):
    """The JSON of DeepSpeed and of Strata, with ``changes`` one after the other."""
    config = {
        "train_micro_batch_size_per_gpu": context.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": context.clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": dict(ADAMW, betas=list(ADAMW["betas"]))},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
    }
    for change in changes:
        config = merged(config, spelled_out(change))
    return config


def strata(context, **changes):
    """A model that the user has built, under Strata."""
    import strata as package

    model = build_model(context)
    graphs = {"strata": {"cuda_graphs": True}} if context.compile == "reduce-overhead" else {}
    config = json_config(context, graphs, context.strata_json, changes)
    engine, *_ = package.initialize(model=model, model_parameters=model.parameters(), config=config)

    def account():
        peaks = {f"{tier} {kind}": peak for (tier, kind), (_, peak) in engine.memory_report().items() if peak}
        told = {"ledger_peaks": peaks, "init_report": engine.init_report, "collectives": engine.collectives_name}
        return told | {"step_report": engine.step_report()}

    def memory():  # "made": pieces of memory, in this step
        held = engine.memory_report()["device", "total"][0]
        return {"held": held, "made": engine.step_report()["device_allocations"]}

    return Training(_engine_step(engine), account, engine.record_steps, memory)


def deepspeed(context, **changes):
    """DeepSpeed, with the model built before."""
    import deepspeed as package

    config = json_config(context, {"zero": context.deepspeed_json}, changes)
    if context.torch_adam:
        config["optimizer"]["params"].update(torch_adam=True, fused=True)
    model = build_model(context)
    engine, *_ = package.initialize(model=model, model_parameters=model.parameters(), config=config)
    return Training(_engine_step(engine))


def fsdp2(context, reduce="fp32", reshard=True, masters=True):
    """torch's fully_shard on every block and on the model: bf16 over fp32 weights, which are made fp32 a block at
    a time, when they are about to be sharded. Without ``masters`` weights, states and the update are bf16."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    model = build_model(context)
    mesh = init_device_mesh(context.device.type, (context.world_size,))
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtypes[reduce])
    for module in [*model.model.layers, model]:
        for parameter in module.parameters():
            if masters and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if context.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), context.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Training(step)


def floor(context):
    """The lower bound for every engine: forward, recomputation and backward of the whole model on every rank at once,
    without an exchange, and AdamW on the number of fp32 elements that a rank would own. The model's weights do not
    change, so only the first of its losses equals that of the others."""
    import torch

    model = build_model(context)
    own = -(-context.told["parameters"] // context.world_size)
    sizes = [min(FLOOR_PART, own - first) for first in range(0, own, FLOOR_PART)]
    parts = [torch.zeros(size, device=context.device, requires_grad=True) for size in sizes]
    for part in parts:
        part.grad = torch.full_like(part, 1e-3)
    optimizer = torch.optim.AdamW(parts, fused=True, **ADAMW)

    def step(ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        optimizer.step()
        return loss.detach()

    return Training(step)


def ready_to_train(context, model):
    """In training mode, with gradient checkpointing unless activations are kept."""
    model.train()
    if not context.keep_activations:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _engine_step(engine):
    engine.train()

    def step(ids):
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


# The engines that a variant may name.
STARTS = {"strata": strata, "deepspeed": deepspeed, "fsdp2": fsdp2}
PACKAGES = {"strata": "strata", "deepspeed": "deepspeed", "fsdp2": "torch"}

ENGINES = {
    FLOOR: Engine("nothing exchanged, AdamW on 1/world", "torch", floor, {}),
    "strata-z2": Engine("Strata 2", "strata", strata, {"stage": 2}),
    "strata-z3": Engine("Strata 3", "strata", strata, {"stage": 3}),
    "fsdp2": Engine("FSDP2, fp32 reduction", "torch", fsdp2, {}),
    "fsdp2-bf16": Engine("FSDP2, bf16 reduction", "torch", fsdp2, {"reduce": "bf16"}),
    "fsdp2-pure": Engine("FSDP2, all in bf16", "torch", fsdp2, {"reduce": "bf16", "masters": False}),
    "fsdp2-bf16-keep": Engine("FSDP2, bf16, not resharded", "torch", fsdp2, {"reduce": "bf16", "reshard": False}),
    "ds-z2": Engine("DeepSpeed 2", "deepspeed", deepspeed, {"stage": 2}),
    "ds-z2-large": Engine("DeepSpeed 2, large", "deepspeed", deepspeed, {"stage": 2, "zero": LARGE_BUCKETS[2]}),
    "ds-z3": Engine("DeepSpeed 3", "deepspeed", deepspeed, {"stage": 3}),
    "ds-z3-large": Engine("DeepSpeed 3, large", "deepspeed", deepspeed, {"stage": 3, "zero": LARGE_BUCKETS[3]}),
}
