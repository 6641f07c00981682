"""Compiled blocks beside checkpointing of every kind, evaluation, generation, accumulation, fp16 with a skipped step,
offload and shard groups: graphs as many as plain torch has, and the bits of blocks that are not compiled."""

import functools

import pytest
import torch
from compiled_training import Graphs, compile_blocks, train
from hf_models import MODELS
from ranks import run_ranks
from soak import also
from tiny_models import (
    config_of,
    differences,
    full_parameters,
    loss_of,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def _keeps_products(context, operator, *args, **kwargs):
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _inside(implementation, selective=False):
    """Within the compiled module there is the wrapper, and in this the block."""
    more = {}
    if selective:
        more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keeps_products)
    model = make_model()
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.nn.Sequential(checkpoint_wrapper(layer, implementation, **more))
    return model


def _outside(implementation):
    """The wrapper lies around the compiled block."""
    model = make_model()
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer, implementation)
    return model


def _compile_inner(model, backend):
    for layer in model.layers:
        layer._checkpoint_wrapped_module.compile(backend=backend, fullgraph=True)


def _compile_wrapped(model, backend):
    """As torch.compile sees a wrapper that is called by a module of the script's: in one graph with the block."""
    for number, layer in enumerate(model.layers):
        model.layers[number] = _Calls(layer[0])
    compile_blocks(model, backend)


class _Calls(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden)


NO_REENTRANT, REENTRANT = CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT
# name: (graphs, model, way to compile, more of the configuration)
CASES = {
    "non-reentrant, outside": (1, lambda: _outside(NO_REENTRANT), _compile_inner, {}),
    "reentrant, outside": (2, lambda: _outside(REENTRANT), _compile_inner, {}),
    "non-reentrant, inside": (1, lambda: _inside(NO_REENTRANT), _compile_wrapped, {}),
    "selective, inside": (1, lambda: _inside(NO_REENTRANT, True), _compile_wrapped, {}),
    "accumulation": (1, make_model, compile_blocks, {"accumulation": 2, "clipping": 0.5}),
    "offload": (1, make_model, compile_blocks,
                {"zero_optimization": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}),
}  # fmt: skip
QUICK = ("reentrant, outside", "selective, inside", "offload")


def _same(name, stage, more=None):
    graphs, make, before, settings = CASES[name]
    zero = {"stage": stage, **settings.get("zero_optimization", {}), **(more or {})}
    config = config_of(stage, live_bytes=1, **{**settings, "zero_optimization": zero})
    losses, weights, _ = train(make, config)
    backend = Graphs()
    compiled, compiled_weights, breaks = train(make, config, backend, before=before)
    assert backend.made == graphs and breaks == {}, (name, backend.made, breaks)
    assert compiled == losses, name
    assert differences(_plain(compiled_weights), _plain(weights)) == [], name


def _plain(weights):
    inner = ("_checkpoint_wrapped_module", "inner", "0")
    return {".".join(p for n, p in enumerate(name.split(".")) if n < 2 or p not in inner): value
            for name, value in weights.items()}  # fmt: skip


@pytest.mark.parametrize("name", [*QUICK, *also(*(name for name in CASES if name not in QUICK))])
def test_a_block_has_the_graphs_of_plain_torch(name):
    run_ranks(2, _same, name, 3, timeout=240.0)


@pytest.mark.soak
def test_shard_groups_compile_as_all_ranks_do():
    run_ranks(4, _same, "accumulation", 3, {"mics_shard_size": 2}, timeout=400.0)
    run_ranks(4, _same, "accumulation", 3, {"zero_hpz_partition_size": 2}, timeout=400.0)


def _with_budget():
    """Torch recomputes within the graph's own backward, which one gather serves."""
    config = config_of(3, live_bytes=1)
    losses, weights, _ = train(make_model, config)
    backend = Graphs()
    with torch._functorch.config.patch(activation_memory_budget=0.3):
        compiled, compiled_weights, breaks = train(make_model, config, backend)
    assert backend.made == 1 and breaks == {} and compiled == losses
    assert differences(compiled_weights, weights) == []


def test_activation_memory_budget_keeps_the_bits():
    run_ranks(2, _with_budget)


def _evaluated():
    config = config_of(3, "bf16", live_bytes=1)
    contexts = (torch.no_grad, torch.inference_mode)
    losses, weights, _ = train(make_model, config, evaluate=contexts)
    backend = Graphs()
    compiled, compiled_weights, breaks = train(make_model, config, backend, evaluate=contexts)
    assert compiled == losses and differences(compiled_weights, weights) == []
    assert backend.made == 3 and breaks == {}  # torch guards the mode of gradients, and the keys of inference


def test_evaluation_adds_a_graph_for_each_mode():
    run_ranks(2, _evaluated)


def _generates():
    """{compiled: (losses, tokens, graphs)}: generation between two steps."""
    rank, _ = rank_and_world()
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, backend = MODELS["qwen3"].build().train(), Graphs()
        engine = make_engine(model, config_of(3))
        if compiled:
            engine.compile(backend, {"fullgraph": True})
        losses, tokens = [], []
        for step in range(2):
            batch = MODELS["qwen3"].batch(torch.Generator().manual_seed(rank), 0, rank)
            with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
                loss = engine(**batch, use_cache=False).loss
                engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            made = backend.made
            with torch.compiler.set_stance("force_eager"):
                tokens.append(model.generate(batch["input_ids"][:1, :5], max_new_tokens=4, do_sample=False).tolist())
            assert backend.made == made
        found.append((losses, tokens))
        engine.destroy()
    assert found[0] == found[1]
    return backend.made


def test_generation_that_is_forced_to_be_eager_makes_no_graph():
    assert run_ranks(2, _generates, timeout=240.0) == [2, 2]  # a block's, and the norm's outside


def _skips_a_step():
    """fp16: a loss that overflows skips its step; the next ones go on with the same graph."""
    rank, world = rank_and_world()
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model, backend = make_model(), Graphs()
        if compiled:
            compile_blocks(model, backend)
        engine = make_engine(model, config_of(3, "fp16"))
        losses, applied = [], []
        for number, tokens in enumerate(make_batches(4, world)):
            with torch.compiler.set_stance("default" if number == 0 else "fail_on_recompile"):
                loss = loss_of(engine, tokens[rank]) * (1e30 if number == 1 else 1.0)
                engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            applied.append(engine.was_step_applied())
        found.append((losses, applied, full_parameters(model)))
        engine.destroy()
    assert found[0][:2] == found[1][:2] and found[0][1] == [True, False, True, True]
    assert differences(found[0][2], found[1][2]) == [] and backend.made == 1


def test_a_skipped_step_of_fp16_makes_no_graph():
    run_ranks(2, _skips_a_step)


def _after_destroy():
    """Graphs of a model that goes on without its engine, and under a second one."""
    rank, world = rank_and_world()
    model, backend = make_model(), Graphs()
    compile_blocks(model, backend)
    graphs = []
    for stage in (3, None, 3):
        engine = model if stage is None else make_engine(model, config_of(stage, live_bytes=1))
        for tokens in make_batches(2, world):
            loss = loss_of(engine, tokens[rank])
            if stage is None:
                loss.backward()
                model.zero_grad()
            else:
                engine.backward(loss)
                engine.step()
        graphs.append(backend.made)
        if stage is not None:
            engine.destroy(keep_values=True)
    return graphs


def test_the_end_of_an_engine_costs_a_graph_at_most():
    for graphs in run_ranks(2, _after_destroy):
        assert graphs[0] == 1 and graphs[1] <= 2 and graphs[2] <= graphs[1] + 1, graphs
