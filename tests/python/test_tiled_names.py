"""DeepSpeed's names of long sequences, used as axolotl, ArcticTraining and DeepSpeed's own tests use them: tiled
functions have the numbers of untiled ones, in plain torch and in an engine."""

import math
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from sequence_models import VOCABULARY, make_model
from test_pieces import trains_as_whole
from torch import nn
from torch.nn.functional import cross_entropy

import strata
from strata.compat.sequence import UlyssesSPAttentionHF
from strata.compat.tiling import SequenceTiledCompute, TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 12)

    def forward(self, x, scale=1.0):
        return self.down(torch.relu(self.up(x))) * scale

    def loss(self, x, y):
        return cross_entropy(self.head(x), y)


def _rows(masked=False):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 9, 8, generator=generator).requires_grad_()
    y = torch.randint(0, 12, (2, 9), generator=generator)
    if masked:
        y[0, :7] = -100
        y[1, 3:5] = -100
    return x, y


def _gradients(y, model, x):
    used = torch.autograd.grad((y * torch.linspace(0.5, 1, y.numel()).view_as(y)).sum(), [x, *model.parameters()],
                               allow_unused=True)
    return [y.detach()] + [gradient for gradient in used if gradient is not None]


def _all_close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("given", [None, [], "up"])
@pytest.mark.parametrize("shards", [1, 2, 4, 30])
def test_tiled_mlp(shards, given):
    model, (x, _) = Model(), _rows()
    weights = [model.up.weight] if given == "up" else given
    tiled = TiledMLP.apply(Model.forward, model, x, shards, weights)
    _all_close(_gradients(tiled, model, x), _gradients(model(x), model, x))


def test_adapters_get_gradients_and_frozen_weights_none():
    model, (x, _) = Model(), _rows()
    model.up.weight.requires_grad_(False)
    TiledMLP.apply(Model.forward, model, x, 4, [model.up.weight, model.down.weight]).sum().backward()
    assert model.up.weight.grad is None and model.up.bias.grad is not None and model.down.weight.grad is not None


@pytest.mark.parametrize("dimension, reduction", [(1, None), (1, "mean"), (1, "sum"), (2, None)])
def test_sequence_tiled_compute(dimension, reduction):
    model, (x, _) = Model(), _rows()
    scale = torch.linspace(1, 2, 9).expand(2, 9)[..., None]

    def of(x, scale, self):
        return self(x, scale) if dimension == 1 else self(x, scale).movedim(1, 2)

    def whole():
        found = of(x, scale, model)
        return found if reduction is None else getattr(found, reduction)()

    ends = "x", [model.up.weight], dimension, reduction
    found = sequence_tiled_compute(of, 9, 4, dict(x=x, scale=scale), dict(self=model), *ends)
    _all_close(_gradients(found, model, x), _gradients(whole(), model, x))
    found = SequenceTiledCompute.apply(of, 9, 4, ["x", "scale"], ["self"], *ends, x, scale, model)
    _all_close(_gradients(found, model, x), _gradients(whole(), model, x))


def test_results_of_tiles_are_stacked_and_reduced():
    model, (x, y) = Model(), _rows()

    def of(x, y):
        return model.loss(x.flatten(0, 1), y.flatten())

    for reduction in ("mean", "sum"):
        expected = torch.stack([of(*tile) for tile in zip(x.split(3, 1), y.split(3, 1))])
        found = sequence_tiled_compute(of, 9, 3, dict(x=x, y=y), {}, "x", model.head.parameters(), 0, reduction)
        _all_close(_gradients(found, model, x), _gradients(getattr(expected, reduction)(), model, x))


@pytest.mark.parametrize("shards", [1, 4, 40])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_weigh_labels(shards, reduction):
    """Also where tiles have different numbers of labels, or none."""
    model, (x, y) = Model(), _rows(masked=True)
    expected = cross_entropy(model.head(x.flatten(0, 1)), y.flatten(), reduction=reduction)

    def of(self, x, y):
        return cross_entropy(self.head(x), y, reduction=reduction)

    found = TiledFusedLogitsLoss.apply(of, model, x, y, None, shards, [model.head.weight], reduction)
    _all_close(_gradients(found, model, x), _gradients(expected, model, x))


def test_losses_without_labels_and_with_a_mask():
    model, (x, y) = Model(), _rows()
    found = TiledFusedLogitsLoss.apply(Model.loss, model, x, torch.full_like(y, -100), None, 3, None, "mean")
    found.backward()
    assert found == 0 and not x.grad.any()
    mask, teacher = torch.arange(18).view(2, 9) % 2 == 0, torch.randn(2, 9, 8)

    def of(self, x, teacher, mask):
        return ((x - teacher).square().mean(-1) * mask).mean()

    x.grad = None
    found = TiledFusedLogitsLoss.apply(of, object(), x, teacher, mask, 3, iter([]), "mean")
    _all_close(torch.autograd.grad(found, x), torch.autograd.grad(of(None, x, teacher, mask), x))


