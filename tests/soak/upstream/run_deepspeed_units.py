"""Runs DeepSpeed's own unit tests, from a checkout of it, with Strata in DeepSpeed's place, on ranks of the CPU.

    python tests/soak/upstream/run_deepspeed_units.py DEEPSPEED [--each N] [--jobs N] [--report FILE] [FILE ...]

Files are below ``tests`` of the checkout; without any, all of ``TESTED``. Prints a table of files and counts, and what
failed with its reason. A failure is set apart where the test asks for DeepSpeed's internals (``INTERNAL``) or for a
feature that Strata names as not offered; what is left is Strata's own. ``--each`` runs that many parametrisations of
one test function at most. The exit code is 1 where less than nine of ten that are Strata's pass.
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

HERE = Path(__file__).resolve().parent
TESTED = (HERE / "deepspeed_units.txt").read_text().split()
INTERNAL = tuple(
    line.split(" ", 1) for line in (HERE / "deepspeed_internals.txt").read_text().splitlines() if line.strip()
)  # (how a test's name begins, below tests/unit; why)
_NOT_OFFERED = re.compile(r"Strata does not offer|not supported \(|has no module '|cannot import name")


def run(checkout, files, each, environment):
    """[(test, outcome, why)] of ``files``, which are run one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        environment = {**environment, "STRATA_UPSTREAM_REPORT": str(report), "STRATA_UPSTREAM_EACH": str(each)}
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "on_cpu_ranks", "-p", "no:cacheprovider", "-p", "no:xdist",
            f"--rootdir={checkout / 'tests'}", "-o", "addopts=", "--continue-on-collection-errors", *files,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=checkout / "tests", env=environment, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)  # fmt: skip
        if not report.exists():
            return [(file, "failed", f"pytest ended with {done.returncode}: {done.stdout[-300:]}") for file in files]
        return json.loads(report.read_text())


def judged(name, outcome, why):
    """One of "passed", "skipped", "internal", "not offered", "failed"."""
    if outcome != "failed":
        return outcome
    short = name.removeprefix("tests/").removeprefix("unit/")
    if any(short.startswith(start) for start, _ in INTERNAL):
        return "internal"
    return "not offered" if _NOT_OFFERED.search(why) else "failed"


def environment_of(checkout):
    path = [str(HERE), str(checkout / "tests"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(path), "STRATA_COMPAT": "deepspeed", "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_UNITTEST_TIMEOUT": "60",
        "DS_DISABLE_REUSE_DIST_ENV": "1",
    }  # fmt: skip


def table(rows):
    """Lines of a table of files, and of what failed."""
    kinds = ("passed", "failed", "internal", "not offered", "skipped")
    counts = collections.defaultdict(collections.Counter)
    for name, kind, _ in rows:
        counts[name.partition("::")[0]][kind] += 1
    yield "| file | " + " | ".join(kinds) + " |"
    yield "|---|" + "---:|" * len(kinds)
    for file, found in sorted(counts.items()):
        yield f"| {file.removeprefix('unit/')} | " + " | ".join(str(found[kind]) for kind in kinds) + " |"
    for name, kind, why in rows:
        if kind not in ("passed", "skipped"):
            yield f"{kind}: {name}: {why}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", default=TESTED)
    parser.add_argument("--each", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    environment = environment_of(checkout)
    with ThreadPoolExecutor(arguments.jobs) as jobs:
        found = jobs.map(lambda file: run(checkout, [file], arguments.each, environment), arguments.files)
        rows = [(name, judged(name, outcome, why), why) for rows in found for name, outcome, why in rows]
    print("\n".join(table(rows)))
    counts = collections.Counter(kind for _, kind, _ in rows)
    ours = counts["passed"] + counts["failed"]
    print(f"{counts['passed']} of {ours} passed; {counts['internal']} ask for internals, {counts['not offered']} for "
          f"what is not offered, {counts['skipped']} skipped")
    if arguments.report:
        arguments.report.write_text(json.dumps(rows))
    return 0 if counts["passed"] >= 0.9 * ours else 1


if __name__ == "__main__":
    sys.exit(main())
