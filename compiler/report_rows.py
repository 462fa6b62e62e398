"""The rows of a report: what a plan does per region, to its largest values, and what is live at the predicted peak."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from dyngran.passes.plan import Action, Plan
from dyngran.passes.problem import Kind, Problem
from dyngran.passes.simulate import Timeline

NO_REGION = "(outside of any module)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRow:
    """What the plan does to the values of one region; ``actions`` are ``(action, how many values)`` in the enum's order."""

    name: str
    actions: tuple[tuple[Action, int], ...]
    saved_bytes: int
    recomputed_bytes: int
    recompute_us: float
    num_alike: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRow:
    """One value's decision; the last three as in `Decision`."""

    name: str
    action: Action
    reason: str
    size_bytes: int
    recompute_us: float
    label: str
    format: str | None = None
    stored_bytes: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtPeak:
    """What is allocated while the op at the predicted peak runs; the bytes of ``by_kind`` add up to the predicted peak.

    ``largest`` are ``(name, kind, bytes, label)``, largest first. Held bytes (parameters, optimizer state, ...) are in ``by_kind`` only.
    """

    op: str
    phase: str
    by_kind: tuple[tuple[str, int], ...]
    largest: tuple[tuple[str, str, int, str], ...]


def region_rows(problem: Problem, plan: Plan) -> tuple[RegionRow, ...]:
    """One row per ``Op.region`` that has a decision, in the graph's order."""
    order = (*(op.region for op in problem.ops), "")
    counts: dict[str, Counter[Action]] = {}
    saved: Counter[str] = Counter()
    recomputed: Counter[str] = Counter()
    extra_us: dict[str, float] = {}
    for decision in plan.decisions:
        producer = problem.values[decision.value].producer
        region = "" if producer is None else problem.ops[producer].region
        counts.setdefault(region, Counter())[decision.action] += 1
        if decision.action is Action.RECOMPUTE:
            recomputed[region] += decision.size_bytes
            extra_us[region] = extra_us.get(region, 0.0) + decision.recompute_us
        else:
            saved[region] += decision.size_bytes if decision.stored_bytes is None else decision.stored_bytes
    return tuple(
        RegionRow(
            name=region or NO_REGION,
            actions=tuple((action, counts[region][action]) for action in Action if counts[region][action]),
            saved_bytes=saved[region],
            recomputed_bytes=recomputed[region],
            recompute_us=extra_us.get(region, 0.0),
        )
        for region in dict.fromkeys(order)
        if region in counts
    )


def merge_alike(rows: tuple[RegionRow, ...]) -> tuple[RegionRow, ...]:
    """Rows whose names differ only in numbers and whose actions and bytes are equal become one row with their sum."""
    groups: dict[object, list[RegionRow]] = {}
    for row in rows:
        groups.setdefault((re.sub(r"\d+", "#", row.name), row.actions, row.saved_bytes, row.recomputed_bytes), []).append(row)
    merged = []
    for group in groups.values():
        first = group[0]
        if len(group) == 1:
            merged.append(first)
            continue
        merged.append(
            replace(
                first,
                name=f"{first.name} … {group[-1].name} ({len(group)} alike)",
                actions=tuple((action, count * len(group)) for action, count in first.actions),
                saved_bytes=first.saved_bytes * len(group),
                recomputed_bytes=first.recomputed_bytes * len(group),
                recompute_us=sum(row.recompute_us for row in group),
                num_alike=len(group),
            )
        )
    return tuple(merged)


def largest_rows(problem: Problem, plan: Plan, *, num_rows: int) -> tuple[ValueRow, ...]:
    """The ``num_rows`` largest decided values, largest first."""
    chosen = sorted(plan.decisions, key=lambda decision: (-decision.size_bytes, decision.value))[:num_rows]
    return tuple(
        ValueRow(
            name=decision.name,
            action=decision.action,
            reason=decision.reason,
            size_bytes=decision.size_bytes,
            recompute_us=decision.recompute_us,
            label=decision.label or problem.values[decision.value].label,
            format=decision.format,
            stored_bytes=decision.stored_bytes,
            error=decision.error,
        )
        for decision in chosen
    )


def peak_rows(problem: Problem, plan: Plan, timeline: Timeline, *, num_rows: int) -> AtPeak:
    """What is allocated at the timeline's peak: bytes that are held, bytes that are live by kind, and the largest live values.

    A plan may hold more than its problem: other graphs of the step, and what generated code or measurement needed beyond the timeline.
    """
    position = timeline.peak_position
    live = {kind: grid[position] for kind, grid in timeline.by_kind.items()} if timeline.names else {}
    rows = [(kind.value, problem.static_bytes.get(kind, 0) + live.get(kind, 0)) for kind in Kind]
    rows.append(("workspace", timeline.workspace_at_peak_bytes))
    transient_bytes = timeline.live_bytes[position] if timeline.names else 0
    rows.append(("written in place", transient_bytes - sum(live.values()) - timeline.workspace_at_peak_bytes))
    rows.append(("held outside of this graph", plan.static_bytes - problem.total_static_bytes))
    rows.append(("correction from generated code or measurement", plan.transient_bytes - transient_bytes))
    values = problem.values
    return AtPeak(
        op=timeline.names[position] if timeline.names else "",
        phase="forward" if position < timeline.num_forward else "backward",
        by_kind=tuple((kind, size) for kind, size in rows if size),
        largest=tuple(
            (values[index].name, values[index].kind.value, size, values[index].label) for index, size in timeline.live_at_peak[:num_rows]
        ),
    )
