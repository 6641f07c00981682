"""The time that an unchanged DeepSpeed script waits for its engine, under Strata and under DeepSpeed.

    python bench/start_story.py [--world 1] [--layers 16 | --tiny] [--device cuda] [--model DIR] [--rounds 1]

``start_story_script.py`` loads Qwen3-30B-A3B, cut to --layers, with ``from_pretrained`` on every rank, and calls
``deepspeed.initialize`` at stage 2. ``strata run`` starts it with Strata in DeepSpeed's place, torchrun with DeepSpeed
itself. The checkpoint is written if --model holds none, with one tensor per expert and projection, as published.

Each engine first starts a tiny model, which is not counted: that compiles modules, and DeepSpeed's operators. With
--as-installed it does not. The files are read once before, so that all find them in memory. Then engines take turns.
Seconds are those of the slowest rank since the start of its process; memory is sampled from outside until the job ends.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from compiled_modules import environment
from startup.limit import warm_page_cache
from story_jobs import GIB, Failed, environment_of, run_job
from story_turns import ENGINES, Turns, command_of, installed, prepared_checkpoint
from tables import show

SCRIPT = Path(__file__).with_name("start_story_script.py")
PARTS = ["import", "from_pretrained", "initialize", "total"]


def run_once(engine, folder, a, base, tell=None):
    """{figure: value} of one turn, with "sum", "elements" and "deepspeed" of what was started.

    Raises:
        Failed: the job failed, or its ranks report different models.
    """
    gpus = a.world if a.device == "cuda" else 0
    command = [*command_of(engine, SCRIPT, a.world), folder]
    outcome = run_job(command, environment_of(a.device, base), gpus, a.timeout, tell)
    told = [line for line in outcome.told if "from_pretrained" in line]
    if sorted(line["rank"] for line in told) != list(range(a.world)):
        raise Failed(f"{a.world} ranks ran, and {len(told)} told their times")
    models = {(line["deepspeed"], line["elements"], line["sum"], line["dtype"], line["device"]) for line in told}
    if len(models) != 1:
        raise Failed(f"ranks started different models: {models}")
    figures = {part: max(line[part] for line in told) for part in PARTS}
    memory = outcome.memory
    figures |= {"host_rank": memory.largest, "host_all": memory.together, "device": memory.device}
    return figures | {"command": outcome.seconds} | {k: told[0][k] for k in ("deepspeed", "elements", "sum")}


def compare(a, engines, folder, toy):
    """The Turns."""
    turns = Turns(engines)
    with environment(a.as_installed) as base:
        if toy:
            turns.warm_up(lambda engine: run_once(engine, toy, a, base))
        size, seconds = warm_page_cache(folder, threads=min(16, os.cpu_count()))
        print(f"files of {size / 1e9:.2f} GB, read once in {seconds:.1f} s", flush=True)
        for _ in range(a.rounds):
            turns.take(lambda engine: run_once(engine, folder, a, base, tell=print_now), lambda: write(a, turns))
    return turns


def print_now(line):
    print(line, flush=True)


def write(a, turns):
    """Writes the figures so far, so that a bench which is ended has written them."""
    if a.json:
        a.json.write_text(json.dumps({"world": a.world, "device": a.device} | turns.account(), indent=1))


def print_table(turns):
    gibs = ["host_rank", "host_all", "device"]
    headings = ["", *(f"{part} s" for part in PARTS), "command s", "host, a rank", "host, all", "device"]
    rows = []
    for engine, figures in turns.figures():
        seconds = [f"{figures[part]:.2f}" for part in (*PARTS, "command")]
        rows.append([engine, *seconds, *(f"{figures[key] / GIB:.2f}" for key in gibs)])
    show([headings, *rows])
    print("Memory in GiB, at the most: host, anonymous and shared memory of one process, and of all together; device, "
          "of the fullest GPU beyond what was in use before.")
    best = {e: {p: min(f[p] for f in d) for p in PARTS} for e, d in turns.done.items() if d}
    if set(best) == set(ENGINES):
        ratios = ", ".join(f"{part} {best['strata'][part] / best['deepspeed'][part]:.3f}" for part in PARTS)
        print(f"Strata's time over DeepSpeed's, the best turn of each: {ratios}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=1, help="ranks; one GPU each")
    parser.add_argument("--layers", type=int, default=16, help="of the model's 48")
    parser.add_argument("--tiny", action="store_true", help="a tiny model of the same kind")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--model", type=Path, help="the checkpoint's folder; default: a temporary one")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that a turn may take")
    parser.add_argument("--as-installed", action="store_true", help="compile nothing beforehand")
    parser.add_argument("--json", type=Path, help="where the figures go, besides the table")
    a = parser.parse_args()
    if a.device is None:
        import torch

        a.device = "cuda" if torch.cuda.is_available() else "cpu"
    engines = installed(a.engines, a.world)
    with tempfile.TemporaryDirectory(prefix="start-story-") as scratch:
        toy = None if a.as_installed else prepared_checkpoint(Path(scratch) / "toy", "tiny-moe", None, "cpu", True)
        name, layers = ("tiny-moe", None) if a.tiny else ("qwen3-30b-a3b", a.layers)
        folder = prepared_checkpoint(a.model or Path(scratch) / "model", name, layers, a.device, unfused=True)
        turns = compare(a, engines, folder, toy)
    print_table(turns)
    sums = {(f["elements"], f["sum"]) for _, f in turns.figures()}
    if len(sums) > 1:
        print(f"different models were started: {sums}")
    return 1 if len(sums) != 1 or turns.errors else 0


if __name__ == "__main__":
    sys.exit(main())
