"""How long users of Trainer wait for their first step, and for a round of GRPO, under Strata and under DeepSpeed.

    python bench/trainer_story.py [--world 2] [--layers N | --tiny] [--kinds trainer grpo] [--model DIR] [--json FILE]

``trainer_story_script.py`` is started unchanged: by ``strata run`` with Strata in DeepSpeed's place, by torchrun with
DeepSpeed itself. Its JSON says stage 3 and bf16, as transformers' documentation has it. It loads Qwen3-8B's shapes
(--layers cuts it) with ``from_pretrained`` and trains: *trainer* the whole model; *grpo* an adapter of LoRA by TRL's
GRPOTrainer, completions all of the same length (--whole: the whole model).

The checkpoint is written where --model holds none; on a drive rather than in /dev/shm, whose files a process that maps
them counts as its memory. Each engine first runs a tiny model, uncounted, which compiles modules and DeepSpeed's
operators; --as-installed leaves that out. The files are read once, so that all find them in memory; then engines take
turns. Seconds are those of the slowest rank since the start of its process. An engine that fails, or that --timeout
ends, does not lose what it has told before. Both engines must log the same losses and generate as much.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

from compiled_modules import environment
from nvme_story import write_tokenizer
from startup.limit import warm_page_cache
from story_jobs import GIB, Failed, environment_of, run_job
from story_turns import ENGINES, Turns, command_of, installed, prepared_checkpoint
from tables import show

SCRIPT = Path(__file__).with_name("trainer_story_script.py")
KINDS = ["trainer", "grpo"]
PARTS = ["import", "arguments", "from_pretrained", "trainer", "ready", "first_step"]
# Tolerance of a loss in bf16: each engine adds gradients in its own order. GRPO's loss is a remainder of rounding
# alone.
RELATIVE = 2e-2
CONFIG = {
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def run_once(engine, kind, model, a, base, tell=None):
    """The figures of one turn.

    Raises:
        Failed: the job did before its first step, or did something else than it should.
    """
    with tempfile.TemporaryDirectory(prefix="trainer-story-out-") as out:
        config = Path(out, "ds.json")
        config.write_text(json.dumps(CONFIG))
        command = [*command_of(engine, SCRIPT, a.world), kind, model, out, "--deepspeed", config]
        command += ["--steps", a.steps, "--batch", a.completions if kind == "grpo" else a.batch]
        command += ["--length", a.new_tokens if kind == "grpo" else a.length]
        command += ["--whole"] * a.whole + ["--cpu"] * (a.device == "cpu")
        outcome = run_job(command, environment_of(a.device, base), a.world * (a.device == "cuda"), a.timeout, tell)
    memory = outcome.memory
    seen = {"host_rank": memory.largest, "host_all": memory.together, "device": memory.device}
    return figures_of(outcome.told, kind, a) | seen | {"command": outcome.seconds}


def figures_of(told, kind, a):
    """{figure: value} of what ranks have told.

    Raises:
        Failed: they have not told of every step, or a step did something else than it should.
    """
    starts = [line for line in told if "first_step" in line.get("parts", {})]
    if sorted(line["rank"] for line in starts) != list(range(a.world)):
        raise Failed(f"{a.world} ranks ran, and {len(starts)} told of a first step", told)
    figures = {part: max(line["parts"][part] for line in starts) for part in PARTS}
    figures["torch_peak"] = max(line["torch_peak"] for line in starts)
    steps = [[line["seconds"] for line in told if line.get("step") == step] for step in range(1, a.steps + 1)]
    logged = [line for line in told if "logged" in line]
    if any(len(of) != a.world for of in steps) or [line["logged"] for line in logged] != list(range(1, a.steps + 1)):
        raise Failed(f"not every rank told of {a.steps} steps", told)
    figures |= {"steps": [max(of) for of in steps], "logged": logged}
    if not all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in logged):
        raise Failed(f"these steps train nothing: {logged}", told)
    lengths = {line["completions/min_length"] for line in logged} if kind == "grpo" else {a.new_tokens}
    if lengths != {a.new_tokens}:
        raise Failed(f"completions have {lengths} tokens, not {a.new_tokens}", told)
    return figures


def print_table(turns):
    gibs = ["host_rank", "host_all", "device", "torch_peak"]
    headings = ["", *(f"{part} s" for part in PARTS), "later steps s", "command s", "host, a rank", "host, all"]
    rows = []
    for engine, figures in turns.figures():
        seconds = [f"{figures[part]:.2f}" for part in PARTS]
        later = " ".join(f"{of:.2f}" for of in figures["steps"][1:])
        rows.append([engine, *seconds, later, f"{figures['command']:.2f}", *(f"{figures[k] / GIB:.2f}" for k in gibs)])
    show([[*headings, "device", "torch, first step"], *rows])
    print("Seconds since the process's start, each part's end. Memory in GiB, at the most of the job: host, anonymous "
          "and shared memory of one process, and of all together; device, of the fullest GPU beyond what was before.")


def agree_on_outcome(turns, kind):
    """Prints how far the engines' steps lie apart; whether no farther than rounding takes them."""
    done = dict(reversed(turns.figures()))  # the first turn of each
    if set(done) != set(ENGINES):
        return True
    ours, theirs = (done[engine] for engine in ENGINES)
    names = ("loss", "grad_norm", "reward")
    rows = [["step", *(f"{name}, {engine}" for name in names for engine in ENGINES)]]
    for of in zip(ours["logged"], theirs["logged"]):
        cells = (f"{line[name]:.6g}" if name in line else "" for name in names for line in of)
        rows.append([str(of[0]["logged"]), *cells])
    show(rows)
    later = [statistics.median(figures["steps"][1:]) for figures in (ours, theirs) if figures["steps"][1:]]
    ratios = [f"first step {ours['first_step'] / theirs['first_step']:.3f}"]
    ratios += [f"later steps, medians, {later[0] / later[1]:.3f}"] if later else []
    print(f"{kind}: Strata's time over DeepSpeed's: {', '.join(ratios)}", flush=True)
    if kind == "grpo":  # sampled tokens part where two are as likely
        return True
    apart = max(abs(x["loss"] / y["loss"] - 1) for x, y in zip(ours["logged"], theirs["logged"]))
    print(f"losses differ by {apart:.1e} at the most")
    return apart < RELATIVE


