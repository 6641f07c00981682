"""GRPO with PEFT and TRL, its weights on a drive, started by `accelerate launch`: a setup that fails under DeepSpeed.

    python bench/nvme_story.py [--full] [--steps 4] [--buffers 5] [--drive DIR] [--device cuda] [--json FILE]

``nvme_story_script.py`` trains Qwen3-0.6B's shapes (--full; else small ones) with random weights, written beforehand
with a tokenizer of its own, on one GPU or the CPU. Weights rest on the drive behind --buffers buffers of 4,194,304
elements (65,536 for the small model), fewer and smaller than its weights need; states lie on the host. With --engines
deepspeed it starts the same job under DeepSpeed, which ends with an error.

*ready*: seconds from the script's first line until training begins. Every second step generates. *device*: bytes of the
GPU in use beyond those before, as its driver counts them, and as torch counts them.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path

import make_model
from safetensors.torch import load_file
from story_jobs import GIB, Failed, accelerate_launch, environment_of, run_job, with_compatibility
from tables import show

SCRIPT = Path(__file__).with_name("nvme_story_script.py")
ADAPTER = "adapter_model.safetensors"
GENERATIONS = 2


def config_of(drive, buffers, elements):
    """The JSON."""
    return {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "memory_efficient_linear": True,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_param": {"device": "nvme", "nvme_path": drive, "pin_memory": True, "buffer_count": buffers,
                              "buffer_size": elements},
            "offload_optimizer": {"device": "cpu", "nvme_path": drive, "pin_memory": True},
        },
        "aio": {"block_size": 1048576, "queue_depth": 32, "intra_op_parallelism": 4, "single_submit": False,
                "overlap_events": True},
    }  # fmt: skip


def write_tokenizer(folder, vocabulary):
    """Writes a tokenizer of ``vocabulary`` tokens, the first 256 of which are bytes; a newline ends a text, and 0
    pads."""
    sys.path.insert(0, str(SCRIPT.parent.parent / "examples"))
    from library_text import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f" word{number}" for number in range(len(tokenizer), vocabulary)])
    tokenizer.save_pretrained(folder)


def write_model(folder, full, device):
    """Weights and the tokenizer; how many elements they are."""
    config = make_model.make_config("qwen3-0.6b" if full else "small")
    config.eos_token_id, config.pad_token_id = ord("\n"), 0
    _, size = make_model.write_checkpoint(config, folder, device=device)
    write_tokenizer(folder, config.vocab_size)
    return size // make_model.BF16


def run(engine, a, folder):
    """The Outcome of the job in ``folder``.

    Raises:
        Failed: it ended with an error.
    """
    drive = Path(a.drive or folder) / "nvme-story"
    drive.mkdir(exist_ok=True)
    config = config_of(str(drive), a.buffers, 4194304 if a.full else 65536)
    environment = environment_of(a.device, os.environ)
    if engine == "strata":
        environment = with_compatibility(environment, folder / "site")
    command = [*accelerate_launch(folder, config, 1), SCRIPT]
    command += [folder / "model", folder / "out", drive, a.steps, GENERATIONS, a.tokens]
    command += ["cpu"] if a.device == "cpu" else []
    return run_job(command, environment, int(a.device == "cuda"), a.timeout)


def figures_of(outcome, elements, adapter):
    """{figure: value}.

    Args:
        elements: of the model.
        adapter: path of the file in which it was saved.

    Raises:
        Failed: the job did not do what it should have done.
    """
    (start,) = (line for line in outcome.told if "ready" in line)
    steps = [line for line in outcome.told if "step" in line]
    (end,) = (line for line in outcome.told if "torch_peak" in line)
    memory = outcome.memory
    if start["nvme_bytes"] < make_model.BF16 * elements:
        raise Failed(f"{start['nvme_bytes']} bytes lie on the drive, of {elements} weights")
    if not steps or not all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in steps):
        raise Failed(f"these steps train nothing: {steps}")
    still = [name for name, value in load_file(adapter).items() if not value.abs().sum() > 0]
    if still:
        raise Failed(f"of the adapter, {still} are what they were")
    seen = {"host": memory.largest, "device": memory.device, "command": outcome.seconds}
    return start | end | seen | {"elements": elements, "steps": steps}


def print_figures(figures):
    rows = [["step", "s", "loss", "gradient norm", "reward", "read, MB", "written, MB"]]
    for line in figures["steps"]:
        links = [f"{line[name] / 1e6:.3f}" if name in line else "not told" for name in ("read_bytes", "write_bytes")]
        reward = "" if line["reward"] is None else f"{line['reward']:.3f}"  # of a step that generates
        numbers = [f"{line['seconds']:.2f}", f"{line['loss']:.3e}", f"{line['grad_norm']:.3e}", reward]
        rows.append([str(line["step"]), *numbers, *links])
    show(rows)
    files = f"{figures['nvme_bytes'] / 1e6:,.3f} MB in {figures['nvme_files']} files"
    print(f"on NVMe: {files}; ready in {figures['ready']:.1f} s, the whole command {figures['command']:.1f} s")
    print(f"device {figures['device'] / GIB:.2f} GiB, as torch counts {figures['torch_peak'] / GIB:.2f}; host "
          f"{figures['host'] / GIB:.2f} GiB of anonymous and shared memory, at the most")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="Qwen3-0.6B's shapes; else small ones")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="of a completion")
    parser.add_argument("--buffers", type=int, default=5)
    parser.add_argument("--drive", help="a folder on it; default: among temporary files")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--engines", nargs="+", choices=["strata", "deepspeed"], default=["strata"])
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that a job may take")
    parser.add_argument("--json", type=Path, help="where the figures go, besides the table")
    a = parser.parse_args()
    if a.device is None:
        import torch

        a.device = "cuda" if torch.cuda.is_available() else "cpu"
    told = {}
    with tempfile.TemporaryDirectory(prefix="nvme-story-") as scratch:
        elements = write_model(Path(scratch) / "model", a.full, a.device)
        for engine in a.engines:
            try:
                outcome = run(engine, a, Path(scratch))
                told[engine] = figures_of(outcome, elements, Path(scratch, "out", "adapter", ADAPTER))
                print(f"{engine}: deepspeed {told[engine]['library']}, {elements:,} weights, {a.buffers} buffers")
                print_figures(told[engine])
            except Failed as error:
                told[engine] = str(error)
                print(f"FAILED: {engine}: {error}", flush=True)
    if a.json:
        a.json.write_text(json.dumps(told, indent=1))
    return 1 if any(isinstance(figures, str) for figures in told.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
