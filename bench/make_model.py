"""Writes Hugging Face checkpoints with the true shapes of named models and random weights in bf16.

    python bench/make_model.py qwen3-30b-a3b --layers 16 --out DIR [--unfused]

Experts are fused as transformers holds them in memory (two tensors a layer), or, with --unfused, one tensor per
expert and projection, as published checkpoints and transformers' own ``save_pretrained`` have them. Both load with
``from_pretrained`` to the same model: a value depends on the seed and on the name of its unfused tensor alone (and on
whether a GPU or the CPU draws it). Weights are normal with a deviation of 0.02; norms are 1.

Threads draw pieces, on a GPU where there is one, and write them into the files side by side.
"""

import argparse
import hashlib
import json
import math
import os
import queue
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import torch

PIECE = 4 << 20  # elements that are drawn at once
DEVIATION = 0.02
BF16 = 2  # bytes

# A tensor of the checkpoint. ``parts`` are (name, elements) in their order: each part is drawn by its own name.
Tensor = namedtuple("Tensor", "name shape parts")

_MOE = dict(num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, tie_word_embeddings=False)
_QWEN = dict(head_dim=128, vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6)
_TINY = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=256)

# Name: (class of the configuration, its arguments).
SHAPES = {
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig",
        dict(_QWEN, **_MOE, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32)
        | dict(num_key_value_heads=4, moe_intermediate_size=768, num_experts=128),
    ),
    # Half as wide: all its 18,867 tensors in a quarter of the bytes.
    "qwen3-30b-a3b-narrow": (
        "Qwen3MoeConfig",
        dict(_QWEN, **_MOE, hidden_size=1024, intermediate_size=3072, num_hidden_layers=48, num_attention_heads=16)
        | dict(num_key_value_heads=2, moe_intermediate_size=384, num_experts=128),
    ),
    "qwen3-8b": (
        "Qwen3Config",
        dict(_QWEN, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32)
        | dict(num_key_value_heads=8, tie_word_embeddings=False),
    ),
    # 0.94 B parameters, nearly all of them in blocks.
    "dense-1b": (
        "Qwen3Config",
        dict(_QWEN, hidden_size=2048, intermediate_size=6144, num_hidden_layers=16, num_attention_heads=16)
        | dict(num_key_value_heads=8, vocab_size=32768, tie_word_embeddings=False),
    ),
    "qwen3-0.6b": (
        "Qwen3Config",
        dict(_QWEN, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16)
        | dict(num_key_value_heads=8, tie_word_embeddings=True),
    ),
    "small": (
        "Qwen3Config",
        dict(_QWEN, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8)
        | dict(num_key_value_heads=4, head_dim=64, vocab_size=4096, tie_word_embeddings=False),
    ),
    "tiny-moe": (
        "Qwen3MoeConfig",
        dict(_TINY, **(_MOE | {"num_experts_per_tok": 2}), intermediate_size=96, num_hidden_layers=2)
        | dict(moe_intermediate_size=32, num_experts=8),
    ),
    "tiny": ("Qwen3Config", dict(_TINY, intermediate_size=160, num_hidden_layers=2, tie_word_embeddings=False)),
    "tiny-tied": ("Qwen3Config", dict(_TINY, intermediate_size=160, num_hidden_layers=2, tie_word_embeddings=True)),
}


def make_config(name, layers=None):
    """The configuration of ``name``, cut or extended to ``layers``."""
    import transformers

    class_name, arguments = SHAPES[name]
    config = getattr(transformers, class_name)(**(arguments | ({"num_hidden_layers": layers} if layers else {})))
    config.dtype = "bfloat16"
    config.architectures = [class_name.removesuffix("Config") + "ForCausalLM"]
    return config


