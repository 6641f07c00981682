"""Where the tests find the package: an installed one, else the build of the working tree."""

import importlib.util
import os
import sys
from pathlib import Path

if importlib.util.find_spec("strata") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build" / "python" / "pkg"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the machine's cores
