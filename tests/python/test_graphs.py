"""Models whose graphs are not a plain chain of blocks, at stage 3 on two ranks, against plain torch.

Each runs with the default bound on gathered bytes and with a bound of one byte, at which a unit is
released as soon as nothing uses it: a use that the engine does not know of would read freed weights.
"""

from dataclasses import dataclass

import pytest
import torch
from comparison import adamw, compare, found, told
from plain_torch import PlainTrainer
from ranks import run_ranks
from soak import each_once
from tiny_models import Block, TinyModel, config_of, loss_of, make_batches, make_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

WORLD = 2


class Frozen(TinyModel):
    def __init__(self):
        super().__init__()
        self.embedding.requires_grad_(False)
        self.layers[0].requires_grad_(False)
        self.layers[2].up.requires_grad_(False)
        self.head.bias.requires_grad_(False)


class Tied(TinyModel):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embedding.weight
        self.layers[2].up.weight = self.layers[0].up.weight


class CalledTwice(TinyModel):
    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in (*self.layers, *self.layers, self.layers[0]):
            hidden = layer(layer(hidden))
        return self.head(hidden)


class WithBuffers(TinyModel):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, tokens):
        self.calls += 1
        hidden = self.layers[0](self.embedding(tokens)) * self.scale
        return self.head(self.norm(hidden.flatten(0, 1)).view_as(hidden))


class Checkpointed(TinyModel):
    def __init__(self, reentrant, nested=False, frozen=False):
        super().__init__()
        self.reentrant, self.nested = reentrant, nested
        if frozen:
            self.embedding.requires_grad_(False)
            self.layers[0].requires_grad_(False)

    def _pair(self, hidden):
        for layer in self.layers[1:]:
            hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return hidden

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        if not hidden.requires_grad:
            hidden.requires_grad_()  # makes reentrant checkpoints of frozen inputs work in plain torch
        hidden = checkpoint(self.layers[0], hidden, use_reentrant=self.reentrant)
        if self.nested:
            hidden = checkpoint(self._pair, hidden, use_reentrant=self.reentrant)
        else:
            hidden = self._pair(hidden)
        return self.head(hidden)


class ReadsOutside(TinyModel):
    """Weights of a module used without its forward, in the graph and beside it."""

    def forward(self, tokens):
        hidden = nn.functional.embedding(tokens, self.embedding.weight)
        for layer in self.layers:
            hidden = layer(hidden) + 0.1 * self.layers[0].up.bias.mean()
        bound = self.head.weight.detach().abs().max()
        return nn.functional.linear(hidden, self.head.weight, self.head.bias) / (1.0 + bound)


class InPlace(TinyModel):
    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
            hidden.mul_(0.5)
            hidden += 0.25
        return self.head(hidden).add_(1.0)


@dataclass
class Plain:
    hidden: torch.Tensor
    note: str = ""


@dataclass
class Output(ModelOutput):
    hidden: torch.Tensor | None = None


class Packs(Block):
    """Takes and gives tensors inside containers."""

    def __init__(self, pack):
        super().__init__()
        self.pack = pack

    def forward(self, given):
        hidden = super().forward(unpack(given))
        if self.pack == "dict":
            return {"a": {"hidden": hidden}, "n": 1}
        if self.pack == "dataclass":
            return Plain(hidden, "x")
        if self.pack == "output":
            return Output(hidden=hidden)
        return (None, [hidden, 3])


def unpack(given):
    if isinstance(given, torch.Tensor):
        return given
    if isinstance(given, ModelOutput):
        return given.hidden
    if isinstance(given, dict):
        return given["a"]["hidden"]
    if isinstance(given, Plain):
        return given.hidden
    return given[1][0]


class Containers(TinyModel):
    def __init__(self, pack):
        super().__init__()
        self.layers = nn.ModuleList(Packs(pack) for _ in range(3))

    def forward(self, tokens):
        given = self.embedding(tokens)
        for layer in self.layers:
            given = layer(given)
        return self.head(unpack(given))


class Chosen(TinyModel):
    """The bits of the first token say which blocks run; their sum is not a chain."""

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            if int(tokens[0, 0]) >> i & 1:
                hidden = hidden + layer(hidden)
        return self.head(hidden)


def evaluate_first(model, tokens):
    with torch.no_grad():
        before = model(tokens.flip(0))
    loss = loss_of(model, tokens)
    with torch.no_grad():
        assert torch.equal(model(tokens.flip(0)), before)
    return loss


def several_forwards(model, tokens):
    return loss_of(model, tokens) + 0.5 * loss_of(model, tokens.flip(0)) * loss_of(model, tokens.flip(1))


def penalty(model, tokens):
    inner = getattr(model, "module", model)
    return loss_of(model, tokens) + 0.1 * inner.head.weight.square().mean() + inner.layers[1].down.bias.sum().square()


CASES = {
    "frozen": (Frozen, {}, loss_of),
    "tied": (Tied, {}, loss_of),
    "called twice": (CalledTwice, {}, loss_of),
    "buffers": (WithBuffers, {}, loss_of),
    "reads outside": (ReadsOutside, {}, loss_of),
    "in place": (InPlace, {}, loss_of),
    "evaluation between": (TinyModel, {}, evaluate_first),
    "several forwards": (CalledTwice, {}, several_forwards),
    "penalty in the loss": (TinyModel, {}, penalty),
    **{f"outputs in a {pack}": (Containers, {"pack": pack}, loss_of)
       for pack in ("dict", "dataclass", "output", "tuple")},
    **{
        f"checkpoint reentrant={reentrant} nested={nested} frozen={frozen}": (
            Checkpointed, {"reentrant": reentrant, "nested": nested, "frozen": frozen}, loss_of)
        for reentrant in (False, True) for nested in (False, True) for frozen in (False, True)
    },
}


def _same_as_plain_torch(name, live_bytes, batches):
    cls, kwargs, loss_function = CASES[name] if name in CASES else (Chosen, {}, loss_of)
    for accumulation in (1, 2) if batches is None else (1,):
        reference = PlainTrainer(make_model(cls, **kwargs), WORLD, adamw, accumulation=accumulation)
        compare(
            config_of(3, accumulation=accumulation, live_bytes=live_bytes), reference,
            lambda: make_model(cls, **kwargs), loss_function=loss_function, batches=batches,
            backward=told if accumulation == 1 else found,
        )


@each_once({"live_bytes": ["auto", 1], "name": sorted(CASES)})
def test_graph(name, live_bytes):
    run_ranks(WORLD, _same_as_plain_torch, name, live_bytes, None)


PATTERNS = {
    "unused in some steps": [(7, 7), (5, 5), (7, 7), (2, 2), (7, 7)],
    "unused on one rank": [(7, 7), (5, 7), (7, 2), (0, 7), (7, 7)],
    "unused at first": [(1, 1), (7, 7), (7, 7), (0, 0), (7, 7)],
    "unused at first, used on one rank": [(0, 0), (7, 1), (1, 7), (7, 7)],
    "other blocks each time": [(1, 2), (4, 1), (2, 4), (6, 3), (0, 0), (7, 0)],
}


@each_once({"live_bytes": ["auto", 1], "name": sorted(PATTERNS)})
def test_graph_that_changes(name, live_bytes):
    batches = make_batches(len(PATTERNS[name]), WORLD)
    for step, by_rank in enumerate(PATTERNS[name]):
        for rank, bits in enumerate(by_rank):
            batches[step, rank, 0, 0] = bits
    run_ranks(WORLD, _same_as_plain_torch, name, live_bytes, batches)
