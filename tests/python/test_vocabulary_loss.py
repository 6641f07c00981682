"""strata.nn.linear_cross_entropy against torch's cross-entropy of whole logits."""

import pytest
import strata
import torch
from devices import test_device
from ranks import run_ranks
from sequence_models import make_model as make_transformer
from sequence_models import rows_of
from strata.model import free_memory
from strata.tiles.vocabulary_loss import LazyLogits
from tiled_models import IDS, TiledModel, batches_of, tiled_config
from tiny_models import full_parameters, make_engine, rank_and_world, train_step
from torch import nn

LCE = strata.nn.linear_cross_entropy


def _case(dtype, bias, seed=0, tokens=(3, 7), vocabulary=50, width=12):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*tokens, width, generator=generator).to(test_device(), dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).to(test_device(), dtype).requires_grad_()
    bias = torch.randn(vocabulary, generator=generator).to(test_device(), dtype).requires_grad_() if bias else None
    labels = torch.randint(0, vocabulary, tokens, generator=generator).to(test_device())
    labels[0, :3] = -100
    return hidden, weight, bias, labels


def _plain(hidden, weight, bias, labels, reduction, ignore_index=-100):
    logits = nn.functional.linear(hidden, weight, bias).float()
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index,
                                       reduction=reduction)


def _require_near(ours, theirs, near):
    """The tolerance is relative to the largest value, as the function's docstring states it."""
    assert (ours.float() - theirs.float()).abs().max() <= near * theirs.float().abs().max()


@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-5), (torch.float64, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_and_gradients_are_those_of_whole_logits(dtype, near, bias, reduction):
    for block_bytes in (None, 4 * 50 * 4):  # all at once, and four tokens at a time
        hidden, weight, b, labels = _case(dtype, bias)
        inputs = [t for t in (hidden, weight, b) if t is not None]
        ours = LCE(hidden, weight, labels, b, reduction=reduction, block_bytes=block_bytes)
        theirs = _plain(hidden, weight, b, labels, reduction).view(ours.shape)
        _require_near(ours, theirs, near)
        scale = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).to(test_device())
        for mine, wanted in zip(torch.autograd.grad((ours * scale).sum(), inputs),
                                torch.autograd.grad((theirs * scale).sum(), inputs)):
            assert mine.dtype == wanted.dtype
            _require_near(mine, wanted, near)


def test_logits_that_overflow_exponentials_do_not():
    hidden, weight, _, labels = _case(torch.float32, False)
    hidden = hidden.detach() * 1e3
    torch.testing.assert_close(LCE(hidden, weight, labels), _plain(hidden, weight, None, labels, "mean"))


@pytest.mark.parametrize("reduction", ["mean", "none"])  # all of the vocabulary at once, and in blocks
@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_blocks_of_the_vocabulary_that_are_masked_count_as_in_plain_torch(dtype, near, reduction):
    rows, device = 8192, test_device()  # of a block of a weight that is not in tiles
    for masked, label in (
        ([slice(0, rows)], rows + 3),  # the first block, so that nothing is there yet
        ([slice(rows, 2 * rows)], 5),
        ([slice(0, 2 * rows)], 2 * rows + 1),
        ([slice(0, rows + 2), slice(rows + 3, None)], rows + 2),  # all but one
    ):
        generator = torch.Generator().manual_seed(2)
        hidden = torch.randn(6, 4, generator=generator).to(device, dtype).requires_grad_()
        weight = torch.randn(2 * rows + 7, 4, generator=generator).to(device, dtype).requires_grad_()
        bias = torch.randn(2 * rows + 7, generator=generator).to(device, dtype)
        for part in masked:
            bias[part] = -torch.inf
        bias.requires_grad_()
        labels = torch.full((6,), label, device=device)
        labels[2] = -100
        inputs = (hidden, weight, bias)
        ours = LCE(hidden, weight, labels, bias, reduction=reduction)
        theirs = _plain(hidden, weight, bias, labels, "mean")
        ours = ours.sum() / 5 if reduction == "none" else ours
        assert (ours - theirs).abs() <= near * (theirs.abs() + 1)
        for mine, wanted in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs)):
            assert mine.isfinite().all()
            assert (mine.float() - wanted.float()).abs().max() <= near * (wanted.float().abs().max() + 1)


