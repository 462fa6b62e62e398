"""``dyngran-plan max-batch``: the largest batch that a budget allows, and its plan."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dyngran.compiler.commands import asking
from dyngran.compiler.offline.largest_batch import FIRST_BATCHES, BatchPoint, BatchSearch
from dyngran.compiler.pictures.plan_terminal import output_console
from dyngran.compiler.plans.planfile import PlanDocument, Settings
from dyngran.compiler.room import room_sentence
from dyngran.passes.errors import BudgetTooSmall, TargetError, format_bytes, format_bytes_up, format_us

PRECISION = 500  # the batch that is planned is at most one in so many smaller than the largest


def add(commands: Any) -> None:
    """Declare the command."""
    largest = asking.add_command(
        commands,
        "max-batch",
        summary="the largest batch under a budget, with and without dyngran, and its plan",
        description="Find the largest batch whose step fits a budget, and plan it.",
    )
    asking.add_target(largest)
    largest.add_argument("--budget", metavar="SIZE", required=True, help="peak of a step, such as 20GiB or 80%% (of the device)")
    largest.add_argument("-o", "--output", metavar="FILE", help="write the plan of the largest batch")
    largest.add_argument("--json", action="store_true", help="print the result as JSON")
    largest.add_argument("--png", metavar="FILE", help="draw peaks against batches (needs matplotlib)")
    largest.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Search, plan the largest, print the curve."""
    from dyngran.compiler.offline.build import TraceProcess
    from dyngran.compiler.plans.output_file import check_writable
    from dyngran.compiler.plans.planfile import save_plan

    if options.output is not None:
        check_writable(options.output, what="plan file")
    if options.png is not None:
        check_writable(options.png, what="picture")
    settings = asking.settings_from(options, budget=options.budget, batch=FIRST_BATCHES[0])
    with asking.telling(asking.error_console()) as tell, TraceProcess(options.target, settings.profile, tell) as process:

        def plan(batch: int) -> PlanDocument:
            tell(f"tracing batch {batch}")
            return process.plan(replace(settings, budget=None, batch=batch), codegen=options.codegen)

        search = BatchSearch(plan)
        budget_bytes = _budget_bytes(process, settings, options.codegen)
        without = search.largest(lambda point: point.unplanned.peak_bytes, budget_bytes)
        batch = search.largest(lambda point: point.least_peak_bytes, budget_bytes)
        planned = _planned(lambda batch: process.plan(replace(settings, batch=batch), codegen=options.codegen), max(1, batch))
        if not isinstance(planned, BudgetTooSmall):
            search.look(planned[1])  # it belongs in the table
    if isinstance(planned, BudgetTooSmall):
        raise TargetError(
            f"target {options.target!r}: not even a batch of 1 fits {format_bytes(budget_bytes)}; its least peak is "
            f"{format_bytes_up(planned.least_peak_bytes)}."
        )
    document, batch = planned
    if options.output is not None:
        save_plan(options.output, document)
    _show(options, search.points, document, batch=batch, without=without, budget_bytes=budget_bytes)
    return 0


def _budget_bytes(process: Any, settings: Settings, codegen: str) -> int:
    """What the budget means on the device: a plan of the smallest batch says it, kept or refused."""
    try:
        budget: int | None = process.plan(settings, codegen=codegen).plan.budget_bytes
    except BudgetTooSmall as error:
        budget = error.budget_bytes
    assert budget is not None
    return budget


def _planned(plan: Callable[[int], PlanDocument], batch: int) -> tuple[PlanDocument, int] | BudgetTooSmall:
    """The plan of the largest batch, or why there is none: the least peak leaves no room for what an allocator rounds up, so it may be a
    little smaller than ``batch``."""
    found: tuple[PlanDocument, int] | None = None
    refusal: BudgetTooSmall | None = None
    good, bad = 0, batch + 1
    while bad - good > max(1, good // PRECISION):
        try:
            found, good = (plan(batch), batch), batch
            batch = (good + bad) // 2
        except BudgetTooSmall as error:
            refusal, bad = error, batch
            met = int(batch * error.budget_bytes / error.least_peak_bytes)
            batch = max(good + 1, min(bad - 1, met))
    outcome = found or refusal
    assert outcome is not None  # the loop runs at least once
    return outcome


def _show(
    options: argparse.Namespace, points: tuple[BatchPoint, ...], document: PlanDocument, *, batch: int, without: int, budget_bytes: int
) -> None:
    if options.png is not None:
        from dyngran.compiler.pictures.plan_png import write_batches

        write_batches(points, Path(options.png), budget_bytes=budget_bytes, batch=batch, without=without)
    if options.json:
        found = {"budget_bytes": budget_bytes, "batch": batch, "batch_unplanned": without, "peak_bytes": document.peak_bytes}
        print(json.dumps({**found, "time_us": document.time_us, "points": [asdict(point) for point in points]}, indent=1))
        return
    from rich.table import Table

    table = Table(title="peak against batch", title_justify="left")
    for heading in ("batch", "peak without dyngran", "per example", "least peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in points:
        each = format_us(point.unplanned.time_us / point.batch)
        table.add_row(str(point.batch), format_bytes(point.unplanned.peak_bytes), each, format_bytes(point.least_peak_bytes))
    console = output_console()
    console.print(table)
    console.print(
        f"{format_bytes(budget_bytes)} hold a batch of {batch} with dyngran ({format_us(document.time_us)} a step, "
        f"{format_us(document.time_us / batch)} per example), and of {without} without."
    )
    if sentence := room_sentence(document.device, document.codegen):
        console.print(f"{sentence} Peaks without dyngran are compared with the budget as they are.")
    if options.output is not None:
        console.print(f"Its plan is in {options.output}.", markup=False)
