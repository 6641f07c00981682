"""The tables of a comparison, as text: every engine's figures, beside the limit and its peers."""

import statistics

from tables import columns

GB = 1e9
MIB = 1 << 20
GIB = 1 << 30
MEASURED = ("read_s", "copy_s", "load_s", "gather_s")


def summarise(told):
    """One row, with the figures of the slowest or largest rank, from [the report of each rank]."""

    def most(key):
        return max(answer[key] for answer in told)

    phases = []
    for same in zip(*(answer["phases"] for answer in told)):
        slowest = max(same, key=lambda phase: phase["seconds"])
        phases.append(slowest | {key: max(p[key] for p in same) for key in ("cpu_seconds", "device_peak")})
    rank_losses = list(zip(*(answer["losses"] for answer in told)))
    pinned = [answer["told"]["pinned"] for answer in told if answer["told"].get("pinned") is not None]
    return {
        "load_s": sum(p["seconds"] for p in phases if p["kind"] == "load"),
        "initialize_s": sum(p["seconds"] for p in phases if p["kind"] == "initialize"),
        "total_s": most("seconds"),
        "cpu_s": sum(p["cpu_seconds"] for p in phases if p["kind"] != "step"),
        "device_at_start": most("device_at_start"),
        "device_peak": most("device_peak"),
        "device_ready": most("device_ready"),
        "longest_sample_gap_s": most("longest_sample_gap_s"),
        "host_data_peak": most("data_peak"),
        "host_pss_ready": most("pss_ready"),
        "host_data_added": max(a["data_peak"] - a["data_at_start"] for a in told),
        "host_peak_resident": most("peak_resident"),
        "pinned": max(pinned, default=None),
        "losses": [statistics.fmean(losses) for losses in rank_losses],
        "phases": phases,
        "init_report": told[0]["told"].get("init_report"),
        "ledger_peaks": told[0]["told"].get("ledger_peaks"),
    }


def summarise_limit(told):
    """Takes the slowest rank of every repetition, and the fastest repetition. "repetitions" has them all: their spread
    shows whether other jobs use the host."""
    repetitions = {key: [max(times) for times in zip(*(answer[key] for answer in told))] for key in MEASURED}
    return _limit_of({"bytes": told[0]["bytes"], "threads": told[0]["threads"]}, repetitions)


def fastest_limit(limits):
    """The limit of a run that measured it several times: the fastest repetition of all."""
    first, *_ = limits = list(limits)
    repetitions = {key: [s for limit in limits for s in limit["repetitions"][key]] for key in MEASURED}
    return _limit_of({key: first[key] for key in ("bytes", "threads")}, repetitions)


def _limit_of(sizes, repetitions):
    seconds = {key: min(times, default=None) for key, times in repetitions.items()}
    both = {"stage3_s": seconds["load_s"], "stage2_s": seconds["load_s"] + (seconds["gather_s"] or 0.0)}
    return {**sizes, **seconds, **both, "repetitions": repetitions}


def engine_table(rows):
    """A line for each engine that ran."""
    headings = ["engine", "load s", "init s", "ready s", "CPU s", "dev start", "dev peak", "dev ready"]
    headings += ["host peak", "host added", "Pss", "VmHWM", "pinned", "loss"]
    lines = [headings]
    for name, row in rows.items():
        seconds = [f"{row[key]:.2f}" for key in ("load_s", "initialize_s", "total_s")]
        device = [gib(row[key]) if row["device_peak"] else "-" for key in ("device_at_start", "device_peak")]
        device.append(gib(row["device_ready"]) if row["device_peak"] else "-")
        host_keys = ("host_data_peak", "host_data_added", "host_pss_ready", "host_peak_resident", "pinned")
        host = [gib(row[key]) for key in host_keys]
        loss = f"{row['losses'][-1]:.4f}" if row["losses"] else "-"
        lines.append([name, *seconds, f"{row['cpu_s']:.1f}", *device, *host, loss])
    return columns(lines)


