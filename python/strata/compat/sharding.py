"""``deepspeed.zero``: gathering, and what frameworks take hold of to switch DeepSpeed's hooks off and on."""

import logging
import sys
from contextlib import contextmanager

import torch

from .. import zero
from ..model.owner import owner_of

logger = logging.getLogger("strata")


class GatheredParameters(zero.GatheredParameters):
    """As ``strata.zero.GatheredParameters``, but for what is changed with ``modifier_rank=None``: it is lost, as under
    DeepSpeed, and said in a warning. Libraries merge adapters in such a context, look, and take them out again.

    Raises:
        UsageError: for such a change, where the configuration has ``zero_optimization.enable_sanity_checks``.
    """

    _told = False

    def _changed(self, message):
        if any(core.sanity_checks for core, _ in self._held):
            super()._changed(message)
        level = logging.DEBUG if GatheredParameters._told else logging.WARNING
        GatheredParameters._told = True
        logger.log(level, "%s. What was changed is lost where parameters are sharded", message)


class Init(zero.Init):
    """As ``strata.zero.Init``; ``from_pretrained`` of transformers then reads each rank's shards from the files."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if "transformers.modeling_utils" in sys.modules:
            from .pretrained import install

            install()

    def __enter__(self):
        super().__enter__()
        if self._looks is not None:
            self._births.values_come_later = _initializes_nothing()
        return self


def _initializes_nothing():
    """Whether transformers has put nothing in the place of torch's initializers: it fills the model afterwards."""
    return getattr(torch.nn.init.normal_, "__qualname__", "").startswith("no_init_weights.")


def register_external_parameter(module, parameter):
    """Does nothing: a parameter that another module reads is gathered as it is read."""


def unregister_external_parameter(module, parameter):
    """Does nothing."""


def zero_wrapper_for_fp_tensor_constructor(function, dtype):
    """``function`` as it is: ``zero.Init`` gives parameters their dtype, and leaves constructors of tensors alone."""
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
    """(): there is no list of them. Modules of an engine have this as ``ds_external_parameters``."""
    return ()


class ParameterOffload:
    """``engine.optimizer.parameter_offload`` at stage 3, and ``engine.optimizer`` of an engine without an optimizer.

    Libraries remove DeepSpeed's hooks from it before they generate with gathered parameters, and put them back
    afterwards. Here nothing has to be removed: a forward takes parameters that are gathered as they are.

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
        """``partition_all_parameters()``, and frees all memory of gathered parameters that nobody uses. Collective
        where gathers are."""
        self.partition_all_parameters()
        cores = {id(core): core for core, _ in map(owner_of, self.module.parameters()) if core is not None}
        for core in cores.values():
            core.free_gathered()

    def setup_zero_stage3_hooks(self):
        """Does nothing: the engine's own interception stays."""

    def _register_deepspeed_module(self, module, count=(0,)):
        """Does nothing: the engine's own interception stays."""

    def destroy(self):
        """Does nothing: ``engine.destroy()`` ends it."""


class _Coordinator:
    """Stands for what learns the order of gathers, which the engine does by itself."""

    def is_invalid_trace(self):
        return False

    def _invalidate_trace(self):
        pass

    def reset_step(self):
        pass

