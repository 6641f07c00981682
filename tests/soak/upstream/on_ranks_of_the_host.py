"""A pytest plugin: tests that ask for an accelerator run on the CPU; it writes the outcome of each to a file.

STRATA_UPSTREAM_REPORT names the file: a JSON list of [test, outcome, why]. Where STRATA_COMPAT is set Strata has to
stand in DeepSpeed's place, and nowhere else.
"""

import importlib
import json
import os

import pytest

# Marks that say "has a GPU", or two: everything below them is computed on the CPU as well.
MARKS = {
    "transformers.testing_utils": ("require_torch_accelerator", "require_torch_gpu", "require_torch_fp16",
                                   "require_torch_multi_accelerator"),
    "accelerate.test_utils.testing": ("require_non_cpu", "require_fp16", "require_cuda", "require_multi_device"),
}  # fmt: skip


def pytest_configure(config):
    found = importlib.import_module("deepspeed").__version__
    if ("strata" in found) != bool(os.environ.get("STRATA_COMPAT")):
        raise pytest.UsageError(f"STRATA_COMPAT is {os.environ.get('STRATA_COMPAT')!r}, and deepspeed is {found}; run "
                                "with the interpreter of an environment that has Strata and strata-compat.pth")
    for module, names in MARKS.items():
        marks = importlib.import_module(module)
        for name in names:
            setattr(marks, name, lambda test_case: test_case)
    importlib.import_module("transformers.testing_utils").backend_device_count = lambda device: 2  # ranks of a test
    importlib.import_module("transformers.training_args").is_torch_bf16_gpu_available = lambda: True
    config.pluginmanager.register(Report(os.environ["STRATA_UPSTREAM_REPORT"]))


class Report:
    def __init__(self, path):
        self._path = path
        self._rows = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            why = "" if report.outcome == "passed" else _reason(report)
            self._rows.append([report.nodeid, report.outcome, why])
            self._write()  # the outcomes so far, in case the run is cut short

    def pytest_collectreport(self, report):
        if report.outcome != "passed":
            self._rows.append([report.nodeid, report.outcome, _reason(report)])

    def pytest_sessionfinish(self):
        self._write()

    def _write(self):
        with open(self._path, "w", encoding="utf-8") as file:
            json.dump(self._rows, file)


def _reason(report):
    if isinstance(report.longrepr, tuple):
        text = report.longrepr[2]
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash is not None else str(report.longrepr)
    return " ".join(text.split())[:400]
