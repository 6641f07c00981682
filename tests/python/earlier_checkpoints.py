"""The model, the cells and the step behind tests/python/earlier_checkpoints, which an earlier tree wrote.

    torchrun --nproc_per_node=N tests/python/earlier_checkpoints.py FOLDER

writes the checkpoints of N ranks with the package that is imported. Values, gradients and so the optimizer's state
follow from formulas, not from a random generator.
"""

import os
import sys
from pathlib import Path

import strata
import torch

WRITTEN = Path(__file__).with_name("earlier_checkpoints")  # by commit 54d43226
# (ranks, stage, dtype, tier of the optimizer's state)
CELLS = [(1, 1, "fp32", "device"), (1, 3, "bf16", "cpu"), (2, 1, "fp16", "cpu"), (2, 2, "bf16", "device"),
         (2, 3, "fp32", "nvme"), (4, 1, "bf16", "nvme"), (4, 3, "bf16", "device")]  # fmt: skip


class Weighted(torch.nn.Module):
    """Its output is the sum of parameters times constants, which are therefore the gradients."""

    def __init__(self):
        super().__init__()
        for name, shape in (("weight", (3, 5)), ("bias", (3,)), ("table", (4, 2, 3)), ("one", ())):
            self.register_parameter(name, torch.nn.Parameter(_line(shape)))
        self.gradients = {name: gradient_of(p) for name, p in self.named_parameters()}
        self.frozen = torch.nn.Parameter(_line((9,)), requires_grad=False)
        self.register_buffer("count", torch.arange(4))

    def forward(self, factor):
        terms = [getattr(self, name).float() * g.to(factor.device) for name, g in self.gradients.items()]
        return sum(term.sum() for term in terms) * factor


def _line(shape):
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)


def gradient_of(parameter):
    """Multiples of 1/8, which each dtype holds exactly."""
    return (torch.arange(parameter.numel(), device=parameter.device) % 7 - 3).view_as(parameter) / 8


def name_of(world, stage, dtype, tier):
    return f"{world}-ranks-stage-{stage}-{dtype}-{tier}"


def engine_of(stage, dtype, tier):
    """States on a drive lie in the working directory, since the manifest has the path."""
    zero = {"stage": stage}
    if tier != "device":
        zero["offload_optimizer"] = {"device": tier, **({"nvme_path": "."} if tier == "nvme" else {})}
    halves = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "loss_scale": 1}}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **halves.get(dtype, {}),
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}  # fmt: skip
    return strata.initialize(model=Weighted(), config=config)[0]


def train_step(engine):
    engine.backward(engine(torch.ones((), device=engine.device)))
    engine.step()


def write(folder):
    os.chdir(folder)
    for world, stage, dtype, tier in CELLS:
        if world == int(os.environ["WORLD_SIZE"]):
            engine = engine_of(stage, dtype, tier)
            train_step(engine)
            engine.save_checkpoint(name_of(world, stage, dtype, tier), tag="one_step")
            engine.destroy()


if __name__ == "__main__":
    write(sys.argv[1])
