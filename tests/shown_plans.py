"""Plan documents of synthetic problems, as `dyngran-plan show` reads them."""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from dataclasses import replace

from problems import Builder
from rich.console import Console

from dyngran.compiler.commands import show
from dyngran.compiler.plans.planfile import GraphPlan, PlanDocument
from dyngran.passes.decide import decide
from dyngran.passes.fingerprint import fingerprint
from dyngran.passes.plan import Schedule
from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.schedule import replay_schedule
from dyngran.passes.simulate import Outcome, Simulator

MIB = 2**20


def layers(num_layers: int, *, fused: bool = False) -> Problem:
    """Layers of a matmul and an activation; a value of a layer has 1 MiB, its parameter 2, and every op takes 10 us."""
    build = Builder(fused=fused)
    stream = build.given(MIB, Kind.INPUT)
    inputs = []
    for layer in range(num_layers):
        weight = build.given(2 * MIB)
        wide = build.op([stream, weight], MIB, cost_us=10.0, region=f"layers.{layer}", workspace_bytes=MIB // 2)
        inputs.append((stream, wide, weight))
        stream = build.op([wide], MIB, cost_us=10.0, target="gelu", fusible=True, region=f"layers.{layer}")
    build.outputs.add(build.op([stream], 512, cost_us=1.0, target="loss", region="loss", kind=Kind.OUTPUT))
    gradient = build.given(512, Kind.TANGENT)
    for layer, (entering, wide, weight) in reversed(list(enumerate(inputs))):
        gradient = _late(build, "gelu_backward", [gradient, wide], layer)
        build.gradients.add(_late(build, "mm", [gradient, entering], layer, size_bytes=2 * MIB, kind=Kind.GRADIENT))
        gradient = _late(build, "mm", [gradient, weight], layer)
    stock = {"min-cut": frozenset(value for entry in inputs for value in entry[:2])} if fused else None
    return build.build(stock=stock)


def _late(build: Builder, target: str, reads: list[int], layer: int, *, size_bytes: int = MIB, kind: Kind = Kind.TEMPORARY) -> int:
    region, is_loop = f"layers.{layer}", target != "mm"
    return build.op(reads, size_bytes, cost_us=10.0, target=target, fusible=is_loop, region=region, kind=kind, side=Side.BACKWARD)


def graph_plan(problem: Problem, saved: Sequence[int] | None = None, *, schedule: Schedule | None = None) -> GraphPlan:
    """The plan that saves ``saved`` (by default every second one that could be) or runs ``schedule``; its budget is 10 % above its peak."""
    simulator = Simulator(problem)
    outcome = simulator.evaluate(simulator.candidates[::2] if saved is None else saved)
    if schedule is not None:
        found = replay_schedule(problem, schedule)
        outcome = Outcome(
            saved=found.saved,
            peak_bytes=found.peak_bytes,
            time_us=found.time_us,
            recompute_us=found.recompute_us,
            saved_bytes=found.saved_bytes,
            num_recomputed=found.num_recomputed,
            schedule=schedule,
        )
    free = simulator.evaluate(simulator.default_saved)
    plan = decide(simulator, outcome, budget_bytes=max(outcome.peak_bytes * 11 // 10, 1), solver="by hand", fastest_us=free.time_us)
    frontier = (
        (max(outcome.peak_bytes - 1, 0), outcome.time_us + 5.0),
        (outcome.peak_bytes, outcome.time_us),
        (free.peak_bytes, free.time_us),
    )
    return GraphPlan(problem=problem, plan=plan, fingerprint=fingerprint(problem), frontier=tuple(sorted(set(frontier))))


def document_of(*graphs: GraphPlan) -> PlanDocument:
    return PlanDocument(graphs=graphs, codegen="eager", torch_version="2.13.0", device="NVIDIA H100", dyngran_version="0.1.0")


def with_peak(graph: GraphPlan, peak_bytes: int) -> GraphPlan:
    """The same plan with another prediction."""
    return replace(graph, plan=replace(graph.plan, peak_bytes=peak_bytes))


def shown(arguments: Sequence[str], *, width: int = 160) -> str:
    """What the command prints, in a terminal of ``width`` columns."""
    parser = argparse.ArgumentParser()
    show.add(parser.add_subparsers())
    options = parser.parse_args(["show", *arguments])
    file = io.StringIO()
    assert options.run(options, Console(file=file, highlight=False, width=width)) == 0
    return file.getvalue()
