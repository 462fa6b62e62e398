"""A plan file and the graph at hand: which stored plan is for it, and what it says here.

A fingerprint is a hash and no mapping, so values are mapped by a checked isomorphism. Of a portable plan, whose graph was traced without
the device, regions that differ are aligned and the rest is decided by torch's own partition: `Strategy` then lets the simulator repair it.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath

import torch

from dyngran.compiler.options import Outputs
from dyngran.compiler.plans.planfile import GraphPlan, Origin, PlanDocument
from dyngran.compiler.plans.unplanned import unplanned_saved
from dyngran.passes.correspondence import Correspondence, correspondence
from dyngran.passes.errors import PlanMismatch, format_bytes
from dyngran.passes.forms import crossing_values, without_forms
from dyngran.passes.isomorphism import Isomorphism, isomorphism
from dyngran.passes.plan import Action, Schedule
from dyngran.passes.problem import Problem
from dyngran.passes.simulate import Simulator

LEAST_SHARE = 0.95  # of the bytes that are saved, by the plan or without one: below it a portable plan is refused
REMEDY = (
    "Make the plan again with `dyngran-plan build`, or use options={'plan_mismatch': 'resolve'} to plan afresh where the file does not fit."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedPlan:
    """A stored plan in the numbers of the graph at hand.

    Attributes:
        stored: the plan as the file has it. saved, schedule: here.
        share: of the bytes that a step saves, by the plan or by torch's own partition, those found here.
        is_unchanged: the graphs are equal, so that the plan is taken as it is. notes: sentences for `explain`.
    """

    stored: GraphPlan
    saved: frozenset[int]
    schedule: Schedule | None
    share: float
    is_unchanged: bool
    notes: tuple[str, ...]


def apply_document(
    document: PlanDocument,
    source: str | PathLike[str],
    *,
    problem: Problem,
    mark: str,
    default: frozenset[int],
    outputs: Outputs,
    num_equal_before: int = 0,
) -> AppliedPlan:
    """Find the plan for a graph (``problem`` without what a step before carries; ``mark``: its fingerprint) in a file.

    ``default`` decides about values that a portable plan does not know; ``outputs``: the option here; ``num_equal_before``: graphs of the
    step that are equal to this one and run before it. Raises PlanMismatch naming what differs.
    """
    alike = [graph for graph in document.graphs if graph.fingerprint == mark]
    for stored in (*alike[num_equal_before:], *alike[:num_equal_before]):
        same = isomorphism(without_forms(stored.problem), without_forms(problem))
        if same is not None:
            saved_here, schedule = _mapped(stored, same, problem, source)
            checked = (_checked_again(document),) if document.torch_version != str(torch.__version__) else ()
            moved = () if same.is_identity or schedule is not None else _other_peak(stored, problem, saved_here)
            return AppliedPlan(stored=stored, saved=saved_here, schedule=schedule, share=1.0, is_unchanged=True, notes=(*checked, *moved))
    stored, found = max(((graph, _correspond(graph, problem, default)) for graph in document.graphs), key=lambda pair: pair[1].share)
    if document.origin is not Origin.PORTABLE or stored.plan.schedule is not None or found.share < LEAST_SHARE:
        raise PlanMismatch(_refusal(document, source, stored, found, mark, outputs))
    matched = set(found.values.values())
    form_of = stored.problem.form_of
    offered = {(form.value, form.format): form.stored for form in problem.forms}
    saved = {found.values[value] for value in stored.plan.saved if value in found.values}
    for form in (form_of[value] for value in stored.plan.saved if value in form_of):
        if form.value in found.values:  # a format that is not offered here: the value itself
            saved.add(offered.get((found.values[form.value], form.format), found.values[form.value]))
    saved |= {value for value in default if value not in matched}
    notes = (
        f"the plan file {fspath(source)!r} was made without the device: {found.share:.1%} of the bytes that a step saves were found here, "
        "and the simulator decided about the rest",
        *(f"differs from the plan file: {sentence}" for sentence in found.mismatches),
    )
    return AppliedPlan(stored=stored, saved=frozenset(saved), schedule=None, share=found.share, is_unchanged=False, notes=notes)


def values_on_host(document: PlanDocument, problem: Problem, mark: str) -> list[int]:
    """What the plans for a graph (``mark``: its fingerprint) keep in host memory, in the graph's numbers: so that the link has time for
    these, if for any."""
    found: dict[int, None] = {}
    for stored in document.graphs:
        forms = [form for form in stored.problem.forms if form.action is Action.OFFLOAD and form.stored in stored.plan.saved]
        same = isomorphism(without_forms(stored.problem), without_forms(problem)) if forms and stored.fingerprint == mark else None
        if same is not None:
            found.update((same.values[form.value], None) for form in sorted(forms, key=lambda form: form.store))
    return list(found)


def _mapped(stored: GraphPlan, found: Isomorphism, problem: Problem, source: str | PathLike[str]) -> tuple[frozenset[int], Schedule | None]:
    """What a plan saves, and its schedule, in the numbers of an equal graph. Raises PlanMismatch for a form that is not offered here."""
    plan, form_of = stored.plan, stored.problem.form_of
    here = {(form.value, form.format): form.stored for form in problem.forms}
    saved = frozenset(
        here.get((found.values[form_of[value].value], form_of[value].format), -1) if value in form_of else found.values[value]
        for value in plan.saved
    )
    if -1 in saved:
        formats = sorted({form_of[value].format for value in plan.saved if value in form_of})
        on_host = {form.action for form in problem.forms} | {form_of[value].action for value in plan.saved if value in form_of}
        needs_offload = Action.OFFLOAD in on_host and not any(form.action is Action.OFFLOAD for form in problem.forms)
        hint = "What it keeps in host memory needs the option offload, and a card. " if needs_offload else ""
        raise PlanMismatch(
            f"plan file {fspath(source)!r} stores values as {', '.join(formats)}, and not all of them can be stored so here. {hint}{REMEDY}"
        )
    if plan.schedule is None:
        return saved, None
    forward, backward = (tuple(found.ops[op] for op in part) for part in (plan.schedule.forward, plan.schedule.backward))
    return saved, Schedule(forward, backward, frozenset(found.values[value] for value in plan.schedule.saved))


def _other_peak(stored: GraphPlan, problem: Problem, saved: frozenset[int]) -> tuple[str, ...]:
    """Why a plan of an equal graph peaks elsewhere, if it does: independent ops run in another order here."""
    there, here = (
        Simulator(graph).evaluate(values).peak_bytes - graph.total_static_bytes
        for graph, values in ((stored.problem, stored.plan.saved), (problem, saved))
    )
    if there == here:
        return ()
    said = f"the ops stand in another order here than where the plan was made: beside what is held, it peaks at {format_bytes(here)}"
    return (f"{said} and not at {format_bytes(there)}",)


def _correspond(stored: GraphPlan, problem: Problem, default: frozenset[int]) -> Correspondence:
    """By what the plan saves and what torch's own partition would: other values that are made again need no memory, or little."""
    saved = crossing_values(stored.problem, stored.plan.saved)
    there, here = without_forms(stored.problem), without_forms(problem)
    return correspondence(there, here, matter_there=saved | unplanned_saved(there, Simulator(there)), matter_here=default)


def _checked_again(document: PlanDocument) -> str:
    return f"the plan was made with torch {document.torch_version}, and checked here by the simulator"


def _refusal(
    document: PlanDocument, source: str | PathLike[str], stored: GraphPlan, found: Correspondence, mark: str, outputs: Outputs
) -> str:
    marks = f"fingerprint {stored.fingerprint[:12]}, this one is {mark[:12]}"
    head = f"plan file {fspath(source)!r} was made for another graph, on {document.device} ({marks})"
    if document.torch_version != str(torch.__version__):
        head += f", with torch {document.torch_version} (here: {torch.__version__})"
    if document.origin is Origin.PORTABLE and found.share >= LEAST_SHARE:
        head += ", and it prescribes the order of ops, which only an equal graph can follow"
    elif document.origin is Origin.PORTABLE:
        head += f"; {found.share:.1%} of the bytes that a step saves are in both, and at least {LEAST_SHARE:.0%} are needed"
    what = "; ".join(found.mismatches) or "how the ops are connected"
    if document.settings.outputs is not outputs:
        what += f"; it was made with outputs={document.settings.outputs.value!r}, and the option here is {outputs.value!r}: make them equal"
    return f"{head}. What differs: {what}. {REMEDY}"
