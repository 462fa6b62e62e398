"""Planners against brute force on small problems, and against plans that a good engineer writes by hand on larger ones."""

from __future__ import annotations

import gc
from contextlib import suppress
from itertools import pairwise
from math import isqrt
from threading import Timer

import pytest
from brute_force import best_time, every_plan, naive_replay
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import Builder, chain, conv_net, problems, transformer

from dyngran.passes.archive import Archive, Entry
from dyngran.passes.classes import value_classes
from dyngran.passes.errors import BudgetTooSmall, InvalidOption
from dyngran.passes.plan import Action
from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.regions import find_crossings, find_separators, region_of
from dyngran.passes.schedule import replay_schedule
from dyngran.passes.simulate import Outcome, Simulator
from dyngran.passes.solvers import exhaustive, mutwo
from dyngran.passes.solvers.portfolio import SOLVERS, Planner

SLOW = [HealthCheck.too_slow]


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(problem=problems(max_forward=6), slack=st.integers(-3, 25))
def test_small_problems_are_planned_to_the_optimum(problem: Problem, slack: int) -> None:
    outcomes = every_plan(Simulator(problem))
    least = min(outcome.peak_bytes for outcome in outcomes)
    budget_bytes = least + slack
    planner = Planner(problem)
    plan, refused_bytes = None, 0
    try:
        plan = planner.solve(budget_bytes)
    except BudgetTooSmall as refusal:
        refused_bytes = refusal.least_peak_bytes
    best = best_time(outcomes, budget_bytes)
    if plan is None:
        assert best is None
        assert budget_bytes < refused_bytes <= least
        return
    assert plan.peak_bytes <= budget_bytes
    if plan.schedule is None:
        assert plan.time_us == best
    else:  # by another order, or by making a value more than twice
        assert replay_schedule(problem, plan.schedule).peak_bytes == plan.peak_bytes
        assert best is None or plan.time_us <= best


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(problem=problems(max_forward=6, fused=False), slack=st.integers(0, 12), solver=st.sampled_from(SOLVERS))
def test_no_solver_beats_the_optimum_or_breaks_the_budget(problem: Problem, slack: int, solver: str) -> None:
    optimum = every_plan(Simulator(problem))
    budget_bytes = min(outcome.peak_bytes for outcome in optimum) + slack
    planner = Planner(problem)
    least = _entries_of(planner, solver, budget_bytes)[0].outcome.peak_bytes
    if least > budget_bytes:
        with pytest.raises(BudgetTooSmall) as refusal:
            planner.solve(budget_bytes, solver=solver)
        assert solver != "auto"
        assert refusal.value.least_peak_bytes == least
        return
    plan = planner.solve(budget_bytes, solver=solver)
    truth = naive_replay(problem, plan.saved)
    assert truth.peak_bytes == plan.peak_bytes <= budget_bytes
    best = best_time(optimum, budget_bytes)
    assert best is not None
    assert truth.time_us == pytest.approx(plan.time_us)
    assert plan.time_us >= best - 1e-6


def _entries_of(planner: Planner, solver: str, budget_bytes: int) -> tuple[Entry, ...]:
    """What one solver put into the archive."""
    with suppress(BudgetTooSmall):
        planner.solve(budget_bytes, solver=solver)
    return (planner.judge.archive if solver == "auto" else planner.judge.by_solver[solver]).frontier()


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
@given(problem=problems(max_forward=6), slack=st.integers(0, 12))
def test_moves_alone_never_beat_the_optimum(problem: Problem, slack: int) -> None:
    outcomes = every_plan(Simulator(problem))
    planner = Planner(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exhaustive, "MAX_CANDIDATES", -1)
        frontier = planner.frontier()
    budget_bytes = frontier[0].peak_bytes + slack
    best = best_time(outcomes, budget_bytes)
    assert best is not None
    assert planner.solve(budget_bytes).time_us >= best


