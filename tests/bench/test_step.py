"""The comparison of steps: its report, its arithmetic, and that it goes on when an engine fails."""

import argparse
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Ranks that these tests start import this module: it imports neither torch nor transformers.
pytestmark = [
    pytest.mark.xdist_group("bench_step"),  # one run for all
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.skipif(os.environ.get("STRATA_TEST_DEVICE") == "cuda", reason="the benches are tried on the CPU"),
]
BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path[:0] = [str(BENCH / "step"), str(BENCH)]

import losses  # noqa: E402
import report  # noqa: E402
import settings  # noqa: E402
import timeline  # noqa: E402
from engine_processes import EngineProcesses, Failed, Skipped, run_rank  # noqa: E402
from engines import ENGINES, Engine, merged, spelled_out  # noqa: E402
from rank import rank_main  # noqa: E402

STEPS, WARMUP, WORLD = 3, 1, 2
ALL = "STRATA_SOAK" in os.environ
NAMED = ["floor", *(["strata-z2"] if ALL else []), "strata-z3"]
OPTIONS = {"device": "cpu", "cores": 2}


def run_bench(folder, *arguments, program="run.py"):
    """(exit code, output, the JSON) of a run on a tiny model."""
    command = [sys.executable, BENCH / "step" / program, "--model", "tiny-moe", "--world", WORLD, "--device", "cpu"]
    command += ["--seq", 16, "--steps", STEPS, "--warmup", WARMUP, "--json", folder / "step.json", *arguments]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr, json.loads((folder / "step.json").read_text())


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("step")
    variants = {"no-such-stage": {"stage": 9}, "fsdp2-keep": {"engine": "fsdp2", "reshard": False}}
    if ALL:
        variants["z3-bf16"] = {"stage": 3, "communication_data_type": "bf16"}
    arguments = [f"--variant={name}={json.dumps(changes)}" for name, changes in variants.items()]
    arguments += ["--profile", folder / "trace.json", "--sample-every", 2]
    return run_bench(folder, "--engines", ",".join(NAMED), *arguments)


def test_every_engine_has_its_figures(outcome):
    _, printed, result = outcome
    rows = result["engines"]
    assert list(rows) == [*NAMED, "fsdp2-keep", *(["z3-bf16"] if ALL else [])], printed
    for name, row in rows.items():
        assert len(row["step_s"]) == STEPS and len(row["losses"]) == WARMUP + STEPS, name
        assert 0 < row["fastest_s"] <= row["median_s"] and row["mean_s"] > 0
        assert row["tokens_per_s"] == pytest.approx(16 / row["median_s"])
        assert len(row["accounts"]) == WORLD and row["accounts"][0]["parameters"] > 100_000
        assert row["device_peak"] == row["torch_peak"] == row["allocations"] == 0  # there is no GPU
        assert f"\n {name} " in printed
    assert result["floor_s"] == rows["floor"]["median_s"]
    assert rows["strata-z3"]["accounts"][0]["ledger_peaks"]["device total"] > 0
    assert rows["strata-z3"]["accounts"][0]["step_report"]["exposed_seconds"] is not None


def test_all_engines_train_the_same(outcome):
    _, printed, result = outcome
    apart, _, _ = result["losses_apart"]
    assert 0 <= apart < 1e-3 and f"losses: at most {apart:.1e} apart" in printed
    losses = {name: row["losses"] for name, row in result["engines"].items()}
    if ALL:
        assert losses["strata-z2"] == losses["strata-z3"]
    assert losses["floor"][0] == pytest.approx(losses["strata-z3"][0], rel=1e-6)
    assert losses["strata-z3"][0] == pytest.approx(math.log(256), rel=0.05)
    assert losses["floor"][1:] != losses["strata-z3"][1:]  # the floor's weights stay


def test_an_engine_that_fails_stops_no_other(outcome):
    code, printed, result = outcome
    assert code == 1 and list(result["failed"]) == ["no-such-stage"]
    assert "stage" in result["failed"]["no-such-stage"] and "FAILED: no-such-stage" in printed


def test_every_engine_leaves_a_trace(outcome):
    for name, row in outcome[2]["engines"].items():
        assert Path(row["timeline"]["file"]).name == f"trace.{name}.json.gz"
        assert timeline.read_trace(row["timeline"]["file"])


def test_memory_is_looked_at_meanwhile(outcome):
    _, printed, result = outcome
    for name, row in result["engines"].items():
        assert [[sample["step"] for sample in samples] for samples in row["samples"]] == [[2, 4]] * WORLD
        assert all(sample["used"] > 0 for samples in row["samples"] for sample in samples)
        assert f"{name} growth: " in printed
    for samples in result["engines"]["strata-z3"]["samples"]:
        assert report.growth(samples) | {"used": 0} == {"used": 0, "held": 0, "mallocs": 0, "made": 0}


