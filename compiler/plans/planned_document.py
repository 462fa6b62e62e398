"""The plan file of graphs that were planned."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dyngran.compiler.planned_graph import PlannedGraph
from dyngran.compiler.plans.planfile import GraphBreak, GraphPlan, Origin, PlanDocument, Settings, for_file
from dyngran.passes.forms import without_forms

MAX_POINTS = 64  # of a frontier


def document_of(
    graphs: Sequence[PlannedGraph],
    *,
    device: str,
    settings: Settings,
    origin: Origin = Origin.EXACT,
    breaks: Sequence[GraphBreak] = (),
) -> PlanDocument:
    """The document of the graphs of one step, in the order in which forward runs them; each has been planned."""
    return PlanDocument(
        graphs=tuple(_graph_plan(graph) for graph in graphs),
        codegen=graphs[-1].options.codegen.value,
        torch_version=str(torch.__version__),
        device=device,
        origin=origin,
        settings=settings,
        breaks=tuple(breaks),
    )


def settings_of(graph: PlannedGraph) -> Settings:
    """How a graph that was compiled in training was asked for."""
    options = graph.options
    return Settings(
        budget=None if options.budget is None else str(options.budget),
        keep_below=options.keep_below,
        offload=options.offload,
        outputs=options.outputs,
        pack=options.pack,
        slice=options.slice,
        profile=options.device_profile,
        solver=options.solver,
        storage=options.storage,
    )


def _graph_plan(graph: PlannedGraph) -> GraphPlan:
    strategy, plan = graph.strategy, graph.plan
    assert strategy is not None and plan is not None
    return GraphPlan(
        problem=strategy.graph_problem if plan.schedule is None else without_forms(strategy.graph_problem),
        plan=for_file(plan, strategy.problem),
        fingerprint=strategy.fingerprint,
        frontier=_thinned(strategy.frontier(plan)),
        runs=graph.num_runs,
    )


def _thinned(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """At most `MAX_POINTS` of them, both ends included, evenly spread."""
    if len(points) <= MAX_POINTS:
        return tuple(points)
    return tuple(points[round(step * (len(points) - 1) / (MAX_POINTS - 1))] for step in range(MAX_POINTS))
