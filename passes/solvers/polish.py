"""Polishing: from the best plan known for each of a ladder of budgets, moves that the simulator judges exactly.

Each rung of the ladder is one walk (`passes/native/search.cpp`) that keeps to its budget; whatever a walk meets goes into the archive, so
that one rung also serves the others. The rungs do not depend on the budget that a person asked for, so neither does the frontier. They
run side by side on the cores there are; each walk depends on its own start alone, so the result is the same on any number of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from dyngran.passes.archive import Judge
from dyngran.passes.moves import LARGE, move_classes, side_by_side
from dyngran.passes.native.graph import NativeOutcome, NativeSearch, Stop, Walk
from dyngran.passes.simulate import Simulator, free_transient
from dyngran.passes.solvers.anneal import walk_settings

NAME = "polish"
NUM_RUNGS = 40
WORK, WORK_IF_LARGE = 60_000_000, 25_000_000  # op visits of all walks together
MAX_EVALUATIONS = 2000  # per walk, or one for each op if those are fewer
THRESHOLDS = (5e-5, 0.0)  # of the step, one sweep over the ladder each
LOWER = 0.98  # the lowest rungs ask for less than the least peak known


def rungs(judge: Judge, num_rungs: int = NUM_RUNGS) -> list[int]:
    """Budgets (static bytes included): ``num_rungs`` even shares of the free transient, from just below the least peak known."""
    static = judge.simulator.problem.total_static_bytes
    entries = judge.archive.frontier()
    least = entries[0].outcome.peak_bytes - static
    even = free_transient(judge.simulator)
    steps = [even * step // num_rungs for step in range(1, num_rungs + 1)]
    return [static + rung for rung in sorted({int(least * LOWER**2), int(least * LOWER), *(step for step in steps if step > least)})]


def polish(judge: Judge, stop: Stop) -> None:
    """Walk every rung, twice: first with room for detours, then downhill only."""
    simulator = judge.simulator
    problem = simulator.problem
    classes = move_classes(problem, simulator.candidates)
    if not classes:
        return
    for sweep, threshold in enumerate(THRESHOLDS):
        budgets = rungs(judge)
        num_visits = (WORK if len(problem.ops) <= LARGE else WORK_IF_LARGE) // len(THRESHOLDS) // len(budgets)
        count = min(MAX_EVALUATIONS, len(problem.ops))
        starts = [_start(judge, budget_bytes) for budget_bytes in budgets]

        walks = [
            (
                start,
                walk_settings(
                    simulator,
                    budget_bytes,
                    threshold=threshold,
                    num_evaluations=count,
                    num_visits=num_visits,
                    seed=sweep * len(budgets) + place,
                ),
            )
            for place, (budget_bytes, start) in enumerate(zip(budgets, starts, strict=True))
        ]
        pool = _Pool(simulator)
        side_by_side(partial(_walk, pool, classes, stop), walks, stop, lambda walked: judge.take(*walked, NAME))


class _Pool:
    """Searches that walks take and give back: what one has replayed before has no influence on what the next finds."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._idle: list[NativeSearch] = []

    @contextmanager
    def search(self) -> Iterator[NativeSearch]:
        try:
            search = self._idle.pop()
        except IndexError:
            search = NativeSearch(self._simulator.native_graph)
        yield search
        self._idle.append(search)


def _walk(
    pool: _Pool, classes: Sequence[Sequence[int]], stop: Stop, walk: tuple[bytes, Walk]
) -> tuple[list[tuple[bytes, NativeOutcome]], int]:
    with pool.search() as search:
        num_evaluations = search.walk(walk[0], classes, walk[1], stop)
        return search.take(), num_evaluations


def _start(judge: Judge, budget_bytes: int) -> bytes:
    entry = judge.archive.best(budget_bytes) or judge.archive.least()
    assert entry is not None
    return judge.simulator.native.mask(entry.outcome.saved)
