"""A plan file and the graph at hand: which stored plan is for it, and what it says here.

A fingerprint is a hash and no mapping, so values are mapped by a checked isomorphism. Of a portable plan, whose graph was traced without
the device, regions that differ are aligned and the rest is decided by torch's own partition: `Strategy` then lets the simulator repair it.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath

import torch

from dyngran.compiler.options import Outputs
from dyngran.compiler.planfile import GraphPlan, Origin, PlanDocument
from dyngran.passes.correspondence import Correspondence, correspondence
from dyngran.passes.errors import PlanMismatch
from dyngran.passes.isomorphism import isomorphism
from dyngran.passes.plan import Schedule
from dyngran.passes.problem import Problem
from dyngran.passes.simulate import Simulator

LEAST_SHARE = 0.95  # of the bytes that a plan decides about: below it a portable plan is refused
REMEDY = (
    "Make the plan again with `dyngran-plan build`, or use options={'plan_mismatch': 'resolve'} to plan afresh where the file does not fit."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedPlan:
    """A stored plan in the numbers of the graph at hand.

    Attributes:
        stored: the plan as the file has it. saved, schedule: here.
        share: of the bytes that the plan decides about, those found here. is_unchanged: the graphs are equal, so that the plan is taken
            as it is. notes: sentences for `explain`.
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
    simulator: Simulator,
    default: frozenset[int],
    outputs: Outputs,
) -> AppliedPlan:
    """Find the plan for a graph (``problem`` without what a step before carries; ``mark``: its fingerprint) in a file.

    ``default`` decides about values that a portable plan does not know; ``outputs``: the option here. Raises PlanMismatch naming what
    differs.
    """
    for stored in document.graphs:
        applied = _unchanged(stored, problem) if stored.fingerprint == mark else None
        if applied is not None:
            notes = (_checked_again(document),) if document.torch_version != str(torch.__version__) else ()
            return AppliedPlan(stored=stored, saved=applied[0], schedule=applied[1], share=1.0, is_unchanged=True, notes=notes)
    stored, found = max(((graph, _correspond(graph, problem, simulator)) for graph in document.graphs), key=lambda pair: pair[1].share)
    if document.origin is not Origin.PORTABLE or stored.plan.schedule is not None or found.share < LEAST_SHARE:
        raise PlanMismatch(_refusal(document, source, stored, found, mark, outputs))
    matched = set(found.values.values())
    saved = {found.values[value] for value in stored.plan.saved if value in found.values}
    saved |= {value for value in default if value not in matched}
    notes = (
        f"the plan file {fspath(source)!r} was made without the device: {found.share:.1%} of the bytes it decides about were found here, "
        "and the simulator decided about the rest",
        *(f"differs from the plan file: {sentence}" for sentence in found.mismatches),
    )
    return AppliedPlan(stored=stored, saved=frozenset(saved), schedule=None, share=found.share, is_unchanged=False, notes=notes)


def _unchanged(stored: GraphPlan, problem: Problem) -> tuple[frozenset[int], Schedule | None] | None:
    """The stored plan in the numbers of an equal graph; None if the graphs are not equal although their fingerprints are."""
    found = isomorphism(stored.problem, problem)
    if found is None:
        return None
    saved = frozenset(found.values[value] for value in stored.plan.saved)
    schedule = stored.plan.schedule
    if schedule is None:
        return saved, None
    forward, backward = (tuple(found.ops[op] for op in part) for part in (schedule.forward, schedule.backward))
    return saved, Schedule(forward, backward, frozenset(found.values[value] for value in schedule.saved))


def _correspond(stored: GraphPlan, problem: Problem, simulator: Simulator) -> Correspondence:
    decided = [decision.value for decision in stored.plan.decisions]
    candidates = [value for value in simulator.candidates if value < len(problem.values)]
    return correspondence(stored.problem, problem, matter_there=decided, matter_here=candidates)


def _checked_again(document: PlanDocument) -> str:
    return f"the plan was made with torch {document.torch_version}, and checked here by the simulator"


def _refusal(
    document: PlanDocument, source: str | PathLike[str], stored: GraphPlan, found: Correspondence, mark: str, outputs: Outputs
) -> str:
    head = f"plan file {fspath(source)!r} was made for another graph (fingerprint {stored.fingerprint[:12]}, this one is {mark[:12]})"
    if document.torch_version != str(torch.__version__):
        head += f", with torch {document.torch_version} (here: {torch.__version__})"
    if document.origin is Origin.PORTABLE:
        head += f"; {found.share:.1%} of the bytes that it decides about are in this one, and at least {LEAST_SHARE:.0%} are needed"
    what = "; ".join(found.mismatches) or "how the ops are connected"
    if document.settings.outputs is not outputs:
        what += f"; it was made with outputs={document.settings.outputs.value!r}, and the option here is {outputs.value!r}"
    return f"{head}. What differs: {what}. {REMEDY}"
