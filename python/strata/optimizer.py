"""The optimizer that ``initialize`` returns: hyper-parameters for the user, the update in the engine."""

import functools
import inspect
import json
import types
import weakref

import torch

from . import _C
from .model.tiles import known_as
from .native_rules import native_rule, refuse_dion
from .ops.adam import DeepSpeedCPUAdam, FusedAdam
from .ops.elementwise import add_group_without_compiler
from .optimizer_names import EngineStates, Inside, LossScale
from .rank_logging import logger


def send_calls_to(sharded, client):
    """Lets scripts call ``step()`` and ``zero_grad()`` of the optimizer that they gave to ``initialize``."""
    there, client_there = weakref.ref(sharded), weakref.ref(client)

    def sent(name):
        def method(_, *args, **kwargs):
            sharded = there()
            if sharded is None or not sharded.trains():
                return getattr(type(client_there()), name)(client_there(), *args, **kwargs)
            return getattr(sharded, name)(*args, **kwargs)

        return types.MethodType(method, weakref.proxy(client))  # schedulers can wrap it; the proxy avoids a cycle

    for name in _MOVES:
        if name in vars(type(sharded)):
            setattr(client, name, sent(name))
    if "step" not in vars(client):  # else a scheduler has wrapped it, and checks that its wrapper is still there
        client.step, client.zero_grad = sent("step"), sent("zero_grad")


_MOVES = ("train", "eval")  # of schedule-free optimizers: methods that change the weights


def _moving(name):
    def method(self):
        move = functools.partial(getattr(type(self.inner), name), self.inner)
        if self.trains():
            self._engine().core.segment_states.edit(move)
        else:
            move()

    method.__name__ = name
    method.__doc__ = f"``{name}()`` of the script's optimizer; the model's weights follow. Collective."
    return method


class _WithoutCompiler(torch.optim.Optimizer):
    """Torch's methods without the wrappers that import its compiler (``add_group_without_compiler``)."""

    add_param_group = add_group_without_compiler

    def state_dict(self):
        return _unwrapped(super().state_dict)()

    def load_state_dict(self, state_dict):
        _unwrapped(super().load_state_dict)(state_dict)


def _unwrapped(method):
    """The method inside torch's wrapper, where ``method`` is one of torch's own; else ``method``, a user's."""
    function = method.__func__
    if function is not torch.optim.Optimizer.__dict__.get(function.__name__):
        return method
    return inspect.unwrap(function).__get__(method.__self__)


