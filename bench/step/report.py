"""The tables of a comparison of steps: every engine beside the floor, and whether their losses agree."""

import math
import statistics

GIB = 1 << 30
MIB = 1 << 20


def summarise(told, tokens):
    """One row from [the report of each rank]: the slowest rank of every step, and the largest memory.

    Args:
        told: the dicts of "ready" and "done" in one; with "build_s" and "build_peak".
        tokens: of a rank in a step.
    """

    def most(key):
        return max(answer[key] for answer in told)

    steps = [max(seconds) for seconds in zip(*(answer["step_s"] for answer in told))]
    median = statistics.median(steps)
    return {
        "median_s": median,
        "mean_s": most("mean_s"),
        "fastest_s": min(steps),
        "host_s": most("host_s"),
        "tokens_per_s": tokens / median,
        "step_s": steps,
        "build_s": most("build_s"),
        "build_peak": most("build_peak"),
        "device_peak": most("device_peak"),
        "device_growth": most("device_growth"),
        "torch_peak": most("torch_peak"),
        "allocations": most("allocations"),
        "samples": [answer["samples"] for answer in told],
        "rank_losses": [answer["losses"] for answer in told],
        "losses": [statistics.fmean(losses) for losses in zip(*(answer["losses"] for answer in told))],
        "accounts": [answer["account"] for answer in told],
        "timeline": next((answer["timeline"] for answer in told if answer.get("timeline")), None),
    }


def base_name(name):
    """The engine's name without the number of its turn."""
    return name.partition("#")[0]


def floor_of(rows, floor):
    """Seconds of the fastest turn of the floor, or None."""
    return min((row["median_s"] for name, row in rows.items() if base_name(name) == floor), default=None)


def losses_apart(rows, floor):
    """(largest relative distance of an engine's loss from the median engine's, that engine, that step's number).
    The floor trains nothing: its first loss alone counts."""
    worst = (0.0, None, None)
    trained = {name: row["losses"] for name, row in rows.items()}
    for step in range(max(map(len, trained.values()), default=0)):
        known = {n: l[step] for n, l in trained.items() if len(l) > step and (base_name(n) != floor or step == 0)}
        middle = statistics.median([loss for loss in known.values() if math.isfinite(loss)] or [math.inf])
        for name, loss in known.items():
            apart = abs(loss - middle) / abs(middle) if math.isfinite(loss) else math.inf  # agrees with no other
            worst = max(worst, (apart, name, step), key=lambda found: found[0])
    return worst


def step_table(rows, floor):
    """[[cell]]: a line for each engine that ran."""
    headings = ["engine", "ms/step", "mean", "host ms", "tokens/s/GPU", "of floor", "over floor ms", "dev peak",
                "torch"]
    lines = [headings + ["build", "growth MiB", "mallocs", "build s", "first loss", "last loss"]]
    fastest = floor_of(rows, floor)
    for name, row in rows.items():
        over = f"{(row['median_s'] - fastest) * 1e3:.1f}" if fastest else "-"
        share = [f"{fastest / row['median_s']:.1%}" if fastest else "-", over]
        on_gpu = row["device_peak"] > 0
        memory = [gib(row[key]) if on_gpu else "-" for key in ("device_peak", "torch_peak", "build_peak")]
        memory += [f"{row['device_growth'] / MIB:.0f}", str(row["allocations"])] if on_gpu else ["-"] * 2
        times = [f"{row[key] * 1e3:.1f}" for key in ("median_s", "mean_s", "host_s")]
        losses = [f"{row['losses'][0]:.4f}", f"{row['losses'][-1]:.4f}" if base_name(name) != floor else "-"]
        own = [f"{row['build_s']:.1f}", *losses]
        lines.append([name, *times, f"{row['tokens_per_s']:.0f}", *share, *memory, *own])
    return lines


def loss_lines(rows):
    """Every engine's losses, a line each."""
    widest = max(map(len, rows), default=0)
    return "\n".join(f"{n.ljust(widest)}  {' '.join(f'{loss:.4f}' for loss in r['losses'])}" for n, r in rows.items())


def account_line(name, row):
    """An engine's report of its own steps, on rank 0; "" if it gives none."""
    account = row["accounts"][0]
    said = {key: account[key] for key in ("collectives", "compiled", "step_report") if account.get(key)}
    if "step_report" in said:  # without the figures that are among the ledger's peaks
        said["step_report"] = {key: value for key, value in said["step_report"].items() if key != "device_memory"}
    return f"{name} says: {flat_text(said)}" if said else ""


def growth(samples):
    """The growth after the first of a rank's samples, a dict: the largest increase of "used" and "held" bytes, all
    "mallocs", and the sum of "made" over the sampled steps; each if it was sampled."""
    first, later = samples[0], samples[1:]
    counted = [key for key in ("used", "held", "mallocs") if key in first]
    grown = {key: max(sample[key] for sample in later) - first[key] for key in counted}
    return grown | ({"made": sum(sample["made"] for sample in later)} if "made" in first else {})


def growth_line(name, row):
    """The growth of memory on the rank where it grew most; "" if no rank has two samples."""
    ranks = [samples for samples in row["samples"] if len(samples) > 1]
    if not ranks:
        return ""
    worst = max(ranks, key=lambda samples: growth(samples)["used"])
    grown, first, last = growth(worst), worst[0], worst[-1]
    parts = [f"{gib(first['used'])} GiB in use after step {first['step']}, {gib(last['used'])} after {last['step']}"]
    parts += [f"at most {grown['used'] / MIB:+.1f} MiB in {len(worst) - 1} samples between"]
    parts += [f"torch's allocator asked for {grown['mallocs']} pieces"]
    if "held" in grown:
        parts += [f"the ledger {grown['held'] / MIB:+.1f} MiB", f"{grown['made']} pieces made in sampled steps"]
    return f"{name} growth: {'; '.join(parts)}"


def flat_text(value, key=""):
    """Nested figures in one line."""
    if isinstance(value, dict):
        return ", ".join(flat_text(inner, f"{key}.{k}" if key else str(k)) for k, inner in value.items())
    if isinstance(value, float):
        value = f"{value:.4g}"
    elif isinstance(value, (list, tuple)) and len(value) > 8:
        value = f"({len(value)} entries)"
    return f"{key} {value}" if key else str(value)


def gib(size):
    return f"{size / GIB:.2f}"
