"""The account of one start-up: the time and the bytes of each phase over all ranks, and its output, with a line of
progress for a phase that lasts."""

import gc
import json
import logging
import os
import sys
import time
from contextlib import contextmanager, suppress

from .. import _C
from . import logger
from .tables import offloads, placement_tables, start_up_tables

_FROZEN_BY_PYTHON = 1000  # the most objects that some Python versions freeze at their start; a program freezes far more
SHOWN_FROM_S = 1.0  # a shorter start-up draws nothing
_OVER_THE_LINK = ("read", "move out", "move in")  # phases whose bytes go between the host and a GPU


class StartUpClock:
    """The clock of one start-up on this rank; a context manager around all of it.

    Time that neither this clock nor the engine names is the phase "other", so that the phases add up to the total. In
    the phase "meet" this rank waits for the others.

    Python's cyclic garbage collector is off meanwhile: a start makes objects for every tensor, so the collector would
    scan everything that a program with transformers has loaded, for longer than a small model takes to start. Objects
    made meanwhile count as old afterwards, so that they are not scanned in the first step, either.

    ``core``: the engine's _C.ShardedModel, as soon as there is one; the account includes its phases."""

    def __init__(self):
        self.core = None
        self._began = time.perf_counter()
        self._own = {}  # phase, by its first begin -> seconds, without what the engine counts itself
        self._bar = None
        self._collects = False  # whether the collector was at work before

    def __enter__(self):
        self._collects = gc.isenabled()
        gc.disable()
        return self

    def __exit__(self, kind, value, traceback):
        if self._collects:
            # Moves all objects to the oldest generation without a scan, except where a program keeps objects from the
            # collector by gc.freeze(), since this would unfreeze them.
            if gc.get_freeze_count() < _FROZEN_BY_PYTHON:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
        if self._bar is not None:
            self._bar.close()

    @contextmanager
    def phase(self, name):
        """Context that counts the time inside, without that of inner phases; phases of one name are added up."""
        self._own.setdefault(name, 0.0)
        began, counted = time.perf_counter(), self._counted()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began - (self._counted() - counted)
            self._own[name] += max(0.0, seconds)
            for entry in self._engine_phases():
                self._own.setdefault(entry["name"], 0.0)

    def progress(self, rank, world_size):
        """The callable that the engine calls with the progress of its phases; None if no terminal shows it."""
        if rank == 0 and sys.stderr.isatty():
            self._bar = ProgressBar(world_size)
        return self._bar

    def finish(self, engine):
        """Collective, once: ``engine.init_report`` is set on every rank; rank 0 shows and writes it."""
        path = engine._config.init_report
        own = self._account()
        on_rank_0 = engine.global_rank == 0
        own["placement"] = self.core.placement() if on_rank_0 else None  # the same on every rank
        shows = own["seconds"] > SHOWN_FROM_S and (sys.stderr.isatty() or logger.isEnabledFor(logging.INFO))
        if on_rank_0 and (path is not None or shows):
            own["link_gb_per_s"] = self.core.measure_link()
        report = merged([json.loads(text) for text in engine._collectives.all_gather_text(json.dumps(own))])
        probe = getattr(engine._collectives, "probe", None)
        report["collectives"] = {"name": engine.collectives_name, "probe": probe}
        engine.init_report = report
        if on_rank_0:
            if self._bar is not None:
                self._bar.close()
            _show(report)
            _show_placement(report["placement"], report["world_size"])
            try:
                if path is not None:
                    _C.write_file_atomically(os.fspath(path), json.dumps(report, indent=1) + "\n")
            except _C.IoError as error:  # no reason to give up an engine that has started
                logger.warning("strata.init.report: '%s' could not be written: %s", path, error)

    def _account(self):
        seconds = time.perf_counter() - self._began
        engine = self.core.init_report()
        spent = {name: [own, 0] for name, own in self._own.items()}
        for entry in engine.pop("phases"):
            both = spent.setdefault(entry["name"], [0.0, 0])
            both[0] += entry["seconds"]
            both[1] += entry["bytes"]
        phases = [{"name": name, "seconds": total, "bytes": size} for name, (total, size) in spent.items()]
        rest = max(0.0, seconds - sum(phase["seconds"] for phase in phases))
        phases.append({"name": "other", "seconds": rest, "bytes": 0})
        _, peak = host_memory()
        return {**engine, "seconds": seconds, "phases": phases, "host_peak_bytes": peak, "link_gb_per_s": None}

    def _engine_phases(self):
        return self.core.init_report()["phases"] if self.core is not None else []

    def _counted(self):
        return sum(self._own.values()) + sum(entry["seconds"] for entry in self._engine_phases())


