"""The device that the tests train on: STRATA_TEST_DEVICE, "cpu" (the default) or "cuda".

On GPUs each rank has its own; where there is one GPU, all ranks share it, since peer collectives work there, too.
A test that starts more ranks than several GPUs is skipped. The numbers are those of the CPU: the reference updates
its weights there, and torch's kernels are the deterministic ones.
"""

import ctypes
import fcntl
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

KIND = os.environ.get("STRATA_TEST_DEVICE", "cpu")
ON_GPU = KIND == "cuda"


def test_device():
    """torch.device of this rank."""
    if not ON_GPU:
        return torch.device("cpu")
    return torch.device("cuda", 0 if shares_a_gpu() else int(os.environ.get("LOCAL_RANK", "0")))


test_device.__test__ = False


def shares_a_gpu():
    """Whether all ranks train on one GPU."""
    return ON_GPU and torch.cuda.device_count() == 1


needs_a_gpu_each = pytest.mark.skipif(shares_a_gpu(), reason="NCCL wants a GPU for each rank")


def ranks_at_most(world):
    """``world``, or as many ranks as there are GPUs."""
    return world if not ON_GPU or shares_a_gpu() else min(world, torch.cuda.device_count())


def skip_without_gpus(world):
    """Skips the running test unless each of ``world`` ranks has a device of its own."""
    if ranks_at_most(world) < world:
        pytest.skip(f"{world} ranks need {world} GPUs; found {torch.cuda.device_count()}")


@contextmanager
def gpus(alone):
    """Uses the GPUs, beside other tests or, to fill their memory, ``alone``: waits for those that run."""
    if not ON_GPU:
        yield
        return
    with open(Path(tempfile.gettempdir()) / "strata-tests-on-gpus.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def prepare_rank():
    """Called in a rank before it does anything else."""
    if ON_GPU:
        torch.use_deterministic_algorithms(True, warn_only=True)
    if shares_a_gpu():
        _wait_without_spinning()
        import strata.ranks.runtime

        # The engine refuses ranks on one GPU as a mistake, unless the user asks for "peer".
        strata.ranks.runtime._device_identity = lambda device: f"{device.type} of process {os.getpid()}"


def _wait_without_spinning():
    """Many processes take turns on the GPU: one that waits must not keep a core from another that could go on."""
    driver = ctypes.CDLL("libcuda.so.1")
    blocking_sync = 4  # CU_CTX_SCHED_BLOCKING_SYNC
    for status in (driver.cuInit(0), driver.cuDevicePrimaryCtxSetFlags_v2(0, blocking_sync)):
        assert status == 0, f"the CUDA driver refused: {status}"


def to_test_device(values):
    """Tensors, also within dicts, on the device of this rank."""
    if isinstance(values, dict):
        return {name: to_test_device(value) for name, value in values.items()}
    return values.to(test_device()) if isinstance(values, torch.Tensor) else values
