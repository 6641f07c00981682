"""CUDA graphs of compiled blocks, ``strata.cuda_graphs``: what is allowed and where torch is told of a new step, on any
device; the numbers, and that graphs are recorded once, on GPUs (STRATA_TEST_DEVICE=cuda)."""

import sys
from types import SimpleNamespace

import pytest
import torch
from devices import ON_GPU, ranks_at_most
from ranks import run_ranks
from tiny_models import config_of, full_parameters, loss_of, make_batches, make_engine, make_model, train_step

STEPS, SETTLED = 12, 8  # addresses settle in the first steps, while the engine learns the order of the units
needs_gpus = pytest.mark.skipif(not ON_GPU, reason="needs a GPU and STRATA_TEST_DEVICE=cuda")


def config_with_graphs(stage, **more):
    config = config_of(stage, **more)
    config.setdefault("strata", {})["cuda_graphs"] = True
    return config


@pytest.mark.parametrize("arguments", [{"mode": "reduce-overhead"}, {"backend": "cudagraphs"}])
def test_the_key_allows_them(arguments):
    model = make_model()
    model.layers[0].compile(**arguments)
    engine = make_engine(model, config_with_graphs(2))
    model.layers[1].compile(**arguments)
    with torch.compiler.set_stance("force_eager"):
        train_step(engine, make_batches(1, 1)[0][0])
    engine.destroy()


@pytest.mark.parametrize("asked, mode", [
    ({}, "reduce-overhead"),
    ({"mode": "max-autotune-no-cudagraphs"}, "max-autotune-no-cudagraphs"),
    ({"options": {"max_autotune": True}}, None),
    ({"backend": "aot_eager"}, None),
])  # fmt: skip
def test_engine_compile_makes_them_unless_a_mode_is_asked_for(monkeypatch, asked, mode):
    seen = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **given: seen.append(given))
    engine = make_engine(make_model(), config_with_graphs(3))
    engine.compile(backend=asked.get("backend"), compile_kwargs={k: v for k, v in asked.items() if k != "backend"})
    assert seen and all(given.get("mode") == mode for given in seen)
    engine.destroy()


def test_torch_is_told_where_forward_begins_anew(monkeypatch):
    told = []
    trees = SimpleNamespace(mark_step_begin=lambda: told.append(None))
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    tokens = make_batches(1, 1)[0][0]

    def marks(call):
        told.clear()
        call()
        return len(told)

    engine = make_engine(make_model(), config_with_graphs(2, accumulation=2))
    losses = []
    for forward in (engine, engine.module):
        for _ in range(2):
            train = lambda: losses.append(loss_of(forward, tokens))  # noqa: B023, E731
            assert marks(train) == 1
            assert marks(train) == 0, "a forward waits for its backward"
            with torch.no_grad():
                assert marks(lambda: forward(tokens)) == 0, "an evaluation before backward"  # noqa: B023
            assert marks(lambda: engine.backward(losses[0] + losses[1])) == 0
            losses.clear()
            engine.step()
            with torch.no_grad():
                assert [marks(lambda: forward(tokens)) for _ in range(2)] == [1, 1], "each evaluation"  # noqa: B023
    loss_of(engine.module, tokens).backward()
    assert marks(lambda: engine.module(tokens)) == 1, "a script's own backward"
    model = engine.module
    engine.destroy(keep_values=True)
    assert marks(lambda: model(tokens)) == 0
    plain = make_engine(make_model(), config_of(2))
    assert marks(lambda: plain(tokens)) == 0, "without the key"
    plain.destroy()


def recorded():
    """Graphs that torch has recorded in this process."""
    from torch._inductor.cudagraph_trees import get_container

    tree = get_container(torch.cuda.current_device()).tree_manager
    nodes = [node for nodes in tree.roots.values() for node in nodes] if tree is not None else []
    for node in nodes:  # grows
        nodes += [child for children in node.children.values() for child in children]
    return len(nodes)


def _trained(config, **arguments):
    """Losses, weights, and the graphs recorded before the last steps and after them."""
    torch._dynamo.reset()
    engine = make_engine(make_model(), config)
    engine.compile(compile_kwargs=arguments)
    batches = make_batches(2 * STEPS, engine.world_size)
    losses, settled = [], None
    for step in range(STEPS):
        if step == SETTLED:
            settled = recorded()
        for micro in range(2):
            losses.append(train_step(engine, batches[2 * step + micro][engine.global_rank]))
        with torch.no_grad():
            losses.append(loss_of(engine, batches[0][engine.global_rank]).item())
    result = losses, full_parameters(engine.module), settled, recorded()
    engine.destroy()
    return result


def _steps_have_the_bits_of_compiled_ones(config):
    config["strata"] = {**config.get("strata", {}), "cuda_graphs": True}
    losses, weights, *_ = _trained(config, mode="default")
    again, replayed, settled, last = _trained(config)
    assert again == losses
    assert all(torch.equal(replayed[name], weights[name]) for name in weights)
    assert settled and settled == last, "graphs were recorded again"


@needs_gpus
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("config", [
    config_of(0, "bf16", accumulation=2),
    config_of(2, "bf16", accumulation=2, clipping=0.05),
    config_of(3, "bf16", accumulation=2, clipping=0.05),
    config_of(3, "fp16", accumulation=2, live_bytes=1),
    config_of(3, "bf16", accumulation=2, zero_optimization={"offload_param": {"device": "cpu"}}),
], ids=["0", "2", "3", "3-nothing-live", "3-offload"])  # fmt: skip
def test_steps_have_the_bits_of_compiled_ones(world, config):
    run_ranks(ranks_at_most(world), _steps_have_the_bits_of_compiled_ones, config)
