"""Training steps of Strata, FSDP2 and DeepSpeed side by side, beside the floor, the lower bound for every engine.

    python bench/step/run.py --model qwen3-30b-a3b --layers 16 --world 8 --batch 1 --seq 4096 --json FILE
    python bench/step/run.py --model tiny --world 2 --device cpu --engines floor,strata-z2,strata-z3

Every engine runs in processes of its own, one engine after the other, with the same random model, data and seed:
bf16 over fp32 masters, gradient checkpointing, AdamW, gradients clipped. Each step is timed on the device; figures
are the median of steps, each of its slowest rank. --variant adds an engine with other settings:

    --variant 'z3-nccl={"stage": 3, "strata": {"collectives": "nccl"}}'
    --variant 'ds-3e8={"engine": "deepspeed", "stage": 3, "zero": {"reduce_bucket_size": 3e8}}'

"stage" and "zero" stand for what is in "zero_optimization"; the rest is DeepSpeed's JSON. --steps 200 --sample-every 10
shows whether memory grows. Ends with 1 when an engine failed or the losses do not agree; an engine that is not
installed is skipped by name. Beside it lie settings.py, Strata under its settings, and losses.py, its losses beside
plain torch's.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for what benches share

import report  # noqa: E402
import tables  # noqa: E402
import timeline  # noqa: E402
from deepspeed_adam import compile_fused_adam  # noqa: E402
from engine_processes import EngineProcesses, Failed, Skipped  # noqa: E402
from engines import ENGINES, FLOOR, PACKAGES, STARTS, Engine  # noqa: E402
from rank import rank_main  # noqa: E402

PRELOADED = ["torch", "torch.distributed", "transformers.modeling_utils"]
LAST_WORDS = 900  # of a failure, on the screen; the figures' file has it whole


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"names of {', '.join(ENGINES)}")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=JSON", help="see above; repeatable")
    parser.add_argument("--ds", default="{}", help='JSON that every DeepSpeed engine\'s "zero_optimization" takes in')
    parser.add_argument("--torch-adam", action="store_true", help="DeepSpeed with torch's AdamW: compiles nothing")
    add_common_arguments(parser)
    return parser.parse_args()


def add_common_arguments(parser, steps=8, loss_tolerance=2e-2):
    """Adds the arguments of every comparison of steps: the model, its data, the number of steps, and the file of the
    figures."""
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a shape that make_model.py knows")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--world", type=int, required=True, help="ranks; on GPUs, one each")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank in a step")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=steps, help="that are timed")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--strata", default="{}", help="JSON that every Strata engine's configuration takes in")
    parser.add_argument("--clip", type=float, default=1.0, help="norm of gradients; 0: no engine clips")
    parser.add_argument("--read-loss", action="store_true", help="the host waits for the loss of every step")
    parser.add_argument("--loss-tolerance", type=float, default=loss_tolerance, help="relative")
    parser.add_argument("--sample-every", type=int, default=0, metavar="N", help="look at memory in every Nth step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deterministic", action="store_true",
                        help="the model's kernels give the same bits every time")
    parser.add_argument("--compile", nargs="?", const="default", metavar="MODE",
                        help="every block, as a script does: block.compile(mode=MODE); reduce-overhead: CUDA graphs")
    parser.add_argument("--keep-activations", action="store_true", help="no gradient checkpointing")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--profile", metavar="FILE", help="trace of a step of rank 0 per engine: FILE.<engine>.json.gz")
    parser.add_argument("--json", metavar="FILE", help="where the figures go, besides the tables")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one engine's turn")
    parser.add_argument("--budget", type=float, help="seconds for all; engines that would start later are skipped")


def chosen_engines(a):
    """{name: Engine} in the order of their turns; those that come again get a number: a, b, a#2."""
    turns = {}
    for name in (name for name in a.engines.split(",") if name):
        if name not in ENGINES:
            sys.exit(f"unknown engine '{name}'; there are {', '.join(ENGINES)}")
        _add(turns, name, ENGINES[name])
    for text in a.variant:
        name, equals, settings = text.partition("=")
        changes = parse_object(settings, f"--variant {name}") if equals else None
        if not changes or (kind := changes.pop("engine", "strata")) not in STARTS:
            sys.exit(f"--variant wants NAME={{...}}, with an engine of {', '.join(STARTS)}; found '{text}'")
        _add(turns, name, Engine(name, PACKAGES[kind], STARTS[kind], changes))
    return turns


def _add(turns, name, engine):
    number = 1 + sum(report.base_name(other) == name for other in turns)
    turns[name if number == 1 else f"{name}#{number}"] = engine


