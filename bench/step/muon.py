"""Muon's steps beside AdamW's: Strata's, DeepSpeed's, and torch.optim.Muon's, which trains on each GPU by itself.

    python bench/step/muon.py --model qwen3-0.6b --world 2 --seq 2048
    python bench/step/muon.py --model qwen3-30b-a3b --layers 8 --world 2

*over AdamW*: a step of Muon less one of AdamW by the same engine. *matrices*: that Newton-Schulz takes in a step, on
all ranks together. *limit*: its operations, 20 s^2 l + 10 s^3 a matrix of sides s <= l, on the rank that has most of
them, at the rate of a product of 8192 x 8192 in the same run. DeepSpeed clips Muon's updates after Newton-Schulz, so
nothing is clipped here unless --clip says so, and its method is "standard", that of the others. torch.optim.Muon keeps
the momentum and updates weights in bf16. It takes matrices alone, so models with fused experts are without it.
"""

import argparse
import math
import sys

import report
import run
import tables
from engines import ADAMW, Engine, Training, build_model, deepspeed, strata
from engine_processes import Skipped

LR, MOMENTUM, WEIGHT_DECAY = 1e-3, 0.95, 0.01
PARAMS = {"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY, "adam_lr": ADAMW["lr"]}
MUON = {"optimizer": {"type": "Muon", "params": PARAMS}}
PRODUCT, PRODUCTS = 8192, 20
HEADINGS = ["engine", "ms/step", "over AdamW ms", "matrices", "limit ms", "of limit", "dev peak", "first loss",
            "last loss"]  # fmt: skip


class Counter:
    """Counts the matrices that a function of a module takes in, and their operations."""

    def __init__(self, module, name):
        self.matrices = self.operations = 0
        function = getattr(module, name)

        def counted(values, *args, **kwargs):
            short, long = sorted(values.shape[-2:])
            count = math.prod(values.shape[:-2])
            self.matrices += count
            self.operations += count * (20 * short**2 * long + 10 * short**3)
            return function(values, *args, **kwargs)

        setattr(module, name, counted)


def counting(training, counter, context, results=None):
    """``training``, which tells of the matrices of its last step. ``results``: a Counter of their results, where the
    function of the first takes in zeros, too, which fill batches."""

    def step(ids):
        before, done = counter.operations, (results or counter).matrices
        loss = training.step(ids)
        context.told.update(matrices=(results or counter).matrices - done, operations=counter.operations - before)
        return loss

    return Training(step, training.account, training.look, training.memory)


def product_rate(device):
    """Operations a second of products in bf16."""
    import torch

    if device.type != "cuda":
        return math.nan
    a, b = (torch.randn(PRODUCT, PRODUCT, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(PRODUCTS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        a @ b
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * PRODUCT**3 / min(times)


def strata_muon(context, **changes):
    from strata.ops import muon

    context.told["product_rate"] = product_rate(context.device)
    counter, results = Counter(muon, "newton_schulz"), Counter(muon, "_replace")
    training = strata(context, **changes)
    return counting(training, counter, context, results)


def deepspeed_muon(context, **changes):
    from deepspeed.runtime.zero.muon import original_muon

    counter = Counter(original_muon, "muon_update")
    return counting(deepspeed(context, **changes), counter, context)


def torch_muon(context):
    """torch.optim.Muon and fused AdamW in bf16."""
    import torch

    model = build_model(context)
    others = [*model.get_input_embeddings().parameters(), *model.get_output_embeddings().parameters()]
    known = {id(p) for p in others}
    hidden = [p for p in model.parameters() if id(p) not in known and p.dim() > 1]
    if any(p.dim() > 2 for p in hidden):
        raise Skipped("torch.optim.Muon takes parameters of two dimensions")
    known = {id(p) for p in hidden}
    settings = {"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
    counter = Counter(torch.optim._muon, "_zeropower_via_newtonschulz")
    optimizers = [
        torch.optim.Muon(hidden, **settings),
        torch.optim.AdamW([p for p in model.parameters() if id(p) not in known], fused=True, **ADAMW),
    ]

    def step(ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return counting(Training(step), counter, context)


def torch_adamw(context):
    """Fused AdamW in bf16."""
    import torch

    model = build_model(context)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Training(step)


def engines_of(a):
    """{name: Engine}, and {name of Muon's: that of AdamW's}."""
    standard = {"optimizer": {"type": "Muon", "params": PARAMS | {"ns_method": "standard"}}}
    found, beside = {}, {}
    for stage in a.stages:
        adam = {"stage": stage}
        found[f"strata-z{stage}"] = Engine("", "strata", strata, adam)
        found[f"strata-z{stage}-muon"] = Engine("", "strata", strata_muon, adam | MUON)
    for stage in a.stages:
        found[f"deepspeed-z{stage}"] = Engine("", "deepspeed", deepspeed, {"stage": stage})
        zero = {"zero": {"reduce_scatter": False}}  # which DeepSpeed asks for with Muon
        found[f"deepspeed-z{stage}-muon"] = Engine("", "deepspeed", deepspeed_muon, {"stage": stage} | zero | standard)
    found["torch"] = Engine("", "torch", torch_adamw, {})
    found["torch-muon"] = Engine("", "torch", torch_muon, {})
    beside = {name: name.removesuffix("-muon") for name in found if name.endswith("-muon")}
    if a.only:
        found = {name: engine for name, engine in found.items() if name in a.only.split(",")}
    return found, beside


def table(rows, beside):
    rate = max((account.get("product_rate", 0) for row in rows.values() for account in row["accounts"]), default=0)
    lines = [HEADINGS]
    for name, row in rows.items():
        cells = ["", "", "", ""]
        if name in beside:
            accounts = row["accounts"]
            counts = [account.get("matrices", 0) for account in accounts]
            over = row["median_s"] - rows[beside[name]]["median_s"] if beside[name] in rows else math.nan
            limit = max(account.get("operations", 0) for account in accounts) / rate if rate else math.nan
            cells = [f"{over * 1e3:.1f}", "+".join(map(str, counts)), f"{limit * 1e3:.1f}", f"{over / limit:.2f}"]
        losses = [f"{row['losses'][0]:.4f}", f"{row['losses'][-1]:.4f}"]
        lines.append([name, f"{row['median_s'] * 1e3:.1f}", *cells, report.gib(row["device_peak"]), *losses])
    return lines, rate


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--torch-adam", action="store_true", help="DeepSpeed with torch's AdamW: compiles nothing")
    parser.add_argument("--only", help="engines of these names, between commas")
    run.add_common_arguments(parser, steps=6)
    parser.set_defaults(clip=0.0)
    a = parser.parse_args()
    engines, beside = engines_of(a)
    result = run.run_all(a, engines)
    lines, rate = table(result["engines"], beside)
    tables.show(lines)
    print(f"a product of {PRODUCT} x {PRODUCT}: {rate / 1e12:.0f} TFLOP/s")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
