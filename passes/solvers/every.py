"""Checkpoint every N regions, as a person would (`torch.utils.checkpoint` around every N blocks), for every N.

What crosses each N-th boundary is kept, everything else is recomputed, region by region as backward reaches it. Each N is proposed
twice: with the regions after the last kept boundary recomputed as well, and with them left out, as `checkpoint_sequential` does.
"""

from __future__ import annotations

from collections.abc import Iterator

from dyngran.passes.plan import Plan
from dyngran.passes.problem import Problem
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.boundaries import crossing_values, natural_boundaries, values_after
from dyngran.passes.solvers.solving import solve_with

MAX_STRIDES = 256  # above it only those N that differ in how many boundaries they keep, of which there are about 2 sqrt(n)


def propose(simulator: Simulator, *, budget_bytes: int | None = None) -> Iterator[frozenset[int]]:
    """Every N from 1 (per-region checkpoint) to the number of boundaries (one of them kept), the same for every budget."""
    crossings = simulator.crossings
    boundaries = natural_boundaries(simulator.problem, crossings)
    num_boundaries = len(boundaries)
    num_kept = 0
    for stride in range(1, num_boundaries + 1):
        if num_boundaries > MAX_STRIDES and num_boundaries // stride == num_kept:
            continue
        num_kept = num_boundaries // stride
        chosen = boundaries[stride - 1 :: stride]
        kept = crossing_values(crossings, chosen)
        yield kept
        yield kept | values_after(simulator, crossings, chosen[-1])


def solve(problem: Problem, budget_bytes: int | None) -> Plan:
    """The fastest of these plans for a budget (bytes, static bytes included; None: no limit). Raises BudgetTooSmall if none fits."""
    return solve_with(propose, "every", problem, budget_bytes)