def parse_object(text, option):
    """The dict that ``text`` is in JSON."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        sys.exit(f"{option} wants a JSON object; found '{text}': {error}")
    if not isinstance(value, dict):
        sys.exit(f"{option} wants a JSON object; found '{text}'")
    return value


def options_of(a):
    """The options that every rank gets."""
    keys = ("model", "layers", "batch", "seq", "steps", "warmup", "clip", "read_loss", "sample_every", "seed", "device",
            "deterministic", "compile", "keep_activations")
    return {key: getattr(a, key) for key in keys} | {
        "cores": len(os.sched_getaffinity(0)),
        "strata_json": parse_object(a.strata, "--strata"),
        "deepspeed_json": parse_object(getattr(a, "ds", "{}"), "--ds"),
        "torch_adam": a.device == "cpu" or getattr(a, "torch_adam", False),
        "profile": None,
    }


def start_method(a, cores):
    """How ranks start: on GPUs each imports for itself, since nothing of CUDA survives a fork; on the CPU, where
    cores are few, one process imports for all."""
    if a.device == "cuda":
        return "spawn"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # models on the CPU stay there
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // a.world)))  # before torch is imported
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    return "forkserver"


def main():
    a = parse_arguments()
    result = run_all(a, chosen_engines(a))
    rows = result["engines"]
    print_summary(a, result)
    apart, name, step = result["losses_apart"]
    if rows:
        print(f"losses: at most {apart:.1e} apart ({name}, step {step}); tolerance {a.loss_tolerance:g}")
    return 1 if result["failed"] or not apart <= a.loss_tolerance else 0


def run_all(a, engines):
    """The result of ``compare``, of engines as called for on the command line."""
    from make_model import SHAPES  # imports torch

    if a.model not in SHAPES:
        sys.exit(f"unknown model '{a.model}'; there are {', '.join(SHAPES)}")
    options = options_of(a)
    logs = tempfile.mkdtemp(prefix="strata-step-")
    print(f"{a.model}, {a.world} ranks on {a.device}, {a.batch} x {a.seq} tokens each; what they print: {logs}",
          flush=True)
    return compare(a, engines, options, logs)


def compare(a, engines, options, logs):
    """Gives every engine its turn; saves the figures after each."""
    result = {"settings": vars(a) | {"cores": options["cores"]}, "floor_s": None, "losses_apart": (0.0, None, None)}
    result |= {"engines": {}, "skipped": {}, "failed": {}}
    started, changes = time.monotonic(), {}
    method = start_method(a, options["cores"])
    waiting = {n: EngineProcesses(n, rank_main, (e, options), a.world, logs, method) for n, e in engines.items()}
    try:
        if not options["torch_adam"] and any(e.package == "deepspeed" for e in engines.values()):
            if failure := compile_fused_adam(a.timeout):
                changes["torch_adam"] = True
                print(f"DeepSpeed runs with torch's AdamW, since its FusedAdam does not compile: {end_of(failure)}")
        for name, ranks in list(waiting.items()):  # no engine imports while another is timed
            if not attempt(name, result, lambda: ranks.collect("imported", time.monotonic() + a.timeout)):
                waiting.pop(name).close()
        for name in list(waiting):
            ranks = waiting.pop(name)
            if a.budget and time.monotonic() - started > a.budget:
                result["skipped"][name] = f"the budget of {a.budget:g} s was spent"
                print(f"skipped: {name}: {result['skipped'][name]}", flush=True)
            else:
                attempt(name, result, lambda: take_turn(name, ranks, result, a, changes))
            ranks.close()
            save(a, result)
    finally:
        for ranks in waiting.values():
            ranks.close()
    return result


def attempt(name, result, work):
    """Whether ``work()`` succeeded; else the result has the reason."""
    try:
        work()
        return True
    except Skipped as reason:
        result["skipped"][name] = str(reason)
        print(f"skipped: {name}: {reason}", flush=True)
    except Failed as error:
        result["failed"][name] = str(error)
        print(f"FAILED: {name}: {end_of(error)}", flush=True)
    return False


def take_turn(name, ranks, result, a, changes):
    """Runs one engine and prints its line."""
    deadline = time.monotonic() + a.timeout
    trace = {"profile": trace_path(a.profile, name)} if a.profile else {}
    ranks.order(changes | trace)
    ready = ranks.collect("ready", deadline)
    done = ranks.collect("done", deadline)
    built = [{"build_s": r["seconds"], "build_peak": r["device_peak"]} for r in ready]
    rows = result["engines"]
    row = rows[name] = report.summarise([b | d for b, d in zip(built, done)], a.batch * a.seq)
    result["floor_s"] = floor = report.floor_of(rows, FLOOR)
    result["losses_apart"] = report.losses_apart(rows, FLOOR)
    share = f", {floor / row['median_s']:.1%} of the floor" if floor else ""
    memory = f", device {report.gib(row['device_peak'])} GiB" if row["device_peak"] else ""
    print(f"{name}: {row['median_s'] * 1e3:.1f} ms, {row['tokens_per_s']:.0f} tokens/s/GPU{share}{memory}", flush=True)


def trace_path(path, name):
    """The absolute path of the trace of engine ``name``."""
    stem = str(Path(path).absolute()).removesuffix(".gz").removesuffix(".json")
    return f"{stem}.{name.replace('#', '-')}.json.gz"


def save(a, result):
    if a.json:
        Path(a.json).write_text(json.dumps(result, indent=1, default=str))


def end_of(error):
    """The end of a message: tracebacks end with what matters."""
    text = str(error).strip()
    return text if len(text) <= LAST_WORDS else f"... {text[-LAST_WORDS:]}"


def print_summary(a, result):
    rows = result["engines"]
    if not rows:
        return
    tables.show(report.step_table(rows, FLOOR))
    for name, row in rows.items():
        if row["timeline"] and row["timeline"]["span"]:
            print(f"{name} trace: {timeline.in_words(row['timeline'])}")
        if said := report.account_line(name, row):
            print(said)
        if grown := report.growth_line(name, row):
            print(grown)
    print(f"\n{report.loss_lines(rows)}\n\n{LEGEND}")


LEGEND = """ms/step: median of steps, each of its slowest rank, between events on the device; mean: the whole range by
the host's clock; host ms: until the host had handed a step over. dev peak: GiB of the GPU in use as its driver sees
it, in steps; torch: what its allocator had given out; build: dev peak before steps; growth: of the GPU's memory in
timed steps; mallocs: pieces that torch's allocator asked the driver for in them."""


if __name__ == "__main__":
    sys.exit(main())
