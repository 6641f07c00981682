"""A model whose large parameters are used in tiles, and the configuration that cuts them."""

import torch
from devices import test_device
from tiny_models import config_of
from torch import nn

IDS, WIDTH = 40, 16
ROW_BYTES = 4 * WIDTH
# With a large epsilon updates are in proportion to gradients: else AdamW's first steps are of the rate's size wherever
# a gradient is not zero, and a sum in another order may change its sign.
ADAMW = {"lr": 1e-1, "weight_decay": 0.1, "eps": 0.1}
OPTIMIZER = {"type": "AdamW", "params": ADAMW}


class TiledModel(nn.Module):
    """Embedding [40, 16], a linear layer to 64, one back to 16, and a head that may be tied to the embedding."""

    def __init__(self, tied=False, frozen=()):
        super().__init__()
        self.embedding = nn.Embedding(IDS, WIDTH, padding_idx=3)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.norm = nn.LayerNorm(4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, IDS, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)

    def hidden(self, ids):
        hidden = self.embedding(ids)
        return hidden + self.down(torch.relu(self.norm(self.up(hidden))))

    def forward(self, ids):
        return self.head(self.hidden(ids))


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.roll(1, -1).flatten())


def batches_of(steps, world, seed=3):
    """Ids [steps, world, 2, 9]; some are in every tile."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, IDS, (steps, world, 2, 9), generator=generator).to(test_device())


def tiled_config(rows=9, stage=3, match=None, **more):
    """Tiles of at most ``rows`` rows of 16 fp32 numbers; a parameter with more elements is cut."""
    tiles = {"max_gather": rows * ROW_BYTES}
    if match is not None:
        tiles["match"] = match
    config = config_of(stage, **more)
    config.setdefault("strata", {})["tiles"] = tiles
    config["optimizer"] = OPTIMIZER
    config["zero_optimization"].setdefault("stage3_param_persistence_threshold", 0)
    return config


def make_tiled(seed=0, **kwargs):
    torch.manual_seed(seed)
    return TiledModel(**kwargs).to(test_device())
