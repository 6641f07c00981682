"""Adapters of PEFT: saves those with sharded weights through PEFT's ``save_pretrained``, and loads them."""

import os
import sys
from contextlib import contextmanager

import torch

from .. import _C
from ..model.parameter import gathered
from ..ranks.runtime import agree_after
from ..tiles.host_copy import values_on_host
from .names import state_names
from .whole_files import moved_into

# Methods of PEFT whose file holds every trained tensor unchanged, so that a model without values can be filled from it.
_READABLE = {"BOFT", "C3A", "FOURIERFT", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT",
             "PREFIX_TUNING", "PROMPT_TUNING", "VBLORA", "VERA"}
# LoRA's initializations that do not change the base model's weights.
_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
_PROMPTS = "prompt_embeddings"  # the name in the file, for methods that learn a prompt
_INSTEAD = "; build the model with peft.PeftModel.from_pretrained(...) and pass it to strata.initialize"

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_peft_model(model):
    """Whether ``model`` is a peft.PeftModel; imports nothing."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def holds_adapter(folder):
    """Whether ``folder`` has an adapter's configuration and no model's configuration."""
    return os.path.exists(os.path.join(folder, CONFIG)) and not os.path.exists(os.path.join(folder, "config.json"))


def read_adapter_config(folder):
    """(peft.PeftConfig to train with, folder of the base model). FormatError where it names no existing folder of a
    base model. UsageError where peft is not installed, or the adapter's file does not hold all of its values."""
    try:
        import peft
    except ImportError as error:
        raise _C.UsageError(
            f"{folder} holds an adapter of PEFT, and peft is not installed: pip install peft") from error
    config = peft.PeftConfig.from_pretrained(os.fspath(folder))
    _require_readable(config, folder)
    config.inference_mode = False
    base = config.base_model_name_or_path
    if not base or not os.path.isdir(base):
        raise _C.FormatError(f"{folder}: {CONFIG} names the base model {base!r}, and there is no such folder; wanted "
                             "the folder of a checkpoint in 'base_model_name_or_path'")
    return config, base


def attach_adapter(model, config):
    """The peft.PeftModel of a model with meta parameters; so are the adapter's. Returns it and {name in its file:
    parameter or buffer}. UsageError where the adapter computes a buffer from the base model's weights."""
    import peft

    with _without_values(config):
        wrapped = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
    if config.is_prompt_learning:
        learned = dict(wrapped.prompt_encoder["default"].named_parameters())
        return wrapped, {_PROMPTS: learned["embedding.weight"]}
    parameters, buffers = state_names(wrapped)
    in_file = _in_file(wrapped, "default", {**parameters, **buffers})
    _give_memory(wrapped, config, {id(tensor) for tensor in in_file.values()})
    return wrapped, _in_file(wrapped, "default", {**parameters, **state_names(wrapped)[1]})


def require_buffers(buffers, listed, path):
    """Raises FormatError where the file at ``path``, with the tensors ``listed``, lacks one of ``buffers``."""
    missing = [name for name in buffers if name not in listed]
    if missing:
        raise _C.FormatError(f"{path}: the adapter's buffer '{missing[0]}' is missing; save the adapter with it, which "
                             "PEFT calls save_projection=True in some methods")


def _require_readable(config, folder):
    kind, init = config.peft_type.value, getattr(config, "init_lora_weights", None)
    if kind not in _READABLE or getattr(config, "prefix_projection", False):
        what = "prefix_projection" if kind in _READABLE else f"the method {kind}"
        raise _C.UsageError(
            f"{folder}: the file of an adapter with {what} does not hold every trained tensor unchanged{_INSTEAD}")
    if not any(init is known or init == known for known in _INITS):
        raise _C.UsageError(f"{folder}: an adapter with init_lora_weights={init!r} changes the base model's weights "
                            f"when it is attached, and here these are read from their own files{_INSTEAD}, or let PEFT "
                            "convert the adapter: save_pretrained(path_initial_model_for_weight_conversion=...)")


@contextmanager
def _without_values(config):
    """Context in which attaching the adapter computes nothing with the base model's weights, which have no values."""
    plain = {"init_lora_weights": False, "prompt_tuning_init": "RANDOM"}
    before = {name: getattr(config, name) for name in plain if getattr(config, name, None) is not None}
    for name in before:
        setattr(config, name, plain[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _give_memory(wrapped, config, in_file):
    """Replaces the adapter's meta buffers, whose ids are ``in_file``, by real ones; shared buffers stay shared."""
    made = {}
    for path, module in wrapped.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            if id(buffer) not in in_file:
                raise _C.UsageError(f"the adapter of method {config.peft_type.value} computes '{path}.{name}' from "
                                    f"other weights when it is attached, and its file does not hold it{_INSTEAD}")
            if id(buffer) not in made:
                made[id(buffer)] = torch.zeros_like(buffer, device="cpu"), buffer  # keeps the old one, and so its id
            module._buffers[name] = made[id(buffer)][0]


def save_adapters(engine, folder):
    """Writes every adapter as PEFT's ``save_pretrained`` does. Collective.

    The engine gathers one parameter at a time, or all parameters of a learned prompt. Rank 0 holds the adapters'
    parameters on the host meanwhile, and puts the files in place when all are written. IoError on every rank, where
    rank 0 cannot write. UsageError for a method of PEFT that computes the tensors that it saves."""
    model, writes = engine.module, engine.global_rank == 0
    with agree_after(engine._collectives, "listing the adapters"):
        engine.core.require_own_memory()
        parameters, buffers = state_names(model)
        state = {**parameters, **buffers}
        named = [name for name, config in model.peft_config.items() if not config.is_prompt_learning]
        wanted = {id(t) for adapter in named for t in _in_file(model, adapter, state).values()}
        prompts = {id(p) for p in model.prompt_encoder.parameters()} if len(named) < len(model.peft_config) else set()
    values = {id(b): b.detach().cpu() for b in buffers.values() if id(b) in wanted}
    of_model = (known.parameter for known in engine.known)
    values |= {id(p): values_on_host(p, writes) for p in of_model if id(p) in wanted}
    held = [index for index, (_, parameter, *_) in enumerate(engine._described) if id(parameter) in prompts]
    saving = agree_after(engine._collectives, "saving the adapters")
    with gathered(engine.core, held), saving, torch.no_grad():
        if writes:
            state_dict = {name: values[id(t)] for name, t in state.items() if id(t) in wanted}
            with moved_into(os.fspath(folder), "the adapters") as temporary:
                model.save_pretrained(temporary, state_dict=state_dict)


def _in_file(model, adapter, state):
    """{name in the adapter's file: value in ``state``}, with the names that PEFT itself chooses."""
    from peft import get_peft_model_state_dict

    stand_ins = {name: torch.empty(0, device="meta") for name in state}
    name_of = {id(stand_in): name for name, stand_in in stand_ins.items()}
    chosen = get_peft_model_state_dict(model, state_dict=stand_ins, adapter_name=adapter)
    computed = [name for name, stand_in in chosen.items() if id(stand_in) not in name_of]
    if computed:
        raise _C.UsageError(
            f"PEFT computes '{computed[0]}' of an adapter of method {model.peft_config[adapter].peft_type.value} when "
            "it saves it; call engine.module.save_pretrained(folder) within strata.zero.GatheredParameters("
            "list(engine.module.parameters())), on every rank, with a folder for each")
    return {name: state[name_of[id(stand_in)]] for name, stand_in in chosen.items()}
