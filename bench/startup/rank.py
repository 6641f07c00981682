"""A rank of one engine: a process that imports, waits for its turn, starts the engine under the clock, and reports."""

import importlib
import importlib.util

from engine_processes import run_rank
from rank_context import make_context, warm_up

LIMIT = "limit"


def rank_main(connection, name, options, place):
    """Answers are (kind, value): "imported"; after an order, "started", "ready", "done", each with a dict; or
    "skipped" with the reason; or "error" with a traceback. The order is a dict of options that have changed.

    Args:
        name: of ``engines.ENGINES``, or ``LIMIT``.
        options: the dict of ``run.py``'s options.
    """
    run_rank(connection, options, place, lambda: _serve(connection, name, options, place))


def _serve(connection, name, options, place):
    if reason := _missing(name, options):
        connection.send(("skipped", reason))
        return
    importlib.import_module("transformers")
    connection.send(("imported", {}))
    _take_turn(connection, name, options | connection.recv(), place)


def _missing(name, options):
    """The reason why ``name`` cannot run here, or None."""
    package = "torch" if name == LIMIT else options["packages"][name]
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return None


def _take_turn(connection, name, options, place):
    context = make_context(options, place)
    if name == LIMIT:
        from limit import Limit

        limit = Limit(context)
        connection.send(("started", {}))
        connection.send(("done", limit.measure()))
        context.barrier()
        return
    import engines
    from phases import Clock

    engine = engines.ENGINES[name]
    engines.prepare(engine, context, options["toy"])
    warm_up(context)
    context.clock = Clock(context.device)
    connection.send(("started", {}))
    step = engine.start(context, **engine.arguments)
    ready = context.clock.ready()
    connection.send(("ready", ready))
    context.told.setdefault("pinned", _pinned_by_torch(context))
    losses = _train(step, context, options["steps"])
    connection.send(("done", {"phases": context.clock.phases, "losses": losses, "told": context.told}))
    context.barrier()


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
