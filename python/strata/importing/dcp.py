"""Converts folders of torch.distributed.checkpoint, as users of FSDP2 write them, to checkpoints of Strata.

Such a folder holds ``{"model": ..., "optimizer": ...}`` of ``get_state_dict``, which may be inside another dict, or a
model's state dict alone. Other entries are the script's values.
"""

import os

import torch

from .. import _C
from .dcp_files import DcpFolder
from .whole_tensors import (
    VALUE,
    WholeCheckpoint,
    WholeTensor,
    client_tensors,
    plain_values,
    write_checkpoint,
    written_by,
)

_MODELS, _OPTIMIZERS = ("model", "module"), ("optimizer", "optim")
_SCHEDULERS = ("lr_scheduler", "scheduler")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of torch's own modules


def import_dcp(folder, out, tag=None, buffers=()):
    """Writes the contents of a folder of torch.distributed.checkpoint as a checkpoint of Strata. About one tensor is in
    memory at a time, beside the chunk of it that is being read.

    Args:
        folder: the folder that ``dcp.save`` wrote.
        out: folder of Strata's checkpoints, made if need be.
        tag: of the new checkpoint; default: the folder's name.
        buffers: names of the model's buffers, since the folder does not distinguish them from frozen parameters.
            Tensors of other than floating dtypes, and batch norm's, count as buffers without being named.

    Returns:
        the path of the new checkpoint.

    Raises:
        FormatError: the folder is damaged, holds objects other than data, or holds no model.
        IoError: a file is missing.
    """
    return write_checkpoint(read_dcp(folder, tag, buffers), os.fspath(out))


def read_dcp(folder, tag=None, buffers=()):
    """The WholeCheckpoint in a folder; arguments and errors as of ``import_dcp``."""
    files = DcpFolder(folder)
    tag = os.path.basename(os.path.abspath(folder)) if tag is None else tag
    model, optimizer, others = _sorted(files)
    if not model or not all(files.is_tensor(key) for key in model.values()):
        found = sorted(_name(path) for path in files.paths.values())
        raise _C.FormatError(f"'{folder}' holds no model: wanted tensors under 'model', or a state dict of tensors; "
                             f"found {', '.join(found[:5])}")
    states, groups = _optimizer_of(files, optimizer)
    listed = [name for group in groups or [] for name in group.get("params", [])]
    trained = set(states) | {name for name in listed if isinstance(name, str)}
    aliases = _tied(files, model, trained)
    tensors, steps = [], {}
    for name, key in model.items():
        if any(name in others for others in aliases.values()):
            continue
        stored, shape = files.stored(key), files.shape_of(key)
        known = name in buffers or name.rpartition(".")[2] in _BUFFERS or not stored.dtype.is_floating_point
        if known and name not in trained:
            tensors.append(WholeTensor(name, shape, stored.dtype, {VALUE: stored}, "buffer"))
            continue
        kinds, scalars = {VALUE: stored}, {}
        for kind, state in states.get(name, {}).items():
            if files.is_tensor(state) and files.shape_of(state) == shape and kind != "step":
                kinds[kind] = files.stored(state)
            else:
                scalars[kind] = _number(files.value(state))
        steps[name] = scalars
        tensors.append(WholeTensor(name, shape, stored.dtype, kinds, trainable=name in trained or not states,
                                   aliases=aliases.get(name, [])))
    beside = {}
    training = _training_of(files, others, groups, {n: s for n, s in steps.items() if n in trained}, beside)
    return WholeCheckpoint(tag, tensors + client_tensors(beside), training)


def _sorted(files):
    """({name: key} of the model, {path: key} of the optimizer, {path: key} of the rest)."""
    paths = {tuple(path): key for key, path in files.paths.items()}
    while len({path[0] for path in paths}) == 1 and min(map(len, paths)) > 1 and next(iter(paths))[0] not in _MODELS:
        paths = {path[1:]: key for path, key in paths.items()}  # {"app": {"model": ...}}
    tops = {path[0] for path in paths}
    top = next((name for name in _MODELS if name in tops), None)
    if top is None:
        return {_name(path): key for path, key in paths.items()}, {}, {}
    model = {_name(path[1:]): key for path, key in paths.items() if path[0] == top and len(path) > 1}
    optimizer = {path[1:]: key for path, key in paths.items() if path[0] in _OPTIMIZERS}
    return model, optimizer, {p: k for p, k in paths.items() if p[0] != top and p[0] not in _OPTIMIZERS}


def _name(path):
    return ".".join(map(str, path))


def _optimizer_of(files, optimizer):
    """({parameter: {name of the state: key}}, param groups or None)."""
    states, groups, flat = {}, None, {}
    for path, key in optimizer.items():
        if path[0] == "state" and len(path) == 3:
            states.setdefault(path[1], {})[path[2]] = key
        elif path == ("param_groups",):
            groups = files.value(key)
        elif path[0] == "param_groups" and len(path) > 2:
            flat.setdefault(path[1], {})[_name(path[2:])] = files.value(key)
        elif len(path) == 1 and str(path[0]).startswith("state."):  # flattened by get_state_dict
            name, _, kind = path[0].removeprefix("state.").rpartition(".")
            states.setdefault(name, {})[kind] = key
    if groups is None and flat:
        groups = [flat[index] for index in sorted(flat)]
    return states, groups if isinstance(groups, list) else None


def _tied(files, model, trained):
    """{name: [other names]}: trained matrices, and the names of untrained ones that are the same matrix."""
    if not trained:
        return {}
    shapes = {}
    for name in trained & model.keys():
        shape = files.shape_of(model[name])
        if len(shape) > 1:
            shapes.setdefault(tuple(shape), []).append(name)
    result = {}
    for name in model.keys() - trained:
        for other in shapes.get(tuple(files.shape_of(model[name])), []):
            one, two = files.stored(model[name]), files.stored(model[other])
            if one.dtype == two.dtype and torch.equal(one.read(), two.read()):
                result.setdefault(other, []).append(name)
                break
    return result


def _number(value):
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _training_of(files, others, groups, scalars, beside):
    steps = {name: int(values.get("step", 0)) for name, values in scalars.items()}
    most = max(steps.values(), default=0)
    values, scheduler = {}, None
    for path, key in others.items():
        at = values
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = files.value(key)
    for name in _SCHEDULERS:
        if isinstance(values.get(name), dict):
            scheduler = {"class": None, "state": plain_values(values.pop(name), beside, "scheduler")}
            break
    optimizer = None
    if groups is not None:
        kept = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups]
        optimizer = {
            "class": None,
            "param_groups": [plain_values(g, beside, f"optimizer.param_groups[{i}]") for i, g in enumerate(kept)],
            "scalars": {name: plain_values(v, beside, name) for name, v in scalars.items()},
        }
    return {
        "client_state": plain_values(values, beside, "client_state"),
        "scheduler": scheduler,
        "optimizer": optimizer,
        "config": {},
        "written_by": written_by(),
        "without_frozen": False,
        "global_steps": most, "micro_steps": most, "skipped_steps": 0, "loss_scale": 1.0,
        "optimizer_steps": {"all": most, "missed": {n: most - s for n, s in steps.items() if s != most}},
    }  # fmt: skip
