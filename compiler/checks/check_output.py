"""A comparison as people and machines read it: a table and sentences, JSON, JUnit, GitHub annotations and a job summary."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from io import StringIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dyngran.compiler.checks.comparison import Comparison, Metric, Verdict
from dyngran.compiler.checks.culprits import Culprit, Topic
from dyngran.compiler.checks.source_files import SourceFiles
from dyngran.compiler.pictures.plan_terminal import plain

COLUMNS = 80
MAX_BLAMED = 3  # sentences for each topic
MAX_GONE = 1
WORTH_BLAMING = 0.02  # of the largest change of the topic
MAX_ANNOTATIONS = 10  # GitHub shows ten of a kind for each step
TITLE = "dyngran-plan check"
STYLES = {Verdict.WORSE: "bold red", Verdict.BETTER: "green", Verdict.SAME: "dim", Verdict.WITHIN: ""}


def verdict_of(comparison: Comparison) -> str:
    """One sentence."""
    if comparison.worse:
        names = ", ".join(metric.name for metric in comparison.worse)
        return f"Regression: {names} beyond what the limits allow."
    return "Same as committed." if comparison.is_same else "No regression: every change is within the limits."


def blamed(comparison: Comparison) -> list[Culprit]:
    """What brought the regressions, topic by topic: a few of the largest changes, and the largest that goes the other way."""
    chosen: list[Culprit] = []
    for topic in Topic:
        rows = [one for one in comparison.culprits if one.topic is topic]
        grown = [one for one in rows if comparison.is_blamed(one)]
        largest = max((one.change for one in grown), default=0.0)
        chosen += [one for one in grown if one.change >= WORTH_BLAMING * largest][:MAX_BLAMED]
        if grown:
            chosen += [one for one in rows if one.change <= -WORTH_BLAMING * largest][:MAX_GONE]
    return chosen


def print_comparison(console: Console, comparison: Comparison) -> None:
    console.print(_table(comparison.metrics))
    for one in blamed(comparison):
        console.print(bullet(one.text))
    if comparison.is_regression and comparison.differences:
        console.print("What differs between the graphs:")
        for sentence in comparison.differences:
            console.print(bullet(sentence))
    for note in comparison.notes:
        console.print(bullet(f"note: {note}"))
    console.print(verdict_of(comparison))


def bullet(sentence: str) -> Table:
    """A sentence that hangs from a dash."""
    row = Table.grid(padding=(0, 1))
    row.add_row("-", Text(plain(sentence), overflow="fold"))
    return row


def _table(metrics: Iterable[Metric]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    for heading in ("committed", "now", "change", "limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for metric in metrics:
        cells = (metric.name, metric.shown(metric.committed), metric.shown(metric.now), metric.change, metric.rule or "-")
        table.add_row(*map(Text, cells), Text(metric.verdict.value, style=STYLES[metric.verdict]))
    return table


def as_text(comparison: Comparison) -> str:
    """What `print_comparison` prints, for a page of 80 columns without colours."""
    page = StringIO()
    print_comparison(Console(file=page, width=COLUMNS, highlight=False, color_system=None), comparison)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines()) + "\n"


def as_json(comparison: Comparison, *, plan: str, target: str) -> str:
    """An object with ``metrics`` and ``culprits``; amounts in bytes, microseconds or counts as ``unit`` says."""
    metrics = [
        {
            "metric": metric.key,
            "name": metric.name,
            "unit": metric.unit.value,
            "committed": metric.committed,
            "now": metric.now,
            "limit": metric.limit,
            "rule": metric.rule,
            "verdict": metric.verdict.value.lower(),
        }
        for metric in comparison.metrics
    ]
    culprits = [
        {
            "topic": one.topic.value,
            "text": one.text,
            "change": one.change,
            "file": one.file,
            "line": one.line,
            "blamed": comparison.is_blamed(one),
        }
        for one in comparison.culprits
    ]
    content = {
        "plan": plan,
        "target": target,
        "regression": comparison.is_regression,
        "verdict": verdict_of(comparison),
        "metrics": metrics,
        "culprits": culprits,
        "differences": list(comparison.differences),
        "notes": list(comparison.notes),
    }
    return json.dumps(content, indent=1) + "\n"


def as_junit(comparison: Comparison | None, *, plan: str, error: str = "") -> str:
    """A suite with a case for each metric; with one case in error where nothing could be compared."""
    metrics = comparison.metrics if comparison is not None else ()
    num_failures = len(comparison.worse) if comparison is not None else 0
    counts = {
        "tests": str(len(metrics) or 1),
        "failures": str(num_failures),
        "errors": "0" if comparison is not None else "1",
    }
    root = ElementTree.Element("testsuites", {"name": TITLE, **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": TITLE, **counts, "skipped": "0", "time": "0"})
    if comparison is None:
        case = _case(suite, plan, "comparison")
        ElementTree.SubElement(case, "error", {"message": plain(error), "type": "CannotCompare"}).text = plain(error)
    for metric in metrics:
        case = _case(suite, plan, metric.name)
        if comparison is not None and metric.verdict is Verdict.WORSE:
            failure = ElementTree.SubElement(case, "failure", {"message": _sentence(metric), "type": "Regression"})
            causes = [one.text for one in blamed(comparison) if one.topic is metric.topic]
            failure.text = "\n".join(plain(text) for text in (_sentence(metric), *causes))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _case(suite: ElementTree.Element, plan: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", {"classname": plain(plan), "name": name, "time": "0"})


def _sentence(metric: Metric) -> str:
    return f"{metric.name}: {metric.shown(metric.now)}, committed {metric.shown(metric.committed)} ({metric.change}, limit {metric.rule})"


def github_annotations(comparison: Comparison, *, plan: str, sources: SourceFiles) -> list[str]:
    """``::error`` commands of GitHub: at the line of each culprit that is known, and one at the plan file that says what is worse."""
    if not comparison.is_regression:
        return []
    lines = [annotation(plan, None, "; ".join(map(_sentence, comparison.worse)))]
    placed: dict[tuple[str, int], list[str]] = {}
    for one in filter(comparison.is_blamed, blamed(comparison)):
        path = sources.find(one.file) if one.file else None
        if path is not None and one.line is not None:
            placed.setdefault((path, one.line), []).append(one.text)
    lines += [annotation(path, line, "\n".join(texts)) for (path, line), texts in placed.items()]
    return lines[:MAX_ANNOTATIONS]


def annotation(path: str, line: int | None, message: str) -> str:
    """One workflow command; what GitHub reads as its syntax is escaped."""
    place = f"file={_property(path)}" + (f",line={line}" if line is not None else "")
    return f"::error {place},title={_property(TITLE)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def as_markdown(comparison: Comparison, *, plan: str) -> str:
    """For a job summary."""
    rows = [("", "committed", "now", "change", "limit", "verdict"), ("---", "---:", "---:", "---:", "---:", "---")]
    for metric in comparison.metrics:
        amounts = (metric.shown(metric.committed), metric.shown(metric.now), metric.change, metric.rule or "-")
        rows.append((metric.name, *amounts, f"**{metric.verdict.value}**" if metric.verdict is Verdict.WORSE else metric.verdict.value))
    lines = [f"### {TITLE}: {_cell(plan)}", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    sentences = [*(one.text for one in blamed(comparison)), *comparison.notes]
    lines += [f"- {_cell(text)}" for text in sentences]
    return "\n".join([*lines, "", verdict_of(comparison), ""])


def _cell(text: str) -> str:
    return "".join(f"\\{character}" if character in "\\`*_<>|[]" else character for character in plain(text))
