"""A sheet: headings, sentences and tables of text, and how it becomes plain text or a rich renderable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells as text; ``align`` has one ``l`` or ``r`` per column."""

    title: str
    columns: tuple[str, ...]
    align: str
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if len(self.align) != len(self.columns) or any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"table {self.title!r}: every row and the alignment need {len(self.columns)} columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """One report as people read it: a heading, sentences, tables, then notes."""

    heading: str
    sentences: tuple[str, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]


def render_text(sheet: Sheet) -> str:
    """Plain text; the same sheet always gives the same characters."""
    lines = [sheet.heading, *sheet.sentences]
    for table in sheet.tables:
        lines += ["", *_text_table(table)]
    if sheet.notes:
        lines += ["", *(f"- {note}" for note in sheet.notes)]
    return "\n".join(lines)


def _text_table(table: Table) -> list[str]:
    widths = [max(len(row[column]) for row in (table.columns, *table.rows)) for column in range(len(table.columns))]

    def line(cells: tuple[str, ...]) -> str:
        padded = (
            cell.rjust(width) if side == "r" else cell.ljust(width) for cell, width, side in zip(cells, widths, table.align, strict=True)
        )
        return ("  " + "  ".join(padded)).rstrip()

    return [table.title, line(table.columns), *(line(row) for row in table.rows)]


def render_rich(sheet: Sheet) -> Group:
    """Rich renderables for a terminal; text is taken literally, brackets included."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    parts: list[Text | RichTable] = [Text(sheet.heading, style="bold"), *(Text(sentence) for sentence in sheet.sentences)]
    for table in sheet.tables:
        drawn = RichTable(title=Text(table.title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
        for column, side in zip(table.columns, table.align, strict=True):
            drawn.add_column(Text(column), justify="right" if side == "r" else "left", overflow="fold", no_wrap=side == "r")
        for row in table.rows:
            drawn.add_row(*(Text(cell) for cell in row))
        parts.append(drawn)
    parts += [Text(f"- {note}") for note in sheet.notes]
    return Group(*parts)
