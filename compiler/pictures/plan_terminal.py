"""A plan document in a terminal: what it promises, the step as a sketch, and tables by region, by action and of the largest values."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Mapping

from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from dyngran.compiler.pictures.plan_picture import GraphPicture
from dyngran.compiler.pictures.plan_sketch import ASCII, UNICODE, sketch
from dyngran.compiler.plans.planfile import Origin, PlanDocument
from dyngran.compiler.report_rows import RegionRow, merge_alike, region_rows
from dyngran.compiler.report_sheet import Sheet, Table, render_rich
from dyngran.passes.errors import format_bytes, format_us
from dyngran.passes.plan import Action, Decision, Plan

PIPE_COLUMNS = 400  # a file or another program has no width at which lines must be folded
NUM_LARGEST = 20
NUM_REGIONS = 30
WIDE = 120  # columns from which on a row holds its region and its reason beside each other
ORIGINS = {
    Origin.EXACT: "exact: traced with the torch build and for the device that train",
    Origin.PORTABLE: "portable: traced without the device, so regions that differ there are repaired",
}


def output_console() -> Console:
    """Standard output: as wide as the terminal, and wide where nothing must be folded. What it cannot encode becomes a question mark."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    in_terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if in_terminal else PIPE_COLUMNS)


def print_document(console: Console, document: PlanDocument, pictures: tuple[GraphPicture, ...], *, show_all: bool) -> None:
    """Everything that people read of a document."""
    is_one = len(pictures) == 1
    made = made_rows(document)
    if not is_one:
        times = f"{format_us(document.time_us)} in {len(pictures)} graphs"
        console.print(_grid("step", {"predicted peak": format_bytes(document.peak_bytes), "predicted time": times, **made}))
    for picture in pictures:
        rows = graph_rows(picture)
        console.print()
        console.print(_grid(picture.title or "plan", {**rows, **made} if is_one else rows))
        for part in _graph_parts(picture, console, show_all=show_all):
            console.print(part)


def graph_rows(picture: GraphPicture) -> dict[str, str]:
    """What the plan of one graph promises, as people read it: the head of its section in a terminal and in a page."""
    plan, before = picture.plan, picture.before
    stock = "torch's own partition" if picture.problem.stock else "everything saved that backward reads"
    rows = {
        "budget": "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes),
        "predicted peak": f"{format_bytes(plan.peak_bytes)}, of which static {format_bytes(plan.static_bytes)}",
        "free peak": f"{format_bytes(before.peak_bytes)} without a budget ({stock}), in {format_us(before.time_us)}",
        "least peak known": format_bytes(picture.least_peak_bytes),
        "saved for backward": f"{format_bytes(plan.saved_bytes)} in {len(plan.saved)} values",
        "predicted time": f"{format_us(plan.time_us)}, of which {format_us(plan.overhead_us)} beyond the step without a budget",
        "recompute": f"{format_us(plan.recompute_us)} in {plan.num_recomputed} ops",
        "solver": plan.solver + (" (truncated: a safety stop cut the search short)" if plan.truncated else ""),
        "bound": _bound(plan),
        "order": plan.order,
        "graph": picture.graph.fingerprint,
        "note": picture.note,
    }
    return {name: plain(text) for name, text in rows.items() if text}


