"""Classes of DeepSpeed's optimizers, for ``isinstance`` of the optimizer that ``deepspeed.initialize`` returned."""

from ..optimizer import ShardedOptimizer


class _OfStages(type):
    """``isinstance``: the optimizer is an engine's, of one of ``cls._stages`` and one of ``cls._precisions``."""

    def __instancecheck__(cls, instance):
        if not isinstance(instance, ShardedOptimizer) or getattr(instance, "zero_stage", None) not in cls._stages:
            return False
        return cls._precisions is None or instance.zero_precision in cls._precisions

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(f"{cls.__name__} is made by deepspeed.initialize")


class DeepSpeedOptimizer(metaclass=_OfStages):
    """Any engine's."""

    _precisions = None  # all

    _stages = (0, 1, 2, 3)


class ZeROOptimizer(DeepSpeedOptimizer):
    """One that is sharded."""

    _stages = (1, 2, 3)


class DeepSpeedZeroOptimizer(DeepSpeedOptimizer):
    """One of stages 1 and 2."""

    _stages = (1, 2)


class DeepSpeedZeroOptimizer_Stage3(DeepSpeedOptimizer):  # noqa: N801 - the name that scripts have
    """One of stage 3."""

    _stages = (3,)


class FP16_Optimizer(DeepSpeedOptimizer):  # noqa: N801
    """One of stage 0 under fp16 or bf16, fused or not."""

    _stages = (0,)
    _precisions = ("float16", "bfloat16")


FP16_UnfusedOptimizer = FP16_Optimizer


class BF16_Optimizer(DeepSpeedOptimizer):  # noqa: N801
    """One of stages 1 and 2 under bf16."""

    _stages = (1, 2)
    _precisions = ("bfloat16",)


class DummyOptim:
    """Param groups without an optimizer.

    Args:
        params: parameters.
    """

    def __init__(self, params):
        self.param_groups = [{"params": params}]
