"""The picture of loss curves under several optimizers: it shows the stored figures, which pass the check."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import bar_chart  # noqa: E402
import line_chart  # noqa: E402
import optimizer_curves  # noqa: E402
from test_plots import SVG, contrast, texts_of  # noqa: E402

FIGURES = json.loads(optimizer_curves.RESULTS.read_text())


def test_the_stored_picture_is_that_of_the_stored_figures():
    assert optimizer_curves.PICTURE.read_text() == optimizer_curves.draw(FIGURES)


def test_states_in_8_bits_stay_within_the_spread_of_seeds(capsys):
    assert optimizer_curves.report(FIGURES)
    assert capsys.readouterr().out.count("within the spread") == 2
    apart = json.loads(json.dumps(FIGURES))
    apart["runs"]["AdamW8bit-1"]["last"] += 1.0
    assert not optimizer_curves.report(apart)
    assert "last 100 losses" in capsys.readouterr().out


def test_the_picture_names_machine_sizes_and_every_optimizer():
    seen = " ".join(texts_of(optimizer_curves.PICTURE.read_text()))
    for text in (*FIGURES["about"].values(), f"{FIGURES['steps']:,} steps", *optimizer_curves.OPTIMIZERS):
        assert text in seen
    page = (ROOT / "docs/guide/optimizers.md").read_text()
    for key in ("last", "held_out"):
        wide, spread, narrow, _ = optimizer_curves.compared(FIGURES, key)
        assert all(f"{value:.4f}" in page for value in (wide, spread, narrow)), key


def test_lines_lie_inside_and_their_ends_do_not_overlap():
    root = ElementTree.fromstring(optimizer_curves.draw(FIGURES))
    height = int(root.get("height"))
    for line in root.iter(f"{SVG}polyline"):
        points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        assert all(0 < x < bar_chart.WIDTH and 0 < y < height for x, y in points)
    ends = sorted(float(text.get("y")) for text in root.iter(f"{SVG}text") if "-fill" in text.get("class"))
    assert len(ends) == len(optimizer_curves.OPTIMIZERS)
    assert all(after - before >= 13 for before, after in zip(ends, ends[1:]))


@pytest.mark.parametrize("scheme", [0, 1])
def test_lines_can_be_seen_in_light_and_dark(scheme):
    ground = bar_chart.COLOURS["ground"][scheme]
    assert all(contrast(colours[scheme], ground) >= 3 for colours in line_chart.LINES.values())


def test_ticks_are_round():
    assert line_chart.round_ticks(1.4, 3.1) == pytest.approx([1.5, 2.0, 2.5, 3.0])
    assert line_chart.round_ticks(0, 2000, 5) == [0, 500, 1000, 1500, 2000]