@pytest.mark.parametrize("fused", [False, True])
def test_a_smaller_budget_never_gives_a_larger_peak_or_a_faster_step(fused: bool) -> None:
    problem = transformer(3, fused=fused)
    planner = Planner(problem)
    frontier = planner.frontier()
    least, most = frontier[0].peak_bytes, frontier[-1].peak_bytes
    grid = [least + (most - least) * step // 11 for step in range(12)]
    plans = [planner.solve(budget_bytes) for budget_bytes in grid]
    for smaller, larger in pairwise(plans):
        assert smaller.peak_bytes <= larger.peak_bytes
        assert smaller.time_us >= larger.time_us
    for budget_bytes, plan in list(zip(grid, plans, strict=True))[::4]:
        assert plan.peak_bytes <= budget_bytes
        assert Planner(problem).solve(budget_bytes).saved == plan.saved  # whatever was asked before


@pytest.mark.parametrize("fused", [False, True])
def test_budgets_bind(fused: bool) -> None:
    problem = transformer(4, fused=fused)
    planner = Planner(problem)
    frontier = planner.frontier()
    static, least, most = problem.total_static_bytes, frontier[0].peak_bytes, frontier[-1].peak_bytes
    for step in range(1, 12):
        budget_bytes = least + (most - least) * step // 11
        assert planner.solve(budget_bytes).peak_bytes - static >= 0.9 * (budget_bytes - static)


def test_a_transformer_is_cut_between_its_blocks_and_its_layers_are_alike() -> None:
    problem = transformer(5)
    crossings = find_crossings(problem)
    separators = find_separators(crossings)
    after_blocks = {place for place, index in enumerate(crossings.ops) if problem.ops[index].target == "add"}
    assert len(after_blocks) == 2 * 5
    assert after_blocks - {min(after_blocks)} <= set(separators)  # the first block reads an input, so its inside is as narrow
    assert all(len(crossings.at(boundary)) == 1 for boundary in after_blocks)
    simulator = Simulator(problem)
    groups = value_classes(problem, simulator.candidates)
    assert sorted(value for group in groups for value in group) == sorted(simulator.candidates)
    for group in groups:
        targets = {problem.ops[problem.values[v].producer].target for v in group}  # type: ignore[index]
        assert len(targets) == 1
    assert max(len(group) for group in groups) >= 3
    assert len(groups) < len(simulator.candidates) / 2
    named = {region for region in region_of(problem) if not region.startswith("region ")}
    assert named == {*(f"layers.{n}" for n in range(5)), "head"}


@settings(max_examples=100, deadline=None)
@given(problem=problems(max_forward=7), data=st.data())
def test_what_crosses_a_boundary_is_enough_to_go_on(problem: Problem, data: st.DataObject) -> None:
    crossings = find_crossings(problem)
    if len(crossings.ops) < 2:
        return
    boundary = data.draw(st.integers(0, len(crossings.ops) - 2))
    before = {write for index in crossings.ops[: boundary + 1] for write in problem.ops[index].writes}
    needed = {read for index in crossings.ops[boundary + 1 :] for read in problem.ops[index].reads}
    assert crossings.at(boundary) == before & needed
    assert crossings.num_bytes[boundary] == sum(problem.values[v].size_bytes for v in before & needed)


def by_hand(problem: Problem) -> dict[str, frozenset[int]]:
    """Checkpoint by block, by pairs and by sqrt(n) blocks, selective inside blocks, and nothing saved, from the labels alone."""
    forward = [op for op in problem.ops if op.side is Side.FORWARD]
    last = {op.region: op.index for op in forward if op.region != "head"}
    made_by = {write: op for op in forward for write in op.writes}
    borders = [
        frozenset(read for op in forward if op.index > end for read in op.reads if read in made_by and made_by[read].index <= end)
        for end in last.values()
    ]
    heavy = frozenset(write for op in forward if op.target in ("mm", "attention") for write in op.writes)
    every = frozenset[int]()
    plans = {"nothing": every, "selective": heavy, "selective in blocks": heavy | frozenset().union(*borders)}
    for step in {1, 2, isqrt(len(borders)), isqrt(isqrt(len(borders)))}:
        plans[f"every {step}"] = frozenset().union(*borders[::step])
    return plans


@pytest.mark.parametrize("fused", [False, True])
def test_no_plan_by_hand_is_smaller_or_better(fused: bool) -> None:
    problem = transformer(9, fused=fused)
    planner = Planner(problem)
    least = planner.frontier()[0].peak_bytes
    for name, saved in by_hand(problem).items():
        outcome = planner.simulator.evaluate(saved)
        assert least <= outcome.peak_bytes, name
        assert planner.solve(outcome.peak_bytes).time_us <= outcome.time_us, name


@pytest.mark.parametrize("length", [9, 16, 25, 36])
def test_a_chain_is_cut_into_square_roots(length: int) -> None:
    frontier = Planner(chain(length)).frontier()
    root = isqrt(length)
    assert frontier[0].peak_bytes <= 2 * root - 1  # root - 1 kept links, root live while a part is made again, less the last
    assert frontier[-1].recompute_us == 0


@pytest.mark.parametrize(("length", "least"), [(6, 3), (9, 4)])
def test_the_program_is_optimal_on_chains(length: int, least: int) -> None:
    problem = chain(length)
    outcomes = every_plan(Simulator(problem))
    for budget_bytes in range(least, length + 1):
        assert Planner(problem).solve(budget_bytes, solver="ilp").time_us == best_time(outcomes, budget_bytes)


def test_the_program_meets_budgets_on_a_transformer() -> None:
    problem = transformer(3)
    planner = Planner(problem)
    free = planner.solve(None)
    static = problem.total_static_bytes
    for share in (0.8, 0.6):
        budget_bytes = static + int(share * (free.peak_bytes - static))
        plan = planner.solve(budget_bytes, solver="ilp")
        assert plan.solver == "ilp"
        assert plan.peak_bytes <= budget_bytes
        assert plan.time_us < planner.simulator.evaluate(frozenset()).time_us


def test_without_highs_the_program_runs_on_cbc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulp.HiGHS.available", lambda self: False)
    problem = chain(9)
    plan = Planner(problem).solve(7, solver="ilp")
    assert plan.time_us == best_time(every_plan(Simulator(problem)), 7)


def three_links() -> tuple[Problem, tuple[int, int, int]]:
    build = Builder()
    given_value = build.given(1, Kind.INPUT)
    a = build.op([given_value], 6, cost_us=2.0)
    b = build.op([a], 4, cost_us=4.0)
    c = build.op([b], 6, cost_us=1.0)
    build.outputs.add(build.op([c], 0))
    gradient = build.given(0, Kind.TANGENT)
    for value in (c, b, a):
        gradient = build.op([value, gradient], 1, side=Side.BACKWARD, kind=Kind.TEMPORARY)
    build.gradients.add(gradient)
    return build.build(), (a, b, c)


def test_mutwo_picks_as_worked_out_by_hand() -> None:
    """Ratios are 3, 1, 6: c goes first. Its source b is then priced 1 x 4 us (still 1), so a goes next at 3. b then reads the input
    through a (6 us), once for itself and once for c, which reads it: 4 bytes / 12 us."""
    problem, (a, b, c) = three_links()
    picks = list(mutwo.picks(Simulator(problem)))
    assert [(pick.value, pick.ratio) for pick in picks] == [(c, 6.0), (a, 3.0), (b, pytest.approx(1 / 3))]
    assert picks[-1].saved == frozenset()


def test_mutwo_s_own_simulator_claims_what_it_ignores() -> None:
    problem = chain(16)
    simulator = Simulator(problem)
    last = list(mutwo.picks(simulator))[-1]
    assert last.claimed_peak_bytes < simulator.evaluate(last.saved).peak_bytes


OUTCOMES = st.builds(
    lambda peak, time: Outcome(
        saved=frozenset({peak, 100 + time}), peak_bytes=peak, time_us=float(time), recompute_us=0.0, saved_bytes=0, num_recomputed=0
    ),
    st.integers(0, 12),
    st.integers(0, 12),
)


@settings(max_examples=200, deadline=None)
@given(outcomes=st.lists(OUTCOMES, max_size=20), budget_bytes=st.integers(-1, 13))
def test_the_archive_answers_as_a_list_of_everything_would(outcomes: list[Outcome], budget_bytes: int) -> None:
    archive = Archive()
    for outcome in outcomes:
        archive.add(Entry(outcome, "any"))
    fitting = [outcome for outcome in outcomes if outcome.peak_bytes <= budget_bytes]
    best = archive.best(budget_bytes)
    if not fitting:
        assert best is None
        return
    assert best is not None
    assert (best.outcome.time_us, best.outcome.peak_bytes) == min((outcome.time_us, outcome.peak_bytes) for outcome in fitting)


def test_the_refusal_says_what_would_work_and_what_is_in_the_way() -> None:
    problem = transformer(2)
    planner = Planner(problem)
    with pytest.raises(BudgetTooSmall, match="lower the batch size") as refusal:
        planner.solve(problem.total_static_bytes + 1)
    error = refusal.value
    sizes = [size for _, size in error.pinned]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes
    assert planner.solve(error.least_peak_bytes).peak_bytes == error.least_peak_bytes
    with pytest.raises(BudgetTooSmall, match="What is held over the whole step takes"):
        planner.solve(problem.total_static_bytes)
    with pytest.raises(BudgetTooSmall, match="solver='default' alone"):
        planner.solve(error.least_peak_bytes, solver="default")


def test_without_a_budget_the_plan_is_the_default_one() -> None:
    planner = Planner(transformer(2))
    plan = planner.solve(None)
    assert plan.saved == planner.simulator.default_saved
    assert (plan.solver, plan.overhead_us, plan.num_recomputed) == ("default", 0.0, 0)


def test_every_decision_has_a_reason_and_together_they_cover_backward() -> None:
    problem = transformer(3)
    planner = Planner(problem)
    frontier = planner.frontier()
    plan = planner.solve((frontier[0].peak_bytes + frontier[-1].peak_bytes) // 2)
    assert all(decision.reason and decision.label for decision in plan.decisions)
    kept = {decision.value for decision in plan.decisions if decision.action is Action.KEEP}
    again = {decision.value for decision in plan.decisions if decision.action is Action.RECOMPUTE}
    assert kept == plan.saved
    assert not kept & again
    late = {write for op in problem.ops if op.side is Side.BACKWARD for write in op.writes}
    read = {read for op in problem.ops if op.side is Side.BACKWARD for read in op.reads}
    assert {v for v in read - late if problem.values[v].producer is not None} <= kept | again


def test_a_plan_from_elsewhere_is_judged_and_can_win() -> None:
    problem = transformer(2)
    planner = Planner(problem)
    outcome = planner.add(frozenset(planner.simulator.candidates), "plan file")
    assert outcome == planner.simulator.evaluate(planner.simulator.candidates)


def test_an_unknown_solver_is_named() -> None:
    with pytest.raises(InvalidOption, match="'annealing'"):
        Planner(chain(3)).solve(None, solver="annealing")


@pytest.mark.parametrize("solver", ["every", "sqrt"])
def test_a_policy_with_nothing_to_checkpoint_keeps_the_default_plan(solver: str) -> None:
    build = Builder()
    made = build.op([build.given(8, Kind.INPUT)], 8)
    tangent = build.given(8, Kind.TANGENT)
    build.gradients.add(build.op([tangent, made], 8, side=Side.BACKWARD))
    problem = build.build()
    plan = Planner(problem).solve(None, solver=solver)
    assert plan.saved == Simulator(problem).default_saved
    assert Planner(problem).solve(plan.peak_bytes, solver=solver) == Planner(problem).solve(plan.peak_bytes, solver=solver)


def test_a_refusal_after_a_search_that_was_cut_short_says_so() -> None:
    problem = conv_net(40)
    budget_bytes = int(0.6 * Simulator(problem).evaluate(Simulator(problem).default_saved).peak_bytes)
    with pytest.raises(BudgetTooSmall, match="The search was cut short"):
        Planner(problem, max_seconds=1e-3).solve(budget_bytes, solver="hierarchical")


def test_an_error_on_the_way_leaves_a_planner_that_says_that_its_search_was_cut_short() -> None:
    def fail(line: str) -> None:
        if "polishing" in line:
            raise RuntimeError("the progress line could not be written")

    planner = Planner(transformer(3, fused=True), progress=fail)
    with pytest.raises(RuntimeError, match="progress line"):
        planner.solve(None)
    assert gc.isenabled()
    assert planner.solve(None).truncated


def test_garbage_is_collected_after_planning_even_if_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(timer: Timer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Timer, "start", refuse)
    with pytest.raises(RuntimeError, match="thread"):
        Planner(transformer(1)).solve(None)
    assert gc.isenabled()