@pytest.mark.soak
def test_settings_have_a_row_each(tmp_path):
    code, printed, result = run_bench(tmp_path, "--only", "defaults,sequential", program="settings.py")
    assert code == 0 and list(result["engines"]) == ["defaults", "sequential"], printed
    assert "losses: the same in all rows" in printed
    figures = {name: settings.figures_of(row) for name, row in result["engines"].items()}
    for name, of_row in figures.items():
        assert of_row["gathered"] > 0 and of_row["gathers"][0] > 0 and of_row["exposed_s"] >= 0
        assert f"\n {name} " in printed
    assert figures["sequential"]["gathers"][0] > figures["defaults"]["gathers"][0]
    assert figures["sequential"]["gathered"] < figures["defaults"]["gathered"]


@pytest.mark.soak
def test_muon_takes_every_matrix_once(tmp_path):
    only = ("--only", "strata-z2,strata-z2-muon,torch-muon", "--model", "tiny")
    code, printed, result = run_bench(tmp_path, *only, program="muon.py")
    assert code == 0 and list(result["engines"]) == only[1].split(","), printed
    ours, torchs = (result["engines"][name]["accounts"] for name in ("strata-z2-muon", "torch-muon"))
    assert sum(account["matrices"] for account in ours) == torchs[0]["matrices"] > 0
    assert sum(account["operations"] for account in ours) == torchs[0]["operations"]


@pytest.mark.soak
def test_losses_are_those_of_plain_torch(tmp_path):
    code, printed, result = run_bench(tmp_path, "--batch", 2, program="losses.py")
    assert code == 0 and list(result["engines"]) == list(losses.COMPARED), printed
    assert "the same bits in every step, on every rank" in printed
    rows = {name: row["rank_losses"] for name, row in result["engines"].items()}
    assert rows["strata-z2"] == rows["strata-z3"] and len(rows["torch"]) == WORLD
    assert losses.apart(rows["strata-z3"], rows["torch"])[0] < 1e-3
    assert losses.steps_alike(rows["strata-z3"], rows["torch"]) >= 1  # before any update


class _Idle:
    """Ranks that import and wait."""

    def __init__(self, *_):
        self.closed = False

    def collect(self, expected, deadline):
        assert expected == "imported"

    def close(self):
        self.closed = True


def test_engines_beyond_the_budget_are_skipped(monkeypatch, tmp_path, capsys):
    import run

    started = []
    monkeypatch.setattr(run, "EngineProcesses", lambda *arguments: started.append(_Idle()) or started[-1])
    monkeypatch.setattr(run, "start_method", lambda *_: "spawn")
    a = argparse.Namespace(world=2, timeout=1, budget=1e-9, json=str(tmp_path / "step.json"))
    engines = {name: ENGINES[name] for name in ("floor", "strata-z3")}
    result = run.compare(a, engines, OPTIONS | {"torch_adam": True}, str(tmp_path))
    assert list(result["skipped"]) == ["floor", "strata-z3"] and not result["engines"] and not result["failed"]
    assert "skipped: floor: the budget of 1e-09 s was spent" in capsys.readouterr().out
    assert len(started) == 2 and all(ranks.closed for ranks in started)
    assert json.loads((tmp_path / "step.json").read_text())["skipped"] == result["skipped"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--engines", "strata-z9"], "unknown engine 'strata-z9'"),
        (["--variant", "x"], "--variant wants NAME={...}"),
        (["--variant", 'x={"engine": "megatron"}'], "with an engine of strata, deepspeed, fsdp2"),
        (["--variant", "x={stage: 3}"], "--variant x wants a JSON object"),
        (["--strata", "[]"], "--strata wants a JSON object"),
        (["--model", "gpt-9"], "unknown model 'gpt-9'"),
    ],
)
def test_bad_arguments_are_told_before_anything_starts(arguments, message, monkeypatch):
    import run

    monkeypatch.setattr(sys, "argv", ["run.py", "--world", "2", "--device", "cpu", *arguments])
    monkeypatch.setattr(run, "compare", lambda *_: pytest.fail("it started"))
    with pytest.raises(SystemExit) as stopped:
        run.main()
    assert message in str(stopped.value)


# --- processes ---


def _raise_on_rank_1(connection, place):
    def work():
        if place.rank == 1:
            raise ValueError("no more of this")
        signal.pause()

    run_rank(connection, OPTIONS, place, work)


def _die(connection, place):
    run_rank(connection, OPTIONS, place, lambda: os._exit(7))