def plain(text: str) -> str:
    """``text`` on one line, without anything from a file that could steer a terminal."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def action_of(decision: Decision) -> str:
    """The action with its parameters: ``slice dim 0, 50%``, ``narrow bf16``."""
    words = [decision.action.value]
    if decision.dimension is not None:
        words.append(f"dim {decision.dimension}" + ("," if decision.fraction is not None else ""))
    if decision.fraction is not None:
        words.append(f"{decision.fraction:.0%}")
    if decision.format is not None:
        words.append(decision.format)
    return " ".join(words)


def largest_first(decisions: Iterable[Decision]) -> list[Decision]:
    """The order in which decisions are listed."""
    return sorted(decisions, key=lambda decision: (-decision.size_bytes, decision.value))


def _bound(plan: Plan) -> str:
    if not plan.bound:
        return "none was proven"
    if plan.bound.startswith("exact"):
        return f"no plan within the budget is faster: proven ({plan.bound})"
    return f"no plan within the budget can be more than {max(plan.gap, 0.0):.1%} faster ({plan.bound})"


def made_rows(document: PlanDocument) -> dict[str, str]:
    """What a document was made for and how."""
    asked = [f"{name} {value}" for name, value in settings_of(document)]
    rows = {
        "made for": f"{document.device}, torch {document.torch_version}, codegen {document.codegen}, dyngran {document.dyngran_version}",
        "origin": ORIGINS[document.origin],
        "asked for": ", ".join(asked),
        "graph breaks": str(len(document.breaks)) if document.breaks else "none",
    }
    rows |= {f"break {number}": f"{one.where}: {one.reason}" for number, one in enumerate(document.breaks, 1)}
    return {name: plain(text) for name, text in rows.items() if text}


def settings_of(document: PlanDocument) -> list[tuple[str, str]]:
    """How the plan was asked for, without what was left as it is."""
    settings = document.settings
    given = {
        "budget": settings.budget,
        "batch": settings.batch,
        "dtype": settings.dtype,
        "profile": settings.profile,
        "keep below": settings.keep_below,
        "storage": ", ".join(settings.storage) or None,
        "offload": None if isinstance(settings.offload, bool) else format_bytes(settings.offload),
    }
    named = [(name, str(value)) for name, value in given.items() if value is not None]
    switches = (
        [("dynamic", "shapes")] * settings.dynamic + [("no", "packing")] * (not settings.pack) + [("no", "slices")] * (not settings.slice)
    )
    return named + switches + [("offload", "to the host")] * (settings.offload is True)


def _grid(title: str, rows: Mapping[str, str]) -> RenderableType:
    table = RichTable.grid(padding=(0, 2, 0, 0))
    table.title, table.title_justify = Text(title, style="bold"), "left"
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(Text(name), Text(text))
    return table


def _graph_parts(picture: GraphPicture, console: Console, *, show_all: bool) -> Iterable[RenderableType]:
    marks = ASCII if console.options.ascii_only else UNICODE
    drawn = sketch(picture, width=console.width, marks=marks)
    if drawn:
        yield ""
        yield drawn
    decisions = largest_first(picture.plan.decisions)
    if not decisions:
        return
    width = console.width
    for table in (_regions(picture, width, show_all=show_all), _largest(decisions, width, show_all=show_all), _totals(decisions)):
        yield ""
        yield render_rich(Sheet(heading=table.title, sentences=(), tables=(_untitled(table),), notes=()))


def _untitled(table: Table) -> Table:
    return Table(title="", columns=table.columns, align=table.align, rows=tuple(tuple(map(_lines_plain, row)) for row in table.rows))


def _lines_plain(cell: str) -> str:
    """As `plain`, where a line break is the table's own."""
    return "\n".join(map(plain, cell.split(_BREAK)))


_BREAK = "\0"  # between the lines of a cell, until the texts of the file in it are made plain


def _regions(picture: GraphPicture, width: int, *, show_all: bool) -> Table:
    rows = merge_alike(region_rows(picture.problem, picture.plan))
    shown = rows if show_all else rows[:NUM_REGIONS]
    cells = [_region_cells(row) for row in shown]
    columns = ("region", "actions", "saved", *(("recomputed", "time, op by op") if width >= WIDE else ("again", "time")))
    return Table(title=f"by region{_of(len(shown), len(rows))}", columns=columns, align="llrrr", rows=tuple(cells))


def _region_cells(row: RegionRow) -> tuple[str, ...]:
    actions = ", ".join(f"{action.value} {count}" for action, count in row.actions)
    return (row.name, actions, format_bytes(row.saved_bytes), format_bytes(row.recomputed_bytes), format_us(row.recompute_us))


def _largest(decisions: list[Decision], width: int, *, show_all: bool) -> Table:
    shown = decisions if show_all else decisions[:NUM_LARGEST]
    title = f"decisions, largest first{_of(len(shown), len(decisions))}"
    if width >= WIDE:
        wide = [(one.name, action_of(one), one.label, one.reason, *_amounts(one)) for one in shown]
        return Table(title=title, columns=("value", "action", "source", "reason", "bytes", "recompute"), align="llllrr", rows=tuple(wide))
    narrow = [(bytes_of(one), action_of(one), _stacked(f"{one.name}  {one.label}".rstrip(), one.reason)) for one in shown]
    return Table(title=title, columns=("bytes", "action", "value, source, reason"), align="rll", rows=tuple(narrow))


def _stacked(*lines: str) -> str:
    return _BREAK.join(map(plain, filter(None, lines)))


def _amounts(decision: Decision) -> tuple[str, str]:
    return bytes_of(decision), format_us(decision.recompute_us)


def _stored_bytes(decision: Decision) -> int:
    return decision.size_bytes if decision.stored_bytes is None else decision.stored_bytes


def bytes_of(decision: Decision) -> str:
    """The bytes of a value, and what becomes of them where it is stored otherwise: ``4 MiB to 512 KiB``."""
    size = format_bytes(decision.size_bytes)
    return size if decision.stored_bytes is None else f"{size} to {format_bytes(decision.stored_bytes)}"


def _of(num_shown: int, num_all: int) -> str:
    return f" ({num_shown} of {num_all}; --all shows every one)" if num_shown < num_all else f" ({num_all})"


def _totals(decisions: list[Decision]) -> Table:
    rows = []
    for action in Action:
        chosen = [one for one in decisions if one.action is action]
        if chosen:
            before, after = (sum(sizes) for sizes in zip(*((one.size_bytes, _stored_bytes(one)) for one in chosen), strict=True))
            size = format_bytes(before) if before == after else f"{format_bytes(before)} to {format_bytes(after)}"
            rows.append((action.value, str(len(chosen)), size, format_us(sum(one.recompute_us for one in chosen))))
    return Table(title="by action", columns=("action", "values", "bytes", "recompute"), align="lrrr", rows=tuple(rows))
