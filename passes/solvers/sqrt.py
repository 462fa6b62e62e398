"""Sublinear memory cost (Chen, Xu, Zhang and Guestrin 2016): n regions in about sqrt(n) segments, the values between them kept.

Three readings of the paper, all in order of the graph and all recomputed once:

* every sqrt(n)-th boundary between regions (section 4.1, O(sqrt n) memory), with the root rounded down and up;
* about sqrt(n) segments that make equal bytes, where regions differ in size;
* algorithm 3, "memory planning with budget": a boundary is kept once more than b bytes were made since the last one, for six b from
  B / sqrt 2 to B sqrt 2 around B = sqrt(x y), with x the bytes kept and y the bytes of the largest segment of a first run.

Each is proposed with and without recompute of its last segment (algorithm 1 of the paper keeps that one).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isqrt, sqrt

from dyngran.passes.plan import Plan
from dyngran.passes.problem import Problem
from dyngran.passes.regions import Crossings, even_boundaries
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.boundaries import crossing_values, natural_boundaries, values_after
from dyngran.passes.solvers.solving import solve_with

NUM_GUESSES = 6


def propose(simulator: Simulator, *, budget_bytes: int | None = None) -> Iterator[frozenset[int]]:
    """The plans of all three readings, the same for every budget."""
    problem = simulator.problem
    crossings = simulator.crossings
    for chosen in dict.fromkeys(_chosen(problem, crossings)):
        kept = crossing_values(crossings, chosen)
        yield kept
        yield kept | values_after(simulator, crossings, chosen[-1])


def every_root(boundaries: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every sqrt(n)-th of the boundaries that cut forward into n regions, the root rounded down and up."""
    root = isqrt(len(boundaries) + 1)
    for stride in dict.fromkeys((root, root + (root * root <= len(boundaries)))):
        if boundaries[stride - 1 :: stride]:
            yield tuple(boundaries[stride - 1 :: stride])


def _chosen(problem: Problem, crossings: Crossings) -> Iterator[tuple[int, ...]]:
    boundaries = natural_boundaries(problem, crossings)
    if not boundaries:
        return
    yield from every_root(boundaries)
    even = even_boundaries(problem, crossings, max(2, isqrt(len(boundaries) + 1)))
    if even:
        yield even
    made = [sum(problem.values[write].size_bytes for write in problem.ops[index].writes) for index in crossings.ops]
    first, kept_bytes, segment_bytes = _plan_with_budget(crossings, boundaries, made, sum(made) / sqrt(len(boundaries) + 1))
    middle = sqrt(kept_bytes * segment_bytes)
    for guess in range(NUM_GUESSES):
        chosen, _, _ = _plan_with_budget(crossings, boundaries, made, middle * 2 ** (guess / (NUM_GUESSES - 1) - 0.5))
        if chosen:
            yield chosen
    if first:
        yield first


def _plan_with_budget(
    crossings: Crossings, boundaries: Sequence[int], made: Sequence[int], segment_bytes: float
) -> tuple[tuple[int, ...], int, int]:
    """Algorithm 3: the kept boundaries, the bytes kept there and those of the largest segment."""
    chosen: list[int] = []
    kept_bytes = largest_bytes = since_bytes = start = 0
    for boundary in boundaries:
        since_bytes += sum(made[start : boundary + 1])
        start = boundary + 1
        largest_bytes = max(largest_bytes, since_bytes)
        if since_bytes > segment_bytes:
            chosen.append(boundary)
            kept_bytes += crossings.num_bytes[boundary]
            since_bytes = 0
    return tuple(chosen), kept_bytes, max(largest_bytes, since_bytes + sum(made[start:]))


def solve(problem: Problem, budget_bytes: int | None) -> Plan:
    """The fastest of these plans for a budget (bytes, static bytes included; None: no limit). Raises BudgetTooSmall if none fits."""
    return solve_with(propose, "sqrt", problem, budget_bytes)
