"""A profile of one pass as text: the operations of each module."""

from .tables import report_text

_HEAD = ("parameters", "forward", "share", "time")


def profile_text(title, rows, passes, depth, top, detailed):
    """The tables as plain text.

    Args:
        title: a line.
        rows: [(name, class, depth, parameters, forward FLOP, seconds)] in the model's order; the first is the model.
        passes: (forward FLOP, backward FLOP or None) of the whole micro-batch.
        depth: of the deepest modules shown; -1: all.
        top: the number of classes that are listed at each depth.
        detailed: whether every module has a row.
    """
    deepest = max(row[2] for row in rows)
    depth = deepest if depth < 0 else min(depth, deepest)
    tables = [_by_depth(rows, depth, top)] if top > 0 else []
    if detailed:
        tables.append(_by_module(rows, depth))
    return report_text(title, tables, _notes(passes))


def _by_depth(rows, depth, top):
    total = rows[0]
    lines = [("depth, class", "modules", *_HEAD)]
    for level in range(depth + 1):
        classes = {}
        for _, kind, at, parameters, flops, seconds in rows:
            if at == level:
                sums = classes.setdefault(kind, [0, 0, 0, 0.0])
                for index, more in enumerate((1, parameters, flops, seconds)):
                    sums[index] += more
        most = sorted(classes.items(), key=lambda entry: (-entry[1][2], -entry[1][3]))[:top]
        lines += [(f"{level}  {kind}", str(count), *_cells(*sums, total)) for kind, (count, *sums) in most]
    return lines


def _by_module(rows, depth):
    lines = [("module", "class", *_HEAD)]
    for name, kind, at, parameters, flops, seconds in rows:
        if at <= depth:
            lines.append((f"{'  ' * at}{name}", kind, *_cells(parameters, flops, seconds, rows[0])))
    return lines


def _cells(parameters, flops, seconds, total):
    share = f"{flops / total[4]:.1%}" if total[4] else ""
    return _amount(parameters), f"{_amount(flops)}FLOP", share, f"{seconds * 1e3:.2f} ms"


def _amount(number):
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} "


def _notes(passes):
    forward, backward = passes
    note = f"forward {_amount(forward)}FLOP"
    if backward is not None:
        note += f", backward {_amount(backward)}FLOP with what it computes again"
    return [
        note,
        "counted: products of matrices, convolutions and attention; times are longer than in a step without a profile",
    ]