def compare(a, engines, folder, toy):
    """{kind: Turns}; what there is goes to --json after every turn."""
    turns = {kind: Turns(engines) for kind in a.kinds}

    def write():
        if a.json:
            told = {kind: of.account() for kind, of in turns.items()}
            a.json.write_text(json.dumps({"arguments": vars(a), "kinds": told}, indent=1, default=str))

    with environment(a.as_installed) as base:
        if toy:  # GRPO's modules and operators are Trainer's and more
            kind = a.kinds[-1]
            turns[kind].warm_up(lambda engine: run_once(engine, kind, toy, a, base))
        size, seconds = warm_page_cache(folder, threads=min(16, os.cpu_count()))
        print(f"files of {size / 1e9:.2f} GB, read once in {seconds:.1f} s", flush=True)
        for kind, of in turns.items():
            for _ in range(a.rounds):
                of.take(lambda engine, kind=kind: run_once(engine, kind, folder, a, base, tell=print_now), write)
            print_table(of)
    return turns


def print_now(line):
    print(line, flush=True)


def prepared_model(folder, name, layers, device):
    """``folder`` with a checkpoint and a tokenizer."""
    prepared_checkpoint(folder, name, layers, device)
    write_tokenizer(folder, 256)
    return folder


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=1, help="ranks; one GPU each")
    parser.add_argument("--shape", default="qwen3-8b", help="of make_model.py")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, a few tokens")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--model", type=Path, help="the checkpoint's folder; default: a temporary one")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank, of the whole model's steps")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--completions", type=int, default=4, help="of a rank, in a round of GRPO")
    parser.add_argument("--new-tokens", type=int, default=64, help="of a completion")
    parser.add_argument("--whole", action="store_true", help="GRPO without an adapter")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a turn may take")
    parser.add_argument("--as-installed", action="store_true", help="compile nothing beforehand")
    parser.add_argument("--json", type=Path, help="where the figures go, besides the table")
    a = parser.parse_args()
    if a.tiny:
        a.shape, a.length, a.new_tokens, a.completions = "tiny", 16, 4, 2
    if a.device is None:
        import torch

        a.device = "cuda" if torch.cuda.is_available() else "cpu"
    return a


def main():
    a = arguments()
    engines = installed(a.engines, a.world)
    with tempfile.TemporaryDirectory(prefix="trainer-story-") as scratch:
        toy = None if a.as_installed else prepared_model(Path(scratch) / "toy", "tiny", None, "cpu")
        folder = prepared_model(a.model or Path(scratch) / "model", a.shape, a.layers, a.device)
        turns = compare(a, engines, folder, toy)
    good = [agree_on_outcome(of, kind) for kind, of in turns.items()]
    return 0 if all(good) and not any(of.errors for of in turns.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
