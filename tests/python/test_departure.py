"""A rank leaves the others quietly at the end of the program, and with a message where an exception ends it."""

import atexit
import gc
import logging
import os
import sys
from contextlib import suppress
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

    global_steps = 2

    def announce_departure(self, words):
        self.words = words

    def depart(self):
        self._call("depart")

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
    """Puts a recorder in sys.excepthook, and returns its calls; no engine is watched before and after a test."""
    gc.collect()  # engines that tests before have dropped
    assert not departure._present
    monkeypatch.setattr(departure, "_last_error", None)
    calls = []
    monkeypatch.setattr(sys, "excepthook", lambda *shown: calls.append(shown))
    monkeypatch.delattr(sys, "last_value", raising=False)
    yield calls
    for reference in list(departure._present):
        departure._remove(reference)


@pytest.mark.parametrize("failures", [
    {"end_trace": strata.DeviceError("device-side assert triggered")},
    {"depart": strata.CommError("rank 1 is gone")},
    {"depart": RuntimeError("CUDA error: device-side assert triggered")},
])
def test_what_fails_at_exit_is_no_second_traceback(failures, caplog):
    failing, other = Core(**failures), Core()
    departure.watch(other)
    departure.watch(failing)
    with caplog.at_level(logging.DEBUG, "strata"):
        departure._leave()
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert str(next(iter(failures.values()))) in caplog.text
    assert other.calls == ["end_trace", "depart"]


def test_who_leaves_by_an_exception_waits_for_nobody(monkeypatch):
    core = Core()
    departure.watch(core)
    monkeypatch.setattr(sys, "last_value", ValueError("no more data"), raising=False)
    departure._leave()
    assert core.calls == []


def test_an_engine_that_is_destroyed_or_collected_is_not_waited_for(monkeypatch):
    registered = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(atexit, "unregister", registered.remove)
    destroyed, collected = Core(), Core()
    departure.watch(destroyed)
    departure.watch(collected)
    assert registered == [departure._leave]
    departure.unwatch(destroyed)
    departure.unwatch(destroyed)
    assert registered == [departure._leave]
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
        sys.last_value = error  # as the interpreter does with an uncaught exception
        sys.excepthook(type(error), error, error.__traceback__)
        return f"{type(error).__name__}: {error}"


def test_cores_that_share_collectives_meet_the_others_once():
    cores, shared = [Core(), Core()], object()
    for core in cores:
        departure.watch(core, group=shared)
    departure._leave()
    assert [core.calls for core in cores] == [["end_trace"], ["end_trace", "depart"]]
    departure._notify_peers(ValueError, ValueError("no more data"))
    assert [core.told for core in cores] == [["ValueError: no more data"], []]


def _ends_while_the_other_goes_on(folder):
    leaving, went_on = Path(folder) / "leaving", Path(folder) / "went on"
    rank, _ = rank_and_world()
    if rank == 0:  # the function registered first is called last
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
        for _ in range(10_000):  # ample for a rank that does not wait
            os.sched_yield()
        went_on.write_text("")
    return values


def test_a_rank_whose_model_no_engine_took_stays_as_long_as_its_peers(tmp_path):
    first, second = run_ranks(2, _ends_while_the_other_goes_on, str(tmp_path))
    assert first == second and (tmp_path / "left").read_text() == "True"


def test_peers_that_do_not_come_are_told_of_the_last_error():
    core = Core()
    departure.watch(core)
    departure._leave()
    assert core.words == "its program ended after 2 steps"
    departure.record_error(ValueError("no more data"))
    departure._leave()
    assert core.words == "its program ended after 2 steps; its last error was ValueError: no more data"


@pytest.mark.parametrize("status, told", [(None, ""), (0, ""), (3, " by sys.exit(3) at test_departure.py:"),
                                          ("no data", " by sys.exit('no data') at test_departure.py:")])
def test_peers_that_do_not_come_are_told_of_an_exit_with_a_failure(status, told):
    core, before = Core(), sys.exit
    departure.watch(core)
    with pytest.raises(SystemExit) as left:
        sys.exit(status)
    assert left.value.code == status
    departure._leave()
    assert core.calls == ["end_trace", "depart"], "a checkpoint may still be written, by all"
    assert core.words.startswith("its program ended after 2 steps" + told) and ("sys.exit" in core.words) is bool(told)
    departure.unwatch(core)
    assert sys.exit is before


def _one_rank_ends(collectives, how):
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(3, strata={"collectives": collectives}))
    sys.modules["the engine of this program"] = engine
    for step, batch in enumerate(make_batches(3, world)):
        if rank == 1 and step == 2:
            with suppress(SystemExit, TypeError):
                if how == "exit":
                    sys.exit(3)
                engine(no_such_argument=batch[rank])
            return None
        try:
            train_step(engine, batch[rank])
        except strata.CommError as error:
            return str(error)


@needs_a_gpu_each
@pytest.mark.parametrize("collectives, how", [("shm", "exit"), ("shm", "caught"), ("c10d", "caught")])
def test_peers_learn_that_a_rank_has_left_and_its_last_words(collectives, how):
    told, _ = run_ranks(2, _one_rank_ends, collectives, how)
    if how == "exit":
        assert "rank 1 has left: its program ended after 2 steps by sys.exit(3) at test_departure.py:" in told
    else:
        assert "rank 1 has left: its program ended after 2 steps; its last error was TypeError: " in told
        assert "no_such_argument" in told and "meanwhile rank 0: " in told
    assert "look for code that depends on the rank" not in told and "do different things" not in told


def _goes_when_the_store_is_gone(folder):
    rank, world = rank_and_world()
    engines, first = [], Path(folder) / "first"
    if rank == 0:
        first.write_text(str(os.getpid()))

    def go():  # at the end, after the engines have left together
        if rank == 0:
            return
        while Path(f"/proc/{first.read_text()}").exists() and "Z" not in _state_of(first.read_text()):
            os.sched_yield()
        engines.clear()
        gc.collect()
        (Path(folder) / "said").write_text(Path("/proc/self/fd/2").read_text())

    atexit.register(go)
    for _ in range(3):  # the first send to a host that is gone succeeds
        engines.append(make_engine(make_model(), config_of(2, strata={"collectives": "c10d"})))
    train_step(engines[-1], make_batches(1, world)[0, rank])


def _state_of(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1]
    return "Z"


@needs_a_gpu_each
def test_hosts_that_end_one_after_the_other_print_no_trace_of_the_store(tmp_path):
    run_ranks(2, _goes_when_the_store_is_gone, str(tmp_path))
    assert "c10d" not in (tmp_path / "said").read_text()


@needs_a_gpu_each
@pytest.mark.parametrize("collectives", ["shm", "c10d"])
def test_peers_learn_what_ended_a_rank(collectives):
    told, own = run_ranks(2, _one_rank_runs_out_of_data, collectives)
    assert own == "ValueError: no more data"
    assert told.startswith("CommError: ") and "rank 1" in told and own in told
