"""Selective checkpoint: keep results that are dear to make again for their bytes, recompute the rest.

Swept two ways: by cost per byte of each value, and by operator (all results of matmuls, convolutions, attention and so on, in the
order of their cost per byte), the latter being what a person writes with torch's selective activation checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

from dyngran.passes.regions import find_crossings, find_separators
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.region import small_values

MAX_THRESHOLDS = 16
MAX_TARGETS = 12


def _kept_sets(simulator: Simulator) -> Iterator[frozenset[int]]:
    problem = simulator.problem
    density: dict[int, float] = {}
    by_target: dict[str, list[int]] = {}
    for value in simulator.candidates:
        producer = problem.values[value].producer
        if producer is None:
            continue
        op = problem.ops[producer]
        written = sum(problem.values[write].size_bytes for write in op.writes)
        density[value] = op.cost_us / max(written, 1)
        if not op.fusible and op.cost_us > 0:
            by_target.setdefault(op.target, []).append(value)
    ranked = sorted(density, key=lambda value: (-density[value], value))
    step = max(1, len(ranked) // MAX_THRESHOLDS)
    for end in range(step, len(ranked), step):
        yield frozenset(ranked[:end])
    targets = sorted(by_target, key=lambda target: (-sum(density[v] for v in by_target[target]) / len(by_target[target]), target))
    kept: frozenset[int] = frozenset()
    for target in targets[:MAX_TARGETS]:
        kept |= frozenset(by_target[target])
        yield kept


def propose(simulator: Simulator, *, budget_bytes: int | None = None) -> Iterator[frozenset[int]]:
    """Each kept set with small values, alone and inside a per-region checkpoint."""
    crossings = find_crossings(simulator.problem)
    small = small_values(simulator)
    border: frozenset[int] = frozenset().union(*(crossings.at(boundary) for boundary in find_separators(crossings)))
    for kept in (frozenset[int](), *_kept_sets(simulator)):
        yield kept | small
        if border:
            yield kept | small | border