def _hang(connection, place):
    def work():
        connection.send(("ready", {}))
        signal.pause()

    run_rank(connection, OPTIONS, place, work)


def _assert_fails(ranks, patience, message):
    with pytest.raises(Failed, match=f"(?s){message}"):
        ranks.collect("done", time.monotonic() + patience)
    pids = ranks.pids()
    ranks.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize(
    "main, message",
    [(_raise_on_rank_1, "rank 1: .*ValueError: no more of this"), (_die, "the process ended with code 7")],
)
def test_a_rank_that_fails_is_told_and_all_are_ended(tmp_path, monkeypatch, main, message):
    monkeypatch.setattr("engine_processes.PATIENCE_S", 0.2)
    _assert_fails(EngineProcesses("x", main, (), WORLD, str(tmp_path)), 60, message)


def test_ranks_that_hang_are_told_with_where_they_stand(tmp_path):
    ranks = EngineProcesses("x", _hang, (), WORLD, str(tmp_path))
    ranks.collect("ready", time.monotonic() + 60)
    _assert_fails(ranks, 0, r"ranks \[0, 1\] did not come to 'done' in time.*test_step.py")


def test_an_engine_that_is_not_installed_is_skipped(tmp_path):
    engine = Engine("x", "no_such_package", None, {})
    ranks = EngineProcesses("x", rank_main, (engine, OPTIONS), 1, str(tmp_path))
    with pytest.raises(Skipped, match="no_such_package is not installed"):
        ranks.collect("imported", time.monotonic() + 60)
    ranks.close()


# --- arithmetic ---


def test_short_forms_of_settings_are_put_where_they_belong():
    zero = {"stage": 3, "reduce_bucket_size": 5}
    assert spelled_out({"stage": 3, "zero": {"reduce_bucket_size": 5}, "strata": {"threads": 1}}) == {
        "zero_optimization": zero, "strata": {"threads": 1},
    }
    base = {"zero_optimization": {"stage": 2, "overlap_comm": True}}
    assert merged(base, spelled_out({"stage": 3})) == {"zero_optimization": {"stage": 3, "overlap_comm": True}}
    assert base["zero_optimization"]["stage"] == 2


def _row(median, losses):
    return {"median_s": median, "losses": losses}


def test_losses_are_compared_with_those_of_the_middle_engine():
    rows = {"floor": _row(1.0, [4.0, 9.0]), "a": _row(2.0, [4.0, 3.0]), "b": _row(2.0, [4.0, 3.3])}
    rows["c"] = _row(2.0, [4.0, 3.0])
    apart, name, step = report.losses_apart(rows, "floor")
    assert (name, step) == ("b", 1) and apart == pytest.approx(0.1)
    rows["b"]["losses"][1] = math.nan
    assert report.losses_apart(rows, "floor") == (math.inf, "b", 1)
    assert report.losses_apart({}, "floor")[0] == 0.0


def test_the_floor_is_that_of_its_fastest_turn():
    rows = {"floor": _row(1.0, [1.0]), "floor#2": _row(0.9, [1.0]), "a": _row(0.5, [1.0])}
    assert report.floor_of(rows, "floor") == 0.9
    assert report.floor_of({"a": rows["a"]}, "floor") is None


def test_what_memory_grew_by_is_of_the_rank_where_it_grew_most():
    def sample(step, used, made=0):
        return {"step": step, "used": used << 20, "mallocs": 7 + step, "held": 100, "made": made}

    calm = [sample(2, 2048), sample(10, 2048), sample(20, 2048)]
    grows = [sample(2, 2048, made=9), sample(10, 2060, made=1), sample(20, 2050)]
    assert report.growth(grows) == {"used": 12 << 20, "held": 0, "mallocs": 18, "made": 1}
    line = report.growth_line("x", {"samples": [calm, grows]})
    assert line.startswith("x growth: 2.00 GiB in use after step 2, 2.00 after 20; at most +12.0 MiB in 2 samples")
    assert report.growth_line("x", {"samples": [[], [sample(2, 1)]]}) == ""


def test_losses_apart_are_told_with_their_step_and_rank():
    torch_s, own = [[4.0, 3.0, 2.0], [4.0, 3.0, 2.0]], [[4.0, 3.0, 2.0], [4.0, 3.3, 2.0]]
    assert losses.apart(own, torch_s) == (pytest.approx(0.1), 1, 1)
    assert losses.steps_alike(own, torch_s) == 1
    assert losses.apart([[math.nan]], [[1.0]])[0] == math.inf
    same = {"torch": torch_s, "torch-again": torch_s, "torch-other-order": torch_s, "strata-z2": own, "strata-z3": own}
    assert losses.verdict(same, 0.2)[1] and not losses.verdict(same, 1e-3)[1]
    assert losses.verdict(same | {"torch-other-order": own}, 1e-3)[1]  # within the noise
    assert "kernels" in losses.verdict(same | {"torch-again": own}, 0.2)[0]
    said, good = losses.verdict(same | {"strata-z2": torch_s}, 0.2)
    assert "DIFFERENT BITS" in said and not good


