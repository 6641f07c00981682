"""A step whose optimizer states rest on the host or on a drive: Strata and DeepSpeed, beside one that offloads nothing.

    python bench/bench_offload.py [--config MODEL_DIR] [--stage 3] [--steps 6] [--tokens 2048] [--drive DIR] \
        [--engines "strata none" "strata cpu" "strata nvme" "deepspeed cpu" "deepspeed nvme"] [--rounds 2] [--json FILE]

One rank, in fresh processes, in turns: a causal language model of transformers with random weights in bf16, of the
shapes that MODEL_DIR/config.json names (without it a small one). *ready*: seconds of initialize alone. *step*: the
median after two warm ones. *device*: the most that torch and the engine held. *locked*: pinned host memory. Medians
over rounds. With "params" behind an engine's name ("strata nvme params") its weights are offloaded, too. DeepSpeed
compiles its host optimizer at first use, before the clock starts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

from tables import show

COMMON = """
import json, os, sys, time
import torch, transformers
place, folder, stage = os.environ["PLACE"], os.environ["FOLDER"], int(os.environ["STAGE"])
tokens, steps = int(os.environ["TOKENS"]), int(os.environ["STEPS"])
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"])
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
CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
          "zero_optimization": {"stage": stage, "offload_optimizer": {"device": place, "nvme_path": folder,
              "buffer_count": 5, "pin_memory": True, "pipeline_read": True, "pipeline_write": True}}}
if place == "none":
    del CONFIG["zero_optimization"]["offload_optimizer"]
if os.environ["PARAMS"]:
    CONFIG["zero_optimization"]["offload_param"] = {"device": place, "nvme_path": folder, "buffer_count": 5,
        "buffer_size": int(os.environ["PARAM_BUFFER"]), "pin_memory": True}
ids = torch.randint(0, shapes.vocab_size, (1, tokens), device=device)
def locked():
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return max(int(status["VmLck"].split()[0]), int(status["VmPin"].split()[0])) * 1024
told = {"elements": elements}
"""

STRATA = """
import strata
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
times = []
for step in range(steps + 2):
    if on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    if on_gpu:
        torch.cuda.synchronize()
    times.append(time.perf_counter() - began)
told["step"] = sorted(times[2:])[steps // 2]
told["loss"] = loss.item()
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
    name, place, *params = engine.split()
    script = COMMON + (STRATA if name == "strata" else DEEPSPEED) + STEPS
    environment = {
        **os.environ, "PLACE": place, "FOLDER": drive, "STAGE": str(arguments.stage), "MODEL": arguments.config or "",
        "BUFFER": str(arguments.buffer), "PARAMS": " ".join(params),
        "PARAM_BUFFER": str(arguments.param_buffer), "TOKENS": str(arguments.tokens), "STEPS": str(arguments.steps),
        "PORT": str(port),
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, text=True, capture_output=True,
                          timeout=arguments.timeout, check=False)
    if done.returncode:
        raise RuntimeError(f"{engine} failed: {done.stderr[-1500:]}")
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


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
                found[engine].append(run(engine, arguments, arguments.drive, 29600 + round_number * 16 + index))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"not measured: {engine}: {error}", file=sys.stderr)
    rows = []
    for engine, runs in found.items():
        if runs:
            middle = {key: statistics.median(told[key] for told in runs) for key in runs[0] if key != "report"}
            held = max(middle["locked"], middle.get("pinned", 0))
            rows.append([engine, f"{middle['ready']:.2f}", f"{middle['step']:.3f}", f"{middle['device'] / 1e9:.2f}",
                         f"{held / 1e9:.2f}", f"{middle['loss']:.4f}"])
    show([["engine", "ready, s", "step, s", "device, GB", "locked, GB", "loss"], *rows])
    show([["engine", "link", "GB a step", "GB/s", "limit", "busy, s", "waited, s"],
          *(row for engine, runs in found.items() if runs for row in link_rows(engine, runs[-1].get("report")))])
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1, default=str)


if __name__ == "__main__":
    main()
