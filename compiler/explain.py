"""Answers about what was planned: explain, the frontier of budgets, plan files of compiled models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dyngran.compiler import registry
from dyngran.compiler.planned_graph import PlannedGraph
from dyngran.compiler.plans.planfile import GraphBreak
from dyngran.compiler.plans.planfile import save_plan as write_plan
from dyngran.compiler.plans.planned_document import document_of, settings_of
from dyngran.compiler.report import Report, StepReport, build_report
from dyngran.passes.problem import Kind
from dyngran.passes.simulate import Outcome

Handle = torch.nn.Module | Callable[..., Any] | None

NAMED_FROM_BYTES = 2**20  # smaller shares of the peak are not worth a sentence


def explain(handle: Handle = None) -> Report | StepReport:
    """Why each value is kept or recomputed, and predicted beside measured.

    Args:
        handle: a module, a compiled module or function; None for what was compiled last.

    Returns:
        A report that prints as text, renders in rich and as HTML in a notebook. Raises NothingCompiled if nothing was planned.
    """
    graphs = registry.graphs_of(handle)
    newest = [graph for graph in graphs if graph.chain is graphs[-1].chain]
    reports = [_report(graph) for graph in newest]
    return reports[0] if len(reports) == 1 else StepReport(parts=tuple(reports))


def frontier(handle: Handle = None) -> tuple[Outcome, ...]:
    """Peak against time of every plan worth having for the (largest) graph of a model, least peak first."""
    graphs = registry.graphs_of(handle)
    graph = max(graphs, key=lambda one: len(one.strategy.problem.ops) if one.strategy is not None else 0)
    assert graph.strategy is not None
    return graph.strategy.planner.frontier(with_orders=True)


def save_plan(path: str | os.PathLike[str], handle: Handle = None) -> Path:
    """Write the plan of a model's step to a file that ``options={"plan": path}`` and ``dyngran-plan`` read.

    Raises:
        PlanFileError: the path cannot be written.
        NothingCompiled: nothing was planned.
    """
    chain = registry.graphs_of(handle)[-1].chain
    newest = [graph for graph in chain.members() if graph.plan is not None]  # also those that have no parameter, as a loss
    breaks = [GraphBreak(*graph.graph_break) for graph in newest if graph.graph_break is not None]
    write_plan(path, document_of(newest, device=_device_name(newest[-1].device), settings=settings_of(newest[-1]), breaks=breaks))
    return Path(path)


def _report(graph: PlannedGraph) -> Report:
    assert graph.plan is not None and graph.strategy is not None
    return build_report(
        problem=graph.strategy.problem,
        plan=graph.plan,
        simulator=graph.strategy.simulator,
        observation=graph.observer.observation,
        notes=(*graph.notes, *graph.remarks()),
        device=_device_name(graph.device),
        torch_version=str(torch.__version__),
        codegen=graph.options.codegen.value,
        unplanned=_unplanned(graph),
    )


def _unplanned(graph: PlannedGraph) -> tuple[tuple[str, int, str], ...]:
    """(what, bytes, what to do) of memory at the peak that no plan of dyngran's can move."""
    assert graph.plan is not None and graph.strategy is not None
    rows = []
    other = graph.static_of((Kind.OTHER,))
    if other >= NAMED_FROM_BYTES:
        rows.append(
            ("held by the process, but by none of the graph's inputs", other, "free it before the step, or compile the part that holds it")
        )
    problem = graph.strategy.problem
    outputs = sum(problem.values[value].size_bytes for value in problem.forward_outputs)
    if outputs >= NAMED_FROM_BYTES:
        rows.append(
            (
                "outputs of the compiled graph and what eager code makes of them (a loss outside)",
                outputs,
                "move the loss into the compiled module",
            )
        )
    observation = graph.observer.observation
    if observation.peak_bytes is not None and observation.peak_is_exact:
        beyond = observation.peak_bytes - graph.plan.peak_bytes
        if beyond >= max(NAMED_FROM_BYTES, graph.plan.peak_bytes // 50):
            rows.append(
                (
                    "eager code around the compiled graphs: a loss, another half of the model, the optimizer's temporaries",
                    beyond,
                    "compile it too, or use a fused optimizer",
                )
            )
    return tuple(rows)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
