"""What every plan of the portfolio has in common: monotone, repeatable, blind to names, and never a hang."""

from __future__ import annotations

import _thread
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from threading import Timer
from unittest.mock import patch

import pytest
from problems import Builder, conv_net, densenet, encoder_decoder, layered, storable, transformer, two_towers, unet
from problems import chain as chain_of

from dyngran.passes import moves
from dyngran.passes.copies import HostLink, plan_copies
from dyngran.passes.errors import BudgetTooSmall
from dyngran.passes.forms import Offer, Transfer, with_forms
from dyngran.passes.plan import Action, Plan
from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.simulate import Outcome, Simulator, free_transient
from dyngran.passes.solvers.portfolio import Planner

FAMILIES: dict[str, Callable[[], Problem]] = {
    "transformer": lambda: transformer(2),
    "fused transformer": lambda: transformer(2, fused=True),
    "unet": lambda: unet(3),
    "encoder and decoder": lambda: encoder_decoder(2),
    "densenet": lambda: densenet(2, 4),
    "two towers": lambda: two_towers(2),
    "conv net": lambda: conv_net(3),
    "irregular": lambda: layered(2, 25),
    "fused irregular": lambda: layered(2, 25, fused=True),
}


@cache
def planned(name: str) -> tuple[Planner, tuple[Outcome, ...], tuple[int, ...]]:
    """A planner that has searched, its frontier, and budgets at 0, 1/11, .. 11/11 of that."""
    planner = Planner(FAMILIES[name]())
    frontier = planner.frontier()
    least, most = frontier[0].peak_bytes, frontier[-1].peak_bytes
    return planner, frontier, tuple(least + (most - least) * step // 11 for step in range(12))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_frontier_is_monotone_whatever_is_asked_first(name: str) -> None:
    planner, outcomes, budgets = planned(name)
    for smaller, larger in pairwise(outcomes):
        assert smaller.peak_bytes < larger.peak_bytes
        assert smaller.time_us > larger.time_us
    asked = list(budgets)
    Random(0).shuffle(asked)
    plans = {budget_bytes: planner.solve(budget_bytes) for budget_bytes in asked}
    for budget_bytes in budgets:
        assert plans[budget_bytes].peak_bytes <= budget_bytes
    for less, more in pairwise(budgets):
        assert plans[less].peak_bytes <= plans[more].peak_bytes
        assert plans[less].time_us >= plans[more].time_us
    again = Planner(planner.problem)
    first = again.solve(budgets[3])
    assert first.saved == plans[budgets[3]].saved
    assert [again.solve(budget_bytes).saved for budget_bytes in asked] == [plans[budget_bytes].saved for budget_bytes in asked]
    assert not planner.truncated


def test_a_frontier_with_orders_reaches_the_least_peak_that_a_refusal_names() -> None:
    planner = Planner(FAMILIES["irregular"]())
    by_sets, by_orders = planner.frontier(), planner.frontier(with_orders=True)
    assert by_orders[0].peak_bytes < by_sets[0].peak_bytes and by_orders[0].schedule is not None
    with pytest.raises(BudgetTooSmall) as refusal:
        planner.solve(planner.problem.total_static_bytes + 1)
    assert refusal.value.least_peak_bytes == by_orders[0].peak_bytes


@pytest.mark.parametrize("name", ["irregular", "encoder and decoder", "conv net"])
def test_a_smaller_budget_is_never_faster_where_only_schedules_fit(name: str) -> None:
    """Budgets above and below the least peak of any saved set that was found; each answer is the same for a planner that was asked nothing
    before."""
    _, outcomes, _ = planned(name)
    least = outcomes[0].peak_bytes
    planner = Planner(FAMILIES[name]())
    plans = {}
    for share in (1.0, 0.97, 0.9, 0.8):
        plans[share] = plan_or_none(planner, int(share * least))
    known = {share: plan for share, plan in plans.items() if plan is not None}
    for more, less in pairwise(known):
        assert known[less].time_us >= known[more].time_us
    assert planner.solve(least).time_us == known[1.0].time_us  # as before the others were asked for


def renamed(problem: Problem) -> Problem:
    """Other names for values, ops and regions, that sort otherwise."""
    count = len(problem.values) + len(problem.ops)
    regions = {region: f"r{count - place}" for place, region in enumerate(dict.fromkeys(op.region for op in problem.ops)) if region}
    values = [replace(value, name=f"v{count - value.index}", label=f"l{count - value.index}") for value in problem.values]
    ops = [replace(op, name=f"o{count - op.index}", region=regions.get(op.region, "")) for op in problem.ops]
    return replace(problem, values=tuple(values), ops=tuple(ops))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_names_say_nothing(name: str) -> None:
    planner, outcomes, budgets = planned(name)
    other = Planner(renamed(planner.problem))
    assert other.frontier() == outcomes
    assert other.solve(budgets[4]).solver == planner.solve(budgets[4]).solver


@pytest.mark.parametrize("name", ["transformer", "fused irregular", "densenet"])
def test_the_number_of_threads_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (1, 4):
        monkeypatch.setattr(moves, "num_threads", lambda count=count: count)
        assert Planner(FAMILIES[name]()).frontier() == planned(name)[1]


def reordered(problem: Problem, seed: int) -> tuple[Problem, list[int]]:
    """The same graph in another order of independent ops (each side for itself), and the new index of every value."""
    draw = Random(seed)
    order = list(range(len(problem.ops)))
    for _ in range(3):
        for place in range(len(order) - 1):
            first, second = problem.ops[order[place]], problem.ops[order[place + 1]]
            if first.side is second.side and set(first.writes).isdisjoint(second.reads) and draw.random() < 0.5:
                order[place : place + 2] = [second.index, first.index]
    given = [value.index for value in problem.values if value.producer is None]
    made = [write for index in order for write in problem.ops[index].writes]
    new_value = [0] * len(problem.values)
    for place, value in enumerate([*given, *made]):
        new_value[value] = place
    new_op = {old: new for new, old in enumerate(order)}
    values = [
        replace(
            problem.values[old],
            index=new,
            producer=new_op.get(-1 if problem.values[old].producer is None else problem.values[old].producer),
        )
        for new, old in enumerate([*given, *made])
    ]
    ops = []
    for new, old in enumerate(order):
        reads, writes = (tuple(new_value[value] for value in those) for those in (problem.ops[old].reads, problem.ops[old].writes))
        ops.append(replace(problem.ops[old], index=new, reads=reads, writes=writes))
    sets = (frozenset(new_value[value] for value in those) for those in (problem.forward_outputs, problem.gradients))
    outputs, gradients = sets
    return replace(problem, values=tuple(values), ops=tuple(ops), forward_outputs=outputs, gradients=gradients), new_value


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["transformer", "fused transformer", "two towers", "unet", "irregular"])
def test_another_order_of_independent_lines_costs_the_same_or_needs_another_peak(name: str, seed: int) -> None:
    """Where one order's plan is more than 1 % faster at the same budget, it does not fit under the other order."""
    planner, _, budgets = planned(name)
    problem, place = reordered(planner.problem, seed)
    assert [op.name for op in problem.ops] != [op.name for op in planner.problem.ops]
    other = Planner(problem)
    back = {new: old for old, new in enumerate(place)}
    for budget_bytes in budgets[1::3]:
        mine, theirs = plan_or_none(planner, budget_bytes), plan_or_none(other, budget_bytes)
        for plan, best, judge, move in ((mine, theirs, other, dict(enumerate(place))), (theirs, mine, planner, back)):
            if plan is None or plan.schedule is not None:
                continue
            moved = judge.simulator.evaluate(move[value] for value in plan.saved)
            if moved.peak_bytes <= budget_bytes:
                assert best is not None
                assert best.time_us <= 1.01 * moved.time_us


