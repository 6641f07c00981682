"""Blocks that a script compiles by itself (``layer.compile()``): one graph of torch.compile a block at every stage, no
new graph from the second step on, and the numbers of blocks that are not compiled.

All blocks of a model have one class, and their code one cache, so a model has as many graphs as one block has.
"""

import pytest
import strata
import torch
from compiled_training import Graphs, compile_blocks, train
from hf_models import MODELS
from ranks import run_ranks
from soak import also
from tiny_models import (
    DTYPES,
    config_of,
    differences,
    full_parameters,
    make_engine,
    make_model,
    rank_and_world,
)
from torch.utils.checkpoint import checkpoint

STAGES = (0, 1, 2, 3)


class _Checkpointed(torch.nn.Module):
    """A model that recomputes its blocks in the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.model, self.reentrant = make_model(), reentrant

    def forward(self, tokens):
        model = self.model
        hidden = model.embedding(tokens)
        for layer in model.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant)
        extra = torch.cat([model.none, model.seventeen]).square().mean()
        return model.head(hidden) * model.one + extra * hidden.mean()

    @property
    def layers(self):
        return self.model.layers


# name: (graphs at stages 1 to 3, model, more of the configuration, whether blocks are compiled after initialize)
CASES = {
    "fp32": (1, make_model, {}, False),
    "bf16": (1, make_model, {"dtype": "bf16"}, False),
    "fp16": (1, make_model, {"dtype": "fp16"}, False),
    "compiled after initialize": (1, make_model, {"dtype": "bf16"}, True),
    "nothing stays gathered": (1, make_model, {"live_bytes": 1}, False),
    "nothing stays gathered, after initialize": (1, make_model, {"live_bytes": 1}, True),
    "accumulation and clipping": (1, make_model, {"dtype": "bf16", "accumulation": 2, "clipping": 0.5}, False),
    "weights on the host": (1, make_model, {"zero_optimization": {"offload_param": {"device": "cpu"}}}, False),
    "states on the host": (1, make_model, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, False),
    "checkpointing": (1, lambda: _Checkpointed(False), {"live_bytes": 1}, False),
    # The forward pass runs without gradients first, and torch guards that.
    "reentrant checkpointing": (2, lambda: _Checkpointed(True), {"live_bytes": 1}, False),
}


def _one_graph(name, stages):
    graphs, make, more, after = CASES[name]
    for stage in stages:
        if stage < 3 and "offload_param" in str(more):
            continue
        zero = {"stage": stage, **more.get("zero_optimization", {})}
        config = config_of(stage, **{**more, "zero_optimization": zero})
        losses, weights, _ = train(make, config)
        backend = Graphs()
        in_engine = (lambda engine, backend: compile_blocks(engine.module, backend)) if after else None
        compiled, compiled_weights, breaks = train(make, config, backend, after=in_engine)
        assert breaks == {} and backend.made == graphs, (name, stage, backend.made, breaks)
        assert compiled == losses, (name, stage)
        assert differences(compiled_weights, weights) == [], (name, stage)


# One case has all stages, for what a graph sees of a stage is the same in all cases: weights that are views, or
# gathered ones.
QUICK = {"bf16": STAGES, "nothing stays gathered, after initialize": (3,), "accumulation and clipping": (3,),
         "reentrant checkpointing": (3,)}  # fmt: skip
REST = {name: [stage for stage in STAGES if stage not in QUICK.get(name, ())] for name in CASES}


@pytest.mark.parametrize("name, stages", [*QUICK.items(), *also(*(case for case in REST.items() if case[1]))])
def test_a_block_is_one_graph_with_the_bits_of_a_block_that_is_not_compiled(name, stages):
    run_ranks(2, _one_graph, name, stages, timeout=240.0)


def _by_inductor():
    for dtype in ("fp32", "bf16"):
        of_stage = [train(make_model, config_of(stage, dtype, clipping=0.5), "inductor") for stage in STAGES]
        for losses, weights, breaks in of_stage[1:]:
            assert losses == of_stage[0][0] and breaks == {}
            assert differences(weights, of_stage[0][1]) == []


@pytest.mark.soak  # it compiles with g++
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_stages_have_the_same_bits_under_inductor(ranks):
    run_ranks(ranks, _by_inductor, timeout=400.0)


def _of_transformers(name, fullgraph):
    """(graphs of plain torch, graphs of an engine, which gathers each block for itself)"""
    rank, _ = rank_and_world()
    made = []
    for sharded in (False, True):
        torch._dynamo.reset()
        model, backend = MODELS[name].build().train().to(DTYPES["bf16"]), Graphs("eager")
        for block in MODELS[name].blocks:
            model.get_submodule(block).compile(backend=backend, fullgraph=fullgraph)
        engine = make_engine(model, config_of(3, "bf16", live_bytes=1)) if sharded else model
        for step in range(3):
            batch = MODELS[name].batch(torch.Generator().manual_seed(rank), 0, rank)  # texts of one length
            with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
                loss = engine(**batch).loss
                (engine if sharded else loss).backward(*[loss][:sharded])
            if sharded:
                engine.step()
        if sharded:
            engine.destroy()
        made.append(backend.made)
    return made


# A hook of transformers that collects what routers say ends graphs of the second.
@pytest.mark.parametrize("name, fullgraph", [("qwen3", True), ("qwen3_moe", False)])
def test_a_block_of_transformers_has_the_graphs_of_plain_torch(name, fullgraph):
    for plain, sharded in run_ranks(2, _of_transformers, name, fullgraph, timeout=240.0):
        assert 0 < sharded == plain


class _ReadsElsewhere(torch.nn.Module):
    """A block that reads the weight of another one, which no scope holds gathered meanwhile."""

    def __init__(self, other):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.__dict__["other"] = other  # no submodule

    def forward(self, hidden):
        return hidden + self.linear(hidden) @ self.other.linear.weight


class _Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        first = torch.nn.Module()
        first.linear = torch.nn.Linear(16, 16)
        self.layers = torch.nn.ModuleList([_ReadsElsewhere(None), _ReadsElsewhere(None)])
        for layer, other in zip(self.layers, reversed(self.layers)):
            layer.__dict__["other"] = other

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def _elsewhere(fullgraph):
    rank, world = rank_and_world()
    torch.manual_seed(3)
    values = torch.randn(2, world, 4, 16)
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, backend = _Model(), Graphs("eager")
        engine = make_engine(model, config_of(3, live_bytes=1))
        for layer in model.layers if compiled else ():
            layer.compile(backend=backend, fullgraph=fullgraph)
        losses = []
        try:
            for value in values:
                loss = engine(value[rank])
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        except torch._dynamo.exc.Unsupported as error:
            engine.destroy()
            return str(error)
        found.append((losses, full_parameters(model)))
        engine.destroy()
    assert found[0][0] == found[1][0] and differences(found[0][1], found[1][1]) == []
    return ""


def test_a_read_that_no_block_holds_gathers():
    assert run_ranks(2, _elsewhere, False) == [""] * 2


def test_a_read_that_no_block_holds_is_named_where_the_graph_must_be_whole():
    for message in run_ranks(2, _elsewhere, True):
        assert "gather_released_parameter" in message, message


def _reads_both_ways():
    model = make_model()
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = make_engine(model, config_of(3, live_bytes=1))
    parameters = model.layers[1].up._parameters
    assert type(parameters) is strata._C.ParameterDict and dict.__getitem__(parameters, "weight").numel() == 0
    by_type = type(parameters).__getitem__(parameters, "weight")
    assert torch.equal(by_type.cpu(), whole["layers.1.up.weight"].cpu())
    by_slot = model.layers[0].up._parameters["weight"]
    assert torch.equal(by_slot.cpu(), whole["layers.0.up.weight"].cpu())
    assert len(list(model.layers[2].up._parameters.values())[0]) == 0  # looking through them gathers nothing
    for read in (parameters.__getitem__, lambda name: type(parameters).__getitem__(parameters, name)):
        with pytest.raises(KeyError, match="nothing"):
            read("nothing")
    engine.destroy()


def test_the_interpreter_and_the_type_read_alike():
    run_ranks(2, _reads_both_ways)
