"""Reports as tables, as plain text or on a terminal: of a step, of a start-up, of the placement, of transfers.

Cells are texts; the first row of a table is its head, and its first column is set left, the others right."""

from typing import NamedTuple

SHOWN_PHASES_FROM_S = 0.001
_WIDEST_RULE = 48  # signs of a rule, so that its line fits a terminal of 80
_TIERS = {"device": "device", "host": "host", "nvme": "NVMe"}
TRANSFERS = {"gather": "gathers", "reduce": "reductions", "refresh": "refreshes"}
_LINKS = {"up": "PCIe up", "down": "PCIe down", "read": "drive read", "write": "drive write"}


class Tables(NamedTuple):
    """A report for people. ``title``: a line. ``tables``: [[row of cells]], each with its head first. ``notes``:
    [line], below the tables. ``ends_in_total``: bool, whether a terminal sets a table's last row apart."""

    title: str
    tables: list
    notes: list
    ends_in_total: bool = False

    def text(self):
        text = [self.title]
        for rows in self.tables:
            widths = [max(map(len, column)) for column in zip(*rows)]
            for first, *others in rows:
                cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:]))]
                text.append("  ".join(cells).rstrip())
        return "\n".join([*text, *self.notes])

    def print(self, console=None):
        """Prints the report on a terminal: ``console`` of rich, or standard error."""
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table

        console = console or Console(stderr=True)
        console.print(self.title, style="bold", highlight=False)
        for head, *rows in self.tables:
            total = rows.pop() if self.ends_in_total else [""] * len(head)
            table = Table(box=SIMPLE, show_edge=False, show_footer=self.ends_in_total, pad_edge=False,
                          footer_style="bold")
            for number, (name, footer) in enumerate(zip(head, total)):
                table.add_column(name, footer, justify="right" if number else "left", no_wrap=True)
            for row in rows:
                table.add_row(*row)
            console.print(table)
        for note in self.notes:
            console.print(note, highlight=False)


