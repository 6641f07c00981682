"""The output of a start-up: a line of progress for a phase that lasts, and the table of all phases."""

import time

from .tables import print_report, report_text, size_text

_DRAWN_AFTER_S = 1.0
_DRAWN_EVERY_S = 0.1


class ProgressBar:
    """One line on the terminal for each phase that lasts over a second, gone when the phase is over.

    Drawn only when the engine calls: there is no thread. After ``close()``, or once the terminal is gone, calls
    do nothing.

    Args:
        world_size: number of ranks; bytes are those of one.
        console: a rich Console; None: standard error.
        clock: seconds.
    """

    def __init__(self, world_size, console=None, clock=time.monotonic):
        self._unit = "GB" if world_size == 1 else "GB a rank"
        self._console = console
        self._clock = clock
        self._open = True
        self._phase = None
        self._began = self._first = self._done = 0
        self._drawn = 0.0
        self._line = self._task = None

    def __call__(self, phase, done, total):
        if not self._open:
            return
        now = self._clock()
        try:
            if phase != self._phase or done < self._done:
                self._erase()
                self._phase, self._began, self._first = phase, now, done
            self._done = done
            if done >= total:
                self._erase()
            elif now - self._began > _DRAWN_AFTER_S and now - self._drawn >= _DRAWN_EVERY_S:
                self._drawn = now
                self._draw(done, total, (done - self._first) / (now - self._began))
        except (OSError, ValueError):  # the terminal is gone
            self._open = False

    def close(self):
        """Leaves the terminal as it was."""
        self._open = False
        try:
            self._erase()
        except (OSError, ValueError):
            pass

    def _draw(self, done, total, rate):
        whole = f"{total * 1e-9:.1f}"
        fields = {  # of one width, so that the line does not jump
            "moved": f"{done * 1e-9:{len(whole)}.1f} of {whole} {self._unit}",
            "rate": f"{rate * 1e-9:5.1f} GB/s",
            "left": f"{(total - done) / rate:3.0f} s left" if rate > 0 else "",
        }
        if self._line is None:
            self._line = self._make_line()
            self._task = self._line.add_task(self._phase, total=total, completed=done, **fields)
            self._line.start()
        else:
            self._line.update(self._task, completed=done, refresh=True, **fields)

    def _make_line(self):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = [TextColumn("{task.description}", style="bold"), BarColumn(bar_width=None)]
        columns += [TextColumn("{task.fields[%s]}" % field) for field in ("moved", "rate", "left")]
        console = self._console or Console(stderr=True)
        return Progress(*columns, console=console, auto_refresh=False, transient=True, expand=True)

    def _erase(self):
        line, self._line = self._line, None
        if line is not None:
            line.stop()


def table_text(report):
    """``engine.init_report`` as plain text."""
    return report_text(_title(report), [_lines(report)], _notes(report))


def print_table(report, console=None):
    """The same on a terminal: ``console`` of rich, or standard error."""
    print_report(_title(report), [_lines(report)], _notes(report), console, ends_in_total=True)


def _lines(report):
    """Cells: the head, a line for each phase that took any time, and the total."""
    link = report["link_gb_per_s"]
    lines = [("phase", "seconds", "GB", "GB/s", "of link")]
    for phase in report["phases"]:
        if phase["seconds"] < 0.001:
            continue
        size, rate, part = phase["bytes"], phase["gb_per_s"], phase["of_link"]
        lines.append((
            phase["name"],
            f"{phase['seconds']:.3f}",
            f"{size * 1e-9:.3f}" if size else "",
            f"{rate:.1f}" if rate is not None else "",
            f"{part:.0%}" if part is not None else "",
        ))
    lines.append(("total", f"{report['seconds']:.3f}", "", "", f"{link:.1f} GB/s" if link else ""))
    return lines if link else [line[:-1] for line in lines]


def _title(report):
    world = report["world_size"]
    ranks = f" on {world} ranks; each number is of the rank that had most" if world > 1 else ""
    return f"Start-up: {report['tier']}{ranks}"


def _notes(report):
    reading = report["reading"]
    notes = [f"files read {reading['way']}: {reading['reason']}"] if reading else []
    memory = {"device": report["device_growth_bytes"], "host peak": report["host_peak_bytes"]}
    if report["pinned_bytes"]:
        memory["pinned"] = report["pinned_bytes"]
    sizes = {name: size_text(size, decimals=0) for name, size in memory.items()}
    sizes["device"] = "+" + sizes["device"]
    return [*notes, ", ".join(f"{name} {size}" for name, size in sizes.items())]
