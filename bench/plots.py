"""The README's pictures, drawn from stored figures of bench/startup/run.py and bench/step/run.py.

    python bench/plots.py                  # draws docs/pictures/*.svg from bench/results/*.json
    python bench/plots.py --check          # ends with 1 where a picture is not what the stored figures give
    python bench/plots.py --store startup RAW.json --model "Qwen3-30B-A3B at 16 layers, 21.2 GB" \\
        --machine "2 x H200, 16 cores a GPU" --software "torch 2.11, DeepSpeed 0.19.8" --date 2026-11-23 \\
        --command "bench/startup/run.py --world 2 ..."      # keeps what pictures need of what run.py --json wrote

An engine that had several turns is drawn at their median. Needs the standard library alone.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))

from bar_chart import Bar, Chart, render  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PICTURES = ROOT / "docs" / "pictures"
GIB = 1 << 30
FLOOR = "floor"
ABOUT = ("model", "machine", "software", "date", "command")

# The keys of a row that pictures need, by the bench that wrote it.
ROW_KEYS = {
    "startup": ("load_s", "initialize_s", "total_s"),
    "step": ("median_s", "tokens_per_s", "device_peak"),
}
SETTINGS_KEYS = {"startup": ("world",), "step": ("world", "batch", "seq", "steps")}

# Names of engines and of variants in words; the first word gives the colour.
LABELS = {
    "startup": {
        "strata-z2": "Strata, stage 2",
        "strata-z3": "Strata, stage 3",
        "strata-live-z2": "Strata, stage 2, model on the GPU",
        "strata-live-z3": "Strata, stage 3, model on the GPU",
        "strata-host-z2": "Strata, stage 2, model on the host",
        "fsdp2": "FSDP2",
        "ds-z2": "DeepSpeed ZeRO-2, model on the host",
        "ds-live-z2": "DeepSpeed ZeRO-2, model on the GPU",
        "ds-z3": "DeepSpeed ZeRO-3",
    },
    "step": {
        FLOOR: "without communication",
        "strata-z2": "Strata, stage 2",
        "strata-z3": "Strata, stage 3",
        "z3-keep": "Strata, stage 3, kept",
        "z2-nccl": "Strata, stage 2, over NCCL",
        "z3-nccl": "Strata, stage 3, over NCCL",
        "fsdp2": "FSDP2, fp32 reduction",
        "fsdp2-pure": "FSDP2, all in bf16, no masters",
        "fsdp2-bf16": "FSDP2, bf16 reduction",
        "fsdp2-bf16-keep": "FSDP2, bf16 reduction, kept",
        "ds-z2": "DeepSpeed ZeRO-2",
        "ds-z2-large": "DeepSpeed ZeRO-2, large",
        "ds-z3": "DeepSpeed ZeRO-3",
        "ds-z3-large": "DeepSpeed ZeRO-3, large",
    },
}
# Suffixes of labels, and their meanings.
WORDS = {
    ", kept": "Kept: gathered weights stay for backward.",
    ", large": "Large: DeepSpeed's buckets of 1e9 elements.",
}
LABELS["step_compiled"] = LABELS["step"]
for keys in (ROW_KEYS, SETTINGS_KEYS):
    keys["step_compiled"] = keys["step"]
COLOUR_NAMES = {"strata": "Strata", "deepspeed": "DeepSpeed", "fsdp2": "FSDP2"}


class BadFigures(Exception):
    """Stored figures lack a part that a picture needs; the message names the place and the part."""


def base_name(name):
    """The engine's name without the number of its turn."""
    return name.partition("#")[0]


def _part(value, key, kind, place):
    """``value[key]``, which has to be there and of type ``kind``."""
    if key not in value:
        raise BadFigures(f"{place}: '{key}' is missing; it has {', '.join(value) or 'nothing'}")
    found = value[key]
    if not isinstance(found, kind) or isinstance(found, bool):
        raise BadFigures(f"{place}: '{key}' has to be {_in_words(kind)}; found {found!r}")
    return found


