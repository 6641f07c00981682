"""The optimizer that ``initialize`` returns: hyper-parameters for the user, the update in the engine."""

import inspect
import json
import logging
import weakref

import torch

from . import _C
from .model.tiles import known_as
from .optimizer_names import OptimizerNames

logger = logging.getLogger("strata")


class _WithoutCompiler(torch.optim.Optimizer):
    """Methods that torch wraps to keep its compiler out of them. The wrappers import the compiler for that: 880
    modules, most of the time that a small model's start takes."""

    def add_param_group(self, param_group):
        """As torch's."""
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def state_dict(self):
        """As torch's."""
        return _unwrapped(super().state_dict)()

    def load_state_dict(self, state_dict):
        """As torch's."""
        _unwrapped(super().load_state_dict)(state_dict)


def _unwrapped(method):
    """What is in torch's wrapper, where ``method`` is one of torch's own; else ``method``, a user's."""
    function = method.__func__
    if function is not torch.optim.Optimizer.__dict__.get(function.__name__):
        return method
    return inspect.unwrap(function).__get__(method.__self__)


class ShardedOptimizer(OptimizerNames, _WithoutCompiler):
    """What schedulers and scripts see of the engine's optimizer.

    ``param_groups`` are ordinary dicts, read at every step, so changing ``lr`` between steps works as with
    any torch optimizer. ``step()`` and ``zero_grad()`` are the engine's business and do nothing here
    (as under DeepSpeed). ``inner`` is the user's optimizer when one updates the shards, else None. What ``initialize``
    returns for an optimizer of the user's is an instance of its class, too.

    Attributes:
        overflow: bool, whether the last step is known to have been skipped, because gradients were not finite. Does
            not wait for a GPU to tell: ``engine.was_step_applied()`` does.
    """

    def __init__(self, param_groups, defaults, inner=None):
        self._model, self._engine = None, None
        # Keeps the dicts, so that they stay shared with their owner. Not super(): that may be the user's class.
        torch.optim.Optimizer.__init__(self, param_groups, defaults)
        self.inner = inner
        self.overflow = False
        if inner is not None:
            self.state = inner.state

    def add_param_group(self, param_group):
        """Raises UsageError: the engine knows what it trains, and with which group's values, from its start."""
        if self._model is not None:
            raise _C.UsageError(
                "add_param_group: the engine has its param groups from initialize(); give them all to it there, with "
                "lr 0 for those that shall not train yet, or call engine.destroy(keep_values=True) and initialize() "
                "again"
            )
        super().add_param_group(param_group)

    def bind(self, engine):
        """Called when the engine is made."""
        self._model, self._engine = engine.core, weakref.ref(engine)

    @property
    def loss_scale(self):
        """The factor of the loss under fp16; 1.0 in other precisions."""
        return self._model.loss_scale

    cur_scale = loss_scale

    def step(self, closure=None):
        """Does nothing: ``engine.step()`` updates the weights."""

    def zero_grad(self, set_to_none=True):
        """Does nothing: the engine forgets gradients when it has used them."""

    def offload_states(self, include=None, device="cpu", pin_memory=True, non_blocking=False):
        """``engine.offload_states()``, which some scripts call here. Collective."""
        self._bound().offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking=False):
        """``engine.reload_states()``. Collective."""
        self._bound().reload_states(non_blocking)

    def _bound(self):
        engine = None if self._engine is None else self._engine()
        if engine is None:
            raise _C.UsageError("this optimizer's states are an engine's, and it has none: initialize() has not bound "
                                "it yet, or the engine has gone; keep the engine that initialize() returned")
        return engine

    def scalars(self):
        """[(lr, beta1, beta2, eps, weight decay, bias correction)], one a param group, as they are now."""
        result = []
        for group in self.param_groups:
            beta1, beta2 = group.get("betas", (0.0, 0.0))
            values = (group["lr"], beta1, beta2, group.get("eps", 0.0), group.get("weight_decay", 0.0))
            result.append((*(float(v) for v in values), bool(group.get("bias_correction", True))))
        return result


