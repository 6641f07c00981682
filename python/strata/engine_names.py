"""Names that training scripts and frameworks read on DeepSpeed's engine, beside those that train."""

import json
import os

import torch

from . import _C
from .engine_weights import EngineWeights
from .state_parking import StateParking

_ELEMENT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _setting(path, meaning):
    """A method that returns the configuration's value at ``path``."""

    def value(self):
        return self._value_at(path)

    value.__doc__ = f"``{path}`` of the configuration: {meaning}."
    return value


def _hint(path, default, meaning):
    """A method that returns what the configuration says at ``path``, which has no effect here."""

    def value(self):
        text = self._config.hint_values.get(path)
        return default if text is None else json.loads(text)

    value.__doc__ = f"``{path}`` of the configuration, which has no effect here: {meaning}."
    return value


def _place(tier):
    return None if tier == "device" else {"device": {"host": "cpu"}.get(tier, tier)}


def _off(meaning):
    """A method that returns False, of what this engine does not do."""

    def value(self):
        return False

    value.__doc__ = f"False: {meaning}."
    return value


class EngineNames(EngineWeights, StateParking):
    """What ``Engine`` tells of its configuration; it has ``_config``, ``core``, ``optimizer``,
    ``module``, ``world_size``, ``global_rank`` and ``lr_scheduler``."""

    _batch = None  # (all ranks' samples of a step, samples of one forward), where a script has changed them
    _samples_before = (0, 0)  # (samples, micro-steps) until then

    def _value_at(self, path):
        """The canonical value of an honoured setting; None where none is given and none is the default."""
        settings = self.__dict__.get("_settings")
        if settings is None:
            lines = self._config.digest().splitlines()
            settings = self.__dict__["_settings"] = dict(line.split(" = ", 1) for line in lines)
        text = settings.get(path)
        return None if text is None else json.loads(text)

    # --- batches ---

    def train_batch_size(self):
        """int: samples of all ranks in one optimizer step."""
        return self._batch[0] if self._batch else self._config.train_batch_size

    def train_micro_batch_size_per_gpu(self):
        """int: samples of one rank in one forward."""
        return self._batch[1] if self._batch else self._config.micro_batch_size

    def gradient_accumulation_steps(self):
        """int: micro-steps of one optimizer step."""
        return self.core.accumulation_steps

    def get_batch_info(self):
        """(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size):
        """Changes the samples of a step, by more or fewer micro-steps of the same size. Between steps, on every rank.

        Raises:
            UsageError: it is no multiple of what all ranks take in one forward.
        """
        micro = self.train_micro_batch_size_per_gpu()
        in_one_forward = micro * self.world_size
        if train_batch_size < 1 or train_batch_size % in_one_forward != 0:
            raise _C.UsageError(
                f"a batch is made of micro-batches of {micro} samples on {self.world_size} ranks; give a multiple of "
                f"{in_one_forward}; found {train_batch_size}"
            )
        self._change_batch(train_batch_size, micro, train_batch_size // in_one_forward)

    def set_train_micro_batch_size(self, micro_batch_size):
        """Says how many samples a rank's forward has from now on; the micro-steps of a step stay as many. The data
        loader that ``initialize`` returned keeps its size."""
        if micro_batch_size < 1:
            raise _C.UsageError(f"a micro-batch has at least one sample; found {micro_batch_size}")
        steps = self.gradient_accumulation_steps()
        self._change_batch(micro_batch_size * steps * self.world_size, micro_batch_size, steps)

    def _change_batch(self, train, micro, steps):
        self._samples_before = (self.global_samples, self.core.micro_steps)
        self.core.set_accumulation_steps(steps)
        self._batch = (train, micro)

    @property
    def global_samples(self):
        """int: samples of all ranks so far."""
        samples, micro_steps = self._samples_before
        since = self.core.micro_steps - micro_steps
        return samples + since * self.train_micro_batch_size_per_gpu() * self.world_size

    managed_gradient_accumulation = _setting(
        "managed_gradient_accumulation", "bool, whether micro-steps are counted")

    # --- the optimizer and its schedule ---

    def get_lr(self):
        """[float]: the learning rate of each param group; [] without an optimizer, as of the two below."""
        return self._of_groups("lr")

    def set_lr(self, lr):
        """Sets the learning rate of every param group, for the steps from now on; a scheduler overwrites it.

        Raises:
            UsageError: there is no optimizer.
        """
        if self.optimizer is None:
            raise _C.UsageError("set_lr: this engine has no optimizer; name one in the configuration, or pass one as "
                                "optimizer= to initialize")
        for group in self._groups:
            group["lr"] = lr

    def get_mom(self):
        """The momentum of each param group: betas, or "momentum" of optimizers that have that."""
        has_momentum = any("momentum" in group for group in self._groups)
        return self._of_groups("momentum" if has_momentum else "betas")

    def get_type(self):
        """[str or None]: "type" of each param group, where a script has put one there."""
        return self._of_groups("type")

    def _of_groups(self, name):
        return [group.get(name, 0.0 if name == "betas" else None) for group in self._groups]

    @property
    def _groups(self):
        return [] if self.optimizer is None else self.optimizer.param_groups

    optimizer_name = _setting("optimizer.type", "the class that it names, or None")
    scheduler_name = _setting("scheduler.type", "the class that it names, or None")

    def optimizer_params(self):
        """{name: value}: ``optimizer.params`` of the configuration with its defaults; None without an optimizer."""
        return self._params_of("optimizer")

    def scheduler_params(self):
        """{name: value}: ``scheduler.params`` of the configuration with its defaults; None without a scheduler."""
        return self._params_of("scheduler")

    def _params_of(self, section):
        if self._value_at(f"{section}.type") is None:
            return None
        start = f"{section}.params."
        given = {path[len(start):]: self._value_at(path) for path in self._settings if path.startswith(start)}
        return {**(self._value_at(f"{section}.params") or {}), **given}

    # --- precision ---

    fp16_enabled = _setting("fp16.enabled", "bool")
    bfloat16_enabled = _setting("bf16.enabled", "bool")
    fp16_auto_cast = _setting("fp16.auto_cast", "bool, whether inputs are cast")
    bf16_master_weights_and_gradients = _setting("bf16.bf16_master_weights_and_grads", "bool")
    bf16_optimizer_states = _setting("bf16.bf16_optimizer_states", "bool")
    torch_autocast_enabled = _setting("torch_autocast.enabled", "bool")

    def torch_autocast_dtype(self):
        """torch.dtype of ``torch_autocast.dtype``; None where forward is not within autocast."""
        return self._config.autocast_dtype

    gradient_clipping = _setting("gradient_clipping", "float, the largest norm; 0.0: none")
    gradient_allreduce_op = _setting("gradient_allreduce_op", '"mean" or "sum"')

    def loss_scale(self):
        """float: the factor of the loss; 1.0 but under fp16. 0.0 of the configuration, dynamic, is what it is now."""
        return self.core.loss_scale

    def dynamic_loss_scale(self):
        """bool: whether the loss scale adapts."""
        return self.fp16_enabled() and self._value_at("fp16.loss_scale") == 0.0

    @property
    def communication_data_type(self):
        """torch.dtype in which gradients travel between ranks."""
        return _ELEMENT_TYPES[self._value_at("communication_data_type") or "fp32"]

    torch_autocast_lower_precision_safe_modules = _hint(
        "torch_autocast.lower_precision_safe_modules", None, "[str] or None, classes of modules")
    amp_enabled = _off("mixed precision is that of bf16, fp16 and torch_autocast")

    def get_data_types(self):
        """(torch.dtype that parameters compute in, torch.dtype in which gradients accumulate); float32 is the first
        where each parameter keeps its own."""
        model = self._config.dtype
        return getattr(torch, model or "float32"), self._config.grad_accum_dtype

    def steps_per_print(self):
        """int or None: steps between two lines of progress."""
        return self._config.steps_per_print

    # --- sharding ---

    def zero_optimization(self):
        """bool: whether anything is sharded (stage 1 to 3)."""
        return self._config.stage > 0

    def zero_optimization_partition_gradients(self):
        """bool: whether gradients are sharded by the configuration's stage (2, 3)."""
        return self._config.stage >= 2

    def zero_optimization_partition_weights(self):
        """bool: whether parameters are sharded (stage 3)."""
        return self._config.stage >= 3

    zero_reduce_bucket_size = _setting("zero_optimization.reduce_bucket_size", "int, elements")
    zero_prefetch_bucket_size = _setting("zero_optimization.stage3_prefetch_bucket_size", "int, elements")
    zero_param_persistence_threshold = _setting(
        "zero_optimization.stage3_param_persistence_threshold", "int, elements")
    zero_model_persistence_threshold = _setting(
        "zero_optimization.stage3_model_persistence_threshold", "int, elements")
    zero_sub_group_size = _hint("zero_optimization.sub_group_size", 1_000_000_000, "int, elements")
    zero_max_live_parameters = _setting("zero_optimization.stage3_max_live_parameters", "int, elements, or None")
    zero_max_reuse_distance = _setting("zero_optimization.stage3_max_reuse_distance", "int, elements, or None")
    zero_hpz_partition_size = _setting("zero_optimization.zero_hpz_partition_size", "int, ranks")
    zero_ignore_unused_parameters = _setting("zero_optimization.ignore_unused_parameters", "bool")
    zero_allgather_sequential = _setting("zero_optimization.stage3_allgather_sequential", "bool")
    zero_overlap_comm = _setting("zero_optimization.overlap_comm", "bool, or None")
    dataloader_drop_last = _setting("dataloader_drop_last", "bool")

    def zero_offload_optimizer(self):
        """{"device": "cpu" or "nvme"}: where optimizer state is; None: on the device."""
        return _place(self._config.optimizer_tier)

    def zero_cpu_offload(self):
        """bool: optimizer state is in host memory, or staged there."""
        return self._config.optimizer_tier != "device"

    zero_use_cpu_optimizer = zero_cpu_offload

    def zero_offload_param(self):
        """{"device": "cpu" or "nvme"}: where shards of parameters rest; None: on the device."""
        return _place(self._config.param_tier)

    zero_partial_offload = _off("what is offloaded is so as a whole")
    zero_quantized_weights = zero_quantized_gradients = _off("nothing travels quantised")
    wall_clock_breakdown = memory_breakdown = flops_profiler_enabled = _off(
        "nothing is printed of each step; ``step_report()`` tells")
    sparse_gradients_enabled = _off("gradients are dense")
    is_deepcompile_enabled = is_deepcompile_active = _off("there is no such compiler")
    autotuning_enabled = curriculum_learning_enabled = _off("the feature is not offered")

    # --- ranks ---

    @property
    def dp_world_size(self):
        """int: ranks that train on different data, which all do."""
        return self.world_size

    @property
    def local_rank(self):
        """int: this process's number on its host, as the launcher says (LOCAL_RANK); without one the index of its
        device, or its rank."""
        if "LOCAL_RANK" in os.environ:
            return int(os.environ["LOCAL_RANK"])
        return self.global_rank if self.device.index is None else self.device.index

    def get_data_parallel_rank(self):
        """int: this process's rank."""
        return self.global_rank

    # --- what there is not ---

    def empty_partition_cache(self):
        """Does nothing: what stays gathered is bounded by the configuration at all times
        (``stage3_max_live_parameters``, ``strata.max_live_bytes``)."""
