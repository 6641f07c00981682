"""Sequence parallelism of an engine's own loop: the losses, norms and weights of plain torch on whole rows."""

import os

import pytest
import torch
import transformers
from devices import needs_a_gpu_each
from ranks import run_ranks
from sequence_models import SIZES, TOKENS, make_model, plain_loop, rows_of
from soak import ALL

import strata
from strata.sequence import attention
from strata.sequence.attention import require_possible
from strata.sequence.loader import prepared

pytestmark = needs_a_gpu_each
STEPS = 4

SPARES = {"loss": "fused", "mlp_piece": 3, "activations": {"device": "cpu"}}


def _config(stage, size, accumulation=2, strata=(), **zero):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "strata": {"sequence_parallel": {"size": size}} | dict(strata),
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0} | zero,
    }


def _trains_by_documents(*args):
    """As rows that are too long for a mask of tokens x tokens do."""
    attention._MOST_MASK, attention._BLOCK = 0, 4
    _trains_as_one(*args)


def _trains_as_one(name, kind, size, config, lengths, checkpointing):
    model = make_model(name)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = strata.initialize(model=model, config=config)
    rank, world = engine.global_rank, engine.world_size
    accumulation = engine.gradient_accumulation_steps()
    drawn = STEPS * accumulation // size  # batches that a rank draws
    all_rows = [[rows_of(kind, 10 * r + i, tokens=lengths[i % len(lengths)]) for i in range(drawn)]
                for r in range(world)]
    losses, norms = [], []
    for batch in engine.sequence_loader(all_rows[rank]):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if len(losses) % accumulation == 0:
            norms.append(engine.get_global_grad_norm())
    # Each group trains on its ranks' batches in turn; a step is the mean over groups and micro-steps.
    groups = [[all_rows[first + r][i] for i in range(drawn) for r in range(size)] for first in range(0, world, size)]
    plain = make_model(name)
    in_order = [batch for micro in zip(*groups, strict=True) for batch in micro]
    expected, expected_norms = plain_loop(plain, in_order, accumulation * len(groups))
    mine = expected[rank // size :: len(groups)]
    assert losses == pytest.approx(mine, abs=2e-5)
    assert norms == pytest.approx(expected_norms, abs=2e-5)
    with strata.zero.GatheredParameters(list(engine.module.parameters())):
        for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), atol=1e-4, rtol=1e-4)
    engine.destroy()


def _train(name, kind, size, world, stage, lengths=(TOKENS,), checkpointing=False, job=_trains_as_one, **config):
    run_ranks(world, job, name, kind, size, _config(stage, size, 2 * size, **config), lengths, checkpointing)


@pytest.mark.parametrize("stage", [0, 1, 2, 3] if ALL else [0, 3])
def test_stages(stage):
    _train("qwen3", "plain", 2, 2, stage)


NAMES, KINDS = ["llama", "one key head", "windows"], ["masked labels", "padded", "packed"]
PAIRS = [(name, kind) for name in NAMES for kind in KINDS] if ALL else [*zip(NAMES, KINDS), ("one key head", "packed")]


@pytest.mark.parametrize("name, kind", PAIRS)
def test_models_and_rows(name, kind):
    _train(name, kind, 2, 2, 3)


def test_four_ranks_and_fewer_key_heads():
    _train("qwen3", "packed", 4, 4, 3)


def test_two_groups_of_two():
    _train("qwen3", "masked labels", 2, 4, 2)


def test_lengths_that_are_no_multiple():
    _train("qwen3", "plain", 2, 2, 3, lengths=(17, 12, 9))


def _compiles_and_returns_tuples():
    engine, *_ = strata.initialize(model=make_model("qwen3"), config=_config(3, 2))
    batch = _cut_for(engine, rows_of("packed", 1))
    loss = engine(**batch).loss
    engine.backward(loss)
    norms = [_norm_of_gradients(engine)]
    assert torch.equal(engine(**batch, return_dict=False)[0], loss)
    engine.zero_grad()
    engine.compile(backend="aot_eager")
    compiled = engine(**batch).loss
    torch.testing.assert_close(compiled, loss)
    engine.backward(compiled)
    norms.append(_norm_of_gradients(engine))
    assert norms[0] == pytest.approx(norms[1])


