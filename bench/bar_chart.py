"""A chart of horizontal bars as one SVG text, written with the standard library alone.

The picture paints its own ground and follows the reader's light or dark scheme, so that its text has contrast on
every page. Every number that it draws stands beside its bar.
"""

import math
from dataclasses import dataclass, field
from textwrap import wrap
from xml.sax.saxutils import escape

WIDTH = 860
MARGIN = 24
BAR, GAP = 22, 10  # height of a bar, and what is between two
CHARACTER = 7.4  # width of a letter of the labels, on average
FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
CAPTION_CHARACTERS = 128  # of a line of the caption

# By class: (light, dark). Text has a contrast of at least 4.5 on the ground, bars of at least 3.
COLOURS = {
    "ground": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#59636e", "#9198a1"),
    "strata": ("#0969da", "#4493f8"),
    "deepspeed": ("#bc4c00", "#db6d28"),
    "fsdp2": ("#8250df", "#ab7df8"),
    "limit": ("#818b98", "#6e7681"),
}
LINE = ("#d1d9e0", "#3d444d")


@dataclass
class Bar:
    """``colour`` is a key of COLOURS; ``text`` stands at the bar's end and has the number."""

    label: str
    value: float
    text: str
    colour: str


@dataclass
class Chart:
    """``unit`` stands at the axis and says what is better; ``legend`` is {colour: text}."""

    title: str
    unit: str
    bars: list
    legend: dict
    caption: list = field(default_factory=list)  # paragraphs


def nice_ticks(most, wanted=5):
    """Round numbers from 0 to at most ``most``, no more than ``wanted`` above 0."""
    rough = most / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    return [step * i for i in range(math.floor(most / step + 1e-9) + 1)]


def _style():
    def rules(scheme):
        return " ".join(f".{name} {{ fill: {colours[scheme]}; }}" for name, colours in COLOURS.items())

    def strokes(scheme):
        return f".rule {{ stroke: {LINE[scheme]}; }} .value {{ stroke: {COLOURS['ground'][scheme]}; }}"

    return (
        f"text {{ font-family: {FONT}; font-size: 13px; }} .title {{ font-size: 17px; font-weight: 600; }} "
        f".small {{ font-size: 12px; }} .strong {{ font-weight: 600; }} "
        f".value {{ stroke-width: 4px; paint-order: stroke; }}\n"
        f"{rules(0)} {strokes(0)}\n"
        f"@media (prefers-color-scheme: dark) {{ {rules(1)} {strokes(1)} }}"
    )


def text_at(x, y, text, classes="ink", anchor="start"):
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}" text-anchor="{anchor}">{escape(text)}</text>'


def _rectangle(x, y, width, height, colour, radius=2):
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" class="{colour}"/>'


def _legend(chart, y):
    parts, x = [], float(MARGIN)
    for colour, text in chart.legend.items():
        parts += [_rectangle(x, y - 10, 12, 12, colour), text_at(x + 18, y, text, "faint small")]
        x += 18 + CHARACTER * len(text) + 14
    return parts


def _axis(ticks, left, scale, top, bottom):
    parts = []
    for tick in ticks:
        x = left + tick * scale
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" class="rule" stroke-width="1"/>')
        parts.append(text_at(x, bottom + 16, f"{tick:,.10g}", "faint small", "middle"))
    return parts


def document(title, spoken, style, height, parts):
    """The SVG of a chart. ``spoken``: what it says to those who cannot see it; ``style``: its rules of CSS."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title description">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(spoken)}</desc>',
        f"<style>\n{style}\n</style>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" class="ground rule"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def render(chart):
    """The SVG of a Chart with at least one bar, as text that ends with a newline."""
    left = MARGIN + CHARACTER * max(len(bar.label) for bar in chart.bars) + 12
    right = WIDTH - MARGIN - CHARACTER * max(len(bar.text) for bar in chart.bars) - 10
    most = max(bar.value for bar in chart.bars)
    scale = (right - left) / most
    top = 92
    bottom = top + len(chart.bars) * (BAR + GAP) + GAP // 2
    lines = [line for paragraph in chart.caption for line in wrap(paragraph, CAPTION_CHARACTERS)]
    height = bottom + 50 + 17 * len(lines) + 6

    parts = [text_at(MARGIN, 34, chart.title, "ink title"), text_at(MARGIN, 55, chart.unit, "faint")]
    parts += _legend(chart, 79) + _axis(nice_ticks(most), left, scale, top, bottom)
    for number, bar in enumerate(chart.bars):
        y = top + GAP // 2 + number * (BAR + GAP) + 2
        strong = " strong" if bar.colour == "strata" else ""
        parts.append(text_at(left - 10, y + 16, bar.label, "ink" + strong, "end"))
        parts.append(_rectangle(left, y, max(bar.value * scale, 1.0), BAR, bar.colour))
        parts.append(text_at(left + bar.value * scale + 8, y + 16, bar.text, "ink value" + strong))
    parts += [text_at(MARGIN, bottom + 48 + 17 * i, line, "faint small") for i, line in enumerate(lines)]

    spoken = f"{chart.unit}. " + "; ".join(f"{bar.label}: {bar.text}" for bar in chart.bars)
    return document(chart.title, spoken, _style(), height, parts)
