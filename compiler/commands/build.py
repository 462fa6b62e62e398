"""``dyngran-plan build``: plan a training step and write the plan file, without a card and without allocating a parameter."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dyngran.compiler.commands import asking
from dyngran.compiler.options import Codegen, Outputs
from dyngran.compiler.pictures.plan_terminal import output_console
from dyngran.compiler.plans.planfile import PlanDocument


def add(commands: Any) -> None:
    """Declare the command."""
    build = asking.add_command(
        commands,
        "build",
        summary="plan a training step without running it, and write a plan file",
        description="Plan a training step without running it, and write a plan file.",
    )
    build.add_argument("--budget", metavar="SIZE", help="peak of a step, such as 20GiB or 80%% (of the device); default: no limit")
    build.add_argument("-o", "--output", metavar="FILE", required=True, help="the plan file; one that is there is replaced")
    asking.add_target(build)
    asking.add_batch(build)
    build.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Trace, plan, write, and say what came out."""
    from dyngran.compiler.offline.build import BuildRequest
    from dyngran.compiler.offline.build import build as build_plan
    from dyngran.compiler.plans.output_file import check_writable
    from dyngran.compiler.plans.planfile import save_plan
    from dyngran.passes.errors import format_bytes, format_us

    path = options.output
    check_writable(path, what="plan file")
    settings = asking.settings_from(options, budget=options.budget, batch=options.batch)
    with asking.telling(asking.error_console()) as tell:
        document = build_plan(BuildRequest(target=options.target, settings=settings, codegen=options.codegen), tell)
    save_plan(path, document)
    plan = document.plan
    budget = "no budget" if plan.budget_bytes is None else f"a budget of {format_bytes(plan.budget_bytes)}"
    recomputed = sum(graph.plan.num_recomputed for graph in document.graphs)
    console = output_console()
    console.print(
        f"{path}: {format_bytes(document.peak_bytes)} predicted for {budget} on {document.device} ({document.origin.value}), "
        f"{format_us(document.time_us)} a step, {recomputed} ops run again in backward.",
        markup=False,
    )
    for one in document.breaks:
        console.print(f"graph break{f' at {one.where}' if one.where else ''}: {one.reason}", markup=False)
    for position, graph in enumerate(document.graphs):
        if graph.runs > 1:
            number = f"graph {position + 1} of {len(document.graphs)}"
            console.print(f"{number} runs {graph.runs} times in a step: the budget is checked for one run of it.", soft_wrap=True)
    if document.settings.offload and document.device == "cpu":
        console.print("Nothing is offloaded: the memory of a CPU is the host's.", soft_wrap=True)
    console.print(f"Look at it:  dyngran-plan show {path}", markup=False, soft_wrap=True)
    console.print(f"Train by it: {_training_call(document, path)}", markup=False, soft_wrap=True)
    return 0


def _training_call(document: PlanDocument, path: str) -> str:
    """How the step is compiled that this plan is for."""
    options: dict[str, object] = {"plan": path}
    if document.codegen != Codegen.INDUCTOR.value:
        options["codegen"] = document.codegen
    if document.settings.outputs is not Outputs.HELD:
        options["outputs"] = document.settings.outputs.value
    if document.settings.offload:
        options["offload"] = document.settings.offload
    if document.settings.storage:
        options["storage"] = list(document.settings.storage)
    dynamic = ", dynamic=True" if document.settings.dynamic else ""
    return f'torch.compile(model, backend="dyngran"{dynamic}, options={json.dumps(options).replace(": true", ": True")})'
