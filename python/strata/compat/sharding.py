"""``deepspeed.zero``: gathering, the objects through which frameworks switch DeepSpeed's hooks off and on, and the
classes of optimizers."""

import logging
import sys
from contextlib import contextmanager

import torch

from .. import zero
from ..model.parameter import owner_of
from ..optimizer import ShardedOptimizer

logger = logging.getLogger("strata")


class GatheredParameters(zero.GatheredParameters):
    """As ``strata.zero.GatheredParameters``, but a change with ``modifier_rank=None`` is lost with a warning, as under
    DeepSpeed. Libraries merge adapters in such a context, read the weights, and remove the adapters again.

    Raises:
        UsageError: for such a change, where the configuration has ``zero_optimization.enable_sanity_checks``.
    """

    _told = False

    def _changed(self, message):
        if any(core.sanity_checks for core, _ in self._held):
            super()._changed(message)
        level = logging.DEBUG if GatheredParameters._told else logging.WARNING
        GatheredParameters._told = True
        logger.log(level, "%s. The changes are lost where parameters are sharded", message)


class Init(zero.Init):
    """As ``strata.zero.Init``; ``from_pretrained`` of transformers then reads each rank's shards from the files."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if "transformers.modeling_utils" in sys.modules:
            from .pretrained import install

            install()

    def __enter__(self):
        super().__enter__()
        if self._reads is not None:
            self._deferred.values_come_later = _initializes_nothing()
        return self


def _initializes_nothing():
    """Whether transformers has replaced torch's initializers by functions that do nothing, to fill the model later."""
    return getattr(torch.nn.init.normal_, "__qualname__", "").startswith("no_init_weights.")


def register_external_parameter(module, parameter):
    """Does nothing: the engine gathers a parameter when any module reads it."""


unregister_external_parameter = register_external_parameter


def zero_wrapper_for_fp_tensor_constructor(function, dtype):
    """The same ``function``: ``zero.Init`` gives parameters their dtype, and changes no constructors of tensors."""
    return function


@contextmanager
def unwrap_model_for_generation(model):
    """Context in which the module of an engine is whole on every rank; its value is the module.

    Args:
        model: an engine.
    """
    with GatheredParameters(model.module.parameters(), enabled=model.zero_optimization_partition_weights()):
        yield model.module


def no_external_parameters():
    """(): Strata keeps no list of external parameters. Modules of an engine have this as ``ds_external_parameters``."""
    return ()


class ParameterOffload:
    """``engine.optimizer.parameter_offload`` at stage 3, and ``engine.optimizer`` of an engine without an optimizer.

    Libraries remove DeepSpeed's hooks from it before they generate with gathered parameters, and put them back
    afterwards. Strata's hooks need not be removed: a forward uses parameters that are gathered already.

    Args:
        module: the engine's.

    Attributes:
        forward_hooks, backward_hooks: []; may be assigned.
        param_coordinator: has ``is_invalid_trace()`` and ``_invalidate_trace()``.
        param_groups, state, defaults: empty, as of an optimizer of nothing.
    """

    inner = None
    overflow = False

    def __init__(self, module):
        self.module = module
        self.forward_hooks, self.backward_hooks = [], []
        self.param_coordinator = _Coordinator()
        self.param_groups, self.state, self.defaults = [], {}, {}

    def get_param_coordinator(self):
        """``param_coordinator``."""
        return self.param_coordinator

    def scalars(self):
        """[]: there are no param groups."""
        return []

    def partition_all_parameters(self):
        """Releases what a script has gathered with ``parameter.all_gather()``."""
        for parameter in self.module.parameters():
            if owner_of(parameter)[0] is not None and hasattr(parameter, "partition"):
                parameter.partition()

    def empty_partition_cache(self):
        """``partition_all_parameters()``, and frees all memory of gathered parameters that are not in use. Collective
        where gathers are."""
        self.partition_all_parameters()
        cores = {id(core): core for core, _ in map(owner_of, self.module.parameters()) if core is not None}
        for core in cores.values():
            core.free_gathered()

    def setup_zero_stage3_hooks(self, *arguments, **options):
        """Does nothing: the engine's own interception stays until ``engine.destroy()``."""

    _register_deepspeed_module = destroy = setup_zero_stage3_hooks


class _Coordinator:
    """Stands for DeepSpeed's object that learns the order of gathers; the engine itself does this."""

    def is_invalid_trace(self):
        return False

    def _invalidate_trace(self):
        pass

    def reset_step(self):
        pass


# --- classes of optimizers, for ``isinstance`` of the optimizer that ``deepspeed.initialize`` returned ---


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