def _norm_of_gradients(engine):
    gradients = [strata.utils.safe_get_full_grad(p) for p in engine.module.parameters()]
    return torch.stack([g.norm() for g in gradients]).norm().item()


def test_compiled_models_and_tuples():
    run_ranks(2, _compiles_and_returns_tuples)


def _ends_with_the_shorter_loader():
    engine, *_ = strata.initialize(model=make_model("qwen3"), config=_config(3, 2))
    rows = [rows_of("plain", number) for number in range(3 - engine.global_rank)]
    assert len(list(engine.sequence_loader(rows))) == 4


def test_the_shorter_loader_ends_a_pass():
    run_ranks(2, _ends_with_the_shorter_loader)


def test_checkpointing_and_offload_and_what_spares_memory():
    _train("qwen3", "packed", 2, 2, 3, checkpointing=True, strata=SPARES, offload_optimizer={"device": "cpu"})


@pytest.mark.parametrize("name, kind", [("one key head", "packed"), ("windows", "plain"), ("windows", "packed")])
def test_rows_that_are_too_long_for_a_mask(name, kind):
    _train(name, kind, 2, 2, 3, lengths=(TOKENS, 28), job=_trains_by_documents)


def _trains_other_models_and_ends():
    """A second model of the process attends as ever, and so does the engine's when it has ended."""
    batch = rows_of("packed", 1)
    other, model = make_model("windows"), make_model("windows")
    before = other(**batch).loss
    engine, *_ = strata.initialize(model=model, config=_config(3, 2))
    with pytest.raises(strata.UsageError, match="piece"):
        engine(**_cut_for(engine, {name: part[:, : 8 + 2 * engine.global_rank] for name, part in batch.items()}))
    engine(**_cut_for(engine, batch))
    assert torch.equal(other(**batch).loss, before)
    whole = engine(**batch).loss  # without shift_labels: whole rows
    torch.testing.assert_close(whole.cpu(), before)
    engine.destroy(keep_values=True)
    assert torch.equal(model(**batch).loss, before)


def _cut_for(engine, batch):
    own = batch["input_ids"].shape[1] // 2
    piece = slice(own * engine.global_rank, own * (engine.global_rank + 1))
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return {"input_ids": batch["input_ids"][:, piece], "position_ids": batch["position_ids"][:, piece],
            "shift_labels": labels[:, piece]}


def _sums_over_a_number():
    """The loss and gradient of a script that counts labels itself, as Trainer does."""
    batch = rows_of("packed", 1)
    plain = make_model("qwen3")
    expected = plain(**batch, num_items_in_batch=torch.tensor(10), use_cache=False).loss
    expected.backward()
    engine, *_ = strata.initialize(model=make_model("qwen3"), config=_config(3, 2))
    loss = engine(**_cut_for(engine, batch), num_items_in_batch=torch.tensor(10)).loss
    torch.testing.assert_close(loss.cpu(), expected)
    engine.backward(loss)
    for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        found = strata.utils.safe_get_full_grad(ours) * engine.gradient_accumulation_steps()
        torch.testing.assert_close(found.cpu(), theirs.grad, atol=1e-5, rtol=1e-4)


def test_losses_over_a_number_of_labels():
    run_ranks(2, _sums_over_a_number)


def _ends_in_a_layer():
    engine, *_ = strata.initialize(model=make_model("qwen3"), config=_config(3, 2))
    batch = _cut_for(engine, rows_of("packed", 1))
    if engine.global_rank == 1:
        engine.module.model.layers[1].register_forward_pre_hook(lambda *_: os._exit(3))
    with pytest.raises(strata.CommError, match="rank 1 (is gone|failed: it has ended)"):
        engine(**batch)
    return "named"


def test_a_rank_that_ends_between_exchanges_is_named():
    assert run_ranks(2, _ends_in_a_layer, may_die=[1]) == ["named", None]


