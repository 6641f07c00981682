"""MLPs and norms of transformers' models in pieces of the sequence (strata.mlp_piece)."""

import copy
import pickle

import pytest
import strata
import torch
from devices import test_device
from ranks import run_ranks
from sequence_models import make_model, rows_of
from strata.model import free_memory
from strata.sequence.module_pieces import MlpPieces, NormPieces
from torch import nn


def _engine(piece, stage=3, name="llama", checkpointed=False, adapters=False, **changes):
    model = make_model(name, **changes)
    if adapters:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["gate_proj", "down_proj", "q_proj"]))
    if checkpointed:
        model.gradient_checkpointing_enable()
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
              "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
              "gradient_accumulation_steps": 2, "strata": {"mlp_piece": piece}}  # fmt: skip
    return strata.initialize(model=model.to(test_device()), config=config)[0]


def _count(engine, lengths):
    """Has every MLP note the tokens of its calls in ``lengths``."""
    for name, module in engine.module.named_modules():
        if name.endswith("mlp"):
            module.act_fn.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[-2]))


def _trained(piece, steps=4, **of_engine):
    engine, losses = _engine(piece, **of_engine), []
    _count(engine, lengths := [])
    for number in range(steps):
        loss = engine(**rows_of("", number + 10 * engine.global_rank)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    values = [p.detach().cpu() for p in engine.module.parameters()]
    if engine.zero_optimization_stage() == 3:
        engine.destroy(keep_values=True)
        values = [p.detach().cpu() for p in engine.module.parameters()]
    return lengths, losses, values


def _agrees(stage, name="llama", checkpointed=False, adapters=False):
    of_engine = {"name": name, "checkpointed": checkpointed, "adapters": adapters}
    lengths, losses, values = _trained(5, stage=stage, **of_engine)
    assert max(lengths) == 5
    _, wanted_losses, wanted = _trained(0, stage=stage, **of_engine)
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    for ours, theirs in zip(values, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    return len(lengths)


@pytest.mark.parametrize("world, stage", [(2, 0), (2, 2), (2, 3)])
def test_steps_are_those_of_whole_mlps(world, stage):
    # Two layers, four micro-steps, four pieces, in forward and in backward.
    assert run_ranks(world, _agrees, stage) == [2 * 4 * 4 * 2] * world


@pytest.mark.parametrize("name", ["llama", "soft caps"])
def test_a_checkpointed_layer_computes_its_mlp_no_more_often(name):
    (count,) = run_ranks(1, _agrees, 3, name, True)
    behind_it_is_a_norm = name == "soft caps"  # its input is saved, so the MLP comes again for it
    assert count == 2 * 4 * 4 * (3 if behind_it_is_a_norm else 2)


def test_adapters_within_mlps_train():
    run_ranks(2, _agrees, 3, "llama", False, True)


def test_auto_takes_pieces_of_what_does_not_fit(monkeypatch):
    monkeypatch.setattr("strata.sequence.module_pieces._TOKENS", 6)
    need = 8 * 48 * 4 * 32  # bytes of the tensors of one MLP for 32 tokens
    for free, longest in ((4 * need, 16), (4 * need - 4, 6), (None, 16)):
        monkeypatch.setattr(free_memory, "free_bytes", lambda device, free=free: free)
        lengths, *_ = _trained(None, steps=2)
        assert max(lengths) == longest


def test_mlps_that_drop_out_stay_whole_and_models_are_as_before_afterwards():
    engine = _engine(5)
    mlp = engine.module.model.layers[0].mlp
    copied = copy.deepcopy(engine.module)
    _count(engine, lengths := [])
    with torch.no_grad():
        engine(**rows_of("", 1))
    assert set(lengths) == {16}
    engine.destroy()
    assert type(mlp) is type(copied.model.layers[0].mlp) and "_strata_pieces" not in vars(mlp)
    x = torch.ones(1, 16, 32, device=test_device())
    assert copied.model.layers[0].mlp(x).shape == x.shape
    mlp.add_module("dropout", torch.nn.Dropout(0.5))
    assert strata.sequence.module_pieces._inner_width(mlp) is None


def _compiled():
    engine = _engine(5, checkpointed=False)
    engine.compile(backend="aot_eager")
    loss = engine(**rows_of("", 1)).loss
    engine.backward(loss)
    return loss.item()


def test_compiled_blocks_take_pieces_that_are_asked_for():
    assert run_ranks(1, _compiled) == [pytest.approx(_plain_loss(), rel=1e-5)]


def _plain_loss():
    with torch.no_grad():
        return make_model("llama")(**rows_of("", 1)).loss.item()


@pytest.mark.parametrize("wrong", [-1, 1.5, "some"])
def test_a_piece_is_a_number_of_tokens(wrong):
    with pytest.raises(strata.ConfigError, match="strata.mlp_piece"):
        _engine(wrong)


class ShiftingMLP(nn.Module):
    """A stranger's, which looks at the token before."""

    def __init__(self):
        super().__init__()
        self.shift, self.up, self.down = nn.ZeroPad2d((0, 0, 1, -1)), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x + self.shift(x)).relu())


