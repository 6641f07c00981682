"""MLPs of transformers' models in pieces of the sequence (strata.mlp_piece)."""

import copy
import pickle

import pytest
import strata
import torch
from devices import test_device
from ranks import run_ranks
from sequence_models import make_model, rows_of
from strata.model import free_memory
from strata.sequence.mlp_pieces import MlpPieces
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
    monkeypatch.setattr("strata.sequence.mlp_pieces._TOKENS", 6)
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
    assert strata.sequence.mlp_pieces._inner_width(mlp) is None


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
