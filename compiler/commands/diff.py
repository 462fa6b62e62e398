"""``dyngran-plan diff``: what differs between two plan files, and what it costs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dyngran.compiler.checks.check_output import bullet
from dyngran.compiler.checks.culprits import Culprit, culprits_of
from dyngran.compiler.checks.limits import Unit
from dyngran.compiler.checks.step_pair import StepPair
from dyngran.compiler.pictures.plan_terminal import action_of, output_console, plain
from dyngran.compiler.plans.planfile import PlanDocument, load_plan
from dyngran.compiler.plans.unplanned import unplanned_step
from dyngran.passes.errors import format_bytes
from dyngran.passes.plan import Action

NUM_LARGEST = 20
NUM_CULPRITS = 8  # of each topic
PROVENANCE = ("codegen", "device", "origin", "torch_version", "dyngran_version")


@dataclass(frozen=True, slots=True)
class Row:
    """One number of both plans."""

    name: str
    unit: Unit
    first: float
    second: float


@dataclass(frozen=True, slots=True)
class Changed:
    """A value about which two plans decide otherwise; '-' for no decision."""

    name: str
    label: str
    size_bytes: int
    first: str
    second: str


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    diff = commands.add_parser(
        "diff",
        help="print what differs between two plans, and what it costs",
        description="Print what differs between plan A and plan B: peak, time, saved bytes, decisions and graphs.",
    )
    diff.add_argument("first", metavar="A")
    diff.add_argument("second", metavar="B")
    diff.add_argument("--json", action="store_true", help="print it as JSON")
    diff.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console | None = None) -> int:
    """Print the differences; 0 whatever they are. Raises PlanFileError."""
    page = console if console is not None else output_console()
    first, second = load_plan(options.first), load_plan(options.second)
    pair = StepPair(first, second)
    rows, changed, culprits = list(_rows(pair)), _changed(pair), culprits_of(pair)
    sentences = [*_provenance(first, second), *(() if pair.is_equal else pair.pairing.mismatches)]
    if options.json:
        content: dict[str, Any] = {
            "equal": first == second,
            "same_graphs": pair.is_equal,
            "numbers": [{**asdict(row), "unit": row.unit.value} for row in rows],
            "decisions": [asdict(one) for one in changed],
            "changes": [{**asdict(one), "topic": one.topic.value} for one in culprits],
            "differences": sentences,
        }
        print(json.dumps(content, indent=1))
        return 0
    page.print(_numbers(rows, first, second))
    if changed:
        page.print(_decisions(changed))
    for sentence in (*_shown(culprits), *sentences):
        page.print(bullet(sentence))
    if first == second:
        page.print("The plans are equal.")
    return 0


def _rows(pair: StepPair) -> Iterator[Row]:
    """Of the plans, by each one's own costs; then of the step without a plan."""
    first, second = pair.committed.document, pair.fresh.document

    def row(name: str, unit: Unit, of: Callable[[PlanDocument], float]) -> Row:
        return Row(name, unit, of(first), of(second))

    yield row("peak", Unit.BYTES, lambda one: one.peak_bytes)
    yield Row("static", Unit.BYTES, pair.committed.static_bytes, pair.fresh.static_bytes)
    yield row("saved", Unit.BYTES, lambda one: sum(graph.plan.saved_bytes for graph in one.graphs))
    yield row("time", Unit.TIME, lambda one: one.time_us)
    yield row("overhead", Unit.TIME, lambda one: sum(graph.plan.overhead_us for graph in one.graphs))
    yield row("recompute", Unit.TIME, lambda one: sum(graph.plan.recompute_us for graph in one.graphs))
    yield row("ops recomputed", Unit.COUNT, lambda one: sum(graph.plan.num_recomputed for graph in one.graphs))
    for action in Action:
        before, after = _count(first, action), _count(second, action)
        if before or after:
            yield Row(f"values: {action.value}", Unit.COUNT, before, after)
    free, other = unplanned_step(first), unplanned_step(second)
    yield Row("unplanned peak", Unit.BYTES, max(pair.committed.free_peaks), max(pair.fresh.free_peaks))
    yield Row("unplanned time", Unit.TIME, free.time_us, other.time_us)
    yield Row("unplanned saved", Unit.BYTES, free.saved_bytes, other.saved_bytes)
    yield row("graphs", Unit.COUNT, lambda one: len(one.graphs))
    yield row("graph breaks", Unit.COUNT, lambda one: len(one.breaks))


