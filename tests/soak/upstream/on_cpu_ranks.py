"""A pytest plugin for DeepSpeed's own unit tests: their ranks are processes of the CPU, forked from a server that has
imported torch already. It writes the outcome of each test to a file.

STRATA_UPSTREAM_REPORT names the file: a JSON list of [test, outcome, why]. STRATA_UPSTREAM_EACH says how many
parametrisations of one test function run at most, spread over all of them; 0: all. STRATA_UPSTREAM_LEFT_OUT names
tests that do not run, without parametrisations and with ";" between them. Where STRATA_UPSTREAM_ONLY is set, only the
tests that it names run, with parametrisations. Where STRATA_COMPAT is set Strata stands in DeepSpeed's place.
"""

import importlib
import multiprocessing
import os

import pytest
from on_ranks_of_the_host import Report

PRELOADED = ["strata.compat.deepspeed", "absent_names", "torch", "torch.distributed", "pytest", "rank_of_the_cpu",
             "strata.start", "strata.ops.adam"]  # fmt: skip


def pytest_configure(config):
    stands_in = bool(os.environ.get("STRATA_COMPAT"))
    if stands_in:
        importlib.import_module("strata.compat.deepspeed")
        importlib.import_module("absent_names").stand_in()
    found = importlib.import_module("deepspeed").__version__
    if ("strata" in found) != stands_in:
        raise pytest.UsageError(f"STRATA_COMPAT is {os.environ.get('STRATA_COMPAT')!r}, and deepspeed is {found}")
    multiprocessing.set_forkserver_preload(PRELOADED if stands_in else PRELOADED[2:6])
    accelerator = type(importlib.import_module("deepspeed.accelerator").get_accelerator())
    accelerator.device_count = lambda self: 16
    pytest.exit = lambda reason="", returncode=None: pytest.fail(reason)  # a hang ends one test, not all of them
    config.pluginmanager.register(Report(os.environ["STRATA_UPSTREAM_REPORT"]))


def pytest_collection_finish(session):
    execution = importlib.import_module("unit.common").DistributedExec
    execution._close_pool = _end_ranks


def _end_ranks(self, pool, num_procs, force=False):
    """Ranks of a test that has failed may wait for one another; nothing of them is needed any more."""
    pool.terminate()
    pool.join()


def pytest_collection_modifyitems(items):
    left_out = set(os.environ.get("STRATA_UPSTREAM_LEFT_OUT", "").split(";"))
    items[:] = [item for item in items if item.nodeid.partition("[")[0] not in left_out]
    only = set(filter(None, os.environ.get("STRATA_UPSTREAM_ONLY", "").split(";")))
    if only:
        items[:] = [item for item in items if item.nodeid in only]
    most = int(os.environ.get("STRATA_UPSTREAM_EACH", "0"))
    if most == 0:
        return
    by_function = {}
    for item in items:
        by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = []
    for members in by_function.values():
        count = min(most, len(members))
        kept += [members[i * (len(members) - 1) // max(1, count - 1)] for i in range(count)]
    items[:] = kept