def test_a_vocabulary_that_is_masked_whole_is_not_a_number_as_in_plain_torch():
    hidden, weight, bias, labels = _case(torch.float32, True)
    bias = torch.full_like(bias, -torch.inf)
    assert LCE(hidden, weight, labels, bias).isnan() and _plain(hidden, weight, bias, labels, "mean").isnan()


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, _, labels = _case(torch.float32, False)
    LCE(hidden.detach(), weight, labels).backward()
    assert weight.grad is not None and hidden.grad is None
    LCE(hidden, weight.detach(), labels).backward()
    assert hidden.grad is not None


def test_a_graph_that_is_kept_gives_each_time_what_its_factor_says():
    for dtype, tokens in ((torch.float32, (3, 7)), (torch.bfloat16, (2, 200))):  # two blocks of 128 and the rest
        hidden, weight, bias, labels = _case(dtype, True, tokens=tokens)
        inputs = (hidden, weight, bias)
        ours = LCE(hidden, weight, labels, bias, block_bytes=128 * 50 * dtype.itemsize)
        theirs = _plain(hidden, weight, bias, labels, "mean")
        for factor in (3.0, 0.1, 0.0):
            for mine, wanted in zip(torch.autograd.grad(factor * ours, inputs, retain_graph=True),
                                    torch.autograd.grad(factor * theirs, inputs, retain_graph=True)):  # fmt: skip
                _require_near(mine, wanted, 1e-5 if dtype == torch.float32 else 1e-2)


def test_gradients_of_16_bits_are_multiplied_in_fp32():
    """A factor that bf16 would round: all gradients would be off by as much, in the same direction."""
    hidden, weight, _, labels = _case(torch.bfloat16, False, tokens=(2, 200))
    factor = 1.0035
    once, = torch.autograd.grad(LCE(hidden, weight, labels, reduction="sum"), hidden)
    scaled, = torch.autograd.grad(factor * LCE(hidden, weight, labels, reduction="sum"), hidden)
    assert torch.equal(scaled, (once.float() * torch.tensor(factor)).to(torch.bfloat16))
    assert not torch.equal(once, scaled)


def test_no_tokens_and_no_graph():
    hidden, weight, _, labels = _case(torch.float32, False)
    none = LCE(hidden[:0], weight, labels[:0], reduction="sum")
    none.backward()
    assert none == 0 and not weight.grad.any()
    with torch.no_grad():
        assert not LCE(hidden, weight, labels).requires_grad


def test_another_ignore_index_and_a_module():
    hidden, weight, _, labels = _case(torch.float32, False)
    head = nn.Linear(12, 50).to(test_device())
    torch.testing.assert_close(LCE(hidden, head, labels.clamp(0), ignore_index=0),
                               _plain(hidden, head.weight, head.bias, labels.clamp(0), "mean", 0))


def test_what_does_not_fit_is_refused_and_a_label_beyond_the_vocabulary_shows():
    hidden, weight, _, labels = _case(torch.float32, False)
    with pytest.raises(strata.UsageError, match="wanted hidden"):
        LCE(hidden, weight.t(), labels)
    with pytest.raises(strata.UsageError, match="reduction"):
        LCE(hidden, weight, labels, reduction="max")
    labels[1, 1] = 50
    assert LCE(hidden, weight, labels).isnan()


def test_autocast_computes_logits_in_its_dtype():
    hidden, weight, _, labels = _case(torch.float32, False)
    with torch.autocast(hidden.device.type, torch.bfloat16):
        ours, theirs = LCE(hidden, weight, labels), _plain(hidden, weight, None, labels, "mean")
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


class WithoutHead(TiledModel):
    def forward(self, ids):
        return self.hidden(ids)


