"""``deepspeed.accelerator.get_accelerator()``: torch's functions for the device that models train on here."""

import functools

import torch

_OF_CUDA = frozenset(  # the functions of torch.cuda themselves
    "Event Stream current_stream default_stream empty_cache get_rng_state initial_seed manual_seed "
    "max_memory_allocated max_memory_reserved memory_allocated memory_reserved memory_stats "
    "reset_max_memory_allocated reset_max_memory_cached reset_peak_memory_stats set_device set_rng_state stream "
    "synchronize".split()
)
_NOTHING = frozenset(  # these do nothing on a CPU
    "empty_cache reset_max_memory_allocated reset_max_memory_cached reset_peak_memory_stats set_device "
    "synchronize".split()
)
_BYTES = frozenset("max_memory_allocated max_memory_reserved memory_allocated memory_reserved".split())
_OF_TORCH = frozenset("get_rng_state initial_seed manual_seed set_rng_state".split())


class Accelerator:
    """CUDA's where the process can use a GPU, else the CPU's. Methods that this class does not define are torch.cuda's
    of the same name. On a CPU those that count memory return 0, and those that wait return at once."""

    def __init__(self):
        self._name = "cuda" if torch.cuda.is_available() else "cpu"

    def __getattr__(self, name):
        if self._name == "cuda" and name in _OF_CUDA:
            return getattr(torch.cuda, name)
        if self._name == "cpu" and name in _OF_TORCH | _NOTHING | _BYTES:
            value = 0 if name in _BYTES else None
            return getattr(torch, name) if name in _OF_TORCH else functools.partial(_told, value)
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"get_accelerator().{name}: Strata does not offer it on {self._name}; call torch")

    def device_name(self, device_index=None):
        """str: "cuda", "cuda:1" or "cpu"."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index=None):
        """A context of a device; on a CPU one that does nothing."""
        import contextlib

        return torch.cuda.device(device_index) if self._name == "cuda" else contextlib.nullcontext()

    def current_device(self):
        """int: the index of the current device; on a CPU 0."""
        return torch.cuda.current_device() if self._name == "cuda" else 0

    def current_device_name(self):
        """str: "cuda:0" or "cpu"."""
        return self.device_name(self.current_device())

    def device_count(self):
        """int: number of devices; 1 on a CPU."""
        return torch.cuda.device_count() if self._name == "cuda" else 1

    def is_available(self):
        """True: this object always names an available device."""
        return True

    def is_synchronized_device(self):
        """bool: whether calls return when their work is done."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def manual_seed_all(self, seed):
        """Seeds every device."""
        torch.cuda.manual_seed_all(seed) if self._name == "cuda" else torch.manual_seed(seed)

    def total_memory(self, device_index=None):
        """int: bytes of the device; on a CPU those of the host."""
        if self._name == "cuda":
            return torch.cuda.get_device_properties(device_index or self.current_device()).total_memory
        import os

        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index=None):
        """int: free bytes of the device; on a CPU those of the host."""
        if self._name == "cuda":
            return torch.cuda.mem_get_info(device_index)[0]
        import os

        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def is_bf16_supported(self):
        """bool: whether the device computes in bf16."""
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self):
        """bool: whether models train in fp16 on the device."""
        return self._name == "cuda"

    def is_triton_supported(self):
        """bool: whether the device runs Triton's kernels."""
        return self._name == "cuda"

    def supported_dtypes(self):
        """[torch.dtype] that models train in."""
        half = [torch.float16] if self.is_fp16_supported() else []
        return [torch.float32, *half, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def communication_backend_name(self):
        """str: torch.distributed's backend of the device."""
        return "nccl" if self._name == "cuda" else "gloo"

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

    def range_push(self, msg):
        """Opens a range of NVTX, where there is a GPU."""
        return torch.cuda.nvtx.range_push(msg) if self._name == "cuda" else None

    def range_pop(self):
        """Closes the range of NVTX that was opened last."""
        return torch.cuda.nvtx.range_pop() if self._name == "cuda" else None

    def lazy_call(self, callback):
        """Calls ``callback`` at once."""
        return callback()

    def visible_devices_envs(self):
        """[str]: the variables that name the devices of a process."""
        return ["CUDA_VISIBLE_DEVICES"] if self._name == "cuda" else []

    def get_compile_backend(self):
        """str: the name of torch.compile's backend."""
        return "inductor"


def _told(value, *args, **kwargs):
    return value


@functools.lru_cache(maxsize=1)
def get_accelerator():
    """The ``Accelerator`` of this process."""
    return Accelerator()
