"""``dyngran-plan``: look at plan files. Exit code 0, or 2 with one sentence on stderr: bad input, or output that fails."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dyngran.compiler.planfile import PlanDocument, dump_plan, load_plan
from dyngran.compiler.version import VERSION
from dyngran.passes.errors import PlanFileError, format_bytes, format_us
from dyngran.passes.plan import Action, Decision, Plan

NUM_LARGEST = 20
NO_LABEL = "(no label)"
PIPE_COLUMNS = 400  # a file or another program has no width at which lines must be folded

Number = TypeVar("Number", int, float)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. argparse leaves with 2 on arguments that it does not know."""
    options = _parser().parse_args(arguments)
    if sys.stdout is None:  # `>&-`
        print("dyngran-plan: cannot write the output: standard output is closed.", file=sys.stderr)
        return 2
    in_terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if in_terminal else PIPE_COLUMNS)
    try:
        options.run(options, console)
        sys.stdout.flush()
    except PlanFileError as error:
        print(f"dyngran-plan: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader (head, less) has seen enough
        _drop_output()
    except OSError as error:  # a full disk, say; what cannot be read is a PlanFileError
        _drop_output()
        print(f"dyngran-plan: cannot write the output: {error.strerror or error}.", file=sys.stderr)
        return 2
    return 0


def _drop_output() -> None:
    """Let what is still buffered go nowhere: Python writes it once more on its way out, and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dyngran-plan", description="Look at dyngran's plan files.")
    parser.add_argument("--version", action="version", version=f"dyngran-plan {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="print a plan: prediction, largest decisions, totals by action and by region")
    show.add_argument("file", metavar="FILE")
    show.add_argument("--json", action="store_true", help="print the document as JSON")
    show.add_argument("--all", action="store_true", help=f"print every decision, not the {NUM_LARGEST} largest")
    show.set_defaults(run=_show)
    diff = commands.add_parser("diff", help="print what differs between two plans in peak, saved bytes, time and decisions")
    diff.add_argument("first", metavar="A")
    diff.add_argument("second", metavar="B")
    diff.set_defaults(run=_diff)
    return parser


def _show(options: argparse.Namespace, console: Console) -> None:
    document = load_plan(options.file)
    if options.json:
        print(dump_plan(document), end="")
        return
    decisions = sorted(document.plan.decisions, key=lambda decision: (-decision.size_bytes, decision.value))
    shown = decisions if options.all else decisions[:NUM_LARGEST]
    console.print(_header(document))
    console.print(_largest(shown, len(decisions)))
    console.print(_totals("by action", "action", decisions, lambda decision: decision.action.value))
    console.print(_totals("by region", "region", decisions, lambda decision: decision.label or NO_LABEL))


def _table(title: str, texts: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", expand=False)
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _header(document: PlanDocument) -> Table:
    plan = document.plan
    table = Table(title="plan", title_justify="left", show_header=False)
    rows = {
        "budget": _budget(plan),
        "predicted peak": f"{format_bytes(plan.peak_bytes)}, of which static {format_bytes(plan.static_bytes)}",
        "saved for backward": f"{format_bytes(plan.saved_bytes)} in {len(plan.saved)} values",
        "predicted time": f"{format_us(plan.time_us)}, of which {format_us(plan.overhead_us)} beyond the fastest plan known for any budget",
        "recompute": f"{format_us(plan.recompute_us)} in {plan.num_recomputed} ops",
        "solver": plan.solver + (" (truncated: a safety stop cut the search short)" if plan.truncated else ""),
        "order": plan.order,
        "made for": f"{document.device}, torch {document.torch_version}, codegen {document.codegen}, dyngran {document.dyngran_version}",
        "graph": document.fingerprint,
    }
    for name, text in rows.items():
        table.add_row(name, _plain(text))
    return table


def _largest(decisions: Sequence[Decision], num_decisions: int) -> Table:
    title = f"decisions, largest first ({len(decisions)} of {num_decisions})"
    table = _table(title, ["value", "action", "region", "reason"], ["size", "recompute"])
    for decision in decisions:
        texts = (decision.name, _action(decision), decision.label, decision.reason)
        table.add_row(*map(_plain, texts), format_bytes(decision.size_bytes), format_us(decision.recompute_us))
    return table


def _totals(title: str, heading: str, decisions: Iterable[Decision], key: Callable[[Decision], str]) -> Table:
    groups: dict[str, list[Decision]] = {}
    for decision in decisions:
        groups.setdefault(key(decision), []).append(decision)
    table = _table(title, [heading], ["values", "size", "kept", "recomputed", "recompute"])
    for name, group in sorted(groups.items(), key=lambda item: (-_bytes(item[1]), item[0])):
        kept, again = (_bytes(d for d in group if d.action is action) for action in (Action.KEEP, Action.RECOMPUTE))
        recompute_us = sum(decision.recompute_us for decision in group)
        sizes = (format_bytes(size) for size in (_bytes(group), kept, again))
        table.add_row(_plain(name), str(len(group)), *sizes, format_us(recompute_us))
    return table


def _diff(options: argparse.Namespace, console: Console) -> None:
    documents = load_plan(options.first), load_plan(options.second)
    first, second = (document.plan for document in documents)
    table = _table("plans", [""], ["A", "B", "B - A"])
    table.add_row("budget", _budget(first), _budget(second), "")
    for name in ("peak_bytes", "static_bytes", "saved_bytes"):
        before, after = getattr(first, name), getattr(second, name)
        table.add_row(name.removesuffix("_bytes"), format_bytes(before), format_bytes(after), _change(after - before, format_bytes))
    for name in ("time_us", "overhead_us", "recompute_us"):
        before, after = getattr(first, name), getattr(second, name)
        table.add_row(name.removesuffix("_us"), format_us(before), format_us(after), _change(after - before, format_us))
    table.add_row(
        "ops recomputed", str(first.num_recomputed), str(second.num_recomputed), _change(second.num_recomputed - first.num_recomputed, str)
    )
    for action in Action:
        before, after = (sum(decision.action is action for decision in plan.decisions) for plan in (first, second))
        if before or after:
            table.add_row(f"values: {action.value}", str(before), str(after), _change(after - before, str))
    console.print(table)
    if documents[0].fingerprint == documents[1].fingerprint:  # else the same number is another value
        _print_changed(first, second, console)
    for name in ("fingerprint", "codegen", "device", "torch_version", "dyngran_version"):
        left, right = (getattr(document, name) for document in documents)
        if left != right:
            console.print(_plain(f"{name.replace('_', ' ')} differs: {left} and {right}"), soft_wrap=True)
    if documents[0] == documents[1]:
        console.print("The plans are equal.")


def _print_changed(first: Plan, second: Plan, console: Console) -> None:
    """The values about which two plans of one graph decide otherwise, largest first."""
    before, after = ({decision.value: decision for decision in plan.decisions} for plan in (first, second))
    pairs = [(before.get(value), after.get(value)) for value in before.keys() | after.keys()]
    rows = []
    for left, right in pairs:
        one = left or right
        assert one is not None
        actions = tuple("-" if decision is None else _action(decision) for decision in (left, right))
        if actions[0] != actions[1]:
            rows.append((-one.size_bytes, one.value, (one.name, one.label, *actions)))
    if not rows:
        return
    shown = sorted(rows)[:NUM_LARGEST]
    table = _table(f"decisions that differ, largest first ({len(shown)} of {len(rows)})", ["value", "region", "A", "B"], ["size"])
    for negative_bytes, _, texts in shown:
        table.add_row(*map(_plain, texts), format_bytes(-negative_bytes))
    console.print(table)


def _plain(text: str) -> Text:
    """``text`` as it stands: no markup, and nothing from a file that could steer a terminal."""
    return Text("".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text))


def _action(decision: Decision) -> str:
    """The action with its parameters: ``slice dim 0, 50%``, ``narrow bf16``."""
    words = [decision.action.value]
    if decision.dimension is not None:
        words.append(f"dim {decision.dimension}" + ("," if decision.fraction is not None else ""))
    if decision.fraction is not None:
        words.append(f"{decision.fraction:.0%}")
    if decision.format is not None:
        words.append(decision.format)
    return " ".join(words)


def _bytes(decisions: Iterable[Decision]) -> int:
    return sum(decision.size_bytes for decision in decisions)


def _budget(plan: Plan) -> str:
    return "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)


def _change(change: Number, show: Callable[[Number], str]) -> str:
    return "same" if change == 0 else ("+" if change > 0 else "") + show(change)
