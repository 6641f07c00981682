"""Where the tests find the package (an installed one, else the build of the working tree), and which run in soak.

`make test` leaves out what is marked `soak`: ``pytest -m soak`` runs these tests alone, and ``-m ""`` runs all. A
test that is tried with several numbers of ranks, 2 among them, runs in `make test` with 2; its others are marked here.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("strata") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "build" / "python" / "pkg"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the machine's cores
if os.environ.get("STRATA_TEST_DEVICE", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # models on the CPU stay there
else:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be deterministic

@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items):
    of_two = {_test(item) for item in items if _world(item) == 2}
    for item in items:
        if _world(item) not in (None, 2) and _test(item) in of_two:
            item.add_marker("soak")


def _test(item):
    return item.module.__name__, item.originalname


def _world(item):
    """The number of ranks, where a parameter of its own says it."""
    if any(mark.args[0] == "world" for mark in item.iter_markers("parametrize")):
        return item.callspec.params["world"]
    return None
