"""μ-TWO's greedy, recompute only (Purandare, Wasay, Jain and Idreos, MLSys 2023, algorithms B and D to G).

Start with everything saved that backward reads; again and again recompute the intermediate with the largest bytes per microsecond of
total recompute time, and update the sources and times of the others. Where the paper leaves a choice, this is what is done here:

* Intermediates are the values that backward reads directly. A walk back from one stops at inputs, at other intermediates, and at ops
  that must not run twice; the stops are its sources, the ops on the way its recompute graph.
* No swaps, so algorithm C is absent and algorithm E, printed for swaps too, runs for recomputes only.
* Candidates that another choice needs are priced ``cnt x recompute time`` as printed (Capuchin, its basis, has ``(1 + cnt)``).
* Zero bytes are no candidates; zero time is an infinite ratio; ties go to the earlier value.
* Values that must not run twice or that the caller holds anyway are no candidates.
* Stop: the printed simulator (algorithm G) counts neither what recompute chains allocate nor what they keep. Its claim is reported as
  ``claimed_peak_bytes``; the stop test is this project's simulator. The printed test is strict; here a peak equal to the budget fits.
* There is no undo: a pick that proved needless stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.simulate import Simulator

MAX_PLANS = 200


@dataclass(slots=True)
class _Intermediate:
    value: int
    size_bytes: int
    first_backward: int
    last_backward: int
    sources: set[int] = field(default_factory=set)
    recompute_us: float = 0.0
    total_us: float = 0.0

    @property
    def ratio(self) -> float:
        return self.size_bytes / self.total_us if self.total_us > 0 else inf


@dataclass(frozen=True, slots=True)
class Pick:
    """One step of the greedy: the value chosen and its ratio (bytes/us), what stays saved, and the peak the paper's simulator claims."""

    value: int
    ratio: float
    saved: frozenset[int]
    claimed_peak_bytes: int


def picks(simulator: Simulator) -> Iterator[Pick]:
    """Every step of the greedy until no candidate is left."""
    problem = simulator.problem
    known = _intermediates(simulator)
    candidates = {
        value: item
        for value, item in known.items()
        if item.size_bytes and value not in problem.forward_outputs and not _is_pinned(problem, value)
    }
    chosen: dict[int, _Intermediate] = {}
    curve, idle = _idle_curve(simulator)
    saved = set(known)
    while candidates:
        best = min(candidates.values(), key=lambda item: (-item.ratio, item.value))
        ratio = best.ratio
        del candidates[best.value]
        count = _update_chosen(best, chosen)
        chosen[best.value] = best
        _update_candidates(best, count, candidates, chosen)
        saved.discard(best.value)
        start, end = idle[best.value]
        curve[start] -= best.size_bytes
        curve[end] += best.size_bytes
        claimed = problem.total_static_bytes + max(accumulate(curve), default=0)
        yield Pick(value=best.value, ratio=ratio, saved=frozenset(saved), claimed_peak_bytes=claimed)


def propose(simulator: Simulator, *, budget_bytes: int | None = None, max_plans: int = MAX_PLANS) -> Iterator[frozenset[int]]:
    """The saved sets on the greedy's way, thinned to about ``max_plans``; with them any budget has its first one that fits."""
    yield simulator.default_saved
    step = max(1, len(simulator.default_saved) // max_plans)
    for number, pick in enumerate(picks(simulator)):
        if number % step == 0:
            yield pick.saved


def _is_pinned(problem: Problem, value: int) -> bool:
    producer = problem.values[value].producer
    return producer is None or bool(problem.ops[producer].pinned)


def _intermediates(simulator: Simulator) -> dict[int, _Intermediate]:
    problem = simulator.problem
    direct = simulator.default_saved
    known: dict[int, _Intermediate] = {}
    for op in problem.ops:
        if op.side is Side.BACKWARD:
            for read in op.reads:
                if read in known:
                    known[read].last_backward = op.index
                elif read in direct:
                    known[read] = _Intermediate(read, problem.values[read].size_bytes, op.index, op.index)
    end = len(problem.ops)
    for value in direct:
        item = known.setdefault(value, _Intermediate(value, problem.values[value].size_bytes, end, end))
        seen: set[int] = set()
        stack = [value]
        while stack:
            current = stack.pop()
            if current != value and (current in direct or _is_pinned(problem, current)):
                item.sources.add(current)
                continue
            producer = problem.values[current].producer
            if producer is not None and producer not in seen:
                seen.add(producer)
                item.recompute_us += problem.ops[producer].cost_us
                stack.extend(problem.ops[producer].reads)
        item.sources = {source for source in item.sources if problem.values[source].producer is not None}
        item.total_us = item.recompute_us
    return known


def _update_chosen(new: _Intermediate, chosen: dict[int, _Intermediate]) -> int:
    """Algorithm E: earlier choices that read the new one read its sources instead. Returns how often it is recomputed."""
    count = 1
    for item in chosen.values():
        if new.value in item.sources:
            item.sources = (item.sources - {new.value}) | new.sources
            item.recompute_us += new.recompute_us
            count += 1
    return count


def _update_candidates(new: _Intermediate, count: int, candidates: dict[int, _Intermediate], chosen: dict[int, _Intermediate]) -> None:
    """Algorithm F: candidates that need the new choice grow dearer, candidates that it needs are priced for all their users."""
    for item in candidates.values():
        if new.value in item.sources and not new.first_backward <= item.first_backward <= new.last_backward:
            item.sources = (item.sources - {new.value}) | new.sources
            item.recompute_us += new.recompute_us
            item.total_us = item.recompute_us + item.recompute_us * sum(item.value in other.sources for other in chosen.values())
        if item.value in new.sources:
            item.total_us = count * item.recompute_us


def _idle_curve(simulator: Simulator) -> tuple[list[int], dict[int, tuple[int, int]]]:
    """Algorithm G's model: changes of live bytes if all is saved, and where each intermediate idles (after its last forward use)."""
    problem = simulator.problem
    forward, backward = simulator.schedule(simulator.default_saved)
    order = forward + backward
    first: dict[int, int] = {value.index: len(forward) for value in problem.values if value.kind is Kind.TANGENT}
    last: dict[int, int] = {}
    last_forward: dict[int, int] = {}
    first_backward: dict[int, int] = {}
    for position, index in enumerate(order):
        for write in problem.ops[index].writes:
            first.setdefault(write, position)
            last[write] = last_forward[write] = position
        for read in problem.ops[index].reads:
            last[read] = position
            if position < len(forward):
                last_forward[read] = position
            else:
                first_backward.setdefault(read, position)
    curve = [0] * (len(order) + 1)
    for value, start in first.items():
        size = 0 if problem.values[value].kind.is_static else problem.values[value].size_bytes
        forever = value in problem.gradients or value in problem.forward_outputs or problem.values[value].kind is Kind.TANGENT
        curve[start] += size
        curve[len(order) if forever else last.get(value, start) + 1] -= size
    for position, index in enumerate(order):
        curve[position] += problem.ops[index].workspace_bytes
        curve[position + 1] -= problem.ops[index].workspace_bytes
    idle = {v: (last_forward[v] + 1, first_backward.get(v, len(order))) for v in simulator.default_saved}
    return curve, idle
