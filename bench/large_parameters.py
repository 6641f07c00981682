"""Trains parameters larger than the device may hold at once, and prints the memory that it held: lines of JSON.

    torchrun --nproc-per-node 2 bench/large_parameters.py square [--place device host nvme] [--folder DIR]
    torchrun --nproc-per-node 2 bench/large_parameters.py embedding [--cap-gib 8] [--gib 24] [--precision bf16] \
        [--weights host]

square: one fp32 parameter of 22528 x 22528 (2.03 GB) in a linear layer, with states and gradient in fp32, in tiles of
64 MiB. It reports the peaks of the start and of steps, as torch's allocator and the engine's ledger count them, of the
rank with the most, beside the bound: a rank's shards, states and gradients, three tiles, and the activations. The peaks
of the start are the engine's alone; bench_deferred_init.py measures constructors, too.

embedding: an Embedding of --gib in its dtype, tied to its head, with states on the host; the device's allocator is
capped, and the engine's allocations past it are counted. The loss falls. The forecast of the bytes on the device and
the host is printed first. --precision, one or several: bf16 has fp32 masters (14 bytes of the host for each element,
and a gradient), bf16-states neither masters nor fp32 moments (6 bytes and a gradient), fp32 12 bytes and a gradient.
--weights: the tier of the weights. A small one is trained beside plain torch first, on the same ranks without a cap. On
several ranks the model is built under zero.Init; on one it is built on the host. With --tiny sizes a CPU is enough.

If there are more ranks than GPUs, they share GPUs by peer copies. Weights stay on the GPU then, because NCCL gathers
those of several ranks from the host, and NCCL needs a GPU for each rank. A cap is each rank's.
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


def world_size():
    return int(os.environ.get("WORLD_SIZE", "1"))


def shares_a_gpu():
    return torch.cuda.is_available() and torch.cuda.device_count() < world_size()


def most_of_ranks(value):
    """The largest of all ranks. Collective."""
    if world_size() == 1:
        return value
    most = torch.tensor(value)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return most.item()


def forecast_of(model, config, device):
    """{tier: bytes that a rank will hold at its peak}."""
    return {tier: strata.memory_forecast(model, config, world_size(), device=device.type, tier=tier)["total"]
            for tier in ("device", "host")}  # fmt: skip


class Peaks:
    """Peak bytes of the device, of the rank with the most: torch's allocator's, and the engine's past it."""

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
        peaks = {"torch": of_torch, "engine": of_engine, "both_at_most": of_torch + of_engine}
        return {name: most_of_ranks(value) for name, value in peaks.items()}


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


