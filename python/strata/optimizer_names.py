"""Names that scripts read on DeepSpeed's optimizer of an engine: the loss scale, flat masters, the optimizer inside."""

import torch

from .engine_states import EngineStates


class LossScale:
    """``optimizer.loss_scaler`` and ``optimizer.loss_scale_config``: how the loss is scaled, live.

    Args:
        optimizer: the ``ShardedOptimizer`` of an engine.
    """

    scale_factor = 2.0

    def __init__(self, optimizer):
        self._optimizer = optimizer

    @property
    def cur_scale(self):
        """float: the factor of the loss; 1.0 except under fp16. Waits for the device."""
        return self._optimizer.loss_scale

    loss_scale = cur_scale

    @property
    def dynamic(self):
        """bool: whether the loss scale adapts."""
        return self._engine.dynamic_loss_scale()

    dynamic_loss_scale = dynamic

    @property
    def use_grad_scaling(self):
        """bool: whether there is a loss scale: True under fp16."""
        return self._engine.fp16_enabled()

    @property
    def cur_iter(self):
        """int: accumulation boundaries so far."""
        return self._engine.global_steps

    @property
    def scale_window(self):
        """int: steps without an overflow before the loss scale rises; None where it does not adapt."""
        return self._setting("scale_window")

    @property
    def min_scale(self):
        """float: the smallest loss scale; None where it does not adapt."""
        return self._setting("min_scale")

    min_loss_scale = min_scale

    @property
    def delayed_shift(self):
        """int: overflows before the loss scale falls; None where it does not adapt."""
        return self._setting("delayed_shift")

    @property
    def consecutive_hysteresis(self):
        """bool: whether a step without an overflow resets the count of overflows; None where the scale is constant."""
        return self._setting("consecutive_hysteresis")

    def _setting(self, name):
        return self._engine.dynamic_loss_scale_args()[name] if self.dynamic else None

    @property
    def _engine(self):
        return self._optimizer._bound()


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

    @property
    def loss_scaler(self):
        """``LossScale``."""
        return LossScale(self)

    loss_scale_config = loss_scaler

    @property
    def dynamic_loss_scale(self):
        """bool: whether the loss scale adapts."""
        return self._bound().dynamic_loss_scale()

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
