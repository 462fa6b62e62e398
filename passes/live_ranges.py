"""When each allocation of a step is live: what pictures are drawn from, and what adds up to a timeline.

An allocation is live from the position that makes it to its last reader, both included; what is held to the end of the step ends at the
last position. An operand over which a fused kernel writes ends one position earlier: there its memory is already the result's. So the
sizes of what is live at a position, and what is allocated beside values there, add up to `Timeline.live_bytes` exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from dyngran.passes.plan import Plan, Schedule
from dyngran.passes.problem import Kind, Problem
from dyngran.passes.schedule import replay_copies
from dyngran.passes.simulate import Outcome, Replay, Simulator, written_over


@dataclass(frozen=True, slots=True)
class LiveRange:
    """One allocation of ``value``, live at the positions ``first`` to ``last``."""

    value: int
    first: int
    last: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStep:
    """One step, position by position, static bytes excluded.

    Attributes:
        ops: the op that each position is named after; reads, writes: the values that move there; costs_us: device time of each.
        num_forward: positions of forward.
        is_again: True where an op runs that has run before.
        beside_bytes: allocated at each position beside values: workspaces.
        ranges: every allocation that takes memory, by first position.
    """

    ops: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    costs_us: tuple[float, ...]
    num_forward: int
    is_again: tuple[bool, ...]
    beside_bytes: tuple[int, ...]
    ranges: tuple[LiveRange, ...]

    def curve(self, ranges: Iterable[LiveRange]) -> list[int]:
        """Bytes of ``ranges`` at each position."""
        change = [0] * (len(self.ops) + 1)
        for one in ranges:
            change[one.first] += one.size_bytes
            change[one.last + 1] -= one.size_bytes
        return list(accumulate(change[:-1]))

    @property
    def live_bytes(self) -> list[int]:
        """As `Timeline.live_bytes`."""
        return [values + beside for values, beside in zip(self.curve(self.ranges), self.beside_bytes, strict=True)]


def live_step_of(simulator: Simulator, plan: Plan | Outcome) -> LiveStep:
    """What a plan runs: its schedule if it has one, else its saved set."""
    if plan.schedule is None:
        return live_step(simulator, plan.saved)
    return live_step_of_schedule(simulator.bare.problem, plan.schedule)


def live_step(simulator: Simulator, saved: Iterable[int]) -> LiveStep:
    """The allocations of `Simulator.timeline`."""
    crossing = simulator.normalize(saved)
    replay = simulator.replay(crossing)
    forward, backward = (set(ops) for ops in simulator.schedule(crossing))
    kernels = [*replay.forward, *replay.backward]
    num_forward = len(replay.forward)
    return LiveStep(
        ops=tuple(kernel.op for kernel in kernels),
        reads=tuple(kernel.reads for kernel in kernels),
        writes=tuple(kernel.writes for kernel in kernels),
        costs_us=tuple(kernel.cost_us for kernel in kernels),
        num_forward=num_forward,
        is_again=tuple(p >= num_forward and kernel.op in forward and kernel.op in backward for p, kernel in enumerate(kernels)),
        beside_bytes=tuple(kernel.workspace_bytes for kernel in kernels),
        ranges=_replayed(simulator.problem, replay),
    )


def live_step_of_schedule(problem: Problem, schedule: Schedule) -> LiveStep:
    """The allocations of `schedule_timeline`, whose errors it raises."""
    replay = replay_copies(problem, schedule)
    sizes, length, num_forward = _sizes(problem), len(replay.order), len(schedule.forward)
    found = [LiveRange(copy.value, copy.first, copy.last, sizes[copy.value]) for copy in replay.copies]
    if schedule.backward:
        tangents = (value.index for value in problem.values if value.kind is Kind.TANGENT)
        found += [LiveRange(value, num_forward, length - 1, sizes[value]) for value in tangents]
    return LiveStep(
        ops=replay.order,
        reads=tuple(problem.ops[op].reads for op in replay.order),
        writes=tuple(problem.ops[op].writes for op in replay.order),
        costs_us=tuple(problem.ops[op].cost_us for op in replay.order),
        num_forward=num_forward,
        is_again=tuple(replay.again),
        beside_bytes=tuple(replay.beside_bytes),
        ranges=_in_order(found),
    )


def _replayed(problem: Problem, replay: Replay) -> tuple[LiveRange, ...]:
    kernels = [*replay.forward, *replay.backward]
    sizes = _sizes(problem)
    dying: dict[int, list[int]] = {}
    for value, first, last in replay.intervals:
        if last is not None and last > first and kernels[last].in_place:
            dying.setdefault(last, []).append(value)
    early = {(value, position) for position, values in dying.items() for value in written_over(kernels[position], values, sizes)}
    found = []
    for value, first, last in replay.intervals:
        if last is None:
            last = len(kernels) - 1
        elif last > first and (value, last) in early:
            last -= 1
        found.append(LiveRange(value, first, last, sizes[value]))
    return _in_order(found)


def _in_order(ranges: Iterable[LiveRange]) -> tuple[LiveRange, ...]:
    return tuple(sorted((one for one in ranges if one.size_bytes), key=lambda one: (one.first, one.value)))


def _sizes(problem: Problem) -> list[int]:
    return [0 if value.kind.is_static else value.size_bytes for value in problem.values]