def config_of(weights, states, folder, tile_bytes, **more):
    """weights, states: "device", "host" or "nvme"."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    for key, place in (("offload_param", weights), ("offload_optimizer", states)):
        if place != "device" and not (key == "offload_param" and shares_a_gpu()):
            zero[key] = {"device": "cpu" if place == "host" else "nvme", "nvme_path": folder, "pin_memory": True,
                         "buffer_count": 4, "buffer_size": tile_bytes}  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "strata": {"tiles": {"max_gather": tile_bytes}} | ({"collectives": "peer"} if shares_a_gpu() else {}),
        **more,
    }


def square(arguments, device):
    width, tile, tokens = (512, 64 << 10, 8) if arguments.tiny else (22528, 64 * MIB, 64)
    world, parameter = world_size(), 4 * width * width
    peaks = Peaks(device)
    for place in arguments.place:
        config = config_of(place, place, arguments.folder, tile)
        forecast = forecast_of(nn.Linear(width, width, bias=False, device="meta"), config, device)
        for built in ("init", "host"):
            peaks.start()
            if built == "init":
                with strata.zero.Init(config_dict_or_path=config):
                    model = nn.Linear(width, width, bias=False)
            else:
                model = nn.Linear(width, width, bias=False)
            engine, *_ = strata.initialize(model=model, config=config)
            construction = peaks.take(engine)
            peaks.start(engine)
            x = torch.randn(tokens, width, device=device, requires_grad=True)
            losses = steps_of(engine, lambda engine=engine, x=x: engine(x).square().mean(), 3)
            training = peaks.take(engine)
            say(case="square", place=place, offloads_weights="offload_param" in config["zero_optimization"],
                built=built, world=world, shared_gpu=shares_a_gpu(), parameter=parameter, tile=tile,
                construction=construction, training=training, losses=losses, forecast=forecast,
                bound=4 * parameter // world + 3 * tile + 3 * 4 * tokens * width)  # fmt: skip
            engine.destroy()
            del engine, model


def steps_of(engine, loss_of, steps):
    """The losses of ``steps`` steps."""
    losses = []
    for _ in range(steps):
        loss = loss_of()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def ids_of(rank, rows, length):
    return torch.randint(0, rows, (2, length), generator=torch.Generator().manual_seed(1 + rank))


def against_plain(arguments, device):
    """Trains a small model in fp32 without a cap, beside plain torch on the data of all ranks."""
    rows, width, length = 2048, 32, 64
    torch.manual_seed(0)
    model = Tied(rows, width, torch.float32)
    plain = nn.ModuleDict({"embedding": nn.Embedding(rows, width), "layer": nn.Linear(width, width)})
    plain.load_state_dict({key: value for key, value in model.state_dict().items() if not key.startswith("head")})
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    config = config_of(arguments.weights, "host", None, 16 << 10)
    engine, *_ = strata.initialize(model=model, config=config)
    own = ids_of(engine.global_rank, rows, length).to(device)
    ours = steps_of(engine, lambda: engine(own), arguments.steps)
    engine.destroy()
    theirs = []
    for _ in range(arguments.steps):
        losses = []
        for rank in range(world_size()):
            ids = ids_of(rank, rows, length)
            hidden = torch.tanh(plain["layer"](plain["embedding"](ids)))
            logits = hidden @ plain["embedding"].weight.T
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, -1).flatten()))
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(losses[0].item())
    apart = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs))
    say(case="embedding beside plain torch", losses=ours, plain=theirs, apart=apart, agree=apart < 1e-4)


PRECISIONS = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {"enabled": True}),
    "bf16-states": (
        torch.bfloat16, {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}),
}  # fmt: skip


def embedding(arguments, device):
    against_plain(arguments, device)
    for precision in arguments.precision:
        embedding_in(precision, arguments, device)


def embedding_in(name, arguments, device):
    """``name``: of PRECISIONS."""
    dtype, precision = PRECISIONS[name]
    rows, width, tile = (4096, 64, 32 << 10)
    if not arguments.tiny:
        rows, width, tile = int(arguments.gib * GIB) // (8192 * dtype.itemsize), 8192, 256 * MIB
    cap = int(arguments.cap_gib * GIB)
    config = config_of(arguments.weights, "host", None, tile, **({"bf16": precision} if precision else {}))
    config["strata"]["max_live_bytes"] = 4 * tile
    with torch.device("meta"):
        empty = Tied(rows, width, dtype)
    forecast = forecast_of(empty, config, device)
    weights = "host" if "offload_param" in config["zero_optimization"] else "device"
    told = {"world": world_size(), "shared_gpu": shares_a_gpu(), "precision": name, "weights": weights,
            "parameter": rows * width * dtype.itemsize, "cap": cap, "forecast": forecast}  # fmt: skip
    say(case="embedding, before it", **told)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), device)
    torch.manual_seed(0)
    peaks = Peaks(device)
    peaks.start()
    with strata.zero.Init(config_dict_or_path=config, enabled=world_size() > 1):
        model = Tied(rows, width, dtype)
    engine, *_ = strata.initialize(model=model, config=config)
    construction = peaks.take(engine)
    peaks.start(engine)
    ids = ids_of(engine.global_rank, rows, 64 if arguments.tiny else 512).to(device)
    losses = steps_of(engine, lambda: engine(ids), arguments.steps)
    training = peaks.take(engine)
    say(case="embedding", **told, construction=construction, training=training, losses=losses,
        falls=losses[-1] < losses[0], under_cap=training["both_at_most"] <= cap,
        beyond_cap=rows * width * dtype.itemsize > cap)  # fmt: skip
    engine.destroy()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["square", "embedding"])
    parser.add_argument("--place", nargs="+", default=["device", "host"], choices=["device", "host", "nvme"])
    parser.add_argument("--folder", default="/tmp", help="of the drive, for nvme")
    parser.add_argument("--cap-gib", type=float, default=8.0)
    parser.add_argument("--gib", type=float, default=24.0)
    parser.add_argument("--precision", nargs="+", choices=list(PRECISIONS), default=["bf16"])
    parser.add_argument("--weights", choices=["device", "host"], default="host", help="of the embedding")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    strata.init_distributed()
    {"square": square, "embedding": embedding}[arguments.case](arguments, device)


if __name__ == "__main__":
    main()
