"""Reads and writes past the page cache, beside fio's with the same block and depth: GB/s, and of fio's.

    python bench/bench_io.py [FOLDER] [--block 1MiB] [--depth 32] [--size 2GiB] [--rounds 5]

fio, io_uring and threads in turns, each in a process of its own on a file of its own, whose blocks have been written
before. Strata's buffers are huge pages and registered. fio runs with its usual options, and once more with huge pages
and registered buffers; Strata is compared with the latter. Figures are medians. The goal for io_uring is 0.90 of fio;
exits with 1 if it is missed. Needs fio.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

import native_programs
from tables import show

GOAL = 0.90
KINDS = ("read", "write")
FIO = "fio, tuned"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default=".")
    parser.add_argument("--block", default="1MiB")
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--size", default="2GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--program", help="the program strata of another build than build/release")
    parser.add_argument("--json", help="where the figures go, besides the table")
    return parser.parse_args()


class Fio:
    """fio's io_uring on one file, which is written once before it is measured. ``tuned``: in registered huge pages."""

    def __init__(self, folder, arguments, tuned=False):
        size = [f"--bs={arguments.block}", f"--size={arguments.size}", f"--iodepth={arguments.depth}"]
        way = ["--ioengine=io_uring", "--direct=1", "--name=bench", f"--filename={folder}/fio", "--output-format=json"]
        self._command = ["fio", "--kb_base=1000", *way, *size] + (["--fixedbufs=1"] if tuned else [])
        # The C library asks for huge pages for what malloc maps; fio's own huge pages have to be set aside by root.
        self._environment = dict(os.environ, **({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if tuned else {}))
        self._run("write")

    def _run(self, kind):
        command = [*self._command, f"--rw={kind}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=self._environment)
        return json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][kind]["bw_bytes"] / 1e9

    def measure(self):
        return {kind: self._run(kind) for kind in reversed(KINDS)}


def contestants(folder, arguments):
    """{name: a function that measures once}."""
    program = arguments.program or native_programs.build("strata_program")

    def ours(engine):
        block, depth, size = arguments.block, arguments.depth, arguments.size
        figures = native_programs.run_bench_io(program, folder, engine, block, depth, size)
        return {kind: figures[f"{kind}_gb_per_s"] for kind in KINDS}

    engines = {engine: lambda engine=engine: ours(engine) for engine in ("io_uring", "threads")}
    return {"fio": Fio(folder, arguments).measure, FIO: Fio(folder, arguments, tuned=True).measure, **engines}


def report(figures):
    """Shows the medians; {kind: io_uring's share of fio's}."""
    middle = {name: {kind: statistics.median(runs[kind]) for kind in KINDS} for name, runs in figures.items()}
    lines = [["", *(f"{kind} {what}" for kind in KINDS for what in ("GB/s", "from", "to", "of fio"))]]
    for name, runs in figures.items():
        line = [name]
        for kind in KINDS:
            spread = (middle[name][kind], min(runs[kind]), max(runs[kind]))
            line += [f"{figure:.2f}" for figure in (*spread, middle[name][kind] / middle[FIO][kind])]
        lines.append(line)
    show(lines)
    return {kind: middle["io_uring"][kind] / middle[FIO][kind] for kind in KINDS}


def main():
    arguments = parse_arguments()
    if shutil.which("fio") is None:
        sys.exit("fio is not there; install it (apt-get install fio)")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measured = contestants(folder, arguments)
        figures = {name: {kind: [] for kind in KINDS} for name in measured}
        for number in range(arguments.rounds):
            busy = os.getloadavg()[0]
            print(f"  round {number + 1} of {arguments.rounds}; load {busy:.1f}", file=sys.stderr)
            for name, measure in measured.items():
                for kind, speed in measure().items():
                    figures[name][kind].append(speed)
    shares = report(figures)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({**vars(arguments), "gb_per_s": figures}, file, indent=2)
    missed = [kind for kind, share in shares.items() if share < GOAL]
    print(f"goal, {GOAL:.2f} of fio by io_uring: " + (f"missed in {', '.join(missed)}" if missed else "reached"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
