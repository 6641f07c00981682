"""Adapters of PEFT: saved by PEFT's own ``save_pretrained``, of sharded weights, and found in a folder of it."""

import os
import shutil
import sys
import tempfile

import torch

from .. import _C
from ..ranks.joint import together
from .names import state_names

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_peft_model(model):
    """Whether ``model`` is a peft.PeftModel; imports nothing."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def holds_adapter(folder):
    """Whether ``folder`` has an adapter's configuration and no model's of its own."""
    return os.path.exists(os.path.join(folder, CONFIG)) and not os.path.exists(os.path.join(folder, "config.json"))


def read_adapter_config(folder):
    """(peft.PeftConfig to train with, folder of the base model).

    Raises:
        FormatError: it names no folder of a base model that is there.
        UsageError: peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise _C.UsageError(
            f"{folder} holds an adapter of PEFT, and peft is not installed: pip install peft") from error
    config = peft.PeftConfig.from_pretrained(os.fspath(folder))
    config.inference_mode = False
    base = config.base_model_name_or_path
    if not base or not os.path.isdir(base):
        raise _C.FormatError(
            f"{folder}: {CONFIG} names the base model {base!r}, and there is no such folder; wanted the folder of a "
            "checkpoint in 'base_model_name_or_path'"
        )
    return config, base


def attach_adapter(model, config):
    """The peft.PeftModel of a model with meta parameters; the adapter's are meta, too.

    Returns:
        (PeftModel, {parameter's name in the adapter's file: parameter}).
    """
    import peft

    values = config.init_lora_weights if hasattr(config, "init_lora_weights") else None
    if values is not None:
        config.init_lora_weights = False  # some ways compute with the base model's weights, which are not there
    wrapped = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
    if values is not None:
        config.init_lora_weights = values
    return wrapped, _in_file(wrapped, "default", state_names(wrapped)[0])


def save_adapters(engine, folder):
    """Writes every adapter as PEFT's ``save_pretrained`` does. Collective.

    One parameter at a time is gathered; rank 0 holds the adapters' parameters on the host meanwhile, and puts the
    files in place when all are written.

    Raises:
        IoError: on every rank, where rank 0 cannot write.
    """
    model, writes = engine.module, engine.global_rank == 0
    with together(engine._collectives, "listing the adapters"):
        parameters, buffers = state_names(model)
        state = {**{name: entry for name, entry in parameters.items()}, **buffers}
        wanted = {id(t) for adapter in model.peft_config for t in _in_file(model, adapter, state).values()}
    values = {id(b): b.detach().cpu() for b in buffers.values() if id(b) in wanted}
    for index, (_, parameter, *_) in enumerate(engine._described):
        if id(parameter) in wanted:
            engine.core.gather([index])
            if writes:
                values[id(parameter)] = parameter.detach().cpu().clone()
            engine.core.release([index], True)
    with together(engine._collectives, "saving the adapters"):
        if writes:
            gathered = {name: values[id(t)] for name, t in state.items() if id(t) in wanted}
            _write(model, gathered, os.fspath(folder))


def _in_file(model, adapter, state):
    """{name in the adapter's file: what ``state`` has}, by PEFT's own choice and renaming of names."""
    from peft import get_peft_model_state_dict

    stand_ins = {name: torch.empty(0, device="meta") for name in state}
    name_of = {id(stand_in): name for name, stand_in in stand_ins.items()}
    chosen = get_peft_model_state_dict(model, state_dict=stand_ins, adapter_name=adapter)
    return {name: state[name_of[id(stand_in)]] for name, stand_in in chosen.items()}


def _write(model, state, folder):
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
            model.save_pretrained(temporary, state_dict=state)
            for path, _, files in os.walk(temporary):
                target = os.path.join(folder, os.path.relpath(path, temporary))
                os.makedirs(target, exist_ok=True)
                for file in sorted(files, reverse=True):
                    shutil.move(os.path.join(path, file), os.path.join(target, file))
    except OSError as error:
        raise _C.IoError(f"the adapters could not be written: path={folder}: {error}") from error