def _in_words(kind):
    return {dict: "an object", str: "a text"}.get(kind, "a number")


def _number(row, key, place):
    value = _part(row, key, (int, float), place)
    if not 0 < value < float("inf"):
        raise BadFigures(f"{place}: '{key}' has to be a number above 0; found {value}")
    return value


def read_json(path):
    """The object that the file holds."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadFigures(f"{path}: no such file; bench/plots.py --store makes it of a run's --json") from None
    except ValueError as error:
        raise BadFigures(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadFigures(f"{path}: an object is wanted; found {type(value).__name__}")
    return value


def stored_figures(bench, raw, about, place):
    """The figures to store from the output of ``run.py --json``: ``about``, and the keys of every row that pictures
    need."""
    settings = _part(raw, "settings", dict, place)
    engines = _part(raw, "engines", dict, place)
    kept = {key: _part(settings, key, int, f"{place}: settings") for key in SETTINGS_KEYS[bench]}
    figures = {"about": about, "settings": kept}
    if bench == "startup":
        limit = _part(raw, "limit", dict, place)
        figures["limit"] = {k: _number(limit, k, f"{place}: limit") for k in ("stage3_s", "stage2_s")}
    figures["engines"] = {}
    for name, row in engines.items():
        if base_name(name) not in LABELS[bench]:
            raise BadFigures(f"{place}: engine '{name}' has no name in words; add one to LABELS in bench/plots.py")
        label = LABELS[bench][base_name(name)]
        figures["engines"][name] = {"label": label, **{key: row[key] for key in ROW_KEYS[bench] if key in row}}
    figures["not_run"] = sorted({*raw.get("skipped", {}), *raw.get("failed", {})})
    return figures


def medians(figures, key, place, leave_out=()):
    """[(label, median of the engine's turns)], in the order of the file."""
    turns = {}
    for name, row in _part(figures, "engines", dict, place).items():
        where = f"{place}: engine '{name}'"
        if base_name(name) not in leave_out:
            label = _part(row, "label", str, where)
            turns.setdefault(label, []).append(_number(row, key, where))
    if not turns:
        raise BadFigures(f"{place}: 'engines' has none that could be drawn")
    return [(label, statistics.median(values)) for label, values in turns.items()]


def _bar(label, value, text, place):
    first = label.replace(",", " ").split()[0].lower() if label.strip() else ""
    if first not in COLOUR_NAMES:
        raise BadFigures(f"{place}: a label begins with {', '.join(COLOUR_NAMES.values())}; found '{label}'")
    return Bar(label, value, text, first)


def _legend(bars, limit):
    names = {**COLOUR_NAMES, "limit": limit}
    return {colour: text for colour, text in names.items() if any(bar.colour == colour for bar in bars)}


def _caption(figures, place, *more):
    about = _part(figures, "about", dict, place)
    model, machine, software, date, _ = (_part(about, key, str, f"{place}: about") for key in ABOUT)
    ranks = _part(_part(figures, "settings", dict, place), "world", int, f"{place}: settings")
    engines = figures["engines"]
    labels = [row["label"] for row in engines.values() if "label" in row]
    notes = [text for word, text in WORDS.items() if any(label.endswith(word) for label in labels)]
    if any(base_name(name) not in (name, FLOOR) for name in engines):
        notes.append("Engines with several turns: the median.")
    if missing := figures.get("not_run"):
        notes.append(f"Did not run: {', '.join(missing)}.")
    return [f"{model}; {ranks} ranks on {machine}; {software}; {date}.", " ".join([*more, *notes]),
            f"Figures and command: bench/results/{place}"]


def start_up_chart(figures, place):
    """Seconds from a checkpoint's files to an engine that can train, beside the limit of the machine."""
    limit = _part(figures, "limit", dict, place)
    bars = [_bar(label, s, f"{s:.2f} s", place) for label, s in medians(figures, "total_s", place)]
    for stage in (3, 2):
        seconds = _number(limit, f"stage{stage}_s", f"{place}: limit")
        bars.append(Bar(f"limit, stage {stage}", seconds, f"{seconds:.2f} s", "limit"))
    bars.sort(key=lambda bar: bar.value)
    note = "The limit reads every byte once from the page cache and puts it on the GPUs; for stage 2 it gathers, too."
    caption = _caption(figures, place, note)
    legend = _legend(bars, "limit of the machine")
    return Chart("From a checkpoint's files to ready", "seconds; less is better", bars, legend, caption)


def step_chart(figures, place):
    """Tokens a second of every engine, beside the step without communication."""
    engines = medians(figures, "tokens_per_s", place, leave_out=(FLOOR,))
    settings = _part(figures, "settings", dict, place)
    batch, seq = (_part(settings, key, int, f"{place}: settings") for key in ("batch", "seq"))
    floors = {name: row for name, row in figures["engines"].items() if base_name(name) == FLOOR}
    if not floors:
        raise BadFigures(f"{place}: engine '{FLOOR}' is missing: shares are of the step without communication")
    most = max(_number(row, "tokens_per_s", f"{place}: engine '{name}'") for name, row in floors.items())
    bars = [_bar(label, n, f"{n:,.0f} ({n / most:.0%})", place) for label, n in engines]
    bars.append(Bar(LABELS["step"][FLOOR], most, f"{most:,.0f}", "limit"))
    bars.sort(key=lambda bar: -bar.value)
    note = f"{batch} x {seq} tokens a GPU and step. In brackets: share of the step without communication."
    caption = _caption(figures, place, note)
    legend = _legend(bars, "limit: nothing exchanged")
    compiled = ", every block compiled" if "--compile" in figures["about"]["command"] else ""
    return Chart(f"A training step{compiled}", "tokens a second and GPU; more is better", bars, legend, caption)


def memory_chart(figures, place):
    """The device's peak in steps. The floor shards nothing and is no engine, so it is left out."""
    rows = medians(figures, "device_peak", place, leave_out=(FLOOR,))
    bars = [_bar(label, size / GIB, f"{size / GIB:.1f} GiB", place) for label, size in rows]
    bars.sort(key=lambda bar: bar.value)
    note = "The fullest GPU, as its driver counts; activations, CUDA and the allocator's reserve included."
    title = "Device memory in training steps, at the peak"
    return Chart(title, "GiB; less is better", bars, _legend(bars, "other"), _caption(figures, place, note))


# Picture -> (file of figures, what is drawn of it).
CHARTS = {
    "start_up": ("startup", start_up_chart),
    "step": ("step", step_chart),
    "step_compiled": ("step_compiled", step_chart),
    "memory": ("step", memory_chart),
}


def draw(picture, results=None):
    """The SVG of one picture, as text."""
    bench, chart = CHARTS[picture]
    path = Path(results or RESULTS) / f"{bench}.json"
    return render(chart(read_json(path), path.name))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say which pictures are out of date")
    parser.add_argument("--store", nargs=2, metavar=("BENCH", "RAW"), 
                        help=f"{', '.join(ROW_KEYS)}; a file of run.py --json")
    for key in ABOUT:
        parser.add_argument(f"--{key}", help="with --store: as the caption says it")
    return parser.parse_args()


def store(a):
    """Keeps a run's figures under bench/results."""
    bench, raw = a.store
    about = {key: getattr(a, key) for key in ABOUT}
    if bench not in ROW_KEYS or not all(about.values()):
        needed = ", ".join(f"--{key}" for key in ABOUT)
        raise BadFigures(f"--store wants {' or '.join(ROW_KEYS)}, a file, and {needed}")
    figures = stored_figures(bench, read_json(raw), about, Path(raw).name)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{bench}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def main():
    a = parse_arguments()
    try:
        if a.store:
            store(a)
        pictures = {PICTURES / f"{name}.svg": draw(name) for name in CHARTS}
    except BadFigures as error:
        sys.exit(f"error: {error}")
    old = [p for p, text in pictures.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    for path in old:
        print(f"{path.name}: {'out of date' if a.check else 'drawn'}")
        if not a.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pictures[path], encoding="utf-8")
    return 1 if a.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
