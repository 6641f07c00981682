"""Trains what is larger than the device may hold at once, and says what it held: lines of JSON.

    torchrun --nproc-per-node 2 bench/large_parameters.py square [--place device host nvme] [--folder DIR]
    torchrun --nproc-per-node 2 bench/large_parameters.py embedding [--cap-gib 8] [--gib 24]

square: one fp32 parameter of 22528 x 22528 (2.03 GB) in a linear layer, with states and gradient in fp32, in tiles of
64 MiB. Peaks are told of the start and of steps, as torch's allocator and the engine's ledger count them, beside the
bound: shards, states and gradients of a rank as they are on a device, three tiles, and the activations.

embedding: an Embedding of --gib in bf16, tied to its head, with weights and states on the host; the device's allocator
is capped, and what the engine takes past it is counted. The loss falls. With --tiny sizes a CPU will do.
"""

import argparse
import json
import os

import torch
from torch import nn

import strata

GIB, MIB = 1 << 30, 1 << 20


def say(**result):
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(result), flush=True)


class Peaks:
    """Peak bytes of the device: what torch's allocator has, and what the engine holds past it."""

    def __init__(self, device):
        self._device = device

    def start(self, engine=None):
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        if engine is not None:
            engine.core.reset_memory_peaks()

    def take(self, engine):
        of_torch = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
        of_engine = engine.memory_report()["device", "total"][1]
        return {"torch": of_torch, "engine": of_engine, "both_at_most": of_torch + of_engine}


class Tied(nn.Module):
    """An embedding, a small layer, and a head that is the embedding; gives the loss of predicting the ids."""

    def __init__(self, rows, width, dtype):
        super().__init__()
        self.embedding = nn.Embedding(rows, width, dtype=dtype)
        self.layer = nn.Linear(width, width, dtype=dtype)
        self.head = nn.Linear(width, rows, bias=False, device="meta", dtype=dtype)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        hidden = torch.tanh(self.layer(self.embedding(ids)))
        return strata.nn.linear_cross_entropy(hidden, self.head, ids.roll(1, -1))


def config_of(place, folder, tile_bytes, **more):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if place != "device":
        where = {"device": "cpu" if place == "host" else "nvme", "nvme_path": folder, "pin_memory": True,
                 "buffer_count": 4, "buffer_size": tile_bytes}  # fmt: skip
        zero |= {"offload_param": dict(where), "offload_optimizer": dict(where)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "strata": {"tiles": {"max_gather": tile_bytes}},
        **more,
    }


def square(arguments, device):
    width, tile, tokens = (512, 64 << 10, 8) if arguments.tiny else (22528, 64 * MIB, 64)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parameter = 4 * width * width
    peaks = Peaks(device)
    for place in arguments.place:
        for built in ("init", "host"):
            config = config_of(place, arguments.folder, tile)
            peaks.start()
            if built == "init":
                with strata.zero.Init(config_dict_or_path=config):
                    model = nn.Linear(width, width, bias=False)
            else:
                model = nn.Linear(width, width, bias=False)
            forecast = strata.memory_forecast(nn.Linear(width, width, bias=False, device="meta"), config, world,
                                              device=device.type)["total"]  # fmt: skip
            engine, *_ = strata.initialize(model=model, config=config)
            construction = peaks.take(engine)
            peaks.start(engine)
            x = torch.randn(tokens, width, device=device, requires_grad=True)
            losses = []
            for _ in range(3):
                loss = engine(x).square().mean()
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            training = peaks.take(engine)
            say(case="square", place=place, built=built, world=world, parameter=parameter, tile=tile,
                construction=construction, training=training, losses=losses, forecast=forecast,
                bound=4 * parameter // world + 3 * tile + 3 * 4 * tokens * width)  # fmt: skip
            engine.destroy()
            del engine, model


def embedding(arguments, device):
    rows, width, tile = (4096, 64, 32 << 10) if arguments.tiny else (int(arguments.gib * GIB) // 16384, 8192, 256 * MIB)
    cap = int(arguments.cap_gib * GIB)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), device)
    config = config_of("host", None, tile, bf16={"enabled": True})
    config["strata"]["max_live_bytes"] = 4 * tile
    torch.manual_seed(0)
    peaks = Peaks(device)
    peaks.start()
    model = Tied(rows, width, torch.bfloat16)
    engine, *_ = strata.initialize(model=model, config=config)
    construction = peaks.take(engine)
    peaks.start(engine)
    generator = torch.Generator().manual_seed(1 + engine.global_rank)
    ids = torch.randint(0, rows, (2, 64 if arguments.tiny else 512), generator=generator).to(device)
    losses = []
    for _ in range(arguments.steps):
        loss = engine(ids)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    training = peaks.take(engine)
    say(case="embedding", world=engine.world_size, parameter=rows * width * 2, cap=cap, construction=construction,
        training=training, losses=losses, falls=losses[-1] < losses[0], under_cap=training["both_at_most"] <= cap,
        forecast=engine.memory_forecast()["total"])  # fmt: skip
    engine.destroy()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["square", "embedding"])
    parser.add_argument("--place", nargs="+", default=["device", "host"], choices=["device", "host", "nvme"])
    parser.add_argument("--folder", default="/tmp", help="of the drive, for nvme")
    parser.add_argument("--cap-gib", type=float, default=8.0)
    parser.add_argument("--gib", type=float, default=24.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    {"square": square, "embedding": embedding}[arguments.case](arguments, device)


if __name__ == "__main__":
    main()
