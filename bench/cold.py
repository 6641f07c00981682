"""Seconds from exec to the end of the first step, in fresh processes: the wait of a user who starts a script.

    python bench/cold.py [--world 2] [--device cuda] [--model DIR] [--engines strata fsdp2 ...] [--rounds 3] \
        [--as-installed] [--json FILE]

Without --model a small model that the script builds; with it a causal language model of transformers from a folder.
Engines take turns. Each rank is a new process that reports when it has imported torch, imported the engine (and
transformers), is ready, and has made its first step. Times are seconds since the parent called exec, of the rank that
came last, medians over rounds. Each engine has one turn before that is not counted: it leaves files in the page cache,
and compiled modules, as pip installs them. With --as-installed modules stay as the packages were installed. Plain torch
trains on one rank and exchanges nothing.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time

from compiled_modules import environment, installed_state
from tables import show

MARKS = ["torch", "packages", "ready", "first step"]

COMMON = """
import json, os, sys, time
marks, started, on_gpu, folder = {}, float(os.environ["STARTED"]), os.environ["DEVICE"] == "cuda", os.environ["MODEL"]
def mark(name):
    marks[name] = time.time() - started
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
import torch
mark("torch")
device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
def build():
    if folder:
        import transformers
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return torch.nn.Sequential(torch.nn.Embedding(96, 64), *(torch.nn.TransformerEncoderLayer(64, 4, 128, 0.0,
        batch_first=True) for _ in range(4)), torch.nn.Linear(64, 96))
def loss_of(model):
    ids = torch.arange(32, device=device)[None]
    if folder:
        return model(input_ids=ids, labels=ids).loss
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
          "bf16": {"enabled": bool(folder)}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
"""

FINISH = """
if on_gpu:
    torch.cuda.synchronize()
mark("first step")
print(json.dumps(marks), flush=True)
os._exit(0)
"""

STRATA = """
import strata
if folder:
    mark("packages")
    engine, *_ = strata.load_pretrained(folder, CONFIG)
    engine.train()
else:
    mark("packages")
    engine, *_ = strata.initialize(model=build(), config=CONFIG)
mark("ready")
engine.backward(loss_of(engine))
engine.step()
"""

DEEPSPEED = """
import deepspeed
if folder:
    import transformers
mark("packages")
if not on_gpu:
    CONFIG["optimizer"]["params"]["torch_adam"] = True
model = build()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
mark("ready")
engine.backward(loss_of(engine))
engine.step()
"""

FSDP2 = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
if folder:
    import transformers
mark("packages")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
model = build()
for block in (model.model.layers if folder else model):
    fully_shard(block, mesh=dist.device_mesh.init_device_mesh(device.type, (world,)))
fully_shard(model, mesh=dist.device_mesh.init_device_mesh(device.type, (world,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
mark("ready")
loss_of(model).backward()
optimizer.step()
"""

PLAIN = """
if folder:
    import transformers
mark("packages")
model = build().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
mark("ready")
loss_of(model).backward()
optimizer.step()
"""

ENGINES = {"plain": PLAIN, "strata": STRATA, "fsdp2": FSDP2, "deepspeed": DEEPSPEED}


def run(engine, world, device, model, base):
    """{mark: seconds since exec} of the last rank; ``base``: environment of its process, to which more is added.

    Raises:
        RuntimeError: a rank failed; with the end of what it said.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = 1 if engine == "plain" else world
    of_job = {
        **base, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "DEVICE": device, "MODEL": model or "", "DS_ACCELERATOR": device, "OMP_NUM_THREADS": "1",
    }
    script, ranks = COMMON + ENGINES[engine] + FINISH, []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "STARTED": repr(time.time())}
        ranks.append(subprocess.Popen([sys.executable, "-c", script], env={**of_job, **own}, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    told = [(rank.communicate(), rank.returncode) for rank in ranks]
    for (_, errors), status in told:
        if status:
            raise RuntimeError(f"{engine} failed: {errors[-2000:]}")
    marks = [json.loads(output.splitlines()[-1]) for (output, _), _ in told]
    return {name: max(of_rank[name] for of_rank in marks) for name in MARKS}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", help="a folder with config.json and safetensors; default: a small model")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as-installed", action="store_true", help="compile no modules beforehand")
    parser.add_argument("--json", help="where the figures go, besides the table")
    arguments = parser.parse_args()
    taken = {engine: [] for engine in arguments.engines}
    print(installed_state(), flush=True)
    with environment(arguments.as_installed) as base:
        for _ in range(1 + arguments.rounds):
            for engine, turns in taken.items():
                turns.append(run(engine, arguments.world, arguments.device, arguments.model, base))
    taken = {engine: turns[1:] for engine, turns in taken.items()}
    medians = {e: {m: statistics.median(turn[m] for turn in turns) for m in MARKS} for e, turns in taken.items()}
    show([["s since exec", *MARKS]] + [[e, *(f"{marks[m]:.2f}" for m in MARKS)] for e, marks in medians.items()])
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"medians": medians, "turns": taken}, file, indent=1)


if __name__ == "__main__":
    main()
