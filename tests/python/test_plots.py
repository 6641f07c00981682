"""The README's pictures: they show the stored figures, in light and dark; figures that cannot be drawn are refused."""

import copy
import json
import re
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import bar_chart  # noqa: E402
import plots  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
STARTUP = json.loads((ROOT / "bench/results/startup.json").read_text())
STEP = json.loads((ROOT / "bench/results/step.json").read_text())
ABOUT = dict.fromkeys(plots.ABOUT, "told")


def texts_of(svg):
    """The text of the picture, line by line."""
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def beside(seen, label):
    """The value at a bar. The legend, which comes before the bars, may have the same word."""
    return seen[len(seen) - seen[::-1].index(label)]


def drawn(tmp_path, picture, figures):
    """The picture of ``figures``, which lie in a file."""
    text = figures if isinstance(figures, str) else json.dumps(figures)
    (tmp_path / f"{plots.CHARTS[picture][0]}.json").write_text(text)
    return plots.draw(picture, tmp_path)


def changed(figures, change):
    figures = copy.deepcopy(figures)
    change(figures)
    return figures


def turns_of(figures, label, key):
    return statistics.median(row[key] for row in figures["engines"].values() if row["label"] == label)


@pytest.mark.parametrize("picture", plots.CHARTS)
def test_stored_pictures_are_those_of_the_stored_figures(picture):
    stored = (ROOT / f"docs/pictures/{picture}.svg").read_text()
    assert stored == plots.draw(picture), "python bench/plots.py draws them anew"


@pytest.mark.parametrize("picture", plots.CHARTS)
def test_a_picture_names_machine_model_ranks_date_and_what_is_better(picture):
    figures = json.loads((ROOT / f"bench/results/{plots.CHARTS[picture][0]}.json").read_text())
    seen = " ".join(texts_of(plots.draw(picture)))
    for key in ("model", "machine", "software", "date"):
        assert figures["about"][key] in seen
    assert f"{figures['settings']['world']} ranks" in seen and "is better" in seen


def test_starts_show_every_engine_s_median_and_the_limit():
    seen = texts_of(plots.draw("start_up"))
    for label in {row["label"] for row in STARTUP["engines"].values()}:
        assert beside(seen, label) == f"{turns_of(STARTUP, label, 'total_s'):.2f} s"
    for stage in (2, 3):
        assert seen[seen.index(f"limit, stage {stage}") + 1] == f"{STARTUP['limit'][f'stage{stage}_s']:.2f} s"


def test_steps_show_every_engine_s_tokens_and_share_of_the_floor():
    seen = texts_of(plots.draw("step"))
    floor = max(row["tokens_per_s"] for name, row in STEP["engines"].items() if plots.base_name(name) == "floor")
    for name, row in STEP["engines"].items():
        shown = beside(seen, row["label"])
        if plots.base_name(name) == "floor":
            assert shown == f"{floor:,.0f}"
        else:
            tokens = turns_of(STEP, row["label"], "tokens_per_s")
            assert shown == f"{tokens:,.0f} ({tokens / floor:.0%})"


def test_memory_shows_every_engine_s_peak_but_the_floor_s():
    seen = texts_of(plots.draw("memory"))
    for name, row in STEP["engines"].items():
        if plots.base_name(name) == "floor":
            assert row["label"] not in seen
        else:
            peak = turns_of(STEP, row["label"], "device_peak")
            assert beside(seen, row["label"]) == f"{peak / plots.GIB:.1f} GiB"


def test_bars_are_as_long_as_their_values_and_inside_the_picture(tmp_path):
    slowest = max(row["total_s"] for row in STARTUP["engines"].values())
    figures = changed(STARTUP, lambda f: f["engines"].update(fsdp2={"label": "FSDP2", "total_s": 10 * slowest}))
    root = ElementTree.fromstring(drawn(tmp_path, "start_up", figures))
    bars = [r for r in root.iter(f"{SVG}rect") if float(r.get("height")) == bar_chart.BAR]
    widths = [float(bar.get("width")) for bar in bars]
    assert widths[-1] == pytest.approx(10 * widths[-2], rel=1e-2) and widths == sorted(widths)
    assert all(float(bar.get("x")) + float(bar.get("width")) < bar_chart.WIDTH for bar in bars)