class ShardedOptimizer(_WithoutCompiler):
    """The engine's optimizer as schedulers and scripts see it.

    ``param_groups`` are ordinary dicts. The engine reads them at every step, so a script may change ``lr`` between
    steps as with any torch optimizer. ``inner`` is the user's optimizer where it updates the shards, else None. For an
    optimizer of the user's ``initialize`` returns an instance of its class, too.

    Attributes:
        members: [[torch.nn.Parameter]], the model's parameters in each param group; ``param_groups`` of an optimizer
            of the user's have its fp32 masters.
        halves: [(a param group, that of the script whose ``lr`` and ``wd`` it has)], of Moonlight's Muon.
        rules: {id(parameter): what ``native_rule`` says of it}, where that is not as of all parameters.
        takes_whole: bool, whether the user's optimizer updates whole parameters, not parts of them.
        owed_masters: {index in the engine: fp32 values}, masters of a loaded state, until the next step.
        overflow: bool, whether the last step is known to have been skipped, because gradients were not finite. Does
            not wait for a GPU; ``engine.was_step_applied()`` does.
    """

    takes_whole, inner, halves = False, None, ()
    _states = None
    _client = None  # the optimizer that the user gave to ``initialize``, until the engine is made

    def __init__(self, param_groups, defaults, inner=None):
        self._model, self._engine = None, None
        self.members, self.owed_masters, self.rules = [], {}, {}
        # Keeps the dicts, so that they stay shared with their owner. Not super(): that may be the user's class.
        torch.optim.Optimizer.__init__(self, param_groups, defaults)
        self.inner = inner
        self.takes_unfrozen = False  # whether parameters that are in no group are in the first, once they train
        self.taken_up = set()  # ids of parameters that were frozen at the start
        self.overflow = False

    def add_param_group(self, param_group):
        """As torch's, also while an engine trains: parameters of its model that were in no group train with the values
        of this group from the next forward on, if they require gradients. The same on every rank. UsageError for a
        parameter that is in a group already, or is not the model's."""
        if self._model is None:
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        group = {**param_group, "params": [given] if isinstance(given, torch.Tensor) else list(given)}
        indices = [self._model.index_of(parameter) for parameter in group["params"]]
        if -1 in indices:
            shape = tuple(group["params"][indices.index(-1)].shape)
            raise _C.UsageError(f"add_param_group takes parameters of the engine's model; found one of shape {shape} "
                                "that is none of it when initialize() was called")
        self._model.add_to_group(indices, len(self.param_groups))
        super().add_param_group(group)
        self.members.append(list(group["params"]))
        if self.inner is not None:
            self.param_groups[-1]["params"] = []  # gets parts of its parameters when these train
            self.inner.param_groups.append(self.param_groups[-1])

    def bind(self, engine):
        """Called when the engine is made."""
        self._model, self._engine = engine.core, weakref.ref(engine)
        self.members = [list(group["params"]) for group in self.param_groups]
        if self.inner is not None:
            from .client_optimizer import run_on_shards  # only for an optimizer of the script's

            run_on_shards(self, engine)
        here = weakref.ref(self)
        if any(rule == "muon" for rule, *_ in self.rules.values()):
            from .muon import run_in  # only where it is asked for

            run_in(engine, self)
        engine.core.on_trained(lambda indices: here() and here()._take_up(indices))
        client, self._client = self._client, None
        if client is not None:
            send_calls_to(self, client)

    def trains(self):
        """bool: whether its engine lives."""
        return self._model is not None and self._model.alive

    def _take_up(self, indices):
        """Trains parameters that were frozen, given by their indices, from now on."""
        engine = self._bound()
        listed = {id(parameter) for group in self.members for parameter in group}
        for parameter in (known_as(engine._described[index][1]) for index in indices):
            self.taken_up.add(id(parameter))
            if id(parameter) not in listed:
                self.members[0].append(parameter)
                if self.inner is None:
                    self.param_groups[0]["params"].append(parameter)
        if self.inner is not None:
            from .client_optimizer import lend_parts, members_of

            engine.core.segment_states.take_up(engine.core, members_of(self, engine))
            lend_parts(engine.core.segment_states, engine)

    loss_scale = cur_scale = property(
        lambda self: self._model.loss_scale, doc="The factor of the loss under fp16; 1.0 in other precisions.")

    def step(self, closure=None):
        """``engine.step()``, for scripts that step the optimizer: it ends a micro-step, and at an accumulation boundary
        it updates the weights and steps the engine's scheduler. Where a script calls both this and ``engine.step()``
        after a backward pass, the second call does nothing. A call before the first backward pass does nothing, as in
        torch's optimizers without gradients. Collective. UsageError where it is called again without a backward pass
        since its last call; and as ``engine.step()``.

        Returns the result of ``closure``, None or a callable that runs forward and backward and returns the loss; it is
        called once, first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._bound().step_by_optimizer()
        return loss

    def state_dict(self):
        """This rank's part of the optimizer's state, in torch's form, and the param groups. By the parameter's number
        it has ``step`` and this rank's part of ``exp_avg`` and ``exp_avg_sq``, of ``momentum_buffer``, or of the states
        of the user's optimizer. States in 8 bits have bitsandbytes' names, and are its codes and scales.
        On one rank the parts are whole, in the parameter's shape. The engine's own states are copied to the host.
        ``load_state_dict()`` takes the result on the same rank of a job with the same number of ranks.
        ``engine.save_checkpoint()`` saves for any number of ranks, with the weights."""
        if not self.trains():
            return super().state_dict()
        from .local_states import state_dict  # not before the first use

        return state_dict(self, self._bound())

    def load_state_dict(self, state_dict):
        """Loads a result of ``state_dict()`` from this rank of a job with the same number of ranks, or whole states, of
        a torch optimizer or of one rank; of bitsandbytes' and torchao's in 8 bits, and of the Muon of Keller Jordan, of
        Moonlight and of dion. The weights do not change. Where weights in 16 bits equal the state's rounded
        masters before the next step, the engine's fp32 masters get the state's exact values. UsageError for parts of
        another rank, or of another number of ranks, and for states that the engine's rule does not have or lacks;
        ValueError for other param groups."""
        if not self.trains():
            super().load_state_dict(state_dict)
            return
        from .local_states import load_state_dict

        load_state_dict(self, self._bound(), state_dict)

    def zero_grad(self, set_to_none=True):
        """``engine.zero_grad()``. Does nothing where no engine is bound."""
        engine = None if self._engine is None else self._engine()
        if engine is not None:
            engine.zero_grad(set_to_none)

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
        """[(lr, beta1, beta2, eps, weight decay, bias correction)], the present values of each param group. A user's
        optimizer reads its groups itself."""
        if self.inner is not None:
            return [(0.0, 0.0, 0.0, 0.0, 0.0, True)] * len(self.param_groups)
        for half, of_script in self.halves:
            half.update(lr=of_script["lr"], weight_decay=of_script["wd"])
        result = []
        for group in self.param_groups:
            beta1, beta2 = group.get("betas", (0.0, 0.0))
            if group.get("use_muon"):
                beta1 = group["momentum"]
            values = (group["lr"], beta1, beta2, group.get("eps", 0.0), group.get("weight_decay", 0.0))
            result.append((*(float(v) for v in values), bool(group.get("bias_correction", True))))
        return result

    # --- names that scripts read on DeepSpeed's ---

    @property
    def state(self):
        """The states of the user's optimizer; an ``EngineStates`` where the engine has the states."""
        if "state" in self.__dict__:  # torch's load_state_dict() goes past the setter
            self.state = self.__dict__["state"]
        return self._states if self.inner is None else self.inner.state

    @state.setter
    def state(self, states):
        self.__dict__.pop("state", None)
        if self.inner is not None:
            self.inner.state = states
            return
        if self._states is None:
            self._states = EngineStates(self)
        self._states.replace(states)

    loss_scaler = loss_scale_config = property(LossScale, doc="``LossScale``.")
    dynamic_loss_scale = property(
        lambda self: self._bound().dynamic_loss_scale(), doc="bool: whether the loss scale adapts.")

    def get_lr(self):
        """float: the learning rate of the first param group; ``engine.get_lr()`` has all."""
        return self.param_groups[0]["lr"]

    def set_lr(self, lr):
        """Sets the learning rate of every param group, for the steps from now on."""
        self._bound().set_lr(lr)

    def needs_scaler(self):
        """bool: whether a loss has to be scaled before backward (``engine.scale``): True under fp16."""
        return self._bound().fp16_enabled()

    optimizer = property(lambda self: Inside(self) if self.inner is None else self.inner, doc="The optimizer inside: "
                         "the script's, where it updates the shards; else an ``Inside``.")  # fmt: skip

    @property
    def fp32_partitioned_groups_flat(self):
        """[tensor], by param group: this rank's parts of the fp32 masters, joined in one dimension. These are copies;
        ``safe_set_local_fp32_param`` changes the masters."""
        from .parameter_states import safe_get_local_fp32_param  # not before the first use

        flat = []
        for group in self.param_groups:
            parts = [safe_get_local_fp32_param(p) for p in group["params"]]
            parts = [part.reshape(-1) for part in parts if part is not None]
            flat.append(torch.cat(parts) if parts else torch.empty(0))
        return flat

    single_partition_of_fp32_groups = fp32_partitioned_groups_flat  # DeepSpeed's name at stages 1 and 2
    fp32_groups_flat = fp32_partitioned_groups_flat  # DeepSpeed's name at stage 0 in 16 bits


