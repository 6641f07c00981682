"""Objects that scripts read on DeepSpeed's optimizer of an engine: its states, the loss scale, the optimizer inside."""

import collections
import weakref

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
        raise _C.UsageError("optimizer.state[p] was asked for, and the engine keeps this optimizer's states, in "
                            "shards; call strata.utils.safe_get_full_optimizer_state(p, 'exp_avg') and "
                            "safe_set_full_optimizer_state() for a whole one on every rank, or optimizer.state_dict() "
                            "for this rank's part of all; optimizer.state.clear() begins anew")

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
