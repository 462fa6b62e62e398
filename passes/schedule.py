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
* an op that has run before holds its ``rerun_bytes`` beside its workspace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from dyngran.passes.plan import Plan, Schedule
from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.simulate import Outcome, Simulator, Timeline


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


@dataclass(frozen=True, slots=True)
class Making:
    """How a schedule makes one value for those who read or hold it: ``num_again`` copies beyond the first one; ``is_late``: one of its
    copies, the first or another, is made in backward."""

    num_again: int
    is_late: bool


@dataclass(slots=True)
class Copy:
    """One copy of a value: made at position ``first``, last used at ``last``; ``crosses`` if made in forward and used in backward."""

    value: int
    first: int
    last: int
    crosses: bool = False
    is_used: bool = False


@dataclass(frozen=True, slots=True)
class Replay:
    """A schedule position by position: bytes live while an op runs and, of these, beside values; ``again`` if the op has run before."""

    order: tuple[int, ...]
    copies: list[Copy]
    live_bytes: list[int]
    beside_bytes: list[int]
    again: list[bool]
    recompute_us: float


def replay_schedule(problem: Problem, schedule: Schedule) -> ScheduleOutcome:
    """Peak and time of a schedule that `check_schedule` accepts. Raises ValueError if an op reads what no run before it makes.

    Linear in the schedule. Raises ValueError for a problem whose code generator fuses: there order is not ours.
    """
    replay = replay_copies(problem, schedule)
    saved = frozenset(copy.value for copy in replay.copies if copy.crosses)
    return ScheduleOutcome(
        peak_bytes=problem.total_static_bytes + max(replay.live_bytes, default=0),
        time_us=round(sum(problem.ops[index].cost_us for index in replay.order), 6),  # as `Simulator.evaluate` rounds
        recompute_us=replay.recompute_us,
        num_recomputed=sum(replay.again),
        saved=saved,
        saved_bytes=sum(_counted_bytes(problem, value) for value in saved),
    )


def schedule_timeline(problem: Problem, schedule: Schedule) -> Timeline:
    """The whole curve of a schedule, as `Simulator.timeline` gives it for a saved set; a value of which two copies live at the peak stands
    there twice. Raises as `replay_schedule`."""
    replay = replay_copies(problem, schedule)
    live, num_forward, length = replay.live_bytes, len(schedule.forward), len(replay.order)
    peak = max(range(length), key=live.__getitem__) if live else 0
    tangents = [Copy(value.index, num_forward, length - 1) for value in problem.values if value.kind is Kind.TANGENT]
    intervals = [*replay.copies, *(tangents if schedule.backward else ())]
    grids: dict[Kind, list[int]] = {}
    at_peak: list[tuple[int, int]] = []
    for copy in intervals:
        size = _counted_bytes(problem, copy.value)
        grid = grids.setdefault(problem.values[copy.value].kind, [0] * (length + 1))
        grid[copy.first] += size
        grid[copy.last + 1] -= size
        if size and copy.first <= peak <= copy.last:
            at_peak.append((copy.value, size))
    return Timeline(
        names=tuple(problem.ops[index].name for index in replay.order),
        live_bytes=tuple(live),
        by_kind={kind: tuple(accumulate(grid[:-1])) for kind, grid in grids.items()},
        num_forward=num_forward,
        peak_position=peak,
        live_at_peak=tuple(sorted(at_peak, key=lambda item: (-item[1], item[0]))),
        workspace_at_peak_bytes=replay.beside_bytes[peak] if live else 0,
        time_us=sum(problem.ops[index].cost_us for index in replay.order),
        recompute_us=replay.recompute_us,
    )


def timeline_of(simulator: Simulator, plan: Plan | Outcome) -> Timeline:
    """The curve of what a plan runs: of its schedule if it has one, else of its saved set."""
    if plan.schedule is None:
        return simulator.timeline(plan.saved)
    return schedule_timeline(simulator.bare.problem, plan.schedule)


