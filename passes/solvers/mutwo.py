"""μ-TWO's greedy, recompute only (Purandare, Wasay, Jain and Idreos, MLSys 2023, algorithms B and D to G).

Start with everything saved that backward reads; again and again recompute the intermediate with the largest bytes per microsecond of
total recompute time, and update the sources and times of the others, until the peak fits. The rules are the printed ones; where the
paper leaves a choice or contradicts itself, this is what is done here (letters as in the planning notes):

* Intermediates are the values that backward reads directly. A walk back from one stops at inputs, at other intermediates, and at ops
  that must not run twice; the stops are its sources, the ops on the way its recompute graph. No swaps: algorithm C is absent.
* (a) Algorithm E is printed for swaps too; without swaps it runs for recomputes only, where it makes sense.
* (b) Algorithm G starts backward from an undefined sum: here from what forward leaves, which is what is still retained. Static bytes
  are counted once. Between its first and last use in backward an intermediate is inside the profiled memory of the ops, as on a device
  to which it was brought back, so a recompute saves its bytes from after the last use in forward to before the first in backward.
* (c) Algorithm G counts neither what a chain of recomputes allocates nor what sources are kept for. Its claim is reported as
  ``claimed_peak_bytes`` and never trusted: the stop test is this project's simulator. It knows no fusion either: where ops fuse it
  claims far more than there is.
* (d) Candidates that another choice needs are priced ``cnt x recompute time`` as printed; ``own_use=True`` prices ``(1 + cnt) x``,
  Capuchin's rule (Peng et al., ASPLOS 2020), on which the paper is built.
* (e) Views are no values here. Zero bytes are no candidates; zero time is an infinite ratio. Values that must not run twice or that the
  caller holds anyway are no candidates.
* (f) The printed stop test is strict; here a peak equal to the budget fits. There is no undo: a pick that proved needless stays. If
  the candidates run out, the pick with the least peak is proposed.
* (g) Ties go to the value that is made first. Inactive times only order swaps and are not needed.
* (h) The paper prices each user's chain as if shared ancestors ran anew; the product runs them once and keeps them, in the joint graph's
  order. Ratios are the paper's, peaks and times the product's.
* (i) That memory rises in forward and falls in backward is assumed for swaps only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import inf

from dyngran.passes.plan import Plan
from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.solving import solve_with

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
    """One step of the greedy: the value chosen, its ratio (bytes/us), and what stays saved."""

    value: int
    ratio: float
    saved: frozenset[int]
    number: int
    claims: Claims = field(repr=False)

    @property
    def claimed_peak_bytes(self) -> int:
        """The peak, static bytes included, that the paper's simulator claims; linear in the graph, so only worked out if asked for."""
        return self.claims.peak_bytes(self.number)


class Claims:
    """Algorithm G: live bytes if all is saved, less each chosen intermediate while it idles."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._dropped: list[_Intermediate] = []
        self._model: tuple[list[int], dict[int, tuple[int, int]]] | None = None

    def drop(self, item: _Intermediate) -> None:
        self._dropped.append(item)

    def peak_bytes(self, num_picks: int) -> int:
        """The claim after that many picks."""
        if self._model is None:
            self._model = _idle_curve(self._simulator)
        curve, idle = list(self._model[0]), self._model[1]
        for item in self._dropped[:num_picks]:
            start, end = idle[item.value]
            curve[start] -= item.size_bytes
            curve[end] += item.size_bytes
        return self._simulator.problem.total_static_bytes + max(accumulate(curve), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Where the greedy stops for a budget, and where its own simulator would have stopped it. All peaks include static bytes.

    ``num_picks`` is None if no step fits; ``num_picks_claimed`` is None if not even the claim does, and ``claimed_stop_peak_bytes`` is
    then what the last step really has.
    """

    num_picks: int | None
    peak_bytes: int
    claimed_peak_bytes: int
    num_picks_claimed: int | None
    claimed_stop_peak_bytes: int


def picks(simulator: Simulator, *, own_use: bool = False) -> Iterator[Pick]:
    """Every step of the greedy until no candidate is left."""
    greedy = _Greedy(simulator, own_use=own_use)
    claims = Claims(simulator)
    saved = set(greedy.known)
    number = 0
    while (best := greedy.pop()) is not None:
        number += 1
        ratio = best.ratio
        greedy.choose(best)
        claims.drop(best)
        saved.discard(best.value)
        yield Pick(value=best.value, ratio=ratio, saved=frozenset(saved), number=number, claims=claims)


