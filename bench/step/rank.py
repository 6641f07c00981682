"""A rank of one engine: a process that imports, waits for its turn, builds its engine, and times steps."""

import gc
import importlib
import importlib.util
import os
import statistics
import time

from device_memory import DeviceSampler
from engine_processes import run_rank
from memory_use import proportional_data
from rank_context import make_context, warm_up

FIRST_SAMPLE = 2  # the step after which memory should not grow
CALM_SAMPLE_S = 0.05  # while steps are timed: the driver answers under a lock of its own


def rank_main(connection, engine, options, place):
    """Answers are (kind, value): "imported"; after an order, "ready" and "done", each with a dict; or "skipped"
    with the reason; or "error" with a traceback. The order is a dict of options that have changed.

    Args:
        engine: of ``engines.ENGINES``, or a variant.
        options: the dict of ``run.py``'s options.
    """
    run_rank(connection, options, place, lambda: _serve(connection, engine, options, place))


def _serve(connection, engine, options, place):
    if importlib.util.find_spec(engine.package) is None:
        connection.send(("skipped", f"{engine.package} is not installed"))
        return
    importlib.import_module("transformers")
    connection.send(("imported", {}))
    order = options | connection.recv()
    if order["deterministic"]:
        _make_deterministic()
    context = make_context(order, place)
    warm_up(context)
    sampler = DeviceSampler(context.device)
    sampler.start()
    started = time.perf_counter()
    training = engine.start(context, **engine.arguments)
    _tidy_up(context)
    connection.send(("ready", {"seconds": time.perf_counter() - started, "device_peak": sampler.take()}))
    told = measure(training, context, sampler)
    if context.profile:
        from timeline import profile_step

        told["timeline"] = profile_step(training.step, make_batches(context, 2, context.steps), context)
    connection.send(("done", told))
    context.barrier()


def _make_deterministic():
    """Makes torch deterministic, before CUDA starts. Operators without a deterministic version stay unchanged."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


def _tidy_up(context):
    """Frees the remains of building, so that they are not in the figures of steps."""
    gc.collect()
    context.barrier()
    if context.on_gpu:
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(context.device)


def make_batches(context, count, first=0):
    """[ids] of this rank on its device, the same for every engine."""
    import torch
    from make_model import make_config

    vocabulary = make_config(context.model, context.layers).vocab_size
    batches = []
    for number in range(first, first + count):
        seed = (context.seed * 1_000_003 + number) * context.world_size + context.rank
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, vocabulary, (context.batch, context.seq), generator=generator)
        batches.append(ids.to(context.device))
    return batches


def measure(training, context, sampler):
    """A dict: seconds of every timed step by the device's own clock, losses of all steps, and memory."""
    import torch

    batches = make_batches(context, context.warmup + context.steps)
    # In one piece: a small one a step, between large ones that come and go, would scatter the heap.
    losses, samples = torch.zeros(len(batches), device=context.device), []

    def run(number):
        loss = training.step(batches[number])
        losses[number] = loss.item() if context.read_loss else loss
        step = number + 1
        if context.sample_every and (step == FIRST_SAMPLE or step % context.sample_every == 0):
            samples.append(_sample(training, context, sampler, step))

    for number in range(context.warmup):
        run(number)
    context.barrier()
    warm_peak, allocations = sampler.take(), _allocations(context)
    used = sampler.used()
    sampler.interval_s = CALM_SAMPLE_S
    started = time.perf_counter()
    marks = [_mark(context)]
    for number in range(context.warmup, len(batches)):
        run(number)
        marks.append(_mark(context))
    handed_over = time.perf_counter() - started  # by the host; the device may be behind
    if context.on_gpu:
        torch.cuda.synchronize(context.device)
    seconds = time.perf_counter() - started
    told = {
        "step_s": [_between(context, a, b) for a, b in zip(marks, marks[1:])],
        "mean_s": seconds / context.steps,
        "host_s": handed_over / context.steps,
        "device_peak": max(warm_peak, sampler.take()),
        "device_growth": sampler.used() - used,
        "allocations": _allocations(context) - allocations,
        "torch_peak": _torch_peak(context),
        "losses": losses.tolist(),
        "samples": samples,
        "account": _account(training, context) | context.told,
    }
    told["median_s"] = statistics.median(told["step_s"])
    if context.compile:
        told["account"]["compiled"] = _compiled()
    return told


def _compiled():
    """Graphs and breaks that torch.compile has made in this rank. Blocks of one class share a graph."""
    from torch._dynamo.utils import counters

    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def _account(training, context):
    """The engine's own report of one more step."""
    if training.look is not None:
        training.look(True)
        training.step(make_batches(context, 1, context.warmup + context.steps)[0])
        training.look(False)
    return training.account()


def _sample(training, context, sampler, step):
    """Memory after ``step``, a dict: "used" of the GPU as its driver says, on the CPU of this process; "mallocs" of
    torch's allocator so far; and what the engine says."""
    used = sampler.used() if context.on_gpu else proportional_data()
    return {"step": step, "used": used, "mallocs": _allocations(context), **training.memory()}


def _mark(context):
    if not context.on_gpu:
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(context, first, second):
    return first.elapsed_time(second) / 1e3 if context.on_gpu else second - first


def _allocations(context):
    """Pieces that torch's allocator has asked the driver for."""
    if not context.on_gpu:
        return 0
    import torch

    return torch.cuda.memory_stats(context.device).get("num_device_alloc", 0)


def _torch_peak(context):
    if not context.on_gpu:
        return 0
    import torch

    return torch.cuda.max_memory_allocated(context.device)
