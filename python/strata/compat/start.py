"""``deepspeed.initialize``, and the configuration in the form that frameworks write and read."""

import logging
import math

from .. import _C
from ..config_source import document_of, read_config
from ..engine_settings import VALUE_NAMES, EngineSettings
from ..initialize import initialize_as
from ..rank_logging import log_dist
from .engine import DeepSpeedEngine
from .identity import VERSION
from .zero_config import get_zero_config


def initialize(
    args=None,
    model=None,
    optimizer=None,
    model_parameters=None,
    training_data=None,
    lr_scheduler=None,
    distributed_port=29500,
    mpu=None,
    dist_init_required=None,
    collate_fn=None,
    config=None,
    mesh_param=None,
    config_params=None,
):
    """``strata.initialize`` in the form that frameworks expect: the engine is a ``DeepSpeedEngine``, and its ``config``
    is the given dict.

    Args:
        args: a namespace whose ``deepspeed_config``, or ``deepscale_config`` (the older name), is used when no
            configuration is given.
        distributed_port: accepted for DeepSpeed's sake; the launcher sets MASTER_PORT.
        The others are ``strata.initialize``'s. ``config_params`` is another name of ``config``.

    Returns:
        (engine, optimizer, dataloader, lr_scheduler); the last three are None where there is none.

    Raises:
        as ``strata.initialize``.
    """
    of_arguments = (getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config"))
    given = next((c for c in (config, config_params, *of_arguments) if c is not None), None)
    if given is None:
        raise _C.ConfigError("deepspeed.initialize() needs a configuration: pass config=<dict, path or JSON text>")
    log_dist(f"DeepSpeed info: version={VERSION}; Strata's engine stands in its place", ranks=[0])
    document = document_of(given)
    result = initialize_as(
        DeepSpeedEngine, model, settings_of(document), optimizer, model_parameters, training_data, lr_scheduler,
        dist_init_required, collate_fn, mpu, mesh_param,
    )  # fmt: skip
    result[0].document = document
    return result


def settings_of(document):
    """The dict for Strata's parser, from one that frameworks have filled in. It lacks settings that have no effect in
    DeepSpeed either (keys with dots, an infinite ``steps_per_print``), and its whole numbers are ints.
    """
    settings = _whole({key: value for key, value in document.items() if "." not in str(key)})
    if settings.get("steps_per_print") == math.inf:
        del settings["steps_per_print"]
    _warm_up_for_a_step(settings)
    return settings


def _warm_up_for_a_step(settings):
    """Replaces a warm-up of 0 steps, which Trainer and Accelerate write for "auto" where the user sets none. DeepSpeed
    took 0 as 2 steps, as it does 1, up to version 0.19.5, and has refused it since."""
    scheduler = settings.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, dict) else None
    if isinstance(params, dict) and params.get("warmup_num_steps") == 0:
        params["warmup_num_steps"] = 1
        log_dist("scheduler.params.warmup_num_steps is 0, and counts as 2 steps; leave the scheduler out of the "
                 "configuration for Trainer's own without a warm-up", [0], logging.WARNING)


def _whole(value):
    if isinstance(value, dict):
        return {key: _whole(entry) for key, entry in value.items()}
    if isinstance(value, float) and value >= 1e3 and math.isfinite(value):
        return int(value)  # frameworks compute sizes of buckets by a product
    return value


class DeepSpeedConfig:
    """A configuration, checked, with complete batch sizes.

    Args:
        config: dict, path or JSON text.
        mpu, mesh_device: must be None.

    Attributes:
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: int.
        zero_optimization_stage: int. zero_enabled: bool, whether it is above 0.
        zero_config: ``DeepSpeedZeroConfig``.
        optimizer_params, scheduler_params: the dict ``params`` of the section as given, or None.
        gradient_clipping, gradient_allreduce_op, optimizer_name, ...: results of the engine's methods of these names.
        _param_dict: the dict.

    Raises:
        ConfigError: the configuration is wrong.
    """

    def __init__(self, config, mpu=None, mesh_device=None):
        if mpu is not None or mesh_device is not None:
            raise _C.UsageError("DeepSpeedConfig(mpu=..., mesh_device=...): Strata cuts no model between ranks; leave "
                                "them out")
        from ..ranks.runtime import rank_and_world_size

        self._param_dict = document_of(config)
        parsed = read_config(settings_of(self._param_dict))
        parsed.complete_batch(rank_and_world_size()[1])
        self.train_batch_size = parsed.train_batch_size
        self.train_micro_batch_size_per_gpu = parsed.micro_batch_size
        self.gradient_accumulation_steps = parsed.accumulation_steps
        self.zero_optimization_stage = parsed.stage
        self.zero_enabled = parsed.stage > 0
        self.zero_config = get_zero_config(self._param_dict)
        self.optimizer_params, self.scheduler_params = (
            (self._param_dict.get(name) or {}).get("params") for name in ("optimizer", "scheduler")
        )
        self._values = _Values(parsed)

    def __getattr__(self, name):
        if name in VALUE_NAMES and "_values" in self.__dict__:
            return getattr(self._values, name)()
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")


class _Values(EngineSettings):
    """The methods of an engine about its configuration, without an engine."""

    def __init__(self, config):
        self._config = config
