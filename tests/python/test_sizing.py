"""Sizing without weights: names and shapes of every architecture that ``strata plan`` knows equal transformers', its
bytes those of the model itself, its estimate of activations what autograd keeps."""

import json

import peft
import pytest
import strata
import torch
import transformers as hf
from ranks import run_ranks
from test_command_line import CONFIG, report, run

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDE = {"head_dim": 32}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
GPT2 = {"vocab_size": 96, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "bos_token_id": 1,
        "eos_token_id": 2, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
NEOX = {key: size for key, size in SIZES.items() if key != "num_key_value_heads"}
CASES = {
    "llama": (hf.LlamaConfig, SIZES),
    "llama with biases, tied": (hf.LlamaConfig, {**SIZES, "attention_bias": True, "mlp_bias": True,
                                                 "tie_word_embeddings": True}),
    "mistral": (hf.MistralConfig, {**SIZES, **WIDE}),
    "granite": (hf.GraniteConfig, SIZES),
    "qwen2": (hf.Qwen2Config, SIZES),
    "qwen2, tied": (hf.Qwen2Config, {**SIZES, "tie_word_embeddings": True}),
    "qwen3": (hf.Qwen3Config, {**SIZES, **WIDE}),
    "phi3": (hf.Phi3Config, SIZES),
    "olmo2": (hf.Olmo2Config, SIZES),
    "gemma": (hf.GemmaConfig, {**SIZES, **WIDE}),
    "gemma2": (hf.Gemma2Config, {**SIZES, **WIDE}),
    "gemma3": (hf.Gemma3TextConfig, {**SIZES, **WIDE}),
    "mixtral": (hf.MixtralConfig, {**SIZES, **EXPERTS}),
    "qwen3_moe": (hf.Qwen3MoeConfig, {**SIZES, **WIDE, "num_experts_per_tok": 2, "num_experts": 8,
                                      "moe_intermediate_size": 48}),
    "gpt2": (hf.GPT2Config, GPT2),
    "gpt_neox": (hf.GPTNeoXConfig, NEOX),
    "gpt_neox without biases": (hf.GPTNeoXConfig, {**NEOX, "attention_bias": False}),
}


def _config_of(name):
    kind, sizes = CASES[name]
    return kind(**sizes, attn_implementation="sdpa")


def _on_meta(config):
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(config)


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    """(path of the config.json, the configuration)."""
    config = _config_of(request.param)
    config.save_pretrained(tmp_path)
    return tmp_path / "config.json", config


def _shapes_of(model):
    return {name: {"shape": list(p.shape), "trained": p.requires_grad} for name, p in model.named_parameters()}


def test_shapes_are_those_of_transformers(case):
    path, config = case
    told = report("plan", "--model", path, "--world", 2, "--shapes")
    model = _on_meta(config)
    assert told["shapes"] == _shapes_of(model)
    assert told["elements"] == model.num_parameters()


def test_adapters_are_those_of_peft(case):
    path, config = case
    told = report("plan", "--model", path.parent, "--world", 2, "--shapes", "--lora-rank", 8)
    lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    shapes = _shapes_of(peft.get_peft_model(_on_meta(config), lora))
    if config.model_type == "gpt2":  # whose weights are transposed: adapters are by their names
        count = sum(p["shape"][0] * p["shape"][1] for p in shapes.values() if p["trained"])
        assert told["trained_elements"] == count and set(told["shapes"]) == set(shapes)
    else:
        assert told["shapes"] == shapes


def test_bytes_are_those_of_the_model(case, tmp_path):
    path, config = case
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    told = report("plan", "--config", tmp_path / "ds.json", "--model", path, "--world", 4)
    model = _on_meta(config).to(torch.bfloat16)
    for stage in range(4):
        zero = {**CONFIG["zero_optimization"], "stage": stage}
        foreseen = strata.memory_forecast(model, {**CONFIG, "zero_optimization": zero}, 4)
        assert told["stages"][stage]["device"] == foreseen, stage


def test_bytes_of_a_large_model_are_those_of_the_model():
    row = report("plan", "--model", "Qwen3-0.6B", "--world", 8)["grid"][3]
    config = hf.Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                            num_key_value_heads=8, vocab_size=151936, tie_word_embeddings=True)
    own = {**CONFIG, "zero_optimization": {"stage": 3}}
    foreseen = strata.memory_forecast(_on_meta(config).to(torch.bfloat16), own, 8)
    assert (row["stage"], row["placement"], row["device"]) == (3, "all on the device", foreseen)


def _saved_bytes(config, dtype, tokens):
    """The bytes that autograd keeps of a forward pass, without weights."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).to(dtype).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(3, 90, (1, tokens))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_are_near_what_autograd_keeps(case, dtype, tmp_path):
    """Blocks are compared, by the difference of two numbers of them."""
    path, config = case
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": dtype == torch.bfloat16}}))
    kept, told = [], []
    for layers in (2, 4):
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = (config.layer_types * 2)[:layers]
        config.save_pretrained(path.parent)
        kept.append(_saved_bytes(config, dtype, 256))
        told.append(report("plan", "--config", tmp_path / "ds.json", "--model", path, "--world", 1, "--seq", 256)
                    ["activations"]["bytes"])
    assert told[1] - told[0] == pytest.approx(kept[1] - kept[0], rel=0.08)


def test_unknown_architectures_are_refused(tmp_path):
    hf.T5Config().save_pretrained(tmp_path)
    done = run("plan", "--model", tmp_path, "--world", 2, code=2)
    assert 'Found "t5"' in done.stderr and "a folder with safetensors" in done.stderr


OPTIMIZERS = {"AdamW8bit": {"lr": 1e-3}, "Lion8bit": {"lr": 1e-4}, "Lion": {"lr": 1e-4}, "Muon": {"lr": 0.02}}


def _config_with(name, stage):
    section = {"strata": {"min_8bit_size": 1000}} if "8bit" in name else {}
    zero = {**CONFIG["zero_optimization"], "stage": stage}
    return {**CONFIG, "optimizer": {"type": name, "params": OPTIMIZERS[name]}, "zero_optimization": zero, **section}


def _held():
    """{(optimizer, stage): {kind: peak bytes of the device}} of engines that train."""
    found = {}
    for name in OPTIMIZERS:
        for stage in (1, 3):
            torch.manual_seed(0)
            model = hf.AutoModelForCausalLM.from_config(_config_of("qwen3")).to(torch.bfloat16)
            engine = strata.initialize(model=model, config=_config_with(name, stage))[0]
            ids = torch.randint(3, 90, (1, 16))
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            found[name, stage] = {kind: peak for (tier, kind), (_, peak) in engine.memory_report().items()
                                  if tier == "device"}
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_planned_states_are_those_of_a_running_engine(world, tmp_path):
    """By update rules: in 8 bits, or with one state, or Muon's with its matrices found by names."""
    _config_of("qwen3").save_pretrained(tmp_path)
    planned = {}
    for name in OPTIMIZERS:
        (tmp_path / "ds.json").write_text(json.dumps(_config_with(name, 3)))
        planned[name] = report("plan", "--config", tmp_path / "ds.json", "--model", tmp_path / "config.json", "--world",
                               world)["stages"]
    for held in run_ranks(world, _held):
        for (name, stage), kinds in held.items():
            told = planned[name][stage]["device"]
            for kind in ("weights", "master weights", "optimizer state", "gradient shards", "gathered weights"):
                assert kinds[kind] == told[kind], (name, stage, kind)
            if name == "Muon":  # with the exchange of matrices
                assert abs(kinds["staging"] - told["staging"]) < 200, (name, stage)