def groups_of(optimizer):
    """{id(parameter): index of its param group}; empty for None."""
    groups = optimizer.param_groups if optimizer is not None else []
    return {id(p): index for index, group in enumerate(groups) for p in group["params"]}


def log_left_out(parameters, groups, rank):
    """[torch.nn.Parameter]: trainable ones of ``parameters`` (``describe_parameters``) that are in none of ``groups``:
    no step changes them, and autograd makes their ``.grad``, as in torch. Warns on rank 0 of them. UsageError where all
    trainable ones are in none."""
    trainable = [(name, parameter) for name, parameter, *_ in parameters if parameter.requires_grad]
    left_out = [(name, parameter) for name, parameter in trainable if id(known_as(parameter)) not in groups]
    if not left_out:
        return []
    if len(left_out) == len(trainable):
        raise _C.UsageError("no trainable parameter of the model is in a param group of the optimizer; make the "
                            f"optimizer from this model's parameters. First: '{left_out[0][0]}'")
    if rank == 0:
        logger.warning("%d trainable parameters are in no param group of the optimizer and do not change; first: "
                       "'%s'", len(left_out), left_out[0][0])
    return [parameter for _, parameter in left_out]


def optimizer_from_config(config, parameters, tree):
    """(ShardedOptimizer, rule) for the ``optimizer`` section of a _C.Config, or (None, "none"). ``parameters``:
    parameters or dicts of param groups, as torch.optim takes them, of the ``ModelTree`` ``tree``."""
    if config.optimizer is None:
        return None, "none"
    kind, torch_class, torch_params, adam = config.optimizer
    if torch_class == "Muon":
        from .muon import muon_from_config  # only where it is asked for

        return wrap_torch_optimizer(muon_from_config(json.loads(torch_params), parameters, tree))
    if kind == "torch":
        inner = _class_named(torch_class)(parameters, **json.loads(torch_params))
        return wrap_torch_optimizer(inner)
    parameters = list(parameters)
    are_groups = parameters and isinstance(parameters[0], dict)
    groups = [dict(group) for group in parameters] if are_groups else [{"params": parameters}]
    if config.optimizer_tier != "device":
        client = DeepSpeedCPUAdam(groups, adamw_mode=kind == "adamw", **adam)
    else:
        client = FusedAdam(groups, adam_w_mode=kind == "adamw", **adam)
    return _sharded(client, None), kind