def tensors_of(config, unfused=False):
    """[Tensor] of a checkpoint of ``config``, in the order of the model. Builds the model without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = []
    for name, parameter in model.named_parameters():
        parts = _experts(name, tuple(parameter.shape))
        if unfused:
            tensors += [Tensor(part, shape, [(part, math.prod(shape))]) for part, shape in parts]
        else:
            whole = [(part, math.prod(shape)) for part, shape in parts]
            tensors.append(Tensor(name, tuple(parameter.shape), whole))
    return tensors


def _experts(name, shape):
    """[(name, shape)] of the tensors of a published checkpoint that correspond to one tensor of a model: several for
    fused experts, in the order of the fused tensor's elements."""
    prefix, _, leaf = name.rpartition(".")
    if not prefix.endswith(".mlp.experts"):
        return [(name, shape)]
    projections = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}[leaf]
    each = (shape[1] // len(projections), shape[2])
    return [(f"{prefix}.{expert}.{p}.weight", each) for expert in range(shape[0]) for p in projections]


def split_into_files(tensors, max_bytes):
    """[[Tensor]], in order; a file has at most ``max_bytes`` of data unless it has a single tensor."""
    files, room = [], 0
    for tensor in tensors:
        size = BF16 * math.prod(tensor.shape)
        if not files or size > room:
            files.append([])
            room = max_bytes
        files[-1].append(tensor)
        room -= size
    return files


def lay_out(tensors):
    """(header of a safetensors file, [(part's name, elements, first byte in the file)])."""
    entries, places, at = {"__metadata__": {"format": "pt"}}, [], 0
    for tensor in sorted(tensors):
        first = at
        for part, numel in tensor.parts:
            places.append((part, numel, at))
            at += BF16 * numel
        entries[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [first, at]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [(part, numel, at + len(header)) for part, numel, at in places]


def write_checkpoint(config, folder, unfused=False, file_bytes=5 * 10**9, seed=0, device=None, threads=None):
    """Writes config.json, the files and, where there are several, their index.

    Args:
        config: of ``make_config``.
        folder: made if it does not exist; must hold no checkpoint.
        unfused: one tensor per expert and projection.
        file_bytes: data of one file at most.
        device: draws the values; a GPU where there is one.
        threads: that draw and write; as many as cores, at most 32.

    Returns:
        (number of tensors, bytes of their data).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if there := sorted(folder.glob("*.safetensors*")):
        raise FileExistsError(f"{folder} holds a checkpoint already: {there[0].name}. Remove it or name another folder")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    threads = threads or min(32, len(os.sched_getaffinity(0)))
    tensors = tensors_of(config, unfused)
    files = split_into_files(tensors, file_bytes)
    names = ["model.safetensors"] if len(files) == 1 else [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    _write_files([folder / name for name in names], [lay_out(file) for file in files], seed, device, threads)
    total = BF16 * sum(math.prod(t.shape) for t in tensors)
    if len(files) > 1:
        where = {tensor.name: name for name, file in zip(names, files) for tensor in file}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config.save_pretrained(folder)
    return len(tensors), total


def _write_files(paths, layouts, seed, device, threads):
    descriptors = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) for path in paths]
    try:
        each = []
        for descriptor, (header, places) in zip(descriptors, layouts):
            _write_all(descriptor, header, 0)
            each.append([(descriptor, *place) for place in _pieces(places)])
        tasks = queue.SimpleQueue()
        for turn in range(max(map(len, each))):  # a file takes one writer at a time: go round
            for pieces in each:
                if turn < len(pieces):
                    tasks.put(pieces[turn])
        failures, threads_before = [], torch.get_num_threads()
        workers = [threading.Thread(target=_work, args=(tasks, seed, device, failures)) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        torch.set_num_threads(threads_before)
        if failures:
            raise failures[0]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _pieces(places):
    """(part's name, number of the piece, elements, first byte) of all pieces."""
    for part, numel, at in places:
        for number, first in enumerate(range(0, numel, PIECE)):
            yield part, number, min(PIECE, numel - first), at + BF16 * first


def _work(tasks, seed, device, failures):
    torch.set_num_threads(1)  # the threads here are the parallel ones
    try:
        draw = _Drawer(seed, device)
        while not failures:
            descriptor, part, number, numel, at = tasks.get_nowait()
            _write_all(descriptor, draw(part, number, numel), at)
    except queue.Empty:
        pass
    except Exception as error:
        failures.append(error)


class _Drawer:
    """Random bytes of pieces; of one thread, whose buffers it keeps."""

    def __init__(self, seed, device):
        self._seed = seed
        self._generator = torch.Generator(device)
        self._host = torch.empty(PIECE, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
        self._bytes = memoryview(self._host.view(torch.int16).numpy()).cast("B")
        self._drawn = torch.empty(PIECE, dtype=torch.float32, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, part, number, numel):
        host = self._host[:numel]
        if part.endswith("norm.weight"):
            host.fill_(1)
        elif self._stream is None:
            host.copy_(self._normal(part, number, numel))
        else:
            with torch.cuda.stream(self._stream):
                host.copy_(self._normal(part, number, numel).to(torch.bfloat16), non_blocking=True)
            self._stream.synchronize()
        return self._bytes[: BF16 * numel]

    def _normal(self, part, number, numel):
        key = f"{self._seed} {number} {part}".encode()
        self._generator.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little"))
        return self._drawn[:numel].normal_(0, DEVIATION, generator=self._generator)


def _write_all(descriptor, data, at):
    data = memoryview(data)
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=list(SHAPES))
    parser.add_argument("--out", required=True, help="the folder")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--unfused", action="store_true", help="one tensor per expert and projection")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file-gb", type=float, default=5, help="data of one file at most, in GB")
    parser.add_argument("--device", help="that draws the values: cuda where there is one")
    parser.add_argument("--threads", type=int)
    a = parser.parse_args()
    started = time.perf_counter()
    config = make_config(a.name, a.layers)
    file_bytes = int(a.file_gb * 1e9)
    count, size = write_checkpoint(config, a.out, a.unfused, file_bytes, a.seed, a.device, a.threads)
    seconds = time.perf_counter() - started
    print(f"{a.name}, {config.num_hidden_layers} layers: {size / BF16 / 1e9:.2f} G parameters in {count} tensors, "
          f"{size / 1e9:.2f} GB written to {a.out} in {seconds:.1f} s ({size / 1e9 / seconds:.1f} GB/s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
