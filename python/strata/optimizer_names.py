"""Names that scripts read on DeepSpeed's optimizer of an engine: the loss scale, flat masters, the optimizer inside."""

import collections
import weakref

import torch

from . import _C


class EngineStates(collections.defaultdict):
    """As torch's ``state`` before the first step. While an engine trains, ``clear()`` drops the engine's states, as it
    would in torch, and reading a parameter's state is an error. It has a weak reference to the ``ShardedOptimizer``."""

    def __init__(self, optimizer):
        super().__init__(dict)
        self._optimizer = weakref.ref(optimizer)

    def _trained(self):
        """The optimizer, while its engine lives, else None."""
        optimizer = self._optimizer()
        return optimizer if optimizer is not None and optimizer.trains() else None

    def __missing__(self, parameter):
        if self._trained() is None:
            return super().__missing__(parameter)
        raise _C.UsageError(
            "optimizer.state[p] was asked for, and the engine keeps this optimizer's states, in shards; call "
            "strata.utils.safe_get_full_optimizer_state(p, 'exp_avg') and safe_set_full_optimizer_state() for a whole "
            "one on every rank, or optimizer.state_dict() for this rank's part of all; optimizer.state.clear() begins "
            "anew"
        )

    def clear(self):
        """Drops the engine's states on this rank; every rank must call it."""
        super().clear()
        optimizer = self._trained()
        if optimizer is not None:
            from .local_states import drop_states  # not before the first use

            drop_states(optimizer, optimizer._bound())

    def replace(self, states):
        """``optimizer.state = states``. UsageError where they are not empty."""
        if states and self._trained() is not None:
            raise _C.UsageError("optimizer.state was set, and the engine keeps this optimizer's states; give them to "
                                "optimizer.load_state_dict(), or an empty dict to begin anew")
        self.clear()
        self.update(states)


def _while_dynamic(name, doc):
    """A property: one of ``engine.dynamic_loss_scale_args()``; None where the loss scale does not adapt."""
    def value(self):
        return self._engine.dynamic_loss_scale_args()[name] if self.dynamic else None

    return property(value, doc=f"{doc}; None where the loss scale does not adapt.")


class LossScale:
    """``optimizer.loss_scaler`` and ``optimizer.loss_scale_config``: how the loss is scaled, live. Made of the
    ``ShardedOptimizer`` of an engine."""

    scale_factor = 2.0

    def __init__(self, optimizer):
        self._optimizer = optimizer

    cur_scale = loss_scale = property(
        lambda self: self._optimizer.loss_scale,
        doc="float: the factor of the loss; 1.0 except under fp16. Waits for the device.")
    dynamic = dynamic_loss_scale = property(
        lambda self: self._engine.dynamic_loss_scale(), doc="bool: whether the loss scale adapts.")
    use_grad_scaling = property(
        lambda self: self._engine.fp16_enabled(), doc="bool: whether there is a loss scale: True under fp16.")
    cur_iter = property(lambda self: self._engine.global_steps, doc="int: accumulation boundaries so far.")
    scale_window = _while_dynamic("scale_window", "int: steps without an overflow before the loss scale rises")
    min_scale = min_loss_scale = _while_dynamic("min_scale", "float: the smallest loss scale")
    delayed_shift = _while_dynamic("delayed_shift", "int: overflows before the loss scale falls")
    consecutive_hysteresis = _while_dynamic(
        "consecutive_hysteresis", "bool: whether a step without an overflow resets the count of overflows")

    _engine = property(lambda self: self._optimizer._bound())


class Inside:
    """``optimizer.optimizer`` where the engine itself updates: the same optimizer, without a further one inside."""

    def __init__(self, optimizer):
        self.__dict__["_optimizer"] = optimizer

    def __getattr__(self, name):
        if name == "optimizer":
            raise AttributeError("the optimizer inside has none inside itself")
        return getattr(self._optimizer, name)

    def __setattr__(self, name, value):
        setattr(self._optimizer, name, value)


class OptimizerNames:
    """A base of ``ShardedOptimizer``, which has ``inner``, ``param_groups``, ``trains()`` and ``_bound()``."""

    _states = None

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

    @property
    def optimizer(self):
        """The optimizer inside: the script's, where it updates the shards; else an ``Inside``."""
        return Inside(self) if self.inner is None else self.inner

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
