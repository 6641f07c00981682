"""The source text of Python's standard library as bytes, and a small byte-level model for it: what the examples of
Hugging Face's Trainer and Accelerate train."""

import sysconfig
from pathlib import Path

import torch
from transformers import Qwen3Config

PROMPT = b"def "


class LibraryText(torch.utils.data.Dataset):
    """Windows of ``length`` bytes, each the model's input and its labels, both int64 of shape [length]."""

    def __init__(self, length, max_bytes=1 << 20):
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"\n".join(file.read_bytes() for file in files)[:max_bytes]
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._windows = data[: len(data) // length * length].view(-1, length)

    def __len__(self):
        return len(self._windows)

    def __getitem__(self, index):
        tokens = self._windows[index].long()
        return {"input_ids": tokens, "labels": tokens}


def model_config():
    """A Qwen3 of 0.4 M parameters, whose tokens are bytes."""
    return Qwen3Config(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip


def sample(model, new_bytes=24):
    """What the model writes after ``PROMPT``. Every rank calls it at stage 3."""
    prompt = torch.tensor([list(PROMPT)], device=model.device)
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_bytes, do_sample=False)
    return bytes(tokens[0].tolist()).decode(errors="replace")
