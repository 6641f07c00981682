"""A script's micro-steps, against plain torch: outputs of every shape, several losses, graphs that run inside others.
Each runs by engine.backward(loss), by engine.module(x), and by autograd alone."""

from dataclasses import dataclass

import pytest
import torch
from plain_torch import PlainTrainer
from ranks import run_ranks
from soak import also
from tiny_models import (
    WIDTH,
    TinyModel,
    config_of,
    differences,
    full_parameters,
    loss_of,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

STAGES = (0, 1, 2, 3)


@dataclass
class Plain:
    logits: torch.Tensor
    note: str = ""


class Shapes(TinyModel):
    """Gives its logits in a container, beside values that need no gradients."""

    def __init__(self, shape="tensor"):
        super().__init__()
        self.shape = shape

    def forward(self, tokens):
        logits = super().forward(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, -1).flatten())
        return {"tuple": (None, logits, logits.detach()), "dict": {"loss": loss, "deep": [{"logits": logits}]},
                "dataclass": Plain(logits), "nothing": {"n": 1, "logits": logits.detach()}}.get(self.shape, logits)


def _logits_of(given):
    if isinstance(given, torch.Tensor):
        return given
    if isinstance(given, dict):
        return given["deep"][0]["logits"] if "deep" in given else given["logits"]
    return given[1] if isinstance(given, tuple) else given.logits


def _loss(model, tokens):
    return nn.functional.cross_entropy(_logits_of(model(tokens)).flatten(0, 1), tokens.roll(1, -1).flatten())


def _weights(tokens):
    return torch.linspace(-1.0, 1.0, tokens.numel() * 11, device=tokens.device).view(*tokens.shape, 11) / 64


class ReadsOutside(TinyModel):
    def forward(self, tokens):
        return nn.functional.linear(self.layers[0](self.embedding(tokens)), self.head.weight, self.head.bias)


class Within(torch.autograd.Function):
    """An outer function whose backward runs a graph of the model's own."""

    @staticmethod
    def forward(context, run, hidden):
        context.run = run
        context.save_for_backward(hidden)
        with torch.no_grad():
            return run(hidden)

    @staticmethod
    def backward(context, gradient):
        (hidden,) = context.saved_tensors
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            result = context.run(hidden)
        torch.autograd.backward(result, gradient)
        return None, hidden.grad


class Hidden(TinyModel):
    """From hidden states to logits."""

    def forward(self, hidden):
        return self.head(self.layers[1](self.layers[0](hidden)))


def _hidden_loss(run):
    def loss(model, tokens):
        hidden = nn.functional.one_hot(tokens, WIDTH).float().requires_grad_()
        return nn.functional.cross_entropy(run(model, hidden).flatten(0, 1), tokens.flatten())

    return loss


def _two_losses(model, tokens, backward):
    first = loss_of(model, tokens)
    second = loss_of(model, tokens.flip(0))
    backward(first)
    backward(second)


def _graph_twice(model, tokens, backward):
    loss = loss_of(model, tokens)
    backward(loss, retain_graph=True)
    backward(loss)


def _gradient_of_an_output(model, tokens, backward):
    model(tokens).backward(_weights(tokens))


def _gradient_of_an_input_first(model, tokens, backward):
    loss = loss_of(model, tokens)
    weight = getattr(model, "module", model).head.bias
    assert torch.autograd.grad(loss, weight, retain_graph=True)[0].shape == (11,)
    backward(loss)


def _nothing_that_needs_gradients(model, tokens, backward):
    assert not _logits_of(model(tokens)).requires_grad
    backward(getattr(model, "module", model).head.weight.square().mean())


def _of(loss_function):
    return lambda model, tokens, backward: backward(loss_function(model, tokens))


# name -> (class, keywords, the micro-step; ``backward(loss, ...)`` is the trainer's)
MICRO_STEPS = {
    "two losses": (ReadsOutside, {}, _two_losses),
    "a graph twice": (ReadsOutside, {}, _graph_twice),
    "a tensor's gradient": (TinyModel, {}, _gradient_of_an_output),
    "autograd.grad before": (TinyModel, {}, _gradient_of_an_input_first),
    "no output needs gradients": (Shapes, {"shape": "nothing"}, _nothing_that_needs_gradients),
    **{f"outputs in a {s}": (Shapes, {"shape": s}, _of(_loss)) for s in ("tuple", "dict", "dataclass")},
    **{f"a checkpoint around all, reentrant={r}": (
        Hidden, {}, _of(_hidden_loss(lambda model, hidden, r=r: checkpoint(model, hidden, use_reentrant=r))))
       for r in (False, True)},
    "an outer function": (Hidden, {}, _of(_hidden_loss(lambda model, hidden: Within.apply(model, hidden)))),
}


def _micro_steps(names, how):
    rank, world = rank_and_world()
    for name in names:
        cls, kwargs, run = MICRO_STEPS[name]
        for stage in (0, 3) if world == 1 else STAGES:
            reference = PlainTrainer(make_model(cls, **kwargs), world, lambda p: torch.optim.SGD(p, lr=0.05))
            model = make_model(cls, **kwargs)
            engine = make_engine(model, config_of(stage, live_bytes=1, optimizer=False),
                                 optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
            called = engine if how == "engine" else engine.module
            for tokens in make_batches(2, world):
                _reference_step(reference, run, tokens)
                run(called, tokens[rank], torch.Tensor.backward if how == "plain" else engine.backward)
                engine.step()
                assert engine.was_step_applied()
                assert differences(full_parameters(model), reference.values()) == [], (name, stage, how)
            engine.destroy()


def _reference_step(reference, run, tokens):
    """Plain torch's, where each backward pass is reduced by itself, as the engine does it."""
    totals = None
    for batch in tokens:
        passes = []

        def backward(loss=None, passes=passes, **kwargs):
            reference.model.zero_grad()
            loss.backward(**kwargs)
            passes.append(_taken(reference))

        reference.model.zero_grad()
        run(reference.model, batch, backward)
        passes = passes or [_taken(reference)]
        totals = passes if totals is None else [[a + b for a, b in zip(x, y)] for x, y in zip(totals, passes)]
    means = [[g * (1.0 / reference.world) for g in total] for total in totals]
    sums = means[0]
    for mean in means[1:]:
        sums = [a + b for a, b in zip(sums, mean)]
    reference.sums = sums
    reference.came = [bool(total.any()) for total in sums]
    reference.step()


def _taken(reference):
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in reference.parameters]


@pytest.mark.parametrize("how", ["engine", "plain", *also("module")])
@pytest.mark.parametrize("world", [1, 2])
def test_micro_steps_of_every_shape(world, how):
    names = [n for n in MICRO_STEPS if how == "plain" or n != "a tensor's gradient"]
    run_ranks(world, _micro_steps, names, how, timeout=240.0)
