"""Names that training scripts and frameworks read on DeepSpeed's engine, beside those that train."""

import functools
import gc
import os

import torch

from . import _C
from .engine_settings import EngineSettings
from .engine_weights import EngineWeights
from .ops.elementwise import set_value
from .state_offload import StateOffload

_ELEMENT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _place(tier):
    return None if tier == "device" else {"device": {"host": "cpu"}.get(tier, tier)}


class EngineNames(EngineWeights, StateOffload, EngineSettings):
    """The part of ``Engine`` that answers questions about its configuration. It needs ``_config``, ``core``,
    ``optimizer``, ``module``, ``world_size``, ``global_rank`` and ``lr_scheduler``."""

    _batch = None  # (all ranks' samples of a step, samples of one forward), where a script has changed them
    _samples_before = (0, 0)  # (samples, micro-batches of a rank) until then

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
            UsageError: it is no multiple of the samples of all ranks in one forward.
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
        """Sets the samples of one rank in one forward; the number of micro-steps of a step does not change. The data
        loader that ``initialize`` returned keeps its batch size."""
        if micro_batch_size < 1:
            raise _C.UsageError(f"a micro-batch has at least one sample; found {micro_batch_size}")
        steps = self.gradient_accumulation_steps()
        self._change_batch(micro_batch_size * steps * self.world_size, micro_batch_size, steps)

    def _change_batch(self, train, micro, steps):
        self._samples_before = (self.global_samples, _C.micro_batches(self.core))
        self.core.set_accumulation_steps(steps)
        self._batch = (train, micro)

    @property
    def global_samples(self):
        """int: samples of all ranks so far. Each micro-step counts; where the script decides on steps
        (``managed_gradient_accumulation: false``), each backward pass before a ``step()`` counts."""
        samples, micro_batches = self._samples_before
        since = _C.micro_batches(self.core) - micro_batches
        return samples + since * self.train_micro_batch_size_per_gpu() * self.world_size

    # --- the optimizer and its schedule ---

    def get_lr(self):
        """[float]: the learning rate of each param group, 0.0 for a group without one; [] without an optimizer."""
        return [float(rate or 0.0) for rate in self._of_groups("lr")]

    def set_lr(self, lr):
        """Sets the learning rate of every param group, for the steps from now on; a scheduler overwrites it.

        Raises:
            UsageError: there is no optimizer.
        """
        if self.optimizer is None:
            raise _C.UsageError("set_lr: this engine has no optimizer; name one in the configuration, or pass one as "
                                "optimizer= to initialize")
        for group in self._groups:
            set_value(group, "lr", lr)

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

    def optimizer_params(self):
        """{name: value}: ``optimizer.params`` of the configuration with its defaults; None without an optimizer."""
        return self._params_of("optimizer")

    def scheduler_params(self):
        """{name: value}: ``scheduler.params`` of the configuration with its defaults; None without a scheduler."""
        return self._params_of("scheduler")

    def _params_of(self, section):
        if self._value_at(f"{section}.type") is None:
            return None
        return {**(self._value_at(f"{section}.params") or {}), **self._section(f"{section}.params")}

    # --- precision ---

    def torch_autocast_dtype(self):
        """torch.dtype of ``torch_autocast.dtype``; None where forward is not within autocast."""
        return self._config.autocast_dtype

    def loss_scale(self):
        """float: the present factor of the loss; 1.0 except under fp16."""
        return self.core.loss_scale

    @property
    def communication_data_type(self):
        """torch.dtype in which gradients travel between ranks."""
        return _ELEMENT_TYPES[self._value_at("communication_data_type") or "fp32"]

    def get_data_types(self):
        """(torch.dtype that parameters compute in, torch.dtype in which gradients accumulate). The first is float32
        where each parameter keeps its own dtype."""
        model = self._config.dtype
        return getattr(torch, model or "float32"), self._config.grad_accum_dtype

    def steps_per_print(self):
        """int or None: steps between two lines of progress."""
        return self._config.steps_per_print

    @functools.cached_property
    def monitor(self):
        """The ``Monitor`` of ``strata.monitoring.monitor``; one that is off where the configuration names none."""
        from .monitoring.monitor import Monitor  # not in every script

        return Monitor()

    def get_wall_clock_timers(self):
        """{name: mean milliseconds} of ``timers``."""
        return self.timers.get_mean(list(self.timers.get_timers()), reset=False)

    def collect_python_gc(self):
        """int: unreachable objects that Python's garbage collector found now."""
        return gc.collect()

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

    def zero_offload_optimizer(self):
        """{"device": "cpu" or "nvme"}: the place of the optimizer's states; None: the device."""
        return _place(self._config.optimizer_tier)

    def zero_cpu_offload(self):
        """bool: whether the optimizer's states are in host memory, or are staged there."""
        return self._config.optimizer_tier != "device"

    zero_use_cpu_optimizer = zero_cpu_offload

    def zero_nvme_offload_optimizer(self):
        """bool: whether the optimizer's states are on a drive."""
        return self._config.optimizer_tier == "nvme"

    def zero_offload_param(self):
        """{"device": "cpu" or "nvme"}: the place of the parameters' shards; None: the device."""
        return _place(self._config.param_tier)

    # --- ranks ---

    @property
    def dp_world_size(self):
        """int: the number of ranks; all of them train on different data."""
        return self.world_size

    @property
    def local_rank(self):
        """int: this process's number on its host, from the launcher (LOCAL_RANK); without it the index of its device,
        or its rank."""
        if "LOCAL_RANK" in os.environ:
            return int(os.environ["LOCAL_RANK"])
        return self.global_rank if self.device.index is None else self.device.index

    def get_data_parallel_rank(self):
        """int: this process's rank."""
        return self.global_rank

    # --- calls that the engine does not need ---

    def allreduce_gradients(self, bucket_size=None):
        """Does nothing: the engine reduces gradients during backward, or, after ``no_sync()``, in a later step."""

    def empty_partition_cache(self):
        """Frees the memory of gathered parameters that are not in use. Collective where gathers are. The configuration
        bounds gathered parameters at all times (``stage3_max_live_parameters``, ``strata.max_live_bytes``)."""
        self.core.free_gathered()
