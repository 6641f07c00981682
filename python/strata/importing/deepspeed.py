"""Converts checkpoints of DeepSpeed's ZeRO, stages 1 to 3 and universal ones, to checkpoints of Strata."""

import json
import os

from .. import _C
from .deepspeed_files import find_deepspeed_files
from .deepspeed_model import ModelFiles
from .flat_states import FlatStates
from .universal_states import UniversalStates
from .whole_tensors import (
    VALUE,
    WholeCheckpoint,
    WholeTensor,
    client_tensors,
    plain_values,
    write_checkpoint,
    written_by,
)

# Keys that DeepSpeed itself writes into a model's file; all others are the script's.
_OWN_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps",
    "global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config",
    "ds_version", "universal_checkpoint_info", "num_experts", "ds_autoep_layers", "autoep_layers",
}  # fmt: skip


def import_deepspeed(checkpoint, out, tag=None):
    """Writes a checkpoint of DeepSpeed as one of Strata, which ``engine.load_checkpoint(out)`` loads at any number of
    ranks and any stage. About one tensor is in memory at a time.

    Args:
        checkpoint: DeepSpeed's folder, that of all tags or of one.
        out: folder of Strata's checkpoints, made if need be; the tag stays the same.
        tag: default: the one that ``latest`` names.

    Returns:
        the path of the new checkpoint.

    Raises:
        FormatError: the folder is no such checkpoint, is damaged, holds objects other than data, or is of a model that
            is also cut by another kind of parallelism.
        IoError: a file is missing.
    """
    return write_checkpoint(read_deepspeed(checkpoint, tag), os.fspath(out))


def read_deepspeed(checkpoint, tag=None):
    """The WholeCheckpoint that a folder of DeepSpeed holds; arguments and errors as of ``import_deepspeed``."""
    files = find_deepspeed_files(checkpoint, tag)
    try:
        model = ModelFiles(files.model)
        states = _states_of(files, model) if files.universal is None else UniversalStates(files.universal)
        return _assemble(files, model, states)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _C.FormatError(f"'{files.folder}' is not as DeepSpeed 0.19 writes it: {type(error).__name__}: "
                             f"{error}") from error


def _states_of(files, model):
    states = FlatStates(files.optimizer, model)
    if states.stage == 3 and len(files.model) != len(files.optimizer):  # the frozen parameters' parts are in them
        raise _C.IoError(f"'{files.folder}' has the models of {len(files.model)} ranks and the optimizer's states of "
                         f"{len(files.optimizer)}; wanted as many: files are missing")
    return states


# --- the whole checkpoint ---


def _assemble(files, model, states):
    aliases = model.aliases()
    tensors, steps, scalars = [], {}, {}
    for group in model.shapes:
        for name, shape in group.items():
            kinds = states.kinds_of(name, shape)
            dtype = model.dtype_of(name, kinds[VALUE].dtype)
            tensors.append(WholeTensor(name, shape, dtype, kinds, trainable=True, aliases=aliases.get(name, [])))
            scalars[name] = states.scalars_of(name)
            steps[name] = int(scalars[name].get("step", _step_of_groups(states.param_groups)))
    frozen = model.frozen()
    tensors += [WholeTensor(n, shape, s.dtype, {VALUE: s}, aliases=aliases.get(n, [])) for n, shape, s in frozen]
    tensors += model.buffers()
    beside = {}
    training = _training_of(model, states, beside, steps, scalars)
    training["without_frozen"] = not frozen
    world = len(files.optimizer) or int(model.first.get("dp_world_size") or 1)
    return WholeCheckpoint(files.tag, tensors + client_tensors(beside), training, world, states.stage)


def _step_of_groups(groups):
    """The number of steps in the param groups, where FusedAdam counts them."""
    return max((group.get("step", 0) for group in groups or []), default=0)


def _training_of(model, states, beside, steps, scalars):
    first = model.first
    config = first.get("ds_config") if isinstance(first.get("ds_config"), dict) else {}
    global_steps = int(first.get("global_steps") or 0)
    all_steps = max(steps.values(), default=0)
    training = {
        "client_state": plain_values({k: v for k, v in first.items() if k not in _OWN_KEYS}, beside, "client_state"),
        "scheduler": None,
        "optimizer": None,
        "config": _flattened(config),
        "written_by": written_by(deepspeed=str(first.get("ds_version"))),
        "global_steps": global_steps,
        "micro_steps": global_steps * _accumulation_steps(config, int(first.get("dp_world_size") or 1)),
        "skipped_steps": int(first.get("skipped_steps") or 0),
        "optimizer_steps": {"all": all_steps, "missed": {n: all_steps - s for n, s in steps.items() if s != all_steps}},
    }
    if isinstance(first.get("lr_scheduler"), dict):
        # The configuration's scheduler; DeepSpeed does not write the class of a script's.
        name = "ScheduledLR" if config.get("scheduler") else None
        training["scheduler"] = {"class": name, "state": plain_values(first["lr_scheduler"], beside, "scheduler")}
    if states.param_groups is not None:
        groups = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in states.param_groups]
        section = config.get("optimizer")
        training["optimizer"] = {
            "class": section.get("type") if isinstance(section, dict) else None,
            "param_groups": [plain_values(g, beside, f"optimizer.param_groups[{i}]") for i, g in enumerate(groups)],
            "scalars": {name: plain_values(values, beside, name) for name, values in scalars.items()},
        }
        members = _members(states.param_groups, model.shapes)
        if members is not None:
            training["optimizer"]["members"] = members
    scaler = states.loss_scaler
    training["loss_scale"] = float(getattr(scaler, "cur_scale", 1.0))
    if getattr(scaler, "dynamic", False):
        training["loss_scaler"] = {
            "scale": training["loss_scale"], "iteration": int(scaler.cur_iter),
            "last_overflow": int(scaler.last_overflow_iter), "hysteresis_left": int(scaler.cur_hysteresis),
        }  # fmt: skip
    return training


def _members(param_groups, shapes):
    """[[names]] of each param group; None where the file does not say which flat tensors a group has."""
    flats = [group.get("params", []) for group in param_groups]
    if sorted(flat for own in flats for flat in own) != list(range(len(shapes))):
        return [[name for named in shapes for name in named]] if len(flats) == 1 else None
    return [[name for flat in own for name in shapes[flat]] for own in flats]


def _accumulation_steps(config, world_size):
    steps, batch = config.get("gradient_accumulation_steps"), config.get("train_batch_size")
    micro = config.get("train_micro_batch_size_per_gpu")
    if isinstance(steps, int):
        return steps
    if isinstance(batch, int) and isinstance(micro, int):
        return max(1, batch // (micro * world_size))
    return 1


def _flattened(config, prefix=""):
    """{"a.b": JSON} of a nested configuration."""
    result = {}
    for key, value in config.items():
        if isinstance(value, dict):
            result.update(_flattened(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = json.dumps(value, default=str)
    return result
