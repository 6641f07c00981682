"""Where the tests find the package: an installed one, else the build of the working tree."""

import importlib.util
import os
import sys
from pathlib import Path

if importlib.util.find_spec("strata") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "build" / "python" / "pkg"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the machine's cores
if os.environ.get("STRATA_TEST_DEVICE", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # models on the CPU stay there
else:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be deterministic