def plan_or_none(planner: Planner, budget_bytes: int) -> Plan | None:
    try:
        return planner.solve(budget_bytes)
    except BudgetTooSmall:
        return None


def backward_of(build: Builder, tape: list[int], *, shared: tuple[int, ...] = ()) -> Problem:
    gradient = build.given(1, Kind.TANGENT)
    for value in reversed(tape):
        gradient = build.op([value, *shared, gradient], 1, side=Side.BACKWARD, kind=Kind.TEMPORARY)
    build.gradients.add(gradient)
    return build.build()


def fan_out(width: int = 2000) -> Problem:
    build = Builder()
    trunk = build.op([build.given(4, Kind.INPUT)], 400, cost_us=9.0)
    leaves = [build.op([trunk], 2) for _ in range(width)]
    build.outputs.add(build.op(leaves, 1))
    return backward_of(build, leaves)


def diamonds(count: int = 400) -> Problem:
    build = Builder()
    current = build.op([build.given(1, Kind.INPUT)], 4)
    tape = []
    for _ in range(count):
        left, right = build.op([current], 4, cost_us=2.0), build.op([current], 3)
        current = build.op([left, right], 4)
        tape += [left, right, current]
    build.outputs.add(build.op([current], 1))
    return backward_of(build, tape)


def line(length: int, size_of: Callable[[int], int], *, pinned: str = "", never_saved: bool = False, mask_bytes: int = 0) -> Problem:
    """A chain of ops that all read one mask as well."""
    build = Builder()
    mask = build.op([build.given(1, Kind.INPUT)], mask_bytes, cost_us=5.0)
    current = build.given(1, Kind.INPUT)
    tape = []
    for place in range(length):
        current = build.op([current, mask], size_of(place), pinned=pinned, never_saved=never_saved)
        tape.append(current)
    build.outputs.add(build.op([current], 0))
    return backward_of(build, tape, shared=(mask,))


