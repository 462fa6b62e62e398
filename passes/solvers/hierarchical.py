"""The hierarchical planner: regions between separators, options per kind of region, a multiple-choice program over the path.

1. Separators (`passes/regions.py`) cut the forward graph into regions, and large regions again besides what comes from far away (the
   levels of a U-Net besides its skips); up to `MAX_NEIGHBOURS` neighbours form a group.
2. Groups that are built alike are one kind; each kind is planned once, as a problem of its own (`passes/local.py`).
3. Per kind a list of options, none better than another in saved bytes, peaks and time, from walks that price bytes differently. What
   enters a group counts as saved if backward needs it, so there are options that rebuild it: a group of two neighbours may save nothing
   between them.
4. A budget is answered by one option per group along the path (`passes/native/choose.cpp`): least time such that in every region what
   earlier ones saved, its own peak, and what else is live there then (measured on the last plan) stay within the budget.
5. The whole simulator verifies; what it finds to be live beside each region corrects the program, which is solved again.

Values that cross several regions (masks, casts of shared weights, long skips of a U-Net) belong to no region: they are saved where an
option needs them, except those that a budget is answered faster without, like ones together, as the whole simulator says. Cost grows
with the number of kinds; every region adds a few rows to the program only. Idea: DESIGN of this project; programs over lists of options
per stage are known from Checkmate's successors, e.g. Rockmate (Zhao, Le Hellard, Eyraud-Dubois et al., ICML 2023).
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from dyngran.passes.forms import crossing_values
from dyngran.passes.local import LocalProblem, RegionGraph
from dyngran.passes.moves import LARGE, choosable, side_by_side
from dyngran.passes.native.graph import NativeOutcome, NativeSearch, PathOption, Places, Stop, Walk, choose_path
from dyngran.passes.plan import Plan
from dyngran.passes.problem import Problem, Side
from dyngran.passes.regions import Crossings, ending_ops, find_separators, nested_boundaries, region_numbers
from dyngran.passes.simulate import Simulator, free_transient
from dyngran.passes.solvers.solving import solve_with

MAX_NEIGHBOURS = 4
MIN_REGION, MAX_REGION = 4, 45  # forward ops; larger ones are cut besides what comes from far
MAX_OPTIONS = 40  # per kind of group
NUM_BUDGETS, NUM_BUDGETS_IF_LARGE = 20, 14  # of a frontier
PATH_WORK = 5_000_000  # ways to go on that the program looks at for one budget at most
MAX_BINS = 1000  # of saved bytes, per region in the program
MIN_BINS = 60
MAX_ROUNDS = 5
MAX_DROPS = 4  # times that a budget is answered again without more values from far away; first without those that the last budget left out
CLOSE = 0.002  # of the transient budget left unused: near enough
PRICES = (0.03, 0.1, 0.2, 0.35, 0.6, 1.0, 1.7, 3.0)  # of a saved byte, as shares of what a saved byte is worth on average
LOCAL_WORK_PER_OP = 16_000  # op visits that the walks over one problem's kinds may take together, for each of its ops, and
LOCAL_WORK = 12_000_000  # at most
FIRST_THRESHOLD = 0.005  # of the time between saving nothing and everything
MAX_WALK = 3000  # plans per walk


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to run a kind of group: local values saved, entering ones apart, with bytes of its peaks beside what enters."""

    saved: frozenset[int]
    entering: frozenset[int]
    elsewhere: frozenset[int]
    input_bytes: int
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    time_us: float
    saves_output: bool


@dataclass(frozen=True, slots=True)
class _Found:
    """A plan for a budget; the less the better: bytes by which it passes the budget, then time."""

    excess_bytes: int
    time_us: float
    mask: bytes

    def is_better_than(self, other: _Found | None) -> bool:
        return other is None or (self.excess_bytes, self.time_us) < (other.excess_bytes, other.time_us)


@dataclass(frozen=True, slots=True)
class _Group:
    first: int
    end: int
    kind: int


