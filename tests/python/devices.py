"""The device that the tests train on: STRATA_TEST_DEVICE, "cpu" (the default) or "cuda".

On GPUs each rank has its own, so a test that starts more ranks than there are GPUs is skipped. The numbers are
those of the CPU: the reference updates its weights there, and torch's kernels are the deterministic ones.
"""

import os

import pytest
import torch

KIND = os.environ.get("STRATA_TEST_DEVICE", "cpu")
ON_GPU = KIND == "cuda"


def test_device():
    """torch.device of this rank."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if ON_GPU else torch.device("cpu")


test_device.__test__ = False


def ranks_at_most(world):
    """``world``, or as many ranks as there are GPUs."""
    return min(world, max(1, torch.cuda.device_count())) if ON_GPU else world


def skip_without_gpus(world):
    """Skips the running test unless each of ``world`` ranks has a device of its own."""
    if ON_GPU and torch.cuda.device_count() < world:
        pytest.skip(f"{world} ranks need {world} GPUs; found {torch.cuda.device_count()}")


def prepare_rank():
    """Called in a rank before it does anything else."""
    if ON_GPU:
        torch.use_deterministic_algorithms(True, warn_only=True)


def to_test_device(values):
    """Tensors, also within dicts, on the device of this rank."""
    if isinstance(values, dict):
        return {name: to_test_device(value) for name, value in values.items()}
    return values.to(test_device()) if isinstance(values, torch.Tensor) else values
