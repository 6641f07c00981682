"""The transfers between ranks, for ``deepspeed.comm.log_summary()``."""

import json
import logging

from ..ranks.departure import engines
from ..views.tables import report_text

logger = logging.getLogger("strata")

_KINDS = {"gather": "gathers", "reduce": "reductions", "refresh": "refreshes"}


def log_summary(show_straggler=False, return_dict=False):
    """Logs on rank 0 the transfers of each engine's last step: gathers, reductions and refreshes (lazy all-gathers of
    units that stay whole), with times where steps are timed (``comms_logger.enabled``, or ``engine.record_steps()``).

    Args:
        show_straggler: collective: also logs the shortest wait of a rank, and the sum of the other ranks' excess.
        return_dict: return the logged values.

    Returns:
        None, or [{"step", "transfers": as of ``engine.step_report()``}], an entry an engine.
    """
    said = []
    for engine in engines():
        report = engine.step_report()
        if report is None:
            continue
        transfers = report["transfers"]
        if show_straggler:
            _compare_ranks(engine, transfers)
        said.append({"step": report["step"], "transfers": transfers})
        if engine.global_rank == 0:
            logger.info("%s", summary_text(report["step"], transfers))
    return said if return_dict else None


def _compare_ranks(engine, transfers):
    """Adds ``least_exposed_seconds`` and ``straggler_seconds`` of all ranks."""
    mine = {kind: entry["exposed_seconds"] for kind, entry in transfers.items()}
    ranks = [json.loads(text) for text in engine._collectives.all_gather_text(json.dumps(mine))]
    for kind, entry in transfers.items():
        times = [rank[kind] for rank in ranks]
        known = None not in times
        entry["least_exposed_seconds"] = min(times) if known else None
        entry["straggler_seconds"] = sum(time - min(times) for time in times) if known else None


def summary_text(step, transfers):
    """The table as plain text."""
    columns = {"busy": "seconds", "exposed": "exposed_seconds", "least exposed": "least_exposed_seconds",
               "straggling": "straggler_seconds"}
    first = next(iter(transfers.values()))
    shown = {name: key for name, key in columns.items() if first.get(key) is not None}
    lines = [("", "count", "GB", "GB/s", *shown)]
    for kind, name in _KINDS.items():
        entry = transfers[kind]
        rate = f"{entry['gb_per_s']:.1f}" if entry["gb_per_s"] else ""
        times = [f"{entry[key] * 1e3:.1f} ms" for key in shown.values()]
        lines.append((name, str(entry["count"]), f"{entry['bytes'] * 1e-9:.3f}", rate, *times))
    return report_text(f"Transfers of step {step}, rank 0", [lines], [])


def transfers_line(transfers):
    """The transfers of a step in one line."""
    parts = []
    for kind, name in _KINDS.items():
        entry = transfers[kind]
        if entry["count"]:
            text = f"{entry['count']} {name} of {entry['bytes'] * 1e-9:.3f} GB"
            if entry["gb_per_s"]:
                text += f" at {entry['gb_per_s']:.1f} GB/s"
            parts.append(text if entry["exposed_seconds"] is None
                         else f"{text}, {entry['exposed_seconds'] * 1e3:.1f} ms exposed")
    return "; ".join(parts) or "no transfers"
