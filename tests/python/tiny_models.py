"""Small models, their data and the engine calls that many tests share."""

import os

import strata
import torch
from devices import test_device
from torch import nn

VOCABULARY = 11
WIDTH = 16


def rank_and_world():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class TinyModel(nn.Module):
    """Embedding, three blocks and a head; and parameters of 0, 1 and 17 elements."""

    def __init__(self, blocks=3, width=WIDTH):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY)
        self.none = nn.Parameter(torch.zeros(0))
        self.one = nn.Parameter(torch.tensor(1.25))
        self.seventeen = nn.Parameter(torch.linspace(-1.0, 1.0, 17))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        extra = torch.cat([self.none, self.seventeen]).square().mean()
        return self.head(hidden) * self.one + extra * hidden.mean()


def make_model(cls=TinyModel, seed=0, **kwargs):
    torch.manual_seed(seed)
    return cls(**kwargs).to(test_device())


def make_batches(steps, world, seed=1, samples=4, length=7):
    """Tokens [steps, world, samples, length]: the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (steps, world, samples, length), generator=generator).to(test_device())


def loss_of(model, tokens):
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.float().view(-1, VOCABULARY), tokens.roll(1, -1).reshape(-1))


DTYPE_SECTIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def config_of(stage, dtype="fp32", accumulation=1, clipping=0.0, live_bytes="auto", optimizer=True, **more):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "zero_optimization": {"stage": stage},
        **DTYPE_SECTIONS[dtype],
    }
    if live_bytes != "auto":
        # Only parameters in use stay gathered, and no parameter stays whole because it is small.
        config["strata"] = {"max_live_bytes": live_bytes}
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if optimizer:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key] = {**config[key], **value}
        else:
            config[key] = value
    return config


def make_engine(model, config, **kwargs):
    return strata.initialize(model=model, config=config, **kwargs)[0]


def train_step(engine, tokens, loss_function=loss_of):
    """One micro-step; returns the loss as a float."""
    loss = loss_function(engine, tokens)
    engine.backward(loss)
    engine.step()
    return loss.item()


def full_parameters(model):
    """{name: whole value}; collective where ranks gather through a process group."""
    with strata.zero.GatheredParameters(list(model.parameters())):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def differences(ours, theirs):
    """Names whose values have different bits, on any devices."""
    assert ours.keys() == theirs.keys()
    return [n for n in ours if not same_bits(ours[n], theirs[n])]


def same_bits(one, other):
    """Whether two tensors, on any devices, have the same dtype, shape and values."""
    return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
