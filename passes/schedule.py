"""Replay of a schedule op by op: what an order in which ops may run more than once costs, and whether it can run at all.

The readable truth for everything that plans orders. Rules:

* forward runs, then backward; each run of an op makes a new copy of each of its results, and a reader reads the newest copy;
* a copy is live from the run that makes it to its last reader, both included; a copy that nobody reads dies at once;
* the caller holds, to the end of the step, the copy of each forward output that is newest when forward ends, and the copy of each
  gradient that is newest when backward ends;
* a copy that forward made and backward reads or returns crosses: it is what is saved;
* values in ``schedule.saved`` are read in backward from the copy that crossed, whatever is newer (the sibling rule of
  `passes/simulate.py`); copies of them that backward makes die at once;
* tangents are live over the whole backward; what is static costs nothing here and is counted once, in ``problem.static_bytes``;
* an op that has run before holds its ``rerun_bytes`` beside its workspace when it runs in backward.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from dyngran.passes.plan import Schedule
from dyngran.passes.problem import Kind, Problem, Side


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOutcome:
    """What a schedule costs.

    ``peak_bytes`` includes static bytes; ``time_us`` is forward + backward. ``recompute_us`` and ``num_recomputed`` count every run of
    an op but its first. ``saved`` are the values that cross from forward to backward, ``saved_bytes`` what they hold.
    """

    peak_bytes: int
    time_us: float
    recompute_us: float
    num_recomputed: int
    saved: frozenset[int]
    saved_bytes: int


@dataclass(slots=True)
class _Copy:
    """One copy of a value: made at position ``first``, last used at ``last``; ``crosses`` if made in forward and used in backward."""

    value: int
    first: int
    last: int
    crosses: bool = False


def replay_schedule(problem: Problem, schedule: Schedule) -> ScheduleOutcome:
    """Peak and time of a schedule that `check_schedule` accepts. Raises ValueError if an op reads what no run before it makes.

    Linear in the schedule. Raises ValueError for a problem whose code generator fuses: there order is not ours.
    """
    _refuse_fused(problem)
    order = (*schedule.forward, *schedule.backward)
    num_forward = len(schedule.forward)
    copies = _copies(problem, schedule)
    sizes = [0 if value.kind.is_static else value.size_bytes for value in problem.values]
    change = [0] * (len(order) + 1)
    for copy in copies:
        change[copy.first] += sizes[copy.value]
        change[copy.last + 1] -= sizes[copy.value]
    tangent_bytes = sum(value.size_bytes for value in problem.values if value.kind is Kind.TANGENT)
    live = list(accumulate(change[:-1]))
    ran: set[int] = set()
    recompute_us = 0.0
    for position, index in enumerate(order):
        op, again = problem.ops[index], index in ran
        live[position] += op.workspace_bytes
        if position >= num_forward:
            live[position] += tangent_bytes + (op.rerun_bytes if again else 0)
        if again:
            recompute_us += op.cost_us
        ran.add(index)
    saved = frozenset(copy.value for copy in copies if copy.crosses)
    return ScheduleOutcome(
        peak_bytes=problem.total_static_bytes + max(live, default=0),
        time_us=round(sum(problem.ops[index].cost_us for index in order), 6),  # as `Simulator.evaluate` rounds
        recompute_us=recompute_us,
        num_recomputed=len(order) - len(ran),
        saved=saved,
        saved_bytes=sum(sizes[value] for value in saved),
    )


def check_schedule(problem: Problem, schedule: Schedule) -> None:
    """Raises ValueError with the first thing that is wrong with a schedule; returns if it can run and makes all that it owes."""
    _refuse_fused(problem)
    order = (*schedule.forward, *schedule.backward)
    unknown = [index for index in order if not 0 <= index < len(problem.ops)]
    if unknown:
        raise ValueError(f"the schedule names op {unknown[0]}; the problem has {len(problem.ops)} ops")
    in_forward, in_step = set(schedule.forward), Counter(order)
    for op in problem.ops:
        if op.side is Side.BACKWARD and op.index in in_forward:
            raise ValueError(f"{op.name} depends on a tangent and cannot run in forward")
        if op.side is Side.FORWARD and op.index not in in_forward:
            raise ValueError(f"{op.name} must run in forward")
        if op.side is Side.BACKWARD and not in_step[op.index]:
            raise ValueError(f"{op.name} must run in backward")
        if op.pinned and in_step[op.index] > 1:
            raise ValueError(f"{op.name} runs {in_step[op.index]} times but must not run twice: {op.pinned}")
    for value in sorted(problem.forward_outputs | problem.gradients):
        producer = problem.values[value].producer
        if producer is not None and not (in_step[producer] if value not in problem.forward_outputs else producer in in_forward):
            raise ValueError(f"{problem.values[value].name} is returned but nothing makes it")
    for copy in _copies(problem, schedule):
        producer = problem.values[copy.value].producer
        if producer is not None and copy.crosses and problem.ops[producer].never_saved and not problem.ops[producer].pinned:
            raise ValueError(f"{problem.values[copy.value].name} is never saved, but backward uses the copy that forward made")


def _refuse_fused(problem: Problem) -> None:
    if problem.fused:
        raise ValueError("this problem's code generator fuses ops and orders them itself: schedules are for problems with fused=False")


def _copies(problem: Problem, schedule: Schedule) -> list[_Copy]:
    """Every copy that a schedule makes of every value. Raises ValueError if an operand was not made before it is read."""
    order = (*schedule.forward, *schedule.backward)
    num_forward = len(schedule.forward)
    copies: list[_Copy] = []
    newest: dict[int, _Copy] = {}
    from_forward: dict[int, _Copy] = {}
    for position in range(len(order) + 1):
        if position == num_forward:
            from_forward = dict(newest)
        if position == len(order):
            break
        op = problem.ops[order[position]]
        for value in dict.fromkeys(op.reads):
            if problem.values[value].producer is None:
                continue
            if position >= num_forward and value in schedule.saved and value in from_forward:
                copy = from_forward[value]
            elif value in newest:
                copy = newest[value]
            else:
                raise ValueError(f"{op.name} reads {problem.values[value].name}, which nothing has made yet (position {position})")
            copy.last = position
            copy.crosses |= copy.first < num_forward <= position
        for value in dict.fromkeys(op.writes):
            newest[value] = _Copy(value, position, position)
            copies.append(newest[value])
    last = len(order) - 1
    for value in problem.forward_outputs:
        if value in from_forward:
            from_forward[value].last = last
    for value in problem.gradients:
        held = from_forward.get(value) if value in schedule.saved else newest.get(value)
        if held is not None:
            held.last = last
            held.crosses |= held.first < num_forward
    return copies
