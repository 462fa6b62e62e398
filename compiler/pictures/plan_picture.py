"""The data behind every picture of a plan: each graph's step before and after the plan, what is live when, and what is held beside it.

*Before* is the step of a person who has no budget (`compiler.plans.unplanned`), beside what earlier graphs of the step then save.
Both steps are simulated from the problem in the plan file, so nothing needs to be traced.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from dyngran.compiler.plans.planfile import GraphPlan, PlanDocument
from dyngran.compiler.plans.unplanned import unplanned_saved
from dyngran.passes.errors import PlanFileError, format_bytes
from dyngran.passes.live_ranges import LiveRange, LiveStep, live_step_of
from dyngran.passes.plan import Plan
from dyngran.passes.problem import Kind, Problem
from dyngran.passes.schedule import check_schedule
from dyngran.passes.simulate import Simulator

MADE_AGAIN = "made again"
WORKSPACE = "workspace"
OUTSIDE = "held outside of this graph"
TOLERANCE = 0.01  # of the peak: what simulation and prediction may differ by unsaid

# From the bottom of a stack to its top: what is held first, what comes and goes last.
BANDS = (
    *(kind.value for kind in Kind if kind.is_static),
    "gradient (held)",
    OUTSIDE,
    *(kind.value for kind in (Kind.CARRIED, Kind.OUTPUT, Kind.TANGENT, Kind.GRADIENT, Kind.ACTIVATION)),
    MADE_AGAIN,
    Kind.TEMPORARY.value,
    WORKSPACE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPicture:
    """One step of one graph.

    Attributes:
        bands: (band, bytes at each position), bottom first, held bytes included; they add up to ``total_bytes``.
        range_bands: the band of each range of ``live``. held: (band, bytes) over the whole step.
    """

    title: str
    live: LiveStep
    range_bands: tuple[str, ...]
    bands: tuple[tuple[str, tuple[int, ...]], ...]
    total_bytes: tuple[int, ...]
    held: tuple[tuple[str, int], ...]

    @property
    def held_bytes(self) -> int:
        """Over the whole step."""
        return sum(size for _, size in self.held)

    @property
    def peak_bytes(self) -> int:
        """Held bytes included, whether or not the step has a position."""
        return max(self.total_bytes, default=self.held_bytes)

    @property
    def time_us(self) -> float:
        """Device time of forward and backward."""
        return sum(self.live.costs_us)

    @property
    def starts_us(self) -> list[float]:
        """When each position begins, and when the step ends."""
        return list(accumulate(self.live.costs_us, initial=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPicture:
    """One graph of a document; ``title`` is '' for the only one."""

    title: str
    graph: GraphPlan
    before: StepPicture
    after: StepPicture

    @property
    def plan(self) -> Plan:
        """The plan of the graph."""
        return self.graph.plan

    @property
    def problem(self) -> Problem:
        """The problem of the graph."""
        return self.graph.problem

    @property
    def frontier(self) -> tuple[tuple[int, float], ...]:
        """(peak_bytes, time_us) of every plan known, this one included, least peak first."""
        return tuple(sorted({*self.graph.frontier, (self.plan.peak_bytes, self.plan.time_us)}))

    @property
    def least_peak_bytes(self) -> int:
        """Of the plans known for this graph."""
        return self.frontier[0][0]

    @property
    def note(self) -> str:
        """What people must know about the curves: that the prediction is not their highest point, where it is not. '' if it is."""
        simulated, predicted = self.after.peak_bytes, self.plan.peak_bytes
        if abs(simulated - predicted) <= TOLERANCE * predicted:
            return ""
        return (
            f"The curve with the plan is simulated and peaks at {format_bytes(simulated)}; the predicted peak, {format_bytes(predicted)}, "
            "also counts what generated code or measurement showed."
        )


def pictures_of(document: PlanDocument, *, source: str) -> tuple[GraphPicture, ...]:
    """One picture for each graph; ``source`` names the document's file in errors.

    Raises:
        PlanFileError: a plan prescribes an order in which its graph cannot run.
    """
    num_graphs = len(document.graphs)
    pictures = []
    earlier_bytes = 0  # what earlier graphs of the step save without a budget, and do not with the plan
    for number, graph in enumerate(document.graphs, 1):
        simulator = Simulator(graph.problem)
        unplanned = simulator.evaluate(unplanned_saved(graph.problem, simulator))
        where = f"plan file {source!r}, graphs[{number - 1}]"
        after = _with_plan(graph, simulator, where)
        pictures.append(
            GraphPicture(
                title=f"graph {number} of {num_graphs}" if num_graphs > 1 else "",
                graph=graph,
                before=_step("without a budget", graph, live_step_of(simulator, unplanned), more_bytes=earlier_bytes),
                after=_step("with the plan", graph, after),
            )
        )
        earlier_bytes += unplanned.saved_bytes - graph.plan.saved_bytes
    return tuple(pictures)


def _with_plan(graph: GraphPlan, simulator: Simulator, where: str) -> LiveStep:
    if graph.plan.schedule is not None:
        try:
            check_schedule(graph.problem, graph.plan.schedule)
        except ValueError as error:
            raise PlanFileError(f"{where}: its order of ops cannot run: {error}. Make the plan again.") from error
    return live_step_of(simulator, graph.plan)


def _held(graph: GraphPlan, more_bytes: int) -> tuple[tuple[str, int], ...]:
    """What is held over the whole step, by band; only by sum where the plan holds less than its problem says."""
    problem, static_bytes = graph.problem, max(graph.plan.static_bytes + more_bytes, 0)
    outside_bytes = static_bytes - problem.total_static_bytes
    if outside_bytes < 0:
        return ((OUTSIDE, static_bytes),)
    known = {kind.value if kind.is_static else f"{kind.value} (held)": size for kind, size in problem.static_bytes.items()}
    order = {band: place for place, band in enumerate(BANDS)}
    bands = sorted((*known.items(), (OUTSIDE, outside_bytes)), key=lambda item: order.get(item[0], len(order)))
    return tuple((band, size) for band, size in bands if size)


def _step(title: str, graph: GraphPlan, live: LiveStep, *, more_bytes: int = 0) -> StepPicture:
    problem, held = graph.problem, _held(graph, more_bytes)
    names = tuple(_band(problem, live, one) for one in live.ranges)
    members: dict[str, list[LiveRange]] = {}
    for name, one in zip(names, live.ranges, strict=True):
        members.setdefault(name, []).append(one)
    length = len(live.ops)
    bands = [(band, (size,) * length) for band, size in held]
    bands += [(band, tuple(live.curve(members[band]))) for band in BANDS if band in members]
    if any(live.beside_bytes):
        bands.append((WORKSPACE, live.beside_bytes))
    held_bytes = sum(size for _, size in held)
    return StepPicture(
        title=title,
        live=live,
        range_bands=names,
        bands=tuple(bands),
        total_bytes=tuple(held_bytes + size for size in live.live_bytes),
        held=held,
    )


def _band(problem: Problem, live: LiveStep, one: LiveRange) -> str:
    kind = problem.values[one.value].kind
    is_made = problem.values[one.value].producer is not None
    return MADE_AGAIN if kind is Kind.ACTIVATION and is_made and live.is_again[one.first] else kind.value
