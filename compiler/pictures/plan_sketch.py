"""A timeline in characters: bytes live over one step, with the plan and without a budget, as wide as the terminal is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from rich.text import Text

from dyngran.compiler.pictures.plan_picture import GraphPicture, StepPicture
from dyngran.passes.errors import format_bytes

NUM_ROWS = 10
MAX_COLUMNS = 100
MIN_COLUMNS = 20
HELD_SHARE = 0.5  # of the highest peak: from there on the axis starts at what is held, or little else could be seen
NEAR = 1.25  # of the highest peak: a budget further up is named, not drawn


@dataclass(frozen=True, slots=True)
class Marks:
    """The characters of a sketch; ``rising`` from an empty cell to a full one."""

    rising: str
    before: str
    line: str
    side: str
    corner: str
    tick: str


UNICODE = Marks(rising=" ▁▂▃▄▅▆▇█", before="░", line="─", side="┤", corner="└", tick="┴")
ASCII = Marks(rising="    #####", before=".", line="-", side="|", corner="+", tick="+")


def sketch(picture: GraphPicture, *, width: int, marks: Marks = UNICODE) -> Text:
    """The sketch as one text whose lines have at most ``width`` characters, at least 60. '' for a step of no positions."""
    before, after = picture.before, picture.after
    if not after.total_bytes or not before.total_bytes:
        return Text("")
    top_bytes = max(before.peak_bytes, after.peak_bytes, 1)
    budget_bytes = picture.plan.budget_bytes
    is_near = budget_bytes is not None and budget_bytes <= NEAR * top_bytes
    if is_near and budget_bytes is not None:
        top_bytes = max(top_bytes, budget_bytes)
    bottom_bytes = after.held_bytes if after.held_bytes > HELD_SHARE * top_bytes else 0
    row_bytes = max(top_bytes - bottom_bytes, 1) / NUM_ROWS
    labels = {NUM_ROWS - 1: format_bytes(top_bytes), NUM_ROWS // 2: format_bytes(bottom_bytes + row_bytes * (NUM_ROWS // 2 + 1))}
    gutter = max(map(len, (*labels.values(), format_bytes(bottom_bytes)))) + 1
    num_columns = max(MIN_COLUMNS, min(width - gutter - 2, MAX_COLUMNS))
    num_forward = _forward_columns(after, num_columns)
    levels = [[(size - bottom_bytes) / row_bytes for size in _columns(step, num_columns, num_forward)] for step in (before, after)]
    budget_row = int((budget_bytes - bottom_bytes) / row_bytes) if is_near and budget_bytes is not None else -1

    text = _legend(picture, is_near, marks)
    for row in reversed(range(NUM_ROWS)):
        is_budget = min(budget_row, NUM_ROWS - 1) == row
        text.append(f"\n{labels.get(row, ''):>{gutter}}{marks.side}")
        for was, now in zip(*levels, strict=True):
            text.append(*_cell(was - row, now - row, is_budget, marks))
    ruler = [marks.line] * num_columns
    if 0 < num_forward < num_columns:
        ruler[num_forward] = marks.tick
    text.append(f"\n{format_bytes(bottom_bytes):>{gutter}}{marks.corner}{''.join(ruler)}")
    if after.held_bytes and bottom_bytes:
        text.append(" held", "dim")
    text.append("\n" + " " * (gutter + 1))
    text.append(_sides(num_forward, num_columns), "dim")
    return text


def _cell(was: float, now: float, is_budget: bool, marks: Marks) -> tuple[str, str]:
    """One character and its style; ``was`` and ``now`` are how much of the cell is filled before and after the plan."""
    filled = marks.rising[max(0, min(8, ceil(8 * now - 1e-9)))]
    if filled != " ":
        return filled, "cyan"
    if is_budget:
        return marks.line, "red"
    return (marks.before, "dim") if was >= 0.5 else (" ", "")


def _legend(picture: GraphPicture, is_near: bool, marks: Marks) -> Text:
    text = Text()
    text.append(marks.rising[-1], "cyan").append(" with the plan  ")
    text.append(marks.before, "dim").append(" without a budget")
    if picture.plan.budget_bytes is not None:
        shown = format_bytes(picture.plan.budget_bytes)
        text.append("  ").append(marks.line, "red").append(f" budget {shown}" if is_near else f" budget {shown}, above this picture")
    return text


def _forward_columns(step: StepPicture, num_columns: int) -> int:
    """The columns of forward, one at least for each part that runs."""
    num_forward, length = step.live.num_forward, len(step.total_bytes)
    if num_forward in (0, length):
        return num_columns if num_forward else 0
    return max(1, min(num_columns - 1, round(num_columns * num_forward / length)))


def _columns(step: StepPicture, num_columns: int, num_forward: int) -> list[int]:
    """The highest bytes in each column, forward and backward each over its own share of them."""
    middle = step.live.num_forward
    parts = ((step.total_bytes[:middle], num_forward), (step.total_bytes[middle:], num_columns - num_forward))
    return [size for part, columns in parts for size in _highest(part, columns)]


def _highest(sizes: Sequence[int], num_columns: int) -> list[int]:
    if not sizes:
        return [0] * num_columns
    edges = [column * len(sizes) // num_columns for column in range(num_columns + 1)] if num_columns else []
    return [max(sizes[start : max(end, start + 1)]) for start, end in pairwise(edges)]


def _sides(num_forward: int, num_columns: int) -> str:
    parts = [("forward", num_forward), ("backward", num_columns - num_forward)]
    return "".join((name if len(name) < columns else name[:columns]).ljust(columns) for name, columns in parts).rstrip()