def _class_named(name):
    """Lion, which torch lacks, or a subclass of a class of torch.optim that does not import torch's compiler."""
    if name == "Lion":
        from .ops.lion import DeepSpeedCPULion  # only where the configuration names it

        return DeepSpeedCPULion
    torch_class = getattr(torch.optim, name)

    class Lean(_WithoutCompiler, torch_class):
        _strata_likeness = torch_class

        def step(self, closure=None):
            with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
                return inspect.unwrap(torch_class.step)(self, closure)

    Lean.__name__ = Lean.__qualname__ = torch_class.__name__
    Lean.__doc__ = torch_class.__doc__
    return Lean


def wrap_torch_optimizer(inner):
    """(ShardedOptimizer, rule) for a torch.optim optimizer of the user. The engine's own kernels compute those that
    ``native_rule`` knows, with the hyper-parameters of the optimizer's param groups. Any other optimizer runs itself:
    on the fp32 shards where it works element by element, else on whole parameters."""
    refuse_dion(inner)
    if any(float(state.get("step", set(state) != {"use_muon"})) > 0 for state in inner.state.values()):
        raise _C.UsageError(f"the {type(inner).__name__} has taken steps already, and its state cannot be sharded; "
                            "give initialize() a new one")
    if any("momentum" in group and ("use_muon" in group or "Muon" in type(inner).__name__)
           for group in inner.param_groups):
        from .muon import complete_groups, is_muon, split_groups  # only where it is asked for

        groups, halves = split_groups(inner)
        if halves or is_muon(inner):
            matrices = complete_groups(inner, groups)
            sharded = _sharded(inner, None, groups)
            sharded.matrices, sharded.halves = matrices, halves
            sharded.rules = {id(p): ("muon", 32, 0, matrices[id(p)].are_apart, matrices[id(p)].cost)
                             for g in groups if g["use_muon"] for p in g["params"]}  # fmt: skip
            return sharded, "adamw"
    native = native_rule(inner)
    if native is not None:
        sharded = _sharded(inner, None)
        rule, sharded.rules = native
        return sharded, rule
    return _sharded(inner, inner), "external"


def _sharded(client, inner, groups=None):
    """A ShardedOptimizer that is an instance of ``client``'s class, too, with that object's attributes. ``groups``: its
    param groups; None: the client's."""
    groups = client.param_groups if groups is None else groups
    try:
        name, bases = f"Sharded{type(client).__name__}", (ShardedOptimizer, type(client))
        moves = [move for move in _MOVES if inner is not None and callable(getattr(type(client), move, None))]
        cls = type(name, bases, {"__doc__": type(client).__doc__, **{move: _moving(move) for move in moves}})
        sharded = cls.__new__(cls)
    except TypeError:  # a class that cannot be inherited from
        return ShardedOptimizer(groups, client.defaults, inner)
    sharded.__dict__.update((k, v) for k, v in client.__dict__.items() if k != "step")  # a scheduler has wrapped it
    ShardedOptimizer.__init__(sharded, groups, client.defaults, inner)
    sharded._client = client
    return sharded
