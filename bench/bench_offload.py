"""A step whose optimizer states rest on the host or on a drive: Strata and DeepSpeed, beside one that offloads nothing.

    python bench/bench_offload.py [--config MODEL_DIR] [--stage 3] [--steps 6] [--tokens 2048] [--drive DIR] \
        [--ranks 1] [--micro 1] [--clipping 1.0] [--rounds 2] [--json FILE] \
        [--engines "strata none" "strata cpu" "strata nvme" "deepspeed cpu" "deepspeed nvme" "deepspeed cpu super"]

Ranks in fresh processes, an engine's after another's: a causal language model of transformers with random weights in
bf16, of the shapes that MODEL_DIR/config.json names (without it a small one). *ready*: seconds of initialize alone.
*step*: the mean of --steps steps after four warm ones (DeepSpeed's: two), timed as one span, since an update may go on
beside the next forward; fewer steps, if --timeout is near. *device*: what is in use at the end; *locked*: pinned host
memory; both of rank 0. Medians over rounds. With "params" behind an engine's name ("strata nvme params") its weights
are offloaded, too; with "super" DeepSpeed's super_offload is on; "ratio=0.5" is offload_optimizer.ratio, "cache=0"
strata.state_cache. DeepSpeed compiles its host optimizer at first use, before the clock starts.

On a GPU "strata none" also measures what the machine allows: both ways of the link and the host's memory, all at once.
*limit*: with that, a step whose states are all on the host ("cache=0") takes at least its backward, and then the longer
one of the next forward and the update, with the best share of the update for the GPU and for the cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from tables import show

COMMON = """
import json, os, sys, time
deadline = time.perf_counter() + 0.8 * float(os.environ["TIMEOUT"])
import torch, transformers
place, folder, stage = os.environ["PLACE"], os.environ["FOLDER"], int(os.environ["STAGE"])
tokens, steps = int(os.environ["TOKENS"]), int(os.environ["STEPS"])
on_gpu = torch.cuda.is_available()
rank = int(os.environ["RANK"])
device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
if os.environ["MODEL"]:
    shapes = transformers.AutoConfig.from_pretrained(os.environ["MODEL"])
else:
    shapes = transformers.Qwen3Config(vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True)
torch.manual_seed(0)
with device:
    model = transformers.AutoModelForCausalLM.from_config(shapes, dtype=torch.bfloat16)
model.gradient_checkpointing_enable()
elements = sum(p.numel() for p in model.parameters())
micro = int(os.environ["MICRO"])
CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro, "bf16": {"enabled": True},
          "gradient_clipping": float(os.environ["CLIPPING"]),
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
          "zero_optimization": {"stage": stage, "offload_optimizer": {"device": place, "nvme_path": folder,
              "buffer_count": 5, "pin_memory": True, "pipeline_read": True, "pipeline_write": True}}}
if place == "none":
    del CONFIG["zero_optimization"]["offload_optimizer"]
words = os.environ["WORDS"].split()
for word in words:
    if word == "super":
        CONFIG["zero_optimization"]["offload_optimizer"]["super_offload"] = True
    if word.startswith("ratio="):
        CONFIG["zero_optimization"]["offload_optimizer"]["ratio"] = float(word[6:])
    if word.startswith("cache="):
        CONFIG["strata"] = {"state_cache": int(word[6:])}
if "params" in words:
    CONFIG["zero_optimization"]["offload_param"] = {"device": place, "nvme_path": folder, "buffer_count": 5,
        "buffer_size": int(os.environ["PARAM_BUFFER"]), "pin_memory": True}
