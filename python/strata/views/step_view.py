"""One step as people see it: the table of ``engine.step_report()``."""

from .tables import print_report, report_text, size_text

_TRANSFERS = (("gather", "gathers"), ("reduce", "reductions"), ("refresh", "refreshes"))


def table_text(report):
    """``engine.step_report()`` as plain text."""
    return report_text(_title(report), _tables(report), _notes(report))


def print_table(report, console=None):
    """The same on a terminal: ``console`` of rich, or standard error."""
    print_report(_title(report), _tables(report), _notes(report), console)


def _tables(report):
    return _transfer_lines(report), _memory_lines(report)


def _title(report):
    title = f"Step {report['step']}: {_ms(report['seconds'])}"
    if report["exposed_seconds"] is None:
        return title
    parts = [f"{name} {report[name + '_seconds'] * 1e3:.1f}" for name in ("forward", "backward", "update")]
    share = report["exposed_seconds"] / report["seconds"] if report["seconds"] > 0 else 0.0
    return f"{title}: {', '.join(parts)}; {share:.1%} exposed"


def _transfer_lines(report):
    lines = [("", "count", "GB", "GB/s", "busy", "exposed")]
    for kind, name in _TRANSFERS:
        entry = report["transfers"][kind]
        if entry["count"] == 0:
            continue
        rate = f"{entry['gb_per_s']:.1f}" if entry["gb_per_s"] else ""
        times = [_ms(entry[key]) if entry[key] is not None else "" for key in ("seconds", "exposed_seconds")]
        lines.append((name, str(entry["count"]), f"{entry['bytes'] * 1e-9:.3f}", rate, *times))
    return lines


def _memory_lines(report):
    columns = {"now": "bytes", "peak": "peak_bytes", "forecast": "forecast_bytes"}
    kinds = report["device_memory"]
    shown = {name: key for name, key in columns.items() if all(key in entry for entry in kinds.values())}
    lines = [("device memory", *shown)]
    for kind, entry in kinds.items():
        lines.append((kind, *(size_text(entry[key]) for key in shown.values())))
    return lines


def _notes(report):
    uses = report["uses"]
    text = f"uses of sharded units: {uses['kept']} kept, {uses['prefetched']} prefetched, {uses['late']} late"
    return [text, f"host waits: {report['host_waits']}; device allocations: {report['device_allocations']}"]


def _ms(seconds):
    return f"{seconds * 1e3:.1f} ms"
