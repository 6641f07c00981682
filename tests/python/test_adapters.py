"""PEFT's adapters, and weights that a class leaves out of its checkpoints: loaded and saved as PEFT and transformers
do, to the bit."""

import json

import numpy
import peft
import pytest
import torch
import transformers as hf
from devices import test_device, to_test_device
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import differences
from training_states import snapshot

import strata

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MARIAN = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "pad_token_id": 1, "decoder_start_token_id": 1,
}


def _config(stage):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }


def _trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base model, an adapter of it as PEFT writes it, and a model whose positions are in no file."""
    root = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).save_pretrained(root / "base")
    base = hf.AutoModelForCausalLM.from_pretrained(root / "base")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora)
    with torch.no_grad():
        for parameter in _trainable(model):
            parameter.normal_()
    model.save_pretrained(root / "adapter")
    hf.MarianMTModel(hf.MarianConfig(**MARIAN)).save_pretrained(root / "marian")
    return root


def _plain(root, folder):
    base = hf.AutoModelForCausalLM.from_pretrained(root / "base")
    return peft.PeftModel.from_pretrained(base, folder, is_trainable=True).to(test_device())


def _lora(seed):
    """A small Llama under LoRA; the base is the same for every seed."""
    torch.manual_seed(0)
    base = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))
    torch.manual_seed(seed)
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def _trained_adapter(folder):
    """{excluded: {name: array}} of the saved states, which later training must continue from bit by bit."""
    engine = strata.initialize(model=_lora(seed=1), config=_config(3))[0]
    saved = {}
    ids = torch.arange(12, device=engine.device)[None]
    for excluded in (False, True):
        for _ in range(2):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        engine.save_checkpoint(folder, tag=f"{excluded}", exclude_frozen_parameters=excluded)
        saved[excluded] = {name: value.numpy() for name, value in snapshot(engine).items()}
    return saved


def _continued_adapter(folder, saved):
    engine = strata.initialize(model=_lora(seed=2), config=_config(2))[0]
    ids = torch.arange(12, device=engine.device)[None]
    for excluded, expected in saved.items():
        engine.load_checkpoint(folder, tag=f"{excluded}")
        found = snapshot(engine)
        assert found.keys() == expected.keys() and any("lora_A" in name for name in found)
        assert [n for n, value in expected.items() if not numpy.array_equal(found[n].numpy(), value)] == []
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def test_training_of_an_adapter_goes_on_at_other_ranks(tmp_path):
    saved = run_ranks(2, _trained_adapter, str(tmp_path))[0]
    run_ranks(1, _continued_adapter, str(tmp_path), saved)
    sizes = {tag: sum(p.stat().st_size for p in (tmp_path / tag).iterdir()) for tag in ("False", "True")}
    assert sizes["True"] < sizes["False"] / 2


def _assert_same(engine, plain):
    with strata.zero.GatheredParameters(list(engine.module.parameters())):
        ours, theirs = dict(engine.module.named_parameters()), dict(plain.named_parameters())
        assert list(ours) == list(theirs)
        for name, parameter in theirs.items():
            assert torch.equal(ours[name], parameter), name
            left_out = "embed_positions" in name  # from_pretrained forgets that the class freezes it
            assert left_out or ours[name].requires_grad == parameter.requires_grad, name


def _adapter(root, folder, stage):
    """Loads the adapter, trains a step, saves, and compares with PEFT after each."""
    engine, *_ = strata.load_pretrained(root / "adapter", _config(stage), model_parameters=_trainable)
    plain = _plain(root, root / "adapter")
    _assert_same(engine, plain)
    ids = to_test_device(torch.arange(12)[None])
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_pretrained(folder / str(stage))
    torch.distributed.barrier()
    _assert_same(engine, _plain(root, folder / str(stage)))
    engine.destroy()


def _all_of_it(root, folder):
    for stage in (2, 3):
        _adapter(root, folder, stage)
    engine, *_ = strata.load_pretrained(root / "marian", _config(3))
    _assert_same(engine, hf.MarianMTModel.from_pretrained(root / "marian").to(test_device()))
    strata.load_weights(engine, root / "marian", strict=True)
    _assert_same(engine, hf.MarianMTModel.from_pretrained(root / "marian").to(test_device()))
    engine.destroy()
    return True


def _configuration(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    return {**config, "target_modules": sorted(config["target_modules"])}  # PEFT has a set


@pytest.mark.parametrize("world", [1, 2])
def test_adapters_and_constructed_weights_are_those_of_peft_and_transformers(folders, tmp_path, world):
    assert all(run_ranks(world, _all_of_it, folders, tmp_path))
    for stage in ("2", "3"):
        written = {path.name for path in (tmp_path / stage).iterdir()}
        assert written == {path.name for path in (folders / "adapter").iterdir()}
        ours, theirs = (
            load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / stage, folders / "adapter")
        )
        assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
        assert _configuration(tmp_path / stage) == _configuration(folders / "adapter")


CAUSAL = {"task_type": "CAUSAL_LM"}
METHODS = {
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], **CAUSAL),
}
REFUSED = {
    "prefix_projection": lambda: peft.PrefixTuningConfig(
        num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=8, **CAUSAL),
    "ADALORA": lambda: peft.AdaLoraConfig(
        total_step=9, tinit=1, tfinal=1, init_r=4, target_r=2, target_modules=["q_proj"], **CAUSAL),
    "init_lora_weights='pissa'": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], init_lora_weights="pissa", **CAUSAL),
    "trainable_tokens_original": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], trainable_token_indices=[1, 5], **CAUSAL),
    "'base_model.*vera_A": lambda: peft.VeraConfig(
        r=4, target_modules=["q_proj"], save_projection=False, **CAUSAL),
}  # fmt: skip


def _write_adapter(root, config, folder):
    torch.manual_seed(1)
    model = peft.get_peft_model(hf.AutoModelForCausalLM.from_pretrained(root / "base"), config)
    with torch.no_grad():
        for parameter in _trainable(model):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)


def _methods(root, folder):
    """Each is loaded, trained for a step and saved; PEFT makes the same model from its own and the engine's file."""
    ids = to_test_device(torch.arange(12)[None])
    for name in METHODS:
        engine, *_ = strata.load_pretrained(folder / name, _config(3), model_parameters=_trainable)
        for written in (folder / name, folder / f"{name} trained"):
            if written.name.endswith("trained"):
                engine.train()
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
                engine.save_pretrained(written)
                torch.distributed.barrier()
            base = hf.AutoModelForCausalLM.from_pretrained(root / "base")
            plain = peft.PeftModel.from_pretrained(base, written).to(test_device()).eval()
            with torch.no_grad():
                ours = engine.eval()(input_ids=ids).logits
                assert differences(dict(engine.module.named_buffers()), dict(plain.named_buffers())) == [], written
                assert torch.equal(ours, plain(input_ids=ids).logits), written
        engine.destroy()
    return True


def test_methods_that_learn_prompts_or_scales_are_loaded_and_saved_as_peft_does(folders, tmp_path):
    for name, config in METHODS.items():
        _write_adapter(folders, config(), tmp_path / name)
    assert all(run_ranks(2, _methods, folders, tmp_path))


@pytest.mark.parametrize("named", REFUSED)
def test_an_adapter_whose_values_are_not_all_in_its_file_is_refused_by_name(folders, tmp_path, named):
    _write_adapter(folders, REFUSED[named](), tmp_path)
    with pytest.raises(strata.UsageError, match=f"{named}.*peft.PeftModel.from_pretrained"):
        strata.load_pretrained(tmp_path, _config(3))


def test_an_adapter_without_its_base_model_is_refused(folders, tmp_path):
    config = json.loads((folders / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "/nowhere/llama"
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(strata.FormatError, match="adapter_config.json names the base model '/nowhere/llama'"):
        strata.load_pretrained(tmp_path, _config(3))