def limit_table(turn, limit, world_size):
    """The hardware's figures in this turn."""
    size = limit["bytes"]
    lines = [[turn, "s", "GB/s", "median s", "slowest s"]]
    names = {
        "read_s": "read into host memory, all ranks",
        "copy_s": "host to device, all ranks",
        "load_s": "both, one under the other",
        "gather_s": "all-gather in place, bytes received by a rank",
    }
    for key, text in names.items():
        if limit[key]:
            moved = size * (world_size - 1) / world_size if key == "gather_s" else size
            times = limit["repetitions"][key]
            spread = [f"{statistics.median(times):.3f}", f"{max(times):.3f}"]
            lines.append([text, f"{limit[key]:.3f}", f"{moved / GB / limit[key]:.1f}", *spread])
    for stage in (3, 2):
        seconds = limit[f"stage{stage}_s"]
        lines.append([f"ready at stage {stage}", f"{seconds:.3f}", f"{size / GB / seconds:.1f}", "-", "-"])
    return columns(lines)


def ratio_table(rows, engines, limit):
    """Strata's time over the limit, and the peers' over Strata's; each turn of an engine has a line.

    For a start from files the total counts, beside the fastest peer's. For a model that is in memory before,
    ``initialize`` alone counts, beside DeepSpeed's for a model in the same place. From the host the limit is that of
    files in the page cache, since rank 0's bytes have to be read there and put on GPUs once as well.
    """
    peers = {n: r for n, r in rows.items() if engines[base_name(n)].package != "strata"}
    lines = [["engine", "of the limit", "faster than the fastest peer", "its initialize against DeepSpeed's"]]
    lines[0].append("dev peak over ready, MiB")
    for name, row in rows.items():
        engine = engines[base_name(name)]
        if engine.package != "strata":
            continue
        over = f"{(row['device_peak'] - row['device_ready']) / MIB:.0f}" if row["device_peak"] else "-"
        line = [name, "-", "-", "-", over]
        if "on_gpu" not in engine.arguments:
            if limit:
                line[1] = f"{row['total_s'] / limit[f'stage{engine.stage}_s']:.2f}x"
            if peers:
                fastest = min(peers, key=lambda n: peers[n]["total_s"])
                line[2] = f"{peers[fastest]['total_s'] / row['total_s']:.1f}x ({fastest})"
        else:
            if limit and engine.moves_in:
                line[1] = f"{row['initialize_s'] / limit[f'stage{engine.stage}_s']:.2f}x"
            line[3] = _against_deepspeed(engine, row, peers, engines)
        lines.append(line)
    return columns(lines) if len(lines) > 1 else ""


def _against_deepspeed(engine, row, peers, engines):
    alike = {n: r["initialize_s"] for n, r in peers.items()
             if engines[base_name(n)].stage == engine.stage == 2
             and engines[base_name(n)].arguments.get("on_gpu", False) == engine.arguments["on_gpu"]}
    fastest = min(alike, key=alike.get, default=None)
    return f"{alike[fastest] / row['initialize_s']:.1f}x ({fastest})" if fastest else "-"


def phase_table(name, row):
    """Every phase of one engine, and the engine's own report of its start."""
    lines = [[name, "s", "CPU s", "dev peak"]]
    for p in row["phases"]:
        peak = gib(p["device_peak"]) if p["device_peak"] else "-"
        lines.append([p["name"], f"{p['seconds']:.3f}", f"{p['cpu_seconds']:.1f}", peak])
    return columns(lines)


def marks_table(report):
    """``engine.init_report``: a dict with "phases", each a dict of name, seconds and, where it moved any, bytes."""
    lines = [["its own account", "s", "GB", "GB/s"]]
    if isinstance(report, list):
        report = {"phases": report}
    for mark in report.get("phases", []):
        moved = mark.get("bytes")
        rate = f"{moved / GB / mark['seconds']:.1f}" if moved and mark["seconds"] else "-"
        size = f"{moved / GB:.2f}" if moved else "-"
        lines.append([mark["name"], f"{mark['seconds']:.3f}", size, rate])
    others = {key: value for key, value in report.items() if key != "phases"}
    return columns(lines) + (f"\n  {others}" if others else "")


def losses_apart(rows):
    """The largest relative distance of an engine's first loss from the median engine's."""
    first = [row["losses"][0] for row in rows.values() if row["losses"]]
    middle = statistics.median(first) if first else 0.0
    return max((abs(loss - middle) / abs(middle) for loss in first), default=0.0)


def base_name(name):
    """The engine's name without the number of its turn."""
    return name.partition("#")[0]


def gib(size):
    return "-" if size is None else f"{size / GIB:.2f}"
