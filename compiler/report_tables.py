"""What people read of a report: the sentences and the cells of its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dyngran.compiler.report_rows import RegionRow, ValueRow, merge_alike
from dyngran.compiler.report_sheet import Sheet, Table
from dyngran.passes.errors import format_bytes, format_us
from dyngran.passes.plan import Action

if TYPE_CHECKING:
    from dyngran.compiler.report import Report, StepReport

MAX_REGIONS = 30


def report_sheet(report: Report) -> Sheet:
    """The sheet of one compiled region."""
    tables = (_summary(report), *_details(report))
    return Sheet(heading=_heading(report, 1), sentences=_sentences(report), tables=tables, notes=_notes(report))


def step_sheet(report: StepReport) -> Sheet:
    """The sheet of a step of several compiled regions: a summary, one row per part, then the details of every part."""
    rows = tuple(
        (
            str(number),
            format_bytes(part.predicted_peak_bytes),
            format_bytes(part.plan.saved_bytes),
            str(part.plan.num_recomputed),
            format_us(part.predicted_step_us),
        )
        for number, part in enumerate(report.parts)
    )
    columns = ("graph", "predicted peak", "saved", "recomputed ops", "predicted time")
    parts = Table(title="Compiled graphs of one step", columns=columns, align="lrrrr", rows=rows)
    details = tuple(table for number, part in enumerate(report.parts) for table in _details(part, f"graph {number}: "))
    return Sheet(
        heading=_heading(report, len(report.parts)),
        sentences=_sentences(report),
        tables=(_summary(report), parts, *details),
        notes=_notes(report),
    )


def _heading(report: Report | StepReport, num_graphs: int) -> str:
    graphs = "1 graph" if num_graphs == 1 else f"{num_graphs} graphs"
    return f"dyngran: {graphs} on {report.device}, codegen {report.codegen}, torch {report.torch_version}"


def _sentences(report: Report | StepReport) -> tuple[str, ...]:
    plan, predicted, measured = report.plan, report.predicted_peak_bytes, report.measured_peak_bytes
    sentences = []
    if plan.budget_bytes is None:
        sentences.append("No budget was given.")
    else:
        spare_bytes = plan.budget_bytes - predicted
        fits = f"{format_bytes(spare_bytes)} to spare" if spare_bytes >= 0 else f"{format_bytes(-spare_bytes)} above it"
        sentences.append(f"Budget {format_bytes(plan.budget_bytes)}: the predicted peak is {format_bytes(predicted)}, {fits}.")
        if measured is not None and measured > plan.budget_bytes:
            sentences.append(f"The measured peak is above the budget by {format_bytes(measured - plan.budget_bytes)}.")
    plans = report.plans
    solvers = ", ".join(dict.fromkeys(each.solver for each in plans))
    cut = ", cut off by its safety stop" if any(each.truncated for each in plans) else ""
    num_recomputed = sum(each.num_recomputed for each in plans)
    if all(each.schedule is None for each in plans):
        again = "1 op runs again in backward" if num_recomputed == 1 else f"{num_recomputed} ops run again in backward"
    else:
        again = f"the order of ops is prescribed, and {num_recomputed} of their runs {'repeats' if num_recomputed == 1 else 'repeat'} one"
    slower = f"{format_us(sum(each.overhead_us for each in plans))} slower than torch's own partition"
    sentences.append(f"Plan by {solvers}{cut}: {again}, {format_us(sum(each.recompute_us for each in plans))}; {slower}.")
    if plan.budget_bytes is not None and all(each.bound for each in plans):
        gap = 1 - sum(each.bound_us for each in plans) / max(sum(each.time_us for each in plans), 1e-9)
        if all(each.bound.startswith("exact") for each in plans):
            sentences.append("No plan that keeps the budget is faster: proven.")
        else:
            sentences.append(f"No plan that keeps the budget can be more than {max(gap, 0.0):.1%} faster (a bound that is rarely reached).")
    if not report.num_steps:
        sentences.append("No step has been measured yet.")
    return tuple(sentences)


def _summary(report: Report | StepReport) -> Table:
    about = "" if report.peak_is_exact else "at least " if report.device == "cpu" else "at most "
    static_bytes = report.measured_static_bytes
    peak_bytes = report.measured_peak_bytes
    transient_bytes = None if peak_bytes is None or static_bytes is None else peak_bytes - static_bytes
    steps = f"measured, {report.num_steps} steps" if report.num_steps != 1 else "measured, 1 step"
    rows = (
        ("peak of the step", format_bytes(report.predicted_peak_bytes), _known_bytes(peak_bytes, about)),
        ("held over the whole step", format_bytes(report.plan.static_bytes), _known_bytes(static_bytes)),
        (
            "transient at the peak",
            format_bytes(report.predicted_peak_bytes - report.plan.static_bytes),
            _known_bytes(transient_bytes, about),
        ),
        (
            "time of a step (predicted: forward and backward)",
            format_us(report.predicted_step_us),
            "-" if report.measured_step_us is None else format_us(report.measured_step_us),
        ),
    )
    return Table(title="Predicted beside measured", columns=("", "predicted", steps), align="lrr", rows=rows)


def _known_bytes(num_bytes: int | None, about: str = "") -> str:
    return "-" if num_bytes is None else about + format_bytes(num_bytes)


def _details(report: Report, prefix: str = "") -> tuple[Table, ...]:
    tables = []
    if report.regions:
        tables.append(_region_table(report.regions, prefix))
    if report.largest:
        tables.append(_value_table(report.largest, prefix))
    at_peak = report.at_peak
    if at_peak.by_kind:
        total_bytes = sum(size for _, size in at_peak.by_kind)
        rows = tuple((kind, format_bytes(size)) for kind, size in (*at_peak.by_kind, ("together", total_bytes)))
        where = f", while {at_peak.op} runs in {at_peak.phase}" if at_peak.op else ""
        tables.append(Table(title=f"{prefix}At the predicted peak{where}", columns=("kind", "bytes"), align="lr", rows=rows))
    if at_peak.largest:
        live = tuple((name, kind, format_bytes(size), label) for name, kind, size, label in at_peak.largest)
        columns = ("value", "kind", "bytes", "source")
        tables.append(Table(title=f"{prefix}Largest values live at the predicted peak", columns=columns, align="llrl", rows=live))
    return tuple(tables)


def _region_table(regions: tuple[RegionRow, ...], prefix: str) -> Table:
    merged = merge_alike(regions)
    rows = [_region_cells(row) for row in merged[:MAX_REGIONS]]
    rest = merged[MAX_REGIONS:]
    if rest:
        counts = {action: sum(dict(row.actions).get(action, 0) for row in rest) for action in Action}
        left_out = RegionRow(
            name=f"and {sum(row.num_alike for row in rest)} more",
            actions=tuple((action, count) for action, count in counts.items() if count),
            saved_bytes=sum(row.saved_bytes for row in rest),
            recomputed_bytes=sum(row.recomputed_bytes for row in rest),
            recompute_us=sum(row.recompute_us for row in rest),
        )
        rows.append(_region_cells(left_out))
    columns = ("region", "actions", "saved", "recomputed", "time, op by op")
    return Table(title=f"{prefix}Regions", columns=columns, align="llrrr", rows=tuple(rows))


def _region_cells(row: RegionRow) -> tuple[str, ...]:
    actions = ", ".join(f"{action.value} {count}" for action, count in row.actions)
    return (row.name, actions, format_bytes(row.saved_bytes), format_bytes(row.recomputed_bytes), format_us(row.recompute_us))


def _value_table(largest: tuple[ValueRow, ...], prefix: str) -> Table:
    rows = tuple(
        (
            row.name,
            row.action.value if row.format is None else f"{row.action.value} {row.format}",
            format_bytes(row.size_bytes) + ("" if row.stored_bytes is None else f" to {format_bytes(row.stored_bytes)}"),
            format_us(row.recompute_us),
            row.reason,
            row.label,
        )
        for row in largest
    )
    columns = ("value", "action", "bytes", "time, op by op", "reason", "source")
    return Table(title=f"{prefix}Largest values that backward needs", columns=columns, align="llrrll", rows=rows)


def _notes(report: Report | StepReport) -> tuple[str, ...]:
    unplanned = (f"{format_bytes(size)} at the peak is not planned by dyngran: {what}; {advice}" for what, size, advice in report.unplanned)
    return (*unplanned, *report.drift, *report.notes)
