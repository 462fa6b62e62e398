"""Binomial checkpointing (Griewank and Walther 2000, "Algorithm 799: revolve") on the chain of regions.

Forward runs once and leaves the state (what crosses the boundary before a region) at some boundaries: ``slots`` of them, the state before
the first region included. Backward takes the regions from the last to the first; where the state before a region is not there, forward
runs again from the nearest one that is, leaving new states in the slots that have become free. With ``s`` slots and no region run
forward more than ``r`` times the longest chain has ``C(s + r, s)`` regions, and the split after ``C(s + r - 1, s)`` is optimal.

A graph is not quite a chain, so:

* A region runs once more when backward arrives at it, for the values inside it that backward reads; an op whose results all cross a
  boundary that is held does not.
* Backward keeps the joint graph's order; an op runs as soon as what it reads is in the region at hand or in the state before it. What
  it reads from elsewhere stays live from its newest copy: any graph gets a valid schedule, chains a good one.
* With every state kept the tail may be longer than the last region: backward begins there, and what is inside it need not run again.
  Nothing runs more than twice then, so these plans are saved sets in any case.
* Ops that must not run twice keep their results; what the user's checkpoint regions make and what only backward needs is made on demand.
* Runs that nobody reads are taken out.

Values may be made any number of times, so without fusion each number of slots gives a `Schedule`. Where the code generator fuses, order
is not ours: the states that the first sweep leaves are proposed as a saved set, and everything between them runs again once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from math import comb

from dyngran.passes.plan import Plan, Schedule
from dyngran.passes.problem import Problem, Side
from dyngran.passes.regions import Crossings, region_numbers
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.boundaries import crossing_values, narrow_boundaries, values_after
from dyngran.passes.solvers.solving import solve_with

MAX_REGIONS = 512  # longer chains are cut at every k-th boundary
MAX_REPEATS = 6  # slots so few that a region would run forward more often are not proposed
MAX_TAILS = 128
ALL_SLOTS = 16  # up to which every number of slots is proposed; beyond it each is a quarter more than the last


def longest_chain(slots: int, repeats: int) -> int:
    """Regions that ``slots`` states reverse if none runs forward more than ``repeats`` times: C(slots + repeats, slots)."""
    return comb(slots + repeats, slots) if slots >= 0 and repeats >= 0 else 0


def repeats_for(length: int, slots: int) -> int:
    """The least number of repeats for a chain of that length."""
    repeats = 0
    while longest_chain(slots, repeats) < length:
        repeats += 1
    return repeats


def num_advances(length: int, slots: int) -> int:
    """Regions that the optimal schedule runs forward, the first sweep to the last region included: r l - C(s + r, s + 1)."""
    repeats = repeats_for(length, slots)
    return repeats * length - longest_chain(slots + 1, repeats - 1)


def split(length: int, slots: int) -> int:
    """After how many regions of a chain of at least two the next state is left, with ``slots`` >= 2, the one at its start included."""
    repeats = repeats_for(length, slots)
    return min(longest_chain(slots, repeats - 1), length - longest_chain(slots - 1, repeats - 1))


def propose(simulator: Simulator, *, budget_bytes: int | None = None) -> Iterator[frozenset[int] | Schedule]:
    """One schedule (fused: one saved set) for each number of slots, fewest first, then a saved set for each tail; the same for every
    budget."""
    problem = simulator.problem
    crossings = simulator.crossings
    boundaries = narrow_boundaries(problem, crossings)
    boundaries = boundaries[:: len(boundaries) // MAX_REGIONS + 1]
    chain = _Chain(problem, crossings, boundaries)
    for slots in _slot_numbers(chain.length):
        if problem.fused:
            yield crossing_values(crossings, [boundaries[state - 1] for state in first_states(chain.length, slots)])
        else:
            yield chain.schedule(slots)
    for end in range(1, chain.length, chain.length // MAX_TAILS + 1):
        states = boundaries[:end]
        yield crossing_values(crossings, states) | values_after(simulator, crossings, states[-1])


def first_states(length: int, slots: int) -> list[int]:
    """Regions before which the first sweep leaves a state, the first region excepted."""
    states: list[int] = []
    start = 0
    while length - start > 1 and slots > 1:
        start += split(length - start, slots)
        slots -= 1
        states.append(start)
    return states


def _slot_numbers(length: int) -> Iterator[int]:
    slots = 1
    while slots < max(length, 2):
        if repeats_for(length, slots) <= MAX_REPEATS:
            yield slots
        slots = slots + 1 if slots < ALL_SLOTS else slots * 5 // 4
    yield max(length, 2)


class _Chain:
    """A graph read as a chain of regions: which ops and boundary states each has, and from which region on backward can run."""

    def __init__(self, problem: Problem, crossings: Crossings, boundaries: Sequence[int]) -> None:
        self.problem = problem
        self._crossings = crossings
        self._boundaries = boundaries
        self._states: dict[int, frozenset[int]] = {}
        numbers = region_numbers(problem, boundaries, crossings)
        self.ops: list[list[int]] = [[] for _ in range(len(boundaries) + 1)]
        region = list(numbers)
        for position, index in enumerate(crossings.ops):
            region[index] = bisect_left(boundaries, position)
            self.ops[region[index]].append(index)
        self.backward = [op.index for op in problem.ops if op.side is Side.BACKWARD]
        late = {write for index in self.backward for write in problem.ops[index].writes}
        stages = {value: self._stage(value, region) for index in self.backward for value in problem.ops[index].reads if value not in late}
        reads = [[stages[value] for value in problem.ops[index].reads if value in stages] for index in self.backward]
        self.length = 1 + max((stage for row in reads for stage in row if stage < len(self.ops)), default=0)
        self.stages = [min(row, default=len(self.ops)) for row in reads]

    def state(self, region: int) -> frozenset[int]:
        """What crosses into a region."""
        if region not in self._states:
            self._states[region] = self._crossings.at(self._boundaries[region - 1]) if region else frozenset()
        return self._states[region]

    def schedule(self, slots: int) -> Schedule:
        return _Reversal(self, slots).run()

    def _stage(self, value: int, region: Sequence[int]) -> int:
        """The last region whose state holds the value, or the one inside which it is; beyond the last if it is there anyway."""
        producer = self.problem.values[value].producer
        if producer is None:
            return len(self.ops)
        last = self._crossings.last.get(value, -1)
        return max(bisect_left(self._boundaries, last + 1), region[producer])


class _Reversal:
    """One schedule in the making: the runs of backward so far and the states that are held."""

    def __init__(self, chain: _Chain, slots: int) -> None:
        self._chain = chain
        self._slots = slots
        self._ops = chain.problem.ops
        self._values = chain.problem.values
        self._runs: list[int] = []
        self._made: set[int] = set()
        self._held: Counter[int] = Counter()
        self._next = 0  # of the ops of backward
        self._in_forward = True

    def run(self) -> Schedule:
        parts = [(0, self._chain.length, self._slots, -1)]  # first and end region, slots, the state that is free then
        while parts:
            start, end, slots, done_with = parts.pop()
            if done_with >= 0:
                self._held.subtract(self._chain.state(done_with))
            if end - start == 1:
                self._reverse(start)
            elif slots == 1:
                self._advance(start, end - 1)
                self._reverse(end - 1)
                parts.append((start, end - 1, 1, -1))
            else:
                middle = start + split(end - start, slots)
                self._advance(start, middle)
                self._held.update(self._chain.state(middle))
                parts.append((start, middle, slots, middle))
                parts.append((middle, end, slots - 1, -1))
        self._run_backward(-1)
        for value in sorted(self._chain.problem.gradients):
            self._bring(value)
        forward = self._chain.problem.ops
        return Schedule(
            forward=tuple(op.index for op in forward if op.side is Side.FORWARD),
            backward=tuple(_read_runs(self._chain.problem, self._runs)),
        )

    def _advance(self, start: int, end: int) -> None:
        if self._in_forward:
            return
        for region in range(start, end):
            self._run_region(region)

    def _reverse(self, region: int) -> None:
        if not self._in_forward:
            self._run_region(region)
        self._in_forward = False
        self._run_backward(region)

    def _run_region(self, region: int) -> None:
        for index in self._chain.ops[region]:
            op = self._ops[index]
            if not op.pinned and not all(self._held[write] > 0 for write in op.writes):
                self._run(index)

    def _run_backward(self, region: int) -> None:
        backward, stages = self._chain.backward, self._chain.stages
        while self._next < len(backward) and stages[self._next] >= region:
            self._run(backward[self._next])
            self._next += 1

    def _run(self, index: int) -> None:
        for read in self._ops[index].reads:
            self._bring(read)
        self._runs.append(index)
        self._made.update(self._ops[index].writes)

    def _bring(self, value: int) -> None:
        """Make what only backward needs, and what is never saved, unless it was made before in backward."""
        stack = [value]
        while stack:
            producer = self._values[stack[-1]].producer
            if producer is None or stack[-1] in self._made or self._crosses(producer):
                stack.pop()
                continue
            missing = [read for read in self._ops[producer].reads if read not in self._made and not self._is_there(read)]
            if missing:
                stack.extend(missing)
            else:
                self._runs.append(producer)
                self._made.update(self._ops[producer].writes)

    def _is_there(self, value: int) -> bool:
        producer = self._values[value].producer
        return producer is None or self._crosses(producer)

    def _crosses(self, index: int) -> bool:
        op = self._ops[index]
        return op.side is Side.FORWARD and (bool(op.pinned) or not op.never_saved)


def _read_runs(problem: Problem, runs: Sequence[int]) -> list[int]:
    """The runs of backward without those of which nobody reads a result."""
    read = set(problem.gradients)
    kept: list[int] = []
    for index in reversed(runs):
        op = problem.ops[index]
        if op.side is Side.BACKWARD or not read.isdisjoint(op.writes):
            kept.append(index)
            read.difference_update(op.writes)
            read.update(op.reads)
    return kept[::-1]


def solve(problem: Problem, budget_bytes: int | None) -> Plan:
    """The fastest of these plans for a budget (bytes, static bytes included; None: no limit). Raises BudgetTooSmall if none fits."""
    return solve_with(propose, "revolve", problem, budget_bytes)
