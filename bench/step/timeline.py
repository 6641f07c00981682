"""The work of a GPU during one step, from the profiler's trace: busy, idle, and the exposed communication.

``profile_step`` records; ``summarise`` is arithmetic on the trace's events, whose times are in microseconds.
"""

import gzip
import json
import re
from pathlib import Path

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
EXCHANGE_KERNEL = re.compile("nccl|symm_mem|nvshmem|strata_sum", re.IGNORECASE)
OPTIMIZER_KERNEL = re.compile("adam", re.IGNORECASE)
LISTED = 12  # kernels that are named


def profile_step(step, batches, context):
    """Trains on two batches, of which the second is recorded on rank 0; a summary there, None elsewhere. The first
    is under the profiler too, so that the profiler's own start is not in the record. Collective."""
    if context.rank != 0:
        for ids in batches:
            step(ids)
            context.barrier()
        return None
    from torch.profiler import ProfilerActivity, profile, schedule

    Path(context.profile).parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if context.on_gpu else [])
    turns = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=activities, schedule=turns, on_trace_ready=_writer(context.profile)) as recorded:
        for ids in batches:
            step(ids)
            context.barrier()
            recorded.step()
    return {"file": context.profile} | summarise(read_trace(context.profile))


def _writer(path):
    return lambda recorded: recorded.export_chrome_trace(path)


def read_trace(path):
    """[event] of a Chrome trace, compressed if its name ends in .gz."""
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt") as file:
        return json.load(file)["traceEvents"]


def kind_of(event):
    """The kind of a device's event: "compute", "optimizer", "exchange" (a kernel that communicates with peers, or adds
    up their contributions), "fill", or the copy's kind, such as "copy DtoD" or "copy PtoP"."""
    name = event["name"]
    if event["cat"] == "gpu_memset":
        return "fill"
    if event["cat"] == "gpu_memcpy":
        return "copy " + (name.split()[1] if len(name.split()) > 1 else "?")
    if EXCHANGE_KERNEL.search(name):
        return "exchange"
    return "optimizer" if OPTIMIZER_KERNEL.search(name) else "compute"


def summarise(events):
    """A dict of milliseconds: "span" from the first to the last event of the device; "busy"; "gaps", the rest;
    "kinds", by kind those in which at least one event of it runs, and its bytes where it copies; "exchange", all
    kinds that move bytes between GPUs; "exposed", that part of it during which nothing computes; "exchange_sm", what
    its kernels take of the multiprocessors: their times, each by the part of these that it has blocks on; "kernels",
    the longest by name. An event of a copy engine counts as busy."""
    spans, moved, names, exchange_sm = {}, {}, {}, 0.0
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in DEVICE_CATEGORIES:
            continue
        kind, span = kind_of(event), (event["ts"], event["ts"] + event["dur"])
        spans.setdefault(kind, []).append(span)
        moved[kind] = moved.get(kind, 0) + event.get("args", {}).get("bytes", 0)
        if kind == "exchange":
            exchange_sm += event["dur"] * min(1.0, event.get("args", {}).get("blocks per SM", 0.0))
        seconds, count = names.get(event["name"], (0.0, 0))
        names[event["name"]] = (seconds + event["dur"], count + 1)
    everything = [span for of_kind in spans.values() for span in of_kind]
    between_gpus = [s for kind, of_kind in spans.items() if kind in ("exchange", "copy PtoP") for s in of_kind]
    working = [s for kind, of_kind in spans.items() if kind in ("compute", "optimizer") for s in of_kind]
    span = max(s[1] for s in everything) - min(s[0] for s in everything) if everything else 0.0
    busy = covered(everything)
    kinds = {}
    for kind, of_kind in sorted(spans.items()):
        kinds[kind] = {"ms": covered(of_kind) / 1e3, "count": len(of_kind)}
        if moved[kind]:
            kinds[kind]["bytes"] = moved[kind]
    longest = sorted(names.items(), key=lambda item: -item[1][0])[:LISTED]
    return {
        "span": span / 1e3,
        "busy": busy / 1e3,
        "gaps": (span - busy) / 1e3,
        "exchange": covered(between_gpus) / 1e3,
        "exchange_sm": exchange_sm / 1e3,
        "exposed": (covered(between_gpus + working) - covered(working)) / 1e3,
        "kinds": kinds,
        "kernels": [{"name": name, "ms": us / 1e3, "count": count} for name, (us, count) in longest],
    }


def covered(spans):
    """The length of the union of [(start, end)]."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def in_words(summary):
    """One line."""
    parts = [f"step {summary['span']:.1f} ms", f"busy {summary['busy']:.1f}", f"gaps {summary['gaps']:.1f}"]
    parts.append(f"exchange {summary['exchange']:.1f}, of which exposed {summary['exposed']:.1f}")
    parts.append(f"multiprocessors in exchange {summary['exchange_sm']:.1f}")
    for kind, figures in summary["kinds"].items():
        size = f", {figures['bytes'] / 1e9:.2f} GB" if "bytes" in figures else ""
        parts.append(f"{kind} {figures['ms']:.1f} ({figures['count']}{size})")
    return "; ".join(parts)
