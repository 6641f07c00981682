"""The cost of a parameter from its construction to its first step: one JSON line per case, of its largest rank.

    python bench/bench_deferred_init.py [--size 22528] [--ranks 2] [--libraries strata deepspeed] \
        [--sources init host file load] [--places device host nvme] [--tile-mib 64] [--drive DIR] [--json FILE]

A module of one fp32 parameter of SIZE x SIZE, at stage 3, trained one step by AdamW. *source*: built within zero.Init,
given prebuilt on the host, or read from a file by transformers' ``from_pretrained`` within the library's zero.Init;
*load* is Strata's ``load_pretrained``, which makes the engine and its states at once. *place*: where weights and states
rest. Strata uses the parameter in tiles of --tile-mib; with 0 it is whole.

Bytes, above what the process had when its libraries were loaded, for each phase (*construct*, *initialize*, *step*:
forward, backward and step): *device*: the most in use, as the driver tells it; *device_torch*: torch's allocator's;
*ledger*: the engine's own count, by tier; *host*: anonymous and shared memory that was resident at the end;
*host_peak*: the most that was resident at all. *forecast*: what ``strata.memory_forecast`` says before there is a
model, with which ``strata plan`` counts, too. *bound*: a shard and two pieces, and four shards, three tiles and the
activations. Every case runs in fresh processes. Where there is no GPU ranks are on the CPU, and the device's
figures are the ledger's.

More ranks than GPUs share them (*ranks_of_gpu*): Strata by its peer copies, DeepSpeed by gloo. The driver's figure is
divided among them then, and Strata's weights stay on the GPU (*weights*), since those of several ranks are gathered
from elsewhere by NCCL, which wants a GPU for each.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time

from deferred_init_rank import BATCH, PIECE

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARIES, SOURCES, PLACES = ("strata", "deepspeed"), ("init", "host", "file", "load"), ("device", "host", "nvme")
PATIENCE_S = 15.0  # how long the others may go on once a rank has failed


def _largest(figures):
    merged = {}
    for of_rank in figures:
        for key, value in of_rank.items():
            if isinstance(value, dict):
                value = _largest([merged.get(key, {}), value])
            merged[key] = max(merged[key], value) if key in merged and not isinstance(value, dict) else value
    return merged


def _write_file(drive, size):
    """A checkpoint of the module, in a process of its own: its memory goes with it."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from deferred_init_rank import model_classes;"
        "c, m = model_classes();"
        "m(c(size=int(sys.argv[3]))).save_pretrained(sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, HERE, os.path.join(drive, "model"), str(size)], check=True)


def _compile_operators(places):
    """Compiles DeepSpeed's operators in a process of its own before a case: if a process is killed while it compiles,
    the next ones wait for ever."""
    builders = ["CPUAdamBuilder"] * (places != ["device"]) + ["AsyncIOBuilder"] * ("nvme" in places)
    for builder in builders:
        code = f"from deepspeed.ops.op_builder import {builder} as b; b().load()"
        try:
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600.0)
        except subprocess.TimeoutExpired:
            print(f"{builder}: 600 s; is there an old lock in ~/.cache/torch_extensions?", file=sys.stderr)
        except subprocess.CalledProcessError as error:
            print(f"{builder}: {error.stderr.strip()[-300:]}", file=sys.stderr)


def _bounds(size, ranks, tile):
    parameter, activations = 4 * size * size, 5 * 4 * BATCH * size
    return {"construct": parameter // ranks + 2 * PIECE,
            "step": 4 * parameter // ranks + 3 * (tile or parameter) + activations}  # fmt: skip


def run_case(library, source, place, arguments, drive):
    """The figures of one case, or the reason why there are none."""
    port = str(random.randrange(20000, 30000))
    tile = int(arguments.tile_mib * (1 << 20))
    case = {"library": library, "source": source, "place": place, "size": arguments.size, "ranks": arguments.ranks,
            "parameter_bytes": 4 * arguments.size**2, "tile": tile if library == "strata" else 0}  # fmt: skip
    processes = []
    for rank in range(arguments.ranks):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(arguments.ranks),
            "LOCAL_WORLD_SIZE": str(arguments.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }
        command = [sys.executable, os.path.join(HERE, "deferred_init_rank.py"), json.dumps(case | {"drive": drive})]
        logs = [tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")]
        processes.append((subprocess.Popen(command, env=environment, stdout=logs[0], stderr=logs[1]), *logs))
    _wait_for([process for process, _, _ in processes], time.monotonic() + arguments.timeout)
    told, errors = [], []
    for process, output, error in processes:
        lines = [line for line in _text(output).splitlines() if line.startswith("FIGURES ")]
        if lines:
            told.append(json.loads(lines[-1][len("FIGURES "):]))
        elif process.returncode < 0:
            errors.append(f"ended by signal {-process.returncode}: " + _text(error).strip()[-600:])
        else:
            errors.insert(0, _text(error).strip()[-600:])  # before what it had others end with
    case["bound"] = _bounds(arguments.size, arguments.ranks, tile)
    return case | ({"error": errors[0]} if errors else _largest(told))


def _text(file):
    file.seek(0)
    return file.read()


def _wait_for(processes, deadline):
    """Waits until all have ended. Kills those that still run some seconds after one failed, or at the deadline."""
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            deadline = min(deadline, time.monotonic() + PATIENCE_S)
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(0.05)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=22528)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--tile-mib", type=float, default=64.0)
    parser.add_argument("--drive", default=tempfile.gettempdir())
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if "deepspeed" in arguments.libraries:
        _compile_operators(arguments.places)
    with tempfile.TemporaryDirectory(dir=arguments.drive, prefix="birth-") as drive:
        if {"file", "load"} & {*arguments.sources}:
            _write_file(drive, arguments.size)
        for place in arguments.places:
            for source in arguments.sources:
                for library in arguments.libraries:
                    if (library, source) == ("deepspeed", "load"):
                        continue  # it has no such call
                    line = json.dumps(run_case(library, source, place, arguments, drive))
                    print(line, flush=True)
                    if arguments.json:
                        with open(arguments.json, "a", encoding="utf-8") as file:
                            file.write(line + "\n")


if __name__ == "__main__":
    main()
