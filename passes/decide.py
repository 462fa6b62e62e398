"""From a simulated saved set to a plan: one action and one reason for every value that backward needs."""

from __future__ import annotations

from dyngran.passes.bounds import Bound
from dyngran.passes.errors import format_bytes, format_us
from dyngran.passes.forms import crossing_values
from dyngran.passes.plan import Action, Decision, Plan, Schedule
from dyngran.passes.problem import Form, Problem, Side
from dyngran.passes.schedule import Making, makings
from dyngran.passes.simulate import Outcome, Simulator

JOINT_ORDER = "joint graph, recompute before first reader"
PRESCRIBED_ORDER = "prescribed for every op, values made as often as that takes"


def decide(
    simulator: Simulator,
    outcome: Outcome,
    *,
    budget_bytes: int | None,
    solver: str,
    fastest_us: float,
    truncated: bool = False,
    bound: Bound | None = None,
) -> Plan:
    """The plan of an outcome. ``fastest_us`` is the time of the fastest plan known, from which overhead is counted."""
    problem = simulator.problem
    return Plan(
        budget_bytes=budget_bytes,
        saved=outcome.saved,
        decisions=_decisions(simulator, outcome),
        peak_bytes=outcome.peak_bytes,
        static_bytes=problem.total_static_bytes,
        saved_bytes=outcome.saved_bytes,
        time_us=outcome.time_us,
        overhead_us=max(0.0, outcome.time_us - fastest_us),
        recompute_us=outcome.recompute_us,
        num_recomputed=outcome.num_recomputed,
        solver=solver,
        order=JOINT_ORDER if outcome.schedule is None else PRESCRIBED_ORDER,
        truncated=truncated,
        schedule=outcome.schedule,
        bound_us=bound.time_us if bound else 0.0,
        bound=bound.proof if bound else "",
    )


def recompute_cost_us(problem: Problem, value: int, saved: frozenset[int]) -> float:
    """Cost (us, ops priced one by one) of producing ``value`` again from the other saved values and the inputs."""
    cost = 0.0
    seen: set[int] = set()
    stack = [value]
    while stack:
        current = stack.pop()
        producer = problem.values[current].producer
        if producer is None or producer in seen or (current != value and current in saved):
            continue
        seen.add(producer)
        cost += problem.ops[producer].cost_us
        stack.extend(problem.ops[producer].reads)
    return cost


def _decisions(simulator: Simulator, outcome: Outcome) -> tuple[Decision, ...]:
    if outcome.schedule is not None:
        return _decisions_of_schedule(simulator.bare.problem, outcome.saved, outcome.schedule)
    problem = simulator.problem
    forward, backward = simulator.schedule(outcome.saved)
    ran = set(forward)
    crossing = crossing_values(problem, outcome.saved)
    decisions = [
        _store(problem, problem.form_of[value], crossing) if value in problem.form_of else _keep(problem, value, crossing)
        for value in outcome.saved
    ]
    candidates = set(simulator.candidates)
    for index in backward:
        op = problem.ops[index]
        if op.side is Side.BACKWARD:
            continue
        decisions.extend(_recompute(problem, v, again=index in ran) for v in op.writes if v in candidates and v not in crossing)
    return tuple(sorted(decisions, key=lambda decision: decision.value))


def _decisions_of_schedule(problem: Problem, saved: frozenset[int], schedule: Schedule) -> tuple[Decision, ...]:
    """Of what crosses, and of what is made in backward or more than once for somebody who reads it."""
    made, in_forward = makings(problem, schedule), set(schedule.forward)
    decisions = []
    for value in sorted(saved | made.keys()):
        producer = problem.values[value].producer
        making = made.get(value, Making(0, False))
        if value in saved:
            decisions.append(_keep(problem, value, saved, num_again=making.num_again))
        elif producer is not None and (making.num_again or (making.is_late and problem.ops[producer].side is not Side.BACKWARD)):
            again = producer in in_forward
            is_usual = making.is_late and making.num_again == int(again)  # as in a plan without a schedule
            decisions.append(_recompute(problem, value, again=again, num_again=0 if is_usual else making.num_again))
    return tuple(decisions)


def _keep(problem: Problem, index: int, saved: frozenset[int], *, num_again: int = 0) -> Decision:
    value = problem.values[index]
    producer = value.producer
    pinned = problem.ops[producer].pinned if producer is not None else "it is an input"
    cost_us = 0.0 if pinned else recompute_cost_us(problem, index, saved)
    if pinned:
        reason = f"cannot run twice: {pinned}"
    elif index in problem.forward_outputs:
        reason = "the caller holds it anyway"
    elif problem.keeps_as_small(value.index):
        reason = "small: breaks chains of recompute"
    else:
        reason = f"recomputing it costs {format_us(cost_us)} for {format_bytes(value.size_bytes)}"
    if num_again:
        reason += f"; made again {_times(num_again)}"
    return Decision(
        value=index,
        name=value.name,
        action=Action.KEEP,
        reason=reason,
        size_bytes=value.size_bytes,
        recompute_us=cost_us,
        label=value.label,
    )


def _store(problem: Problem, form: Form, crossing: frozenset[int]) -> Decision:
    """``crossing``: the values that cross in whatever form."""
    value, stored = problem.values[form.value], problem.values[form.stored]
    cost_us = problem.ops[form.store].cost_us + problem.ops[form.load].cost_us
    reason = f"{format_bytes(stored.size_bytes)} as {form.format}: {format_us(cost_us)} to store and load"
    if not problem.ops[_producer(problem, form.value)].pinned:
        reason += f", {format_us(recompute_cost_us(problem, form.value, crossing))} to make again"
    if form.error:
        reason += f"; rounded: {form.error}"
    if form.evidence:
        reason += f"; {form.evidence}"
    return Decision(
        value=form.value,
        name=value.name,
        action=form.action,
        reason=reason,
        size_bytes=value.size_bytes,
        label=value.label,
        dimension=form.dimension,
        fraction=form.fraction,
        format=form.format,
        stored_bytes=stored.size_bytes,
        error=form.error,
    )


def _producer(problem: Problem, value: int) -> int:
    producer = problem.values[value].producer
    assert producer is not None
    return producer


def _recompute(problem: Problem, index: int, *, again: bool, num_again: int = 0) -> Decision:
    """``again``: forward makes it as well. ``num_again``: copies beyond the first, where that is not one that backward makes."""
    value = problem.values[index]
    assert value.producer is not None
    op = problem.ops[value.producer]
    if op.never_saved and not op.pinned and op.reads:
        reason = f"in a checkpoint region of the user's: {format_us(op.cost_us)} to make again"
        reason += f", {_times(num_again)}" if num_again else ""
    elif num_again:
        reason = f"made again {_times(num_again)}, {format_us(op.cost_us)} each: frees {format_bytes(value.size_bytes)} between its readers"
    elif again:
        reason = f"{format_us(op.cost_us)} to make again, frees {format_bytes(value.size_bytes)} until backward reads it"
    else:
        reason = "only backward needs it: made just before its first reader"
    return Decision(
        value=index,
        name=value.name,
        action=Action.RECOMPUTE,
        reason=reason,
        size_bytes=value.size_bytes,
        recompute_us=op.cost_us * max(1, num_again),
        label=value.label,
    )


def _times(count: int) -> str:
    return "1 time" if count == 1 else f"{count} times"