def _head_in_tiles():
    rank, world = rank_and_world()

    def in_blocks(engine, ids):
        return LCE(engine(ids), engine.module.head, ids.roll(1, -1), block_bytes=4 * 9 * 5)

    def whole(engine, ids):
        logits = engine.module.head(engine(ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, -1).flatten())

    trained = []
    for loss, config in ((in_blocks, tiled_config()), (whole, tiled_config(rows=1000))):
        torch.manual_seed(0)
        model = WithoutHead(tied=True).to(test_device())
        engine = make_engine(model, config)
        losses = [train_step(engine, batch[rank], loss) for batch in batches_of(3, world)]
        trained.append((losses, full_parameters(model)))
        engine.destroy()
    torch.testing.assert_close(trained[0][0], trained[1][0], rtol=1e-4, atol=1e-5, check_device=False)
    for name, value in trained[1][1].items():
        torch.testing.assert_close(trained[0][1][name], value, rtol=1e-3, atol=1e-4, check_device=False)
    return IDS


def test_a_tied_head_in_tiles_trains_without_logits():
    assert run_ranks(2, _head_in_tiles) == [IDS, IDS]


def _trains_without_logits(name, stage, **zero):
    """Against the loss of whole logits: losses, weights after steps, logits that a script reads."""
    results = []
    for loss in ("fused", "plain"):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0} | zero,
            "strata": {"loss": loss},
        }
        engine, *_ = strata.initialize(model=make_transformer(name), config=config)
        losses = []
        for number in range(3):
            batch = rows_of("masked labels", number + 10 * engine.global_rank)
            output = engine(**batch)
            assert isinstance(output.logits, LazyLogits) == (loss == "fused")
            if number == 1:
                assert output.logits.argmax(-1).shape == batch["labels"].shape
            engine.backward(output.loss)
            engine.step()
            losses.append(output.loss.item())
        if loss == "fused":
            with pytest.raises(strata.UsageError, match="loss.*plain"):
                output.logits.sum()
        with torch.no_grad():
            losses.append(engine(**batch).logits.sum().item())
            tokens = engine.module.generate(batch["input_ids"].to(engine.device), max_new_tokens=3, do_sample=False)
        engine.destroy(keep_values=True)
        results.append([losses, tokens.cpu(), *(p.detach().cpu() for p in engine.module.parameters())])
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for fused, plain in zip(results[0][1:], results[1][1:]):
        torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("world, name, stage", [
    (1, "qwen3", 3), (2, "qwen3", 2), (2, "llama", 3), (1, "soft caps", 3), (2, "a scale", 3)])
def test_a_whole_head_trains_without_logits(world, name, stage):
    run_ranks(world, _trains_without_logits, name, stage)


def _chooses_by_memory():
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, *_ = strata.initialize(model=make_transformer("llama"), config=config)
    assert type(engine(**rows_of("", 1)).logits) is torch.Tensor
    need = 12 * 64 * 32  # bytes of 32 tokens
    free_memory.free_bytes, found = lambda device: 2 * need, []
    for tokens in (16, 17, 64, 16):
        found.append(type(engine(**rows_of("", 1, tokens=tokens)).logits) is LazyLogits)
    free_memory.free_bytes = lambda device: 0  # what is free now changes no length that was seen
    found.append(type(engine(**rows_of("", 1)).logits) is LazyLogits)
    return found


def test_the_loss_is_chosen_by_memory_once_for_a_length():
    assert run_ranks(1, _chooses_by_memory) == [[False, True, True, False, False]]


def test_scaled_and_capped_logits_are_those_of_plain_torch():
    hidden, weight, bias, labels = _case(torch.float64, True)
    for scale, cap in ((0.3, None), (1.0, 2.0), (-0.7, 1.5)):
        logits = nn.functional.linear(hidden, weight, bias) * scale
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        wanted = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        ours = LCE(hidden, weight, labels, bias, scale=scale, softcap=cap)
        _require_near(ours, wanted, 1e-5)
        for mine, theirs in zip(torch.autograd.grad(ours, (hidden, weight, bias)),
                                torch.autograd.grad(wanted, (hidden, weight, bias))):
            _require_near(mine, theirs, 1e-5)


