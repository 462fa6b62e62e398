"""Rows of `bench/plan.py`: what is planned, one row per graph, solver and budget, and the least costs that are known.

Definitions. A joint graph's budget is static bytes plus a share of the free transient: the peak of torch's own partition (of the plan that
saves everything where ops do not fuse or torch's partition is not known), static bytes excluded. A node-link graph's is a share of its
initial order's peak, rounded up, and cost and peak are those of `bench/node_link.py`, which are Moccasin's. Cost is device time of
forward and backward in us for joint graphs, the sum of the durations of all runs in the file's units for node-link graphs.
"""

from __future__ import annotations

import gzip
import json
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import graphs
import long_anneal
import node_link

from dyngran.passes.errors import BudgetTooSmall
from dyngran.passes.plan import Plan
from dyngran.passes.problem import Problem
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.portfolio import LOOK_AT_BUDGET, Planner

Row = dict[str, Any]
MakePlanner = Callable[[Problem], Planner]
SAME_COST = 1e-6  # relative: costs of one plan under one pricing
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem under the name that rows call it by."""

    graph: str
    problem: Problem
    is_node_link: bool = False

    def budget_bytes(self, free: Plan, fraction: float) -> int:
        if self.is_node_link:
            return math.ceil(fraction * free.peak_bytes)
        return free.static_bytes + int(fraction * free.transient_bytes)

    @property
    def free_solver(self) -> str:
        """Whose plan is the free one."""
        return "stock" if self.problem.fused else "default"

    @property
    def head(self) -> Row:
        """What every row of this case begins with."""
        return {"graph": self.graph, "nodes": len(self.problem.ops), "fused": self.problem.fused}


def load_cases(path: Path, *, fused: bool) -> list[Case]:
    """The problems of a file of joint graphs or of a node-link graph, gzipped or not. Raises OSError or ValueError with what is wrong."""
    content = path.read_bytes()
    document = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    stem = path.name.removesuffix(".gz").removesuffix(".json")
    keys = [key for key in ("graphs", "nodes", "links") if isinstance(document, dict) and isinstance(document.get(key), list)]
    if "graphs" in keys:
        problems = graphs.load_problems(path, fused=fused)
        if not problems:
            raise ValueError("the list 'graphs' is empty")
        names = [stem if len(problems) == 1 else f"{stem}#{place}" for place in range(len(problems))]
        return [Case(graph=name, problem=problem) for name, problem in zip(names, problems, strict=True)]
    if keys == ["nodes", "links"]:
        return [Case(graph=stem, problem=node_link.node_link_problem(document), is_node_link=True)]
    raise ValueError("this is neither an export of joint graphs (no list 'graphs') nor a node-link graph (no lists 'nodes' and 'links')")


def rows_of(
    case: Case, solver: str, fractions: Sequence[float], *, planner: MakePlanner, notes: Notes, num_annealed: int = 0
) -> Iterator[Row]:
    """One row per budget, largest first. ``seconds`` of the first include building the planner and its search.

    ``peak_bytes`` and ``cost_us`` are None where the solver has no plan that fits. ``num_annealed`` belongs to `long_anneal`.
    """
    start = time.perf_counter()
    made = planner(case.problem)
    free = made.solve(None, solver=case.free_solver)
    for place, fraction in enumerate(sorted(fractions, reverse=True)):
        budget_bytes = case.budget_bytes(free, fraction)
        row: Row = {**case.head, "solver": solver, "fraction": fraction, "budget_bytes": budget_bytes}
        if num_annealed:
            _planned(made, "auto", budget_bytes)  # annealing starts from what it finds
            long_anneal.improve(made, budget_bytes, num_annealed)
        row |= _planned(made, "auto" if num_annealed else solver, budget_bytes)
        seconds = time.perf_counter() - start
        row |= {"free_peak_bytes": free.peak_bytes, "free_cost_us": free.time_us}
        row["cost_without_budget_us"] = _cost_without_budget(made, "auto" if num_annealed else solver, free)
        row |= {"first_budget": place == 0, "seconds": round(seconds, 3), "max_rss_bytes": max_rss_bytes()}
        yield notes.added(case, row)
        start = time.perf_counter()


def replay_line(case: Case, *, num_plans: int = 100) -> str:
    """Milliseconds in which the next plan is simulated, by how much it differs from the one before."""
    simulator = Simulator(case.problem)
    native, everything, rng = simulator.native, simulator.candidates, Random(0)
    if not everything:
        return f"{case.graph}: nothing crosses to backward, so there is nothing to simulate again"

    def mean_ms(num_differing: int) -> float:
        saved, masks = simulator.default_saved, []
        for _ in range(num_plans):
            saved ^= frozenset(rng.sample(everything, num_differing))
            masks.append(native.mask(saved))
        start = time.perf_counter()
        for mask in masks:
            native.evaluate(mask)
        return (time.perf_counter() - start) * 1e3 / num_plans

    simulator.evaluate(simulator.default_saved)
    one, half = mean_ms(1), mean_ms(max(1, len(everything) // 2))
    return f"{case.graph}: the next plan is simulated in {one:.3f} ms if one value differs, in {half:.3f} ms if half of them do"


def load_saved(path: Path, case: Case) -> tuple[int, ...]:
    """Values of a case that a file ``{"saved": [name, ...]}`` keeps. Raises OSError or ValueError, which names the file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    names = document.get("saved") if isinstance(document, dict) else None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: no list 'saved' of names")
    place = {value.name: value.index for value in case.problem.values}
    unknown = [name for name in names if name not in place]
    if unknown:
        raise ValueError(f"{path}: {len(unknown)} of {len(names)} names are no values of {case.graph}, the first is {unknown[0]!r}")
    return tuple(place[name] for name in names)


