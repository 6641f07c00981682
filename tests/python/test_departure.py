"""How a rank leaves the others: quietly at the end of the program, with a word where an exception ends it."""

import atexit
import gc
import logging
import os
import sys
from pathlib import Path

import pytest
import strata
from devices import needs_a_gpu_each
from ranks import run_ranks
from strata.ranks import departure
from tiny_models import config_of, make_batches, make_engine, make_model, rank_and_world, train_step
from torch import nn


class Core:
    """A core whose farewell fails as it does after a device-side assert."""

    alive = True

    def __init__(self, **failures):
        self.calls, self.told = [], []
        self._failures = failures

    def end_trace(self):
        self._call("end_trace")

    def wait_for_all(self):
        self._call("wait_for_all")

    def leave(self, reason):
        self.told.append(reason)
        if "leave" in self._failures:
            raise self._failures["leave"]

    def _call(self, name):
        self.calls.append(name)
        if name in self._failures:
            raise self._failures[name]


@pytest.fixture(autouse=True)
def hook(monkeypatch):
    """What sys.excepthook was before, with its calls; nothing is watched before and after."""
    gc.collect()  # engines that tests before have dropped
    assert not departure._present
    calls = []
    monkeypatch.setattr(sys, "excepthook", lambda *shown: calls.append(shown))
    monkeypatch.delattr(sys, "last_value", raising=False)
    yield calls
    for reference in list(departure._present):
        departure._remove(reference)


@pytest.mark.parametrize("failures", [
    {"end_trace": strata.DeviceError("device-side assert triggered")},
    {"wait_for_all": strata.CommError("rank 1 is gone")},
    {"wait_for_all": RuntimeError("CUDA error: device-side assert triggered")},
])
def test_what_fails_at_exit_is_no_second_traceback(failures, caplog):
    failing, other = Core(**failures), Core()
    departure.watch(other)
    departure.watch(failing)
    with caplog.at_level(logging.DEBUG, "strata"):
        departure._leave_together()
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert str(next(iter(failures.values()))) in caplog.text
    assert other.calls == ["end_trace", "wait_for_all"]


def test_who_leaves_by_an_exception_waits_for_nobody(monkeypatch):
    core = Core()
    departure.watch(core)
    monkeypatch.setattr(sys, "last_value", ValueError("no more data"), raising=False)
    departure._leave_together()
    assert core.calls == []


def test_an_engine_that_is_destroyed_or_collected_is_not_waited_for(monkeypatch):
    registered = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(atexit, "unregister", registered.remove)
    destroyed, collected = Core(), Core()
    departure.watch(destroyed)
    departure.watch(collected)
    assert registered == [departure._leave_together]
    departure.unwatch(destroyed)
    departure.unwatch(destroyed)
    assert registered == [departure._leave_together]
    del collected
    assert registered == [] and not departure._present
    assert destroyed.calls == []


def test_peers_are_told_of_an_exception_before_it_is_shown(hook):
    cores = [Core(), Core(leave=RuntimeError("the device is lost"))]
    before = sys.excepthook
    for core in cores:
        departure.watch(core)
    error = ValueError("no more data")
    sys.excepthook(ValueError, error, None)
    assert [core.told for core in cores] == [["ValueError: no more data"]] * 2
    assert hook == [(ValueError, error, None)]
    for core in cores:
        departure.unwatch(core)
    assert sys.excepthook is before


def test_a_hook_that_was_put_above_stays_there(hook):
    first, second = Core(), Core()
    departure.watch(first)
    below = sys.excepthook
    sys.excepthook = above = lambda *shown: below(*shown)
    departure.unwatch(first)
    assert sys.excepthook is above
    departure.watch(second)
    sys.excepthook(KeyError, KeyError("a"), None)
    assert set(second.told) == {"KeyError: 'a'"} and len(hook) == 1
    departure.unwatch(second)
    assert sys.excepthook is above


def _one_rank_runs_out_of_data(collectives):
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(3, strata={"collectives": collectives}))
    try:
        for step, batch in enumerate(make_batches(3, world)):
            if rank == 1 and step == 2:
                raise ValueError("no more data")
            train_step(engine, batch[rank])
    except (ValueError, strata.CommError) as error:
        sys.last_value = error  # as the interpreter does with an exception that nobody catches
        sys.excepthook(type(error), error, error.__traceback__)
        return f"{type(error).__name__}: {error}"


def test_cores_that_share_collectives_meet_the_others_once():
    cores, shared = [Core(), Core()], object()
    for core in cores:
        departure.watch(core, group=shared)
    departure._leave_together()
    assert [core.calls for core in cores] == [["end_trace"], ["end_trace", "wait_for_all"]]
    departure._tell_peers(ValueError, ValueError("no more data"))
    assert [core.told for core in cores] == [["ValueError: no more data"], []]


def _ends_while_the_other_goes_on(folder):
    leaving, went_on = Path(folder) / "leaving", Path(folder) / "went on"
    rank, _ = rank_and_world()
    if rank == 0:  # what is registered first is called last
        atexit.register(lambda: (Path(folder) / "left").write_text(str(went_on.exists())))
    with strata.zero.Init():
        model = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    sys.modules["the model of this program"] = model
    with strata.zero.GatheredParameters(list(model.parameters())):
        values = [p.sum().item() for p in model.parameters()]
    if rank == 0:
        atexit.register(lambda: leaving.write_text(""))
    else:
        while not leaving.exists():
            os.sched_yield()
        for _ in range(10_000):  # ample for one who would not wait
            os.sched_yield()
        went_on.write_text("")
    return values


def test_a_rank_whose_model_no_engine_took_stays_as_long_as_its_peers(tmp_path):
    first, second = run_ranks(2, _ends_while_the_other_goes_on, str(tmp_path))
    assert first == second and (tmp_path / "left").read_text() == "True"


@needs_a_gpu_each
@pytest.mark.parametrize("collectives", ["shm", "c10d"])
def test_peers_learn_what_ended_a_rank(collectives):
    told, own = run_ranks(2, _one_rank_runs_out_of_data, collectives)
    assert own == "ValueError: no more data"
    assert told.startswith("CommError: ") and "rank 1" in told and own in told