class _Direct(torch.autograd.Function):
    """A script's own loss, which autograd hands the logits without asking for their values."""

    @staticmethod
    def forward(ctx, logits):
        return logits.new_zeros(()) if logits.is_meta else logits.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(2, 16, 64)


def _metric_then_term(output):
    with torch.no_grad():
        output.logits.argmax(-1)
    return output.loss + output.logits.float().logsumexp(-1).square().mean()


def _factor_then_in_place(output):
    half = output.logits / 2
    output.logits[..., 5:] = -10
    return half.logsumexp(-1).mean() + output.logits.logsumexp(-1).mean()


USES = {use.__name__: use for use in (_metric_then_term, _factor_then_in_place)}


def _gradients_of(use, loss, adapters=False):
    model = make_transformer("llama")
    if adapters:
        import peft

        torch.manual_seed(5)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
              "zero_optimization": {"stage": 3}, "strata": {"loss": loss}}  # fmt: skip
    engine, *_ = strata.initialize(model=model.to(test_device()), config=config)
    output = engine(**rows_of("masked labels", 1))
    assert isinstance(output.logits, LazyLogits) == (loss == "fused")
    found = use(output)
    engine.backward(found)
    gradients = [strata.utils.safe_get_full_grad(p).clone() for p in engine.module.parameters() if p.requires_grad]
    engine.destroy()
    return found.item(), gradients


@pytest.mark.parametrize("use", USES)
def test_scripts_that_read_logits_get_the_gradients_of_plain_ones(use):
    _require_equal(_gradients_of(USES[use], "fused"), _gradients_of(USES[use], "plain"))


def test_adapters_train_without_logits():
    _require_equal(_gradients_of(lambda output: output.loss, "fused", True),
                   _gradients_of(lambda output: output.loss, "plain", True))


def _require_equal(ours, theirs):
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    for mine, wanted in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-6, rtol=1e-5)


def test_uses_that_would_lose_a_gradient_are_errors():
    with pytest.raises(RuntimeError, match="meta"):
        _gradients_of(lambda output: output.loss + _Direct.apply(output.logits), "fused")
    with pytest.raises(strata.UsageError, match="retain_grad.*plain"):
        _gradients_of(lambda output: output.logits.retain_grad(), "fused")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_head_within_a_checkpoint_gives_its_gradients(reentrant):
    hidden, _, _, _ = _case(torch.float32, False, tokens=(2, 16), width=32)
    found = []
    for loss in ("fused", "plain"):
        engine, *_ = strata.initialize(model=make_transformer("llama").to(test_device()), config={
            "train_micro_batch_size_per_gpu": 2, "strata": {"loss": loss},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})  # fmt: skip
        logits, again = torch.utils.checkpoint.checkpoint(
            lambda x, head=engine.module.lm_head: (head(x), x * 2), hidden, use_reentrant=reentrant)
        hidden.grad = None
        (logits.logsumexp(-1).mean() + again.mean()).backward()
        found.append(hidden.grad.clone())
        engine.destroy()
    torch.testing.assert_close(found[0], found[1])


def test_logits_that_were_not_computed_describe_their_values():
    hidden, _, _, labels = _case(torch.float32, False, tokens=(2, 16), width=32)
    engine, *_ = strata.initialize(model=make_transformer("llama").to(test_device()), config={
        "train_micro_batch_size_per_gpu": 2, "strata": {"loss": "fused"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})  # fmt: skip
    logits = engine.module.lm_head(input=hidden)
    assert isinstance(logits, LazyLogits) and logits.requires_grad and not logits.is_meta
    assert (logits.is_cuda, logits.is_cpu) == (hidden.is_cuda, hidden.is_cpu) and logits.shape == (2, 16, 64)
    assert logits._found is None
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(strata.UsageError, match="in place"):
        logits.sum()
    with pytest.raises(strata.UsageError, match="in place"):
        engine.module.loss_function(logits, labels, 64)
    engine.module.lm_head.register_full_backward_hook(lambda *_: None)
    assert not isinstance(engine.module.lm_head(hidden), LazyLogits)
