"""Min-cut with a price per byte: the Lagrangian of the saved bytes, solved exactly for every price, repaired in the simulator.

For a price ``w`` (us per byte) choose what to save (``s``) and which ops to run again (``r``) to

    minimize  sum again_o r_o  +  sum (keep_v + w bytes_v) s_v
    s_v + r_o >= 1       if backward reads v, made by o
    s_u + r_p >= r_o     for every value u that o reads, made by p (closure)

This is a project selection (Picard 1976). With ``n_v`` for "v is needed" it is a minimum cut between what happens (source side) and what
does not, in a network of a node for each value and one for each op:

    source -> n_v    infinite               backward reads v
    n_v -> r_o       keep_v + w bytes_v     cut: v is needed and o does not run again, so v is saved
    r_o -> n_u       infinite               whoever runs o needs what it reads
    r_o -> sink      again_o                cut: o runs again

Values whose op must not run twice and those that are always kept (`Problem.keeps_as_small`) have their edge to the sink instead, those
that are never saved an infinite one. What the caller holds anyway has no bytes. FREE ops cost nothing to run: they only move.

Costs: without fusion ``again_o`` is the op's time and ``keep_v`` is zero. With fusion pointwise work is inlined and only traffic counts,
as in torch's own min-cut: ``keep_v`` is the write of a value that forward would not write otherwise and the read of one that a loop
reads; ``again_o`` is ``INLINED`` of a fusible op's time, and the write of each fused operand that a matmul or its like reads.

* **Prices.** The optimum over all prices is the lower envelope of the lines ``cost + w bytes``. Its corners are found by solving where
  the lines of two known cuts meet (Eisner and Severance 1976), widest gap first, so that ``MAX_CUTS`` flows leave out small corners only.
* **Repair.** The envelope knows of no peak, and like layers flip at one price: neighbouring cuts are GiBs apart. Plans in between follow
  one cut up to some value of the graph's order and its neighbour from there on; a budget is approached by bisection, judged by the
  simulator.
* **Boundaries.** What a price cannot see is how much lives at once while a chain of recompute runs through many layers. The sweep is
  repeated with what crosses every k-th boundary between regions free of charge, for k in ``STRIDES``: chains then end there.

Rounding: scipy's flows are 32-bit integers. Capacities are scaled so that the best cut known so far is ``SCALE`` = 2^29 units, clipped at
2^30, which no minimum cut reaches, and rounded: the cut found costs at most ``num_edges / 2^29`` more than the optimum, as a share of
it (4e-5 for 20,000 edges). No sum of flows exceeds ``SCALE`` by more than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from importlib import import_module
from itertools import count, pairwise
from typing import Any

from dyngran.passes.plan import Plan
from dyngran.passes.problem import Op, Problem, Side
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.boundaries import crossing_values, narrow_boundaries
from dyngran.passes.solvers.solving import solve_with

SCALE = 1 << 29
UNCUT = 1 << 30
MAX_CUTS = 12  # flows a sweep
STRIDES = (1, 2, 4, 8, 16)
INLINED = 0.001  # of a pointwise op's time: inlined into a loop it costs no traffic of its own, but of two equal cuts the shorter is better
MAX_HALVINGS = 8  # of what differs between two cuts, on the way to a budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What crosses, and its line: saved bytes that are paid for, and us of recompute and traffic."""

    saved: frozenset[int]
    num_bytes: int
    cost_us: float

    def price(self, weight_bytes: float, weight_us: float) -> float:
        return weight_bytes * self.num_bytes + weight_us * self.cost_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The objective: per candidate value its bytes and ``keep_us``, per op that may run again its ``again_us``.

    ``wanted`` are read by backward, ``always`` are saved whenever needed, ``never`` are never saved.
    """

    wanted: tuple[int, ...]
    num_bytes: Mapping[int, int]
    keep_us: Mapping[int, float]
    again_us: Mapping[int, float]
    always: frozenset[int]
    never: frozenset[int]

    def with_free(self, free: frozenset[int]) -> Terms:
        """The same, but the ``free`` values may be saved free of charge."""
        return replace(
            self,
            num_bytes={value: 0 if value in free else size for value, size in self.num_bytes.items()},
            keep_us={value: 0.0 if value in free else cost for value, cost in self.keep_us.items()},
        )


def make_terms(simulator: Simulator) -> Terms:
    """The objective of a problem."""
    problem = simulator.problem
    made_by = {value: problem.ops[_producer(problem, value)] for value in simulator.candidates}
    read = {value for op in problem.ops if op.side is Side.BACKWARD for value in op.reads} | problem.gradients
    always = {v for v, op in made_by.items() if op.pinned or (problem.keeps_as_small(v) and not op.never_saved)}
    again_us = {op.index: 0.0 if op.side is Side.FREE else op.cost_us for op in made_by.values() if not op.pinned}
    keep_us = dict.fromkeys(made_by, 0.0)
    if problem.fused:
        _add_traffic(problem, made_by, keep_us, again_us)
    return Terms(
        wanted=tuple(value for value in simulator.candidates if value in read),
        num_bytes={v: 0 if v in problem.forward_outputs else problem.values[v].size_bytes for v in made_by},
        keep_us=keep_us,
        again_us=again_us,
        always=frozenset(always),
        never=frozenset(value for value, op in made_by.items() if op.never_saved and not op.pinned),
    )


def _add_traffic(problem: Problem, made_by: Mapping[int, Op], keep_us: dict[int, float], again_us: dict[int, float]) -> None:
    """Reads and writes of memory that a choice adds when pointwise work is inlined."""
    readers: dict[int, list[Op]] = {}
    for op in problem.ops:
        for read in op.reads:
            readers.setdefault(read, []).append(op)
    for value, op in made_by.items():
        move_us = problem.values[value].size_bytes / problem.bytes_per_us
        outside = [reader for reader in readers.get(value, ()) if not reader.fusible]
        is_written = not op.fusible or op.reduction or value in problem.forward_outputs
        if not is_written and all(reader.side is Side.BACKWARD for reader in outside):
            keep_us[value] += move_us
        if len(outside) < len(readers.get(value, ())):
            keep_us[value] += move_us
        if op.fusible and op.index in again_us:
            again_us[op.index] *= INLINED
            if any(reader.side is Side.BACKWARD for reader in outside):
                again_us[op.index] += move_us
    for value, op in made_by.items():
        move_us = problem.values[value].size_bytes / problem.bytes_per_us
        outside = [reader for reader in readers.get(value, ()) if not reader.fusible]
        if op.fusible and all(reader.side is not Side.BACKWARD for reader in outside):
            for reader in outside:
                if reader.index in again_us:
                    again_us[reader.index] += move_us


class Network:
    """The flow network of one problem; `solve` sets the weights and cuts it."""

    def __init__(self, simulator: Simulator, terms: Terms) -> None:
        self._problem = simulator.problem
        self._candidates = simulator.candidates
        self.terms = terms
        self._numpy: Any = import_module("numpy")
        self._sparse: Any = import_module("scipy.sparse")
        self._csgraph: Any = import_module("scipy.sparse.csgraph")
        self._need = {value: 2 + place for place, value in enumerate(self._candidates)}
        first = 2 + len(self._candidates)
        self._run = {index: first + place for place, index in enumerate(sorted(self.terms.again_us))}
        self._num_nodes = first + len(self._run)
        self._lay_edges()
        self._known = [self.line_of(simulator.default_saved), self.line_of(frozenset())]

    def line_of(self, saved: frozenset[int]) -> Cut:
        """What really crosses of ``saved``, and what it costs."""
        terms, problem = self.terms, self._problem
        num_bytes, cost_us = 0, 0.0
        crossing: set[int] = set()
        seen: set[int] = set()
        again: set[int] = set()
        stack = list(terms.wanted)
        while stack:
            value = stack.pop()
            if value in seen or value not in self._need:
                continue
            seen.add(value)
            if value in terms.always or (value in saved and value not in terms.never):
                num_bytes += terms.num_bytes[value]
                cost_us += terms.keep_us[value]
                crossing.add(value)
            elif (index := _producer(problem, value)) not in again:
                again.add(index)
                cost_us += terms.again_us[index]
                stack.extend(problem.ops[index].reads)
        return Cut(saved=frozenset(crossing), num_bytes=num_bytes, cost_us=cost_us)

    def solve(self, weight_bytes: float, weight_us: float) -> Cut:
        """The cut that minimizes ``weight_bytes * bytes + weight_us * cost``: the price per byte is ``weight_bytes / weight_us``."""
        numpy = self._numpy
        bound = min(cut.price(weight_bytes, weight_us) for cut in self._known)
        unit = SCALE / bound if bound > 0 else 1.0
        scaled = numpy.rint((weight_bytes * self._edge_bytes + weight_us * self._edge_us) * unit)
        capacities = numpy.where(self._is_uncut, UNCUT, numpy.minimum(scaled, UNCUT)).astype(numpy.int32)
        shape = (self._num_nodes, self._num_nodes)
        network = self._sparse.csr_matrix((capacities, self._heads, self._starts), shape=shape)
        residual = network - self._csgraph.maximum_flow(network, 0, 1, method="dinic").flow
        residual.data[residual.data < 0] = 0
        residual.eliminate_zeros()
        reached = numpy.zeros(self._num_nodes, dtype=bool)
        reached[self._csgraph.breadth_first_order(residual, 0, return_predecessors=False)] = True
        cut = self._read(reached)
        self._known.append(cut)
        return cut

    def _read(self, reached: Any) -> Cut:
        """The cut between the nodes that the source reaches and the others."""
        first = 2 + len(self._candidates)
        is_saved = reached[2:first] & ~reached[self._next]
        return Cut(
            saved=frozenset(self._candidate_numbers[is_saved].tolist()),
            num_bytes=int(self._value_bytes[is_saved].sum()),
            cost_us=float(self._keep_us[is_saved].sum() + self._again_us[reached[first:]].sum()),
        )

    def _lay_edges(self) -> None:
        terms, problem = self.terms, self._problem
        after = {value: 1 if value in terms.always else self._run[_producer(problem, value)] for value in self._candidates}
        edges: list[tuple[int, int, int, float, bool]] = [(0, self._need[value], 0, 0.0, True) for value in terms.wanted]
        edges.extend((need, after[v], terms.num_bytes[v], terms.keep_us[v], v in terms.never) for v, need in self._need.items())
        for index, run in self._run.items():
            edges.append((run, 1, 0, terms.again_us[index], False))
            edges.extend((run, self._need[read], 0, 0.0, True) for read in set(problem.ops[index].reads) if read in self._need)
        edges.sort()
        numpy = self._numpy
        self._next = numpy.array(list(after.values()), dtype=numpy.int32)
        self._candidate_numbers = numpy.array(self._candidates)
        self._value_bytes = numpy.array([terms.num_bytes[value] for value in self._candidates], dtype=numpy.int64)
        self._keep_us = numpy.array([terms.keep_us[value] for value in self._candidates], dtype=float)
        self._again_us = numpy.array([terms.again_us[index] for index in self._run], dtype=float)
        tails, heads, num_bytes, cost_us, is_uncut = zip(*edges, strict=True) if edges else ((),) * 5
        self._heads = numpy.array(heads, dtype=numpy.int32)
        self._starts = numpy.searchsorted(numpy.array(tails), numpy.arange(self._num_nodes + 1)).astype(numpy.int32)
        self._edge_bytes = numpy.array(num_bytes, dtype=float)
        self._edge_us = numpy.array(cost_us, dtype=float)
        self._is_uncut = numpy.array(is_uncut, dtype=bool)


def sweep(network: Network, *, max_cuts: int = MAX_CUTS) -> tuple[Cut, ...]:
    """Cuts on the lower envelope over all prices, most bytes first; all of them unless ``max_cuts`` flows were too few."""
    most, least = network.solve(0.0, 1.0), network.solve(1.0, 0.0)
    found = [most, least]
    num_cuts = 2
    span_bytes, span_us = max(most.num_bytes - least.num_bytes, 1), max(least.cost_us - most.cost_us, 1e-9)
    gaps: list[tuple[float, int, Cut, Cut]] = []
    ticket = count()  # first come, first served among equal gaps

    def look_between(left: Cut, right: Cut) -> None:
        area = (left.num_bytes - right.num_bytes) / span_bytes * (right.cost_us - left.cost_us) / span_us
        if left.num_bytes > right.num_bytes and right.cost_us > left.cost_us:
            heappush(gaps, (-area, next(ticket), left, right))

    look_between(most, least)
    while gaps and num_cuts < max_cuts:
        _, _, left, right = heappop(gaps)
        weights = (right.cost_us - left.cost_us, float(left.num_bytes - right.num_bytes))
        middle = network.solve(*weights)
        num_cuts += 1
        if middle.price(*weights) < left.price(*weights) * (1 - 1e-6):
            found.append(middle)
            look_between(left, middle)
            look_between(middle, right)
    unique = {cut.saved: cut for cut in found}
    return tuple(sorted(unique.values(), key=lambda cut: (-cut.num_bytes, cut.cost_us)))


def sweeps(simulator: Simulator) -> Iterator[tuple[Cut, ...]]:
    """The sweep of the problem as it is, then those with boundaries free of charge. They depend on no budget."""
    if simulator.candidates:
        terms = make_terms(simulator)
        for free in _free_sets(simulator):
            yield sweep(Network(simulator, terms.with_free(free)))


def worth_keeping(simulator: Simulator) -> list[int]:
    """Values that some cut saves, those first that most cuts save: whatever a byte costs, plans keep them."""
    counts: Counter[int] = Counter()
    for cuts in sweeps(simulator):
        for cut in cuts:
            counts.update(cut.saved)
    return sorted(counts, key=lambda value: (-counts[value], value))


class Sweeps:
    """All cuts of a problem as masks; `near` looks between them for what a budget leaves room for."""

    def __init__(self, simulator: Simulator) -> None:
        self._native = simulator.native
        self._static_bytes = simulator.problem.total_static_bytes
        self._masks = [[self._native.mask(cut.saved) for cut in cuts] for cuts in sweeps(simulator)]
        self._judged: dict[bytes, tuple[int, float]] = {}

    def masks(self) -> Iterator[bytes]:
        """Every cut."""
        for sweep in self._masks:
            for mask in sweep:
                yield mask
                self._judge_once(mask)  # costs next to nothing if whoever asks has just simulated it

    def near(self, budget_bytes: int, *, num_sweeps: int | None = None) -> Iterator[bytes]:
        """Plans between neighbouring cuts of which one fits: the last that does, with either of them first in the graph's order.

        Of all sweeps, or of the ``num_sweeps`` whose cuts promise most. Where none fits, plans on both sides of the least peak.
        """
        gaps: list[tuple[float, int, bytes, bytes]] = []
        for number, masks in enumerate(self._masks):
            sweep = [(mask, *self._judge_once(mask)) for mask in masks]
            if sweep and all(peak_bytes > budget_bytes for _, peak_bytes, _ in sweep):
                least = min(range(len(sweep)), key=lambda place: sweep[place][1])
                if num_sweeps is None:
                    yield from self._spread([mask for mask, _, _ in sweep[max(0, least - 1) : least + 2]])
                continue
            for left, right in pairwise(sweep):
                if (left[1] <= budget_bytes) != (right[1] <= budget_bytes):
                    fits, misses = (left, right) if left[1] <= budget_bytes else (right, left)
                    share = (budget_bytes - fits[1]) / (misses[1] - fits[1])
                    gaps.append((fits[2] + share * (misses[2] - fits[2]), number, fits[0], misses[0]))
        gaps.sort(key=lambda gap: gap[:2])
        for _, _, fits_mask, misses_mask in gaps[:num_sweeps]:
            for misses_first in (True, False):
                yield self._last_fit(fits_mask, misses_mask, budget_bytes, misses_first=misses_first)

    def _judge_once(self, mask: bytes) -> tuple[int, float]:
        if mask not in self._judged:
            self._judged[mask] = self._judge(mask)
        return self._judged[mask]

    def _judge(self, mask: bytes) -> tuple[int, float]:
        """Peak with static bytes, and time."""
        _, found = self._native.evaluate(mask)
        return self._static_bytes + found.peak_bytes, found.time_us

    def _last_fit(self, fits: bytes, misses: bytes, budget_bytes: int, *, misses_first: bool) -> bytes:
        """The plan that follows ``misses`` for as many of the differing values as fit, from the graph's beginning or from its end."""
        differing = self._native.differing(fits, misses)
        best, low, high = fits, 0, len(differing)
        while high - low > max(1, len(differing) >> MAX_HALVINGS):
            count = (low + high) // 2
            if misses_first:
                plan = blend(misses, fits, differing[count])
            else:
                plan = blend(fits, misses, differing[len(differing) - count])
            if self._judge(plan)[0] <= budget_bytes:
                best, low = plan, count
            else:
                high = count
        return best

    def spread(self) -> Iterator[bytes]:
        """Plans in between where cuts are far apart."""
        for masks in self._masks:
            yield from self._spread(masks)

    def _spread(self, masks: list[bytes]) -> Iterator[bytes]:
        for left, right in pairwise(masks):
            differing = self._native.differing(left, right)
            if len(differing) > 1:
                for quarter in (1, 2, 3):
                    end = differing[quarter * len(differing) // 4]
                    yield blend(left, right, end)
                    yield blend(right, left, end)


def propose(simulator: Simulator, *, budget_bytes: int | None = None, known: Sweeps | None = None) -> Iterator[frozenset[int] | bytes]:
    """Each sweep's cuts, and plans between neighbours: on the way to the budget, or spread if there is none.

    ``known`` are the sweeps of this problem from an earlier call, for another budget.
    """
    yield simulator.default_saved
    known = known or Sweeps(simulator)
    yield from known.masks()
    yield from known.spread() if budget_bytes is None else known.near(budget_bytes)


def blend(low: bytes, high: bytes, end: int) -> bytes:
    """``low`` for values before ``end`` in the graph's order, ``high`` for those from there on."""
    return low[:end] + high[end:]


def _producer(problem: Problem, value: int) -> int:
    producer = problem.values[value].producer
    assert producer is not None
    return producer


def _free_sets(simulator: Simulator) -> Iterator[frozenset[int]]:
    yield frozenset()
    crossings = simulator.crossings
    boundaries = narrow_boundaries(simulator.problem, crossings)
    seen = {frozenset[int]()}
    for stride in STRIDES:
        free = crossing_values(crossings, boundaries[stride - 1 :: stride])
        if free not in seen:
            seen.add(free)
            yield free


def solve(problem: Problem, budget_bytes: int | None) -> Plan:
    """The fastest of these plans for a budget (bytes, static bytes included; None: no limit). Raises BudgetTooSmall if none fits."""
    return solve_with(propose, "mincut", problem, budget_bytes)
