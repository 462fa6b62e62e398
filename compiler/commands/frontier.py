"""``dyngran-plan frontier``: peak against step time over budgets, of a target or of a plan file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dyngran.compiler.commands import asking
from dyngran.compiler.pictures.plan_terminal import output_console
from dyngran.compiler.plans.output_file import check_writable
from dyngran.compiler.plans.planfile import GraphPlan, PlanDocument
from dyngran.compiler.room import room_sentence
from dyngran.passes.errors import format_bytes, format_us

NUM_ROWS = 16


def add(commands: Any) -> None:
    """Declare the command."""
    frontier = asking.add_command(
        commands,
        "frontier",
        summary="peak against step time over all budgets, as table, JSON or plot",
        description="List the plans worth having, least peak first: what a budget costs in time.",
    )
    asking.add_target(frontier)
    asking.add_batch(frontier)
    frontier.add_argument("--all", action="store_true", help=f"print every plan, not {NUM_ROWS} of them")
    frontier.add_argument("--json", action="store_true", help="print the plans as JSON")
    frontier.add_argument("--png", metavar="FILE", help="draw them (needs matplotlib)")
    frontier.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the frontier of each graph of the step."""
    if options.png is not None:
        check_writable(options.png, what="picture")
    document = _document(options)
    if options.png is not None:
        from dyngran.compiler.pictures.plan_png import write_frontier

        write_frontier(document, Path(options.png))
    if options.json:
        graphs = [
            {"fingerprint": graph.fingerprint, "plans": [{"peak_bytes": peak, "time_us": time} for peak, time in graph.frontier]}
            for graph in document.graphs
        ]
        print(json.dumps({"device": document.device, "codegen": document.codegen, "graphs": graphs}, indent=1))
        return 0
    console = output_console()
    if options.png is not None:
        console.print(f"picture written to {options.png}", markup=False, soft_wrap=True)
    for position, graph in enumerate(document.graphs):
        title = f"graph {position + 1} of {len(document.graphs)}" if len(document.graphs) > 1 else "plans, least peak first"
        console.print(_table(title, graph, shows_all=options.all))
    if sentence := room_sentence(document.device, document.codegen):
        console.print(sentence)
    return 0


def _document(options: argparse.Namespace) -> PlanDocument:
    if options.target.endswith(".json"):
        from dyngran.compiler.plans.planfile import load_plan

        return load_plan(options.target)
    from dyngran.compiler.offline.build import BuildRequest, build

    settings = asking.settings_from(options, budget=None, batch=options.batch)
    with asking.telling(asking.error_console()) as tell:
        return build(BuildRequest(target=options.target, settings=settings, codegen=options.codegen), tell)


def _table(title: str, graph: GraphPlan, *, shows_all: bool) -> Any:
    from rich.table import Table

    from dyngran.compiler.plans.unplanned import unplanned_graph

    points, free = graph.frontier, unplanned_graph(graph)
    if not shows_all and len(points) > NUM_ROWS:
        points = tuple(points[round(step * (len(points) - 1) / (NUM_ROWS - 1))] for step in range(NUM_ROWS))
    table = Table(title=title, title_justify="left")
    for heading in ("peak", "of the unplanned", "step time", "slower by"):
        table.add_column(heading, justify="right", no_wrap=True)
    for peak_bytes, time_us in points:
        slower = f"{(time_us / free.time_us - 1):+.1%}" if free.time_us else "-"
        table.add_row(
            format_bytes(peak_bytes), f"{peak_bytes / free.peak_bytes:.0%}" if free.peak_bytes else "-", format_us(time_us), slower
        )
    return table
