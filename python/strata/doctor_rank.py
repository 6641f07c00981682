"""One rank of ``strata doctor --ranks N``, which torchrun starts: sums with the others by gloo and NCCL, trains a step.

Rank 0 prints [stage, text] as JSON after each, and a rank that fails ["error", text]."""

import json
import os
import sys
from datetime import timedelta

import strata
import torch
import torch.distributed as dist

DEADLINE = timedelta(seconds=60)  # of each exchange


def _say(stage, text):
    if stage == "error" or dist.get_rank() == 0:
        print(json.dumps([stage, text]) + "\n", end="", flush=True)  # one write, which no other rank's splits


def _sum(stage, device):
    values = torch.full((1024,), 1.0 + dist.get_rank(), device=device)
    dist.all_reduce(values)
    wanted = dist.get_world_size() * (dist.get_world_size() + 1) / 2
    if (values != wanted).any():
        raise RuntimeError(f"a sum over the ranks is wrong on {device}: wanted {wanted}, found {values[0]}")
    _say(stage, "a sum was right")


def main():
    sys.excepthook = lambda kind, error, _: _say("error", f"rank {os.environ['RANK']}: {kind.__name__}: {error}")
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]) else "cpu"
    strata.init_distributed("gloo" if device == "cpu" else None, timeout=DEADLINE)
    _sum("gloo", "cpu")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        _sum("NCCL", device)
    config = {"train_micro_batch_size_per_gpu": 1, "strata": {"device": device, "timeout_s": DEADLINE.seconds},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 3}}  # fmt: skip
    engine, *_ = strata.initialize(model=torch.nn.Linear(64, 64).to(device), config=config)
    engine.backward(engine(torch.ones(1, 64, device=device)).sum())
    engine.step()
    _say("training step", f"stage 3, over {engine.collectives_name}")
    engine.destroy()


if __name__ == "__main__":
    main()
