"""Trains a small byte-level Qwen3 on the source text of Python's standard library, sharded over ranks.

    torchrun --nproc-per-node 2 examples/train_stdlib.py [--config examples/ds_config.json]
    torchrun --nproc-per-node 1 examples/train_stdlib.py --resume --steps 20

In order: a checkpoint of random weights is written as any Hugging Face checkpoint is; every rank reads
its own shard of it; the model is trained under the DeepSpeed JSON, generates a sample and is saved, once as a
checkpoint that training goes on from and once for plain transformers, which loads it and must find the loss
that the engine finds. With --resume training goes on from the checkpoint, on whatever number of ranks, and must find
the loss that was saved with it. Exits with 1 where a loss is another, or did not fall. Everything is in demo_out/.
"""

import argparse
import json
import logging
import math
import os
import sys
import sysconfig
import time
import warnings
from pathlib import Path

# If DeepSpeed is installed, transformers imports it, and it warns of a missing GPU.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging as transformers_logging

import strata

SAMPLE_PROMPT = b"def "


def model_config():
    """A Qwen3 of 6.4 M parameters."""
    return Qwen3Config(
        vocab_size=256,  # a token is a byte
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def write_initial_checkpoint(folder, dtype):
    """The model with random weights, as config.json and safetensors; returns the number of its parameters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(), dtype=dtype)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def read_standard_library(max_bytes=16 << 20):
    """(training text, held-out text) as uint8 tensors: modules at the top of the library, by name."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)[:max_bytes]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    held_out = len(data) // 20
    return data[:-held_out], data[-held_out:]


def draw_batch(text, generator, size, length):
    """``size`` random windows of ``length`` bytes, as tokens."""
    starts = torch.randint(len(text) - length, (size,), generator=generator)
    return torch.stack([text[s : s + length] for s in starts.tolist()]).long()


def total_over_ranks(value):
    """The sum of every rank's ``value``."""
    total = torch.tensor(float(value), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item()


def evaluate(model, batch):
    """The mean loss over a batch, in nats a byte."""
    model.eval()
    with torch.no_grad():
        loss = model(input_ids=batch, labels=batch).loss.item()
    model.train()
    return loss


def mib(count):
    """Bytes as text in MiB."""
    return f"{count / 2**20:.1f} MiB" if count else "-"


def held(engine):
    """Bytes that this rank holds now, in all tiers."""
    return sum(bytes_now for (_, kind), (bytes_now, _) in engine.memory_report().items() if kind == "total")


def place(engine):
    """The name of rank 0's device."""
    return torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "the CPU"


def dtype_of(engine):
    """torch's name of the weights' dtype."""
    return str(next(engine.module.parameters()).dtype).removeprefix("torch.")


def show_memory(console, engine, parameters):
    """Prints the bytes that rank 0 holds, by tier and kind, now and at the peak."""
    table = Table("tier", "kind", box=box.SIMPLE_HEAD)
    for column in ("now", "peak"):
        table.add_column(column, justify="right")
    for (tier, kind), (bytes_now, peak) in engine.memory_report().items():
        if peak and kind != "total":
            table.add_row(tier, kind, mib(bytes_now), mib(peak))
    dtype = dtype_of(engine)
    whole = mib(parameters * getattr(torch, dtype).itemsize)
    console.print(
        f"\n[bold]memory[/bold] of rank 0 of {engine.world_size}; the whole weights in {dtype} would be {whole}",
        highlight=False,
    )
    console.print(table)


def train(engine, text, steps, length, console):
    """Runs ``steps`` optimizer steps; returns the mean loss over ranks of each. Its progress fits 80 columns."""
    generator = torch.Generator().manual_seed(1 + engine.global_rank)
    micro_batch, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    tokens_a_step = engine.train_batch_size() * length
    columns = (
        TextColumn("step"),
        BarColumn(bar_width=14),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeRemainingColumn(),
    )
    losses = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps, now="")
        for _ in range(steps):
            begin, total = time.perf_counter(), 0.0
            for _ in range(accumulation):
                batch = draw_batch(text, generator, micro_batch, length)
                loss = engine(input_ids=batch, labels=batch).loss
                engine.backward(loss)
                engine.step()
                total += loss.item() / accumulation
            losses.append(total_over_ranks(total) / engine.world_size)
            rate = tokens_a_step / (time.perf_counter() - begin)
            now = f"loss {losses[-1]:.3f}  {rate:,.0f} tokens/s  {mib(held(engine))}"
            progress.update(task, advance=1, now=now)
    return losses


def generate(engine, prompt, tokens=160):
    """The text that the model generates after ``prompt``; every rank takes part and gets the same text."""
    engine.eval()
    torch.manual_seed(0)
    ids = torch.tensor([list(prompt)])
    output = engine.module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=True,
        temperature=0.6,
        top_k=20,
    )
    engine.train()
    return bytes(output[0].tolist()).decode("utf-8", errors="replace")


def mean_of(losses, count=10):
    """The mean of a few losses."""
    return sum(losses) / max(1, len(losses[:count]))


