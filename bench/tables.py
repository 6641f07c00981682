"""Tables of a bench's figures on a terminal or in a file: the first column to the left, the others to the right."""

import importlib.util

WIDTH = 200  # if the output is no terminal


def columns(lines):
    """Text of [[cell]], the first of them the headings."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for line in lines:
        cells = [line[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def show(lines):
    """Prints [[cell]] with what the machine has: a table of rich, or plain columns."""
    if importlib.util.find_spec("rich") is None:
        print(columns(lines), flush=True)
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(lines[0]):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for line in lines[1:]:
        table.add_row(*line)
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table, markup=False, highlight=False)
