"""Trains a small network on each rank of torchrun and beside it with plain torch. Needs the package and torch alone.

    python -m torch.distributed.run --nproc-per-node 2 job.py FOLDER

Stages 0 to 3, and one more run whose blocks torch.compile compiles; in each, another engine goes on from a checkpoint.
Rank 0 prints a JSON object of losses, {"plain": [...], "stage 0": [...], ..., "torch": version, "module": path}. Exits
with 1 where two stages differ, or a run differs from plain torch in one process by more than rounding.
"""

import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import strata

STEPS, KEPT = 6, 3  # the checkpoint is written after KEPT steps
# A small eps would make updates of Adam out of the rounding of gradients near 0.
RULE = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 1e-2}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(32), torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Embedding(50, 32), Block(), Block(), torch.nn.Linear(32, 50))


def batches():
    made = torch.Generator().manual_seed(5)
    return [torch.randint(0, 50, (4, 9), generator=made) for _ in range(STEPS)]


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def plain():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), **RULE)
    losses = []
    for tokens in batches():
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(stage, compiled, folder):
    """The mean losses of the ranks, each of which has half of every batch."""
    def start():
        model = network()
        if compiled:
            for block in model:
                if isinstance(block, Block):
                    block.compile()
        return strata.initialize(model=model, config={
            "train_micro_batch_size_per_gpu": 4 // dist.get_world_size(), "zero_optimization": {"stage": stage},
            "gradient_clipping": 0,
            "optimizer": {"type": "AdamW", "params": RULE}})[0]  # fmt: skip

    engine, losses = start(), []
    for step, tokens in enumerate(batches()):
        if step == KEPT:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = start()
            engine.load_checkpoint(folder)
        loss = loss_of(engine, tokens.chunk(dist.get_world_size())[dist.get_rank()])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    engine.destroy()
    return losses


def main(folder):
    dist.init_process_group("gloo")
    runs = {f"stage {stage}": sharded(stage, False, folder / str(stage)) for stage in range(4)}
    runs["compiled"] = sharded(3, True, folder / "compiled")
    expected = plain()
    for name, losses in runs.items():
        assert name == "compiled" or losses == runs["stage 0"], (name, runs)
        near = [math.isclose(a, b, rel_tol=1e-5) for a, b in zip(losses, expected, strict=True)]
        assert all(near), (name, expected, runs)
    if dist.get_rank() == 0:
        print(json.dumps({"plain": expected, **runs, "torch": torch.__version__, "module": strata._C.__file__}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
