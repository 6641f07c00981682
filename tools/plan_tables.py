"""Runs ``strata plan`` over the well-known models, for pages: docs/assets/plan.json, whose numbers the form
docs/assets/plan.html only looks up, and the tables of docs/SIZING.md.

    python tools/plan_tables.py STRATA json > docs/assets/plan.json      # some minutes
    python tools/plan_tables.py STRATA tables                            # Markdown

STRATA is the program.
"""

from __future__ import annotations

import json
import subprocess
import sys

MODELS = ("Qwen3-8B", "Qwen3-32B", "Llama-3.1-70B")
LORA_RANKS = (0, 16)
JOBS = ((1, 8), (2, 8), (4, 8), (128, 8))  # hosts, GPUs of each
TABLE_MODELS = ("Qwen3-8B", "Qwen3-32B", "Llama-3.1-70B")
TABLE_JOBS = ((1, 1), (1, 8), (4, 8))
MACHINE = ("--device-memory", "80GiB", "--host-memory", "1TiB", "--nvme-space", "8TB")
STEP = ("--seq", "4096", "--micro-batch", "1", "--checkpointing")


def plan(program, model, hosts, gpus, rank, *more):
    """The report of the program, a dict."""
    lora = ("--lora-rank", str(rank)) if rank else ()
    command = [program, "plan", "--model", model, "--world", str(hosts * gpus), "--ranks-per-host", str(gpus)]
    done = subprocess.run([*command, *lora, *more, "--json"], capture_output=True, text=True)
    if not done.stdout:
        raise RuntimeError(f"{command} failed: {done.stderr}")
    return json.loads(done.stdout)


def cells(report):
    """Bytes of each rank, by the rows of its grid: on the device, on the host, on the drive."""
    return [[row[tier]["total"] for tier in ("device", "host", "nvme")] for row in report["grid"]]


def exported(program):
    """All that the form needs."""
    rows = [{key: row[key] for key in ("stage", "placement")} for row in plan(program, MODELS[0], *JOBS[-1], 0)["grid"]]
    models = {}
    for model in MODELS:
        of_token = [plan(program, model, *JOBS[-1], 0, "--seq", "1", *more)["activations"]["of_token"]
                    for more in ((), ("--checkpointing",))]
        tables = [[cells(plan(program, model, *job, rank)) for job in JOBS] for rank in LORA_RANKS]
        models[model] = {"of_token": of_token, "bytes": tables}
    return {"rows": rows, "jobs": JOBS, "lora_ranks": LORA_RANKS, "models": models}


def size(count):
    """As the program writes bytes."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    value = float(count)
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    digits = 0 if units[0] == "B" else max(0, 3 - len(str(int(value))))
    return f"{value:.{digits}f} {units[0]}"


def table_rows(program, models=TABLE_MODELS, jobs=TABLE_JOBS):
    """The lines of the page's table."""
    for model in models:
        for rank in LORA_RANKS:
            for hosts, gpus in jobs:
                report = plan(program, model, hosts, gpus, rank, *MACHINE, *STEP)
                what = f"LoRA, rank {rank}" if rank else "all"
                job = f"{hosts} x {gpus}"
                if report["best"] is None:
                    yield f"| {model} | {what} | {job} | nothing fits | | | |"
                    continue
                best = report["grid"][report["best"]]
                held = best["device"]["total"] + report["activations"]["bytes"]
                shared = [size(best[tier]["total"] * gpus) for tier in ("host", "nvme")]
                yield (f"| {model} | {what} | {job} | stage {best['stage']}, {best['placement']} | {size(held)} | "
                       f"{' | '.join(shared)} |")


if __name__ == "__main__":
    if sys.argv[2:] == ["json"]:
        print(json.dumps(exported(sys.argv[1]), separators=(",", ":")))
    elif sys.argv[2:] == ["tables"]:
        for line in table_rows(sys.argv[1]):
            print(line, flush=True)
    else:
        sys.exit(__doc__)
