"""Lower bounds against the truth: every saved set, and every schedule of very small problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

import pytest
from brute_force import best_time, every_plan
from exact_program import exact_optimum
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import Builder, chain, conv_net, problems, transformer, unet

from dyngran.passes.bounds import RELAXATION, lower_bound
from dyngran.passes.errors import BudgetTooSmall
from dyngran.passes.plan import Schedule
from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.schedule import check_schedule, replay_schedule
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers import exhaustive
from dyngran.passes.solvers.portfolio import SOLVERS, Planner

SLOW = [HealthCheck.too_slow]
Set = frozenset[int]
Ops = tuple[int, ...]
Step = tuple[float, Set, Set, bool, Ops, Ops]  # cost (us), ops that ran, values in memory, is it backward, schedule so far


class EverySchedule:
    """The fastest schedule of a problem without fusion, of all there are: shortest paths (Dijkstra 1959) over what is in memory.

    A state is (ops that ran, values in memory, is it backward); a step runs an op, forgets a value, or begins backward. For ops of one
    result, of which a second copy is never of use, and without rerun_bytes.
    """

    def __init__(self, problem: Problem, budget_bytes: int) -> None:
        self._problem = problem
        self._room = budget_bytes - problem.total_static_bytes
        self._size = [0 if value.kind.is_static else value.size_bytes for value in problem.values]
        self._given = frozenset(value.index for value in problem.values if value.producer is None)
        self._must = frozenset(op.index for op in problem.ops if op.side is Side.FORWARD)
        self._late = frozenset(op.index for op in problem.ops if op.side is Side.BACKWARD)
        self._outputs = problem.forward_outputs - self._given
        self._hidden = frozenset(write for op in problem.ops if op.never_saved and not op.pinned for write in op.writes)
        self._base = sum(value.size_bytes for value in problem.values if value.kind is Kind.TANGENT)
        self._base += sum(self._size[value] for value in self._outputs)

    def best(self) -> tuple[float, Schedule] | None:
        """Time (us) and schedule; None if nothing fits."""
        ticket = count()
        queue: list[tuple[float, int, Set, Set, bool, Ops, Ops]] = [(0.0, next(ticket), frozenset(), frozenset(), False, (), ())]
        done: set[tuple[Set, Set, bool]] = set()
        while queue:
            time_us, _, ran, live, is_backward, forward, backward = heappop(queue)
            if (ran, live, is_backward) in done:
                continue
            done.add((ran, live, is_backward))
            if is_backward and self._late <= ran and self._problem.gradients <= live | self._given:
                return time_us, Schedule(forward, backward)
            for cost_us, *state in self._steps(ran, live, is_backward, forward, backward):
                heappush(queue, (time_us + cost_us, next(ticket), *state))
        return None

    def _steps(self, ran: Set, live: Set, is_backward: bool, forward: Ops, backward: Ops) -> Iterator[Step]:
        for value in live:
            if not (is_backward and value in self._outputs - self._hidden):
                yield 0.0, ran, live - {value}, is_backward, forward, backward
        if not is_backward and self._must <= ran and self._outputs <= live:
            yield 0.0, ran, live - self._hidden, True, forward, backward
        for op in self._problem.ops:
            if (op.side is Side.BACKWARD and not is_backward) or (op.pinned and op.index in ran):
                continue
            if live.issuperset(op.writes) or not live.issuperset(set(op.reads) - self._given):
                continue
            held = live - (self._outputs - self._hidden) if is_backward else live
            num_bytes = sum(self._size[value] for value in held | set(op.writes)) + (self._base if is_backward else 0)
            if num_bytes + op.workspace_bytes <= self._room:
                places = (forward, (*backward, op.index)) if is_backward else ((*forward, op.index), backward)
                yield op.cost_us, ran | {op.index}, live | set(op.writes), is_backward, *places


@settings(max_examples=250, deadline=None, suppress_health_check=SLOW)
@given(problem=problems(max_forward=7), slack=st.one_of(st.none(), st.integers(0, 12)))
def test_no_saved_set_is_faster_than_the_bound(problem: Problem, slack: int | None) -> None:
    outcomes = every_plan(Simulator(problem))
    budget_bytes = None if slack is None else min(outcome.peak_bytes for outcome in outcomes) + slack
    fitting = [outcome for outcome in outcomes if budget_bytes is None or outcome.peak_bytes <= budget_bytes]
    bound = lower_bound(problem, budget_bytes)
    assert bound.time_us <= min(outcome.time_us for outcome in fitting) + 1e-6
    assert bound.proof == RELAXATION


@settings(max_examples=250, deadline=None, suppress_health_check=SLOW)
@given(problem=problems(max_forward=4, fused=False), slack=st.integers(-4, 8))
def test_no_schedule_is_faster_than_the_bound(problem: Problem, slack: int) -> None:
    outcomes = every_plan(Simulator(problem))
    budget_bytes = min(outcome.peak_bytes for outcome in outcomes) + slack
    found = EverySchedule(problem, budget_bytes).best()
    saved_set_us = best_time(outcomes, budget_bytes)
    assert found is not None or saved_set_us is None
    if found is None:
        return
    time_us, schedule = found
    check_schedule(problem, schedule)
    replayed = replay_schedule(problem, schedule)
    assert (replayed.time_us, replayed.peak_bytes) <= (time_us, budget_bytes)
    assert saved_set_us is None or time_us <= saved_set_us
    assert lower_bound(problem, budget_bytes).time_us <= time_us + 1e-6


def small_value_made_again() -> Problem:
    """Backward reads a large value first and then a small one that costs nothing: a schedule drops it and makes it again, although the
    rules of saved sets always keep it."""
    build = Builder()
    given_value = build.given(0, Kind.INPUT)
    small = build.op([given_value], 1, cost_us=0.0)
    read = build.op([small], 0, cost_us=0.0)
    large = build.op([given_value], 5)
    build.outputs.add(build.op([read], 0, cost_us=0.0))
    gradient = build.op([large, build.given(0, Kind.TANGENT)], 0, side=Side.BACKWARD, kind=Kind.TEMPORARY)
    build.gradients.add(build.op([small, gradient], 0, side=Side.BACKWARD, kind=Kind.GRADIENT))
    return build.build(keep_below_bytes=1)


def random_numbers_in_backward() -> Problem:
    """What must not run twice need not run in forward, if only backward reads it."""
    build = Builder()
    given_value = build.given(0, Kind.INPUT)
    large = build.op([given_value], 5)
    build.outputs.add(build.op([large], 0, cost_us=0.0))
    noise = build.op([given_value], 1, cost_us=0.0, side=Side.FREE, pinned="random")
    gradient = build.op([large, build.given(0, Kind.TANGENT)], 0, side=Side.BACKWARD, kind=Kind.TEMPORARY)
    build.gradients.add(build.op([noise, gradient], 0, side=Side.BACKWARD, kind=Kind.GRADIENT))
    return build.build()


@pytest.mark.parametrize("make", [small_value_made_again, random_numbers_in_backward])
def test_what_saved_sets_keep_schedules_may_make_again(make: Callable[[], Problem]) -> None:
    problem = make()
    found = EverySchedule(problem, 5).best()
    assert found is not None
    assert min(outcome.peak_bytes for outcome in every_plan(Simulator(problem)) if outcome.time_us == found[0]) == 6
    assert lower_bound(problem, 5).time_us <= found[0]


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize(("make", "size"), [(transformer, 1), (unet, 2), (conv_net, 1), (chain, 20)])
def test_the_exact_optimum_is_not_faster_than_the_bound(make: Callable[[int], Problem], size: int, share: float) -> None:
    problem = make(size)
    frontier = Planner(problem).frontier()
    budget_bytes = int(frontier[0].peak_bytes + share * (frontier[-1].peak_bytes - frontier[0].peak_bytes))
    optimum = exact_optimum(problem, budget_bytes)
    assert optimum is not None
    assert lower_bound(problem, budget_bytes).time_us <= optimum.time_us


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("fused", [False, True])
def test_every_plan_carries_a_bound_that_it_keeps(solver: str, fused: bool) -> None:
    problem = transformer(2, fused=fused)
    planner = Planner(problem)
    free = planner.simulator.evaluate(planner.simulator.default_saved)
    for budget_bytes in (None, problem.total_static_bytes + int(0.7 * (free.peak_bytes - problem.total_static_bytes))):
        try:
            plan = planner.solve(budget_bytes, solver=solver)
        except BudgetTooSmall:
            assert solver not in ("auto", "hierarchical", "mincut", "anneal", "every", "sqrt")
            continue
        assert 0 < plan.bound_us <= plan.time_us + 1e-6
        assert plan.bound == RELAXATION or plan.bound.startswith("exact: ")
        if plan.bound.startswith("exact: "):
            assert plan.gap == 0


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(problem=problems(max_forward=5), slack=st.integers(0, 12), solver=st.sampled_from(SOLVERS))
def test_what_is_called_exact_is(problem: Problem, slack: int, solver: str) -> None:
    outcomes = every_plan(Simulator(problem))
    budget_bytes = min(outcome.peak_bytes for outcome in outcomes) + slack
    try:
        plan = Planner(problem).solve(budget_bytes, solver=solver)
    except BudgetTooSmall:
        return
    best = best_time(outcomes, budget_bytes)
    if plan.bound == exhaustive.PROOF:
        assert (plan.time_us, plan.bound_us) == (best, best)
    elif plan.bound.startswith("exact: "):
        assert plan.bound_us == plan.time_us == lower_bound(problem, budget_bytes).time_us
        assert best is None or plan.time_us <= best
    else:
        assert plan.bound == RELAXATION
        assert plan.bound_us < plan.time_us


def test_a_search_that_was_cut_short_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(replace(chain(9), fused=True))
    with_proof = planner.solve(6)
    assert with_proof.bound == exhaustive.PROOF

    def interrupt(line: str) -> None:
        if "exhaustive" in line:
            raise KeyboardInterrupt

    plan = Planner(replace(chain(9), fused=True), progress=interrupt).solve(9)
    assert plan.truncated
    assert plan.bound != exhaustive.PROOF
