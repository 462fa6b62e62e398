"""Two plans of one step side by side: the numbers of each, made comparable.

The unplanned step is the one that a person has without a budget: what torch's own partition saves. Measured costs differ from run to run,
so every op of the fresh graph costs what an op of the same kind and sizes costs in the committed file. And what a solver happened to find
is no property of the model: where the committed plan, carried over to the fresh graph, does better than the fresh one, it is what counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dyngran.compiler.checks.whole_step import Pairing, Prices, pair_whole_steps
from dyngran.compiler.plans.planfile import PlanDocument
from dyngran.compiler.plans.unplanned import unplanned_saved
from dyngran.passes.isomorphism import Isomorphism, isomorphism
from dyngran.passes.plan import Plan, Schedule
from dyngran.passes.problem import Kind, Problem
from dyngran.passes.schedule import replay_schedule
from dyngran.passes.simulate import Simulator

_OWN = (Kind.PARAMETER, Kind.BUFFER, Kind.OPTIMIZER)  # what a later graph of a step holds beside what an earlier one gave it


@dataclass(frozen=True, slots=True)
class Planned:
    """Peak and time of a step with a plan for each of its graphs."""

    peak_bytes: int
    time_us: float


class Step:
    """One document, as a simulator for each graph and what the unplanned step saves there."""

    def __init__(self, document: PlanDocument, problems: Sequence[Problem], free: Sequence[frozenset[int] | None]) -> None:
        self.document = document
        self.problems = tuple(problems)
        self.simulators = tuple(Simulator(problem) for problem in problems)
        self.free_saved = tuple(
            simulator.normalize(unplanned_saved(simulator.problem, simulator) if given is None else given)
            for simulator, given in zip(self.simulators, free, strict=True)
        )
        self.free = tuple(simulator.evaluate(saved) for simulator, saved in zip(self.simulators, self.free_saved, strict=True))

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(graph.plan for graph in self.document.graphs)

    @property
    def runs(self) -> tuple[int, ...]:
        """How often each graph runs in a step."""
        return tuple(graph.runs for graph in self.document.graphs)

    @property
    def free_peaks(self) -> tuple[int, ...]:
        """Peak of the unplanned step while each graph runs: what the step holds beside it, with what earlier graphs then save."""
        peaks, earlier = [], 0
        for problem, plan, free, runs in zip(self.problems, self.plans, self.free, self.runs, strict=True):
            peaks.append(free.peak_bytes - problem.total_static_bytes + plan.static_bytes + earlier + (runs - 1) * free.saved_bytes)
            earlier += runs * free.saved_bytes - plan.saved_bytes
        return tuple(peaks)

    @property
    def free_saved_bytes(self) -> int:
        return sum(free.saved_bytes * runs for free, runs in zip(self.free, self.runs, strict=True))

    @property
    def free_time_us(self) -> float:
        return sum(free.time_us * runs for free, runs in zip(self.free, self.runs, strict=True))

    @property
    def least_peak_bytes(self) -> int | None:
        """Of the plans that were found; None if the file holds none."""
        frontiers = [graph.frontier for graph in self.document.graphs]
        return max(points[0][0] for points in frontiers) if all(frontiers) else None

    @property
    def is_explored(self) -> bool:
        """Whether other plans than one were looked for: a plan saved from a running model without a budget is the only one."""
        return all(len(graph.frontier) > 1 for graph in self.document.graphs)

    @property
    def held(self) -> dict[Kind, int]:
        """Static bytes by kind: of the first graph, and what is the own of later ones; their inputs are what earlier ones made."""
        first, *later = self.problems
        return {
            kind: first.static_bytes.get(kind, 0) + sum(problem.static_bytes.get(kind, 0) for problem in later if kind in _OWN)
            for kind in dict.fromkeys((*first.static_bytes, *_OWN))
        }

    @property
    def static_bytes(self) -> int:
        """As `held`, with what the first graph's plan knows to be held besides."""
        return self.plans[0].static_bytes + sum(self.held.values()) - self.problems[0].total_static_bytes

    @property
    def num_breaks(self) -> int:
        """Where a step is cut; a plan saved from a running model knows its graphs, and not why they are several."""
        return max(len(self.document.breaks), len(self.document.graphs) - 1)

    def planned(self) -> Planned:
        """The document's own plans, at this step's costs."""
        plans = zip(self.simulators, self.plans, self.runs, strict=True)
        times = [_evaluate(simulator, plan)[1] * runs for simulator, plan, runs in plans]
        return Planned(self.document.peak_bytes, sum(times))

    def live_at_peak(self, *, unplanned: bool) -> tuple[list[tuple[int, int]], int]:
        """(graph, value) of what is live at the peak of the step, with what earlier graphs saved; and bytes of workspace."""
        peaks = self.free_peaks if unplanned else [plan.peak_bytes for plan in self.plans]
        saved = self.free_saved if unplanned else [plan.saved for plan in self.plans]
        at = max(range(len(peaks)), key=peaks.__getitem__)
        timeline = self.simulators[at].timeline(saved[at])
        earlier = [(before, value) for before in range(at) for value in sorted(saved[before])]
        return earlier + [(at, value) for value, _ in timeline.live_at_peak], timeline.workspace_at_peak_bytes


