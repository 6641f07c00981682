"""Runs the C++ tests, then the Python tests, and adds up what passed and failed.

    tools/run_tests.py BUILD_DIR [--cpp-only | --python-only] [--label core] [--jobs N] [-- pytest arguments]

A ctest entry is a GoogleTest program or a script. Programs write their cases as XML, so a case counts
as one test; a program that died before it wrote anything counts as one failure. The last line is
"N passed, N failed", and the exit status is 0 only when nothing failed and something ran.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple


class Count(NamedTuple):
    """Tests that passed, failed (or broke) and were skipped."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(a + b for a, b in zip(self, other)))

    def __str__(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.passed} passed, {self.failed} failed{skipped}"


def count_cases(report: Path) -> Count:
    """Counts the <testcase> elements of a JUnit-like report; an unreadable one is one failure."""
    try:
        root = ElementTree.parse(report).getroot()
    except (OSError, ElementTree.ParseError):
        return Count(failed=1)
    total = Count()
    for case in root.iter("testcase"):
        if case.get("status") == "notrun":
            continue  # disabled by its name
        if case.find("failure") is not None or case.find("error") is not None:
            total += Count(failed=1)
        elif case.find("skipped") is not None:
            total += Count(skipped=1)
        else:
            total += Count(passed=1)
    return total


def count_ctest(summary: Path, gtest_reports: Path) -> Count:
    """Counts ctest's entries, with a GoogleTest program counted by its cases."""
    try:
        entries = list(ElementTree.parse(summary).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return Count(failed=1)
    total = Count()
    for entry in entries:
        failed = entry.get("status") != "run"
        report = gtest_reports / f"{entry.get('name')}.xml"
        count = count_cases(report) if report.exists() else Count(passed=int(not failed))
        if failed and count.failed == 0:
            count += Count(failed=1)  # died, timed out, or is not a GoogleTest program
        total += count
    return total


def run_ctest(build: Path, label: str | None, jobs: int) -> Count:
    reports = build / "reports" / "gtest"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    summary = build / "reports" / "ctest.xml"
    summary.unlink(missing_ok=True)
    command = ["ctest", "--test-dir", str(build), "--output-on-failure", "--no-tests=error",
               "-j", str(jobs), "--output-junit", str(summary.resolve())]
    if label:
        command += ["-L", f"^{label}$"]
    environment = os.environ | {"GTEST_OUTPUT": f"xml:{reports.resolve()}/"}
    status = subprocess.run(command, env=environment).returncode
    count = count_ctest(summary, reports)
    return count if status == 0 or count.failed else count + Count(failed=1)


def run_pytest(build: Path, arguments: list[str]) -> Count:
    report = build / "reports" / "pytest.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
    build = build.resolve()
    environment = os.environ | {"PYTHONPATH": str(build / "pkg"), "STRATA_BUILD_DIR": str(build)}
    status = subprocess.run(command, env=environment).returncode
    count = count_cases(report)
    return count if status == 0 or count.failed else count + Count(failed=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    languages = parser.add_mutually_exclusive_group()
    languages.add_argument("--cpp-only", action="store_true", help="leave the Python tests out")
    languages.add_argument("--python-only", action="store_true", help="leave the C++ tests out")
    parser.add_argument("--label", help="only ctest entries with this label")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.epilog = "Arguments after -- go to pytest."
    # argparse cannot parse options between positionals, so pytest's arguments are cut off beforehand.
    ours, pytest_arguments = sys.argv[1:], []
    if "--" in ours:
        cut = ours.index("--")
        ours, pytest_arguments = ours[:cut], ours[cut + 1:]
    arguments = parser.parse_args(ours)

    counts = {}
    if not arguments.python_only:
        counts["ctest"] = run_ctest(arguments.build, arguments.label, arguments.jobs)
    if not arguments.cpp_only:
        counts["pytest"] = run_pytest(arguments.build, pytest_arguments)
    print()
    for name, count in counts.items():
        print(f"{name}: {count}")
    total = sum(counts.values(), Count())
    print(f"{total.passed} passed, {total.failed} failed", flush=True)
    return 0 if total.passed and not total.failed else 1


if __name__ == "__main__":
    sys.exit(main())
