"""A saved set from elsewhere made to fit: one walk from it, judged by the simulator, instead of a search."""

from __future__ import annotations

from collections.abc import Iterable

from dyngran.passes.moves import move_classes
from dyngran.passes.native.graph import NativeSearch, Stop
from dyngran.passes.simulate import Outcome, Simulator
from dyngran.passes.solvers.anneal import walk_settings

MAX_EVALUATIONS = 2000
NUM_VISITS = 2_000_000  # op visits: a fortieth of a search
THRESHOLD = 5e-5  # of the step


def repair(simulator: Simulator, saved: Iterable[int], budget_bytes: int) -> Outcome:
    """The fastest plan near ``saved`` whose peak, static bytes included, is at most the budget; if the walk meets none, the least."""
    start = simulator.evaluate(saved)
    classes = move_classes(simulator.problem, simulator.candidates)
    if not classes:
        return start
    search = NativeSearch(simulator.native_graph)
    settings = walk_settings(simulator, budget_bytes, threshold=THRESHOLD, num_evaluations=MAX_EVALUATIONS, num_visits=NUM_VISITS)
    search.walk(simulator.native.mask(start.saved), classes, settings, Stop())
    met = [start, *(simulator.evaluate(simulator.native.members(mask)) for mask, _ in search.take())]
    fitting = [one for one in met if one.peak_bytes <= budget_bytes]
    if fitting:
        return min(fitting, key=lambda one: (one.time_us, one.peak_bytes))
    return min(met, key=lambda one: (one.peak_bytes, one.time_us))