class StepPair:
    """A committed step and a fresh one.

    Attributes:
        isomorphisms: for each pair of graphs, in order; None where they differ. Empty if the numbers of graphs differ.
        committed, fresh: the two steps; fresh at the costs of the committed one.
    """

    def __init__(self, committed: PlanDocument, fresh: PlanDocument) -> None:
        pairs = list(zip(committed.graphs, fresh.graphs, strict=False)) if len(committed.graphs) == len(fresh.graphs) else []
        self.isomorphisms: tuple[Isomorphism | None, ...] = tuple(
            isomorphism(mine.problem, yours.problem) if mine.fingerprint == yours.fingerprint else None for mine, yours in pairs
        )
        self.committed = Step(committed, [graph.problem for graph in committed.graphs], [None] * len(committed.graphs))
        maps = self.isomorphisms or (None,) * len(fresh.graphs)
        prices = Prices(self.committed.problems)
        problems = [prices.put_on(graph.problem, at, mapping) for at, (graph, mapping) in enumerate(zip(fresh.graphs, maps, strict=True))]
        free = [None if one is None else _through(one, self.committed.free_saved[at]) for at, one in enumerate(maps)]
        self.fresh = Step(fresh, problems, free)

    @property
    def is_equal(self) -> bool:
        """Every graph is one of the committed ones, whatever its nodes are called."""
        return bool(self.isomorphisms) and None not in self.isomorphisms

    def carried_over(self) -> Planned | None:
        """The committed plans on the fresh graphs; None if there is not one for each graph."""
        if not self.isomorphisms:
            return None
        peaks, times, earlier = [], [], 0
        for at, (before, after) in enumerate(zip(self.committed.plans, self.fresh.plans, strict=True)):
            try:
                old_transient, _, old_saved = _evaluate(self.committed.simulators[at], before)
                transient, time_us, saved_bytes = _evaluate(self.fresh.simulators[at], self._moved(at, before))
            except ValueError:  # an order that cannot run on the fresh graph
                return None
            peaks.append(before.peak_bytes + transient - old_transient + after.static_bytes - before.static_bytes + earlier)
            earlier += (saved_bytes - old_saved) - (after.saved_bytes - before.saved_bytes)
            times.append(time_us)
        return Planned(max(peaks), sum(times))

    def _moved(self, at: int, plan: Plan) -> Plan:
        mapping = self.isomorphisms[at]
        if mapping is None:
            partner = self.pairing.partner
            saved = {partner[at, value][1] for value in plan.saved if partner.get((at, value), (-1, -1))[0] == at}
            return replace(plan, saved=frozenset(saved), schedule=None)
        schedule = plan.schedule
        if schedule is not None:
            forward, backward = (tuple(mapping.ops[op] for op in part) for part in (schedule.forward, schedule.backward))
            schedule = Schedule(forward, backward, _through(mapping, schedule.saved))
        return replace(plan, saved=_through(mapping, plan.saved), schedule=schedule)

    @cached_property
    def pairing(self) -> Pairing:
        """Graph by graph where all are equal, otherwise over the whole step: a graph break moves values from one graph to another."""
        maps = [one for one in self.isomorphisms if one is not None]
        if self.is_equal:
            return Pairing({(at, left): (at, right) for at, one in enumerate(maps) for left, right in enumerate(one.values)}, ())
        mine, yours = ((step.problems, step.free_saved) for step in (self.committed, self.fresh))
        return pair_whole_steps(*mine, *yours)


def _through(mapping: Isomorphism, values: Iterable[int]) -> frozenset[int]:
    return frozenset(mapping.values[value] for value in values)


def _evaluate(simulator: Simulator, plan: Plan) -> tuple[int, float, int]:
    """Transient bytes at the peak, microseconds, saved bytes. Raises ValueError if the plan's order cannot run."""
    static = simulator.problem.total_static_bytes
    if plan.schedule is None:
        outcome = simulator.evaluate(plan.saved)
        return outcome.peak_bytes - static, outcome.time_us, outcome.saved_bytes
    replayed = replay_schedule(simulator.problem, plan.schedule)
    return replayed.peak_bytes - static, replayed.time_us, replayed.saved_bytes
