"""Saving and loading a training checkpoint: Strata, torch.distributed.checkpoint and DeepSpeed beside the disk itself.

    python bench/bench_checkpoint.py [--gb 2] [--world 2] [--device cpu] [--folder DIR] [--rounds 3] [--json FILE]

Every engine trains one step of the same model, saves, and loads what it has saved, in fresh processes, in turns.
"raw" is the disk's own speed: each rank writes its part of the same number of bytes into one file, from memory, in
order, and syncs it to disk; then it reads the part again. GB/s count the bytes in the folder after the save, by the
slowest rank; medians over rounds. Files are dropped from the page cache before they are read, if the system allows it.
"stall": the time for which a save beside training blocks the loop.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tables import show

COMMON = """
import json, os, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder, wanted, on_gpu = os.environ["FOLDER"], float(os.environ["GB"]) * 1e9, os.environ["DEVICE"] == "cuda"
import torch
if on_gpu:
    torch.cuda.set_device(rank)
device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
WIDTH = 2048
def build():
    torch.manual_seed(0)  # 12 bytes of each element are saved: fp32, with two moments
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(max(2, round(wanted / 12 / WIDTH**2)))))
def batch():
    return torch.ones(2, WIDTH, device=device)
marks = {}
class timed:
    def __init__(self, name):
        self.name = name
    def __enter__(self):
        if on_gpu:
            torch.cuda.synchronize()
        barrier()
        self.start = time.perf_counter()
    def __exit__(self, *_):
        if on_gpu:
            torch.cuda.synchronize()
        marks[self.name] = time.perf_counter() - self.start
def barrier():
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
def drop_cache():
    barrier()
    if rank == 0:
        for root, _, names in os.walk(folder):
            for name in names:
                with open(os.path.join(root, name), "rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    barrier()
def finish():
    print("MARKS " + json.dumps(marks), flush=True)
    barrier()
    os._exit(0)
CONFIG = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
"""

RAW = """
torch.distributed.init_process_group("gloo")
part = int(wanted / world) // 4096 * 4096
values = torch.ones(part, dtype=torch.uint8).numpy()
path = os.path.join(folder, f"raw-{rank}")
with timed("save"):
    with open(path, "wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, part)
        for begin in range(0, part, 8 << 20):
            file.write(values[begin:begin + (8 << 20)])
        os.fsync(file.fileno())
drop_cache()
with timed("load"):
    with open(path, "rb", buffering=0) as file:
        view = memoryview(values)
        for begin in range(0, part, 8 << 20):
            file.readinto(view[begin:begin + (8 << 20)])
finish()
"""

STRATA = """
import strata
CONFIG["checkpoint"] = {"async": ASYNC}
engine, *_ = strata.initialize(model=build(), config=CONFIG)
for _ in range(2):
    engine.backward(engine(batch()).square().mean())
    engine.step()
if ASYNC:
    engine.save_checkpoint(folder, tag="first")
    engine.wait_for_checkpoint()
    with timed("stall"):
        engine.save_checkpoint(folder, tag="t")
    engine.wait_for_checkpoint()
    finish()
with timed("save"):
    engine.save_checkpoint(folder, tag="t")
drop_cache()
with timed("load"):
    engine.load_checkpoint(folder, tag="t")
finish()
"""

DCP = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh(device.type, (world,))
model = build().to(device)
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
model(batch()).square().mean().backward()
optimizer.step()
def state():
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states}
with timed("save"):
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(folder, thread_count=4, sync_files=True))
drop_cache()
with timed("load"):
    loaded = state()
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
finish()
"""

DEEPSPEED = """
import logging, warnings
warnings.filterwarnings("ignore")
import deepspeed
deepspeed.utils.logger.setLevel(logging.ERROR)
CONFIG["optimizer"]["params"]["torch_adam"] = True
engine, *_ = deepspeed.initialize(model=build(), config=CONFIG)
loss = engine(batch()).square().mean()
engine.backward(loss)
engine.step()
with timed("save"):
    engine.save_checkpoint(folder, tag="t")
drop_cache()
with timed("load"):
    engine.load_checkpoint(folder, tag="t")
finish()
"""

SCRIPTS = {
    "raw": RAW,
    "strata": "ASYNC = False\n" + STRATA,
    "strata async": "ASYNC = True\n" + STRATA,
    "dcp": DCP,
    "deepspeed": DEEPSPEED,
}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(engine, arguments):
    """({what: seconds of the slowest rank}, bytes on disk) of one engine, in fresh processes."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        shared = {"WORLD_SIZE": str(arguments.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                  "FOLDER": folder, "GB": str(arguments.gb), "DEVICE": arguments.device, "OMP_NUM_THREADS": "1"}
        if arguments.device == "cpu":
            shared["DS_ACCELERATOR"] = "cpu"
        ranks = [
            subprocess.Popen([sys.executable, "-c", COMMON + SCRIPTS[engine]], stdout=subprocess.PIPE, text=True,
                             stderr=subprocess.PIPE, env={**os.environ, **shared, "RANK": str(r), "LOCAL_RANK": str(r)})
            for r in range(arguments.world)
        ]
        outputs = [process.communicate(timeout=1200) for process in ranks]
        marks = []
        for process, (said, errors) in zip(ranks, outputs):
            lines = [line for line in said.splitlines() if line.startswith("MARKS ")]
            if not lines:
                raise RuntimeError(f"{engine} failed with {process.returncode}:\n{errors[-3000:]}")
            marks.append(json.loads(lines[0].removeprefix("MARKS ")))
        written = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        return {what: max(m[what] for m in marks) for what in marks[0]}, written


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="bytes of all shards, in 10^9")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--folder", default=None, help="on the disk to measure; default that of temporary files")
    parser.add_argument("--engines", nargs="+", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default=None)
    arguments = parser.parse_args()
    free = shutil.disk_usage(arguments.folder or tempfile.gettempdir()).free
    if free < 3 * arguments.gb * 1e9:
        sys.exit(f"the disk has {free / 1e9:.1f} GB free; three times the {arguments.gb} GB are wanted")
    figures = {engine: [] for engine in arguments.engines}
    for number in range(arguments.rounds):
        for engine in arguments.engines:
            seconds, written = run(engine, arguments)
            figures[engine].append({"seconds": seconds, "bytes": written})
            print(f"round {number + 1}: {engine} {seconds} {written / 1e9:.2f} GB", file=sys.stderr, flush=True)
    raw = {}
    table = [["engine", "GB", "save s", "GB/s", "of raw", "load s", "GB/s", "of raw", "stall s"]]
    for engine, rounds in figures.items():
        written = statistics.median(r["bytes"] for r in rounds)
        row = [engine, f"{written / 1e9:.2f}"]
        for what in ("save", "load"):
            times = [r["seconds"][what] for r in rounds if what in r["seconds"]]
            if not times:
                row += ["-", "-", "-"]
                continue
            seconds = statistics.median(times)
            rate = written / 1e9 / seconds
            raw.setdefault(what, rate)
            row += [f"{seconds:.2f}", f"{rate:.2f}", f"{rate / raw[what]:.2f}"]
        stalls = [r["seconds"]["stall"] for r in rounds if "stall" in r["seconds"]]
        table.append([*row, f"{statistics.median(stalls):.2f}" if stalls else "-"])
    show(table)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"arguments": vars(arguments), "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
