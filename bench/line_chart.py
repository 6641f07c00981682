"""A chart of lines, one of them in a band, as one SVG text, in the manner of bar_chart.py: for light and dark schemes,
with the standard library alone. Each line's end has a text, and the legend its name.
"""

import math
from dataclasses import dataclass, field
from textwrap import wrap

from bar_chart import CAPTION_CHARACTERS, COLOURS, FONT, LINE, MARGIN, WIDTH, document, text_at

# By class: (light, dark). Lines have a contrast of at least 3 on the ground; dashes tell them apart without colours.
LINES = {
    "adamw": ("#59636e", "#9198a1", ""),
    "adamw8bit": ("#0969da", "#4493f8", "7 4"),
    "muon": ("#1a7f37", "#3fb950", ""),
    "lion": ("#bc4c00", "#db6d28", ""),
    "adafactor": ("#8250df", "#ab7df8", "2 3"),
}
HEIGHT = 340  # of the lines' part
END = 62  # for the values at the ends of lines
LEGEND_ROW = 18


@dataclass
class Line:
    """Points (``x[i]``, ``y[i]``); ``colour`` is a key of LINES, and ``text`` stands at the line's end."""

    label: str
    x: list
    y: list
    colour: str
    text: str


@dataclass
class Band:
    """The area between ``low`` and ``high``, in a line's colour."""

    x: list
    low: list
    high: list
    colour: str


@dataclass
class LineChart:
    """``unit`` is the vertical axis's and says what is better; ``across`` names the horizontal one, from 0 to
    ``widest``. Points above ``most`` are left out, as of the first steps."""

    title: str
    unit: str
    across: str
    widest: float
    lines: list
    band: Band
    caption: list = field(default_factory=list)  # paragraphs
    most: float = math.inf


def round_ticks(least, most, wanted=6):
    """Round numbers from ``least`` to ``most``, both included where they are round; about ``wanted``."""
    rough = (most - least) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first, last = math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9)
    return [step * i for i in range(first, last + 1)]


def _style():
    def rules(scheme):
        fills = " ".join(f".{name} {{ fill: {COLOURS[name][scheme]}; }}" for name in ("ground", "ink", "faint"))
        strokes = " ".join(f".{name} {{ stroke: {colours[scheme]}; }} .{name}-fill {{ fill: {colours[scheme]}; }}"
                           for name, colours in LINES.items())
        return (f"{fills} {strokes} .rule {{ stroke: {LINE[scheme]}; }} "
                f".value {{ stroke: {COLOURS['ground'][scheme]}; }}")

    return (
        f"text {{ font-family: {FONT}; font-size: 13px; }} .title {{ font-size: 17px; font-weight: 600; }} "
        ".small { font-size: 12px; } .line { fill: none; stroke-width: 1.8; } .band { fill-opacity: 0.25; } "
        ".value { stroke-width: 4px; paint-order: stroke; }\n"
        f"{rules(0)}\n@media (prefers-color-scheme: dark) {{ {rules(1)} }}"
    )


def _stroke(colour):
    dashes = LINES[colour][2]
    return f'class="line {colour}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def _apart(values, least):
    """The values, moved so that neighbours are at least ``least`` apart, in their order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    moved = list(values)
    for before, after in zip(order, order[1:]):
        moved[after] = max(moved[after], moved[before] + least)
    return moved


def _legend(lines, y):
    parts, width = [], (WIDTH - 2 * MARGIN) / 3
    for number, line in enumerate(lines):
        x, row = MARGIN + width * (number % 3), y + LEGEND_ROW * (number // 3)
        parts.append(f'<line x1="{x:.1f}" y1="{row - 4}" x2="{x + 28:.1f}" y2="{row - 4}" {_stroke(line.colour)}/>')
        parts.append(text_at(x + 36, row, line.label, "faint small"))
    return parts


def _path(points):
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def render(chart):
    """The SVG of a LineChart with at least one line, as text that ends with a newline."""
    shown = [value for line in chart.lines for value in line.y if value <= chart.most]
    down = round_ticks(min(shown), max(shown))
    step = down[1] - down[0]
    least, most = min(min(shown), down[0]) - step / 4, max(shown)
    across = round_ticks(0, chart.widest, 5)
    rows = math.ceil(len(chart.lines) / 3)
    left, right, top = MARGIN + 34, WIDTH - MARGIN - END, 84 + LEGEND_ROW * rows
    bottom = top + HEIGHT

    def at(x, y):
        return left + (right - left) * x / chart.widest, bottom - HEIGHT * (y - least) / (most - least)

    parts = [text_at(MARGIN, 34, chart.title, "ink title"), text_at(MARGIN, 55, chart.unit, "faint")]
    parts += _legend(chart.lines, 82)
    for tick in down:
        y = at(0, tick)[1]
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" class="rule" stroke-width="1"/>')
        parts.append(text_at(left - 8, y + 4, f"{tick:.10g}", "faint small", "end"))
    for tick in across:
        parts.append(text_at(at(tick, least)[0], bottom + 18, f"{tick:,.10g}", "faint small", "middle"))
    parts.append(text_at(right, bottom + 36, chart.across, "faint small", "end"))
    band = chart.band
    inside = [i for i, high in enumerate(band.high) if high <= chart.most]
    outline = [at(band.x[i], band.low[i]) for i in inside] + [at(band.x[i], band.high[i]) for i in reversed(inside)]
    parts.append(f'<polygon points="{_path(outline)}" class="band {band.colour}-fill" stroke="none"/>')
    for line in chart.lines:
        points = [at(x, y) for x, y in zip(line.x, line.y) if y <= chart.most]
        parts.append(f'<polyline points="{_path(points)}" {_stroke(line.colour)}/>')
    ends = _apart([at(0, line.y[-1])[1] for line in chart.lines], 14)
    for line, y in zip(chart.lines, ends):
        parts.append(text_at(right + 8, y + 4, line.text, f"{line.colour}-fill small"))
    lines = [line for paragraph in chart.caption for line in wrap(paragraph, CAPTION_CHARACTERS)]
    parts += [text_at(MARGIN, bottom + 62 + 17 * i, line, "faint small") for i, line in enumerate(lines)]
    spoken = f"{chart.unit}. At the end: " + "; ".join(f"{line.label}: {line.text}" for line in chart.lines)
    return document(chart.title, spoken, _style(), bottom + 64 + 17 * len(lines), parts)