def nothing_to_decide() -> Problem:
    build = Builder()
    current = build.given(1, Kind.INPUT)
    for _ in range(50):
        current = build.op([current], 3)
    build.outputs.add(current)
    build.gradients.add(build.op([build.given(2, Kind.TANGENT)], 2, side=Side.BACKWARD))
    return build.build()


def fused(problem: Problem) -> Problem:
    """Every op pointwise."""
    return replace(problem, fused=True, ops=tuple(replace(op, fusible=True) for op in problem.ops))


ADVERSARIAL: dict[str, Callable[[], Problem]] = {
    "2000 readers of one value": fan_out,
    "500 readers of one value, fused": lambda: fused(fan_out(500)),
    "deep diamonds": diamonds,
    "deep diamonds, fused": lambda: fused(diamonds(100)),
    "one giant value": lambda: line(60, lambda place: 1 << 40 if place == 30 else 3),
    "no bytes anywhere": lambda: line(200, lambda place: 0),
    "a mask that all layers read": lambda: line(200, lambda place: 5, mask_bytes=9),
    "a chain of 5000 ops": lambda: chain_of(2500),
    "no candidates": nothing_to_decide,
    "everything must not run twice": lambda: line(100, lambda place: 5, pinned="random"),
    "everything in the user's checkpoint regions": lambda: line(100, lambda place: 5, never_saved=True),
    "no ops": lambda: Builder().build(),
}


@pytest.mark.timeout(120)  # 20 s on two idle cores; a hang is longer
@pytest.mark.parametrize("name", sorted(ADVERSARIAL))
def test_adversarial_graphs_are_planned_or_refused(name: str) -> None:
    problem = ADVERSARIAL[name]()
    planner = Planner(problem)
    frontier = planner.frontier()
    free = free_transient(planner.simulator)
    for share in (1.0, 0.6):
        budget_bytes = problem.total_static_bytes + int(share * free)
        plan = plan_or_none(planner, budget_bytes)
        if plan is None:
            assert frontier[0].peak_bytes > budget_bytes
        else:
            assert plan.peak_bytes <= budget_bytes
    assert not planner.truncated