class Hierarchy:
    """Regions, kinds and options of one problem; `plans` answers budgets.

    ``guides`` are saved sets that others found: what they do in a region is among its options.
    """

    def __init__(self, simulator: Simulator, *, guides: Sequence[frozenset[int]] = (), stop: Stop | None = None) -> None:
        self._simulator = simulator
        self._stop = stop or Stop()
        problem = simulator.problem
        crossings = simulator.crossings
        boundaries = nested_boundaries(problem, crossings, _spread(find_separators(crossings), crossings), MAX_REGION)
        self.regions = RegionGraph(problem, region_numbers(problem, _spread(boundaries, crossings), crossings))
        ending = ending_ops(problem)
        numbers = self.regions.numbers
        self._places = Places(
            [numbers[op.index] if op.side is Side.FORWARD and op.index not in ending else -1 for op in problem.ops],
            [numbers[op.index] if op.side is Side.BACKWARD else -1 for op in problem.ops],
        )
        self._far_kinds = self._find_far_kinds()
        self.forget()
        self._find_groups()
        self._plan_kinds(guides)
        self._rows = [(group, option) for group in self._groups for option in self._options[group.kind]]
        self._num_bins = max(MIN_BINS, min(MAX_BINS, PATH_WORK // (2 * max(1, len(self._rows)))))
        self._table = (PathOption * len(self._rows))()
        for place, (group, option) in enumerate(self._rows):
            sizes = (option.input_bytes, option.saved_bytes, option.forward_peak_bytes, option.backward_peak_bytes)
            self._table[place] = PathOption(group.first, group.end, option.saves_output, 0, *sizes, option.time_us)

    def _find_groups(self) -> None:
        kinds: dict[Hashable, int] = {}
        self._groups: list[_Group] = []
        self._first_of_kind: list[_Group] = []
        self._kind_at: dict[tuple[int, int], int] = {}
        for first in range(self.regions.num_regions):
            for end in range(first + 1, min(first + MAX_NEIGHBOURS, self.regions.num_regions) + 1):
                kind = kinds.setdefault(tuple(self.regions.kinds[first:end]), len(kinds))
                self._groups.append(_Group(first, end, kind))
                self._kind_at[first, end] = kind
                if kind == len(self._first_of_kind):
                    self._first_of_kind.append(self._groups[-1])

    def _plan_kinds(self, guides: Sequence[frozenset[int]]) -> None:
        """Options per kind: those of single regions first, since the walks over groups start from what they join to."""
        self._options: list[list[_Option]] = [[] for _ in self._first_of_kind]
        self.num_kinds = len(self._first_of_kind)
        total = sum(len(self.regions.group_ops(group.first, group.end)) for group in self._first_of_kind)
        work = min(LOCAL_WORK, LOCAL_WORK_PER_OP * len(self.regions.problem.ops))
        length = min(MAX_WALK, work // max(1, total) // (2 * len(PRICES)))

        def plan(group: _Group) -> tuple[int, list[_Option]]:
            if self._stop:
                return group.kind, []
            place = {value: local for local, value in enumerate(self.regions.values_in_order(group.first, group.end))}
            guided = [[place[value] for value in place if value in guide] for guide in guides]
            starts = [*self._joined(group, place), *guided]
            return group.kind, _options_of(self.regions.local_problem(group.first, group.end), starts, length, self._stop)

        def keep(found: tuple[int, list[_Option]]) -> None:
            self._options[found[0]] = found[1]

        for size in range(1, MAX_NEIGHBOURS + 1):
            side_by_side(plan, [group for group in self._first_of_kind if group.end - group.first == size], self._stop, keep)

    def _joined(self, group: _Group, place: Mapping[int, int]) -> list[list[int]]:
        """Per price what the two parts of a group would save, of both ways to part it the better, without what passes between them."""
        joined: list[list[int]] = []
        if group.end - group.first == 1:
            return joined
        for price in PRICES:
            ways = []
            for middle in dict.fromkeys((group.first + 1, group.end - 1)):
                cost = 0.0
                saved: list[int] = []
                for first, end in ((group.first, middle), (middle, group.end)):
                    options = self._options[self._kind_at[first, end]]
                    if not options:  # cut short
                        return []
                    worth = price * _worth(options)
                    best = min(options, key=lambda option: option.time_us + worth * (option.saved_bytes + option.input_bytes))
                    cost += best.time_us + worth * (best.saved_bytes + best.input_bytes)
                    order = self.regions.values_in_order(first, end)
                    saved.extend(place[order[local]] for local in best.saved if first == group.first or local not in best.entering)
                ways.append((cost, saved))
            joined.append(min(ways)[1])
        return joined

    def _find_far_kinds(self) -> list[list[int]]:
        """Values from far away that a plan may do without, like ones together."""
        problem = self.regions.problem
        kinds: dict[Hashable, list[int]] = {}
        for value in choosable(problem, sorted(self.regions.far.intersection(self._simulator.candidates))):
            producer = problem.values[value].producer
            assert producer is not None
            kinds.setdefault((problem.ops[producer].target, problem.values[value].size_bytes), []).append(value)
        return list(kinds.values())

    def forget(self) -> None:
        """Drop what was measured on earlier plans, so that the next answer does not depend on them."""
        self._forward_extra = [0] * self.regions.num_regions
        self._backward_extra = [0] * self.regions.num_regions
        self._without: frozenset[int] = frozenset()

    def plans(self, transient_bytes: int) -> Iterator[bytes]:
        """Masks of saved values for a budget; the last need not be the best.

        What was measured on plans for other budgets since `forget`, and what these did without, is where it starts.
        """
        trial, self._without = self._without, frozenset()
        best = yield from self._rounds(transient_bytes)
        for _ in range(MAX_DROPS):
            trial = trial or self._without.union(*(self._droppable(best.mask) if best is not None else ()))
            if trial == self._without:
                return
            before, self._without = self._without, trial
            found = yield from self._rounds(transient_bytes)
            if found is None or not found.is_better_than(best):
                self._without = before
                return
            best, trial = found, frozenset()

    def _droppable(self, mask: bytes) -> list[list[int]]:
        """Of the values from far away that a plan saves, the kinds without which it is not slower; else the one that costs least a byte."""
        native = self._simulator.native
        time_us = native.evaluate(mask)[1].time_us
        costs: list[tuple[float, list[int]]] = []
        for kind in self._far_kinds:
            saved = [value for value in kind if mask[value]]
            if saved:
                slower_us = native.evaluate(native.mask(native.members(mask).difference(saved)))[1].time_us - time_us
                costs.append((slower_us / sum(self.regions.problem.values[value].size_bytes for value in saved), kind))
        free = [kind for cost, kind in costs if cost <= 0]
        return free or [kind for _, kind in sorted(costs)[:1]]

    def _rounds(self, transient_bytes: int) -> Generator[bytes, None, _Found | None]:
        """Masks for a budget, each round nearer to it, and the best of them."""
        target = transient_bytes
        seen: set[bytes] = set()
        best: _Found | None = None
        for _ in range(MAX_ROUNDS):
            chosen = self._choose(target)
            if chosen is None:
                return best
            mask = self._simulator.native.normalize(self._decode([(group, option) for group, option, _ in chosen]))
            is_new = mask not in seen
            seen.add(mask)
            if is_new:
                yield mask
            outcome = self._correct(mask, chosen)
            room = transient_bytes - outcome.peak_bytes
            found = _Found(max(0, -room), outcome.time_us, mask)
            best = found if found.is_better_than(best) else best
            if 0 <= room <= CLOSE * transient_bytes or (not is_new and room >= 0):
                return best
            if not is_new:
                target += min(room, 0)
        return best

    def _choose(self, target: int) -> list[tuple[_Group, _Option, int]] | None:
        """Groups and options along the best path, with the bytes saved before each."""
        numbers = choose_path(self._table, self._forward_extra, self._backward_extra, target, num_bins=self._num_bins)
        if numbers is None:
            return None
        found, before, is_saved = [], 0, False
        for number in numbers:
            group, option = self._rows[number]
            before += 0 if is_saved else option.input_bytes
            found.append((group, option, before))
            before += option.saved_bytes
            is_saved = option.saves_output
        return found

    def _decode(self, chosen: list[tuple[_Group, _Option]]) -> bytes:
        mask = bytearray(len(self.regions.problem.values))
        for group, option in chosen:
            order = self.regions.values_in_order(group.first, group.end)
            for local in option.saved | option.elsewhere:
                mask[order[local]] = order[local] not in self._without
        return bytes(mask)

    def _correct(self, mask: bytes, chosen: list[tuple[_Group, _Option, int]]) -> NativeOutcome:
        """Measure what is live beside each region's own, and what the plan costs."""
        forward, backward, outcome = self._simulator.native.region_peaks(mask, self._places, self.regions.num_regions)
        for group, option, before in chosen:
            in_forward, in_backward = max(forward[group.first : group.end]), max(backward[group.first : group.end])
            for number in range(group.first, group.end):
                self._forward_extra[number] = in_forward - before - option.forward_peak_bytes
                self._backward_extra[number] = in_backward - before - option.backward_peak_bytes
        return outcome


def _spread(separators: Sequence[int], crossings: Crossings) -> list[int]:
    """Separators without those that cut off a region of fewer than `MIN_REGION` ops: of two near ones the narrower stays."""
    kept: list[int] = []
    for boundary in separators:
        if kept and boundary - kept[-1] < MIN_REGION:
            if crossings.num_bytes[boundary] < crossings.num_bytes[kept[-1]]:
                kept[-1] = boundary
            continue
        kept.append(boundary)
    return kept


def _worth(options: Sequence[_Option]) -> float:
    """What a saved byte is worth on average (us)."""
    fastest = min(options, key=lambda option: (option.time_us, option.saved_bytes))
    least = min(options, key=lambda option: (option.saved_bytes + option.input_bytes, option.time_us))
    num_bytes = fastest.saved_bytes + fastest.input_bytes - least.saved_bytes - least.input_bytes
    return (least.time_us - fastest.time_us) / num_bytes if num_bytes > 0 else 0.0


def _options_of(local: LocalProblem, starts: Sequence[Sequence[int]], length: int, stop: Stop) -> list[_Option]:
    """Options of one local problem, at most `MAX_OPTIONS`: walks for each price of a saved byte and of a byte of the peak, each from the
    start that is best at its price."""
    search = NativeSearch(local.graph)
    candidates = _candidates(local)
    begins = list(dict.fromkeys([search.mask(()), search.mask(candidates), *(search.mask(start) for start in starts)]))
    costs = [search.evaluate(begin)[1] for begin in begins]
    bare, full = costs[0], search.evaluate(search.mask(local.graph.wanted))[1]
    range_us = max(bare.time_us - full.time_us, 1e-3 * full.time_us, 1e-6)
    worth = range_us / max(full.saved_bytes - bare.saved_bytes, 1)
    classes = [[value] for value in candidates]

    def walk(begin: bytes, price: float, peak_price: float, num_evaluations: int, seed: int) -> None:
        settings = Walk(
            budget_bytes=0,
            price_us_per_byte=0.0,
            saved_us_per_byte=price,
            peak_us_per_byte=peak_price,
            first_threshold_us=FIRST_THRESHOLD * range_us,
            num_evaluations=num_evaluations,
            seed=seed,
        )
        search.walk(begin, classes, settings, stop)

    for begin in begins:
        walk(begin, worth, 0.0, 1, 0)
    for place, share in enumerate(PRICES):
        price = share * worth
        for peak_price in (0.0, price):
            cost = [one.time_us + price * one.saved_bytes + peak_price * one.peak_bytes for one in costs]
            walk(begins[cost.index(min(cost))], price, peak_price, max(20, min(length, 30 * len(candidates))), place)
    return _thinned([_option(local, search.members(crossing), found) for crossing, found in search.take(options=True)])


def _candidates(local: LocalProblem) -> list[int]:
    """Local values that a plan may save or not."""
    problem = local.problem
    seen: set[int] = set()
    stack = list(local.graph.wanted)
    while stack:
        value = stack.pop()
        producer = problem.values[value].producer
        if producer is None or value in seen:
            continue
        seen.add(value)
        if not problem.ops[producer].pinned:
            stack.extend(problem.ops[producer].reads)
    seen.update(form.stored for form in problem.forms if form.value in seen)
    return choosable(problem, sorted(seen))


def _option(local: LocalProblem, crossing: frozenset[int], found: NativeOutcome) -> _Option:
    sizes = local.problem.values
    entering = crossing & local.entering
    input_bytes = sum(sizes[value].size_bytes for value in entering)
    return _Option(
        saved=crossing,
        entering=entering,
        elsewhere=local.elsewhere,
        input_bytes=input_bytes,
        saved_bytes=found.saved_bytes - input_bytes,
        forward_peak_bytes=found.forward_peak_bytes - input_bytes,
        backward_peak_bytes=found.backward_peak_bytes - input_bytes,
        time_us=found.time_us,
        saves_output=local.leaving <= crossing_values(local.problem, crossing),
    )


def _crossing_bytes(option: _Option) -> int:
    return option.saved_bytes + option.input_bytes


def _backward_bytes(option: _Option) -> int:
    return option.backward_peak_bytes + option.input_bytes


def _thinned(options: list[_Option]) -> list[_Option]:
    """At most `MAX_OPTIONS`: the fastest for what they save and for their peak, evenly over the range of both."""
    options.sort(key=lambda option: (_crossing_bytes(option), option.time_us, option.backward_peak_bytes, sorted(option.saved)))
    if len(options) <= MAX_OPTIONS:
        return options
    kept: set[int] = set()
    for num_bytes in (_crossing_bytes, _backward_bytes):
        ranked = sorted(range(len(options)), key=lambda place: (num_bytes(options[place]), options[place].time_us))
        low, high = num_bytes(options[ranked[0]]), num_bytes(options[ranked[-1]])
        best = {0: ranked[0]}
        fastest = inf
        for place in ranked:
            if options[place].time_us < fastest:
                fastest = options[place].time_us
                best[1 + (num_bytes(options[place]) - low) * (MAX_OPTIONS // 2 - 1) // (high - low + 1)] = place
        kept.update(best.values())
    return [options[place] for place in sorted(kept)]


def propose(
    simulator: Simulator, *, budget_bytes: int | None = None, hierarchy: Hierarchy | None = None
) -> Iterator[frozenset[int] | bytes]:
    """Plans for a budget, or for an even ladder of budgets up to the free transient if there is none."""
    yield simulator.default_saved
    if not simulator.candidates:
        return
    hierarchy = hierarchy or Hierarchy(simulator)
    hierarchy.forget()
    static, free = simulator.problem.total_static_bytes, free_transient(simulator)
    count = NUM_BUDGETS if len(simulator.problem.ops) <= LARGE else NUM_BUDGETS_IF_LARGE
    budgets = [free * step // count for step in range(count, 0, -1)] if budget_bytes is None else [budget_bytes - static]
    for transient_bytes in budgets:
        yield from hierarchy.plans(transient_bytes)


def solve(problem: Problem, budget_bytes: int | None) -> Plan:
    """The fastest of these plans for a budget (bytes, static bytes included; None: no limit). Raises BudgetTooSmall if none fits."""
    return solve_with(propose, "hierarchical", problem, budget_bytes)
