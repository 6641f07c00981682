"""The engines whose start is compared: Strata, FSDP2 and DeepSpeed, each in the way that its documentation shows.

An engine is a function (context) -> step, called in a process of its own when the clock runs; it wraps its work in
phases of ``context.clock``. ``step(ids)`` trains one step and returns the loss. Libraries import and compile many of
their modules at first use: ``prepare`` makes them do so before the clock runs.
"""

import contextlib
import gc
import importlib
from collections import namedtuple
from types import SimpleNamespace


class Engine(namedtuple("Engine", "label package stage start arguments")):
    """A line of the table. ``stage`` is the ZeRO stage that it corresponds to; ``arguments`` are of ``start``."""

    @property
    def moves_in(self):
        """Whether ``initialize`` takes a model over that lies on the host."""
        return self.arguments.get("on_gpu") is False


# Class of torch.optim -> its arguments. SGD keeps no states, so that larger models fit.
OPTIMIZERS = {
    "AdamW": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
    "SGD": {"lr": 1e-4},
}


def prepare(engine, context, toy):
    """Imports and compiles the modules that ``engine`` needs, before the clock runs: it starts a toy model of the same
    kind.

    Args:
        toy: a folder with a checkpoint; None: only what is sure to be imported by everyone.
    """
    import torch
    import transformers

    if engine.package != "torch":
        importlib.import_module(engine.package)
    architecture = transformers.AutoConfig.from_pretrained(context.model).architectures[0]
    getattr(transformers, architecture)
    # Optimizers of torch import its compiler when they are first made.
    _torch_optimizer(context, [torch.nn.Parameter(torch.zeros(1, device=context.device))])
    if toy is None:
        return
    rehearsal = SimpleNamespace(**{**vars(context), "model": toy, "clock": _NoClock(), "told": {}, "endings": []})
    engine.start(rehearsal, **engine.arguments)
    context.barrier()
    for end in rehearsal.endings:
        end()
    del rehearsal
    gc.collect()


def _torch_optimizer(context, parameters):
    import torch

    fused = context.optimizer == "AdamW"  # sharded parameters have no fused SGD
    return getattr(torch.optim, context.optimizer)(parameters, fused=fused, **OPTIMIZERS[context.optimizer])


class _NoClock:
    def phase(self, kind, name):
        return contextlib.nullcontext()


def json_config(context, stage, for_deepspeed=False):
    """The JSON of DeepSpeed and of Strata."""
    config = {
        "train_micro_batch_size_per_gpu": context.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": context.optimizer, "params": dict(OPTIMIZERS[context.optimizer])},
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
    }
    if for_deepspeed and context.optimizer != "AdamW":
        config["zero_allow_untested_optimizer"] = True
    elif for_deepspeed and context.torch_adam:
        config["optimizer"]["params"]["torch_adam"] = True
    if not for_deepspeed and context.strata_json:
        config["strata"] = context.strata_json
    return config


def strata_pretrained(context, stage):
    """From the files into the shards, never whole."""
    import strata

    with context.clock.phase("load", "strata.load_pretrained"):
        engine, *_ = strata.load_pretrained(context.model, json_config(context, stage))
    return _told_by_strata(context, engine)


def strata_live(context, stage, on_gpu):
    """A model that the user has built."""
    import strata

    with context.clock.phase("load", _where(context, on_gpu)):
        model = _from_pretrained(context, on_gpu)
    if context.unfuse:
        _unfuse(model)
    with context.clock.phase("initialize", "strata.initialize"):
        engine, *_ = strata.initialize(model=model, config=json_config(context, stage))
    return _told_by_strata(context, engine)


def _told_by_strata(context, engine):
    report = getattr(engine, "init_report", None)
    context.told["init_report"] = report() if callable(report) else report
    peaks = {f"{tier} {kind}": peak for (tier, kind), (_, peak) in engine.memory_report().items() if peak}
    context.told["ledger_peaks"] = peaks
    if context.on_gpu:
        context.told["pinned"] = peaks.get("host staging", 0)  # what lies between the files and the GPU
    return _engine_step(context, engine)


