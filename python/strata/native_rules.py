"""Tells which of the engine's own update rules compute what a user's optimizer computes, and in how many bits it keeps
the states of each parameter. Knows the optimizers of torch, ``strata.ops``, bitsandbytes and torchao by their classes'
names, without importing them."""

import inspect
import sys

import torch

from . import _C
from .model.parameter import full_shape, parameter_at
from .ops.adam import DeepSpeedCPUAdam, adam_mode
from .ops.elementwise import ElementwiseOptimizer
from .rank_logging import logger

_LEAST = 4096  # elements of a parameter whose states both libraries keep in 8 bits


def native_rule(optimizer):
    """(rule, {id(parameter): (another rule or None, bits of its states or None, least)}) by which the engine updates in
    place of ``optimizer``, a torch.optim optimizer; None: there is no such rule. Bits are 8 or 32, None: as the
    configuration says; 8 are for a parameter that has, whole, at least ``least`` elements; else it has 32.
    The rules are AdamW and Adam of torch without amsgrad or maximize, the optimizers of ``strata.ops.adam`` and
    ``strata.ops.lion``, and those of bitsandbytes and torchao. UsageError for settings of these that no rule has."""
    kind = getattr(type(optimizer), "_strata_likeness", type(optimizer))
    library = kind.__module__.partition(".")[0]
    if library == "bitsandbytes":
        return _rule_of_bitsandbytes(optimizer)
    if library == "torchao":
        return _rule_of_torchao(optimizer, kind)
    if _was_bitsandbytes(optimizer):
        return "adamw", _bits(optimizer, 8, _LEAST)
    if adam_mode(optimizer) is not None:
        return adam_mode(optimizer), {}
    if _is_lion(optimizer):
        return "lion", {}
    exact = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam"}.get(kind)
    groups = optimizer.param_groups
    if exact is None or any(g.get("amsgrad") or g.get("maximize") or g.get("capturable") for g in groups):
        return None
    rules = ["adamw" if g.get("decoupled_weight_decay", exact == "adamw") else "adam" for g in groups]
    others = [(group, rule) for group, rule in zip(groups, rules) if rule != rules[0]]
    return rules[0], {id(p): (rule, None, 0) for group, rule in others for p in group["params"]}


def refuse_dion(optimizer):
    """UsageError for the optimizers of dion, which exchange gradients in their own ``step()``; it says which class to
    take."""
    keys = {key for group in optimizer.param_groups for key in group}
    if type(optimizer).__module__.partition(".")[0] != "dion" and not {"algorithm", "mu"} <= keys:
        return
    raise _C.UsageError(
        f"{type(optimizer).__module__}.{type(optimizer).__name__} exchanges gradients itself, and the engine does so; "
        "give initialize() a strata.ops.muon.Muon([{'params': matrices}, {'params': others, 'use_muon': False, "
        "'lr': ..., 'betas': ...}], lr=..., momentum=mu, weight_decay=..., nesterov=False, adjust_lr_fn=...), with "
        "\"match_rms_adamw\" for dion's \"rms_norm\". Its load_state_dict() takes the states of dion's Muon")


def _is_lion(optimizer):
    """Whether it is one of ``strata.ops.lion``, without an update of its own."""
    lion = sys.modules.get(f"{__package__}.ops.lion")
    if lion is None or not isinstance(optimizer, lion.FusedLion.__base__):
        return False
    kind, base = type(optimizer), lion.FusedLion.__base__
    same_step = inspect.unwrap(kind.step) is inspect.unwrap(ElementwiseOptimizer.step)  # torch wraps it to profile it
    return same_step and kind.update is base.update and kind.compute is base.compute


# --- bitsandbytes ---


def _rule_of_bitsandbytes(optimizer):
    """Its Adam decays apart from the gradient, as its AdamW does. The other 32-bit classes have no rule."""
    name, args = getattr(optimizer, "optimizer_name", None), getattr(optimizer, "args", None)
    rule = {"adam": "adamw", "lion": "lion"}.get(name)
    bits = getattr(args, "optim_bits", 32)
    called = f"bitsandbytes' {type(optimizer).__name__}"
    if rule is None or args is None:
        if bits == 8:
            raise _C.UsageError(f"{called} keeps its states in 8 bits, as Strata does for AdamW, Adam and Lion: take "
                                f"one of these (adamw_bnb_8bit, lion_8bit), or this class in 32 bits; found {name}")
        return None
    _refuse(called, args, {"percentile_clipping": 100, "block_wise": True, "max_unorm": 0.0, "skip_zeros": False})
    if getattr(optimizer, "is_paged", False):
        logger.info("%s is paged: its states rest on the device, or where offload_optimizer or strata.placement have "
                    "them; \"auto\" moves those to the host that find no room", called)
    return rule, _bits(optimizer, bits, getattr(args, "min_8bit_size", _LEAST))