def test_other_models_and_the_end():
    run_ranks(2, _trains_other_models_and_ends)


def _evaluates_cut_rows():
    """Rows that a loader has cut are exchanged in evaluation, too."""
    engine, *_ = strata.initialize(model=make_model("qwen3"), config=_config(3, 2))
    engine.eval()
    rows = [rows_of("padded", number) for number in range(4)]
    with torch.no_grad():
        found = [engine(**batch).loss.item() for batch in engine.sequence_loader(rows[engine.global_rank :: 2])]
        expected = [make_model("qwen3").eval()(**batch).loss.item() for batch in rows]
    assert found == pytest.approx(expected, abs=1e-5)


def test_cut_rows_in_evaluation():
    run_ranks(2, _evaluates_cut_rows)


def _same_rows_and_errors_of_others():
    engine, *_ = strata.initialize(model=make_model("qwen3"), config=_config(3, 2))
    rows = [rows_of("plain", 1), rows_of("plain", 1) | ({"labels": None} if engine.global_rank == 1 else {})]
    loader = iter(engine.sequence_loader(rows))
    next(loader), next(loader)
    with pytest.raises(strata.UsageError, match="no 'labels'" if engine.global_rank else "rank 1 .* no 'labels'"):
        next(loader)


def test_a_bad_batch_of_one_rank_is_an_error_of_both():
    run_ranks(2, _same_rows_and_errors_of_others)


def _config_of(**settings):
    return transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES | {"head_dim": 8} | settings))


@pytest.mark.parametrize(
    "model, size, words",
    [
        (lambda: torch.nn.Linear(2, 2), 2, "no model of transformers"),
        (lambda: make_model("qwen3"), 3, "4 attention heads and 2 key heads .* 3 ranks; use 1, 2, 4"),
        (lambda: make_model("qwen3", "eager"), 2, 'attn_implementation "eager"'),
        (lambda: _config_of(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), 2, "rotary"),
        (lambda: transformers.Qwen3ForSequenceClassification(transformers.Qwen3Config(**SIZES)), 2, "each token"),
    ],
)
def test_models_that_cannot(model, size, words):
    with pytest.raises(strata.UsageError, match=words):
        require_possible(model(), size)


def test_layers_that_carry_a_state():
    model = make_model("qwen3")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(strata.UsageError, match="linear_attention"):
        require_possible(model, 2)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"labels": None}, "no 'labels'"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]] * 2)}, "Pad on the right"),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, "leaves out tokens before others"),
        ({"pixel_values": torch.zeros(2, 3, 8, 8)}, r"'pixel_values' \[2, 3, 8, 8\]"),
    ],
)
def test_batches_that_cannot_be_cut(change, words):
    batch = rows_of("plain", 1, tokens=4) | change
    with pytest.raises(strata.UsageError, match=words):
        prepared(batch, 2)


def test_a_batch_is_padded_and_keeps_small_tensors():
    batch = rows_of("plain", 1, tokens=5) | {"weights": torch.ones(2), "scale": torch.tensor(2.0), "name": "x"}
    cut = prepared(batch | {"attention_mask": torch.ones(2, 5)}, 2)
    assert cut["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert cut["shift_labels"][:, 4:].tolist() == [[-100, -100]] * 2
    assert cut["weights"].shape == (2,) and cut["scale"].shape == () and cut["name"] == "x"
    documents = {"input_ids": torch.ones(1, 6), "labels": torch.ones(1, 6), "cu_seq_lens_q": torch.tensor([0, 2, 6]),
                 "max_length_q": 4}  # fmt: skip
    assert prepared(documents, 2)["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3]]


@pytest.mark.parametrize("sizes, words", [({}, "must divide the 1 ranks.*found 2"),
                                          ({"sequence_parallel_size": 4}, "found 4 and 2")])  # fmt: skip
def test_sizes_that_do_not_fit(sizes, words):
    with pytest.raises(strata.ConfigError, match=words):
        strata.initialize(model=make_model("qwen3"), config=_config(3, 2) | sizes)