def propose(
    simulator: Simulator, *, budget_bytes: int | None = None, max_plans: int = MAX_PLANS, own_use: bool = False
) -> Iterator[frozenset[int]]:
    """With a budget the first step that fits, as printed, or the one of least peak if none does. Without one the saved sets on the
    greedy's way, thinned to about ``max_plans``."""
    yield simulator.default_saved
    if budget_bytes is None:
        step = max(1, len(simulator.default_saved) // max_plans)
        yield from (pick.saved for pick in picks(simulator, own_use=own_use) if (pick.number - 1) % step == 0)
        return
    saved, least_bytes = simulator.default_saved, simulator.evaluate(simulator.default_saved).peak_bytes
    if least_bytes <= budget_bytes:
        return
    for pick in picks(simulator, own_use=own_use):
        peak_bytes = simulator.evaluate(pick.saved).peak_bytes
        if peak_bytes < least_bytes:
            saved, least_bytes = pick.saved, peak_bytes
        if peak_bytes <= budget_bytes:
            break
    yield saved


def report(simulator: Simulator, budget_bytes: int, *, own_use: bool = False) -> Report:
    """What the greedy does for a budget and what its own simulator would have had it do."""
    taken = list(picks(simulator, own_use=own_use))
    steps = [simulator.default_saved, *(pick.saved for pick in taken)]
    claims = taken[0].claims if taken else Claims(simulator)
    stop, peak_bytes = None, simulator.evaluate(steps[-1]).peak_bytes
    for number, saved in enumerate(steps):
        if (found := simulator.evaluate(saved).peak_bytes) <= budget_bytes:
            stop, peak_bytes = number, found
            break
    claimed_stop = next((number for number in range(len(steps)) if claims.peak_bytes(number) <= budget_bytes), None)
    last = len(steps) - 1
    return Report(
        num_picks=stop,
        peak_bytes=peak_bytes,
        claimed_peak_bytes=claims.peak_bytes(last if stop is None else stop),
        num_picks_claimed=claimed_stop,
        claimed_stop_peak_bytes=simulator.evaluate(steps[last if claimed_stop is None else claimed_stop]).peak_bytes,
    )


class _Greedy:
    """Candidates by ratio in a heap (entries whose ratio has changed are skipped), and for each value who counts it as a source."""

    def __init__(self, simulator: Simulator, *, own_use: bool) -> None:
        problem = simulator.problem
        self._own_use = own_use
        self.known = _intermediates(simulator)
        self._candidates = {
            value: item
            for value, item in self.known.items()
            if item.size_bytes and value not in problem.forward_outputs and not _is_pinned(problem, value)
        }
        self._chosen: set[int] = set()
        self._users: dict[int, set[int]] = defaultdict(set)
        for value, item in self.known.items():
            for source in item.sources:
                self._users[source].add(value)
        self._heap = [(-item.ratio, value) for value, item in self._candidates.items()]
        heapify(self._heap)

    def pop(self) -> _Intermediate | None:
        """The candidate of largest ratio, the one made first among equals; None if there is none left."""
        while self._heap:
            ratio, value = heappop(self._heap)
            item = self._candidates.get(value)
            if item is not None and item.ratio == -ratio:
                del self._candidates[value]
                return item
        return None

    def choose(self, new: _Intermediate) -> None:
        """Algorithms E and F: whoever reads the new choice reads its sources instead and takes longer, unless it is resident then;
        candidates that the new choice reads are priced for all that are made again from them."""
        self._chosen.add(new.value)
        count = 1
        for user in sorted(self._users[new.value] & self._chosen):
            self._replace(self.known[user], new)
            count += 1
        for user in sorted(self._users[new.value] & self._candidates.keys()):
            item = self._candidates[user]
            if not new.first_backward <= item.first_backward <= new.last_backward:
                self._replace(item, new)
                item.total_us = item.recompute_us * (1 + len(self._users[user] & self._chosen))
                heappush(self._heap, (-item.ratio, user))
        for source in sorted(new.sources & self._candidates.keys()):
            item = self._candidates[source]
            item.total_us = (count + self._own_use) * item.recompute_us
            heappush(self._heap, (-item.ratio, source))

    def _replace(self, item: _Intermediate, new: _Intermediate) -> None:
        """``item`` no longer starts from ``new`` but from what ``new`` starts from."""
        item.sources.discard(new.value)
        item.sources |= new.sources
        item.recompute_us += new.recompute_us
        self._users[new.value].discard(item.value)
        for source in new.sources:
            self._users[source].add(item.value)


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
    for value in sorted(direct):
        item = known.setdefault(value, _Intermediate(value, problem.values[value].size_bytes, end, end))
        seen: set[int] = set()
        stack = [value]
        while stack:
            current = stack.pop()
            producer = problem.values[current].producer
            if producer is None:
                continue
            if current != value and (current in direct or problem.ops[producer].pinned):
                item.sources.add(current)
            elif producer not in seen:
                seen.add(producer)
                item.recompute_us += problem.ops[producer].cost_us
                stack.extend(problem.ops[producer].reads)
        item.total_us = item.recompute_us
    return known


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


def solve(problem: Problem, budget_bytes: int | None) -> Plan:
    """The fastest of these plans for a budget (bytes, static bytes included; None: no limit). Raises BudgetTooSmall if none fits."""
    return solve_with(propose, "mutwo", problem, budget_bytes)