def deepspeed_zero(context, stage, on_gpu=False):
    """DeepSpeed; at stage 3 with transformers' own integration, which loads into zero.Init."""
    import deepspeed

    config = json_config(context, stage, for_deepspeed=True)
    where = "from_pretrained, every rank, into zero.Init" if stage == 3 else _where(context, on_gpu)
    with context.clock.phase("load", where):
        if stage == 3:
            from transformers.integrations import HfDeepSpeedConfig

            context.keep = HfDeepSpeedConfig(config)  # transformers looks for it while it lives
        model = _from_pretrained(context, on_gpu)
    if context.unfuse and stage != 3:  # there it is partitioned already
        _unfuse(model)
    with context.clock.phase("initialize", "deepspeed.initialize"):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return _engine_step(context, engine)


def fsdp2(context):
    """torch's fully_shard on a model without memory, filled from rank 0; bf16 over fp32 weights."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    state = {}
    with context.clock.phase("load", "from_pretrained, rank 0, CPU"):
        if context.rank == 0:
            state = _from_pretrained(context, on_gpu=False).state_dict()
    with context.clock.phase("initialize", "meta, fully_shard, broadcast from rank 0, AdamW"):
        configuration = AutoConfig.from_pretrained(context.model)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(configuration, dtype=torch.float32)
        mesh = init_device_mesh(context.device.type, (context.world_size,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model.to_empty(device=context.device)
        state = {name: tensor.float() for name, tensor in state.items()}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=False)
        set_model_state_dict(model, state, options=options)
        with context.device:
            model.model.rotary_emb = type(model.model.rotary_emb)(configuration)
        del state
        optimizer = _torch_optimizer(context, model.parameters())
    _ready_to_train(model)

    def step(ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _where(context, on_gpu):
    return f"from_pretrained, every rank, onto {context.device.type if on_gpu else 'cpu'}"


def _from_pretrained(context, on_gpu):
    import torch
    from transformers import AutoModelForCausalLM

    where = {"device_map": {"": context.device}} if on_gpu else {}
    return AutoModelForCausalLM.from_pretrained(context.model, dtype=torch.bfloat16, **where)


def _unfuse(model):
    from unfused_experts import unfuse

    unfuse(model)


def _ready_to_train(model):
    model.train()
    with contextlib.suppress(ValueError):  # a model that has none
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _engine_step(context, engine):
    context.endings.append(engine.destroy)
    engine.train()
    _ready_to_train(engine.module)

    def step(ids):
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


ENGINES = {
    "strata-z2": Engine("Strata 2, load_pretrained", "strata", 2, strata_pretrained, {"stage": 2}),
    "strata-z3": Engine("Strata 3, load_pretrained", "strata", 3, strata_pretrained, {"stage": 3}),
    "strata-live-z2": Engine("Strata 2, model on the GPU", "strata", 2, strata_live, {"stage": 2, "on_gpu": True}),
    "strata-live-z3": Engine("Strata 3, model on the GPU", "strata", 3, strata_live, {"stage": 3, "on_gpu": True}),
    "strata-host-z2": Engine("Strata 2, model on the host", "strata", 2, strata_live, {"stage": 2, "on_gpu": False}),
    "fsdp2": Engine("FSDP2", "torch", 3, fsdp2, {}),
    "ds-z2": Engine("DeepSpeed 2, model on the host", "deepspeed", 2, deepspeed_zero, {"stage": 2}),
    "ds-live-z2": Engine("DeepSpeed 2, model on the GPU", "deepspeed", 2, deepspeed_zero, {"stage": 2, "on_gpu": True}),
    "ds-z3": Engine("DeepSpeed 3, zero.Init", "deepspeed", 3, deepspeed_zero, {"stage": 3}),
}
