"""Inputs of checkpointed blocks that wait on the host for backward (strata.activations)."""

import functools
import gc
import pickle

import pytest
import strata
import torch
from devices import test_device
from ranks import run_ranks
from sequence_models import make_model, rows_of
from strata.compat import checkpointing
from strata.model import free_memory
from strata.sequence import checkpoint_inputs
from torch import nn

LAYERS, INPUT, GRANULE = 4, 2 * 16 * 32 * 4, 1 << 12


@pytest.fixture(autouse=True)
def _small_inputs(monkeypatch):
    monkeypatch.setattr(checkpoint_inputs, "_LEAST", INPUT)
    monkeypatch.setattr(checkpoint_inputs, "_GRANULE", GRANULE)


def _engine(where="device", asked=False, kwargs=None, model=None, **section):
    if model is None:
        model = make_model("llama", num_hidden_layers=LAYERS)
        if asked:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs, offload=True)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
              "zero_optimization": {"stage": 3}, "strata": {"activations": {"device": where}}} | section
    return strata.initialize(model=model.to(test_device()), config=config)[0]


def _inputs_on_host(engine, peak=True):
    return engine.memory_report()["host", "activations"][peak] // max(INPUT, GRANULE)


def _trained(engine, steps=3, tokens=lambda number: 16):
    """(the most inputs on the host, [losses, weights])."""
    losses = []
    for number in range(steps):
        output = engine(**rows_of("", number, tokens=tokens(number)))
        engine.backward(output.loss)
        engine.step()
        losses.append(output.loss.item())
    found = _inputs_on_host(engine)
    engine.destroy(keep_values=True)
    return found, [torch.tensor(losses), *(p.detach().cpu() for p in engine.module.parameters())]


def _same(ours, theirs):
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}])
def test_steps_have_the_bits_of_inputs_on_the_device(kwargs):
    kept, wanted = _trained(_engine("device", kwargs=kwargs))
    moved, found = _trained(_engine("cpu", kwargs=kwargs))
    assert (kept, moved) == (0, LAYERS - 1)  # the last block's is needed at once
    _same(found, wanted)


@pytest.mark.parametrize("asked", [
    {"asked": True},
    {"activation_checkpointing": {"cpu_checkpointing": True}, "strata": {}},
])  # fmt: skip
def test_the_words_of_transformers_and_of_deepspeed_move_them(asked):
    moved, found = _trained(_engine(**asked))
    assert moved == LAYERS - 1
    _same(found, _trained(_engine())[1])


@pytest.mark.parametrize("free, untaken, moved", [
    (4 * LAYERS * INPUT, 0, []), (4 * 3 * INPUT, 0, [0, 1] * 3), (0, 2 * INPUT, [0, 1, 0, 0]), (0, 3 * INPUT, [0, 1]),
])  # fmt: skip
def test_auto_moves_what_does_not_fit_beside_the_computation(free, untaken, moved, monkeypatch):
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: free)
    monkeypatch.setattr(free_memory, "untaken_bytes", lambda device: untaken)
    places, move = [], checkpoint_inputs.CheckpointInputs._move
    monkeypatch.setattr(checkpoint_inputs.CheckpointInputs, "_move",
                        lambda self, tensor, place: places.append(place) or move(self, tensor, place))  # fmt: skip
    found = _trained(_engine("auto", strata={"loss": "plain"}))[1]
    assert places == moved
    _same(found, _trained(_engine(strata={"loss": "plain"}))[1])


def test_rows_of_other_lengths_use_the_memory_again():
    lengths = (16, 24, 20, 16, 24)
    engine = _engine("cpu")
    _trained_at = functools.partial(_trained, steps=5, tokens=lengths.__getitem__)
    moved, found = _trained_at(engine)
    assert moved <= 2 * (LAYERS - 1)  # twice the shortest
    _same(found, _trained_at(_engine())[1])


