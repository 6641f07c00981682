"""One step as a table: ``engine.step_report()``."""

from .tables import print_report, report_text, size_text

_TRANSFERS = (("gather", "gathers"), ("reduce", "reductions"), ("refresh", "refreshes"))
_LINKS = {"up": "PCIe up", "down": "PCIe down", "read": "drive read", "write": "drive write"}


def table_text(report):
    """``engine.step_report()`` as plain text."""
    return report_text(_title(report), _tables(report), _notes(report))


def print_table(report, console=None):
    """The same on a terminal: ``console`` of rich, or standard error."""
    print_report(_title(report), _tables(report), _notes(report), console)


def _tables(report):
    offload = report["offload"]
    links = [_link_lines(offload["links"])] if offload and offload["links"] else []
    return [_transfer_lines(report), *links, _memory_lines(report)]


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


def _link_lines(links):
    lines = [("link", "GB", "GB/s", "limit", "of limit", "busy")]
    for link, use in links.items():
        rates = [f"{use[key]:.1f}" if use[key] is not None else "" for key in ("gb_per_s", "limit_gb_per_s")]
        share = f"{use['of_limit']:.0%}" if use["of_limit"] is not None else ""
        busy = _ms(use["seconds"]) if use["seconds"] is not None else ""
        lines.append((_LINKS[link], f"{use['bytes'] * 1e-9:.3f}", *rates, share, busy))
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
    counts = f"host waits: {report['host_waits']}; device allocations: {report['device_allocations']}"
    return [text, *_offload_notes(report["offload"]), counts]


def _offload_notes(offload):
    if not offload:
        return []
    waits = []
    if offload["drives"]:
        waits.append(f"drives {_ms(offload['fetch_wait_seconds'])} (host)")
    if offload["copy_wait_seconds"] is not None:
        waits.append(f"copies {_ms(offload['copy_wait_seconds'])} (device)")
    notes = [f"waited for: {', '.join(waits)}"] if waits else []
    if offload["drives"]:
        notes.append(f"parts of what is offloaded: {offload['parts']} lent, {offload['parts_ready']} of them ready")
    return notes + [
        f"written since the start: {drive['written_bytes'] * 1e-9:.3f} GB to {drive['folder']}"
        for drive in offload["drives"]
    ]


def _ms(seconds):
    return f"{seconds * 1e3:.1f} ms"
