"""engine.compile: the losses and weights are those without it; it refuses in clear words where it cannot compile."""

import pytest
import strata
import torch
from ranks import run_ranks
from soak import also
from strata.compat.engine import initialize
from tiny_models import config_of, full_parameters, loss_of, make_batches, make_engine, make_model, rank_and_world


class _Graphs:
    """A backend of torch.compile that runs graphs unchanged, and counts them."""

    def __init__(self):
        self.made = 0

    def __call__(self, graph, inputs):
        self.made += 1
        return graph.forward


def _train(stage, dtype, backend):
    """Losses of steps and of an evaluation, and the weights; nothing stays gathered that is not in use."""
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(stage, dtype, accumulation=2, clipping=0.5, live_bytes=1))
    assert not engine.is_compiled
    if backend is not None:
        engine.compile(backend=backend, compile_kwargs={"dynamic": False})
        assert engine.is_compiled
    losses = []
    for tokens in make_batches(6, world):
        loss = loss_of(engine, tokens[rank])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(loss_of(engine.module, tokens[rank]).item())
    weights = full_parameters(engine.module)
    engine.destroy()
    return losses, weights


def _same(cases):
    for stage, dtype in cases:
        plain_losses, plain = _train(stage, dtype, None)
        graphs = _Graphs()
        for backend in (graphs, "aot_eager"):
            torch._dynamo.reset()
            losses, weights = _train(stage, dtype, backend)
            assert losses == pytest.approx(plain_losses, rel=1e-6 if dtype == "fp32" else 1e-3), (stage, dtype)
            for name, weight in weights.items():
                torch.testing.assert_close(weight, plain[name], msg=f"{name} at stage {stage} in {dtype}")
        assert graphs.made > 0


QUICK = [(2, "fp32"), (3, "bf16")]
REST = [(stage, dtype) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16") if (stage, dtype) not in QUICK]


@pytest.mark.parametrize("cases", [QUICK, *also(REST)])
def test_a_compiled_model_trains_to_the_same_weights(cases):
    run_ranks(2, _same, cases)


def test_a_module_stays_usable_when_its_engine_has_gone():
    tokens = make_batches(1, 1)[0][0]
    model = make_model()
    before = loss_of(model, tokens).item()
    engine = make_engine(model, config_of(3))
    engine.compile(backend="eager")
    assert loss_of(engine, tokens).item() == pytest.approx(before, rel=1e-6)
    engine.destroy(keep_values=True)
    loss = loss_of(model, tokens)
    loss.backward()
    assert loss.item() == pytest.approx(before, rel=1e-6) and model.head.weight.grad is not None


def test_what_the_hooks_forbid_is_said_at_once():
    engine = make_engine(make_model(), config_of(2))
    for arguments in ({"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": {"triton.cudagraphs": True}}):
        with pytest.raises(strata.UsageError, match="max-autotune-no-cudagraphs"):
            engine.compile(backend="inductor", compile_kwargs=arguments)
    with pytest.raises(strata.UsageError, match="leave fullgraph out"):
        engine.compile(compile_kwargs={"fullgraph": True}, regional=False)
    with pytest.raises(NotImplementedError, match="leave schedule out"):
        engine.compile(schedule=[])
    with pytest.raises(NotImplementedError, match="compiled_autograd_enabled"):
        engine.compile(compiled_autograd_enabled=True)
    assert not engine.is_compiled
    engine.destroy()


def test_as_accelerate_calls_it():
    engine, *_ = initialize(model=make_model(), config=config_of(2))
    kwargs = {"mode": "default", "fullgraph": False, "dynamic": None, "options": None, "disable": False}
    graphs = _Graphs()
    engine.compile(backend=graphs, compile_kwargs=kwargs)
    loss = loss_of(engine, make_batches(1, 1)[0][0])
    engine.backward(loss)
    engine.step()
    assert engine.is_compiled and graphs.made > 0
    engine.destroy()


_WITH_CUDA_GRAPHS = [{"mode": "reduce-overhead"}, {"mode": "max-autotune", "fullgraph": True},
                     {"options": {"triton.cudagraphs": True}}, {"backend": "cudagraphs"}]  # fmt: skip


@pytest.mark.parametrize("arguments", _WITH_CUDA_GRAPHS)
def test_cuda_graphs_are_refused_where_a_script_asks_for_them(arguments):
    refused = "'layers.1' is compiled: CUDA graphs keep the addresses"
    tokens = make_batches(1, 1)[0][0]
    for stage in (0, 3):
        model = make_model()
        model.layers[1].compile(**arguments)
        with pytest.raises(strata.UsageError, match=refused):
            make_engine(model, config_of(stage))
        model = make_model()
        model.layers[1] = torch.compile(model.layers[1], **arguments)
        with pytest.raises(strata.UsageError, match=refused):
            make_engine(model, config_of(stage))
        engine = make_engine(make_model(), config_of(stage))
        engine.module.layers[1].compile(**arguments)
        for call in (engine, engine.module, engine):
            with pytest.raises(strata.UsageError, match=refused):
                call(tokens)
        engine.module.layers[1].compile(backend="eager")
        engine.backward(loss_of(engine, tokens))
        engine.step()
        engine.destroy()


def test_cuda_graphs_of_torchs_settings_are_refused():
    from torch._inductor import config

    engine = make_engine(make_model(), config_of(3))
    with config.patch({"triton.cudagraphs": True}), pytest.raises(strata.UsageError, match="CUDA graphs keep"):
        engine.compile()
    engine.compile(compile_kwargs={"mode": "max-autotune-no-cudagraphs", "disable": True})
    engine.compile(compile_kwargs={"mode": "max-autotune-no-cudagraphs"})
    engine.destroy()
