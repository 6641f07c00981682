"""A script as users write it for DeepSpeed, which nothing here changes: every rank loads a checkpoint with
``from_pretrained``, and ``deepspeed.initialize`` gets the model and a configuration of few keys.

    strata run --num_gpus 2 bench/start_story_script.py FOLDER
    torchrun --nproc-per-node 2 bench/start_story_script.py FOLDER

Writes a line of JSON per rank: the seconds of its parts since the start of its process, and then figures of the model,
which show whether two libraries started the same model.
"""

import os
import sys
import time

import deepspeed
import torch
from story_rank import began, tell
from transformers import AutoModelForCausalLM

imported = time.time()


def main():
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    loaded = time.time()
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "train_batch_size": int(os.environ.get("WORLD_SIZE", "1")),
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW"},
        },
    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    tell(line_of(engine, began(), imported, loaded, time.time()))


def line_of(engine, began, imported, loaded, ready):
    """The line of this rank."""
    weights = list(engine.module.parameters())
    bits = [w.detach().view({2: torch.int16, 4: torch.int32}[w.element_size()]).reshape(-1) for w in weights]
    sums = [sum(piece.sum(dtype=torch.int64).item() for piece in of.split(1 << 24)) for of in bits]  # exact
    total = sum(number * of for number, of in enumerate(sums, 1))
    return {
        "rank": int(os.environ.get("RANK", "0")), "deepspeed": deepspeed.__version__, "import": imported - began,
        "from_pretrained": loaded - imported, "initialize": ready - loaded, "total": ready - began,
        "elements": sum(w.numel() for w in weights), "sum": total, "dtype": str(weights[0].dtype),
        "device": weights[0].device.type,
    }  # fmt: skip


main()
