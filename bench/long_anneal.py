"""Long annealing from the best plan of ``auto``: what lowers the best known costs beyond what planning in seconds finds.

Thresholds of acceptance fall from one walk to the next, each from the best plan so far; where ops do not fuse, a walk over the order of
ops follows. The number of plans is the limit, so the result is the same on every machine.
"""

from __future__ import annotations

from dyngran.passes.moves import move_classes
from dyngran.passes.native.graph import NativeSearch, Stop
from dyngran.passes.solvers.anneal import schedule_of, walk_settings
from dyngran.passes.solvers.order import anneal_order
from dyngran.passes.solvers.portfolio import Planner

NAME = "long-anneal"
THRESHOLDS = (1e-3, 3e-4, 1e-4, 3e-5, 0.0)  # of a step: by how much a plan may be worse at first
DAY = 86400.0


def improve(planner: Planner, budget_bytes: int, num_plans: int) -> None:
    """Give what ``num_plans`` more plans, or moves over orders, find for a budget to the archive of a planner that has searched."""
    simulator, judge = planner.simulator, planner.judge
    classes = move_classes(planner.problem, simulator.candidates)
    for seed, threshold in enumerate(THRESHOLDS if classes else ()):
        entry = judge.archive.best(budget_bytes) or judge.archive.least()
        assert entry is not None  # it has searched
        count = num_plans // len(THRESHOLDS)
        settings = walk_settings(simulator, budget_bytes, threshold=threshold, num_evaluations=count, seed=1000 + seed)
        search = NativeSearch(simulator.native_graph)
        num_evaluations = search.walk(simulator.native.mask(entry.outcome.saved), classes, settings, Stop())
        judge.take(search.take(), num_evaluations, NAME)
    if not planner.problem.fused:
        entry = judge.archive.best(budget_bytes) or judge.archive.least()
        assert entry is not None
        start = entry.outcome.schedule or schedule_of(simulator, entry.outcome.saved)
        found, _ = anneal_order(planner.problem, budget_bytes, start, num_moves=num_plans, max_seconds=DAY, seed=1000)
        judge.judge_schedule(found, NAME)