def test_what_must_not_run_twice_leaves_one_plan_but_for_the_mask() -> None:
    planner = Planner(ADVERSARIAL["everything must not run twice"]())
    mask = planner.problem.ops[0].writes[0]
    assert {outcome.saved - {mask} for outcome in planner.frontier()} == {planner.simulator.default_saved - {mask}}


def test_what_the_user_checkpoints_is_made_again_under_any_budget() -> None:
    planner = Planner(ADVERSARIAL["everything in the user's checkpoint regions"]())
    assert all(outcome.num_recomputed >= 100 for outcome in planner.frontier())


def test_a_giant_value_is_made_again() -> None:
    planner = Planner(ADVERSARIAL["one giant value"]())
    frontier = planner.frontier()
    assert frontier[0].peak_bytes >= 1 << 40  # it lives once at least
    assert frontier[0].peak_bytes < (1 << 40) + 200


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_search_that_the_clock_stops_says_so_and_returns_what_fits(is_fused: bool) -> None:
    problem = transformer(24, fused=is_fused)
    lines: list[str] = []
    planner = Planner(problem, max_seconds=0.05, progress=lines.append)
    generous = planner.simulator.evaluate(planner.simulator.default_saved).peak_bytes
    plan = planner.solve(generous)
    assert plan.truncated
    assert plan.peak_bytes <= generous
    assert any("cut short" in line for line in lines)
    tight = plan_or_none(planner, (generous + problem.total_static_bytes) // 2)
    assert tight is None or (tight.truncated and tight.peak_bytes <= (generous + problem.total_static_bytes) // 2)


@pytest.mark.parametrize("stage", ["default", "every", "mutwo seeds", "mincut", "regions", "polishing"])
def test_ctrl_c_returns_the_best_plan_so_far(stage: str) -> None:
    problem = transformer(3)
    seen: list[str] = []

    def interrupt(line: str) -> None:
        seen.append(line)
        if line.startswith(f"planning: {stage}") and "simulated" not in line:
            raise KeyboardInterrupt

    planner = Planner(problem, progress=interrupt)
    generous = planner.simulator.evaluate(planner.simulator.default_saved).peak_bytes
    plan = planner.solve(generous)
    assert plan.truncated
    assert plan.peak_bytes <= generous
    assert sum(line == f"planning: {stage}" for line in seen) == 1
    assert planner.solve(generous).saved == plan.saved


def test_ctrl_c_while_orders_are_annealed_is_said_and_ends_the_search() -> None:
    num_runs = 0

    def interrupt(*_: object) -> None:
        nonlocal num_runs
        num_runs += 1
        raise KeyboardInterrupt

    planner = Planner(transformer(3))
    planner.frontier()
    least = planner.judge.archive.frontier()[0].outcome.peak_bytes
    with patch("dyngran.passes.solvers.order._Search.run", interrupt):
        plan = planner.solve(least)
    assert num_runs == 1
    assert plan.truncated
    assert plan.peak_bytes <= least


@pytest.mark.parametrize("solver", ["anneal", "hierarchical", "mincut"])
def test_ctrl_c_stops_one_solver_too(solver: str) -> None:
    def interrupt(line: str) -> None:
        if solver in line:
            raise KeyboardInterrupt

    planner = Planner(transformer(2), progress=interrupt)
    generous = planner.simulator.evaluate(planner.simulator.default_saved).peak_bytes
    plan = plan_or_none_of(planner, generous, solver)
    assert plan is None or plan.truncated
    assert planner.truncated


def plan_or_none_of(planner: Planner, budget_bytes: int, solver: str) -> Plan | None:
    try:
        return planner.solve(budget_bytes, solver=solver)
    except BudgetTooSmall:
        return None


def test_ctrl_c_in_the_middle_of_native_code_returns_a_plan() -> None:
    """Three times, for Python drops what is raised while an object is being deleted."""
    problem = transformer(24)
    were_cut_short = []
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores Ctrl-C
    try:
        for delay_s in (0.4, 0.5, 0.6):
            planner = Planner(problem)
            generous = planner.simulator.evaluate(planner.simulator.default_saved).peak_bytes
            timer = Timer(delay_s, _thread.interrupt_main)
            timer.start()
            plan = planner.solve(generous)
            timer.join()
            assert plan.peak_bytes <= generous
            were_cut_short.append(plan.truncated)
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert any(were_cut_short)


def test_the_hierarchical_planner_s_answer_does_not_depend_on_what_was_asked_before() -> None:
    problem = encoder_decoder(2)
    planner = Planner(problem)
    static, free = problem.total_static_bytes, free_transient(planner.simulator)
    for share in (0.9, 0.6, 0.8):
        budget_bytes = static + int(share * free)
        asked = planner.solve(budget_bytes, solver="hierarchical")
        alone = Planner(problem).solve(budget_bytes, solver="hierarchical")
        assert (asked.saved, asked.time_us) == (alone.saved, alone.time_us)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_each_further_kind_of_forms_makes_no_plan_slower(share: float) -> None:
    """As a user allows more: slices, then host memory, then two formats that round."""
    bare = transformer(2, fused=True)
    values = [value for value in storable(bare) if bare.values[value].size_bytes]
    cost = Transfer(cost_us=0.2)

    def offers(action: Action, format: str, share: float, error: str = "") -> list[Offer]:
        size = {value: int(bare.values[value].size_bytes * share) for value in values}
        parts = {value: bare.ops[bare.values[value].producer or 0].reads if action is Action.SLICE else () for value in values}
        return [
            Offer(value=value, action=action, format=format, size_bytes=size[value], store=cost, load=cost, error=error, parts=parts[value])
            for value in values
        ]

    kinds = [
        offers(Action.SLICE, "rows0_1_of_2", 0.5),
        offers(Action.OFFLOAD, "host", 0.3),
        offers(Action.NARROW, "bf16", 0.5, "some"),
        offers(Action.NARROW, "int8", 0.25, "more"),
    ]
    planners = [Planner(with_forms(bare, [offer for kind in kinds[:count] for offer in kind])) for count in range(len(kinds) + 1)]
    frontier = planners[0].frontier()
    least, most = frontier[0].peak_bytes, frontier[-1].peak_bytes
    times = [planner.solve(int(least + share * (most - least))).time_us for planner in planners]
    assert times == sorted(times, reverse=True)
    peaks = [planner.frontier()[0].peak_bytes for planner in planners]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.8])
def test_allowing_forms_makes_no_plan_slower(share: float) -> None:
    """With copies to host memory allowed, at budgets where orders of ops are the answer as well."""
    bare = transformer(2)
    link = HostLink(to_host_bytes_per_us=3e4, to_device_bytes_per_us=3e4, latency_us=0.0, source="made")
    values = [value for value in storable(bare) if bare.values[value].size_bytes]
    copies = plan_copies(Simulator(bare), values, link, host_bytes=dict.fromkeys(values, 1), limit_bytes=10**9)
    moved = Transfer(cost_us=1.0)
    first = Offer(value=0, action=Action.OFFLOAD, format="host", size_bytes=0, store=moved, load=moved)
    offers = [replace(first, value=one.value, stored_after=one.done, fetch=one.fetch, copy_us=one.copy_us) for one in copies]
    plain, formed = Planner(bare), Planner(with_forms(bare, offers))
    frontier = plain.frontier(with_orders=True)
    least, most = frontier[0].peak_bytes, frontier[-1].peak_bytes
    budget = int(least + share * (most - least))
    assert formed.solve(budget).time_us <= plain.solve(budget).time_us + 1e-6
