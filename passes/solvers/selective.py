"""Selective checkpoint: keep results that are dear to make again for their bytes, recompute the rest.

Swept three ways: by cost per byte of each value; by operator (all results of matmuls, convolutions, attention and so on, in the order of
their cost per byte), which is what a person writes with torch's selective activation checkpoint
(`create_selective_checkpoint_contexts`); and by operator but only every second result of matmuls, as torchtitan's
``selective_ac_option = "op"`` does. Each alone (one region around everything) and inside a checkpoint of each region.
"""

from __future__ import annotations

from collections.abc import Iterator

from dyngran.passes.plan import Plan
from dyngran.passes.problem import Problem
from dyngran.passes.regions import find_separators
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.boundaries import crossing_values, natural_boundaries
from dyngran.passes.solvers.region import small_values
from dyngran.passes.solvers.solving import solve_with

MAX_THRESHOLDS = 16
MAX_TARGETS = 12
MATMULS = ("mm", "addmm", "bmm", "baddbmm")


def propose(simulator: Simulator, *, budget_bytes: int | None = None) -> Iterator[frozenset[int]]:
    """Each kept set with small values, alone and inside a per-region checkpoint; the same for every budget."""
    problem = simulator.problem
    crossings = simulator.crossings
    small = small_values(simulator)
    borders = dict.fromkeys(
        crossing_values(crossings, found) for found in (find_separators(crossings), natural_boundaries(problem, crossings))
    )
    for kept in (frozenset[int](), *_kept_sets(simulator)):
        yield kept | small
        for border in borders:
            if border:
                yield kept | small | border


def _kept_sets(simulator: Simulator) -> Iterator[frozenset[int]]:
    density, by_target = _densities(simulator)
    ranked = sorted(density, key=lambda value: (-density[value], value))
    step = max(1, len(ranked) // MAX_THRESHOLDS)
    for end in range(step, len(ranked), step):
        yield frozenset(ranked[:end])
    targets = sorted(by_target, key=lambda target: (-sum(density[v] for v in by_target[target]) / len(by_target[target]), target))
    kept: frozenset[int] = frozenset()
    for target in targets[:MAX_TARGETS]:
        kept |= frozenset(by_target[target])
        yield kept
    matmuls = sorted(value for target in targets if _is_matmul(target) for value in by_target[target])
    if len(matmuls) > 1:
        others = frozenset(value for target in targets if not _is_matmul(target) for value in by_target[target])
        yield frozenset(matmuls[::2])
        yield others | frozenset(matmuls[::2])


def _densities(simulator: Simulator) -> tuple[dict[int, float], dict[str, list[int]]]:
    """Per candidate the cost per byte (us) of the op that makes it, and per operator that does not fuse what it makes."""
    problem = simulator.problem
    density: dict[int, float] = {}
    by_target: dict[str, list[int]] = {}
    for value in simulator.candidates:
        producer = problem.values[value].producer
        assert producer is not None
        op = problem.ops[producer]
        density[value] = op.cost_us / max(sum(problem.values[write].size_bytes for write in op.writes), 1)
        if not op.fusible and op.cost_us > 0:
            by_target.setdefault(op.target, []).append(value)
    return density, by_target


def _is_matmul(target: str) -> bool:
    return any(part in MATMULS for part in target.split("."))


def solve(problem: Problem, budget_bytes: int | None) -> Plan:
    """The fastest of these plans for a budget (bytes, static bytes included; None: no limit). Raises BudgetTooSmall if none fits."""
    return solve_with(propose, "selective", problem, budget_bytes)
