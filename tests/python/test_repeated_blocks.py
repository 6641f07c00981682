"""Blocks that are alike are worked out once: the same comes out as where every name is asked about."""

import re

import pytest

pytest.importorskip("transformers.conversion_mapping", reason="this transformers has no conversions of checkpoints")

import torch
import transformers as hf

from strata.checkpoint import transformers_5
from strata.checkpoint.names import model_tensors, saved_tensors, state_names
from strata.checkpoint.ranges import RangeTensor
from strata.checkpoint.repeated_blocks import Leaves
from strata.checkpoint.supported_transformers import adapter

LAYERS = 5
_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}


def _qwen3_moe():
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_SIZES, **_EXPERTS, num_experts=12))


def _deepseek():
    """Its first layers have no experts."""
    sizes = {**_SIZES, **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**sizes, **ranks, first_k_dense_replace=2))


MODELS = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**_SIZES, num_local_experts=3)),
    "deepseek_v3": _deepseek,
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=LAYERS, n_embd=32, n_head=4, vocab_size=96)),
    "bert": lambda: hf.BertModel(hf.BertConfig(**_SIZES)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(num_layers=LAYERS, d_model=32, d_ff=64, d_kv=8, num_heads=4)),
}


def _model(name):
    with torch.device("meta"):
        return MODELS[name]()


def _checkpoint(model):
    """[(name, shape, dtype)] as the library saves the model."""
    parameters, buffers = state_names(model)
    tensors = {name: RangeTensor.leaf(name, p.shape, p.dtype) for name, p in {**parameters, **buffers}.items()}
    return [(name, list(tensor.shape), tensor.dtype) for name, tensor in saved_tensors(model, tensors).items()]


def _described(found):
    return {name: (t.source, tuple(t.shape), t.dtype, t.runs, set(t.sources())) for name, t in found.items()}


def _answers(model, listed, monkeypatch):
    """Returns the result of ``model_tensors``, and how many names it asked transformers about; with blocks, and
    without."""
    parameters, buffers = state_names(model)
    answers = []
    for patterns_with_numbers in (transformers_5._NUMBER_IN_PATTERN, re.compile("")):
        asked = []
        with monkeypatch.context() as patches:
            patches.setattr(transformers_5, "_NUMBER_IN_PATTERN", patterns_with_numbers)
            whole = transformers_5._converted

            def converted(*arguments):
                asked.append(len(list(arguments[-1])))
                return whole(*arguments)

            patches.setattr(transformers_5, "_converted", converted)
            found, unused = model_tensors(model, {*parameters, *buffers}, Leaves(listed))
        kept = [type(c).__name__ + str(c.source_patterns) for c in model._weight_conversions]
        answers.append(((_described(found), unused, kept), asked))
    return answers


@pytest.mark.parametrize("name", MODELS)
def test_of_many_layers_two_are_asked_about(name, monkeypatch):
    model = _model(name)
    listed = _checkpoint(model)
    (with_blocks, asked), (without, everything) = _answers(model, listed, monkeypatch)
    assert with_blocks == without
    assert set(with_blocks[0]) >= {n for n, p in state_names(model)[0].items()} - set(adapter().tied_names(model))
    assert len(asked) == 1 and asked[0] < 0.8 * everything[0] == 0.8 * len(listed)


def test_what_the_model_has_no_use_for_is_told_of_every_layer(monkeypatch):
    model = _model("qwen3_moe")
    listed = _checkpoint(model) + [(f"model.layers.{i}.spare.weight", [3], torch.float32) for i in range(LAYERS)]
    (with_blocks, asked), (without, _) = _answers(model, listed, monkeypatch)
    assert with_blocks == without and asked[0] < len(listed)
    assert with_blocks[1] == [f"model.layers.{i}.spare.weight" for i in range(LAYERS)]


@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
def test_a_layer_of_its_own_is_asked_about(layer, monkeypatch):
    model = _model("llama")
    name = f"model.layers.{layer}.mlp.up_proj.weight"
    listed = [(n, [7, 7] if n == name else shape, dtype) for n, shape, dtype in _checkpoint(model)]
    (with_blocks, asked), (without, _) = _answers(model, listed, monkeypatch)
    assert with_blocks == without and with_blocks[0][name][1] == (7, 7)
    assert asked[0] < len(listed)


def test_more_layers_than_the_model_has_are_not_alike(monkeypatch):
    model = _model("llama")
    shape_of = {n: (shape, dtype) for n, shape, dtype in _checkpoint(model) if n.startswith("model.layers.0.")}
    more = [(n.replace(".0.", f".{i}."), *described) for i in (LAYERS, LAYERS + 1) for n, described in shape_of.items()]
    (with_blocks, asked), (without, _) = _answers(model, _checkpoint(model) + more, monkeypatch)
    assert with_blocks == without and len(with_blocks[1]) == len(more)
    assert len(asked) == 2  # the last layer differs from the first one


def test_a_rule_for_one_layer_has_every_name_asked_about(monkeypatch):
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    model = _model("llama")
    listed = [(n.replace("layers.2.mlp.up_proj", "layers.2.mlp.rising"), *d) for n, *d in _checkpoint(model)]
    listed = [(n.replace("mlp.up_proj", "mlp.rising"), *d) for n, *d in listed]
    rules = [
        WeightRenaming(source_patterns=r"layers.2.mlp.rising", target_patterns=r"layers.2.mlp.up_proj"),
        WeightRenaming(source_patterns=r"mlp.rising", target_patterns=r"mlp.up_proj"),
    ]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model, **_: [*rules])
    (with_blocks, asked), (without, _) = _answers(model, listed, monkeypatch)
    assert with_blocks == without and asked == [len(listed)]
    assert "model.layers.2.mlp.up_proj.weight" in with_blocks[0] and not with_blocks[1]


def test_runs_are_computed_like_what_they_were_made_of():
    values = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(10.0, 16.0).view(2, 3)}
    leaves = Leaves([(name, list(v.shape), v.dtype) for name, v in values.items()])
    stacked = torch.stack([leaves["a"], leaves["b"]])
    again = RangeTensor.of_runs(stacked.runs, stacked.shape, stacked.dtype)
    assert torch.equal(again.compute(values.__getitem__), torch.stack([values["a"], values["b"]]))
    assert set(again.sources()) == {"a", "b"}
