"""Muon in the engine: which parameters are matrices, the groups of both halves, and the products, by torch.

The engine keeps the momentum on its shards, brings each matrix to the rank that owns it, and updates the shards."""

import torch

from . import _C
from .model.parameter import flattened, full_shape, parameter_at, shaped
from .ops.muon import SIMPLE, Matrices, Muon, orthogonalize
from .rank_logging import logger

_HEADS = ("lm_head", "score", "classifier", "qa_outputs")  # layers that end a model
_OF_HEADS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")
_ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
_MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "nesterov": True, "ns_coefficients": SIMPLE, "eps": 1e-7,
         "ns_steps": 5, "adjust_lr_fn": None}  # fmt: skip


def find_matrices(tree, per_head=False):
    """{id(parameter): Matrices} of the parameters that Muon updates in a ``ModelTree``: hidden matrices, but not
    embeddings, output layers, and what is tied to them. A parameter's attribute ``use_muon`` counts before that."""
    embeddings = (module for _, module, _ in tree.modules if isinstance(module, torch.nn.Embedding))
    outputs = {id(parameter_at(module, "weight")) for module in embeddings}
    find = getattr(tree.model, "get_output_embeddings", None)
    layer = find() if callable(find) else None
    if layer is not None:
        outputs.add(id(parameter_at(layer, "weight")))
    found, by_head = {}, 0
    for path, owner, parent in tree.modules:
        for name, parameter in dict.items(owner._parameters):
            if parameter is None:
                continue
            shape, full_name = list(full_shape(parameter)), f"{path}.{name}" if path else name
            if not getattr(parameter, "use_muon", id(parameter) not in outputs and _is_hidden(full_name, owner, shape)):
                continue
            if len(shape) < 2 or 0 in shape:
                raise _C.UsageError(f"parameter '{full_name}' has use_muon, and Muon is for matrices; remove the "
                                    f"attribute; found the shape {shape}")
            heads = _rows_of_a_head(path, owner, parent, shape) if per_head else None
            by_head += heads is not None
            is_convolution = isinstance(owner, torch.nn.modules.conv._ConvNd)
            found[id(parameter)] = Matrices(shape, is_convolution, _cuts(name, path, owner, parent, shape), heads)
    if not found:
        raise _C.UsageError('optimizer.type "Muon": the model has no hidden matrix, which Muon is for; write "AdamW"')
    if per_head and not by_head:
        raise _C.UsageError("optimizer.params.per_head_muon: the model has no module q_proj, k_proj or v_proj whose "
                            "head_dim is known; write false")
    return found


def _is_hidden(name, owner, shape):
    if "embed" in name or any(part in _HEADS for part in name.split(".")):
        return False
    if isinstance(owner, torch.nn.modules.conv._ConvNd):
        return len(shape) > 2 and shape[1] > 1  # of one channel each: filters, not matrices
    return len(shape) in (2, 3) and min(shape[-2:]) > 1


