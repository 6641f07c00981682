"""From a checkpoint's files to an engine that can train: Strata, FSDP2 and DeepSpeed side by side, and the limit.

    python bench/startup/run.py --model DIR --world 8 [--engines strata-z2,fsdp2,ds-z2] [--steps 1] [--json FILE]

Each engine runs in processes of its own, one engine after the other, on the same files, which are in the page cache.
The clock starts when the engine has rehearsed with a toy model (what libraries import and compile at their first use
is not counted), the GPU has its context and the communicator its connections; it ends when the engine can train.
Without GPUs everything runs on the CPU over gloo. Ends with 1 when an engine failed or the losses do not agree; an
engine that is not installed is skipped by name.
"""

import argparse
import ctypes
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for what benches share

from deepspeed_adam import compile_fused_adam  # noqa: E402
from engine_processes import Failed, Skipped  # noqa: E402
from engines import ENGINES, OPTIMIZERS  # noqa: E402
from launch import Ranks  # noqa: E402
from limit import warm_page_cache  # noqa: E402
from rank import LIMIT  # noqa: E402
import report  # noqa: E402

LOSS_TOLERANCE = 2e-2  # relative; the first loss in bf16, before any update


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder with config.json and *.safetensors")
    parser.add_argument("--world", type=int, required=True, help="ranks; on GPUs, one each")
    parser.add_argument("--engines", default="strata-z2,strata-z3,strata-live-z2,fsdp2,ds-z2,ds-z3",
                        help=f"names of {', '.join(ENGINES)}; one may be named several times, and so may "
                             f"'{LIMIT}', which always comes first: to see whether the host stays as fast")
    parser.add_argument("--steps", type=int, default=0, help="training steps afterwards, not in the clock")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--json", help="where the figures go, besides the tables")
    parser.add_argument("--ready-marks", action="store_true", help="print every phase of every engine")
    parser.add_argument("--no-limit", action="store_true", help="do not measure the limit")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="AdamW",
                        help="SGD, for models whose AdamW states have no room")
    parser.add_argument("--strata", default="{}", help='JSON for "strata" in its configuration')
    parser.add_argument("--cold", action="store_true", help="no rehearsal: libraries import in the clock")
    parser.add_argument("--torch-adam", action="store_true", help="DeepSpeed with torch's AdamW: compiles nothing")
    parser.add_argument("--unfuse-live", action="store_true",
                        help="a tensor per expert and projection in models that are built before the engine")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="GPUs where there are enough")
    parser.add_argument("--touch-host-gib", type=float, default=0,
                        help="host memory to use once beforehand: virtual machines may get theirs only then")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for one engine")
    return parser.parse_args()


def options_of(a):
    """The options that every rank gets."""
    import torch

    device = a.device or ("cuda" if torch.cuda.device_count() >= a.world else "cpu")
    return {
        "model": os.path.abspath(a.model),
        "device": device,
        "cores": len(os.sched_getaffinity(0)),
        "packages": {name: engine.package for name, engine in ENGINES.items()},
        "steps": a.steps,
        "micro_batch": a.micro_batch,
        "tokens": a.tokens,
        "optimizer": a.optimizer,
        "torch_adam": a.torch_adam or device == "cpu",
        "strata_json": json.loads(a.strata),
        "unfuse": a.unfuse_live,
        "toy": None,
    }


def make_toy(model, folder):
    """A tiny checkpoint of the same kind as ``model``, with which engines rehearse; None where there is none."""
    from make_model import SHAPES, make_config, write_checkpoint

    kind = json.loads((Path(model) / "config.json").read_text()).get("model_type")
    for name in (name for name in SHAPES if name.startswith("tiny")):
        config = make_config(name)
        if config.model_type == kind:
            write_checkpoint(config, folder, device="cpu", threads=1)
            return str(folder)
    return None


def touch_host_memory(gib, threads):
    """Writes to ``gib`` of new memory in parallel and gives it back; seconds."""
    started = time.perf_counter()
    size = int(gib * (1 << 30) / threads) // mmap.PAGESIZE * mmap.PAGESIZE
    maps = [mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(threads)]

    def fill(area):
        ctypes.memset((ctypes.c_char * size).from_buffer(area), 1, size)

    workers = [threading.Thread(target=fill, args=(area,)) for area in maps]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - started


def compile_for_deepspeed(names, options, deadline_s):
    """Builds FusedAdam before any rank needs it; returns the reason if that fails, or None."""
    packages = {ENGINES[report.base_name(name)].package for name in names}
    if options["torch_adam"] or options["optimizer"] != "AdamW" or "deepspeed" not in packages:
        return None
    return compile_fused_adam(deadline_s)


def number_turns(names):
    """Names, those that come again with the number of their turn: a, b, a#2."""
    seen, turns = {}, []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        turns.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return turns


