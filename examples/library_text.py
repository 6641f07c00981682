"""The source text of Python's standard library as bytes, and a small byte-level model for it. The examples of Hugging
Face's libraries train it."""

import sysconfig
from pathlib import Path

import torch
from transformers import Qwen3Config

PROMPT = b"def "


class LibraryText(torch.utils.data.Dataset):
    """Windows of ``length`` bytes, each the model's input and its labels, both int64 of shape [length]."""

    def __init__(self, length, max_bytes=1 << 20):
        data = torch.frombuffer(bytearray(_library()[:max_bytes]), dtype=torch.uint8)
        self._windows = data[: len(data) // length * length].view(-1, length)

    def __len__(self):
        return len(self._windows)

    def __getitem__(self, index):
        tokens = self._windows[index].long()
        return {"input_ids": tokens, "labels": tokens}


def _library():
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"\n".join(file.read_bytes() for file in files)


def line_starts(count, length=12):
    """[str]: the first ``length`` characters of different lines, for a model to complete."""
    lines = _library().decode("ascii", errors="ignore").split("\n")
    return list(dict.fromkeys(line[:length] for line in lines if len(line) > 2 * length))[:count]


def byte_tokenizer():
    """A tokenizer of transformers whose tokens are bytes; 0 pads, and the end of a line ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = {b for b in range(256) if chr(b).isprintable() and chr(b) not in " \xad"}  # others go by a letter past these
    others = iter(range(256, 512))
    letters = {chr(b if b in own else next(others)): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {b: letter for letter, b in letters.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=names[0], eos_token=names[ord("\n")],
                                   model_input_names=["input_ids", "attention_mask"])


def model_config():
    """A Qwen3 of 0.4 M parameters, whose tokens are bytes."""
    return Qwen3Config(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip


def sample(model, new_bytes=24):
    """The text that the model generates after ``PROMPT``. At stage 3 every rank must call it."""
    prompt = torch.tensor([list(PROMPT)], device=model.device)
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_bytes, do_sample=False)
    return bytes(tokens[0].tolist()).decode(errors="replace")