def groups_of(optimizer):
    """{id(parameter): index of its param group}; empty for None."""
    groups = {}
    for index, group in enumerate(optimizer.param_groups if optimizer is not None else []):
        groups.update((id(p), index) for p in group["params"])
    return groups


def tell_of_left_out(parameters, groups, rank):
    """Says on rank 0 which trainable ones of ``parameters`` (``describe_parameters``) are in none of ``groups``: they
    stay as they are, and autograd makes their ``.grad``, as in torch.

    Raises:
        UsageError: where all are.
    """
    trainable = [(name, parameter) for name, parameter, *_ in parameters if parameter.requires_grad]
    left_out = [name for name, parameter in trainable if id(known_as(parameter)) not in groups]
    if not left_out:
        return
    if len(left_out) == len(trainable):
        raise _C.UsageError(
            "no trainable parameter of the model is in a param group of the optimizer; make the optimizer from this "
            f"model's parameters. First: '{left_out[0]}'"
        )
    if rank == 0:
        logger.warning("%d trainable parameters are in no param group of the optimizer and stay as they are; first: "
                       "'%s'", len(left_out), left_out[0])


def optimizer_from_config(config, parameters):
    """(ShardedOptimizer, rule) for the configuration's ``optimizer`` section, or (None, "none").

    Args:
        config: a _C.Config.
        parameters: parameters or dicts of param groups, as torch.optim takes them.
    """
    if config.optimizer is None:
        return None, "none"
    kind, torch_class, torch_params, adam = config.optimizer
    if kind == "torch":
        inner = _lean(getattr(torch.optim, torch_class))(parameters, **json.loads(torch_params))
        return wrap_torch_optimizer(inner)
    from .ops.adam import DeepSpeedCPUAdam, FusedAdam  # not at `import strata`

    decoupled = kind == "adamw"
    if config.optimizer_tier != "device":
        client = DeepSpeedCPUAdam(_as_groups(parameters), adamw_mode=decoupled, **adam)
    else:
        client = FusedAdam(_as_groups(parameters), adam_w_mode=decoupled, **adam)
    return _sharded(client, None), kind


def _lean(torch_class):
    """A class like this one of torch.optim that leaves torch's compiler alone."""

    class Lean(_WithoutCompiler, torch_class):
        _strata_likeness = torch_class

        def step(self, closure=None):
            with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
                return inspect.unwrap(torch_class.step)(self, closure)

    Lean.__name__ = Lean.__qualname__ = torch_class.__name__
    Lean.__doc__ = torch_class.__doc__
    return Lean


def wrap_torch_optimizer(inner):
    """(ShardedOptimizer, rule) for a torch.optim optimizer of the user.

    AdamW and Adam without amsgrad or maximize, and those of ``strata.ops.adam``, are computed by the engine's own
    one-pass kernel, with the hyper-parameters of the optimizer's param groups. Any other runs as it is on the fp32
    shards, which is right for optimizers that work element by element.
    """
    from .ops.adam import adam_mode  # not at `import strata`

    if any(float(state.get("step", 1)) > 0 for state in inner.state.values()):
        raise _C.UsageError(
            f"the {type(inner).__name__} has taken steps already, and its state cannot be sharded; give initialize() a "
            "new one"
        )
    if adam_mode(inner) is not None:
        return _sharded(inner, None), adam_mode(inner)
    kind = getattr(type(inner), "_strata_likeness", type(inner))
    exact = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam"}.get(kind)
    special = any(g.get("amsgrad") or g.get("maximize") or g.get("capturable") for g in inner.param_groups)
    decoupled = [bool(g.get("decoupled_weight_decay", exact == "adamw")) for g in inner.param_groups]
    if exact and not special and len(set(decoupled)) == 1:
        rule = "adamw" if decoupled[0] else "adam"
        return _sharded(inner, None), rule
    return _sharded(inner, inner), "external"


