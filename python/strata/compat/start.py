"""``deepspeed.initialize`` and the configuration, as frameworks give and read it."""

import base64
import binascii
import json
import math
import os

from .. import _C
from ..config_source import read_config
from ..initialize import initialize_as
from .engine import DeepSpeedEngine
from .enumerations import ZeroStageEnum


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
    """``strata.initialize``, with what frameworks count on beside: the engine is a ``DeepSpeedEngine``, whose
    ``config`` is the dict that was given.

    Args:
        args: a namespace whose ``deepspeed_config`` is used when no configuration is given.
        distributed_port: accepted for DeepSpeed's sake; the launcher says MASTER_PORT.
        The others are ``strata.initialize``'s. ``config_params`` is another name of ``config``.

    Returns:
        (engine, optimizer, dataloader, lr_scheduler); the last three are None where there is none.

    Raises:
        as ``strata.initialize``.
    """
    given = next((c for c in (config, config_params, getattr(args, "deepspeed_config", None)) if c is not None), None)
    if given is None:
        raise _C.ConfigError("deepspeed.initialize() needs a configuration: pass config=<dict, path or JSON text>")
    document = document_of(given)
    result = initialize_as(
        DeepSpeedEngine, model, settings_of(document), optimizer, model_parameters, training_data, lr_scheduler,
        dist_init_required, collate_fn, mpu, mesh_param,
    )  # fmt: skip
    result[0].document = document
    return result


def document_of(config):
    """The dict of a configuration: the same one, if it is one.

    Args:
        config: dict, path, JSON text, or base64 of that.

    Raises:
        ConfigError: it is none of these; where it is JSON, Strata's parser says what is wrong with it.
    """
    if isinstance(config, dict):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise _C.ConfigError(f"config must be a dict, a path or JSON text; found {type(config).__name__}")
    read_config(config)  # whose messages say more than Python's
    text = os.fspath(config)
    if os.path.isfile(text):
        with open(text, encoding="utf-8") as file:
            text = file.read()
    for source in (text, _decoded(text)):
        try:
            return json.loads(source)
        except (TypeError, ValueError):
            continue
    import hjson  # which read_config has read it with

    return hjson.loads(text)


def _decoded(text):
    try:
        return base64.urlsafe_b64decode(text)
    except (binascii.Error, ValueError):
        return None


def settings_of(document):
    """What Strata's parser gets of a dict that frameworks have filled in: without what has no effect in DeepSpeed
    either (keys with dots, an endless ``steps_per_print``), and whole numbers as such."""
    settings = {key: value for key, value in document.items() if "." not in str(key)}
    if settings.get("steps_per_print") == math.inf:
        del settings["steps_per_print"]
    return _whole(settings)


def _whole(value):
    if isinstance(value, dict):
        return {key: _whole(entry) for key, entry in value.items()}
    if isinstance(value, float) and value >= 1e3 and math.isfinite(value):
        return int(value)  # sizes of buckets, made by a product
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
        self.zero_config = DeepSpeedZeroConfig(**self._param_dict.get("zero_optimization", {}))


class DeepSpeedZeroConfig:
    """The section ``zero_optimization`` as attributes; what is not given is None.

    Attributes:
        stage: ``ZeroStageEnum``.
    """

    def __init__(self, **settings):
        self.__dict__.update(settings)
        self.stage = ZeroStageEnum(settings.get("stage", 0))

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None