def saved_row(case: Case, path: Path, *, planner: MakePlanner) -> Row:
    """A saved set from elsewhere, and in ``auto_*`` what `auto` has for the peak that it reaches. Raises as `load_saved`."""
    start = time.perf_counter()
    made = planner(case.problem)
    outcome = made.simulator.evaluate(load_saved(path, case))
    free = made.solve(None, solver=case.free_solver)
    row: Row = {**case.head, "solver": path.stem, "saved_by": path.name, "peak_bytes": outcome.peak_bytes, "cost_us": outcome.time_us}
    row |= {"free_peak_bytes": free.peak_bytes, "free_cost_us": free.time_us}
    own = _planned(made, "auto", outcome.peak_bytes)
    row |= {"auto_peak_bytes": own["peak_bytes"], "auto_cost_us": own["cost_us"], "truncated": own["truncated"]}
    return {**row, "seconds": round(time.perf_counter() - start, 3), "max_rss_bytes": max_rss_bytes()}


def _planned(made: Planner, solver: str, budget_bytes: int) -> Row:
    """What a solver has for a budget, or the least peak that it knows of."""
    try:
        plan = made.solve(budget_bytes, solver=solver)
    except BudgetTooSmall as refusal:
        nothing = dict.fromkeys(("found_by", "peak_bytes", "cost_us", "bound_us", "bound", "gap"))
        return {**nothing, "least_peak_bytes": refusal.least_peak_bytes, "truncated": made.truncated}
    row: Row = {"found_by": plan.solver, "peak_bytes": plan.peak_bytes, "cost_us": plan.time_us}
    return {**row, "bound_us": plan.bound_us, "bound": plan.bound, "gap": round(plan.gap, 6), "truncated": plan.truncated}


def frontier_row(case: Case, solver: str, num_budgets: int, *, planner: MakePlanner) -> Row:
    """``num_budgets`` budgets evenly from the least peak that the solver knows of after the free one, timed from scratch.

    ``points`` are (budget, peak, cost), the last two None where no plan fits. A node-link graph's least is the largest sum of one op's
    operands and result, below which nothing can be.
    """
    start = time.perf_counter()
    made = planner(case.problem)
    free = made.solve(None, solver=case.free_solver)
    least_bytes = node_link.least_peak_bytes(case.problem) if case.is_node_link else _least_peak_bytes(made, solver, free)
    points: list[tuple[int, int | None, float | None]] = []
    for place in range(num_budgets):
        budget_bytes = least_bytes + round(place / max(1, num_budgets - 1) * (free.peak_bytes - least_bytes))
        try:
            plan = made.solve(budget_bytes, solver=solver)
            points.append((budget_bytes, plan.peak_bytes, plan.time_us))
        except BudgetTooSmall:
            points.append((budget_bytes, None, None))
    row: Row = {**case.head, "solver": solver, "frontier": num_budgets, "seconds": round(time.perf_counter() - start, 3)}
    row |= {"free_peak_bytes": free.peak_bytes, "free_cost_us": free.time_us, "truncated": made.truncated}
    return {**row, "max_rss_bytes": max_rss_bytes(), "points": points}


