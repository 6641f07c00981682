"""Completes the configuration of an engine that Trainer drives from its ``TrainingArguments``."""

import copy
import os

from .. import _C
from ..config_source import document_of

DEFAULT = {"zero_optimization": {"stage": 3}}
_TRAINERS = {  # sections that the configuration must not have: the arguments of Trainer that replace each
    "optimizer": "optim, learning_rate, weight_decay, adam_beta1, adam_beta2 and adam_epsilon",
    "scheduler": "lr_scheduler_type, warmup_steps and lr_scheduler_kwargs",
}


def engine_settings(config, args):
    """The dict for ``strata.initialize``.

    Args:
        config: dict, path or JSON text, whose batch sizes, ``gradient_clipping``, ``bf16`` and ``fp16`` are left out,
            "auto", or equal to those of ``args``; None: stage 3.
        args: a ``TrainingArguments``.

    Raises:
        ConfigError: ``config`` and ``args`` have different values of a setting; ``config`` has a section ``optimizer``
            or ``scheduler``.
        UsageError: ``args`` have a setting that the engine does not support.
    """
    _require_possible(args)
    settings = copy.deepcopy(DEFAULT if config is None else document_of(config))
    for section, instead in _TRAINERS.items():
        if section in settings:
            raise _C.ConfigError(f"the configuration has a section '{section}', which is Trainer's to make; leave it "
                                 f"out and set {instead} in TrainingArguments")
    differences = []
    for path, argument, value in _said_by(args):
        _fill(settings, path, argument, value, differences)
    if differences:
        raise _C.ConfigError("the configuration and TrainingArguments differ: " + "; ".join(differences) + ". Leave "
                             "these out of the configuration, or write \"auto\"")
    return settings


def _require_possible(args):
    if args.deepspeed or args.fsdp:
        raise _C.UsageError("StrataTrainer: deepspeed and fsdp of TrainingArguments choose another engine; leave them "
                            "out, and pass strata_config=...")
    if args.auto_find_batch_size:
        raise _C.UsageError("StrataTrainer: auto_find_batch_size would change batch sizes under the engine; set "
                            "per_device_train_batch_size (`strata plan` says what fits)")
    if args.bf16_full_eval or args.fp16_full_eval:
        raise _C.UsageError("StrataTrainer: bf16_full_eval and fp16_full_eval would cast the engine's weights; train "
                            "with bf16 or fp16, and evaluation computes so, too")
    if args.save_only_model and args.load_best_model_at_end:
        raise _C.UsageError("StrataTrainer: load_best_model_at_end reads a training checkpoint; unset save_only_model")


def _said_by(args):
    """[(path in the configuration, name in TrainingArguments, value)]."""
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    whole = micro * steps * args.world_size
    return [
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size", micro),
        ("gradient_accumulation_steps", "gradient_accumulation_steps", steps),
        ("train_batch_size", "per_device_train_batch_size * gradient_accumulation_steps * ranks", whole),
        ("gradient_clipping", "max_grad_norm", args.max_grad_norm or 0.0),
        ("bf16.enabled", "bf16", bool(args.bf16)),
        ("fp16.enabled", "fp16", bool(args.fp16)),
    ]


def _fill(settings, path, argument, value, differences):
    section, _, key = path.rpartition(".")
    place = settings.setdefault(section, {}) if section else settings
    found = place.get(key, "auto")
    if found == "auto":
        place[key] = value
    elif found != value:
        differences.append(f"{path}={found} against {argument}={value}")


def has_training_checkpoint(folder):
    """bool: whether ``engine.save_checkpoint`` has written to the folder."""
    return folder is not None and os.path.isfile(os.path.join(folder, "latest"))
