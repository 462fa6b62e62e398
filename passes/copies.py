"""When values are copied to host memory and back: slots on the link between the two, beside the kernels of a step.

Each direction of the link carries one copy at a time. A value's copy starts once the value has been made and ends before forward does; the
copy back ends before the first op of backward that may want it. Times are those of the step that saves everything: a step that recomputes
takes longer, so its copies have more time. Values choose one after the other, and each takes the first free slot after it was made and the
last free one before it is wanted, or none. Whoever offloads only some of them meets every slot as well.

Method: list scheduling on two machines with release and due dates.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dyngran.passes.problem import Problem, Side
from dyngran.passes.regions import separating_values
from dyngran.passes.simulate import Simulator

SHARE = 0.95  # of the link's measured speed that slots are made for: copies and kernels disturb each other a little


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """Copies between device memory and pinned host memory: bytes per microsecond in each direction, and what a copy takes besides (us)."""

    to_host_bytes_per_us: float
    to_device_bytes_per_us: float
    latency_us: float
    source: str

    def to_host_us(self, num_bytes: int) -> float:
        return self.latency_us + num_bytes / (SHARE * self.to_host_bytes_per_us)

    def to_device_us(self, num_bytes: int) -> float:
        return self.latency_us + num_bytes / (SHARE * self.to_device_bytes_per_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A value's way to host memory and back.

    Attributes:
        start: the op after which the copy starts; the one that makes the value, or a later one while the link is busy.
        done: the op after which it has arrived: the value is held until then.
        fetch: the backward op before which the copy back starts.
        copy_us: how long the copy back takes.
    """

    value: int
    start: int
    done: int
    fetch: int
    copy_us: float


def plan_copies(
    simulator: Simulator, values: Iterable[int], link: HostLink, *, host_bytes: Mapping[int, int], limit_bytes: int
) -> list[Copy]:
    """Copies of those of ``values`` for which there is time, in the order of their start; the first to choose comes first in ``values``.
    ``host_bytes``: what each takes of the host's memory, all together at most ``limit_bytes``.

    The problem has no forms, and some op of forward makes each of the values. Those that backward never reads are left out.
    """
    problem = simulator.problem
    clock = _Clock(simulator)
    wanted = _first_use(problem)
    out, back = _Link(0.0, clock.forward_us), _Link(0.0, clock.backward_us)
    left, copies = limit_bytes, []
    for value in values:
        moved_bytes, producer, first_use = problem.values[value].size_bytes, problem.values[value].producer, wanted[value]
        assert producer is not None
        if first_use is None or host_bytes[value] > left:
            continue
        out_us, back_us = link.to_host_us(moved_bytes), link.to_device_us(moved_bytes)
        begin, end = out.first_after(clock.made_at(producer), out_us), back.last_before(clock.wanted_at(first_use), back_us)
        if begin is None or end is None:
            continue
        start, done = max(producer, clock.last_done(begin)), clock.first_done(begin + out_us)
        if done is None:
            continue
        out.take(begin, begin + out_us)
        back.take(end - back_us, end)
        left -= host_bytes[value]
        copies.append(Copy(value=value, start=start, done=max(done, start), fetch=clock.last_begun(end - back_us), copy_us=back_us))
    return sorted(copies, key=lambda copy: (copy.start, copy.done, copy.value))


