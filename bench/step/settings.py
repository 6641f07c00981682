"""Strata's steps under its settings: the time that each setting costs, and the bytes that it holds gathered.

    python bench/step/settings.py --model qwen3-30b-a3b --layers 8 --world 4 --steps 5
    python bench/step/settings.py --model small --world 2 --seq 128 --device cpu

A row is one model at stage 3 (at stage 2 where it says so) with one setting changed, in processes of its own; the
first and the last row are the defaults, so that their distance is the noise. Sizes are in elements, as in DeepSpeed's
JSON, and follow the model's largest block. Where the bounds that are the defaults would hold the whole model, they are
scaled down, so that they bound something. --only runs some of the rows.
"""

import argparse
import sys
from fnmatch import fnmatch

import report
import run
import tables
from engines import Engine, strata

DEFAULT_LIVE = 1_000_000_000
DEEPSPEED_PERSISTENCE = 100_000
MIB = report.MIB


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="PATTERNS", default="*", help="rows, as names or with *, between commas")
    run.add_common_arguments(parser, steps=5)
    return parser.parse_args()


def sizes_of(model, layers):
    """Elements of the whole model and of its largest block."""
    import torch
    from make_model import make_config
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(make_config(model, layers))
    blocks = [sum(p.numel() for p in block.parameters()) for block in built.model.layers]
    return sum(p.numel() for p in built.parameters()), max(blocks)


def bounds_of(whole, block):
    """The settings of "zero_optimization" that every row has. For a large model none; for a smaller one the defaults,
    reduced by the ratio of its blocks to those of a large one."""
    if whole > DEFAULT_LIVE:
        return {}
    return {
        "stage3_max_live_parameters": 8 * block // 5,
        "stage3_prefetch_bucket_size": block // 12,
        "reduce_bucket_size": 4 * block // 5,
    }


def settings_of(whole, block):
    """{row: the changes of the configuration}, in their order."""
    bounds = bounds_of(whole, block)
    default_live = bounds.get("stage3_max_live_parameters", DEFAULT_LIVE)
    own_live = {key: value for key, value in bounds.items() if key != "stage3_max_live_parameters"}
    sequential = {"stage3_allgather_sequential": True}

    def row(zero=None, base=bounds, **more):
        return {"stage": 3, **more, "zero": {**base, **(zero or {})}}

    def persistence(elements):
        return {f"persistence {elements}": row({"stage3_param_persistence_threshold": elements})}

    def prefetch(elements):
        return {f"prefetch {elements}": row({"stage3_prefetch_bucket_size": elements})}

    def live(elements):
        return {f"live {elements}": row({"stage3_max_live_parameters": elements})}

    def reduce(elements):
        return {f"reduce {elements}": row({"reduce_bucket_size": elements})}

    keep_all = {"max_live_bytes": 2 * whole + whole // 4 + 64 * MIB}
    return {
        "defaults": row(),
        **persistence(min(DEEPSPEED_PERSISTENCE, block // 1000)),
        **persistence(block // 50),
        "sequential": row(sequential, own_live),
        "sequential + prefetch 0": row(sequential | {"stage3_prefetch_bucket_size": 0}, own_live),
        f"sequential + live {default_live}": row(sequential | {"stage3_max_live_parameters": default_live}),
        **prefetch(0),
        **prefetch(block // 100),
        **prefetch(2 * block),
        **live(1),
        **live(4 * block),
        f"live {4 * block} + prefetch {2 * block}": row(
            {"stage3_max_live_parameters": 4 * block, "stage3_prefetch_bucket_size": 2 * block}
        ),
        "all live": row(strata=keep_all),
        f"all live + reuse {2 * block}": row({"stage3_max_reuse_distance": 2 * block}, strata=keep_all),
        **reduce(block // 8),
        **reduce(4 * block),
        "overlap_comm false": row({"overlap_comm": False}),
        "stage 2": row() | {"stage": 2},
        "stage 2 + overlap_comm false": row({"overlap_comm": False}) | {"stage": 2},
        "defaults again": row(),
    }


def engines_of(settings):
    return {name: Engine(name, "strata", strata, changes) for name, changes in settings.items()}


HEADINGS = ["setting", "ms/step", "of best", "dev peak GiB", "ledger MiB", "gathered MiB"]
HEADINGS += ["gathers", "GB", "late", "reductions", "GB", "exposed ms", "mallocs"]
LEGEND = """ms/step: median of steps, each of its slowest rank; of best: the shortest of the rows over this one. dev
peak: of the GPU in use as its driver says; ledger: the engine's own peak of device memory; gathered: of weights that
are gathered while in use. gathers, reductions: of units, with their bytes, and exposed, what a step waited for them
and for refreshes: of one more step, which the engine looks at. late: gathers that nothing had begun before their use.
mallocs: pieces that torch's allocator asked for in timed steps, and those that the engine made in that step."""


def figures_of(row):
    """A dict of the figures of a row, of the rank that has most of each."""
    accounts = row["accounts"]

    def most(get):
        return max(get(account) for account in accounts)

    def moved(kind, what):
        return most(lambda account: account["step_report"]["transfers"][kind][what])

    return {
        "median_s": row["median_s"],
        "device_peak": row["device_peak"],
        "ledger": most(lambda account: account["ledger_peaks"].get("device total", 0)),
        "gathered": most(lambda account: account["ledger_peaks"].get("device gathered weights", 0)),
        "gathers": (moved("gather", "count"), moved("gather", "bytes")),
        "late": most(lambda account: account["step_report"]["uses"]["late"]),
        "reductions": (moved("reduce", "count"), moved("reduce", "bytes")),
        "exposed_s": most(lambda account: account["step_report"]["exposed_seconds"]),
        "mallocs": row["allocations"] + most(lambda account: account["step_report"]["device_allocations"]),
    }


def settings_table(rows):
    """[[cell]] of {name: row of ``run.compare``}."""
    figures = {name: figures_of(row) for name, row in rows.items()}
    best = min(f["median_s"] for f in figures.values())
    lines = [HEADINGS]
    for name, f in figures.items():
        cells = [name, f"{f['median_s'] * 1e3:.1f}", f"{best / f['median_s']:.1%}"]
        cells += [report.gib(f["device_peak"]) if f["device_peak"] else "-"]
        cells += [f"{f['ledger'] / MIB:.1f}", f"{f['gathered'] / MIB:.1f}"]
        cells += [str(f["gathers"][0]), f"{f['gathers'][1] * 1e-9:.3f}", str(f["late"])]
        cells += [str(f["reductions"][0]), f"{f['reductions'][1] * 1e-9:.3f}"]
        cells += [f"{f['exposed_s'] * 1e3:.1f}", str(f["mallocs"])]
        lines.append(cells)
    return lines


def main():
    a = parse_arguments()
    settings = settings_of(*sizes_of(a.model, a.layers))
    patterns = [pattern.strip() for pattern in a.only.split(",")]
    chosen = {name: changes for name, changes in settings.items() if any(fnmatch(name, p) for p in patterns)}
    if not chosen:
        sys.exit(f"--only wants some of {'; '.join(settings)}; found '{a.only}'")
    result = run.run_all(a, engines_of(chosen))
    if not result["engines"]:
        return 1
    tables.show(settings_table(result["engines"]))
    print(f"\n{LEGEND}")
    apart, name, step = result["losses_apart"]
    print("losses: the same in all rows" if apart == 0 else f"losses: at most {apart:.1e} apart ({name}, step {step})")
    return 1 if result["failed"] or not apart <= a.loss_tolerance else 0


if __name__ == "__main__":
    sys.exit(main())