def test_forwards_without_a_backward_give_the_memory_back():
    engine = _engine("cpu")
    for number in range(4):
        output = engine(**rows_of("", number))
        with torch.no_grad():
            engine(**rows_of("", number))
        del output
        gc.collect()
    assert _inputs_on_host(engine) == LAYERS - 1


def test_a_backward_may_come_twice():
    engine = _engine("cpu")
    loss = engine(**rows_of("", 1)).loss
    engine.backward(loss, retain_graph=True)
    first = [strata.utils.safe_get_full_grad(p).clone() for p in engine.module.parameters()]
    engine.zero_grad()
    engine.backward(loss)
    _same([strata.utils.safe_get_full_grad(p) for p in engine.module.parameters()], first)


class _Chain(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(LAYERS))
        self.block = block

    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpointing.checkpoint(functools.partial(self.block, layer), x)
        return x.square().mean()


def _chain_step(engine):
    loss = engine(torch.linspace(-1, 1, 32 * 32).view(32, 32))
    engine.backward(loss)
    engine.step()
    return loss.item()


def test_checkpoints_of_deepspeed_move_them():
    losses = []
    for in_cpu in (False, True):
        torch.manual_seed(0)
        checkpointing.configure(checkpoint_in_cpu=in_cpu)
        try:
            engine = _engine(model=_Chain(lambda layer, x: layer(x).tanh()))
            losses.append([_chain_step(engine) for _ in range(3)])
        finally:
            checkpointing.configure()
        # The first forward does not know how many there will be.
        assert _inputs_on_host(engine) == (LAYERS if in_cpu else 0)
        engine.destroy()
    assert losses[0] == losses[1]


def test_an_input_that_changes_in_place_is_an_error():
    kept = []

    def block(layer, x):
        kept.append(x)
        return layer(x).tanh()

    engine = _engine("cpu", model=_Chain(block))
    loss = engine(torch.ones(32, 32))
    with torch.no_grad():
        kept[-1].add_(1)
    with pytest.raises((strata.UsageError, RuntimeError), match="in.?place"):
        engine.backward(loss)
    kept.clear()  # the graph has the block, which has these, which have the graph


def test_models_are_as_before_afterwards_and_can_be_pickled_meanwhile():
    engine = _engine("cpu", kwargs={"use_reentrant": False})
    layer = engine.module.model.layers[0]
    engine(**rows_of("", 1))
    pickled = pickle.loads(pickle.dumps(layer._gradient_checkpointing_func))
    assert pickled.keywords == {"use_reentrant": False}
    engine.destroy()
    assert type(layer._gradient_checkpointing_func) is functools.partial


def _over_ranks(where):
    engine = _engine(where, gradient_accumulation_steps=2)
    losses = []
    for number in range(4):
        loss = engine(**rows_of("", number + 10 * engine.global_rank)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_ranks_and_micro_steps():
    assert run_ranks(2, _over_ranks, "cpu") == run_ranks(2, _over_ranks, "device")


def test_checkpoints_of_the_module_itself_and_those_that_are_enabled_later_move_them():
    model = make_model("llama", num_hidden_layers=LAYERS)
    engine = _engine("cpu", model=model)
    engine.module.gradient_checkpointing_enable()
    engine.backward(engine.module(**rows_of("", 1)).loss)
    assert _inputs_on_host(engine) == LAYERS - 1


def test_an_engine_that_ends_lets_go_of_the_memory():
    engine = _engine("cpu")
    engine.backward(engine(**rows_of("", 1)).loss)
    core = engine.core
    engine.destroy()
    assert core.memory_report()["host", "activations"][0] == 0
    checkpointing.configure(checkpoint_in_cpu=True)
    try:
        x = torch.ones(64, 64, requires_grad=True)
        checkpointing.checkpoint(torch.tanh, x).sum().backward()
        assert x.grad is not None
    finally:
        checkpointing.configure()
