"""A function of each token in pieces of a row: the numbers of the whole function, in plain torch and in an engine."""

import pytest
import torch
from ranks import run_ranks
from sequence_models import make_model, rows_of
from tiny_models import make_engine
from torch import nn
from torch.utils.checkpoint import checkpoint

import strata
from strata.sequence.pieces import in_pieces


class Mlp(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), dropout
        self.calls = []  # the tokens of each

    def forward(self, x):
        self.calls.append(x.shape[-2])
        hidden = nn.functional.dropout(nn.functional.silu(self.up(x)), self.dropout)
        return self.down(hidden)


def _in_pieces(mlp, x, size=4):
    return in_pieces(mlp, x, size, list(mlp.parameters()))


def _input(*shape, requires_grad=True):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_(requires_grad)


def _gradients(y, tensors):
    scale = torch.linspace(-1, 1, y.numel()).view_as(y)
    return torch.autograd.grad(y, tensors, scale.to(y.dtype))


@pytest.mark.parametrize("shape", [(10, 8), (2, 9, 8), (2, 3, 8, 8)])
def test_values_and_gradients(shape):
    mlp, x = Mlp(), _input(*shape)
    whole, parts = mlp(x), _in_pieces(mlp, x)
    torch.testing.assert_close(parts, whole)
    tensors = [x, *mlp.parameters()]
    for theirs, ours in zip(_gradients(whole, tensors), _gradients(parts, tensors), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


def test_frozen_weights_and_inputs_without_gradient():
    mlp = Mlp()
    mlp.up.requires_grad_(False)
    for x in (_input(9, 8), _input(9, 8, requires_grad=False)):
        tensors = [t for t in (x, *mlp.parameters()) if t.requires_grad]
        for theirs, ours in zip(_gradients(mlp(x), tensors), _gradients(_in_pieces(mlp, x), tensors), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
    mlp.requires_grad_(False)
    assert not _in_pieces(mlp, _input(9, 8, requires_grad=False)).requires_grad
    x = _input(9, 8)
    _in_pieces(mlp, x).sum().backward()
    assert x.grad is not None and mlp.down.weight.grad is None


def test_without_gradients_and_short_rows():
    mlp, x = Mlp(), _input(9, 8)
    with torch.no_grad():
        torch.testing.assert_close(_in_pieces(mlp, x), mlp(x))
    mlp.calls.clear()
    assert torch.equal(_in_pieces(mlp, x, 9), mlp(x)) and mlp.calls == [9, 9]


def test_a_checkpoint_does_not_call_the_function_a_third_time():
    mlp, norm, x = Mlp(), nn.LayerNorm(8), _input(2, 9, 8)
    checkpoint(lambda x: x + _in_pieces(mlp, norm(x)), x, use_reentrant=False).sum().backward()
    assert mlp.calls == [4, 4, 1, 4, 4, 1]
    found, x.grad = x.grad, None
    (x + mlp(norm(x))).sum().backward()
    torch.testing.assert_close(found, x.grad)


def test_hooks_see_the_whole_gradient_once():
    mlp, seen = Mlp(), []
    mlp.up.weight.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
    _in_pieces(mlp, _input(9, 8)).sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(mlp.up.weight.grad, 2 * seen[0])


def test_sums_are_fp32():
    """In bf16 a sum of 4,096 ones ends at 256."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    in_pieces(lambda x: x * weight, torch.ones(4096, 1, dtype=torch.bfloat16), 1, [weight]).sum().backward()
    assert weight.grad.item() == 4096


def test_dropout_and_autocast_are_those_of_forward():
    mlp, x = Mlp(dropout=0.5), _input(9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = _in_pieces(mlp, x)
    assert y.dtype == torch.bfloat16
    torch.manual_seed(7)
    before = torch.get_rng_state()
    (of_input,) = _gradients(y, [x])
    assert torch.equal(torch.get_rng_state(), before)
    # A step against the gradient changes the output as the gradient says, if the same elements are dropped.
    double = Mlp(dropout=0.5).double()
    x = _input(9, 8).detach().double().requires_grad_()

    def of(x):
        torch.manual_seed(5)
        return _in_pieces(double, x)

    assert torch.autograd.gradcheck(of, x)
    assert of_input.shape == (9, 8)


def test_errors():
    mlp, x = Mlp(), _input(9, 8)
    with pytest.raises(strata.UsageError, match=r"at least 1 token a piece; found \[9, 8\] and 0"):
        in_pieces(mlp, x, 0)
    with pytest.raises(strata.UsageError, match=r"wanted x \[..., tokens, width\]"):
        in_pieces(mlp, x[0], 4)
    with pytest.raises(strata.UsageError, match=r"4 tokens at dimension -2 from .* a piece \[4, 8\]; found \[8\]"):
        in_pieces(lambda x: x.sum(0), x, 4)
    with pytest.raises(strata.UsageError, match=r"uses a tensor \[8\] .* not among its parameters"):
        in_pieces(mlp, x, 4, [mlp.up.weight, mlp.up.bias, mlp.down.weight]).sum().backward()
    (once,) = torch.autograd.grad(_in_pieces(mlp, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


# --- in an engine ---


def in_pieces_of(model):
    """The model with its MLPs in pieces of 3 tokens."""
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.forward = (lambda mlp, whole: lambda x: in_pieces(whole, x, 3, list(mlp.parameters())))(mlp, mlp.forward)
    return model


def trains_as_whole(stage, checkpointing, change, dtype=None):
    """An engine over the changed model has the gradients and weights of one over the unchanged model."""
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "strata": {"max_live_bytes": 1},
              "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}  # fmt: skip
    found = []
    for one in (lambda model: model, change):
        model = make_model("llama")
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        engine = make_engine(one(model), config)
        seen = []
        for number in range(4):
            loss = engine(**rows_of("plain", 10 * number + engine.global_rank), use_cache=False).loss
            engine.backward(loss)
            if number % 2:
                seen += [strata.utils.safe_get_full_grad(p) for p in engine.module.parameters()]
            engine.step()
            seen += [loss.detach()] + ([torch.tensor(engine.get_global_grad_norm())] if number % 2 else [])
        with strata.zero.GatheredParameters(list(engine.module.parameters())):
            seen += [p.detach().clone() for p in engine.module.parameters()]
        found.append(seen)
        engine.destroy()
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("stage, checkpointing", [(0, False), (2, True), (3, False), (3, True)])
def test_engines(stage, checkpointing):
    run_ranks(2, trains_as_whole, stage, checkpointing, in_pieces_of)