def main():
    a = parse_arguments()
    names = [name for name in a.engines.split(",") if name]
    if unknown := [name for name in names if name not in (*ENGINES, LIMIT)]:
        sys.exit(f"unknown engines: {', '.join(unknown)}; there are {', '.join((*ENGINES, LIMIT))}")
    names = [name for name in names if name != LIMIT] if a.no_limit else [LIMIT, *names]
    options = options_of(a)
    logs = tempfile.mkdtemp(prefix="strata-startup-")
    print(f"{a.world} ranks on {options['device']}, {options['cores']} cores; what they print: {logs}", flush=True)
    if a.touch_host_gib:
        seconds = touch_host_memory(a.touch_host_gib, options["cores"])
        print(f"{a.touch_host_gib:g} GiB of host memory touched in {seconds:.1f} s", flush=True)
    size, seconds = warm_page_cache(a.model, min(32, options["cores"]))
    print(f"{size / 1e9:.2f} GB in the page cache, read in {seconds:.2f} s", flush=True)
    if not a.cold:
        options["toy"] = make_toy(a.model, Path(logs) / "toy")
        if options["toy"] is None:
            print("no toy model of this kind to rehearse with: first-use costs of libraries are in the figures")
    result = compare(a, number_turns(names), options, logs)
    print_summary(a, result)
    apart = report.losses_apart(result["engines"])
    if apart > LOSS_TOLERANCE:
        print(f"the losses do not agree: {apart:.1e} apart, at most {LOSS_TOLERANCE} expected")
    return 1 if result["failed"] or apart > LOSS_TOLERANCE else 0


def compare(a, turns, options, logs):
    """Gives every engine its turn; saves the figures after each."""
    result = {"settings": vars(a) | {"device": options["device"], "cores": options["cores"]}}
    result |= {"limit": None, "limits": {}, "engines": {}, "skipped": {}, "failed": {}}
    changes = {}
    waiting = {t: Ranks(t, report.base_name(t), options, a.world, logs) for t in turns}
    try:
        if failure := compile_for_deepspeed([t for t in turns if not is_limit(t)], options, a.timeout):
            changes["torch_adam"] = True
            print(f"DeepSpeed runs with torch's AdamW, since its FusedAdam does not compile: {end_of(failure)}")
        for turn, ranks in list(waiting.items()):  # no engine imports while another is timed
            prepared(turn, ranks, waiting, result, a.timeout)
        for turn in list(waiting):
            take_turn(turn, waiting.pop(turn), result, a, changes)
            save(a, result)
    except KeyboardInterrupt:
        print("interrupted; so far:", flush=True)
        left = [turn for turn in turns if not is_limit(turn) and turn not in result["engines"]]
        result["failed"] |= dict.fromkeys(left, "interrupted")
        save(a, result)
    finally:
        for ranks in waiting.values():
            ranks.close()
    return result


def is_limit(turn):
    return report.base_name(turn) == LIMIT


def save(a, result):
    if a.json:
        Path(a.json).write_text(json.dumps(result, indent=1, default=str))


def prepared(turn, ranks, waiting, result, timeout):
    """Waits for the imports; takes an engine that cannot run out of ``waiting``."""
    try:
        ranks.wait_for_imports(timeout)
        return
    except Skipped as reason:
        result["skipped"][turn] = str(reason)
        print(f"skipped: {turn}: {reason}", flush=True)
    except Failed as error:
        result["failed"][turn] = str(error)
        print(f"FAILED: {turn}: {end_of(error)}", flush=True)
    waiting.pop(turn).close()


def take_turn(turn, ranks, result, a, changes):
    """Runs one engine and prints the time that it took."""
    try:
        told = ranks.run(a.timeout, changes)
    except Failed as error:
        result["failed"][turn] = str(error)
        print(f"FAILED: {turn}: {end_of(error)}", flush=True)
        return
    finally:
        ranks.close()
    if is_limit(turn):
        result["limits"][turn] = report.summarise_limit(told)
        result["limit"] = report.fastest_limit(result["limits"].values())
        print(report.limit_table(turn, result["limits"][turn], a.world), flush=True)
        return
    row = result["engines"][turn] = report.summarise(told)
    losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
    print(f"{turn}: ready in {row['total_s']:.2f} s{losses and f'; losses {losses}'}", flush=True)


def end_of(error, size=900):
    """The end of a message: tracebacks end with what matters. The figures' file has it whole."""
    text = str(error).strip()
    return text if len(text) <= size else f"... {text[-size:]}"


def print_summary(a, result):
    rows = result["engines"]
    if rows:
        print(f"\n{report.engine_table(rows)}\n\n{report.ratio_table(rows, ENGINES, result['limit'])}")
    for name, row in rows.items() if a.ready_marks else ():
        print(f"\n{report.phase_table(name, row)}")
        if row["init_report"]:
            print(report.marks_table(row["init_report"]))
    print(f"\n{LEGEND}")


LEGEND = """Seconds of the slowest rank from the clock's start; CPU s: user and system time of its phases. Memory in
GiB, the largest rank: dev, the GPU as its driver sees it, sampled; host, anonymous and shared memory, sampled; added:
less what the process had at the start; Pss, when ready: the same, shared memory divided by its users; VmHWM counts
mapped files, too."""


if __name__ == "__main__":
    sys.exit(main())
