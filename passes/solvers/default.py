"""Save everything that backward reads: no op runs twice."""

from __future__ import annotations

from collections.abc import Iterator

from dyngran.passes.plan import Plan
from dyngran.passes.problem import Problem
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.solving import solve_with


def propose(simulator: Simulator, *, budget_bytes: int | None = None) -> Iterator[frozenset[int]]:
    """One plan, the same for every budget."""
    yield simulator.default_saved


def solve(problem: Problem, budget_bytes: int | None) -> Plan:
    """The fastest of these plans for a budget (bytes, static bytes included; None: no limit). Raises BudgetTooSmall if none fits."""
    return solve_with(propose, "default", problem, budget_bytes)