def _cuts(name, path, owner, parent, shape):
    """Rows of the matrices that lie in one: gate and up, or query, key and value; None: it is one."""
    last = path.rsplit(".", 1)[-1] if name == "weight" else name
    if last == "gate_up_proj":
        if name == last:  # fused experts
            down = parameter_at(owner, "down_proj")
        else:
            layer = getattr(parent, "down_proj", None)
            down = None if layer is None else parameter_at(layer, "weight")
        if down is not None and 2 * list(full_shape(down))[-1] == shape[-2]:
            return [shape[-2] // 2] * 2
    if last == "in_proj_weight":
        return [shape[-2] // 3] * 3
    config = getattr(parent, "config", None)
    if last == "qkv_proj" and config is not None:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rows = [size * config.num_attention_heads] + [size * config.num_key_value_heads] * 2
        if sum(rows) == shape[-2]:
            return rows
    return None


def _rows_of_a_head(path, owner, parent, shape):
    size = getattr(parent, "head_dim", None) if path.rsplit(".", 1)[-1] in _OF_HEADS else None
    return size if size and shape[-2] % size == 0 else None


def muon_from_config(params, parameters, tree):
    """The ``Muon`` for the configuration's ``optimizer.params``, by DeepSpeed's keys: each group of ``parameters`` is
    split in two halves. The most specific setting counts: a group's own, then muon_lr and adam_lr, then lr."""
    matrices = find_matrices(tree, params.get("per_head_muon", False))
    listed = list(parameters)
    are_groups = listed and isinstance(listed[0], dict)
    groups = []
    for group in listed if are_groups else [{"params": listed}]:
        own = {k: v for k, v in group.items() if k != "params"}
        wants = own.pop("use_muon", None)
        members = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        for is_muon, settings, rate in ((True, _MUON, "muon_lr"), (False, _ADAM, "adam_lr")):
            half = [p for p in members if (id(p) in matrices and wants is not False) == is_muon]
            if not half:
                continue
            shared = {k: v for k, v in params.items() if k in settings and not (is_muon and k == "eps")}
            if rate in params:
                shared["lr"] = params[rate]
            kept = {k: v for k, v in own.items() if k in settings or k not in (*_MUON, *_ADAM)}
            groups.append({**settings, **shared, **kept, "use_muon": is_muon, "params": half})
    client = Muon(groups)
    client.matrices = matrices
    return client


def is_muon(optimizer):
    """Whether the engine runs this optimizer as Muon: ``strata.ops.muon``'s, torch's, or one that has groups like
    Keller Jordan's."""
    kind = getattr(type(optimizer), "_strata_likeness", type(optimizer))
    if issubclass(kind, (Muon, *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else []))):
        return True
    known = kind.__name__ in ("Muon", "SingleDeviceMuon", "MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam")
    keys = [set(g) - {"params", "param_names", "initial_lr", "use_muon"} for g in optimizer.param_groups]
    of_muon, of_adam = {"lr", "weight_decay", "momentum"}, {"lr", "betas", "eps", "weight_decay"}
    return known and all(k in (of_muon, of_adam) for k in keys)


def split_groups(optimizer):
    """(param groups, [(group, that of the script's object)]) of Moonlight's Muon, whose groups have matrices and
    others, told apart by states that its constructor makes. A group of the script's keeps its matrices, and a new one
    after it gets the others. Another optimizer has (its param groups, [])."""
    groups, halves = [], []
    for group in optimizer.param_groups:
        is_matrix = [optimizer.state.get(p, {}).get("use_muon") for p in group["params"]]
        if not {"wd", "momentum", "adamw_betas", "adamw_eps"} <= group.keys() or None in is_matrix:
            return optimizer.param_groups, []
        of_adam = {"use_muon": False, "betas": group["adamw_betas"], "eps": group["adamw_eps"],
                   "params": [p for p, there in zip(group["params"], is_matrix) if not there]}
        groups.append(group)
        halves.append((group, group))
        if any(is_matrix) and of_adam["params"]:
            groups.append(of_adam)
            halves.append((of_adam, group))
            group["params"] = [p for p, there in zip(group["params"], is_matrix) if there]
        if any(is_matrix):
            group.update(use_muon=True, adjust_lr_fn="match_rms_adamw")
        else:
            group.update(of_adam)
    for half, of_script in halves:
        half.update(lr=of_script["lr"], weight_decay=of_script["wd"])
    return groups, halves


def complete_groups(optimizer, groups):
    """Gives the ``groups`` of an optimizer that ``is_muon`` the settings which its class does not name. Returns
    {id(parameter): Matrices}. UsageError for a setting that the engine does not have."""
    matrices = dict(getattr(optimizer, "matrices", {}))
    for group in groups:
        group.setdefault("use_muon", "betas" not in group)
        for key, value in (_MUON if group["use_muon"] else _ADAM).items():
            group.setdefault(key, value)
        if any(group.get(key) for key in ("maximize", "amsgrad")):
            raise _C.UsageError(f"{type(optimizer).__name__}: maximize and amsgrad are not for Muon; leave them out")
        for p in group["params"] if group["use_muon"] else ():
            shape = list(full_shape(p))
            if len(shape) < 2 or 0 in shape:
                raise _C.UsageError(f"{type(optimizer).__name__} has a parameter of shape {shape} in a group with "
                                    "use_muon, and Muon is for matrices; put it into a group of AdamW")
            matrices.setdefault(id(p), Matrices(shape, is_convolution=len(shape) == 4))
    return matrices


def run_in(engine, optimizer):
    """Lets ``engine`` orthogonalize the matrices of ``optimizer``, a ShardedOptimizer, by torch."""
    core, settings, by_index, counts = engine.core, {}, {}, [[0, 0], [0, 0]]
    groups_of = {id(p): group for group, members in zip(optimizer.param_groups, optimizer.members) for p in members}
    for known in engine.known:
        group = groups_of.get(id(known.parameter))
        if group is None:
            continue
        count = counts[0 if group["use_muon"] else 1]
        count[0] += known.parameter.requires_grad
        count[1] += torch.Size(known.shape).numel() * known.parameter.requires_grad
        matrices = optimizer.matrices.get(id(known.parameter)) if group["use_muon"] else None
        if matrices is None:
            continue
        for part in known.parts:
            here = matrices
            if len(known.parts) > 1:
                if len(known.shape) < 3:
                    raise _C.UsageError(f"'{core.known_name(part.index)}' is used in tiles of rows, and Muon needs the "
                                        "whole matrix; set strata.tiles.max_gather to its size, or use_muon = False")
                here = Matrices(core.full_shape(part.index), False, matrices.cuts, matrices.heads)
            by_index[part.index] = here, group
            settings[part.index] = here.factor(group["adjust_lr_fn"]), bool(group["nesterov"])

    def orthogonalize_owned(owned):
        entries, moved = [], []
        for index, values in owned:
            here, group = by_index[index]
            if core.channels_last(index):
                moved.append((index, values, shaped(core, index, values).contiguous().view(-1)))
                values = moved[-1][2]
            entries.append((here, values, group))
        orthogonalize(entries)
        for index, values, in_shape in moved:
            values.copy_(flattened(core, index, in_shape.view(core.full_shape(index))))

    _C.set_muon(core, settings, orthogonalize_owned)
    if engine.global_rank == 0:
        (n, of_muon), (m, of_adam) = counts
        logger.info("Muon updates %d parameters of %d elements, AdamW %d of %d elements", n, of_muon, m, of_adam)
