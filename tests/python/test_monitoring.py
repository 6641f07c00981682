"""The output of a run while it trains: metrics of every monitor, lines of times, the profile of a step, transfers."""

import csv
import json
import logging
import sys
import types
from pathlib import Path

import pytest
import strata
import torch
from ranks import run_ranks
from strata.monitoring import watching
from tiny_models import config_of, loss_of, make_batches, make_engine, make_model, rank_and_world, train_step


class Lines(logging.Handler):
    """Collects the logger's messages as text."""

    def __init__(self):
        super().__init__()
        self.said = []
        logging.getLogger("strata").addHandler(self)
        logging.getLogger("strata").setLevel(logging.INFO)

    def emit(self, record):
        self.said.append(record.getMessage())

    def with_(self, text):
        return [line for line in self.said if text in line]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        logging.getLogger("strata").removeHandler(self)
        logging.getLogger("strata").setLevel(logging.NOTSET)


def columns(path):
    with open(path) as file:
        head, *rows = csv.reader(file)
    return head, [(int(step), float(value)) for step, value in rows]


class FakeWriter:
    """``SummaryWriter`` of tensorboard."""

    made = []

    def __init__(self, log_dir):
        self.log_dir, self.scalars, self.closed = log_dir, [], False
        self.made.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def flush(self):
        pass

    def close(self):
        self.closed = True


def fake_packages():
    """Stand-ins of tensorboard, wandb and comet_ml; returns the list of calls."""
    calls = []
    tensorboard = types.ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = FakeWriter
    wandb = types.ModuleType("wandb")
    wandb.run = None
    wandb.init = lambda **settings: calls.append(("wandb.init", settings))
    wandb.log = lambda values, step=None: calls.append(("wandb.log", values, step))
    comet = types.ModuleType("comet_ml")
    experiment = types.SimpleNamespace(
        set_name=lambda name: calls.append(("comet.name", name)),
        log_metric=lambda name, value, step: calls.append(("comet", name, value, step)),
    )
    comet.start = lambda **settings: calls.append(("comet.start", settings)) or experiment
    modules = {"tensorboard": types.ModuleType("tensorboard"), "torch.utils.tensorboard": tensorboard, "wandb": wandb,
               "comet_ml": comet}
    return modules, calls


def _writes(folder):
    rank, world = rank_and_world()
    modules, calls = fake_packages()
    sys.modules.update(modules)
    here = str(Path(folder) / f"rank{rank}")
    told = {
        "tensorboard": {"enabled": True, "output_path": here, "job_name": "board"},
        "wandb": {"enabled": True, "project": "p", "group": "g", "team": "t"},
        "csv_monitor": {"enabled": True, "output_path": here, "job_name": "csv"},
        "comet": {"enabled": True, "samples_log_interval": 20, "experiment_name": "e", "project": "p"},
    }
    results = {}
    for stage, dtype, accumulation in ((0, "fp32", 1), (2, "fp16", 2), (3, "bf16", 2)):
        engine = make_engine(make_model(), config_of(stage, dtype, accumulation, wall_clock_breakdown=True, **told))
        batches = make_batches(3 * accumulation, world)
        losses, rates, norms, scales, samples = [], [], [], [], []
        for step in range(3):
            mean = 0.0
            for micro in range(accumulation):
                loss = loss_of(engine, batches[step * accumulation + micro, rank])
                mean += loss.item() / accumulation
                engine.backward(loss)
                engine.step()
            losses.append(mean)
            rates.append(engine.get_lr()[0])
            norms.append(engine.get_global_grad_norm())
            scales.append(engine.loss_scale())
            samples.append(engine.global_samples)
        engine.monitor.write_events([("Mine/x", torch.tensor(2.5), 7)])
        assert engine.monitor.enabled
        engine.destroy()
        results[dtype] = (losses, rates, norms, scales, samples)
    return results, calls, [(w.log_dir, w.scalars, w.closed) for w in FakeWriter.made]


