"""DeepSpeed's questions about the installed torch."""

import torch
from packaging.version import Version


def _cut(version):
    return ".".join(version.split(".")[:2]) if version else "0.0"


TORCH_INFO = {
    "version": _cut(torch.__version__),
    "bf16_support": True,
    "cuda_version": _cut(torch.version.cuda),
    "nccl_version": _cut(".".join(map(str, torch.cuda.nccl.version()))) if torch.cuda.is_available() else "0.0",
    "hip_version": _cut(torch.version.hip),
}


def required_torch_version(min_version=None, max_version=None):
    """bool: whether torch is at least the one and at most the other.

    Raises:
        ValueError: neither is given.
    """
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version: give min_version, max_version, or both")
    found = Version(torch.__version__)
    high_enough = min_version is None or found >= Version(str(min_version))
    return high_enough and (max_version is None or found <= Version(str(max_version)))


def register_grad_hook(param, hook):
    """``param.register_post_accumulate_grad_hook(hook)``."""
    return param.register_post_accumulate_grad_hook(hook)


def is_functorch_transforming():
    """bool: whether a transform of torch.func runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None
