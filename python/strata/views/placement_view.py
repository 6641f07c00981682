"""The placement of weights and states as a table: ``engine.init_report["placement"]``."""

from .tables import print_report, report_text, size_text

_TIERS = {"device": "device", "host": "host", "nvme": "NVMe"}
_WIDEST_RULE = 48  # signs of a rule, so that its line fits a terminal of 80


def offloads(placement):
    """bool: whether anything is placed outside the device. The staging memory of loading and saving does not count."""
    if placement is None:
        return False
    resting = [sizes for kind, sizes in placement["kinds"].items() if kind not in ("staging", "total")]
    return any(sizes[tier] for sizes in resting for tier in ("host", "nvme"))


def table_text(placement, world_size):
    """The table as plain text.

    Args:
        placement: ``engine.init_report["placement"]``.
        world_size: int.
    """
    return report_text(_title(world_size), _tables(placement), notes_of(placement))


def print_table(placement, world_size, console=None):
    """The same on a terminal: ``console`` of rich, or standard error."""
    print_report(_title(world_size), _tables(placement), notes_of(placement), console)


def notes_of(placement):
    """[line]: folders of drives, and the room that the engine filled by itself."""
    notes = []
    folders = placement["folders"]
    if folders and len(set(folders.values())) == 1:
        notes.append(f"{' and '.join(folders)} on the drive of {next(iter(folders.values()))}")
    else:
        notes += [f"{what} on the drive of {folder}" for what, folder in folders.items()]
    budgets = placement["budgets"]
    if budgets is not None:
        shown = [f"{tier} {size_text(size)}" for tier, size in budgets.items() if size is not None]
        notes.append("placement auto; a rank may hold: " + (", ".join(shown) if budgets["device"] is not None
                                                            else "what it likes (no strata.device_budget)"))
    return notes


def _title(world_size):
    return f"Placement: what {f'each of {world_size} ranks' if world_size > 1 else 'the rank'} holds at most"


def _tables(placement):
    rows = [("what", *_TIERS.values())]
    for kind, sizes in placement["kinds"].items():
        if any(sizes.values()):
            name = "together, at most" if kind == "total" else kind
            rows.append((name, *(size_text(sizes[tier]) if sizes[tier] else "" for tier in _TIERS)))
    tables = [rows]
    if placement["rules"]:
        used = [("rule", "parameters", "of")]
        for rule in placement["rules"]:
            used.append((_shortened(rule["rule"]), str(rule["parameters"]), size_text(rule["bytes"])))
        tables.append(used)
    return tables


def _shortened(rule):
    half = _WIDEST_RULE // 2
    return rule if len(rule) <= _WIDEST_RULE else f"{rule[: half - 3]}...{rule[-half:]}"
