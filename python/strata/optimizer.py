"""The optimizer that ``initialize`` returns: hyper-parameters for the user, the update in the engine."""

import inspect
import json
import logging
import types
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
    any torch optimizer. ``inner`` is the user's optimizer when one updates the shards, else None. What ``initialize``
    returns for an optimizer of the user's is an instance of its class, too.

    Attributes:
        members: [[torch.nn.Parameter]], the model's parameters in each param group; ``param_groups`` of an optimizer
            of the user's have its fp32 masters.
        takes_whole: bool, whether the user's optimizer updates whole parameters, not parts of them.
        overflow: bool, whether the last step is known to have been skipped, because gradients were not finite. Does
            not wait for a GPU to tell: ``engine.was_step_applied()`` does.
    """

    takes_whole = False
    _client = None  # what the user gave to ``initialize``, until the engine is made

    def __init__(self, param_groups, defaults, inner=None):
        self._model, self._engine = None, None
        self.members = []
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
        self.members = [list(group["params"]) for group in self.param_groups]
        if self.inner is not None:
            from .client_optimizer import run_on_shards  # not before somebody brings one

            run_on_shards(self, engine)
        client, self._client = self._client, None
        if client is not None:
            _send_steps_to(self, client)

    def trains(self):
        """bool: whether its engine lives."""
        return self._model is not None and self._model.alive

    @property
    def loss_scale(self):
        """The factor of the loss under fp16; 1.0 in other precisions."""
        return self._model.loss_scale

    cur_scale = loss_scale

    def step(self, closure=None):
        """``engine.step()``, for scripts that step the optimizer: it ends a micro-step, and at an accumulation boundary
        it updates the weights and steps the engine's scheduler. Where ``engine.step()`` has been called since the last
        backward pass it does nothing, and nor does ``engine.step()`` after it; nor before the first backward pass, as
        torch's optimizers without gradients. Collective.

        Args:
            closure: None, or a callable that runs forward and backward and returns the loss; it is called once, first.

        Returns:
            What ``closure`` returned, else None.

        Raises:
            UsageError: called again without a backward pass since its last call; and as ``engine.step()``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._bound().step_by_optimizer()
        return loss

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
        """[(lr, beta1, beta2, eps, weight decay, bias correction)], one a param group, as they are now. A user's
        optimizer reads its groups itself."""
        if self.inner is not None:
            return [(0.0, 0.0, 0.0, 0.0, 0.0, True)] * len(self.param_groups)
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
    one-pass kernel, with the hyper-parameters of the optimizer's param groups. Any other runs as it is: on the fp32
    shards where it works element by element, else on whole parameters.
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
    sharded._client = client
    return sharded


def _send_steps_to(sharded, client):
    """Scripts may go on to call ``step()`` of the optimizer that they have given to ``initialize``."""
    if "step" in vars(client):
        return  # a scheduler has wrapped it, and looks whether it still is its own
    own, there = type(client).step, weakref.ref(sharded)

    def step(client, closure=None):
        sharded = there()
        if sharded is None or not sharded.trains():
            return own(client, *(() if closure is None else (closure,)))
        return sharded.step(closure)

    client.step = types.MethodType(step, client)


def _as_groups(parameters):
    """Param groups of parameters or of param groups, as torch.optim takes either."""
    parameters = list(parameters)
    if parameters and isinstance(parameters[0], dict):
        return [dict(group) for group in parameters]
    return [{"params": parameters}]