def _count(document: PlanDocument, action: Action) -> int:
    return sum(decision.action is action for graph in document.graphs for decision in graph.plan.decisions)


def _changed(pair: StepPair) -> list[Changed]:
    """Largest first. Of graphs that differ, only values that both have and decide about."""
    before, after = (
        {(at, one.value): one for at, plan in enumerate(step.plans) for one in plan.decisions} for step in (pair.committed, pair.fresh)
    )
    rows = []
    for left, right in pair.pairing.partner.items():
        mine, yours = before.get(left), after.get(right)
        one = mine or yours
        if one is None or (not pair.is_equal and (mine is None or yours is None)):
            continue
        actions = tuple("-" if decision is None else action_of(decision) for decision in (mine, yours))
        if actions[0] != actions[1]:
            rows.append((-one.size_bytes, left, Changed(one.name, one.label, one.size_bytes, *actions)))
    return [changed for _, _, changed in sorted(rows, key=lambda row: row[:2])]


def _provenance(first: PlanDocument, second: PlanDocument) -> Iterator[str]:
    for name in PROVENANCE:
        left, right = getattr(first, name), getattr(second, name)
        if left != right:
            yield f"{name.replace('_', ' ')} differs: {getattr(left, 'value', left)} and {getattr(right, 'value', right)}"
    left, right = asdict(first.settings), asdict(second.settings)
    for name in left:
        if left[name] != right[name]:
            yield f"setting {name} differs: {getattr(left[name], 'value', left[name])} and {getattr(right[name], 'value', right[name])}"
    if len(first.graphs) == len(second.graphs):
        for position, (mine, yours) in enumerate(zip(first.graphs, second.graphs, strict=True)):
            if mine.fingerprint != yours.fingerprint:
                yield f"fingerprint of graph {position} differs: {mine.fingerprint} and {yours.fingerprint}"


def _shown(culprits: tuple[Culprit, ...]) -> Iterator[str]:
    topics: dict[object, list[str]] = {}
    for one in culprits:
        topics.setdefault(one.topic, []).append(one.text)
    for texts in topics.values():
        yield from texts[:NUM_CULPRITS]
        if len(texts) > NUM_CULPRITS:
            yield f"and {len(texts) - NUM_CULPRITS} smaller changes of this kind"


def _numbers(rows: list[Row], first: PlanDocument, second: PlanDocument) -> Table:
    table = _table("plans", [""], ["A", "B", "B - A"])
    table.add_row("budget", _budget(first), _budget(second), "")
    for row in rows:
        change = row.second - row.first
        shown = "same" if change == 0 else ("+" if change > 0 else "") + row.unit.show(change)
        table.add_row(row.name, row.unit.show(row.first), row.unit.show(row.second), shown)
    return table


def _budget(document: PlanDocument) -> str:
    budget_bytes = document.plan.budget_bytes
    return "none" if budget_bytes is None else format_bytes(budget_bytes)


def _decisions(changed: list[Changed]) -> Table:
    shown = changed[:NUM_LARGEST]
    title = f"decisions that differ, largest first ({len(shown)} of {len(changed)})"
    table = _table(title, ["value", "region", "A", "B"], ["size"])
    for one in shown:
        cells = (one.name, one.label, one.first, one.second)
        table.add_row(*(Text(plain(cell)) for cell in cells), format_bytes(one.size_bytes))
    return table


def _table(title: str, texts: list[str], numbers: list[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SQUARE)
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