def _was_bitsandbytes(optimizer):
    """Whether Accelerate has made this DeepSpeedCPUAdam, for offloaded states, of bitsandbytes' Adam or of its AdamW in
    8 bits: it asks for L2 then, and keeps the param groups, with keys that only bitsandbytes has."""
    if not isinstance(optimizer, DeepSpeedCPUAdam) or adam_mode(optimizer) != "adam":
        return False
    if "bitsandbytes" in sys.modules and all(group["eps"] == 0 for group in optimizer.param_groups):
        raise _C.UsageError("this DeepSpeedCPUAdam has eps=0, as where Accelerate makes one of bitsandbytes' Lion in 8 "
                            "bits, which it would train as Adam; write \"zero_force_ds_cpu_optimizer\": false, by "
                            "which initialize() gets the Lion, or give it another eps")
    was = all("alpha" in group and "t_alpha" in group for group in optimizer.param_groups)
    if was:
        logger.warning("this DeepSpeedCPUAdam stands for an optimizer of bitsandbytes, by its param groups; it is run "
                       "as that: decay apart from the gradient, states in 8 bits")
    return was


def _bits(optimizer, bits, least):
    """{id(parameter): (None, bits, least)}, with what ``GlobalOptimManager`` of bitsandbytes has been told of them."""
    overrides = _overrides()
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            own = overrides.get(id(parameter), {})
            unknown = sorted(set(own) - {"optim_bits", "min_8bit_size"})
            if unknown:
                raise _C.UsageError(f"GlobalOptimManager overrides {', '.join(unknown)} of a parameter of shape "
                                    f"{list(full_shape(parameter))}; put it into a param group of its own with these "
                                    "values; optim_bits and min_8bit_size may be overridden")
            found[id(parameter)] = (None, own.get("optim_bits", bits), own.get("min_8bit_size", least))
    return found


def _overrides():
    """{id(parameter): {setting: value}} of ``GlobalOptimManager``, by parameter, or by module and name."""
    library = sys.modules.get("bitsandbytes.optim.optimizer") or sys.modules.get("bitsandbytes.optim")
    manager = getattr(library, "GlobalOptimManager", None)
    if manager is None:
        return {}
    manager = manager.get_instance()
    found = {key: dict(values) for key, values in getattr(manager, "pid2config", {}).items()}
    for module, name, values in getattr(manager, "module_weight_config_triple", ()):
        parameter = parameter_at(module, name)
        if parameter is not None:
            found.setdefault(id(parameter), {}).update(values)
    return found


# --- torchao ---


def _rule_of_torchao(optimizer, kind):
    """Its Adam adds decay to the gradient, and its AdamW does not."""
    called = f"torchao's {kind.__name__}"
    rule = {"Adam8bit": "adam", "AdamW8bit": "adamw"}.get(kind.__name__)
    if rule is None:
        if "4bit" in kind.__name__ or "Fp8" in kind.__name__:
            raise _C.UsageError(f"{called} is not offered: Strata keeps states in 32 or in 8 bits; write "
                                "adamw_torch_8bit, or give AdamW8bit")
        return None
    _refuse(called, optimizer, {"block_size": 256})
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise _C.UsageError(f"{called} with amsgrad=True is not offered in 8 bits; remove amsgrad")
    if getattr(optimizer, "bf16_stochastic_round", False):
        logger.info("%s: weights have exact fp32 masters here, in place of bf16_stochastic_round", called)
    return rule, {id(p): (None, 8, _LEAST) for group in optimizer.param_groups for p in group["params"]}


def _refuse(called, settings, wanted):
    """UsageError where ``settings`` has one of the names in ``wanted`` with another value."""
    for name, value in wanted.items():
        found = getattr(settings, name, value)
        if found != value:
            raise _C.UsageError(f"{called} has {name}={found!r}, which the engine's rule does not know; make it with "
                                f"{name}={value!r}")
