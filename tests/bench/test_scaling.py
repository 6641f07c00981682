"""The arithmetic of scaling: against counts by hand, against measured points, and as the page shows it."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import scaling  # noqa: E402
from scaling import GB, GIB, MIB, RANKS, SCHEMES, WORKS, Links, Work, cost, crossover  # noqa: E402

FLAT = Links(gather=((1, 100 * GB), (2, 100 * GB)), reduce=((1, 100 * GB), (2, 100 * GB)), nic=10 * GB)
SILENT = replace(FLAT, interference=0.0, hop_inside=0.0, hop_between=0.0)
WORK = Work("toy", layers=10, layer=400_000_000, rest=0, tokens=1000, floor=1000.0)


@pytest.mark.parametrize("size, rate", [(16 * MIB, 211), (64 * MIB, 264.5), (256 * MIB, 318), (4 * GIB, 357)])
def test_the_bus_is_as_fast_as_measured_and_between_on_a_line(size, rate):
    assert Links().bus(Links.gather, size) == pytest.approx(rate * GB)


def test_small_buffers_take_the_time_that_does_not_depend_on_size():
    links = Links()
    seconds = [size / links.bus(links.gather, size) for size in (1024, MIB, 16 * MIB)]
    assert seconds == sorted(seconds) and seconds[0] > 30e-6
    assert links.bus(links.gather, 100 * GIB) == 357 * GB


def test_one_rank_exchanges_nothing():
    assert Links().one(Links.gather, GIB, 1) == (0.0, 0.0)
    assert Links().all_reduce_between(GIB, 1) == 0.0


def test_a_gather_inside_a_host_and_across_hosts_is_counted_right():
    assert SILENT.one(SILENT.gather, 8e9, 8) == pytest.approx((0.07, 0.07))
    # 16 ranks: half of 8 GB comes to a host over 8 NICs of 10 GB/s; 15/16 of it reaches each GPU at 100 GB/s.
    assert SILENT.one(SILENT.gather, 8e9, 16) == pytest.approx((0.075, 0.075))
    slow = replace(SILENT, nic=1 * GB)
    assert slow.one(slow.gather, 8e9, 16) == pytest.approx((0.5, 0.075))


def test_rings_pass_every_rank_and_trees_the_logarithm_of_the_hosts():
    links = replace(SILENT, hop_inside=1e-6, hop_between=10e-6)
    assert links.latency(4) == pytest.approx(4 * 17e-6)
    assert replace(links, rings=False).latency(4) == pytest.approx(27e-6)


def test_a_step_is_compute_and_what_is_not_hidden():
    found = cost(WORK, SILENT, 8, "full")
    gather, reduce = 0.8e9 * 7 / 8 / (100 * GB), 1.6e9 * 7 / 8 / (100 * GB)
    assert found.gather == pytest.approx(20 * gather) and found.reduce == pytest.approx(10 * reduce)
    assert found.exposed == pytest.approx(gather + reduce)  # the first and the last; the rest is hidden
    assert found.step == pytest.approx(1.0 + gather + reduce)
    assert found.kept == pytest.approx(4e9 * 12.125 / 8)


def test_what_compute_cannot_hide_is_exposed():
    hurried = replace(WORK, floor=1e9)  # no compute to speak of
    found = cost(hurried, SILENT, 8, "full")
    assert found.exposed == pytest.approx(found.gather + found.reduce - hurried.compute(SILENT))


def test_a_grouped_step_sums_shards_between_hosts_behind_backward():
    found = cost(WORK, SILENT, 16, "grouped")
    unit = 2 * 1.6e9 / 8 / 2 / (10 * GB)  # a reduction and a gather of half a shard on one NIC
    assert found.reduce == pytest.approx(10 * (1.6e9 * 7 / 8 / (100 * GB) + unit))
    gather, reduction = 0.8e9 * 7 / 8 / (100 * GB), 1.6e9 * 7 / 8 / (100 * GB)
    assert found.exposed == pytest.approx(gather + reduction + unit)
    assert found.kept == cost(WORK, SILENT, 4096, "grouped").kept


def test_secondary_shards_are_summed_once_and_completed_after_the_update():
    for accumulation in (1, 4):
        found = cost(replace(WORK, accumulation=accumulation), SILENT, 16, "secondary")
        part = 1.6e9 / 8 / 2 / (10 * GB)  # half a shard on one NIC, in fp32
        gather, reduction = 0.8e9 * 7 / 8 / (100 * GB), 1.6e9 * 7 / 8 / (100 * GB)
        assert found.reduce == pytest.approx(accumulation * 10 * (reduction + part))
        exposed = accumulation * (gather + reduction + part) + 10 * part / 2
        assert found.exposed == pytest.approx(exposed)
    assert found.kept == pytest.approx(4e9 * (10.125 / 16 + 2 / 8))


def test_hidden_communication_costs_what_it_takes_from_compute():
    silent, loud = (cost(WORK, replace(SILENT, interference=i), 8, "full") for i in (0.0, 0.5))
    assert loud.step - silent.step == pytest.approx(0.5 * (silent.gather + silent.reduce))


def test_the_schemes_are_one_inside_a_host():
    for work in WORKS.values():
        costs = [cost(work, Links(), 8, scheme) for scheme in SCHEMES]
        assert len({c.step for c in costs}) == 1


def test_more_ranks_never_shorten_the_exchange():
    for work in WORKS.values():
        for scheme in SCHEMES:
            exposed = [cost(work, Links(), ranks, scheme).exposed for ranks in RANKS]
            assert exposed == sorted(exposed), (work.name, scheme)


def test_the_crossover_is_where_grouped_becomes_shorter_and_stays():
    work, links = WORKS["qwen3-30b-a3b"], Links()
    at = crossover(work, links)
    for ranks in RANKS:
        full, grouped = (cost(work, links, ranks, scheme).step for scheme in ("full", "grouped"))
        assert (ranks >= at) == (grouped * 1.01 <= full)
    assert crossover(work, replace(links, rings=False)) is None


@pytest.mark.parametrize("name, reduce, ranks, reductions, measured", scaling.PROTOTYPES)
def test_the_model_explains_what_was_measured(name, reduce, ranks, reductions, measured):
    assert scaling.predicted(name, reduce, ranks, reductions, Links()) == pytest.approx(measured, abs=0.045)


@pytest.mark.parametrize("name, layers", [("qwen3-30b-a3b", 16), ("qwen3-8b", 36)])
def test_units_have_the_sizes_of_the_models(name, layers):
    pytest.importorskip("transformers")
    from make_model import make_config, tensors_of

    def numel(tensors):
        return sum(count for tensor in tensors for _, count in tensor.parts)

    tensors = tensors_of(make_config(name, layers))
    assert WORKS[name].layers == layers
    assert WORKS[name].layer == numel(t for t in tensors if ".layers.0." in t.name)
    assert WORKS[name].rest == numel(t for t in tensors if ".layers." not in t.name)


def test_measured_runs_are_put_beside_the_model(tmp_path, capsys, monkeypatch):
    settings = {"model": "qwen3-30b-a3b", "layers": 8, "batch": 1, "seq": 4096, "world": 4}
    rows = {"floor": {"median_s": 0.12}, "strata-z3": {"median_s": 0.15}}
    file = tmp_path / "step.json"
    file.write_text(json.dumps({"settings": settings, "floor_s": 0.12, "engines": rows}))
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--check", str(file)])
    assert scaling.main() == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("| qwen3-30b-a3b, 8 layers, 1×4096 | 4 | strata-z3 | 150.0 | 80% | ")
    file.write_text(json.dumps({"settings": settings, "floor_s": None, "engines": {}}))
    with pytest.raises(SystemExit, match="wants the floor and a model of .*found floor None and qwen3-30b-a3b"):
        scaling.main()


def test_the_page_shows_the_tables_that_the_program_prints(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scaling.py"])
    assert scaling.main() == 0
    page = (ROOT / "docs" / "SCALING.md").read_text()
    tables = [part.strip() for part in capsys.readouterr().out.split("\n\n") if part.startswith("|")]
    assert len(tables) == 5
    assert [table for table in tables if table not in page] == [], "copy the output of bench/scaling.py to the page"
