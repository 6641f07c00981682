"""``deepspeed.zero``: gathering, the objects through which frameworks switch DeepSpeed's hooks off and on, and the
classes of optimizers."""

import logging
import sys
import types
from contextlib import contextmanager

import torch

from .. import zero
from ..model.parameter import owner_of
from ..optimizer import ShardedOptimizer
from ..rank_logging import logger


class GatheredParameters(zero.GatheredParameters):
    """As ``strata.zero.GatheredParameters``, but a change with ``modifier_rank=None`` is lost with a warning, as under
    DeepSpeed; UsageError where the configuration has ``zero_optimization.enable_sanity_checks``. Libraries merge
    adapters in such a context, read the weights, and remove the adapters again."""

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
            # Where it fills the model later, transformers has replaced torch's initializers by ones that do nothing.
            initializer = getattr(torch.nn.init.normal_, "__qualname__", "")
            self._deferred.values_come_later = initializer.startswith("no_init_weights.")
        return self


def register_external_parameter(module, parameter):
    """Does nothing: the engine gathers a parameter when any module reads it."""


def zero_wrapper_for_fp_tensor_constructor(function, dtype):
    """The same ``function``: ``zero.Init`` gives parameters their dtype, and changes no constructors of tensors."""
    return function


@contextmanager
def unwrap_model_for_generation(model):
    """Context in which the module of ``model``, an engine, is whole on every rank; its value is the module."""
    with GatheredParameters(model.module.parameters(), enabled=model.zero_optimization_partition_weights()):
        yield model.module


class ParameterOffload:
    """``engine.optimizer.parameter_offload`` at stage 3, and ``engine.optimizer`` of an engine without an optimizer:
    ``param_groups``, ``state`` and ``defaults`` are empty.

    Libraries remove DeepSpeed's hooks from it (``forward_hooks``, ``backward_hooks``: [], may be assigned) before they
    generate with gathered parameters, and put them back afterwards. Strata's hooks need not be removed: a forward uses
    parameters that are gathered already."""

    inner = None
    overflow = False

    def __init__(self, module):
        self.module = module
        self.forward_hooks, self.backward_hooks = [], []
        self.param_coordinator = types.SimpleNamespace(  # the engine itself learns the order of gathers
            is_invalid_trace=lambda: False, _invalidate_trace=lambda: None, reset_step=lambda: None)
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

    _stages, _precisions = (0, 1, 2, 3), None  # None: all


for _name, _doc, _stages, _precisions in (
        ("ZeROOptimizer", "One that is sharded.", (1, 2, 3), None),
        ("DeepSpeedZeroOptimizer", "One of stages 1 and 2.", (1, 2), None),
        ("DeepSpeedZeroOptimizer_Stage3", "One of stage 3.", (3,), None),
        ("FP16_Optimizer", "One of stage 0 under fp16 or bf16, fused or not.", (0,), ("float16", "bfloat16")),
        ("BF16_Optimizer", "One of stages 1 and 2 under bf16.", (1, 2), ("bfloat16",))):
    globals()[_name] = _OfStages(_name, (DeepSpeedOptimizer,), {
        "__doc__": _doc, "__module__": __name__, "_stages": _stages, "_precisions": _precisions})  # fmt: skip


class DummyOptim:
    """Param groups of ``params``, parameters, without an optimizer."""

    def __init__(self, params):
        self.param_groups = [{"params": params}]
