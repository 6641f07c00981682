"""``deepspeed.accelerator.get_accelerator()``: torch's functions for the device that models train on here. DeepSpeed's
functions about memory, the installed torch, and the operators that it could build."""

import contextlib
import copy
import functools
import os

import torch

from ..views import logger
from .names import REFUSALS, refused

_OF_CUDA = frozenset(  # the functions of torch.cuda themselves
    "Event Stream current_device current_stream default_stream device_count empty_cache get_rng_state initial_seed "
    "is_bf16_supported manual_seed manual_seed_all max_memory_allocated max_memory_reserved memory_allocated "
    "memory_reserved memory_stats reset_max_memory_allocated reset_max_memory_cached reset_peak_memory_stats "
    "set_device set_rng_state stream synchronize".split())
_SYNCHRONIZED = "handles_memory_backpressure is_synchronized_device resolves_data_dependency use_host_timers".split()
_GPU = ("is_fp16_supported", "is_triton_supported")
_BOTH = {"is_available": True, "get_compile_backend": "inductor"}
_RESULTS = {  # by device: the results of functions that say what the device is, or do nothing on a CPU
    "cuda": {
        **_BOTH, **dict.fromkeys(_SYNCHRONIZED, False), **dict.fromkeys(_GPU, True),
        "communication_backend_name": "nccl", "visible_devices_envs": ["CUDA_VISIBLE_DEVICES"]},
    "cpu": {
        **_BOTH, **dict.fromkeys(_SYNCHRONIZED, True), **dict.fromkeys(_GPU, False),
        "communication_backend_name": "gloo", "visible_devices_envs": [], "is_bf16_supported": True, "device_count": 1,
        **dict.fromkeys("current_device max_memory_allocated max_memory_reserved memory_allocated memory_reserved"
                        .split(), 0),
        **dict.fromkeys("empty_cache range_pop range_push reset_max_memory_allocated reset_max_memory_cached "
                        "reset_peak_memory_stats set_device synchronize".split())}}
_OF_TORCH = {"manual_seed_all": torch.manual_seed, "manual_seed": torch.manual_seed, "initial_seed": torch.initial_seed,
             "get_rng_state": torch.get_rng_state, "set_rng_state": torch.set_rng_state}  # fmt: skip


class Accelerator:
    """CUDA's where the process can use a GPU, else the CPU's. Methods that this class does not define are torch.cuda's
    of the same name, ``range_push`` and ``range_pop`` those of NVTX, or return a constant about the device
    (``is_fp16_supported``, ``communication_backend_name``). On a CPU those that count memory return 0, and those that
    wait return at once."""

    def __init__(self):
        self._name = "cuda" if torch.cuda.is_available() else "cpu"

    def __getattr__(self, name):
        if self._name == "cuda" and name in _OF_CUDA:
            return getattr(torch.cuda, name)
        if self._name == "cuda" and name in ("range_push", "range_pop"):
            return getattr(torch.cuda.nvtx, name)
        if self._name == "cpu" and name in _OF_TORCH:
            return _OF_TORCH[name]
        if name in _RESULTS[self._name]:
            return lambda *args, **kwargs: copy.copy(_RESULTS[self._name][name])
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"get_accelerator().{name}: Strata does not offer it on {self._name}; call torch")

    def device_name(self, device_index=None):
        """str: "cuda", "cuda:1" or "cpu"."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index=None):
        """A context of a device; on a CPU one that does nothing."""
        return torch.cuda.device(device_index) if self._name == "cuda" else contextlib.nullcontext()

    def current_device_name(self):
        """str: "cuda:0" or "cpu"."""
        return self.device_name(self.current_device())

    def total_memory(self, device_index=None):
        """int: bytes of the device; on a CPU those of the host."""
        if self._name == "cuda":
            return torch.cuda.get_device_properties(device_index or self.current_device()).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index=None):
        """int: free bytes of the device; on a CPU those of the host."""
        if self._name == "cuda":
            return torch.cuda.mem_get_info(device_index)[0]
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def supported_dtypes(self):
        """[torch.dtype] that models train in."""
        half = [torch.float16] if self.is_fp16_supported() else []
        return [torch.float32, *half, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def random(self):
        """The module ``torch.random``."""
        return torch.random

    def pin_memory(self, tensor, align_bytes=1):
        """The tensor in pinned memory; without a GPU the same tensor."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def is_pinned(self, tensor):
        """bool: whether the tensor is in pinned memory."""
        return tensor.is_pinned()

    def on_accelerator(self, tensor):
        """bool: whether the tensor is on the device."""
        return tensor.device.type == self._name

    def lazy_call(self, callback):
        """Calls ``callback`` at once."""
        return callback()