def show_curve(console, losses):
    """The losses as one line of bars, and their ends: at most 79 columns."""
    bars, width = "▁▂▃▄▅▆▇█", 58
    stride = math.ceil(len(losses) / width)
    means = [mean_of(losses[i : i + stride], stride) for i in range(0, len(losses), stride)]
    low, high = min(means), max(means)
    line = "".join(bars[round(7 * (m - low) / ((high - low) or 1.0))] for m in means)
    console.print(f"loss  {losses[0]:.3f} [cyan]{line}[/cyan] {losses[-1]:.3f}", highlight=False)


def quiet():
    """Libraries log errors only; ranks other than 0 log nothing."""
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.basicConfig(level=logging.WARNING)


def read_config(path):
    """The configuration, as a dict. Leaves bf16 out on a CPU without instructions for it, where bf16 takes ten times as
    long as fp32."""
    config = json.loads(Path(path).read_text())
    if not torch.cuda.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        config.pop("bf16", None)
    return config


def parse_arguments():
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(here / "ds_config.json"), help="DeepSpeed JSON")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--length", type=int, default=128, help="bytes of one sample")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder that is written")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint that an earlier run saved")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    quiet()
    began = time.perf_counter()
    strata.init_distributed()
    rank = int(os.environ.get("RANK", "0"))
    console = Console(quiet=rank != 0)

    initial, trained, checkpoints = (arguments.out / name for name in ("initial", "trained", "checkpoints"))
    config = read_config(arguments.config)
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    parameters = 0
    if rank == 0 and not arguments.resume:
        parameters = write_initial_checkpoint(initial, dtype)
    parameters = int(total_over_ranks(parameters))
    engine, _, _, _ = strata.load_pretrained(str(initial), config)
    engine.train()
    text, held_out = read_standard_library()
    if arguments.resume:
        good = resume(console, engine, checkpoints, text, held_out, arguments.steps)
        engine.destroy()
        return 0 if good else 1
    ranks = name_ranks(engine)
    console.print(
        f"[bold]Qwen3, {parameters / 1e6:.1f} M parameters[/bold] in {dtype_of(engine)}, "
        f"{len(text) / 1e6:.1f} MB of text\n"
        f"ZeRO stage {engine.zero_optimization_stage()}, {ranks} on {place(engine)} over {engine.collectives_name}",
        highlight=False,
    )

    losses = train(engine, text, arguments.steps, arguments.length, console)
    show_curve(console, losses)
    show_memory(console, engine, parameters)
    console.print("[bold]sample[/bold]")
    console.print(generate(engine, SAMPLE_PROMPT), markup=False, highlight=False, style="green")

    batch = draw_batch(held_out, torch.Generator().manual_seed(0), 16, arguments.length)
    under_engine = evaluate(engine, batch)
    begin = time.perf_counter()
    engine.save_checkpoint(checkpoints, client_state={"held_out": under_engine, "length": arguments.length})
    console.print(f"\ncheckpoint of {ranks} after step {engine.global_steps} in {checkpoints}, written in "
                  f"{time.perf_counter() - begin:.1f} s", highlight=False)
    engine.save_pretrained(str(trained))
    good = True
    if rank == 0:
        good = check(console, trained, batch, under_engine, losses)
        console.print(f"[dim]{time.perf_counter() - began:.0f} s in all[/dim]", highlight=False)
    failed = total_over_ranks(0 if good else 1) > 0
    engine.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if failed else 0


def name_ranks(engine):
    """The number of ranks, in words."""
    return "1 rank" if engine.world_size == 1 else f"{engine.world_size} ranks"


def resume(console, engine, folder, text, held_out, steps):
    """Loads the newest checkpoint of another run; returns whether it gives the loss that was saved with it."""
    path, saved = engine.load_checkpoint(folder)
    if path is None:
        console.print(f"there is no checkpoint in {folder}; run the script without --resume first")
        return False
    batch = draw_batch(held_out, torch.Generator().manual_seed(0), 16, saved["length"])
    under_engine = evaluate(engine, batch)
    # Another device or dtype computes the same loss, except for rounding.
    same = abs(under_engine - saved["held_out"]) <= 1e-2 * saved["held_out"]
    console.print(
        f"resumed by {name_ranks(engine)} after step {engine.global_steps}: held-out loss {under_engine:.4f}, saved "
        f"{saved['held_out']:.4f}: "
        + ("[bold green]equal[/bold green]" if same else "[bold red]NOT equal[/bold red]"),
        highlight=False,
    )
    losses = train(engine, text, steps, saved["length"], console)
    console.print(f"went on to step {engine.global_steps}: loss {mean_of(losses[-10:]):.3f}", highlight=False)
    return same


def check(console, folder, batch, under_engine, losses):
    """Whether plain transformers computes the engine's loss from the saved model, and the loss fell."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    loaded = evaluate(plain, batch)
    same = abs(loaded - under_engine) <= 1e-3 * under_engine
    console.print(
        f"saved to {folder}\nheld-out loss: engine {under_engine:.4f}, plain transformers {loaded:.4f}: "
        + ("[bold green]equal[/bold green]" if same else "[bold red]NOT equal[/bold red]"),
        highlight=False,
    )
    fell = mean_of(losses[-10:]) < 0.8 * mean_of(losses)
    if not fell:
        console.print("[bold red]the loss did not fall[/bold red]")
    return same and fell


if __name__ == "__main__":
    sys.exit(main())
