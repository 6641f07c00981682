"""All ways in which a script, or a framework, compiles the modules of a model: the bits of the model that is not
compiled, and the graphs of one block.

``aot_eager`` runs torch's own kernels in the order of the model, so its numbers are those without it to the bit."""

import pytest
import strata
import torch
from compiled_training import Graphs, compile_blocks, train
from ranks import run_ranks
from soak import also
from strata.compat.engine import initialize
from tiny_models import Block, config_of, differences, loss_of, make_batches, make_engine, make_model
from torch import nn

STAGES = (0, 1, 2, 3)


def _wrap_blocks(model, backend):
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.compile(layer, backend=backend, fullgraph=True)


def _compile_model(model, backend):
    model.compile(backend=backend)


def _compile_engine(engine, backend, **more):
    engine.compile(backend=backend, compile_kwargs={"fullgraph": True, **more})
    assert engine.is_compiled


def _compile_from_root(engine, backend):
    engine.compile(backend, regional=False)


def _by_accelerate(engine, backend):
    from accelerate.utils.other import compile_regions_deepspeed

    compile_regions_deepspeed(engine.module, backend=backend)  # its regions have classes of torch.nn, without graphs


def _in_engine(way):
    return {"after": lambda engine, backend: way(engine.module, backend)}


# name: (arguments of train(), whether it makes nothing but the graph of a block)
WAYS = {
    "layer.compile": ({}, True),
    "layer.compile after initialize": (_in_engine(compile_blocks), True),
    "torch.compile(layer)": ({"before": _wrap_blocks}, True),
    "torch.compile(layer) after initialize": (_in_engine(_wrap_blocks), True),
    "model.compile": ({"before": _compile_model}, False),
    "model.compile after initialize": (_in_engine(_compile_model), False),
    "engine.compile": ({"after": _compile_engine}, True),
    "engine.compile from the root": ({"after": _compile_from_root}, False),
    "accelerate's regions": ({"after": _by_accelerate}, True),
}
# Each way is tried at stage 3, which alone gathers what a graph reads, and two of them below it.
QUICK = {"torch.compile(layer)": (3,), "model.compile": (0, 3), "engine.compile": (2, 3), "accelerate's regions": (3,)}
REST = {name: [stage for stage in STAGES if stage not in QUICK.get(name, ())] for name in WAYS}


def _same(name, stages, **more):
    arguments, whole = WAYS[name]
    for stage in stages:
        config = config_of(stage, "bf16", live_bytes=1, clipping=0.5, **more)
        losses, weights, _ = train(make_model, config)
        backend = Graphs()
        compiled, compiled_weights, breaks = train(make_model, config, backend, **arguments)
        assert compiled == losses and backend.made > 0, (name, stage)
        assert differences(_plain(compiled_weights), weights) == [], (name, stage)
        assert not whole or (backend.made == 1 and breaks == {}), (name, stage, backend.made, breaks)


def _plain(weights):
    return {name.replace("._orig_mod", ""): value for name, value in weights.items()}


@pytest.mark.parametrize("name, stages", [*QUICK.items(), *also(*REST.items())])
def test_a_compiled_model_has_the_bits_of_one_that_is_not(name, stages):
    run_ranks(2, _same, name, stages, timeout=240.0)


class _OfTorch(nn.Module):
    """Blocks whose forward is torch's own, which Dynamo does not begin a graph in."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True) for _ in range(2))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


class _WithoutBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, hidden):
        return self.other(self.one(hidden).relu()).square().mean()


def test_a_model_without_blocks_is_compiled_from_its_root():
    for make, graphs in ((_WithoutBlocks, True), (_OfTorch, False)):
        torch._dynamo.reset()
        engine, backend = make_engine(make(), config_of(3)), Graphs("eager")
        with pytest.raises(strata.UsageError, match="leave fullgraph out"):
            engine.compile(compile_kwargs={"fullgraph": True})
        engine.compile(backend)
        assert engine.module._compiled_call_impl is not None
        loss = engine(torch.randn(2, 3, 16))
        engine.backward(loss)
        engine.step()
        assert not graphs or backend.made > 0
        engine.destroy()


def test_what_is_compiled_already_stays_so():
    torch._dynamo.reset()
    model, mine, engines = make_model(), Graphs(), Graphs()
    model.layers[0].compile(backend=mine, fullgraph=True)
    model.layers[1] = torch.compile(model.layers[1], backend=mine, fullgraph=True)
    before = model.layers[0]._compiled_call_impl
    engine = make_engine(model, config_of(3))
    engine.compile(engines, {"fullgraph": True})
    assert model.layers[0]._compiled_call_impl is before and model.layers[1]._compiled_call_impl is None
    assert [type(layer) is Block for layer in model.layers] == [True, False, True]
    engine.backward(loss_of(engine, make_batches(1, 1)[0][0]))
    engine.step()
    assert mine.made == 1 and engines.made == 1  # the guard on the backend tells them apart
    engine.destroy()


def test_deepspeeds_engine_compiles_as_accelerate_asks_it_to():
    torch._dynamo.reset()
    engine, *_ = initialize(model=make_model(), config=config_of(2))
    backend = Graphs()
    engine.compile(backend=backend, compile_kwargs={"mode": "default", "fullgraph": True, "dynamic": None,
                                                    "options": None, "disable": False})  # fmt: skip
    engine.backward(loss_of(engine, make_batches(1, 1)[0][0]))
    engine.step()
    assert engine.is_compiled and backend.made == 1
    engine.destroy()
