"""What brought a change between two plans: values that are saved now, what grew at the peak, ops that cost more, graph breaks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from dyngran.compiler.checks.sites import Groups, Key, Site, SiteGroup, grouped
from dyngran.compiler.checks.step_pair import Step, StepPair
from dyngran.compiler.plans.planfile import GraphBreak
from dyngran.passes.errors import BudgetTooSmall, format_bytes, format_us
from dyngran.passes.forms import base_ops
from dyngran.passes.problem import Kind

WORTH_NAMING = 1e-4  # of what the committed step saves, holds or takes
MAX_PINNED = 5

_PLACE = re.compile(r"(?P<file>[^\s\"':]+\.\w+)\W+(?:line )?(?P<line>\d+)")


class Topic(Enum):
    """What a metric or a culprit is about."""

    BREAKS = "graph breaks"
    SAVED = "saved for backward"
    PEAK = "live at the peak"
    TIME = "time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """One sentence. ``change`` is bytes, microseconds or a count by topic, below 0 for what is gone; ``file``: '' if unknown."""

    topic: Topic
    text: str
    change: float
    file: str = ""
    line: int | None = None


def culprits_of(pair: StepPair, refusal: BudgetTooSmall | None = None) -> tuple[Culprit, ...]:
    """By topic, largest change first; nothing where all graphs and breaks are equal."""
    found = [*_breaks(pair)]
    if not pair.is_equal:
        for rows in (_saved(pair), _at_peak(pair), _costs(pair)):
            found += sorted(rows, key=lambda one: (-abs(one.change), one.text))
    if refusal is not None:
        found += _pinned(refusal)
    return tuple(found)


def _breaks(pair: StepPair) -> Iterator[Culprit]:
    """Reasons and files count; lines move."""
    known = Counter(_break_key(one) for one in pair.committed.document.breaks)
    for one in pair.fresh.document.breaks:
        key = _break_key(one)
        known[key] -= 1
        if known[key] < 0:
            place = _PLACE.search(one.where)
            file, line = (place["file"], int(place["line"])) if place else ("", None)
            yield Culprit(
                topic=Topic.BREAKS,
                text=f"new graph break at {one.where or 'an unknown line'}: {one.reason}",
                change=1,
                file=file,
                line=line,
            )
    for (reason, _), count in known.items():
        if count > 0:
            yield Culprit(topic=Topic.BREAKS, text=f"no graph break any more: {reason}", change=-count)
    before, after = pair.committed, pair.fresh
    if not after.document.breaks and after.num_breaks > before.num_breaks:
        text = f"the step has {len(after.problems)} graphs where it had {len(before.problems)}; why it is cut is not in the plan"
        yield Culprit(topic=Topic.BREAKS, text=text, change=after.num_breaks - before.num_breaks)


def _break_key(one: GraphBreak) -> tuple[str, str]:
    return re.sub(r"\d+", "", one.reason), re.sub(r"\d+", "", one.where)


def _saved(pair: StepPair) -> list[Culprit]:
    """What the unplanned step saves and has no partner that is saved on the other side."""
    mine, yours = ({(at, v) for at, saved in enumerate(step.free_saved) for v in saved} for step in (pair.committed, pair.fresh))
    kept = {(left, right) for left, right in pair.pairing.partner.items() if left in mine and right in yours}
    before = _values(pair.committed, mine - {left for left, _ in kept})
    after = _values(pair.fresh, yours - {right for _, right in kept})
    total = pair.committed.free_saved_bytes
    return _changes(before, after, total, Topic.SAVED, ("new saved value: ", "no longer saved: ", "saved: "), format_bytes)


def _values(step: Step, chosen: Iterable[tuple[int, int]]) -> Groups:
    items = []
    for at, index in sorted(chosen):
        value = step.problems[at].values[index]
        site = Site.of(value.label or value.name)
        items.append((site.key, site, float(value.size_bytes)))
    return grouped(items)


def _at_peak(pair: StepPair) -> list[Culprit]:
    """By place in the program, at the peak of the unplanned step, or of the plan where only that grew."""
    grew = [
        before is not None and after is not None and after > before
        for before, after in (
            (max(pair.committed.free_peaks), max(pair.fresh.free_peaks)),
            (pair.committed.least_peak_bytes, pair.fresh.least_peak_bytes),
        )
    ]
    before, after = (_live(step, known, unplanned=any(grew)) for step, known in ((pair.committed, {}), (pair.fresh, _keys(pair))))
    peak = max(pair.committed.free_peaks)
    words = ("new at the peak: ", "no longer live at the peak: ", "live at the peak: ")
    return _changes(before, after, peak, Topic.PEAK, words, format_bytes)


def _keys(pair: StepPair) -> dict[tuple[int, int], Key]:
    """For each fresh value with a partner the place of that partner: a renamed module is the same place."""
    found = {}
    for (at, value), right in pair.pairing.partner.items():
        one = pair.committed.problems[at].values[value]
        found[right] = Site.of(one.label or one.name).key
    return found


def _live(step: Step, known: Mapping[tuple[int, int], Key], *, unplanned: bool) -> Groups:
    live, workspace_bytes = step.live_at_peak(unplanned=unplanned)
    items = []
    for at, index in live:
        value = step.problems[at].values[index]
        site = Site.of(value.label or value.name)
        items.append((known.get((at, index), site.key), site, float(value.size_bytes)))
    for kind, num_bytes in step.held.items():
        site = Site("", kind.value if kind in (Kind.OPTIMIZER, Kind.OTHER) else f"{kind.value}s", "", None)
        items.append((site.key, site, float(num_bytes)))
    if workspace_bytes:
        site = Site("", "workspace of the op that runs there", "", None)
        items.append((site.key, site, float(workspace_bytes)))
    return grouped(items)


def _costs(pair: StepPair) -> list[Culprit]:
    before, after = _ops(pair.committed, {}), _ops(pair.fresh, _keys(pair))
    total = pair.committed.free_time_us
    is_fused = any(problem.fused for problem in pair.fresh.problems)  # then costs of single ops are more than they come to
    return _changes(
        before,
        after,
        total,
        Topic.TIME,
        ("new work: ", "no longer run: ", "work: "),
        format_us,
        suffix=" (before fusion)" if is_fused else "",
    )


def _ops(step: Step, known: Mapping[tuple[int, int], Key]) -> Groups:
    items = []
    for at, problem in enumerate(step.problems):
        for op in (problem.ops[index] for index in base_ops(problem)):  # ways to store values are work only where a plan takes them
            if op.writes and op.cost_us:
                value = problem.values[op.writes[0]]
                site = Site.of(value.label or value.name)
                items.append((known.get((at, value.index), site.key), site, op.cost_us))
    return grouped(items)


def _changes(
    before: Groups, after: Groups, total: float, topic: Topic, words: tuple[str, str, str], show: Callable[[float], str], suffix: str = ""
) -> list[Culprit]:
    """A culprit for each place whose amount changed by what is worth naming."""
    found = []
    for key in {**after, **before}:
        old, new = before.get(key), after.get(key)
        change = (new.amount if new else 0.0) - (old.amount if old else 0.0)
        if abs(change) <= WORTH_NAMING * total:
            continue
        shown = new or old
        assert shown is not None
        text = f"{words[0] if not old else words[1] if not new else words[2]}{shown}, {_amounts(old, new, show)}{suffix}"
        found.append(Culprit(topic=topic, text=text, change=change, file=shown.first.file, line=shown.first.line))
    return found


def _amounts(old: SiteGroup | None, new: SiteGroup | None, show: Callable[[float], str]) -> str:
    one = new or old
    assert one is not None
    times = f" in {one.count}" if one.count > 1 else ""
    if old and new:
        return f"{show(new.amount)}{times} where {show(old.amount)} was"
    return show(one.amount) + times


def _pinned(refusal: BudgetTooSmall) -> Iterator[Culprit]:
    for name, size_bytes in refusal.pinned[:MAX_PINNED]:
        site = Site.of(name)
        text = f"cannot be freed at the least peak: {name}, {format_bytes(size_bytes)}"
        yield Culprit(topic=Topic.PEAK, text=text, change=size_bytes, file=site.file, line=site.line)
