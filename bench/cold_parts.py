"""The parts of a cold start of ``strata.load_pretrained`` on one GPU, measured one by one, and a timeline.

    python bench/cold_parts.py MODEL_DIR [--rounds 2] [--as-installed]

Each line is of fresh processes, medians over rounds. *Parts*: the work that a start does once per process; each part
begins after those above it and is waited for. *Timeline*: seconds since exec at which the phases of one start began,
its first steps, the work beside it, and the longest imports. *Warmed before*: the same after kernels of torch have run.
*Not warmed*: a start that loads nothing for the first step. The difference of the two is the share of loading in the
first step. *Imports*: seconds of importing the model's class after torch, by the package whose modules run.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time

from compiled_modules import environment, installed_state
from tables import show

COMMON = """
import json, os, sys, time
started, folder = float(os.environ["STARTED"]), os.environ["MODEL"]
marks = {}
def mark(name):
    while name in marks:
        name += "'"
    marks[name] = time.time() - started
def warm(device, mark=lambda name: None):
    F = torch.nn.functional
    def run(name, call):
        result = call()
        torch.cuda.synchronize()
        mark(name)
        return result
    x = torch.ones(1, 32, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
    w = torch.ones(256, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
    table = torch.ones(64, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
    ids = torch.arange(32, device=device)[None]
    y = run("matmul", lambda: F.linear(x, w))
    y = run("norm", lambda: y * torch.rsqrt(y.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(y.dtype))
    y = run("silu", lambda: F.silu(y) * y + F.embedding(ids, table))
    def rotated(q):
        a, b = q[..., :64], q[..., 64:]
        return torch.cat((-b, a), dim=-1) * q.cos() + q * q.sin()
    q = run("rotary", lambda: rotated(y.view(1, 32, 2, 128).transpose(1, 2)))
    y = run("attention", lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    y = y.transpose(1, 2).reshape(1, 32, 256)
    loss = run("loss", lambda: F.cross_entropy(F.linear(y, w).float().flatten(0, 1), ids.flatten()))
    run("backward", loss.backward)
import torch
mark("torch")
"""

FINISH = """
print(json.dumps(marks), flush=True)
os._exit(0)
"""

PARTS = """
import gc
gc.disable()
import strata, strata.pretrained
from strata import _C
mark("import strata")
_C.usable_gpus()
mark("driver")
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
mark("set_device")
torch.cuda.synchronize()
mark("synchronize")
runtime = _C.Runtime(device, None, 1)
mark("kernels of Strata")
torch.empty(48 << 20, dtype=torch.uint8, pin_memory=True)
mark("48 MiB pinned")
strata.init_distributed()
mark("process group")
torch.zeros(1, device=device)
torch.cuda.synchronize()
mark("first kernel")
warm(device, mark)
_C.Checkpoint(folder).tensors()
mark("headers")
import transformers
mark("import transformers")
from transformers.models.qwen3 import modeling_qwen3
mark("import model class")
config = transformers.AutoConfig.from_pretrained(folder)
mark("read config.json")
from strata.checkpoint.load_plan import build_model
model, _ = build_model(modeling_qwen3.Qwen3ForCausalLM, config, torch.bfloat16, {})
mark("build model")
"""

TIMELINE = """
import contextlib
import strata.pretrained
from strata.views.start_up import StartUpClock
mark("import strata")
phase = StartUpClock.phase
@contextlib.contextmanager
def noted(self, name):
    mark(name + " begins")
    with phase(self, name):
        yield
    mark(name + " ends")
StartUpClock.phase = noted
watched = {"transformers", "transformers.modeling_utils", "torch._dynamo", "sympy", "torch.distributed.tensor",
           "transformers.models.qwen3.modeling_qwen3"}
def hook(event, arguments):
    if event == "import" and arguments[0] in watched and not arguments[0] + " imported" in marks:
        mark(arguments[0] + " imported")
sys.addaudithook(hook)
def note_ends(name):
    call = getattr(strata.pretrained, name)
    def noted(*arguments):
        mark(name + " begins")
        try:
            return call(*arguments)
        finally:
            mark(name + " ends")
    setattr(strata.pretrained, name, noted)
for name in ("open_runtime", "warm_up", "_open", "_import_class", "_build_flat", "_plan"):
    if hasattr(strata.pretrained, name):
        note_ends(name)
if os.environ["WARMED"] == "never":
    strata._C.warm_up = lambda *arguments: None
if os.environ["WARMED"] == "before":
    torch.cuda.set_device(0)
    warm(torch.device("cuda", 0))
    mark("warmed")
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
          "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
engine, *_ = strata.load_pretrained(folder, CONFIG)
engine.train()
mark("ready")
ids = torch.arange(32, device=engine.device)[None]
for turn in range(3):
    loss = engine(input_ids=ids, labels=ids).loss
    mark("forward called")
    torch.cuda.synchronize()
    mark("forward over")
    engine.backward(loss)
    mark("backward called")
    torch.cuda.synchronize()
    mark("backward over")
    engine.step()
    mark("step called")
    torch.cuda.synchronize()
    mark("step over")
marks["init_report"] = engine.init_report
"""


def run(script, model, base, warmed=""):
    """Runs the script and returns its ``marks``.

    Raises:
        RuntimeError: the script failed; with the end of its output.
    """
    own = {**base, "MODEL": model, "WARMED": warmed, "OMP_NUM_THREADS": "1",
           "STARTED": repr(time.time())}
    result = subprocess.run([sys.executable, "-c", COMMON + script + FINISH], env=own, text=True,
                            capture_output=True, check=False)
    if result.returncode:
        raise RuntimeError(f"a start failed: {result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def imports_by_package(base):
    """[(package, seconds, modules)] of importing the model's class after torch, the longest first."""
    script = "import gc, torch; gc.disable()\nfrom transformers.models.qwen3 import modeling_qwen3"
    told = subprocess.run([sys.executable, "-X", "importtime", "-c", script], env=base, text=True,
                          capture_output=True, check=True).stderr
    taken = {}
    for line in told[told.rindex(" torch\n"):].splitlines():
        entry = re.match(r"import time: +([0-9]+) \| +[0-9]+ \| +([^ .]+)", line)
        if entry:
            seconds, modules = taken.get(entry[2], (0.0, 0))
            taken[entry[2]] = seconds + int(entry[1]) * 1e-6, modules + 1
    return sorted(((name, *both) for name, both in taken.items()), key=lambda entry: -entry[1])


def medians(turns):
    return {name: statistics.median(turn[name] for turn in turns if name in turn) for name in turns[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder with config.json and safetensors of Qwen3")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--as-installed", action="store_true", help="compile no modules beforehand")
    parser.add_argument("--json", help="where all figures go")
    arguments = parser.parse_args()
    parts, plain, warmed, unwarmed = [], [], [], []
    print(installed_state(), flush=True)
    with environment(arguments.as_installed) as base:
        for script in (PARTS, TIMELINE):  # brings files into the page cache, and compiles modules
            run(script, arguments.model, base)
        for _ in range(arguments.rounds):
            parts.append(run(PARTS, arguments.model, base))
            plain.append(run(TIMELINE, arguments.model, base))
            warmed.append(run(TIMELINE, arguments.model, base, "before"))
            unwarmed.append(run(TIMELINE, arguments.model, base, "never"))
        imports = imports_by_package(base)
    reports = [turn.pop("init_report") for turn in plain + warmed + unwarmed]
    middle, before, lines = medians(parts), 0.0, []
    for name, at in middle.items():
        lines.append([name, f"{at - before:.3f}"])
        before = at
    show([["part", "seconds"], *lines])
    one, others, before, lines = medians(plain), [medians(warmed), medians(unwarmed)], 0.0, []
    for name, at in sorted(one.items(), key=lambda item: item[1]):
        compared = [f"{other[name]:.3f}" if name in other else "" for other in others]
        lines.append([name, f"{at:.3f}", f"{at - before:.3f}", *compared])
        before = at
    show([["timeline", "s since exec", "after the last", "warmed before", "not warmed"], *lines])
    show([["package", "seconds", "modules"],
          *([name, f"{seconds:.3f}", str(modules)] for name, seconds, modules in imports[:12]),
          ["all", f"{sum(entry[1] for entry in imports):.3f}", str(sum(entry[2] for entry in imports))]])
    phases = reports[0]["phases"]
    show([["phase of init_report", "seconds", "GB"],
          *([p["name"], f"{p['seconds']:.3f}", f"{p['bytes'] * 1e-9:.2f}"] for p in phases)])
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"parts": parts, "timeline": plain, "warmed": warmed, "unwarmed": unwarmed,
                       "imports": imports, "reports": reports}, file, indent=1)


if __name__ == "__main__":
    main()