def test_settings_follow_the_size_of_blocks():
    large = settings.settings_of(10_000_000_000, 623_000_000)
    assert large["defaults"] == {"stage": 3, "zero": {}}
    assert large["sequential"]["zero"] == {"stage3_allgather_sequential": True}
    assert large["stage 2 + overlap_comm false"] == {"stage": 2, "zero": {"overlap_comm": False}}
    assert large["all live"]["strata"]["max_live_bytes"] > 2 * 10_000_000_000
    assert "persistence 100000" in large and "prefetch 0" in large and "live 1" in large
    small = settings.settings_of(1_000_000, 100_000)
    assert list(small)[0] == "defaults" and len(small) == len(large)
    assert small["defaults"]["zero"]["stage3_max_live_parameters"] == 160_000
    assert "stage3_max_live_parameters" not in small["sequential"]["zero"]


def test_a_row_has_the_slowest_rank_of_every_step():
    same = {"host_s": 0.1, "build_s": 1.0, "build_peak": 5, "device_growth": 0, "torch_peak": 3, "allocations": 0}
    same |= {"samples": []}
    one = same | {"step_s": [1.0, 2.0, 3.0], "mean_s": 2.0, "device_peak": 7, "losses": [2.0], "account": {}}
    other = same | {"step_s": [1.5, 1.0, 9.0], "mean_s": 4.0, "device_peak": 6, "losses": [4.0], "account": {}}
    row = report.summarise([one, other], tokens=100)
    assert row["step_s"] == [1.5, 2.0, 9.0] and (row["median_s"], row["tokens_per_s"]) == (2.0, 50.0)
    assert (row["mean_s"], row["device_peak"], row["losses"], row["timeline"]) == (4.0, 7, [3.0], None)


def _event(category, name, start, length, **more):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "args": more}


def test_a_trace_says_what_of_the_exchange_was_not_hidden():
    events = [
        _event("kernel", "gemm", 0, 1000),
        _event("kernel", "ncclDevKernel_AllGather_RING_LL", 500, 1000, **{"blocks per SM": 0.2}),  # 500 beside gemm
        _event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 1400, 200, bytes=4000),  # 100 beside it
        _event("kernel", "FusedAdamMathFunctor", 1550, 450),  # hides 50 of the copy
        _event("gpu_memset", "Memset (Device)", 3000, 1000),
        _event("cpu_op", "aten::mm", 0, 9000),
        {"ph": "M", "name": "process_name"},
    ]
    summary = timeline.summarise(events)
    assert (summary["span"], summary["busy"], summary["gaps"]) == (4.0, 3.0, 1.0)
    assert [summary[k] for k in ("exchange", "exposed", "exchange_sm")] == pytest.approx([1.1, 0.55, 0.2])
    assert {kind: f["ms"] for kind, f in summary["kinds"].items()} == {
        "compute": 1.0, "copy PtoP": 0.2, "exchange": 1.0, "fill": 1.0, "optimizer": 0.45,
    }
    assert summary["kinds"]["copy PtoP"]["bytes"] == 4000
    assert "exposed 0.6" in timeline.in_words(summary) or "exposed 0.5" in timeline.in_words(summary)


def test_a_trace_without_a_device_is_empty():
    summary = timeline.summarise([_event("cpu_op", "aten::mm", 0, 9000)])
    assert (summary["span"], summary["busy"], summary["exposed"], summary["kinds"]) == (0.0, 0.0, 0.0, {})


def test_the_engines_are_those_that_the_table_of_peers_names():
    assert {e.package for e in ENGINES.values()} == {"torch", "strata", "deepspeed"}
    assert list(ENGINES)[0] == "floor"


def test_what_an_engine_says_of_its_steps_is_one_line():
    of_step = {"exposed_s": 0.0123456, "units": list(range(20)), "device_memory": {}}
    row = {"accounts": [{"collectives": "peer", "ledger_peaks": {"device total": 5}, "step_report": of_step}, {}]}
    said = report.account_line("strata-z3", row)
    assert said == "strata-z3 says: collectives peer, step_report.exposed_s 0.01235, step_report.units (20 entries)"
    assert report.account_line("fsdp2", {"accounts": [{}]}) == ""