def test_every_monitor_gets_deepspeeds_scalars_from_rank_0_alone(tmp_path):
    (expected, calls, boards), (_, silent, none) = run_ranks(2, _writes, str(tmp_path))
    assert silent == [] and none == [] and not (tmp_path / "rank1").exists()
    assert [call for call in calls if call[0] == "wandb.init"] == [
        ("wandb.init", {"project": "p", "group": "g", "entity": "t"})] * 3
    assert [Path(folder).name for folder, *_ in boards] == ["board"] * 3 and all(closed for *_, closed in boards)
    rows = {}
    for dtype, (_, scalars, _) in zip(expected, boards):
        losses, rates, norms, scales, samples = expected[dtype]
        wanted = {"train_loss": losses, "lr": rates, "grad_norm": norms}
        if dtype == "fp16":
            wanted["loss_scale"] = scales
        found = {}
        for name, value, step in scalars:
            found.setdefault(name, []).append((step, value))
        for name, values in wanted.items():
            assert found.pop(f"Train/Samples/{name}") == pytest.approx(list(zip(samples, values))), (dtype, name)
            rows.setdefault(name, []).extend(zip(samples, values))
        assert found.pop("Mine/x") == [(7, 2.5)]
        times = [f"Train/Samples/elapsed_time_ms_{name}"
                 for name in ("forward", "backward", "backward_inner", "backward_allreduce", "step")]
        assert set(found) == set(times) and all([step for step, _ in found[name]] == samples for name in times)
    for name, values in rows.items():  # three runs into one file, with one head
        head, found = columns(tmp_path / "rank0/csv" / f"Train_Samples_{name}.csv")
        assert head == ["step", name] and found == pytest.approx(values)
    logged = [(values, step) for kind, values, step in (c for c in calls if c[0] == "wandb.log")]
    assert ({"Mine/x": 2.5}, 7) in logged
    first = next(values for values, _ in logged)
    assert set(first) == {"Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/grad_norm"}
    comet = [call[3] for call in calls if call[0] == "comet" and call[1] == "Train/Samples/lr"]
    assert comet == [8, 16, 48, 16, 48] or comet == [8, 16 + 16, 16, 48, 16, 48], "every 20 samples"


def test_a_package_that_is_missing_is_named_before_the_start(monkeypatch):
    monkeypatch.setattr("strata.monitoring.monitor.find_spec", lambda name: None)
    for section, package in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet-ml")):
        with pytest.raises(strata.ConfigError, match=f"{section}.enabled: wanted the package .*pip install {package}"):
            make_engine(make_model(), config_of(0, **{section: {"enabled": True}}))


def test_a_writer_that_fails_warns_once_and_training_goes_on(tmp_path, monkeypatch):
    engine = make_engine(make_model(), config_of(0, csv_monitor={"enabled": True, "output_path": str(tmp_path)}))

    def full(events):
        raise OSError("no space left on device")

    monkeypatch.setattr(engine.monitor.csv_monitor, "write", full)
    with Lines() as lines:
        for tokens in make_batches(2, 1):
            train_step(engine, tokens[0])
    assert lines.with_("csv_monitor") == ["csv_monitor: metrics could not be written: OSError: no space left on device"]
    engine.destroy()


def test_a_run_of_wandb_that_the_script_began_keeps_its_steps(monkeypatch):
    modules, calls = fake_packages()
    modules["wandb"].run = object()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    engine = make_engine(make_model(), config_of(0, wandb={"enabled": True}))
    train_step(engine, make_batches(1, 1)[0, 0])
    engine.destroy()
    ((kind, values, step),) = calls
    assert kind == "wandb.log" and step is None and values["Train/Samples"] == 4


def test_without_a_monitor_nothing_is_watched():
    engine = make_engine(make_model(), config_of(0))
    assert engine.monitor.enabled is False and engine.monitor.write_events([("loss", 1.0, 0)]) is None
    assert engine._watching is None
    engine.destroy()


def _shows(folder):
    rank, world = rank_and_world()
    told = []
    for stage in (0, 3):
        config = config_of(
            stage, accumulation=2, steps_per_print=2, wall_clock_breakdown=True, memory_breakdown=True,
            timers={"throughput": {"enabled": True}}, comms_logger={"enabled": True, "verbose": True},
            flops_profiler={"enabled": True, "profile_step": 1, "top_modules": 2, "module_depth": 2},
        )
        engine = make_engine(make_model(), config)
        with Lines() as lines:
            for batch in make_batches(8, world):
                train_step(engine, batch[rank])
            summary = watching.log_summary(show_straggler=True, return_dict=True)
        timers = {name: engine.timers(name).elapsed(reset=False) for name in ("fwd", "bwd", "step")}
        engine.destroy()
        told.append((lines.said, summary, timers))
    return told


