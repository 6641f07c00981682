"""Runs the DeepSpeed tests of transformers and Accelerate, from checkouts of theirs, with Strata in DeepSpeed's place.

    python tests/soak/upstream/run_upstream.py TRANSFORMERS ACCELERATE [--beside-deepspeed] [-k WORDS]

The checkouts are those of the versions that are installed. No network is used: models that the tests would download
are stand-ins of ``stand_ins.py``. Tests that ask for an accelerator run on the CPU. Prints a table of test, outcome and
reason; with ``--beside-deepspeed`` the outcome with DeepSpeed itself, on the same machine, stands beside it.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = (  # by folder of a checkout: the first of these that is there
    "tests/trainer/distributed/test_trainer_distributed_deepspeed.py",
    "tests/deepspeed",
)
# Tests that cannot pass here, by how their names begin, and why.
NOT_APPLICABLE = {
    "test_basic_run": "downloads a data set",
    "test_save_checkpoints_zero": "looks for the files of DeepSpeed's checkpoints; Strata writes its own format",
}


def run(checkout, cache, strata, words):
    """{test: (outcome, why)} of one checkout's tests.

    Args:
        strata: whether Strata stands in DeepSpeed's place.
        words: of ``pytest -k``; None: all.
    """
    found = next((path for path in TESTS if (checkout / path).exists()), None)
    if found is None:
        raise SystemExit(f"{checkout} has none of {', '.join(TESTS)}: give the folder of a whole checkout")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        environment = {
            **os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
            "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "STRATA_UPSTREAM_REPORT": str(report),
            "PYTHONPATH": os.pathsep.join([str(HERE), str(checkout), os.environ.get("PYTHONPATH", "")]),
            "STRATA_COMPAT": "deepspeed" if strata else "",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "on_ranks_of_the_host", "-p", "no:cacheprovider", "-p",
            "no:xdist", f"--rootdir={checkout}", "-o", "addopts=", found, *(["-k", words] if words else []),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=checkout, env=environment, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)  # fmt: skip
        if not report.exists():
            raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}")
        return {name: judged(name, outcome, why) for name, outcome, why in json.loads(report.read_text())}


def judged(name, outcome, why):
    """(outcome, why) of a test; tests that cannot pass have another outcome than failed ones."""
    short = name.rpartition("::")[2]
    for start, reason in NOT_APPLICABLE.items():
        if short.startswith(start) and outcome == "failed":
            return "not applicable", reason
    return outcome, why


def table(ours, theirs):
    """Lines of a table; ``theirs`` is None where DeepSpeed did not run."""
    yield "| test | Strata |" + (" DeepSpeed |" if theirs is not None else "") + " why |"
    yield "|---|---|" + ("---|" if theirs is not None else "") + "---|"
    for name, (outcome, why) in ours.items():
        beside = f" {theirs.get(name, ('not run', ''))[0]} |" if theirs is not None else ""
        yield f"| {name.rpartition('::')[2]} | {outcome} |{beside} {why.replace('|', '/')} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--beside-deepspeed", action="store_true")
    parser.add_argument("-k", dest="words")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as cache:
        subprocess.run([sys.executable, HERE / "stand_ins.py", cache], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
        for checkout in arguments.checkouts:
            checkout = checkout.resolve()
            ours = run(checkout, cache, True, arguments.words)
            theirs = run(checkout, cache, False, arguments.words) if arguments.beside_deepspeed else None
            print(f"\n{checkout.name}")
            print("\n".join(table(ours, theirs)))
            counts = collections.Counter(outcome for outcome, _ in ours.values())
            print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
            failed += counts["failed"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
