"""Runs DeepSpeed's own unit tests, from a checkout of it, with Strata in DeepSpeed's place, on ranks of the CPU.

    python tests/soak/upstream/run_deepspeed_units.py DEEPSPEED [--each N] [--jobs N] [--report FILE] [FILE ...]

FILE is below ``tests/unit`` of the checkout; without any, all files run. ``deepspeed_internals.txt`` lists the tests
that do not count; the list was made from the sources, before any outcome. Files of features that Strata does not have,
and tests that ask for internals, do not run. The program prints a table of files and counts, and each test that did not
pass with its reason. Outcomes:

    passed, failed
    not offered   an error that names a feature that Strata does not have
    internals     by the rule, counted in test functions; or a failure whose text names internals, counted in tests
    skipped       by the test; or a failed test that does not pass with DeepSpeed itself on this machine either (not
                  with --alone, which does not try DeepSpeed)

``--each`` runs that many parametrisations of one test function at most. The exit code is 1 where less than nine of ten
of passed and failed pass.
"""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import deepspeed_touches

HERE = Path(__file__).resolve().parent
KINDS = ("passed", "failed", "not offered", "internals", "skipped")
_NOT_OFFERED = re.compile(r"Strata does not offer|not supported \(")
# Texts of failures where a test uses internals in a way that its source does not show: by helpers, for example.
_INTERNALS = re.compile(
    r"Strata does not offer internals of DeepSpeed|stands in for DeepSpeed here, does not know it|"
    r"object has no attribute '_[a-z]|" + "|".join(pattern for pattern, _ in deepspeed_touches.table()["text"])
)
_LIMIT = 3000  # seconds for one process of pytest
_TOGETHER = 8  # files in one
_ORDERLY = (0, 1, 5)  # exit statuses of pytest: all passed, some failed, there was no test


class Unit:
    """One file of tests.

    Args:
        file: below tests/unit. tests: {test: why it asks for internals, or None}. absent: internals that it imports.

    Attributes:
        internals: {id of pytest: why}.
        is_counted: whether any test is left.
    """

    def __init__(self, file, tests, absent):
        self.file = f"unit/{file}"
        self.internals = {f"{self.file}::{test}": why for test, why in tests.items() if why}
        self.is_counted = len(self.internals) < len(tests)
        self.absent = absent


def run(units, checkout, each, strata=True, tests=None):
    """[(test, outcome, why)] of ``units``, in one process of pytest, by Strata or by DeepSpeed itself.

    Args:
        tests: ids of pytest, which alone run; None: all that are counted.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        environment = {
            **environment_of(checkout, strata), "STRATA_UPSTREAM_REPORT": str(report),
            "STRATA_UPSTREAM_EACH": str(each if tests is None else 0),
            "STRATA_UPSTREAM_LEFT_OUT": ";".join(name for unit in units for name in unit.internals),
            "STRATA_UPSTREAM_ONLY": ";".join(tests or ()),
            "STRATA_UPSTREAM_ABSENT": ";".join(sorted(set().union(*(unit.absent for unit in units)))),
        }  # fmt: skip
        met = {name.partition("::")[0] for name in tests or ()}
        files = [unit.file for unit in units if tests is None or unit.file in met]
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "on_cpu_ranks", "-p", "no:cacheprovider", "-p", "no:xdist",
            f"--rootdir={checkout / 'tests'}", "-o", "addopts=", "--continue-on-collection-errors", *files,
        ]  # fmt: skip
        with (Path(folder) / "output").open("w+") as output:
            try:
                done = subprocess.run(command, cwd=checkout / "tests", env=environment, stdout=output,
                                      stderr=subprocess.STDOUT, timeout=_LIMIT)  # fmt: skip
                ended = f"ended with {done.returncode}" if done.returncode not in _ORDERLY else None
            except subprocess.TimeoutExpired:
                ended = f"was not over after {_LIMIT} s"
            rows = [tuple(row) for row in json.loads(report.read_text())] if report.exists() else []
            if ended is None:
                return rows
            output.seek(0)
            said = " ".join(output.read()[-300:].split())
            seen = {name.partition("::")[0] for name, _, _ in rows}
            return rows + [(unit.file, "failed", f"pytest {ended}: {said}") for unit in units if unit.file not in seen]


def environment_of(checkout, strata):
    path = [str(HERE), str(checkout / "tests"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(path), "STRATA_COMPAT": "deepspeed" if strata else "",
        "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_UNITTEST_TIMEOUT": "120",
        "DS_DISABLE_REUSE_DIST_ENV": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


def judged(outcome, why):
    """Returns the test's kind, one of ``KINDS``."""
    if outcome == "failed" and _INTERNALS.search(why):
        return "internals"
    return "not offered" if outcome == "failed" and _NOT_OFFERED.search(why) else outcome


def outcomes(units, checkout, each, alone):
    """[(test, kind, why)] of some files."""
    rows = [(name, "internals", why) for unit in units for name, why in unit.internals.items()]
    units = [unit for unit in units if unit.is_counted]
    if not units:
        return rows
    ran = [(name, judged(outcome, why), why) for name, outcome, why in run(units, checkout, each)]
    failed = [name for name, kind, _ in ran if kind == "failed" and "::" in name]
    passes = set()
    if failed and not alone:
        passes = {name for name, outcome, _ in run(units, checkout, each, False, failed) if outcome == "passed"}
    for name, kind, why in ran:
        if name in failed and name not in passes and not alone:
            kind, why = "skipped", f"does not pass with DeepSpeed itself here; with Strata: {why}"
        rows.append((name, kind, why))
    return rows


def table(rows):
    """Lines of a table of files, and of the tests that did not pass."""
    counts = collections.defaultdict(collections.Counter)
    for name, kind, _ in rows:
        counts[name.partition("::")[0]][kind] += 1
    yield "| file | " + " | ".join(KINDS) + " |"
    yield "|---|" + "---:|" * len(KINDS)
    for file, found in sorted(counts.items()):
        yield f"| {file.removeprefix('unit/')} | " + " | ".join(str(found[kind]) for kind in KINDS) + " |"
    for name, kind, why in rows:
        if kind != "passed":
            yield f"{kind}: {name}: {why}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--each", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--alone", action="store_true")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    units, not_run = [], collections.Counter()
    for file, area, tests, absent in deepspeed_touches.classify(checkout):
        if arguments.files and file not in arguments.files:
            continue
        if area:
            not_run[area[1]] += 1
        else:
            units.append(Unit(file, tests, absent))
    rows = []
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(arguments.jobs) as jobs:
        subprocess.run([sys.executable, HERE / "stand_ins.py", cache], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)  # the models that tests would download
        os.environ["HF_HUB_CACHE"] = cache
        groups = [units[first : first + _TOGETHER] for first in range(0, len(units), _TOGETHER)]
        for found in jobs.map(lambda group: outcomes(group, checkout, arguments.each, arguments.alone), groups):
            rows += found
            if arguments.report:
                arguments.report.write_text(json.dumps(rows))
    print("\n".join(table(rows)))
    print("files not run: " + "; ".join(f"{count} of {why}" for why, count in sorted(not_run.items())))
    counts = collections.Counter(kind for _, kind, _ in rows)
    ours = counts["passed"] + counts["failed"]
    print(f"{counts['passed']} of {ours} passed; {counts['internals']} ask for internals, {counts['not offered']} for "
          f"what is not offered, {counts['skipped']} skipped")
    return 0 if counts["passed"] >= 0.9 * ours else 1


if __name__ == "__main__":
    sys.exit(main())
