"""Annealing: threshold accepting over what is saved and, where order is ours, over the order of ops and how often each runs.

The first walk flips, exchanges and slides saved values, alone and by class (`passes/native/search.cpp`), from the default plan. Where the
code generator does not fuse, its result starts the second one over schedules (`passes/solvers/order.py`, after FastSA), in which values
may be made more than twice; that one needs a budget.
"""

from __future__ import annotations

from collections.abc import Iterator

from dyngran.passes.archive import Proposal
from dyngran.passes.moves import move_classes
from dyngran.passes.native.graph import NativeSearch, Stop, Walk
from dyngran.passes.plan import Plan, Schedule
from dyngran.passes.problem import Problem
from dyngran.passes.schedule import with_sources
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.order import anneal_order
from dyngran.passes.solvers.solving import solve_with

WORK = 60_000_000  # op visits
MAX_EVALUATIONS = 20_000
ORDER_WORK = 400_000_000  # moves times ops
MAX_MOVES = 200_000
MAX_SECONDS = 30.0  # of the walk over orders: a safety stop
THRESHOLDS = (3e-4, 3e-5)  # of the step: by how much a plan may be worse at first, in one walk after another
OVER_PRICE = 2.0  # of a byte above the budget, in shares of a step per transient of the default plan


def walk_settings(
    simulator: Simulator, budget_bytes: int, *, threshold: float, num_evaluations: int, seed: int = 0, num_visits: int | None = None
) -> Walk:
    """Settings of a walk towards the fastest plan within a budget (static bytes included); ``threshold`` in shares of a step."""
    _, free = simulator.native.evaluate(simulator.native.mask(simulator.default_saved))
    return Walk(
        budget_bytes=budget_bytes - simulator.problem.total_static_bytes,
        price_us_per_byte=OVER_PRICE * max(free.time_us, 1e-6) / max(free.peak_bytes, 1),
        first_threshold_us=threshold * free.time_us,
        num_evaluations=num_evaluations,
        seed=seed,
        num_visits=num_visits,
    )


def propose(simulator: Simulator, *, budget_bytes: int | None = None, stop: Stop | None = None) -> Iterator[Proposal]:
    """The frontier of what the walk met; then the best schedule found, if there is a budget and order is ours."""
    stop = stop or Stop()
    problem, native = simulator.problem, simulator.native
    yield simulator.default_saved
    budget = budget_bytes if budget_bytes is not None else simulator.evaluate(simulator.default_saved).peak_bytes
    search = NativeSearch(simulator.native_graph)
    classes = move_classes(problem, simulator.candidates)
    count = min(MAX_EVALUATIONS, WORK // max(1, len(problem.ops)))
    start = native.mask(simulator.default_saved)
    for seed, threshold in enumerate(THRESHOLDS):
        settings = walk_settings(simulator, budget, threshold=threshold, num_evaluations=count // len(THRESHOLDS), seed=seed)
        search.walk(start, classes, settings, stop)
        found = search.take()
        yield from (native.members(crossing) for crossing, _ in found)
        fitting = [one for one in found if one[1].peak_bytes <= settings.budget_bytes] or found[:1]
        start = fitting[-1][0]
    if budget_bytes is not None and not problem.fused:
        yield from orders(simulator, budget_bytes, schedule_of(simulator, native.members(start)), stop)


def schedule_of(simulator: Simulator, saved: frozenset[int]) -> Schedule:
    """The order in which the simulator runs a saved set."""
    forward, backward = simulator.schedule(saved)
    return with_sources(simulator.problem, Schedule(tuple(forward), tuple(backward), saved))


def orders(
    simulator: Simulator, budget_bytes: int, start: Schedule, stop: Stop, *, work: int = ORDER_WORK, max_moves: int = MAX_MOVES
) -> Iterator[Schedule]:
    """The best schedule for a budget that annealing finds from ``start`` with at most ``work`` moves times ops.

    ``stop`` is set if it was cut short, by the clock or by Ctrl-C.
    """
    problem = simulator.problem
    moves = min(max_moves, work // max(1, len(problem.ops)))
    found, is_cut_short = anneal_order(
        problem, budget_bytes, start, num_moves=moves, max_seconds=MAX_SECONDS, should_stop=lambda: bool(stop)
    )
    if is_cut_short:
        stop.set()
    yield found


def solve(problem: Problem, budget_bytes: int | None) -> Plan:
    """The fastest of these plans for a budget (bytes, static bytes included; None: no limit). Raises BudgetTooSmall if none fits."""
    return solve_with(propose, "anneal", problem, budget_bytes)
