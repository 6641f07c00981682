"""Builds the C++ benchmarks on demand, runs them, and reads their JSON."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "release"
PROGRAMS = {
    "strata_bench_comm": BUILD / "bench" / "comm" / "strata_bench_comm",
    "strata_program": BUILD / "bin" / "strata",
    "bench_kernels": BUILD / "bench" / "kernels" / "bench_kernels",
}


def build(name):
    """The path of program ``name``, after building it from the present sources."""
    if not (BUILD / "build.ninja").exists():
        subprocess.run(["cmake", "--preset", "release", "--log-level=WARNING"], cwd=ROOT, check=True)
    subprocess.run(["ninja", "-C", BUILD, "--quiet", name], check=True)
    return PROGRAMS[name]


def run_comm(program, backend, ranks, mebibytes, repetitions):
    """{all_gather_gb_per_s, reduce_scatter_gb_per_s, copy_gb_per_s} of one size."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        size = str(mebibytes)
        options = {"ranks": str(ranks), "backend": backend, "min-mib": size, "max-mib": size}
        options |= {"repetitions": str(repetitions), "json": file.name}
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        subprocess.run([program, *arguments], check=True, stdout=subprocess.DEVNULL)
        return json.load(file)["sizes"][0]


def run_bench_io(program, folder, engine, block, depth, size):
    """{read_gb_per_s, write_gb_per_s, both_gb_per_s} of one block and depth."""
    options = ["--engine", engine, "--block", block, "--depth", str(depth), "--size", size, "--json"]
    done = subprocess.run([program, "bench-io", folder, *options], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)["drives"][0]["figures"][0]


def run_kernels(program, pattern, numel, min_time_s, threads=2, cores=None):
    """Counters by the name of the case, of the cases whose name matches ``pattern``.

    Args:
        threads: for which there are cases, besides 1 and 2.
        cores: what the program runs on; None: where this process may.
    """
    arguments = [f"--benchmark_filter={pattern}", "--benchmark_format=json", f"--benchmark_min_time={min_time_s}"]
    environment = dict(os.environ, STRATA_BENCH_NUMEL=str(numel), STRATA_BENCH_THREADS=str(threads))
    bound = ["taskset", "--cpu-list", ",".join(map(str, cores))] if cores else []
    done = subprocess.run([*bound, program, *arguments], env=environment, check=True, capture_output=True, text=True)
    return {case["name"]: case for case in json.loads(done.stdout)["benchmarks"]}
