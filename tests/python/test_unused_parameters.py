"""A parameter without a gradient on any rank in a step stays unchanged, as in plain torch. A gradient of zeroes counts
as a gradient."""

import pytest
import strata
import torch
from comparison import compare
from plain_torch import PlainTrainer
from ranks import run_ranks
from tiny_models import (
    DTYPES,
    VOCABULARY,
    WIDTH,
    TinyModel,
    config_of,
    full_parameters,
    make_batches,
    make_model,
    rank_and_world,
)


class Experts(TinyModel):
    """Bits of the batch's first token say which experts it goes through. The last one is never asked; the second half
    of the embedding's rows is never read."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.rows = torch.nn.Embedding(2 * VOCABULARY, WIDTH, padding_idx=3)

    def forward(self, tokens):
        hidden = self.embedding(tokens) + self.rows(tokens)
        bits = int(tokens[0, 0])
        for index, expert in enumerate(self.experts):
            if bits >> index & 1:
                hidden = hidden + expert(hidden)
        return self.head(hidden) * self.one


# By micro-step, of two ranks: no rank asks one expert, one rank asks another, one is asked in one micro-step only.
BITS = [(7, 7), (1, 1), (0, 0), (2, 0), (4, 4), (0, 1), (6, 1), (0, 0)]


def _adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=False)


def _momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1, foreach=False)


def _batches(world):
    batches = make_batches(len(BITS), world)
    for step, bits in enumerate(BITS):
        for rank in range(world):
            batches[step, rank, 0, 0] = bits[rank % 2]
    return batches


def _train(stage, accumulation, own, decay_unused, dtype="fp32"):
    _, world = rank_and_world()
    make_optimizer = _adamw if own else _momentum
    reference = PlainTrainer(
        make_model(Experts), world, make_optimizer, DTYPES[dtype], accumulation=accumulation, decay_unused=decay_unused
    )
    reference.loss_scale = 256.0 if dtype == "fp16" else 1.0
    config = config_of(stage, dtype, accumulation, optimizer=False, strata={"decay_unused": decay_unused})
    history = compare(
        config, reference, lambda: make_model(Experts), {"optimizer": make_optimizer}, batches=_batches(world)
    )
    initial = dict(make_model(Experts).to(DTYPES[dtype]).named_parameters())
    for name in ("experts.3.weight", "layers.0.up.weight"):
        assert torch.equal(history[-1][name], initial[name]) is not decay_unused, name
    unread = history[-1]["rows.weight"][VOCABULARY:]
    assert not torch.equal(unread, initial["rows.weight"][VOCABULARY:]), "rows without a gradient decay with the others"


def _sweep(decay_unused, dtype="fp32"):
    for stage in range(4):
        for own in (True, False):
            _train(stage, 1 + (stage + own) % 2, own, decay_unused, dtype)


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_without_a_gradient_stay_as_in_plain_torch(world):
    run_ranks(world, _sweep, False)


def test_they_decay_where_the_configuration_asks_for_it():
    run_ranks(2, _train, 3, 2, True, True)


class Wide(torch.nn.Module):
    """fp64 parameters, whose values fp32 cannot hold."""

    def __init__(self):
        super().__init__()
        for name in ("first", "unused", "last"):
            values = torch.linspace(0.1, 0.9, 70, dtype=torch.float64)
            setattr(self, name, torch.nn.Parameter(values))

    def forward(self, tokens):
        return (self.first.sum() + self.last.square().sum()) * tokens.double().mean()


def _bits_stay(stage, own):
    rank, world = rank_and_world()
    initial = dict(make_model(Wide).named_parameters())
    model = make_model(Wide)
    optimizer = (_adamw if own else _momentum)(model.parameters())
    engine, *_ = strata.initialize(model=model, config=config_of(stage, optimizer=False), optimizer=optimizer)
    for step, factor in enumerate((float("nan"), 1.0, 1.0)):
        batch = make_batches(3, world)[step, rank]
        engine.backward(engine(batch) * factor)
        engine.step()
        values = full_parameters(model)
        assert values["unused"].dtype == torch.float64 and torch.equal(values["unused"], initial["unused"])
        for name in ("first", "last"):  # a skipped step rounds nothing either
            assert torch.equal(values[name], initial[name]) is (step == 0), (name, step)
    engine.destroy()


def _all_bits_stay():
    for stage in range(4):
        for own in (True, False):
            _bits_stay(stage, own)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_unused_fp64_parameters_keep_their_bits(world):
    run_ranks(world, _all_bits_stay)
