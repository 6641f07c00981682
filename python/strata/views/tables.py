"""A report of a title, tables and notes, as plain text or on a terminal. Cells are texts; the first row of a table is
its head, and its first column is set left, the others right."""


def report_text(title, tables, notes):
    """The report as plain text.

    Args:
        title: a line.
        tables: [[row of cells]], each with its head first.
        notes: [line], below the tables.
    """
    text = [title]
    for rows in tables:
        widths = [max(map(len, column)) for column in zip(*rows)]
        for first, *others in rows:
            cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:]))]
            text.append("  ".join(cells).rstrip())
    return "\n".join([*text, *notes])


def print_report(title, tables, notes, console=None, ends_in_total=False):
    """The report on a terminal.

    Args:
        title, tables, notes: as for ``report_text``.
        console: a rich Console; None: standard error.
        ends_in_total: a table's last row is set apart from the others.
    """
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = console or Console(stderr=True)
    console.print(title, style="bold", highlight=False)
    for head, *rows in tables:
        total = rows.pop() if ends_in_total else [""] * len(head)
        table = Table(box=SIMPLE, show_edge=False, show_footer=ends_in_total, pad_edge=False, footer_style="bold")
        for number, (name, footer) in enumerate(zip(head, total)):
            table.add_column(name, footer, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in notes:
        console.print(note, highlight=False)


def size_text(size, decimals=1):
    """``size`` bytes as "1.50 GiB", or below one GiB as "12.3 MiB" with ``decimals`` digits."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.{decimals}f} MiB"
