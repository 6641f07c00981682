"""How often the host waits for the device in a step, at each ZeRO stage, on one rank: before and after a change.

    python bench/host_waits.py [--device cuda] [--steps 8] [--layers 8] [--accumulation 2] [--json FILE]

Each line is of one engine over a small model in bf16: the median and the maximum of ``host_waits`` of
``engine.step_report()`` over the steps after the first three, which allocate memory. Only the engine's waits count, not
those of the script (``loss.item()``). On the CPU all are 0.
"""

import argparse
import json
import statistics

import strata
import torch
from tables import show

SETTLING = 3  # steps that make memory and learn the order of units
WIDTH, TOKENS = 256, 64


def waits_of(stage, device, steps, layers, accumulation):
    """[host waits of each step] after those that settle."""
    torch.manual_seed(stage)
    blocks = [torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(layers)]
    model = torch.nn.Sequential(torch.nn.Embedding(96, WIDTH), *blocks, torch.nn.Linear(WIDTH, 96))
    engine, *_ = strata.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}, "strata": {"device": device},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    })
    ids, waits = (torch.arange(TOKENS, device=engine.device) % 96)[None], []
    for _ in range(SETTLING + steps):
        for _ in range(accumulation):
            loss = torch.nn.functional.cross_entropy(engine(ids).flatten(0, 1).float(), ids.flatten())
            engine.backward(loss)
            engine.step()
        waits.append(engine.step_report()["host_waits"])
    engine.destroy()
    return waits[SETTLING:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=2, help="micro-steps of a step")
    parser.add_argument("--json", help="where the figures go, besides the table")
    arguments = parser.parse_args()
    waits = {
        stage: waits_of(stage, arguments.device, arguments.steps, arguments.layers, arguments.accumulation)
        for stage in range(4)
    }
    show([["stage", "host waits a step", "most"],
          *([str(stage), f"{statistics.median(of):g}", str(max(of))] for stage, of in waits.items())])
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"host_waits": waits}, file, indent=1)


if __name__ == "__main__":
    main()
