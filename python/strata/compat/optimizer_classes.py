"""Classes of DeepSpeed's optimizers that scripts ask about: what ``deepspeed.initialize`` returned is one of them."""

from ..optimizer import ShardedOptimizer


class _OfStages(type):
    """Whether an optimizer is an engine's, of one of ``cls._stages``."""

    def __instancecheck__(cls, instance):
        return isinstance(instance, ShardedOptimizer) and getattr(instance, "zero_stage", None) in cls._stages

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(f"{cls.__name__} is made by deepspeed.initialize")


class DeepSpeedOptimizer(metaclass=_OfStages):
    """Any engine's."""

    _stages = (0, 1, 2, 3)


class ZeROOptimizer(metaclass=_OfStages):
    """One that is sharded."""

    _stages = (1, 2, 3)


class DeepSpeedZeroOptimizer(metaclass=_OfStages):
    """One of stages 1 and 2."""

    _stages = (1, 2)


class DeepSpeedZeroOptimizer_Stage3(metaclass=_OfStages):  # noqa: N801 - the name that scripts have
    """One of stage 3."""

    _stages = (3,)


class DummyOptim:
    """Param groups without an optimizer.

    Args:
        params: parameters.
    """

    def __init__(self, params):
        self.param_groups = [{"params": params}]