def makings(problem: Problem, schedule: Schedule) -> dict[int, Making]:
    """How each value is made, without those of which no copy is read or held. Copies that nobody uses do not count."""
    num_forward = len(schedule.forward)
    found: dict[int, Making] = {}
    seen: set[int] = set()
    for copy in _copies(problem, schedule):
        is_first = copy.value not in seen
        seen.add(copy.value)
        if copy.is_used:
            before = found.get(copy.value, Making(0, False))
            found[copy.value] = Making(before.num_again + (not is_first), before.is_late or copy.first >= num_forward)
    return found


def with_sources(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule in which each op that runs once, and takes nothing, for ops that run in forward (what sets a random state aside) has
    run when the first of them does. The simulator leaves such ops out where nothing is made again, planners may put them elsewhere."""
    sources = {op.index for op in problem.ops if op.side is Side.FREE and op.pinned and not op.reads}
    if not sources:
        return schedule
    done: set[int] = set()
    parts: list[tuple[int, ...]] = []
    for part in (schedule.forward, schedule.backward):
        placed: list[int] = []
        for index in part:
            producers = (problem.values[value].producer for value in problem.ops[index].reads)
            before = [index] if index in sources else [op for op in dict.fromkeys(producers) if op in sources]
            missing = [op for op in before if op is not None and op not in done]
            done.update(missing)
            placed += missing if index in sources else [*missing, index]
        parts.append(tuple(placed))
    return replace(schedule, forward=parts[0], backward=parts[1])


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


def _counted_bytes(problem: Problem, index: int) -> int:
    value = problem.values[index]
    return 0 if value.kind.is_static else value.size_bytes


def replay_copies(problem: Problem, schedule: Schedule) -> Replay:
    """Every position and every copy of a schedule. Raises as `replay_schedule`."""
    _refuse_fused(problem)
    order, num_forward = (*schedule.forward, *schedule.backward), len(schedule.forward)
    copies = _copies(problem, schedule)
    tangent_bytes = sum(value.size_bytes for value in problem.values if value.kind is Kind.TANGENT)
    again = _run_before(order)
    beside = [
        problem.ops[index].workspace_bytes + (problem.ops[index].rerun_bytes if is_again else 0)
        for index, is_again in zip(order, again, strict=True)
    ]
    change = [0] * (len(order) + 1)
    for copy in copies:
        size = _counted_bytes(problem, copy.value)
        change[copy.first] += size
        change[copy.last + 1] -= size
    live = [
        of_values + besides + (tangent_bytes if position >= num_forward else 0)
        for position, (of_values, besides) in enumerate(zip(accumulate(change[:-1]), beside, strict=True))
    ]
    recompute_us = sum(problem.ops[index].cost_us for index, is_again in zip(order, again, strict=True) if is_again)
    return Replay(order, copies, live, beside, again, recompute_us)


def _run_before(order: Sequence[int]) -> list[bool]:
    """At each position whether its op has run at an earlier one."""
    ran: set[int] = set()
    again = []
    for index in order:
        again.append(index in ran)
        ran.add(index)
    return again


def _copies(problem: Problem, schedule: Schedule) -> list[Copy]:
    """Every copy that a schedule makes of every value. Raises ValueError if an operand was not made before it is read."""
    order = (*schedule.forward, *schedule.backward)
    num_forward = len(schedule.forward)
    copies: list[Copy] = []
    newest: dict[int, Copy] = {}
    from_forward: dict[int, Copy] = {}
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
            copy.last, copy.is_used = position, True
            copy.crosses |= copy.first < num_forward <= position
        for value in dict.fromkeys(op.writes):
            newest[value] = Copy(value, position, position)
            copies.append(newest[value])
    last = len(order) - 1
    for value in problem.forward_outputs:
        if value in from_forward:
            from_forward[value].last, from_forward[value].is_used = last, True
    for value in problem.gradients:
        held = from_forward.get(value) if value in schedule.saved else newest.get(value)
        if held is not None:
            held.last, held.is_used = last, True
            held.crosses |= held.first < num_forward
    return copies
