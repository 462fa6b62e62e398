"""The step as it would run without a plan: torch's own partition and no budget. What a plan's peak and time are compared with."""

from __future__ import annotations

from dataclasses import dataclass

from dyngran.compiler.plans.planfile import GraphPlan, PlanDocument
from dyngran.passes.problem import Problem
from dyngran.passes.simulate import Simulator


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplanned:
    """Peak of the step, static bytes included, time of forward and backward, bytes saved for backward."""

    peak_bytes: int
    time_us: float
    saved_bytes: int


def unplanned_saved(problem: Problem, simulator: Simulator) -> frozenset[int]:
    """What torch itself saves: its min-cut under a fusing code generator, else everything that backward reads."""
    return problem.stock[min(problem.stock)] if problem.stock else simulator.default_saved


def unplanned_graph(graph: GraphPlan) -> Unplanned:
    """Of one graph, by simulation, beside what its plan assumes the step holds."""
    simulator = Simulator(graph.problem)
    outcome = simulator.evaluate(unplanned_saved(graph.problem, simulator))
    beside = graph.plan.static_bytes - graph.problem.total_static_bytes
    return Unplanned(peak_bytes=outcome.peak_bytes + beside, time_us=outcome.time_us, saved_bytes=outcome.saved_bytes)


def unplanned_step(document: PlanDocument) -> Unplanned:
    """Of all graphs of a step; later ones run beside what earlier ones then save."""
    graphs = [unplanned_graph(graph) for graph in document.graphs]
    peaks, earlier_bytes = [], 0
    for graph, found in zip(document.graphs, graphs, strict=True):
        peaks.append(found.peak_bytes + earlier_bytes + (graph.runs - 1) * found.saved_bytes)
        earlier_bytes += graph.runs * found.saved_bytes - graph.plan.saved_bytes
    return Unplanned(
        peak_bytes=max(peaks),
        time_us=sum(found.time_us * graph.runs for graph, found in zip(document.graphs, graphs, strict=True)),
        saved_bytes=sum(found.saved_bytes * graph.runs for graph, found in zip(document.graphs, graphs, strict=True)),
    )