def test_lines_of_progress_times_memory_transfers_and_the_profile(tmp_path):
    first, second = run_ranks(2, _shows, str(tmp_path))
    for (said, summary, timers), (silent, theirs, _) in zip(first, second):
        assert silent == [] and len(summary) == len(theirs) == 1

        def lines(text):
            return [line for line in said if text in line]

        assert [line.split(",")[0] for line in lines("skipped=")] == ["step=2", "step=4"]
        assert "mom=[[0.9, 0.999]]" in lines("skipped=")[0].replace("(", "[").replace(")", "]")
        speeds = lines("samples/s")
        assert len(speeds) == 2 and all("tokens/s" in line and "memory of the" in line for line in speeds)
        assert "FLOP/s a rank" in speeds[1], "from the step after the profile on"
        assert len(lines("time (ms) of step ")) == 4 and all(time > 0.0 for time in timers.values())
        assert len([line for line in said if line.startswith("step ") and "reductions of" in line]) == 4
        assert len([line for line in said if line.startswith("step ") and "at the peak" in line]) >= 4
        (profile,) = lines("Profile of one micro-batch")
        # 4 samples of 7 tokens: three blocks of two products of 16 x 32, and a head of 16 x 11.
        forward = 2 * 28 * (3 * 2 * 16 * 32 + 16 * 11)
        assert f"forward {forward / 1e3:.2f} kFLOP, backward " in profile
        assert "TinyModel" in profile and "Block" in profile and "layers" in profile
        assert f"{2 * forward / 1e3:.2f} kFLOP with what it computes again" in profile
        assert lines("Transfers of step 4, rank 0") and "straggling" in lines("Transfers of step 4, rank 0")[0]
        assert summary[0]["step"] == 4 and summary[0]["transfers"]["reduce"]["straggler_seconds"] >= 0.0


def test_the_profile_may_go_to_a_file_and_counts_attention_and_checkpointing(tmp_path):
    class Attends(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(8, 24)

        def forward(self, hidden):
            def attend(hidden):
                query, key, value = self.project(hidden).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
                return torch.nn.functional.scaled_dot_product_attention(query, key, value)

            return torch.utils.checkpoint.checkpoint(attend, hidden, use_reentrant=False)

    path = tmp_path / "made" / "profile.txt"
    engine = make_engine(Attends(), config_of(0, flops_profiler={
        "enabled": True, "profile_step": 0, "output_file": str(path), "detailed": False}))
    engine.backward(engine(torch.ones(2, 5, 8)).square().mean())
    engine.step()
    engine.destroy()
    text = path.read_text()
    projection, attention = 2 * 10 * 8 * 24, 2 * (2 * 2 * 5 * 5) * (4 + 4)
    assert f"forward {(projection + attention) / 1e3:.2f} kFLOP" in text, text
    assert "0  Attends" in text and "1  Linear" in text and "project" not in text


def test_numbers_of_a_profiled_step_stay_as_they_are():
    results = []
    for profiled in (False, True):
        engine = make_engine(make_model(), config_of(3, "bf16", flops_profiler={"enabled": profiled}))
        results.append([train_step(engine, tokens[0]) for tokens in make_batches(3, 1)])
        engine.destroy()
    assert results[0] == results[1]


def test_timers_print_what_they_counted():
    engine = make_engine(make_model(), config_of(0))
    with Lines() as lines:
        engine.timers("load").add(2.5)
        engine.timers.log(["load", "unknown"])
    assert lines.said == ["[Rank 0] time (ms) | load: 2.50"]
    engine.destroy()


def test_ranks_may_show_different_things(tmp_path):
    assert run_ranks(2, _differs, str(tmp_path)) == [True, False]


def _differs(folder):
    rank, world = rank_and_world()
    told = {"csv_monitor": {"enabled": rank == 0, "output_path": folder}, "wall_clock_breakdown": rank == 0}
    engine = make_engine(make_model(), config_of(2, **told))
    train_step(engine, make_batches(1, world)[0, rank])
    engine.destroy()
    return json.loads(engine._config.shown["csv_monitor.enabled"])
