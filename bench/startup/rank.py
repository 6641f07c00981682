"""A rank of one engine: a process that imports, waits for its turn, starts the engine under the clock, and tells."""

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parents[1]))  # memory_use.py

LIMIT = "limit"
_WARM_BYTES = 64 << 20


def rank_main(connection, name, options, rank, world_size, port, log):
    """Answers are (kind, value): "imported"; after an order, "started", "ready", "done", each with a dict; or
    "skipped" with the reason; or "error" with a traceback. The order is a dict of options that have changed.

    Args:
        name: of ``engines.ENGINES``, or ``LIMIT``.
        options: a dict of what ``run.py`` was called with.
        log: file for what the libraries print.
    """
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        _set_environment(options, rank, world_size, port)
        if reason := _missing(name, options):
            connection.send(("skipped", reason))
            return
        importlib.import_module("transformers")
        connection.send(("imported", {}))
        _take_turn(connection, name, options | connection.recv(), rank, world_size)
    except EOFError:
        pass  # whoever gave the orders is gone
    except BaseException:
        connection.send(("error", traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)  # the libraries' own endings wait for peers, which may be gone


def _set_environment(options, rank, world_size, port):
    defaults = {
        "OMP_NUM_THREADS": max(1, options["cores"] // world_size),
        "DS_ACCELERATOR": options["device"],
        "DS_SKIP_CUDA_CHECK": 1,
        "HF_HUB_OFFLINE": 1,
        "HF_HUB_DISABLE_PROGRESS_BARS": 1,
        "TRANSFORMERS_VERBOSITY": "error",
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, str(value))
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def _missing(name, options):
    """Why ``name`` cannot run here, or None."""
    package = "torch" if name == LIMIT else options["packages"][name]
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return None


def _take_turn(connection, name, options, rank, world_size):
    context = _make_context(options, rank, world_size)
    if name == LIMIT:
        from limit import Limit

        limit = Limit(context)
        connection.send(("started", {}))
        connection.send(("done", limit.measure()))
        context.meet()
        return
    import engines
    from phases import Clock

    engine = engines.ENGINES[name]
    engines.prepare(engine, context, options["toy"])
    _warm_up(context)
    context.clock = Clock(context.device)
    connection.send(("started", {}))
    step = engine.start(context, **engine.arguments)
    ready = context.clock.ready()
    connection.send(("ready", ready))
    context.told.setdefault("pinned", _pinned_by_torch(context))
    losses = _train(step, context, options["steps"])
    connection.send(("done", {"phases": context.clock.phases, "losses": losses, "told": context.told}))
    context.meet()


def _make_context(options, rank, world_size):
    import torch
    import torch.distributed as dist

    on_gpu = options["device"] == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")

    def meet():
        if on_gpu:
            torch.cuda.synchronize(device)
        dist.barrier()

    own = {"rank": rank, "world_size": world_size, "device": device, "on_gpu": on_gpu, "meet": meet}
    return SimpleNamespace(**{**options, **own}, told={}, endings=[])


def _warm_up(context):
    """The GPU's context, and a communicator that has made every connection it needs; the same for all engines."""
    import torch
    import torch.distributed as dist

    words = _WARM_BYTES // 4 if context.on_gpu else 1024
    one = torch.ones(words, device=context.device)
    all_of_them = torch.ones(words * context.world_size, device=context.device)
    dist.all_reduce(one)
    dist.all_gather_into_tensor(all_of_them, one)
    if context.on_gpu:
        dist.reduce_scatter_tensor(one, all_of_them)
    dist.broadcast(one, 0)
    del one, all_of_them
    context.meet()
    if context.on_gpu:
        torch.cuda.empty_cache()


def _pinned_by_torch(context):
    if not context.on_gpu:
        return None
    import torch

    return torch.cuda.host_memory_stats().get("allocated_bytes.peak")


def _train(step, context, steps):
    """The losses; each rank has its own data, the same for every engine."""
    import torch
    from transformers import AutoConfig

    vocabulary = AutoConfig.from_pretrained(context.model).vocab_size
    generator = torch.Generator().manual_seed(1234 + context.rank)
    losses = []
    for number in range(steps):
        ids = torch.randint(0, vocabulary, (context.micro_batch, context.tokens), generator=generator)
        with context.clock.phase("step", f"step {number + 1}"):
            losses.append(step(ids.to(context.device)))
    return losses
