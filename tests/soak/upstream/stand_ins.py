"""Small models in the place of those that other libraries' tests download: a cache of the Hub, filled by hand.

    python stand_ins.py CACHE

Weights are random and sizes tiny, whatever the name says; tokenizers know one token a byte, T5's own next to none.
"""

import sys
from pathlib import Path

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def _gpt2(width, vocabulary):
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=width, n_layer=2, n_head=2, n_positions=64, vocab_size=vocabulary))


def _t5():
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )


def _gptj():
    return hf.GPTJForCausalLM(
        hf.GPTJConfig(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4)
    )


def _qwen2(**more):
    return {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, **more,
    }  # fmt: skip


def _qwen2_moe():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**_qwen2(**experts, shared_expert_intermediate_size=16)))


MODELS = {
    "sshleifer/tiny-gpt2": lambda: _gpt2(2, 300),
    "hf-internal-testing/tiny-random-gpt2": lambda: _gpt2(32, 1024),
    "gpt2": lambda: _gpt2(32, 300),
    "patrickvonplaten/t5-tiny-random": _t5,
    "hf-internal-testing/tiny-random-gptj": _gptj,
    "hf-internal-testing/tiny-random-LlamaForCausalLM": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_qwen2())),
    "peft-internal-testing/tiny-random-qwen-1.5-MoE": _qwen2_moe,
    "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_qwen2())),
}
CONFIGURATIONS = {"apple/mobilevit-xx-small": hf.MobileViTConfig}  # of which no weights are asked for


def byte_tokenizer():
    """Two tokens of its own, and one a byte."""
    letters = ["<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def fill(cache):
    """Writes all of ``MODELS`` and ``CONFIGURATIONS`` below the folder ``cache``, as the Hub's own library lays a cache
    out."""
    for name, build in {**MODELS, **CONFIGURATIONS}.items():
        home = Path(cache) / f"models--{name.replace('/', '--')}"
        snapshot = home / "snapshots" / "0"
        snapshot.mkdir(parents=True, exist_ok=True)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / "main").write_text("0")
        torch.manual_seed(0)
        build().save_pretrained(snapshot)
        (hf.T5Tokenizer() if "t5" in name else byte_tokenizer()).save_pretrained(snapshot)


if __name__ == "__main__":
    fill(sys.argv[1])