ids = torch.randint(0, shapes.vocab_size, (1, tokens), device=device)
def locked():
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return max(int(status["VmLck"].split()[0]), int(status["VmPin"].split()[0])) * 1024
told = {"elements": elements // int(os.environ["WORLD_SIZE"])}  # of this rank's shard
"""

STRATA = """
import strata
def machine_speed(seconds=1.0, size=2**28):
    # GB/s up, down, and of the host's memory, with copies both ways and a kernel on most cores at once.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // int(os.environ["WORLD_SIZE"]) - 2))
    host = [torch.empty(size, dtype=torch.uint8).pin_memory() for _ in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    values = torch.ones(2**29)
    streams = [torch.cuda.Stream() for _ in range(2)]
    pieces = [[], []]
    began = time.perf_counter()
    kernel = 0
    def fill(way):
        while sum(not event.query() for event in pieces[way]) < 4:
            with torch.cuda.stream(streams[way]):
                (there[0] if way == 0 else host[1]).copy_(host[0] if way == 0 else there[1], non_blocking=True)
                pieces[way].append(torch.cuda.Event())
                pieces[way][-1].record()
    while time.perf_counter() - began < seconds:
        fill(0), fill(1)
        values[kernel % 8 * 2**26:(kernel % 8 + 1) * 2**26].mul_(1.0)
        kernel += 1
    lasted = time.perf_counter() - began
    up, down = (sum(event.query() for event in each) * size / lasted * 1e-9 for each in pieces)
    return [up, down, up + down + kernel * 2**26 * 8 / lasted * 1e-9]
CONFIG["zero_optimization"].get("offload_optimizer", {})["buffer_size"] = int(os.environ["BUFFER"])
started = time.perf_counter()
engine, *_ = strata.initialize(model=model, config=CONFIG)
"""

DEEPSPEED = """
import deepspeed
if place != "none":
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
    CPUAdamBuilder().load()
    if place == "nvme":
        AsyncIOBuilder().load()
started = time.perf_counter()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
"""

STEPS = """
if on_gpu:
    torch.cuda.synchronize()
told["ready"] = time.perf_counter() - started
WARM = 4 if hasattr(engine, "step_report") else 2  # the state cache waits some steps
for step in range(WARM + steps):
    if step == WARM:
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
    elif step > WARM and time.perf_counter() > deadline:
        steps = step - WARM
        break
    for _ in range(micro):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
if on_gpu:
    torch.cuda.synchronize()
told["step"] = (time.perf_counter() - began) / steps
told["steps"] = steps
told["loss"] = loss.item()
if place == "none" and on_gpu and hasattr(engine, "step_report"):
    seen = []
    for _ in range(3):
        parts = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        parts[0].record()
        loss = engine(input_ids=ids, labels=ids).loss
        parts[1].record()
        engine.backward(loss)
        parts[2].record()
        engine.step()
        torch.cuda.synchronize()
        seen.append([parts[i].elapsed_time(parts[i + 1]) / 1e3 for i in range(2)])
    told["forward"], told["backward"] = (min(each[i] for each in seen) for i in range(2))
    told["machine"] = machine_speed()
free, total = torch.cuda.mem_get_info() if on_gpu else (0, 0)
told["device"] = total - free
told["locked"] = locked()
if hasattr(engine, "memory_report"):
    report = engine.memory_report()
    told["pinned"] = report.get(("host", "total"), (0, 0))[1]
    told["report"] = {key: value for key, value in engine.step_report().items() if key != "device_memory"}
    told["report"]["start"] = engine.init_report
print(json.dumps(told, default=str), flush=True)
os._exit(0)
"""


def run(engine, arguments, drive, port):
    """The report that the process of an engine printed."""
    name, place, *words = engine.split()
    script = COMMON + (STRATA if name == "strata" else DEEPSPEED) + STEPS
    environment = {
        **os.environ, "PLACE": place, "FOLDER": drive, "STAGE": str(arguments.stage), "MODEL": arguments.config or "",
        "BUFFER": str(arguments.buffer), "WORDS": " ".join(words),
        "TIMEOUT": str(arguments.timeout), "MICRO": str(arguments.micro), "CLIPPING": str(arguments.clipping),
        "PARAM_BUFFER": str(arguments.param_buffer), "TOKENS": str(arguments.tokens), "STEPS": str(arguments.steps),
        # Its process for updates takes most cores: threads that spin on the few others would stop training.
        **({"OMP_WAIT_POLICY": "PASSIVE"} if "super" in words else {}),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "WORLD_SIZE": str(arguments.ranks), "LOCAL_WORLD_SIZE": str(arguments.ranks),
    }
    ranks = [
        subprocess.Popen([sys.executable, "-c", script], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(arguments.ranks)
    ]  # fmt: skip
    try:
        with ThreadPoolExecutor(arguments.ranks) as readers:
            told = list(readers.map(lambda rank: rank.communicate(timeout=arguments.timeout), ranks))
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, told):
        if rank.returncode:
            raise RuntimeError(f"{engine} failed: {errors[-1500:]}")
    return json.loads([line for line in told[0][0].splitlines() if line.startswith("{")][-1])


# Bytes of each parameter in an update: both ways over the link, and of the host's memory, in the GPU's lane and in that
# of the cores; bf16 weights, fp32 moments, a remainder of 17 bits, gradients of 16 bits on the host.
_STATES = 10.125
_LANES = {"": ((_STATES + 2, _STATES), (2, 2), 2 * _STATES + 2, 2 * _STATES + 10),
          "params": ((_STATES + 4, _STATES + 2), (0, 0), 2 * _STATES + 6, 2 * _STATES + 6)}


def limit_of(none, params):
    """The least seconds of a step whose states, or weights too, are on the host, after a run of "strata none"."""
    up, down, memory = none["machine"]
    device, cores, of_device, of_cores = _LANES["params" if params else ""]
    update = min(
        none["elements"] * 1e-9 * max((share * device[0] + (1 - share) * cores[0]) / up,
                                      (share * device[1] + (1 - share) * cores[1]) / down,
                                      (share * of_device + (1 - share) * of_cores) / memory)
        for share in (part / 100 for part in range(101))
    )  # fmt: skip
    return none["backward"] + max(none["forward"], update)


def link_rows(engine, report):
    """The bytes that the last step moved over each link, from its report."""
    offload = (report or {}).get("offload")
    if not offload:
        return []
    waited = offload["fetch_wait_seconds"] + (offload["copy_wait_seconds"] or 0)
    return [
        [engine, link, f"{use['bytes'] * 1e-9:.2f}", *(f"{use[key] or 0:.2f}" for key in
         ("gb_per_s", "limit_gb_per_s", "seconds")), f"{waited:.2f}"]
        for link, use in offload["links"].items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=1)  # of this host; on GPUs each has one
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--clipping", type=float, default=1.0)
    parser.add_argument("--drive", default=tempfile.gettempdir())
    parser.add_argument("--engines", nargs="+",
                        default=["strata none", "strata cpu", "strata nvme", "deepspeed cpu", "deepspeed nvme"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--buffer", type=int, default=80_000_000)  # elements of each of five; DeepSpeed sizes its own
    parser.add_argument("--param-buffer", type=int, default=160_000_000)  # DeepSpeed's must hold the largest tensor
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    found = {engine: [] for engine in arguments.engines}
    for round_number in range(arguments.rounds):
        for index, engine in enumerate(arguments.engines):
            try:
                told = run(engine, arguments, arguments.drive, 29600 + round_number * 16 + index)
                found[engine].append(told)
                print(f"{engine}: {told['step']:.3f} s, {told['steps']} steps", file=sys.stderr, flush=True)
            except RuntimeError as error:
                print(f"not measured: {engine}: {error}", file=sys.stderr)
            except subprocess.TimeoutExpired:
                print(f"not measured: {engine}: took more than {arguments.timeout:.0f} s", file=sys.stderr)
    rows = []
    for engine, runs in found.items():
        if runs:
            middle = {key: statistics.median(told[key] for told in runs)
                      for key in runs[0] if key not in ("report", "machine")}  # fmt: skip
            held = max(middle["locked"], middle.get("pinned", 0))
            rows.append([engine, f"{middle['ready']:.2f}", f"{middle['step']:.3f}", f"{middle['device'] / 1e9:.2f}",
                         f"{held / 1e9:.2f}", f"{middle['loss']:.4f}"])
    show([["engine", "ready, s", "step, s", "device, GB", "locked, GB", "loss"], *rows])
    show([["engine", "link", "GB a step", "GB/s", "limit", "busy, s", "waited, s"],
          *(row for engine, runs in found.items() if runs for row in link_rows(engine, runs[-1].get("report")))])
    none = next(iter(found.get("strata none", [])), {})
    if "machine" in none:
        up, down, memory = none["machine"]
        print(f"at once: {up:.1f} GB/s up, {down:.1f} down, {memory:.1f} of the host's memory; forward"
              f" {none['forward']:.3f} s, backward {none['backward']:.3f}; limit of a step with one micro-step:"
              f" {limit_of(none, False):.3f} s with states on the host, {limit_of(none, True):.3f} with weights, too")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1, default=str)


if __name__ == "__main__":
    main()
