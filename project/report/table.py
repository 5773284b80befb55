"""Tables and paragraphs of plain text, the same on a terminal, in a file and in a pipe: no colours, no lines drawn."""

import io
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

_WIDE = 1_000_000  # columns: rows are not broken, and names stay whole


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: Text above the column.
        right: Align the cells to the right, as numbers are.
        width: Smallest width, in characters. It keeps cells aligned where rows are printed one by one.
    """

    title: str = ""
    right: bool = False
    width: int = 0


def new_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, head: bool = True, gap: int = 2) -> Table:
    """A table of rich's. Cells are shown as they are, not as markup."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=head)
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left", min_width=column.width or None)
    for row in rows:
        table.add_row(*row)
    return table


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, head: bool = True, gap: int = 2) -> list[str]:
    """Head and rows, without spaces at the end.

    Args:
        columns: As wide as their widest cell, title included, or as `Column.width`.
        rows: A cell for each column.
        head: False leaves out the titles.
        gap: Spaces between two columns.
    """
    file = io.StringIO()
    console = Console(
        file=file,
        width=_WIDE,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,  # in a notebook rich would show the table itself, and write nothing
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(new_table(columns, rows, head=head, gap=gap), soft_wrap=True)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """On a terminal as wide as that is; elsewhere rows are not broken, so that names stay whole."""
    if sys.stdout.isatty():
        Console(highlight=False, markup=False).print(new_table(columns, rows))
    else:
        print("\n".join(table_lines(columns, rows)))


def head_line(columns: Sequence[Column], *, gap: int = 2) -> str:
    """The head of a table whose rows are printed while the next ones are computed."""
    [line] = table_lines(columns, [], gap=gap)
    return line


def row_line(columns: Sequence[Column], cells: Sequence[str], *, gap: int = 2) -> str:
    """A row of such a table; a cell that is wider than its column moves those behind it."""
    [line] = table_lines(columns, [cells], head=False, gap=gap)
    return line


def paragraph(text: str, *, width: int = 78, more: str = "") -> list[str]:
    """Lines of at most so many columns, of which all but the first begin with `more`; names and paths stay whole."""
    return textwrap.wrap(text, width, subsequent_indent=more, break_on_hyphens=False, break_long_words=False)
