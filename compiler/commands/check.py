"""``dyngran-plan check``: trace the target again as a committed plan was made, and fail on a regression."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console

from dyngran.compiler.budget import Budget
from dyngran.compiler.checks import check_output
from dyngran.compiler.checks.comparison import Comparison, compare
from dyngran.compiler.checks.limits import MAX_PEAK, MAX_SAVED, MAX_STEP, Limits
from dyngran.compiler.checks.source_files import SourceFiles
from dyngran.compiler.pictures.plan_terminal import output_console, plain
from dyngran.compiler.plans.output_file import check_writable, write_file
from dyngran.compiler.plans.planfile import PlanDocument, Settings, load_plan, save_plan
from dyngran.passes.errors import BudgetTooSmall, DyngranError, format_bytes_up

SAME, REGRESSION = 0, 1  # 2, cannot compare, is what a DyngranError becomes

Builder = Callable[[str, Settings, str], PlanDocument]  # target, settings, code generator


@dataclass(frozen=True, slots=True)
class Checked:
    """``fresh`` is what an update writes; None if the budget cannot be kept."""

    comparison: Comparison
    fresh: PlanDocument | None


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser(
        "check",
        help="trace a target again and fail if it needs more than a committed plan",
        description="Trace TARGET with the settings of PLAN and compare. Exit code 0: same or better; 1: regression; 2: cannot compare.",
    )
    check.add_argument("plan", metavar="PLAN", help="the committed plan file")
    check.add_argument("target", metavar="TARGET", help="FILE.py:FUNCTION, as for build")
    check.add_argument(
        "--max-peak", default=MAX_PEAK, metavar="X", help=f"growth of peaks: +1%%, +200MiB or 20GiB (default {_shown(MAX_PEAK)})"
    )
    check.add_argument(
        "--max-step", default=MAX_STEP, metavar="X", help=f"growth of predicted times: +2%%, +3ms (default {_shown(MAX_STEP)})"
    )
    saved = f"growth of what the unplanned step saves (default {_shown(MAX_SAVED)})"
    check.add_argument("--max-saved", default=MAX_SAVED, metavar="X", help=saved)
    check.add_argument("--max-graph-breaks", type=int, metavar="N", help="graph breaks that are allowed (default: as committed)")
    check.add_argument("--update", action="store_true", help="write the fresh plan to PLAN, if it could be compared")
    check.add_argument("--json", action="store_true", help="print the comparison as JSON")
    check.add_argument("--junit", metavar="OUT.xml", help="write a JUnit report, with a case for each number")
    check.set_defaults(run=run)


def _shown(limit: str) -> str:
    return limit.replace("%", "%%")


def run(options: argparse.Namespace, console: Console | None = None) -> int:
    """Print the comparison; returns the exit code. Raises DyngranError if there is none."""
    page = console if console is not None else output_console()
    if options.junit:
        check_writable(options.junit, what="report")
    try:
        limits = Limits.parse(
            max_peak=options.max_peak,
            max_step=options.max_step,
            max_saved=options.max_saved,
            max_graph_breaks=options.max_graph_breaks,
        )
        checked = check_plan(load_plan(options.plan), options.target, limits)
    except DyngranError as error:
        _report_error(options, str(error))
        raise
    if options.update and checked.fresh is not None:
        save_plan(options.plan, replace(checked.fresh, extra=load_plan(options.plan).extra))
    comparison = checked.comparison
    _report(options, page, comparison)
    if options.update:
        done = "written" if checked.fresh is not None else "not written: no plan keeps the budget; build one with another budget"
        print(f"{options.plan}: {done}.", file=sys.stderr)
        return SAME if checked.fresh is not None else REGRESSION
    return REGRESSION if comparison.is_regression else SAME


def check_plan(committed: PlanDocument, target: str, limits: Limits, build: Builder | None = None) -> Checked:
    """Compare ``committed`` with what ``target`` is planned as now, under the same settings.

    Raises:
        DyngranError: the target cannot be traced, or the two cannot be compared.
    """
    make = build if build is not None else build_fresh
    settings = settings_of(committed)
    try:
        fresh = make(target, settings, committed.codegen)
    except BudgetTooSmall as refusal:
        unlimited = make(target, replace(settings, budget=None), committed.codegen)
        return Checked(_refused(compare(committed, unlimited, limits, refusal=refusal), refusal), None)
    return Checked(compare(committed, fresh, limits), fresh)


def _refused(comparison: Comparison, refusal: BudgetTooSmall) -> Comparison:
    least = format_bytes_up(refusal.least_peak_bytes)
    note = f"the committed budget cannot be kept any more: the least peak is {least}. Times are of the step without a budget"
    return replace(comparison, notes=(*comparison.notes, note))


def settings_of(document: PlanDocument) -> Settings:
    """How to ask for the plan again. A plan saved from a running model holds its budget only in bytes."""
    settings, budget_bytes = document.settings, document.plan.budget_bytes
    if settings.budget is None and budget_bytes is not None:
        return replace(settings, budget=str(Budget.parse(budget_bytes)))
    return settings


def build_fresh(target: str, settings: Settings, codegen: str) -> PlanDocument:
    """Trace and plan in a process of its own. Raises DyngranError."""
    from dyngran.compiler.commands import asking
    from dyngran.compiler.offline.build import BuildRequest, build

    with asking.telling(asking.error_console()) as tell:
        return build(BuildRequest(target=target, settings=settings, codegen=codegen), tell)


def _report(options: argparse.Namespace, console: Console, comparison: Comparison) -> None:
    if options.json:
        print(check_output.as_json(comparison, plan=options.plan, target=options.target), end="")
    else:
        check_output.print_comparison(console, comparison)
    if options.junit:
        write_file(options.junit, check_output.as_junit(comparison, plan=options.plan).encode(), what="report")
    if os.environ.get("GITHUB_ACTIONS") == "true" and not options.update:
        for line in check_output.github_annotations(comparison, plan=options.plan, sources=SourceFiles(options.target)):
            print(line, file=sys.stderr if options.json else sys.stdout)
    _add_to_summary(check_output.as_markdown(comparison, plan=options.plan))


def _report_error(options: argparse.Namespace, message: str) -> None:
    if options.junit:
        write_file(options.junit, check_output.as_junit(None, plan=options.plan, error=message).encode(), what="report")
    if os.environ.get("GITHUB_ACTIONS") == "true":
        print(check_output.annotation(options.plan, None, message), file=sys.stderr if options.json else sys.stdout)
    _add_to_summary(f"### {check_output.TITLE}: cannot compare\n\n{plain(message)}\n")


def _add_to_summary(text: str) -> None:
    """GitHub shows this file beside the job."""
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
