"""The pictures of a plan as one PNG: memory over the step before and after, and the frontier. Drawn with matplotlib, imported here only."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from math import log
from pathlib import Path
from typing import TYPE_CHECKING

from dyngran.compiler.pictures.plan_html import palette
from dyngran.compiler.pictures.plan_picture import GraphPicture, pictures_of
from dyngran.compiler.pictures.plan_terminal import plain
from dyngran.compiler.plans.output_file import write_file
from dyngran.compiler.plans.planfile import PlanDocument
from dyngran.passes.errors import ToolMissing, format_bytes, format_us

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from dyngran.compiler.offline.largest_batch import BatchPoint

MAX_GRAPHS = 8  # of a step, in one picture; a page has no such limit
MAX_COLUMNS = 1500  # more than there are pixels
WIDTH_INCHES, GRAPH_INCHES, DPI = 13.0, 5.4, 110
BUDGET_COLOUR, POINT_COLOUR = "#c2410c", "#3b76c4"
NEAR = 1.25  # of the highest peak: a budget further up is named, not drawn


def png(pictures: Sequence[GraphPicture], name: str) -> bytes:
    """The picture; ``name`` is that of the plan file.

    Raises:
        ToolMissing: matplotlib is not installed.
    """
    drawn = pictures[:MAX_GRAPHS]
    figure = _figure(WIDTH_INCHES, 0.7 + GRAPH_INCHES * len(drawn))
    more = f", the first {len(drawn)} of {len(pictures)} graphs" if len(pictures) > len(drawn) else ""
    figure.suptitle(plain(name) + more, parse_math=False)
    grid = figure.add_gridspec(2 * len(drawn), 2, width_ratios=(2.2, 1))
    for row, picture in enumerate(drawn):
        axes = [figure.add_subplot(grid[2 * row, 0]), figure.add_subplot(grid[2 * row + 1, 0])]
        _draw_memory(axes, picture)
        _draw_frontier(figure.add_subplot(grid[2 * row : 2 * row + 2, 1]), picture)
    return _encoded(figure)


def write_frontier(document: PlanDocument, path: Path) -> None:
    """Write the frontier of each graph to ``path``. Raises ToolMissing as `png`, and PlanFileError if it cannot be written."""
    pictures = pictures_of(document, source=str(path))[:MAX_GRAPHS]
    figure = _figure(6.5, 4.5 * len(pictures))
    for row, picture in enumerate(pictures):
        _draw_frontier(figure.add_subplot(len(pictures), 1, row + 1), picture)
    write_file(str(path), _encoded(figure), what="picture")


def write_batches(points: Sequence[BatchPoint], path: Path, *, budget_bytes: int, batch: int, without: int) -> None:
    """Write peaks against batches to ``path``; ``batch`` and ``without`` are the largest that fit the budget, with a plan and without.

    Raises as `write_frontier`.
    """
    figure = _figure(7.5, 4.5)
    axis = figure.add_subplot()
    batches = [point.batch for point in points]
    for peaks, colour, title, largest in (
        ([point.unplanned.peak_bytes for point in points], "#667085", "without dyngran", without),
        ([point.least_peak_bytes for point in points], POINT_COLOUR, "least peak", batch),
    ):
        axis.plot(batches, peaks, "o-", color=colour, markersize=3.5, label=f"{title}: {largest} fit")
        axis.axvline(largest, color=colour, linewidth=0.8, linestyle=":")
    axis.axhline(budget_bytes, color=BUDGET_COLOUR, linewidth=1.2, linestyle="--", label=f"budget {format_bytes(budget_bytes)}")
    _in_bytes(axis.yaxis, axis.get_ylim()[1], num_ticks=5)
    axis.set_title("peak of the step against batch", fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8)
    write_file(str(path), _encoded(figure), what="picture")


def _figure(width_inches: float, height_inches: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ToolMissing("a picture needs matplotlib, which is not installed: run `pip install matplotlib`.") from error
    return Figure(figsize=(width_inches, height_inches), dpi=DPI, layout="constrained")


def _encoded(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    file = io.BytesIO()
    FigureCanvasAgg(figure)  # the figure draws on it
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw_memory(axes: Sequence[Axes], picture: GraphPicture) -> None:
    colours = palette()
    budget_bytes = picture.plan.budget_bytes
    top_bytes = max(picture.before.peak_bytes, picture.after.peak_bytes, 1)
    is_near = budget_bytes is not None and budget_bytes <= NEAR * top_bytes
    if is_near and budget_bytes is not None:
        top_bytes = max(top_bytes, budget_bytes)
    seen: dict[str, str] = {}
    for axis, step in zip(axes, (picture.before, picture.after), strict=True):
        positions = _highest_positions(step.total_bytes)
        edges = [*positions, len(step.total_bytes)]
        below = [0] * len(edges)
        for band, sizes in step.bands:
            above = [bottom + size for bottom, size in zip(below, [*(sizes[p] for p in positions), sizes[-1] if sizes else 0], strict=True)]
            label = "" if band in seen else band
            axis.fill_between(edges, below, above, step="post", color=colours[band], linewidth=0, label=label)
            seen[band] = colours[band]
            below = above
        axis.axvline(step.live.num_forward, color="#667085", linewidth=0.8, linestyle=":")
        if is_near and budget_bytes is not None:
            axis.axhline(budget_bytes, color=BUDGET_COLOUR, linewidth=1.2, linestyle="--")
        title = f"{step.title}: peak {format_bytes(step.peak_bytes)}, {format_us(step.time_us)}"
        axis.set_title(f"{picture.title} {title}".strip(), fontsize=10, loc="left")
        axis.set_xlim(0, max(len(step.total_bytes), 1))
        axis.set_ylim(0, 1.05 * top_bytes)
        _in_bytes(axis.yaxis, top_bytes, num_ticks=5)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel("position in the step (dotted: forward | backward)", fontsize=8)
    handles = [handle for axis in axes for handle in axis.get_legend_handles_labels()[0]]
    labels = [label for axis in axes for label in axis.get_legend_handles_labels()[1]]
    axes[1].legend(handles, labels, fontsize=8, ncols=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)


def _in_bytes(axis: Axis, span_bytes: float, *, num_ticks: int) -> None:
    """Ticks at round numbers of binary units."""
    from matplotlib.ticker import MultipleLocator

    least_bytes = max(span_bytes / num_ticks, 1.0)
    unit = 1024 ** int(log(least_bytes, 1024))
    step = next((nice * unit for nice in (1, 2, 5, 10, 20, 50, 100, 200, 500) if nice * unit >= least_bytes), 1024 * unit)
    axis.set_major_locator(MultipleLocator(step))
    axis.set_major_formatter(lambda size, _: format_bytes(size))


def _highest_positions(sizes: Sequence[int]) -> list[int]:
    """Positions that stand for all: of each of at most `MAX_COLUMNS` equal parts the highest."""
    length = len(sizes)
    count = min(length, MAX_COLUMNS)
    edges = [part * length // count for part in range(count + 1)] if count else []
    return [max(range(start, end), key=sizes.__getitem__) for start, end in pairwise(edges)]


def _draw_frontier(axis: Axes, picture: GraphPicture) -> None:
    points, plan, before = picture.frontier, picture.plan, picture.before
    axis.plot([size for size, _ in points], [time for _, time in points], "o-", color=POINT_COLOUR, markersize=3.5, label="plans known")
    axis.plot([before.peak_bytes], [before.time_us], "s", color="#667085", markerfacecolor="none", label=before.title)
    axis.plot([plan.peak_bytes], [plan.time_us], "o", color=BUDGET_COLOUR, markersize=8, label="this plan")
    if plan.budget_bytes is not None and plan.budget_bytes <= NEAR * max(before.peak_bytes, *(size for size, _ in points)):
        axis.axvline(plan.budget_bytes, color=BUDGET_COLOUR, linewidth=1.2, linestyle="--", label="budget")
    axis.set_title("peak against time", fontsize=10, loc="left")
    low, high = axis.get_xlim()
    _in_bytes(axis.xaxis, high - low, num_ticks=4)
    axis.yaxis.set_major_formatter(lambda time, _: format_us(time))
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