def merged(accounts):
    """``engine.init_report``, made from the accounts of all ranks in their order.

    Seconds, bytes and peaks are the largest of any rank, phase by phase: if ranks differ, they add up to more than the
    total. ``gb_per_s`` is that of one rank. ``of_link``: the part of the measured speed of the link,
    for phases that cross it. Either is None where it has no meaning. ``reading``: how the files were read, None
    where none were; ranks decide for themselves, so its way may be "mixed", and its figures are the least of a rank."""
    first = accounts[0]
    phases = {}
    for account in accounts:
        for entry in account["phases"]:
            most = phases.setdefault(entry["name"], {"seconds": 0.0, "bytes": 0})
            for what in most:
                most[what] = max(most[what], entry[what])
    for last in ("meet", "other"):
        if last in phases:
            phases[last] = phases.pop(last)
    link = first["link_gb_per_s"]
    listed = []
    for name, most in phases.items():
        rate = most["bytes"] / most["seconds"] * 1e-9 if most["bytes"] and most["seconds"] > 0 else None
        crosses = rate is not None and link and name in _OVER_THE_LINK
        listed.append({"name": name, **most, "gb_per_s": rate, "of_link": rate / link if crosses else None})
    peaks = ("seconds", "device_growth_bytes", "host_peak_bytes", "pinned_bytes")
    return {"tier": first["tier"], "reason": first["reason"], "placement": first["placement"],
            "reading": _merged_reading([account["reading"] for account in accounts if account["reading"]]),
            "world_size": len(accounts), "phases": listed,
            **{what: max(account[what] for account in accounts) for what in peaks}, "link_gb_per_s": link}


def _merged_reading(readings):
    if not readings:
        return None
    ways = {reading["way"] for reading in readings}
    merged_reading = {"way": ways.pop() if len(ways) == 1 else "mixed", "reason": readings[0]["reason"]}
    for figure in ("cached", "buffered_gb_per_s", "direct_gb_per_s"):
        merged_reading[figure] = min((r[figure] for r in readings if r[figure] is not None), default=None)
    return merged_reading


def require_writable_files(config, rank):
    """Raises ConfigError on rank 0, which writes the files of a _C.Config, where it cannot write one. Called before
    start-up, since an error after it would waste the start-up."""
    for key, path in {"strata.init.report": config.init_report, "strata.trace": config.trace}.items():
        if path is None or rank != 0:
            continue
        folder = os.path.dirname(os.path.abspath(path))
        if os.path.isdir(path) or not os.path.basename(path):
            problem = "this is a folder"
        elif not os.path.isdir(folder):
            problem = f"there is no folder '{folder}'"
        elif not os.access(folder, os.W_OK):
            problem = f"'{folder}' is not writable"
        else:
            continue
        raise _C.ConfigError(f"{key}: wanted a file that can be written; {problem}; found '{path}'")


def _show(report):
    logger.info("start-up: tier %s: %s", report["tier"], report["reason"])
    if report["reading"]:
        logger.info("start-up: files read %s: %s", report["reading"]["way"], report["reading"]["reason"])
    lasted = report["seconds"] > SHOWN_FROM_S
    if lasted and sys.stderr.isatty():
        start_up_tables(report).print()
    else:
        text = start_up_tables(report).text()
        logger.log(logging.INFO if lasted else logging.DEBUG, "start-up by phase:\n%s", text)


def _show_placement(placement, world_size):
    if placement is None:
        return
    tables = placement_tables(placement, world_size)
    if not offloads(placement):
        logger.info("nothing is offloaded: %s", "; ".join(tables.notes))
    elif sys.stderr.isatty():
        tables.print()
    else:
        logger.info("placement:\n%s", tables.text())


def host_memory():
    """(bytes that this process has in memory now, the most that it ever had)."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return tuple(int(lines.get(name, "0").split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))


class ProgressBar:
    """One line of tqdm on the terminal for each phase that lasts over a second, gone when the phase is over.

    Drawn only when the engine calls: there is no thread. After ``close()``, or once the terminal is gone, calls
    do nothing. Bytes are those of one rank.
    """

    def __init__(self, world_size):
        from tqdm import tqdm  # only where a terminal shows it

        self._new_line = type("Line", (tqdm,), {"monitor_interval": 0})  # tqdm's own class starts a thread
        self._each = "" if world_size == 1 else " on each rank"
        self._open, self._phase, self._line = True, None, None

    def __call__(self, phase, done, total):
        if not self._open:
            return
        try:
            if phase != self._phase or done < self._line.n:
                self._erase()
                self._phase = phase
                self._line = self._new_line(
                    desc=phase + self._each, initial=done, total=total, unit="B", unit_scale=True, miniters=1, delay=1,
                    smoothing=0, leave=False, dynamic_ncols=True)
            self._line.update(done - self._line.n)
            if done >= total:
                self._erase()
        except (OSError, ValueError):  # the terminal is gone
            self._open = False

    def close(self):
        """Leaves the terminal as it was."""
        self._open = False
        with suppress(OSError, ValueError):
            self._erase()

    def _erase(self):
        if self._line is not None:
            self._line.close()