def size_text(size, decimals=1):
    """``size`` bytes as "1.50 GiB", or below one GiB as "12.3 MiB" with ``decimals`` digits."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.{decimals}f} MiB"


def _ms(seconds):
    return f"{seconds * 1e3:.1f} ms"


def _gb(size):
    return f"{size * 1e-9:.3f}"


def _if_any(form):
    return lambda value: form(value) if value else ""


# {head: (field, its text)} of a report's entries; a field that is None is blank.
_TRANSFER = {"count": ("count", str), "GB": ("bytes", _gb), "GB/s": ("gb_per_s", _if_any("{:.1f}".format)),
             "busy": ("seconds", _ms), "exposed": ("exposed_seconds", _ms)}
_STRAGGLING = {"least exposed": ("least_exposed_seconds", _ms), "straggling": ("straggler_seconds", _ms)}
_LINK = {"GB": ("bytes", _gb), "GB/s": ("gb_per_s", "{:.1f}".format), "limit": ("limit_gb_per_s", "{:.1f}".format),
         "of limit": ("of_limit", "{:.0%}".format), "busy": ("seconds", _ms)}
_MEMORY = {"now": ("bytes", size_text), "peak": ("peak_bytes", size_text), "forecast": ("forecast_bytes", size_text)}
_PHASE = {"seconds": ("seconds", "{:.3f}".format), "GB": ("bytes", _if_any(_gb)),
          "GB/s": ("gb_per_s", "{:.1f}".format), "of link": ("of_link", "{:.0%}".format)}
_PLACED = {name: (tier, _if_any(size_text)) for tier, name in _TIERS.items()}
_RULE = {"parameters": ("parameters", str), "of": ("bytes", size_text)}


def _table(first, columns, entries):
    """The rows of a table. ``first``: the head of the first column. ``columns``: {head: (field, its text)}.
    ``entries``: [(cell of the first column, {field: value})]."""
    rows = [(first, *columns)]
    for name, entry in entries:
        cells = ((entry[field], form) for field, form in columns.values())
        rows.append((name, *("" if value is None else form(value) for value, form in cells)))
    return rows


# --- a step ---


def step_tables(report):
    """``engine.step_report()`` as ``Tables``."""
    offload, kinds = report["offload"], report["device_memory"]
    used = [(name, report["transfers"][kind]) for kind, name in TRANSFERS.items()]
    tables = [_table("", _TRANSFER, [(name, entry) for name, entry in used if entry["count"]])]
    if offload and offload["links"]:
        tables.append(_table("link", _LINK, [(_LINKS[link], use) for link, use in offload["links"].items()]))
    columns = {name: column for name, column in _MEMORY.items() if all(column[0] in kind for kind in kinds.values())}
    tables.append(_table("device memory", columns, kinds.items()))
    title = f"Step {report['step']}: {_ms(report['seconds'])}"
    if report["exposed_seconds"] is not None:
        parts = [f"{name} {report[name + '_seconds'] * 1e3:.1f}" for name in ("forward", "backward", "update")]
        share = report["exposed_seconds"] / report["seconds"] if report["seconds"] > 0 else 0.0
        title += f": {', '.join(parts)}; {share:.1%} exposed"
    uses = report["uses"]
    return Tables(title, tables,
                  [f"uses of sharded units: {uses['kept']} kept, {uses['prefetched']} prefetched, {uses['late']} late",
                   *_offload_notes(offload),
                   f"host waits: {report['host_waits']}; device allocations: {report['device_allocations']}"])


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
    lanes = {"the device": offload["device_lane"], "the host": offload["host_lane"]}
    if all(lanes.values()) and any(lane["elements"] for lane in lanes.values()):
        total = sum(lane["elements"] for lane in lanes.values())
        parts = (f"{lane['elements'] / total:.0%} by {name} in {_ms(lane['seconds'])}" for name, lane in lanes.items())
        notes.append(f"updated: {', '.join(parts)}")
    if offload["cached_bytes"]:
        notes.append(f"states of the host in free memory of the device: {_gb(offload['cached_bytes'])} GB")
    written = ((_gb(drive["written_bytes"]), drive["folder"]) for drive in offload["drives"])
    return [*notes, *(f"written since the start: {size} GB to {folder}" for size, folder in written)]


def transfer_tables(step, transfers):
    """The transfers of a step of rank 0 as ``Tables``; of times those that are known."""
    times = {"busy", "exposed", *_STRAGGLING}
    first = next(iter(transfers.values()))
    columns = {name: (field, form) for name, (field, form) in (_TRANSFER | _STRAGGLING).items()
               if name not in times or first.get(field) is not None}  # fmt: skip
    entries = [(name, transfers[kind]) for kind, name in TRANSFERS.items()]
    return Tables(f"Transfers of step {step}, rank 0", [_table("", columns, entries)], [])


# --- a start-up ---


def start_up_tables(report):
    """``engine.init_report`` as ``Tables``: a line for each phase that took any time, and the total."""
    link, world, reading = report["link_gb_per_s"], report["world_size"], report["reading"]
    shown = [(phase["name"], phase) for phase in report["phases"] if phase["seconds"] >= SHOWN_PHASES_FROM_S]
    lines = _table("phase", _PHASE, shown)
    lines.append(("total", f"{report['seconds']:.3f}", "", "", f"{link:.1f} GB/s" if link else ""))
    ranks = f" on {world} ranks; each number is of the rank that had most" if world > 1 else ""
    memory = {"device": report["device_growth_bytes"], "host peak": report["host_peak_bytes"]}
    if report["pinned_bytes"]:
        memory["pinned"] = report["pinned_bytes"]
    sizes = {name: size_text(size, decimals=0) for name, size in memory.items()}
    sizes["device"] = "+" + sizes["device"]
    notes = [f"files read {reading['way']}: {reading['reason']}"] if reading else []
    notes.append(", ".join(f"{name} {size}" for name, size in sizes.items()))
    table = lines if link else [line[:-1] for line in lines]
    return Tables(f"Start-up: {report['tier']}{ranks}", [table], notes, ends_in_total=True)


# --- the placement ---


def offloads(placement):
    """bool: whether anything is placed outside the device. The staging memory of loading and saving does not count."""
    if placement is None:
        return False
    resting = [sizes for kind, sizes in placement["kinds"].items() if kind not in ("staging", "total")]
    return any(sizes[tier] for sizes in resting for tier in ("host", "nvme"))


def placement_tables(placement, world_size):
    """``engine.init_report["placement"]`` as ``Tables``. Notes: folders of drives, and room that was filled."""
    kinds = {"together, at most" if kind == "total" else kind: sizes for kind, sizes in placement["kinds"].items()}
    tables = [_table("what", _PLACED, [(kind, sizes) for kind, sizes in kinds.items() if any(sizes.values())])]
    if placement["rules"]:
        tables.append(_table("rule", _RULE, [(_shortened(rule["rule"]), rule) for rule in placement["rules"]]))
    folders, budgets = placement["folders"], placement["budgets"]
    if folders and len(set(folders.values())) == 1:
        notes = [f"{' and '.join(folders)} on the drive of {next(iter(folders.values()))}"]
    else:
        notes = [f"{what} on the drive of {folder}" for what, folder in folders.items()]
    if budgets is not None:
        shown = [f"{tier} {size_text(size)}" for tier, size in budgets.items() if size is not None]
        notes.append("placement auto; a rank may hold: " + (", ".join(shown) if budgets["device"] is not None
                                                            else "what it likes (no strata.device_budget)"))
    holder = f"each of {world_size} ranks" if world_size > 1 else "the rank"
    return Tables(f"Placement: what {holder} holds at most", tables, notes)


def _shortened(rule):
    half = _WIDEST_RULE // 2
    return rule if len(rule) <= _WIDEST_RULE else f"{rule[: half - 3]}...{rule[-half:]}"