class StrangeMLP(ShiftingMLP):
    """The same, by a function."""

    def __init__(self):
        super().__init__()
        self.shift = nn.SiLU()

    def forward(self, x):
        return super().forward(x.roll(1, dims=-2))


def test_mlps_that_may_look_at_other_tokens_stay_whole():
    assert not MlpPieces([ShiftingMLP()], 4)._widths and not MlpPieces([StrangeMLP()], None)._widths


def test_mlps_with_pieces_are_pickled_as_plain_ones():
    model = make_model("llama")
    mlp = model.model.layers[0].mlp
    pieces = MlpPieces([mlp], 4)
    assert "_strata_pieces" in vars(mlp)
    again = pickle.loads(pickle.dumps(mlp))
    assert type(again) is type(make_model("llama").model.layers[0].mlp)
    x = torch.ones(1, 16, 32)
    torch.testing.assert_close(again(x), mlp(x))
    pieces.undo()


def _norm_results(norm, x, gradient):
    """The result, gradients of x and weight, and the numbers that autograd keeps."""
    kept = []
    norm.weight.grad, x.grad = None, None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = norm(x)
    found.backward(gradient)
    return found.detach(), x.grad, norm.weight.grad, sum(t.numel() * t.itemsize for t in kept)


@pytest.mark.parametrize("name, dtype", [("qwen3", torch.bfloat16), ("qwen3", torch.float32),
                                         ("soft caps", torch.bfloat16)])  # fmt: skip
def test_a_norm_in_pieces_keeps_its_input_alone(name, dtype):
    model = make_model(name).to(test_device(), dtype)
    for norm, shape in ((model.model.layers[0].input_layernorm, (2, 16, 32)),
                        (getattr(model.model.layers[0].self_attn, "q_norm", model.model.norm), None)):  # fmt: skip
        shape = shape or (2, 16, 3, norm.weight.numel())
        x = torch.randn(shape, device=test_device(), dtype=dtype).requires_grad_()
        gradient = torch.randn(shape, device=test_device(), dtype=dtype)
        *wanted, before = _norm_results(norm, x, gradient)
        for tokens in (5, 32, None):  # of 2 x 16
            pieces = NormPieces([norm], tokens)
            *found, kept = _norm_results(norm, x, gradient)
            pieces.undo()
            assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
            assert (found[2] - wanted[2]).abs().max() <= 4 * torch.finfo(dtype).eps * wanted[2].abs().max()
            in_pieces = tokens == 5
            assert kept == (x.numel() * x.itemsize if in_pieces else before)


def test_norms_that_are_not_only_a_weight_stay_whole():
    model = make_model("llama")
    norm = model.model.norm
    norm.scale = nn.Parameter(torch.ones(1))
    strange = StrangeMLP()
    for left in (norm, strange, nn.LayerNorm(8)):
        NormPieces([left], 4)
        assert "_strata_pieces" not in vars(left)


def _agrees_in_norms(name):
    """The tests above count calls within MLPs; here it is the norms of heads."""
    engine, losses = _engine(5, name=name, checkpointed=True), []
    norms = [m for m in engine.module.modules() if type(m).__name__.endswith("RMSNorm")]
    assert norms and all("_strata_pieces" in vars(norm) for norm in norms)
    engine.destroy()
    assert not any("_strata_pieces" in vars(norm) for norm in norms)
    _agrees(3, name, True)


def test_steps_with_norms_of_heads():
    run_ranks(2, _agrees_in_norms, "qwen3")
