"""Compiles DeepSpeed's FusedAdam once, before any rank needs it; DeepSpeed itself compiles it at first use."""

import importlib.util
import os
import subprocess
import sys

_CODE = "from deepspeed.ops.op_builder import FusedAdamBuilder; FusedAdamBuilder().load(verbose=False)"


def compile_fused_adam(deadline_s):
    """The reason why FusedAdam cannot be used, or None; also None if DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    environment = {"DS_ACCELERATOR": "cuda", "DS_SKIP_CUDA_CHECK": "1"} | dict(os.environ)
    try:
        done = subprocess.run([sys.executable, "-c", _CODE], env=environment, timeout=deadline_s, capture_output=True)
    except subprocess.TimeoutExpired:
        return f"not compiled within {deadline_s} s"
    return None if done.returncode == 0 else done.stderr.decode(errors="replace")
