"""Slow obvious truths: a replay with sets instead of intervals, and the best plan of a small problem by trying them all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.simulate import Outcome, Simulator


@dataclass(frozen=True)
class Truth:
    peak_bytes: int
    time_us: float
    num_recomputed: int


def naive_replay(problem: Problem, wished: Iterable[int]) -> Truth:
    """Run the schedule op by op and, before each op, look at everything that is still to run to see what may be freed.

    Valid without fusion. It takes the schedule's rules from the documentation, not from the simulator's code.
    """
    crossing = _crossing(problem, frozenset(wished))
    made_anyway = frozenset(write for op in problem.ops if op.side is Side.FORWARD for write in op.writes)
    early = _ancestors(problem, crossing - made_anyway, stop=made_anyway)
    forward = [op.index for op in problem.ops if op.side is Side.FORWARD or (op.side is Side.FREE and op.index in early)]
    backward = _backward(problem, crossing)
    live: list[tuple[int, str]] = []  # storages: (value, which copy)
    peak = 0

    def size(value: int) -> int:
        return 0 if problem.values[value].kind.is_static else problem.values[value].size_bytes

    for place, index in enumerate(forward):
        live += [(write, "first") for write in problem.ops[index].writes]
        peak = max(peak, sum(size(value) for value, _ in live) + problem.ops[index].workspace_bytes)
        ahead = {read for later in forward[place + 1 :] for read in problem.ops[later].reads}
        live = [item for item in live if item[0] in ahead | crossing | problem.forward_outputs]
    held = [value.index for value in problem.values if value.kind is Kind.TANGENT]
    for place, index in enumerate(backward):
        op = problem.ops[index]
        live += [(write, "again") for write in _made_by(problem, index)]
        extra = sum(size(value) for value in held)
        extra += op.workspace_bytes + (op.rerun_bytes if index in forward else 0)
        peak = max(peak, sum(size(value) for value, _ in live) + extra)
        ahead = {read for later in backward[place + 1 :] for read in problem.ops[later].reads}
        kept = []
        for value, copy in live:
            if value in crossing and copy == "again":
                continue  # the saved copy is the one that is read
            needed = value in ahead or value in problem.gradients
            if copy == "first":
                needed = value in problem.forward_outputs or (value in crossing and needed)
            if needed:
                kept.append((value, copy))
        live = kept
    num_recomputed = len([index for index in backward if index in set(forward)])
    return Truth(
        peak_bytes=problem.total_static_bytes + peak,
        time_us=sum(problem.ops[index].cost_us for index in forward + backward) + _waits_us(problem, crossing, backward),
        num_recomputed=num_recomputed,
    )


def _tangent_made(problem: Problem) -> frozenset[int]:
    return frozenset(write for op in problem.ops if op.side is Side.BACKWARD for write in op.writes)


def _crossing(problem: Problem, wished: frozenset[int]) -> frozenset[int]:
    """Where a form does not serve all that runs again, its value crosses itself, and what else crosses is found anew."""
    unserved: set[int] = set()
    while True:
        crossing, again = _crossing_without(problem, wished, unserved)
        found = {form.value for form in problem.forms if form.stored in crossing and form.barred & again}
        if not found:
            return crossing
        unserved |= found


def _crossing_without(problem: Problem, wished: frozenset[int], unserved: set[int]) -> tuple[frozenset[int], set[int]]:
    """What crosses, and what runs again, if values of which no form serves cross themselves."""
    late = _tangent_made(problem)
    needed = {read for op in problem.ops if op.side is Side.BACKWARD for read in op.reads} | problem.gradients
    crossing: set[int] = set()
    done: set[int] = set()
    while needed - done:
        value = min(needed - done)
        done.add(value)
        producer = problem.values[value].producer
        if producer is None or value in late:
            continue
        op = problem.ops[producer]
        small = problem.keeps_as_small(value)
        form = next((form for form in problem.forms if form.value == value and form.stored in wished), None)
        if value in unserved or ((op.pinned or not op.never_saved) and (value in wished or small)):
            crossing.add(value)
        elif form is not None:
            crossing.add(form.stored)
            needed |= set(problem.ops[form.load].reads) - {form.stored}
        elif op.pinned:
            crossing.add(value)
        else:
            needed |= set(problem.ops[producer].reads)
    loaded = {form.value for form in problem.forms if form.stored in crossing}
    again = {producer for value in done - late - loaded - crossing if (producer := problem.values[value].producer) is not None}
    again |= {op for form in problem.forms if form.stored in crossing for op in form.again}
    return frozenset(crossing), again


def _made_by(problem: Problem, op: int) -> tuple[int, ...]:
    return tuple(form.value for form in problem.forms if form.load == op) or problem.ops[op].writes


def _ancestors(problem: Problem, values: Iterable[int], stop: frozenset[int], *, crossing: frozenset[int] = frozenset()) -> set[int]:
    """Ops that make the values; a value of which a form crosses is made by the op that loads it."""
    loads = {form.value: form.load for form in problem.forms if form.stored in crossing}
    found: set[int] = set()
    todo = list(values)
    while todo:
        value = todo.pop()
        producer = loads.get(value, problem.values[value].producer)
        if producer is not None and producer not in found:
            found.add(producer)
            todo += [read for read in problem.ops[producer].reads if read not in stop]
    return found


def _waits_us(problem: Problem, crossing: frozenset[int], order: list[int]) -> float:
    """How long first readers wait for copies that began when they were loaded."""
    total_us = 0.0
    for form in problem.forms:
        if form.stored in crossing and form.load in order:
            after = order[order.index(form.load) + 1 :]
            reader = next((place for place, op in enumerate(after) if form.value in problem.ops[op].reads), None)
            if reader is not None:
                total_us += max(0.0, form.copy_us - sum(problem.ops[op].cost_us for op in after[:reader]))
    return total_us


def _backward(problem: Problem, crossing: frozenset[int]) -> list[int]:
    order: list[int] = []
    late = _tangent_made(problem)
    have = set(crossing) | {value.index for value in problem.values if value.producer is None}
    goals = [(list(op.reads), op.index) for op in problem.ops if op.side is Side.BACKWARD]
    goals.append(([value for value in sorted(problem.gradients) if value not in late], -1))
    for reads, index in goals:
        fetched = [[form.value] for form in problem.forms if form.stored in crossing and form.fetch == index]
        for wanted in (reads, *fetched):
            missing = [read for read in wanted if read not in have]
            for again in sorted(_ancestors(problem, missing, stop=frozenset(have), crossing=crossing)):
                order.append(again)
                have |= set(_made_by(problem, again))
        if index >= 0:
            order.append(index)
            have |= set(problem.ops[index].writes)
    return order


def every_plan(simulator: Simulator) -> list[Outcome]:
    """All saved sets of a small problem (2 to the number of candidates), each simulated once."""
    sets = {
        simulator.normalize(frozenset(chosen))
        for count in range(len(simulator.candidates) + 1)
        for chosen in combinations(simulator.candidates, count)
    }
    return [simulator.evaluate(saved) for saved in sorted(sets, key=sorted)]


def best_time(outcomes: Iterable[Outcome], budget_bytes: int) -> float | None:
    """The least time among the plans that fit; None if none fits."""
    return min((outcome.time_us for outcome in outcomes if outcome.peak_bytes <= budget_bytes), default=None)
