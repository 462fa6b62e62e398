"""What `bench/plan.py` prints: a line per row, all solvers side by side per graph, and where a search's seconds went."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from rows import BestKnown, Notes, Row

from dyngran.passes.errors import format_bytes

CELL = 18


def shown(row: Row) -> str:
    """One line for a row of one budget."""
    who = row["solver"] if row["found_by"] in (None, row["solver"]) else f"{row['solver']} ({row['found_by']})"
    start = (
        f"{row['graph'][:32]:32} {row['nodes']:>6} ops  {who:23} {row['fraction']:4.0%}  budget {_amount(row, row['budget_bytes']):>10}  "
    )
    end = f"{'  cut short' if row['truncated'] else ''}  {row['seconds']:.3f} s"
    if row["cost_us"] is None:
        impossible = row.get("floor_bytes", 0) > row["budget_bytes"]
        why = f"no order can: one op needs {_amount(row, row['floor_bytes'])}" if impossible else "no plan fits"
        return f"{start}{why}, least peak it knows {_amount(row, row['least_peak_bytes'])}{end}"
    over = "" if row["over_best"] is None else f"  over best {row['over_best']:+.3%}"
    gap = f"  gap {row['gap']:.1%} ({row['bound'].partition(':')[0]})" if row["bound"] else ""
    return f"{start}peak {_amount(row, row['peak_bytes']):>10}  {_cost(row)}{gap}{over}{end}"


def shown_saved(row: Row) -> str:
    """One line for a saved set from elsewhere."""
    if row["auto_cost_us"] is None:
        own = "auto has no plan at that peak"
    else:
        own = f"auto {row['auto_cost_us'] / 1e3:.3f} ms ({(row['auto_cost_us'] - row['cost_us']) / row['free_cost_us']:+.3%} of a step)"
    head = f"{row['graph'][:32]:32} {row['nodes']:>6} ops  {row['solver']:23}"
    return f"{head} peak {format_bytes(row['peak_bytes']):>10}  cost {row['cost_us'] / 1e3:.3f} ms, {own}"


def shown_frontier(row: Row) -> str:
    """Every budget of a frontier, and a line for all of them."""
    lines = [f"{row['graph'][:32]:32} {row['nodes']:>6} ops  {row['solver']}:"]
    for budget_bytes, peak_bytes, cost_us in row["points"]:
        found = "no plan fits" if cost_us is None else f"peak {format_bytes(peak_bytes):>10}  cost {cost_us / 1e3:10.3f} ms"
        lines.append(f"    budget {format_bytes(budget_bytes):>10}  {found}")
    num_found = sum(cost_us is not None for _, _, cost_us in row["points"])
    end = f"    frontier of {row['frontier']} budgets, {num_found} with a plan"
    return "\n".join([*lines, f"{end}{', cut short' if row['truncated'] else ''}, {row['seconds']:.3f} s"])


def side_by_side(rows: Sequence[Row], notes: Notes) -> str:
    """A table of one graph's rows: solvers down, budgets across; published results and the best known below."""
    fractions = sorted({row["fraction"] for row in rows}, reverse=True)
    by_place = {(row["solver"], row["fraction"]): row for row in rows}
    first = rows[0]
    what = "duration increase in %" if "published" in first else "cost over free in ms"
    least = {
        one: min((row["cost_us"] for row in rows if row["fraction"] == one and row["cost_us"] is not None), default=None)
        for one in fractions
    }
    lines = [
        f"{first['graph']}, {'fused' if first['fused'] else 'not fused'}: {what}, seconds; * least of this run, - no plan fits",
        f"{'':14}" + "".join(f"{fraction:>{CELL}.0%}" for fraction in fractions),
    ]
    solvers = tuple(dict.fromkeys(row["solver"] for row in rows))
    without = [solver for solver in solvers if all(row["cost_us"] is None for row in rows if row["solver"] == solver)]
    for solver in solvers:
        if solver in without:
            continue
        cells = [_cell(by_place[solver, one], least[one]) if (solver, one) in by_place else "" for one in fractions]
        lines.append(_line(solver, cells))
    if without:
        lines.append(f"no plan at any of these budgets: {', '.join(without)}")
    if "published" in first:
        found = {one: notes.published(first["graph"], one) for one in fractions}
        for name in dict.fromkeys(name for one in fractions for name in found[one]):
            cells = [f"{found[one][name][0]:+.3f} {found[one][name][2]:7.1f} " if name in found[one] else "" for one in fractions]
            lines.append(_line(name, cells))
    of_fraction = {row["fraction"]: row for row in rows}
    best = {one: notes.best.of(of_fraction[one]) for one in fractions}
    if any(best.values()):
        cells = ["" if (entry := best[one]) is None else f"{_over(of_fraction[one], entry['cost_us'])} {'':8}" for one in fractions]
        lines.append(_line("best known", cells))
    return "\n".join([*lines, *_of_auto(rows, least, notes.best)])


