"""Planners side by side on graphs from files: what each finds for a budget, how fast the step is, how long the planner took.

    python bench/plan.py llama350m.json.gz --fractions 0.9 0.5
    python bench/plan.py resnet152.json.gz --solver auto --solver mutwo --json rows.jsonl
    python bench/plan.py vitl.json.gz --solver auto --profile        # where the planner's time goes

A budget is a share of the free transient: the peak of torch's own partition, static bytes excluded. Every solver starts from the
problem alone; its first budget pays for its search.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dyngran.passes.errors import BudgetTooSmall, format_bytes
from dyngran.passes.problem import Problem
from dyngran.passes.solvers.portfolio import SOLVERS, Planner

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # `python -P` leaves the script's own folder out

from graphs import load_problems  # noqa: E402  # found by the line above

Row = dict[str, object]


def rows_of(graph: str, problem: Problem, solver: str, fractions: list[float]) -> Iterator[Row]:
    """One row per budget, largest first. ``peak_bytes`` and ``cost_us`` are None where the solver has no plan that fits."""
    planner = Planner(problem)
    free = planner.solve(None, solver="stock" if problem.fused else "default")
    for fraction in sorted(fractions, reverse=True):
        budget_bytes = free.static_bytes + int(fraction * free.transient_bytes)
        row: Row = {"graph": graph, "nodes": len(problem.ops), "solver": solver, "fraction": fraction, "budget_bytes": budget_bytes}
        start = time.perf_counter()
        try:
            plan = planner.solve(budget_bytes, solver=solver)
            row |= {"peak_bytes": plan.peak_bytes, "cost_us": plan.time_us, "truncated": plan.truncated}
        except BudgetTooSmall as refusal:
            row |= {"peak_bytes": None, "cost_us": None, "least_peak_bytes": refusal.least_peak_bytes}
        yield {**row, "free_peak_bytes": free.peak_bytes, "free_cost_us": free.time_us, "seconds": round(time.perf_counter() - start, 3)}


def shown(row: Row) -> str:
    """One line for a person."""
    budget_bytes, peak_bytes, cost_us, free_us = row["budget_bytes"], row["peak_bytes"], row["cost_us"], row["free_cost_us"]
    assert isinstance(budget_bytes, int) and isinstance(free_us, float)
    found = "no plan fits" if not isinstance(peak_bytes, int) else f"peak {format_bytes(peak_bytes):>10}"
    cost = "" if not isinstance(cost_us, float) else f"cost {cost_us / 1e3:9.3f} ms ({(cost_us - free_us) / 1e3:+.3f})"
    return (
        f"{row['graph']:24} {row['nodes']:>6} ops  {row['solver']:10} {row['fraction']:4.0%}  budget {format_bytes(budget_bytes):>10}  "
        f"{found}  {cost}  {row['seconds']} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="+", type=Path, metavar="GRAPH", help="joint graphs as JSON, gzipped or not")
    parser.add_argument("--solver", action="append", choices=SOLVERS, help="may be given more than once; all of them if it is not")
    parser.add_argument(
        "--fractions", nargs="+", type=float, default=[0.9, 0.7, 0.5, 0.3, 0.2], help="budgets as shares of the free transient"
    )
    parser.add_argument(
        "--eager", action="store_true", help="every op is a kernel, as under codegen='eager'; else ops fuse, as under Inductor"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="append every row to this file")
    parser.add_argument("--profile", action="store_true", help="print which functions the time went into")
    args = parser.parse_args()
    profile = cProfile.Profile()
    for path in args.graphs:
        try:
            problems = load_problems(path, fused=not args.eager)
        except (OSError, ValueError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        for place, problem in enumerate(problems):
            name = path.name.split(".")[0] + (f"#{place}" if len(problems) > 1 else "")
            for solver in args.solver or SOLVERS:
                if args.profile:
                    profile.enable()
                for row in rows_of(name, problem, solver, args.fractions):
                    print(shown(row), flush=True)
                    if args.json is not None:
                        with args.json.open("a") as file:
                            file.write(json.dumps(row) + "\n")
                profile.disable()
    if args.profile:
        pstats.Stats(profile).strip_dirs().sort_stats("cumulative").print_stats(25)
    return 0


if __name__ == "__main__":
    sys.exit(main())