class _Clock:
    """When ops run in the step that saves everything: us from the start of forward, and from the start of backward.

    Where ops fuse, only those that stay kernels of their own say when something happens: which loop an op becomes a part of, and where that
    then stands, is the code generator's business.
    """

    def __init__(self, simulator: Simulator) -> None:
        problem = simulator.problem
        replay = simulator.replay(simulator.default_saved)
        self._late = [op.index for op in problem.ops if op.side is Side.BACKWARD]
        is_place = [not (problem.fused and op.fusible) for op in problem.ops]
        ends: list[tuple[int, float]] = []
        self.forward_us = 0.0
        for kernel in replay.forward:
            self.forward_us += kernel.cost_us
            ends.append((kernel.op, self.forward_us))
        self._ops, self._ends = [op for op, _ in ends], [end for _, end in ends]
        self._places = [op for op, _ in ends if is_place[op]]
        self._place_ends = [end for op, end in ends if is_place[op]]
        begins: dict[int, float] = {}
        self.backward_us = 0.0
        for kernel in replay.backward:
            begins.setdefault(kernel.op, self.backward_us)
            self.backward_us += kernel.cost_us
        begin = self.backward_us
        self._begins = []
        for op in reversed(self._late):  # what is inlined runs with the next kernel
            begin = min(begin, begins.get(op, begin))
            self._begins.append(begin)
        self._begins.reverse()
        self._place = {op: place for place, op in enumerate(self._late)}
        late_places = [(op, begin) for op, begin in zip(self._late, self._begins, strict=True) if is_place[op]]
        self._late_places, self._place_begins = [op for op, _ in late_places], [begin for _, begin in late_places]

    def made_at(self, op: int) -> float:
        """When an op of forward has run."""
        place = bisect_left(self._ops, op)
        return self._ends[place] if place < len(self._ends) else self.forward_us

    def last_done(self, time_us: float) -> int:
        """The last op of forward that has run by then; -1 if none has."""
        place = bisect_right(self._place_ends, time_us)
        return self._places[place - 1] if place else -1

    def first_done(self, time_us: float) -> int | None:
        """The first op of forward that ends then or later; None if forward has ended."""
        place = bisect_left(self._place_ends, time_us)
        return self._places[place] if place < len(self._places) else None

    def wanted_at(self, op: int) -> float:
        """When an op of backward begins."""
        return self._begins[self._place[op]]

    def last_begun(self, time_us: float) -> int:
        """The last op of backward that begins then or earlier, else the first."""
        place = bisect_right(self._place_begins, time_us)
        return self._late_places[place - 1] if place else self._late[0]


class _Link:
    """One direction of a link between two times: the slots taken, which do not overlap."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin, self._end = begin, end
        self._taken: list[tuple[float, float]] = []

    def take(self, begin: float, end: float) -> None:
        insort(self._taken, (begin, end))

    def first_after(self, time: float, length: float) -> float | None:
        """The earliest begin of a free slot of that length that does not begin before ``time``."""
        begin = max(time, self._begin)
        for one, other in self._taken:
            if begin + length <= one:
                break
            begin = max(begin, other)
        return begin if begin + length <= self._end else None

    def last_before(self, time: float, length: float) -> float | None:
        """The latest end of a free slot of that length that does not end after ``time``."""
        end = min(time, self._end)
        for one, other in reversed(self._taken):
            if other <= end - length:
                break
            end = min(end, one)
        return end if end - length >= self._begin else None


def _first_use(problem: Problem) -> list[int | None]:
    """Per value the first op of backward that may want it: that reads it, or something that is made of it again.

    What is made of it is followed through one place where few bytes cross from one part of forward to the next (`separating_values`), since
    a sum there is often made again; not further, nor through what cannot run again: plans that go further wait for their copies.
    """
    separating = separating_values(problem)
    late = {write for op in problem.ops if op.side is Side.BACKWARD for write in op.writes}
    read_at: dict[int, int] = {}
    for op in problem.ops:
        if op.side is Side.BACKWARD:
            for read in op.reads:
                if read not in late:
                    read_at.setdefault(read, op.index)

    def closure(through: Mapping[int, int]) -> dict[int, int]:
        """``through``: the first use of separating values, where it counts for what they are made of."""
        first = dict(read_at)
        for op in reversed(problem.ops):
            if op.side is Side.BACKWARD or op.pinned or not separating:
                continue
            uses = [through.get(write) if write in separating else first.get(write) for write in op.writes]
            known = [use for use in uses if use is not None]
            for read in op.reads if known else ():
                first[read] = min(first.get(read, known[0]), *known)
        return first

    first = closure(closure({}))
    return [first.get(value.index) for value in problem.values]