def test_no_gradients_are_computed_in_forward_and_incoming_ones_stay():
    model, (x, y) = Model(), _rows()
    called = []

    def of(self, x, y):
        called.append(torch.is_grad_enabled())
        return self.loss(x, y)

    with torch.no_grad():
        TiledFusedLogitsLoss.apply(of, model, x, y, None, 3, None, "mean")
    loss = TiledFusedLogitsLoss.apply(of, model, x, y, None, 3, None, "mean")
    assert called == [False] * 6
    loss.backward()
    assert called[6:] == [True] * 3
    incoming = torch.ones(2, 9, 8)
    TiledMLP.apply(Model.forward, model, x, 3, None).backward(incoming)
    sequence_tiled_compute(Model.forward, 9, 3, dict(x=x), dict(self=model), "x", None, 1, None).backward(incoming)
    assert torch.equal(incoming, torch.ones(2, 9, 8))


def test_errors():
    model, (x, y) = Model(), _rows()
    with pytest.raises(strata.UsageError, match="TiledMLP: shards: wanted at least 1; found 0"):
        TiledMLP.apply(Model.forward, model, x, 0, None)
    with pytest.raises(strata.UsageError, match=r"'y': wanted \[batch, 9 tokens, ...\]; found \[2, 8\]"):
        sequence_tiled_compute(Model.loss, 9, 3, dict(x=x, y=y[:, 1:]), dict(self=model), "x")
    with pytest.raises(strata.UsageError, match=r"wanted one of \['x'\] of kwargs_to_shard; found 'self'"):
        sequence_tiled_compute(Model.forward, 9, 3, dict(x=x), dict(self=model), "self")
    with pytest.raises(strata.UsageError, match=r"wanted a tensor with 3 tokens at dimension 1 .* found \[2, 1, 8\]"):
        sequence_tiled_compute(lambda x: x[:, :1], 9, 3, dict(x=x), {}, "x")
    with pytest.raises(ValueError, match="wanted 'mean' or 'sum'; found None"):
        TiledFusedLogitsLoss.apply(Model.loss, model, x, y, None, 3, None, None)
    with pytest.raises(ValueError, match=r"found \[2, 9, 8\], \[2, 8\] and None"):
        TiledFusedLogitsLoss.apply(Model.loss, model, x, y[:, 1:], None, 3, None, "mean")
    with pytest.raises(strata.UsageError, match=r"uses a tensor \[12\] .* not among its parameters"):
        TiledFusedLogitsLoss.apply(lambda _, x, y: model.loss(x, y), None, x, y, None, 3, [model.head.weight],
                                   "mean").backward()  # fmt: skip


def _the_door_takes_objects_with_a_configuration():
    """The engine then checks the model itself, as it does where a path is given."""
    configuration = make_model("llama").config
    given = {"core_attn_implementation": "sdpa", "sequence_parallel_size": 2, "micro_batch_size": 1}
    for kind in (None, "sdpa"):
        configuration._attn_implementation = kind
        mpu = UlyssesSPAttentionHF.register_with_transformers(SimpleNamespace(config=configuration), **given)
        assert mpu.get_sequence_parallel_world_size() == 2
    given["core_attn_implementation"] = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' does not match model config attn_implementation 'sdpa'"):
        UlyssesSPAttentionHF.register_with_transformers(SimpleNamespace(config=configuration), **given)


def test_the_door_takes_objects_with_a_configuration():
    run_ranks(2, _the_door_takes_objects_with_a_configuration)


# --- in an engine ---


def _mlp_of_arctic_training(self, x):
    shards = math.ceil(x.shape[-2] / 4)
    weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    return TiledMLP.apply(forward, self, x, shards, weights)


def _loss_of_arctic_training(model, hidden, labels):
    def of(model, hidden, labels):
        logits = model.lm_head(hidden)
        return cross_entropy(logits.float(), labels, reduction="sum")

    total = TiledFusedLogitsLoss.apply(of, model, hidden, labels, None, 3, [model.lm_head.weight], "sum")
    return total / (labels != -100).sum()


def _tiled(model):
    """The model as ArcticTraining changes it, but only this instance."""
    for layer in model.model.layers:
        layer.mlp.forward = _mlp_of_arctic_training.__get__(layer.mlp)
    inner = model.model

    def forward(input_ids, labels, use_cache):
        hidden = inner(input_ids=input_ids, use_cache=use_cache).last_hidden_state
        labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return SimpleNamespace(**{"loss": _loss_of_arctic_training(model, hidden, labels)})

    model.forward = forward
    return model


@pytest.mark.parametrize("stage, checkpointing", [(0, False), (2, True), (3, False), (3, True)])
def test_engines(stage, checkpointing):
    run_ranks(2, trains_as_whole, stage, checkpointing, _tiled)


def _hooks_and_tiles(tiles):
    """At stage 3 each weight's gradient comes once; weights in tiles give theirs, too."""
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
              "strata": {"tiles": {"max_gather": 2048}} if tiles else {},
              "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}  # fmt: skip
    ids = torch.arange(32).view(2, 16) % VOCABULARY
    found = []
    for change in (lambda model: model, _tiled):
        model, seen = change(make_model("llama")), []
        if not tiles:
            model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: seen.append(gradient.shape))
        engine, *_ = strata.initialize(model=model, config=config)
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        assert tiles or len(seen) == 1
        found.append([strata.utils.safe_get_full_grad(p) for p in engine.module.parameters()])
        engine.destroy()
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tiles", [False, True])
def test_gradients_come_once_and_weights_in_tiles_have_theirs(tiles):
    run_ranks(2, _hooks_and_tiles, tiles)
