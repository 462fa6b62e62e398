"""What torch's own partitioners save for this graph (`Problem.stock`), so that dyngran is never worse than they are."""

from __future__ import annotations

from collections.abc import Iterator

from dyngran.passes.plan import Plan
from dyngran.passes.problem import Problem
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.solving import solve_with


def propose(simulator: Simulator, *, budget_bytes: int | None = None) -> Iterator[frozenset[int]]:
    """One plan for each stock partition, by name; if none is known, the default one, which is the simplest of them."""
    if not simulator.problem.stock:
        yield simulator.default_saved
    for name in sorted(simulator.problem.stock):
        yield simulator.problem.stock[name]


def solve(problem: Problem, budget_bytes: int | None) -> Plan:
    """The fastest of these plans for a budget (bytes, static bytes included; None: no limit). Raises BudgetTooSmall if none fits."""
    return solve_with(propose, "stock", problem, budget_bytes)
