"""Hugging Face's Trainer over Strata's engine, without DeepSpeed's name anywhere.

    from strata.integrations.transformers import StrataTrainer
    trainer = StrataTrainer(model=model, args=TrainingArguments(...), train_dataset=..., strata_config={...})
    trainer.train()

For trainers of other libraries the mixin goes first: ``class Sharded(StrataTrainerMixin, SFTTrainer): pass``."""

import copy
import os

import torch
from transformers import Trainer

from .. import _C
from ..checkpoint.adapters import is_peft_model
from ..config_source import document_of
from ..sequence.groups import initialize_sequence_parallel
from ..sequence.loader import SequenceLoader
from ..start import initialize

_SCHEDULER = "scheduler.pt"  # Trainer's name for the file
_ARGUMENTS = "training_args.bin"


class StrataTrainerMixin:
    """A Trainer whose model trains sharded. Trainer makes optimizer and scheduler; the engine computes the update on
    shards. A method that Trainer calls on every rank is collective. ``engine`` is the ``strata.Engine``; None before
    ``train()``, ``evaluate()`` or ``predict()`` is called. ConfigError where ``strata_config`` is wrong, or differs
    from ``TrainingArguments``. UsageError where the engine does not support an argument; the message names it.

    Args:
        strata_config: dict, path or JSON text (docs/CONFIG.md) without the settings of ``TrainingArguments``: batch
            sizes, clipping, precision, optimizer and scheduler. None: stage 3.
        The others are Trainer's.
    """

    engine = None

    def __init__(self, *args, strata_config=None, **kwargs):
        self._strata_config = strata_config
        super().__init__(*args, **kwargs)

    def _build_accelerator_args(self, **kwargs):
        """Trainer's, without autocast: the engine controls the precision."""
        return super()._build_accelerator_args(**{**kwargs, "mixed_precision": "no"})

    def create_accelerator_and_postprocess(self):
        """Trainer's, with backward and clipping through the engine, and without a wrapper around the engine's model."""
        super().create_accelerator_and_postprocess()
        self._settings = engine_settings(self._strata_config, self.args)
        accelerator = self.accelerator
        accelerator.clip_grad_norm_ = lambda *args, **kwargs: self._clip_grad_norm(self.model)
        accelerator.backward, prepare = self._backward, accelerator.prepare_model
        accelerator.prepare_model = lambda model, *args, **kwargs: (
            model if self.engine is not None and model is self.engine.module else prepare(model, *args, **kwargs))

    def get_train_dataloader(self):
        """Trainer's; where ranks share rows (``strata.sequence_parallel``), of this rank's pieces of what its group
        draws."""
        loader, size = super().get_train_dataloader(), _ranks_of_a_row(self._settings)
        return loader if size == 1 else SequenceLoader(loader, initialize_sequence_parallel(size))

    def get_total_train_batch_size(self, args):
        """Trainer's: rows of a step on all ranks."""
        return super().get_total_train_batch_size(args) // _ranks_of_a_row(self._settings)

    def _move_model_to_device(self, model, device):
        """Does nothing: the engine moves parameters to the device shard by shard, when it takes them over."""

    def _wrap_model(self, model, training=True, dataloader=None):
        """Puts the model under the engine, and returns the same module."""
        if self.engine is not None and training and self.engine.optimizer is None:
            # The model was evaluated before it trains. Its shards stay with it; the next engine takes them over.
            if self.engine.zero_optimization_stage() < 3 or self.engine.world_size == 1:
                self.engine.destroy()
            self.engine = None
        if self.engine is None:
            self._begin_engine(training)
        return self.model

    def _begin_engine(self, training):
        given = self.optimizer if training else None
        self.engine, optimizer, _, _ = initialize(model=self.model, optimizer=given, config=self._settings)
        compiling = self.accelerator.state.dynamo_plugin.to_kwargs()  # of torch_compile, or of accelerate's settings
        if "backend" in compiling:
            self.engine.compile(compiling.pop("backend"), compiling)
        if optimizer is not None:
            optimizer._is_accelerate_prepared = True
            optimizer.step_was_skipped = False
            self.optimizer = optimizer
        if self.engine.zero_optimization_stage() == 3 and self.engine.world_size > 1:
            for module in self.model.modules():  # with this mark every rank generates until the last one is done
                if hasattr(module, "generate"):
                    module._is_fsdp_managed_module = True

    def _backward(self, loss, **kwargs):
        """Trainer calls this for ``accelerator.backward``. At an accumulation boundary it makes the step, too."""
        boundary = self.accelerator.sync_gradients
        self.engine.set_gradient_accumulation_boundary(boundary)
        self.engine.backward(loss, scale_wrt_gas=False)
        if boundary:
            self.engine.step()
            self.optimizer.step_was_skipped = self.optimizer.overflow

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Trainer's, also where ranks share rows: then the labels of all ranks weigh the micro-steps."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        size = _ranks_of_a_row(self._settings)
        if size == 1 or not batches or not self.model_accepts_loss_kwargs:
            return batches, items
        items = sum((batch["shift_labels"] != -100).sum() for batch in batches).to(device)
        if not self.args.average_tokens_across_devices:
            torch.distributed.all_reduce(items, group=initialize_sequence_parallel(size).group)
            return batches, items
        torch.distributed.all_reduce(items)
        return batches, items * size  # Trainer multiplies by all ranks; a step is the mean over the groups

    def _clip_grad_norm(self, model):
        """The norm before clipping; the engine has clipped in its update."""
        return self.engine.get_global_grad_norm()

    def _get_grad_norm(self, model, grad_norm=None):
        return self.engine.get_global_grad_norm() if grad_norm is None else grad_norm

    def save_model(self, output_dir=None, _internal_call=False):
        """Writes files for ``from_pretrained`` of transformers, or of PEFT, unit by unit. Collective."""
        if self.engine is None:
            super().save_model(output_dir, _internal_call)
            return
        folder = self.args.output_dir if output_dir is None else output_dir
        self.engine.save_pretrained(folder)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, _ARGUMENTS))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir):
        self.engine.save_checkpoint(output_dir, exclude_frozen_parameters=is_peft_model(self.model))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """Loads a folder of weights, before there is an engine; leaves a training checkpoint to
        ``_load_optimizer_and_scheduler``."""
        if has_training_checkpoint(resume_from_checkpoint):
            return
        if self.engine is not None:
            raise _C.UsageError(f"'{resume_from_checkpoint}' has weights and no training checkpoint, and the engine "
                                "has begun; make a new trainer of a model that has these weights")
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint):
        if not has_training_checkpoint(checkpoint):
            return
        self.engine.load_checkpoint(checkpoint, load_module_strict=not is_peft_model(self.model))
        scheduler = os.path.join(checkpoint, _SCHEDULER)
        if os.path.exists(scheduler):
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_best_model(self):
        self.engine.load_checkpoint(self.state.best_model_checkpoint, load_module_strict=not is_peft_model(self.model),
                                    load_module_only=True)