def _sharded(client, inner):
    """A ShardedOptimizer that is an instance of ``client``'s class, too, with what that class keeps in attributes."""
    try:
        name, bases = f"Sharded{type(client).__name__}", (ShardedOptimizer, type(client))
        cls = type(name, bases, {"__doc__": type(client).__doc__})
        sharded = cls.__new__(cls)
    except TypeError:  # a class that cannot be inherited from
        return ShardedOptimizer(client.param_groups, client.defaults, inner)
    kept = {name: value for name, value in client.__dict__.items() if name != "step"}  # which a scheduler has wrapped
    sharded.__dict__.update(kept)
    ShardedOptimizer.__init__(sharded, client.param_groups, client.defaults, inner)
    return sharded


def run_on_shards(sharded, model):
    """Lets ``sharded.inner`` update this rank's fp32 shards: its groups get the segments as parameters."""
    inner = sharded.inner
    for group in inner.param_groups:
        group["params"] = []
    segments, by_parameter = [], {}
    for group_index, parameter, weight in model.segments():
        segments.append(torch.nn.Parameter(weight))
        by_parameter[parameter] = segments[-1]
        inner.param_groups[group_index]["params"].append(segments[-1])
    if inner.state:  # Adagrad's, say, which exists from the start
        groups = [dict(group) for group in inner.param_groups]
        inner.state.clear()
        inner.state.update(type(inner)(groups, **inner.defaults).state)

    def update(gradients):
        for segment, gradient in zip(segments, gradients, strict=True):
            segment.grad = gradient
        try:
            inner.step()
        finally:
            for segment in segments:
                segment.grad = None  # the memory is the engine's again

    model.set_update(update)
    model.segment_states = SegmentStates(inner, by_parameter, segments)


class SegmentStates:
    """What an optimizer of the user's keeps, element by element, of this rank's parts of the parameters.

    Args:
        inner: the optimizer.
        segments: {index of a parameter: its part, which ``inner`` knows as a parameter}.
        in_order: these parts, as ``core.segments()`` has them.
    """

    def __init__(self, inner, segments, in_order):
        self._inner, self._segments, self._in_order = inner, segments, in_order
        self._away = []  # (the optimizer's dict, name, device) of what is on the host for a while

    def park(self, states, pin_memory):
        """Moves the optimizer's tensors to the host, where ``states`` has "optim_states", and lets go of the masters,
        whose memory the engine may move. A part is empty then."""
        if "optim_states" in states:
            for kept in self._inner.state.values():
                for name, value in kept.items():
                    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                        copy = torch.empty_like(value, device="cpu", pin_memory=pin_memory)
                        self._away.append((kept, name, value.device))
                        kept[name] = copy.copy_(value)
        if "hp_params" in states or "lp_params" in states:
            for segment in self._in_order:
                segment.data = segment.data.new_empty(0)

    def unpark(self, core):
        """After the engine has brought its states back."""
        away, self._away = self._away, []
        for kept, name, device in away:
            kept[name] = kept[name].to(device)
        for segment, (_, _, weight) in zip(self._in_order, core.segments(), strict=True):
            segment.data = weight

    def part(self, parameter, name):
        """The state itself, of the part's shape; None where there is none."""
        segment = self._segments.get(parameter)
        if segment is None:
            return None
        value = self._inner.state.get(segment, {}).get(name)
        return value if isinstance(value, torch.Tensor) and value.shape == segment.shape else None

    def has(self, name):
        """Whether any part has a state of this name."""
        return any(self.part(parameter, name) is not None for parameter in self._segments)


def _as_groups(parameters):
    """Param groups of parameters or of param groups, as torch.optim takes either."""
    parameters = list(parameters)
    if parameters and isinstance(parameters[0], dict):
        return [dict(group) for group in parameters]
    return [{"params": parameters}]
