"""Weights on a drive behind buffers that are smaller than the embedding, and too few for the weights: the configuration
of a discussion that DeepSpeed leaves unanswered, on the shapes that it was tried with."""

import math
import sys
from pathlib import Path

import pytest
import strata
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "python"), str(TESTS.parent / "bench")]

import nvme_story  # noqa: E402
from ranks import run_ranks  # noqa: E402

# Qwen3-0.6B.
SHAPES = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
ELEMENTS = 4194304  # of a buffer; the embedding has 155,582,464


def config_of(folder, buffers, world):
    return nvme_story.config_of(str(folder), buffers, ELEMENTS) | {"train_batch_size": world}


def _train(folder, buffers, world):
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPES)).bfloat16()
    model.to_empty(device="cpu")
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():  # random initialization of as much takes a minute
        pattern = torch.randn(1 << 20).mul_(0.02).bfloat16()
        for parameter in model.parameters():
            flat = parameter.data.view(-1)
            for piece in flat.split(pattern.numel()):
                piece.copy_(pattern[: piece.numel()])
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    engine, *_ = strata.initialize(model=model, config=config_of(folder, buffers, world))
    ids = torch.arange(16)[None] * 977
    losses = []
    for _ in range(3):
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    staged = engine.memory_report()["host", "staging"][1]
    engine.destroy()
    return losses, staged


@pytest.mark.parametrize("buffers", [5, 200])
def test_the_configuration_trains_within_its_own_budget(buffers, tmp_path):
    for losses, staged in run_ranks(2, _train, tmp_path, buffers, 2, timeout=900.0):
        assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]
        assert 0 < staged <= buffers * ELEMENTS * 2 + 4096, "the arena, and a few words"