def _least_peak_bytes(made: Planner, solver: str, free: Plan) -> int:
    try:
        made.solve(free.peak_bytes, solver=solver)
    except BudgetTooSmall as refusal:
        return refusal.least_peak_bytes
    least = (made.judge.archive if solver == "auto" else made.judge.by_solver[solver]).least()
    assert least is not None  # a plan was found
    return min(least.outcome.peak_bytes, free.peak_bytes)


def _cost_without_budget(made: Planner, solver: str, free: Plan) -> float:
    """Of the solver's fastest plan if it is known without another search, else of the free plan."""
    archive = made.judge.archive if solver == "auto" else made.judge.by_solver.get(solver)
    fastest = None if archive is None or solver in LOOK_AT_BUDGET else archive.best(None)
    return free.time_us if fastest is None else fastest.outcome.time_us


def max_rss_bytes() -> int:
    """Most memory that this process has had, torch and earlier graphs included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class BestKnown:
    """The least cost known for a graph, codegen and fraction, in a file with one entry a line; it is lowered, never raised.

    An entry stands for a row if its plan fits into the row's budget and the free plan costs the same: a best of other prices says nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Row] = json.loads(path.read_text()) if path.exists() else {}

    @staticmethod
    def key(row: Row) -> str:
        return f"{row['graph']} {'fused' if row['fused'] else 'eager'} {row['fraction']:g}"

    def of(self, row: Row) -> Row | None:
        entry = self.entries.get(self.key(row))
        stands = entry is not None and entry["peak_bytes"] <= row["budget_bytes"]
        return entry if stands and math.isclose(entry["free_cost_us"], row["free_cost_us"], rel_tol=SAME_COST) else None

    def over(self, row: Row) -> float | None:
        """By which share a row's plan costs more than the best known; None if there is no plan or no best."""
        entry = self.of(row)
        if entry is None or row["cost_us"] is None:
            return None
        return row["cost_us"] / entry["cost_us"] - 1 if entry["cost_us"] else 0.0

    def lower(self, row: Row) -> bool:
        """Take the row's plan if nothing better is known. An entry that does not stand for this row is left alone: delete it by hand."""
        known = self.entries.get(self.key(row))
        if row["cost_us"] is None or (known is not None and (self.of(row) is None or known["cost_us"] <= row["cost_us"])):
            return False
        kept = ("cost_us", "peak_bytes", "budget_bytes", "free_cost_us")
        self.entries[self.key(row)] = {"solver": row["found_by"], **{name: row[name] for name in kept}}
        return True

    def write(self) -> None:
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(self.entries[key])}" for key in sorted(self.entries))
        written = self.path.with_name(self.path.name + ".new")
        written.write_text(f"{{\n{lines}\n}}\n")
        written.replace(self.path)


class Notes:
    """What a row is compared with: the best known, and what others have published for the graph."""

    def __init__(self, best: BestKnown, published: Path = _HERE / "published.json") -> None:
        self.best = best
        rows = json.loads(published.read_text())["rows"] if published.exists() else []
        self._published = {(row["graph"], row["fraction"]): row for row in rows}

    def published(self, graph: str, fraction: float) -> dict[str, Sequence[float]]:
        """By planner: duration increase and peak in per cent, seconds; where it has a result that kept the budget."""
        row = self._published.get((graph, fraction), {})
        names = [name for name in row if name not in ("graph", "name", "fraction", "misses_budget")]
        return {name: row[name] for name in names if row[name] and name not in row.get("misses_budget", [])}

    def added(self, case: Case, row: Row) -> Row:
        row["over_best"] = self.best.over(row)
        if case.is_node_link:
            row["floor_bytes"] = node_link.least_peak_bytes(case.problem)
            found = row["cost_us"] is not None
            row["increase_percent"] = round(100 * (row["cost_us"] / row["free_cost_us"] - 1), 3) if found else None
            row["peak_percent"] = round(100 * row["peak_bytes"] / row["free_peak_bytes"], 2) if found else None
            row["published"] = self.published(case.graph, row["fraction"])
        return row
