"""Checkpoint by region: keep what crosses chosen boundaries of the forward graph, recompute what lies between them.

Boundaries come from three families (valleys of the crossing bytes, the module labels, parts of equal bytes), each thinned to every
k-th: k = 1 is per-block checkpoint, k = sqrt(n) the plan of Chen et al. 2016 ("Training deep nets with sublinear memory cost"). With
k = 1 also only the first m regions are checkpointed, for every m, and the others left as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isqrt

from dyngran.passes.plan import Plan
from dyngran.passes.problem import Problem
from dyngran.passes.regions import Crossings, even_boundaries, find_separators, label_boundaries
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.boundaries import crossing_values, natural_boundaries, values_after
from dyngran.passes.solvers.solving import solve_with

HEAD_OPS = 10_000  # above it the variants with a saved head are left out
MAX_PARTIAL = 64  # numbers of regions checkpointed from the first on, if not all are
SMALL_SHARE = 0.005  # of the bytes the default plan saves: all small values together take no more


def small_values(simulator: Simulator) -> frozenset[int]:
    """The smallest candidates, as many as together are small beside what the default plan saves: they break chains for almost nothing."""
    values = simulator.problem.values
    room = SMALL_SHARE * sum(values[value].size_bytes for value in simulator.default_saved)
    small: set[int] = set()
    for value in sorted(simulator.candidates, key=lambda value: (values[value].size_bytes, value)):
        room -= values[value].size_bytes
        if room < 0:
            break
        small.add(value)
    return frozenset(small)


def boundary_families(problem: Problem, crossings: Crossings) -> Iterator[tuple[int, ...]]:
    """Sets of boundaries to keep, coarse ones included, without repetition."""
    seen: set[tuple[int, ...]] = set()
    for base in (find_separators(crossings), label_boundaries(problem, crossings), find_separators(crossings, rise=1.1)):
        for chosen in _thinned(base):
            if chosen not in seen:
                seen.add(chosen)
                yield chosen
    num_ops = len(crossings.ops)
    for num_regions in sorted({*range(2, 7), *(isqrt(num_ops) * n // 2 for n in range(1, 5)), num_ops // 4, num_ops // 2, num_ops}):
        chosen = even_boundaries(problem, crossings, num_regions)
        if chosen and chosen not in seen:
            seen.add(chosen)
            yield chosen


def _thinned(base: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every k-th of the boundaries, for the k that differ in how many they leave: about 2 sqrt(n) of them."""
    lengths: set[int] = set()
    for step in range(1, len(base) + 1):
        chosen = tuple(base[step - 1 :: step])
        if len(chosen) not in lengths:
            lengths.add(len(chosen))
            yield chosen


def propose(simulator: Simulator, *, budget_bytes: int | None = None) -> Iterator[frozenset[int]]:
    """Nothing saved, then each family: bare, with small values, and with the part after the last boundary left as it is; then the
    first m regions only. The same for every budget."""
    problem = simulator.problem
    crossings = simulator.crossings
    small = small_values(simulator)
    yield frozenset()
    yield small
    num_ops = len(problem.ops)
    for boundaries in boundary_families(problem, crossings):
        kept = crossing_values(crossings, boundaries)
        yield kept
        yield kept | small
        if num_ops <= HEAD_OPS and (head := values_after(simulator, crossings, boundaries[-1])) - kept:
            yield kept | small | head
    for base in dict.fromkeys((find_separators(crossings), natural_boundaries(problem, crossings))):
        for end in range(1, len(base), len(base) // MAX_PARTIAL + 1):
            yield crossing_values(crossings, base[:end]) | small | values_after(simulator, crossings, base[end - 1])


def solve(problem: Problem, budget_bytes: int | None) -> Plan:
    """The fastest of these plans for a budget (bytes, static bytes included; None: no limit). Raises BudgetTooSmall if none fits."""
    return solve_with(propose, "region", problem, budget_bytes)