def _of_auto(rows: Sequence[Row], least: dict[float, float | None], best: BestKnown) -> list[str]:
    """How far ``auto`` is from the best of the run and from the best known."""
    autos = [row for row in rows if row["solver"] == "auto"]
    missing = [f"{row['fraction']:.0%}" for row in autos if row["cost_us"] is None and least[row["fraction"]] is not None]
    planned = [row for row in autos if row["cost_us"] is not None]
    if not planned:
        return [f"auto has no plan where another solver has one: {', '.join(missing)}"] if missing else []
    beaten = max(
        (row["cost_us"] - (least[row["fraction"]] or 0.0)) / row["free_cost_us"] if row["free_cost_us"] else 0.0 for row in planned
    )
    lines = [f"auto is beaten by {beaten:.3%} of a step at most" + (f"; it has no plan at {', '.join(missing)}" if missing else "")]
    over = [share for row in planned if (share := best.over(row)) is not None]
    return [*lines, f"auto costs {max(over):.3%} more than the best known at most"] if over else lines


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name:14}" + "".join(f"{cell:>{CELL}}" for cell in cells)


def _cell(row: Row, least_us: float | None) -> str:
    if row["cost_us"] is None:
        return f"- {row['seconds']:7.2f} "
    return f"{_over(row, row['cost_us'])} {row['seconds']:7.2f}{'*' if row['cost_us'] == least_us else ' '}"


def _over(row: Row, cost_us: float) -> str:
    free_us = row["free_cost_us"]
    return f"{100 * (cost_us / free_us - 1) if 'published' in row else (cost_us - free_us) / 1e3:+.3f}"


def _amount(row: Row, num_bytes: int) -> str:
    """Bytes, or the share of the initial peak for graphs whose sizes may have no unit."""
    return f"{num_bytes / row['free_peak_bytes']:.2%}" if "published" in row else format_bytes(num_bytes)


def _cost(row: Row) -> str:
    if "published" not in row:
        return f"cost {row['cost_us'] / 1e3:9.3f} ms ({(row['cost_us'] - row['free_cost_us']) / 1e3:+.3f})"
    published = ", ".join(f"{name} {values[0]:+g}" for name, values in row["published"].items())
    return f"duration {row['increase_percent']:+8.3f} %" + (f" ({published})" if published else "")


class StageClock:
    """Seconds between the progress lines of a planner, by stage: what it hands to ``Planner(progress=...)`` is the clock itself."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage, self._since = "", 0.0

    def __call__(self, line: str) -> None:
        if " simulated)" not in line and "cut short" not in line:
            self.start(re.sub(r" \d+ bytes$", " each budget", line.removeprefix("planning: ")))

    def start(self, stage: str) -> None:
        """The time from here on belongs to ``stage``; "" is nobody's."""
        now = time.perf_counter()
        if self._stage:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now

    def table(self, title: str) -> str:
        """Longest stage first."""
        total = sum(self.seconds.values()) or 1.0
        lines = [f"{title}: seconds per stage of the search"]
        for stage, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]):
            lines.append(f"    {stage:32} {seconds:8.3f} s  {seconds / total:4.0%}")
        return "\n".join(lines)