@functools.lru_cache(maxsize=1)
def get_accelerator():
    """The ``Accelerator`` of this process."""
    return Accelerator()


def see_memory_usage(message, force=False):
    """Logs ``message`` with the device's memory in use and at its peak, in GiB. Does nothing without ``force``.
    ``engine.memory_report()`` has the engine's share."""
    if not force:
        return
    from ..monitoring.watching import memory_text  # not in every script

    logger.warning("%s: %s", message, memory_text(torch.device(get_accelerator().device_name())))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def memory_status(msg, print_rank=-1, reset_max=False):
    """``see_memory_usage(msg, force=True)``."""
    see_memory_usage(msg, force=True)


def _cut(version):
    return ".".join(version.split(".")[:2]) if version else "0.0"


TORCH_INFO = {
    "version": _cut(torch.__version__), "bf16_support": True, "cuda_version": _cut(torch.version.cuda),
    "nccl_version": _cut(".".join(map(str, torch.cuda.nccl.version()))) if torch.cuda.is_available() else "0.0",
    "hip_version": _cut(torch.version.hip)}


def required_torch_version(min_version=None, max_version=None):
    """bool: whether torch is at least the one and at most the other. ValueError where neither is given."""
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version: give min_version, max_version, or both")
    high_enough = min_version is None or torch.__version__ >= str(min_version)  # torch compares by numbers
    return high_enough and (max_version is None or torch.__version__ <= str(max_version))


def is_functorch_transforming():
    """bool: whether a transform of torch.func runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class OnDevice(contextlib.ExitStack):
    """Context in which torch makes tensors on a device ("meta": without memory), floating ones in a torch.dtype.
    ``enabled=False`` makes it do nothing."""

    def __init__(self, dtype, device="meta", enabled=True):
        super().__init__()
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled

    def __enter__(self):
        if self._enabled:
            self.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            self.enter_context(self._device)
        return self


# By builder: DeepSpeed's name of the operator, the operator's work, and whether Strata does this work.
_OPERATORS = {"AsyncIOBuilder": ("async_io", "Reads and writes of drives.", True),
              "CPUAdamBuilder": ("cpu_adam", "Adam on the host.", True),
              "CPUAdagradBuilder": ("cpu_adagrad", "Adagrad on the host.", True),
              "CPULionBuilder": ("cpu_lion", "Lion on the host.", True),
              "FusedAdamBuilder": ("fused_adam", "Adam on a GPU.", True),
              "FusedLionBuilder": ("fused_lion", "Lion on a GPU.", True),
              "FusedLambBuilder": ("fused_lamb", "LAMB on a GPU, which Strata does not offer.", False),
              "UtilsBuilder": ("utils", "Flattening of tensors.", True)}
COMPATIBLE = {operator: offered for operator, _, offered in _OPERATORS.values()}


class _Builder:
    """One operator, of which scripts ask whether it is available. It builds nothing: Strata has the same work built in.
    ``NAME``: str, DeepSpeed's name of it."""

    NAME = ""

    def is_compatible(self, verbose=False):
        """bool: whether Strata does the same work by itself."""
        return COMPATIBLE[self.NAME]

    def load(self, verbose=True):
        """Raises NotImplementedError: there is no such module to call."""
        return refused(f"deepspeed.ops.op_builder.{type(self).__name__}.load", REFUSALS["operators"])()


for _name, (_operator, _doc, _) in _OPERATORS.items():
    globals()[_name] = type(_name, (_Builder,), {"NAME": _operator, "__doc__": _doc, "__module__": __name__})