class StrataTrainer(StrataTrainerMixin, Trainer):
    """transformers' ``Trainer`` over Strata's engine; ``StrataTrainerMixin`` says what differs."""


# --- the engine's configuration, completed from ``TrainingArguments`` ---

DEFAULT = {"zero_optimization": {"stage": 3}}
_TRAINERS = {  # sections that the configuration must not have: the arguments of Trainer that replace each
    "optimizer": "optim, learning_rate, weight_decay, adam_beta1, adam_beta2 and adam_epsilon",
    "scheduler": "lr_scheduler_type, warmup_steps and lr_scheduler_kwargs"}


def engine_settings(config, args):
    """The dict for ``strata.initialize``. ConfigError where the two have different values of a setting, or ``config``
    has a section ``optimizer`` or ``scheduler``. UsageError where ``args`` have a setting that the engine does not
    support. ``config``: dict, path or JSON text, whose batch sizes, ``gradient_clipping``, ``bf16`` and ``fp16`` are
    left out, "auto", or equal to those of ``args``, a ``TrainingArguments``; None: stage 3."""
    settings = copy.deepcopy(DEFAULT if config is None else document_of(config))
    _require_possible(args, settings)
    for section, instead in _TRAINERS.items():
        if section in settings:
            raise _C.ConfigError(f"the configuration has a section '{section}', which is Trainer's to make; leave it "
                                 f"out and set {instead} in TrainingArguments")
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    differences = []
    for path, argument, value in (
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size", micro),
        ("gradient_accumulation_steps", "gradient_accumulation_steps", steps),
        ("train_batch_size", "per_device_train_batch_size * gradient_accumulation_steps * ranks",
         micro * steps * args.world_size // _ranks_of_a_row(settings)),
        ("gradient_clipping", "max_grad_norm", args.max_grad_norm or 0.0),
        ("bf16.enabled", "bf16", bool(args.bf16)),
        ("fp16.enabled", "fp16", bool(args.fp16)),
    ):  # fmt: skip
        section, _, key = path.rpartition(".")
        place = settings.setdefault(section, {}) if section else settings
        found = place.get(key, "auto")
        if found == "auto":
            place[key] = value
        elif found != value:
            differences.append(f"{path}={found} against {argument}={value}")
    if differences:
        raise _C.ConfigError("the configuration and TrainingArguments differ: " + "; ".join(differences) + ". Leave "
                             "these out of the configuration, or write \"auto\"")
    return settings


def _ranks_of_a_row(settings):
    own = settings.get("strata") or {}
    return (own.get("sequence_parallel") or {}).get("size") or settings.get("sequence_parallel_size") or 1


def _require_possible(args, settings):
    for refused, why in (
        (getattr(args, "parallelism_config", None), "parallelism_config of TrainingArguments is for another engine; "
         "write strata.sequence_parallel.size in strata_config, where ranks shall share rows"),
        (args.label_smoothing_factor and _ranks_of_a_row(settings) > 1, "label_smoothing_factor needs whole rows, and "
         "ranks share them under strata.sequence_parallel; leave one of the two out"),
        (args.deepspeed or args.fsdp, "deepspeed and fsdp of TrainingArguments choose another engine; leave them out, "
         "and pass strata_config=..."),
        (args.auto_find_batch_size, "auto_find_batch_size would change batch sizes under the engine; set "
         "per_device_train_batch_size (`strata plan` says what fits)"),
        (args.bf16_full_eval or args.fp16_full_eval, "bf16_full_eval and fp16_full_eval would cast the engine's "
         "weights; train with bf16 or fp16, and evaluation computes so, too"),
        (args.save_only_model and args.load_best_model_at_end, "load_best_model_at_end reads a training checkpoint; "
         "unset save_only_model"),
    ):  # fmt: skip
        if refused:
            raise _C.UsageError(f"StrataTrainer: {why}")


def has_training_checkpoint(folder):
    """bool: whether ``engine.save_checkpoint`` has written to the folder."""
    return folder is not None and os.path.isfile(os.path.join(folder, "latest"))