def contrast(one, other):
    """The contrast of two colours, as WCAG 2 defines it."""
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))

    lower, higher = sorted((luminance(one), luminance(other)))
    return (higher + 0.05) / (lower + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_colours_can_be_read_in_light_and_dark(scheme):
    ground = bar_chart.COLOURS["ground"][scheme]
    for name, colours in bar_chart.COLOURS.items():
        if name != "ground":
            assert contrast(colours[scheme], ground) >= (4.5 if name in ("ink", "faint") else 3), name
    style = ElementTree.fromstring(plots.draw("step")).find(f"{SVG}style").text
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    assert bar_chart.COLOURS["ink"][scheme] in (light, dark)[scheme]


def test_ticks_are_round_and_within_the_data():
    assert bar_chart.nice_ticks(11.03) == [0, 2.5, 5, 7.5, 10]
    assert bar_chart.nice_ticks(15170) == [0, 5000, 10000, 15000]
    assert bar_chart.nice_ticks(0.3) == pytest.approx([0, 0.1, 0.2, 0.3])


def test_names_are_escaped(tmp_path):
    figures = changed(STARTUP, lambda f: f["about"].update(model='a <b> & "c"'))
    assert any('a <b> & "c"' in text for text in texts_of(drawn(tmp_path, "start_up", figures)))


@pytest.mark.parametrize(
    "picture, change, message",
    [
        ("start_up", lambda f: f.pop("limit"), r"startup\.json: 'limit' is missing; it has about, "),
        ("start_up", lambda f: f["about"].pop("date"), r"startup\.json: about: 'date' is missing"),
        ("start_up", lambda f: f.update(engines={}), r"startup\.json: 'engines' has none"),
        ("start_up", lambda f: f["engines"]["ds-z2"].update(total_s="9"), r"'ds-z2': 'total_s' has to be a number"),
        ("start_up", lambda f: f["engines"]["ds-z2"].update(total_s=0), r"has to be a number above 0; found 0"),
        ("start_up", lambda f: f["engines"]["ds-z2"].update(label="X"), r"a label begins with Strata, .*; found 'X'"),
        ("step", lambda f: [f["engines"].pop(n) for n in list(f["engines"]) if n.startswith("floor")],
         r"step\.json: engine 'floor' is missing"),
        ("memory", lambda f: f["engines"]["ds-z2"].pop("device_peak"), r"engine 'ds-z2': 'device_peak' is missing"),
    ],
)
def test_what_cannot_be_drawn_is_named(tmp_path, picture, change, message):
    figures = changed({"startup": STARTUP, "step": STEP}[plots.CHARTS[picture][0]], change)
    with pytest.raises(plots.BadFigures, match=message):
        drawn(tmp_path, picture, figures)


def test_a_file_that_is_no_json_or_not_there_is_named(tmp_path):
    with pytest.raises(plots.BadFigures, match=r"startup\.json: no such file; .*--store"):
        plots.draw("start_up", tmp_path)
    with pytest.raises(plots.BadFigures, match=r"startup\.json: not JSON: "):
        drawn(tmp_path, "start_up", "{")
    with pytest.raises(plots.BadFigures, match=r"an object is wanted; found list"):
        drawn(tmp_path, "start_up", "[]")


def test_a_run_s_figures_are_stored_as_far_as_pictures_need_them(tmp_path):
    raw = {
        "settings": {"world": 2, "model": "/somewhere", "steps": 1},
        "limit": {"stage3_s": 0.2, "stage2_s": 0.3, "bytes": 5},
        "engines": {"strata-z2": {"total_s": 0.4, "load_s": 0.4, "initialize_s": 0.0, "phases": [1, 2]},
                    "strata-z2#2": {"total_s": 0.6, "load_s": 0.6, "initialize_s": 0.0, "phases": []}},
        "skipped": {"ds-z2": "not installed"}, "failed": {"fsdp2": "out of memory"},
    }
    figures = plots.stored_figures("startup", raw, ABOUT, "raw.json")
    assert "/somewhere" not in json.dumps(figures) and "phases" not in json.dumps(figures)
    seen = texts_of(drawn(tmp_path, "start_up", figures))
    assert seen[seen.index("Strata, stage 2") + 1] == "0.50 s"
    assert re.search(r"Did not run: ds-z2, fsdp2\.", " ".join(seen))
    raw["engines"]["mine"] = raw["engines"].pop("strata-z2#2")
    with pytest.raises(plots.BadFigures, match="engine 'mine' has no name in words"):
        plots.stored_figures("startup", raw, ABOUT, "raw.json")


def test_a_run_of_steps_is_stored_and_drawn(tmp_path):
    rows = {name: {"median_s": 0.3, "tokens_per_s": tokens, "device_peak": 5 << 30, "samples": []}
            for name, tokens in (("floor", 1000.0), ("strata-z3", 900.0), ("fsdp2", 600.0), ("floor#2", 990.0))}
    raw = {"settings": {"world": 2, "batch": 1, "seq": 4096, "steps": 8, "model": "m"}, "engines": rows}
    figures = plots.stored_figures("step", raw, ABOUT, "raw.json")
    seen = texts_of(drawn(tmp_path, "step", figures))
    assert seen[seen.index("Strata, stage 3") + 1] == "900 (90%)"
    assert "5.0 GiB" in texts_of(plots.draw("memory", tmp_path))


def test_the_engines_of_both_benches_have_names_in_words():
    for bench in ("startup", "step"):
        source = (ROOT / "bench" / bench / "engines.py").read_text()
        names = re.findall(r'^    "([\w-]+)": Engine\(', source, flags=re.MULTILINE)
        assert len(names) > 5 and set(names) <= set(plots.LABELS[bench])


def test_the_command_stores_draws_and_says_what_is_out_of_date(tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["plots.py", *map(str, arguments)])
        return plots.main()

    monkeypatch.setattr(plots, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(plots, "PICTURES", tmp_path / "pictures")
    for bench, figures in (("startup", STARTUP), ("step", STEP), ("step_compiled", STEP)):
        (tmp_path / "results").mkdir(exist_ok=True)
        (tmp_path / "results" / f"{bench}.json").write_text(json.dumps(figures))
    assert run("--check") == 1 and not (tmp_path / "pictures").exists()
    assert capsys.readouterr().out.count("out of date") == len(plots.CHARTS)
    assert run() == 0 and run("--check") == 0
    (tmp_path / "raw.json").write_text(json.dumps({
        "settings": {"world": 2}, "limit": {"stage3_s": 0.2, "stage2_s": 0.3},
        "engines": {"strata-z2": {"total_s": 0.4}}, "skipped": {}, "failed": {},
    }))
    wanted = "--store wants startup or step or step_compiled, a file, and --model, --machine"
    with pytest.raises(SystemExit, match=wanted):
        run("--store", "startup", tmp_path / "raw.json")
    about = [word for key in plots.ABOUT for word in (f"--{key}", f"my {key}")]
    assert run("--store", "startup", tmp_path / "raw.json", *about) == 0 and run("--check") == 0
    assert "my machine" in (tmp_path / "pictures" / "start_up.svg").read_text()
