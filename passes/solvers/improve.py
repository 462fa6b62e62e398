"""Improve what is archived by moves that the simulator judges: add and drop whole classes, blend neighbours, lower the least peak.

Nothing here looks at a budget: the moves fill the frontier from the least peak to the fastest plan, so that any budget binds. All
limits are counts of simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import combinations, pairwise
from math import inf
from time import monotonic

from dyngran.passes.archive import Judge
from dyngran.passes.classes import value_classes
from dyngran.passes.simulate import Outcome
from dyngran.passes.solvers.region import small_values

_Gain = Callable[[Outcome, Outcome], float]
_Move = Callable[[frozenset[int], frozenset[int]], frozenset[int]]

NAME = "improve"
MAX_EXHAUSTIVE = 10  # candidates up to which every saved set is tried
MAX_CLASSES = 160
GAP_SHARE = 1 / 200  # of the range of peaks: gaps on the frontier that are narrower need no plan in between


def work_limit(num_ops: int, *, fused: bool) -> int:
    """Simulations that one search may take: about constant work, for one costs a time linear in the ops, and twice that if they fuse."""
    return max(300, min(700, (2_000_000 if fused else 2_400_000) // max(num_ops, 1)))


class Improver:
    """Moves over one judge's archive. ``limit`` is how many simulations they may take together.

    ``max_seconds`` is a safety stop; if it was reached, ``truncated`` is True.
    """

    def __init__(self, judge: Judge, *, limit: int, max_seconds: float = 120.0) -> None:
        self.truncated = False
        self._deadline = monotonic() + max_seconds
        self._judge = judge
        self._problem = judge.simulator.problem
        self._end = judge.num_evaluations + limit
        self._limit = limit
        simulator = judge.simulator
        sizes = self._problem.values
        self._small = small_values(simulator)
        large = [v for v in simulator.candidates if v not in self._small and sizes[v].size_bytes and not self._is_users(v)]
        for num_rounds in (2, 1, 0):
            groups = value_classes(self._problem, large, num_rounds=num_rounds)
            if len(groups) <= limit // 4:
                break
        by_bytes = sorted(groups, key=lambda group: (-sum(sizes[v].size_bytes for v in group), group))
        self._classes = [frozenset(group) for group in by_bytes[:MAX_CLASSES]]  # most bytes first

    def run(self) -> None:
        """All moves, each with its share of the limit."""
        if len(self._judge.simulator.candidates) <= MAX_EXHAUSTIVE:
            self._try_all()
            return
        for share, base in zip((0.2, 0.12, 0.08), self._bases(), strict=False):
            self._grow(base, int(share * self._limit))
        fastest = self._judge.archive.best(None)
        if fastest is not None:
            self._shrink(fastest.outcome, int(0.2 * self._limit))
        self._lower(int(0.15 * self._limit))
        self.blend(self._end - self._judge.num_evaluations)

    def _is_users(self, value: int) -> bool:
        """Made in a checkpoint region of the user's, which is never saved."""
        producer = self._problem.values[value].producer
        return producer is not None and self._problem.ops[producer].never_saved

    def _left(self, end: int) -> bool:
        if monotonic() > self._deadline:
            self.truncated = True
        return not self.truncated and self._judge.num_evaluations < min(end, self._end)

    def _try_all(self) -> None:
        candidates = self._judge.simulator.candidates
        for count in range(len(candidates) + 1):
            for chosen in combinations(candidates, count):
                self._judge(chosen, NAME)

    def _bases(self) -> list[Outcome]:
        """Where to grow from: the least peak, then the plans that best trade time for memory between it and the fastest."""
        entries = [entry.outcome for entry in self._judge.archive.frontier()]
        if len(entries) < 3:
            return entries[:1]
        least, most = entries[0], entries[-1]
        scale_bytes = max(most.peak_bytes - least.peak_bytes, 1)
        scale_us = max(least.time_us - most.time_us, 1e-9)

        def sag(outcome: Outcome) -> float:
            return (outcome.peak_bytes - least.peak_bytes) / scale_bytes + (outcome.time_us - most.time_us) / scale_us

        return [least, *sorted(entries[1:-1], key=sag)[:2]]

    def _grow(self, start: Outcome, num_evaluations: int) -> None:
        """Save one class after another, the most time for the added peak first (lazy greedy), until everything is saved."""
        end = self._judge.num_evaluations + num_evaluations

        def gain(now: Outcome, new: Outcome) -> float:
            saved_us, added_bytes = now.time_us - new.time_us, new.peak_bytes - now.peak_bytes
            if saved_us <= 0:
                return -inf
            return saved_us / added_bytes if added_bytes > 0 else inf

        now = self._judge(start.saved | self._small, NAME)
        self._follow(now, gain, lambda saved, group: saved | group, end)

    def _shrink(self, start: Outcome, num_evaluations: int) -> None:
        """Drop one class after another, the most peak for the added time first."""
        end = self._judge.num_evaluations + num_evaluations

        def gain(now: Outcome, new: Outcome) -> float:
            freed_bytes, added_us = now.peak_bytes - new.peak_bytes, new.time_us - now.time_us
            if freed_bytes <= 0:
                return -inf
            return freed_bytes / added_us if added_us > 0 else inf

        now = self._judge(start.saved | self._small, NAME)
        self._follow(now, gain, lambda saved, group: saved - group, end)

    def _follow(self, now: Outcome, gain: _Gain, move: _Move, end: int) -> None:
        heap: list[tuple[float, int]] = []
        num_groups = max(8, (end - self._judge.num_evaluations) // 2)  # the other half is for following the best
        for place, group in enumerate(self._classes[:num_groups]):
            if not self._left(end):
                return
            moved = move(now.saved, group)
            if moved != now.saved:
                heap.append((-gain(now, self._judge(moved, NAME)), place))
        heapify(heap)
        idle = 0
        while heap and self._left(end) and idle < len(heap) + 8:
            _, place = heappop(heap)
            new = self._judge(move(now.saved, self._classes[place]), NAME)
            worth = gain(now, new)
            if worth == -inf:
                idle += 1
                if idle < 8:
                    heappush(heap, (inf, place))
                continue
            if heap and worth < -heap[0][0]:
                heappush(heap, (-worth, place))
                idle += 1
                continue
            now, idle = new, 0

    def _lower(self, num_evaluations: int) -> None:
        """Lower the least peak: the best single class to drop or to save, again and again, then single values live at the peak."""
        end = self._judge.num_evaluations + num_evaluations
        while self._left(end):
            least = self._judge.archive.least()
            if least is None:
                return
            before = least.outcome
            for saved in self._neighbours(before):
                if not self._left(end):
                    return
                if self._judge(saved, NAME).peak_bytes < before.peak_bytes:
                    break
            else:
                return

    def _neighbours(self, outcome: Outcome) -> Iterable[frozenset[int]]:
        at_peak = [value for value, _ in self._judge.simulator.timeline(outcome.saved).live_at_peak]
        live = frozenset(at_peak)
        touching = [group for group in self._classes if group & live]
        for group in touching:
            if group & outcome.saved:
                yield outcome.saved - group
        for value in at_peak[:12]:
            if value in outcome.saved:
                yield outcome.saved - {value}
        by_bytes = self._classes[::-1]
        for group in by_bytes:
            if not group <= outcome.saved:
                yield outcome.saved | group
        for group in touching:
            for other in by_bytes[: len(by_bytes) // 4]:
                if group & outcome.saved and not other <= outcome.saved:
                    yield (outcome.saved - group) | other

    def blend(self, num_evaluations: int) -> None:
        """Halve the widest gaps of the frontier with plans that follow one neighbour up to a layer and the other from there on."""
        end = self._judge.num_evaluations + num_evaluations
        tried: set[tuple[frozenset[int], frozenset[int], float]] = set()
        while self._left(end):
            entries = [entry.outcome for entry in self._judge.archive.frontier()]
            if len(entries) < 2:
                return
            narrow = (entries[-1].peak_bytes - entries[0].peak_bytes) * GAP_SHARE
            pairs = [
                (high.peak_bytes - low.peak_bytes, place)
                for place, (low, high) in enumerate(pairwise(entries))
                if high.peak_bytes - low.peak_bytes > narrow
            ]
            for _, place in sorted(pairs, key=lambda pair: (-pair[0], pair[1])):
                if self._blend_pair(entries[place], entries[place + 1], tried):
                    break
            else:
                return

    def _blend_pair(self, low: Outcome, high: Outcome, tried: set[tuple[frozenset[int], frozenset[int], float]]) -> bool:
        """Try the next blend of two plans; False if none is left to try."""
        for share in (0.5, 0.25, 0.75, 0.125, 0.875):
            key = (low.saved, high.saved, share)
            if key in tried:
                continue
            tried.add(key)
            differing = sorted(low.saved ^ high.saved)
            if len(differing) < 2:
                return False
            cut = differing[int(share * len(differing))]
            self._judge([v for v in low.saved if v < cut] + [v for v in high.saved if v >= cut], NAME)
            self._judge([v for v in high.saved if v < cut] + [v for v in low.saved if v >= cut], NAME)
            return True
        return False
