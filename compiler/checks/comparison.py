"""A committed plan against a fresh one of the same program: what grew, by how much, whether that is allowed, and what brought it.

Budget, peak, cost and structure are compared, never which plan a solver chose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from dyngran.compiler.checks.culprits import Culprit, Topic, culprits_of
from dyngran.compiler.checks.limits import Limit, Limits, Unit
from dyngran.compiler.checks.step_pair import Planned, StepPair
from dyngran.compiler.plans.planfile import PlanDocument
from dyngran.passes.errors import BudgetTooSmall, PlanMismatch
from dyngran.passes.problem import Kind

LEAST_PEAK_ROOM = 0.03  # a copy of 0.5 % of the bytes, added to three blocks, moved what the search found by 2 % in either direction
EQUAL = 1e-6  # of an amount: sums of the same floats in another order


class Verdict(Enum):
    BETTER = "better"
    SAME = "same"
    WITHIN = "ok"  # more than was committed, and allowed
    WORSE = "WORSE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number of the step. ``limit`` is the most that passes, None for what is only told; ``rule`` is how it is written."""

    key: str
    name: str
    topic: Topic
    unit: Unit
    committed: float
    now: float
    limit: float | None = None
    rule: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.limit is not None and self.now > self.limit * (1 + EQUAL):
            return Verdict.WORSE
        if abs(self.now - self.committed) <= EQUAL * abs(self.committed):
            return Verdict.SAME
        return Verdict.BETTER if self.now < self.committed else Verdict.WITHIN

    def shown(self, amount: float) -> str:
        return self.unit.show(amount)

    @property
    def change(self) -> str:
        """``+4.1%``; of a count the difference."""
        difference = self.now - self.committed
        if abs(difference) <= EQUAL * abs(self.committed):
            return "same"
        if self.unit is Unit.COUNT or not self.committed:
            return ("+" if difference > 0 else "") + self.shown(difference)
        percent = f"{100 * difference / self.committed:+.3g}"
        return (percent if "e" not in percent else f"{100 * difference / self.committed:+.0f}") + "%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """``differences`` are sentences on how the graphs differ, ``notes`` on what makes the comparison less than exact."""

    metrics: tuple[Metric, ...]
    culprits: tuple[Culprit, ...] = ()
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def worse(self) -> tuple[Metric, ...]:
        return tuple(metric for metric in self.metrics if metric.verdict is Verdict.WORSE)

    @property
    def is_regression(self) -> bool:
        return bool(self.worse)

    @property
    def is_same(self) -> bool:
        return all(metric.verdict is Verdict.SAME for metric in self.metrics)

    def is_blamed(self, culprit: Culprit) -> bool:
        """True if something of the culprit's topic is worse than allowed."""
        return any(metric.topic is culprit.topic for metric in self.worse) and culprit.change > 0


def compare(committed: PlanDocument, fresh: PlanDocument, limits: Limits, *, refusal: BudgetTooSmall | None = None) -> Comparison:
    """What changed between two plans.

    Args:
        fresh: made with the settings of ``committed``; without its budget if that was refused.
        refusal: the error that says so.

    Raises:
        PlanMismatch: the two cannot be compared: another code generator or device, or another torch that traces other graphs.
    """
    pair = StepPair(committed, fresh)
    notes = _check_comparable(pair)
    metrics = _metrics(pair, limits, refusal)
    culprits = culprits_of(pair, refusal)
    differences = () if pair.is_equal else pair.pairing.mismatches
    return Comparison(metrics=metrics, culprits=culprits, differences=differences, notes=notes)


def _check_comparable(pair: StepPair) -> tuple[str, ...]:
    committed, fresh = pair.committed.document, pair.fresh.document
    for name, word in (("codegen", "code generator"), ("device", "device")):
        mine, yours = getattr(committed, name), getattr(fresh, name)
        if mine != yours:
            raise PlanMismatch(
                f"the committed plan was made for {word} {mine!r}, and the fresh one for {yours!r}: their numbers cannot be compared. "
                f"Compare on the same {word}, or make the plan again with `dyngran-plan build`."
            )
    notes = []
    if _release(committed.torch_version) != _release(fresh.torch_version):
        versions = f"torch {committed.torch_version}, and this is torch {fresh.torch_version}"
        if not pair.is_equal:
            raise PlanMismatch(
                f"the committed plan was made with {versions}, which traces another graph: what changed is torch or the model. "
                "Compare with the same release of torch, or make the plan again with `dyngran-plan build`."
            )
        notes.append(f"the committed plan was made with {versions}; the graphs are equal")
    if committed.origin is not fresh.origin and not pair.is_equal:
        origins = f"the committed graph is {committed.origin.value}, the fresh one {fresh.origin.value}"
        notes.append(f"{origins}: a part of what differs may be that")
    if len(committed.graphs) != len(fresh.graphs):
        graphs = f"graphs of the step: {len(committed.graphs)} committed, {len(fresh.graphs)} now"
        notes.append(f"{graphs}; what runs between graphs is in no number")
    return tuple(notes)


def _release(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def _metrics(pair: StepPair, limits: Limits, refusal: BudgetTooSmall | None) -> tuple[Metric, ...]:
    mine, yours = pair.committed, pair.fresh
    before = Planned(mine.document.peak_bytes, mine.document.time_us)
    peak = _number("planned_peak", "planned peak", Topic.PEAK, before.peak_bytes, 0, limits.peak)
    step = _number("planned_time", "planned time", Topic.TIME, mine.planned().time_us, 0, limits.step)
    budget_bytes = mine.document.plan.budget_bytes
    if budget_bytes is not None and limits.peak.absolute is None and budget_bytes > (peak.limit or 0):
        peak = replace(peak, limit=budget_bytes, rule="budget")  # a planner may use what it is given
    breaks = limits.graph_breaks if limits.graph_breaks is not None else mine.num_breaks
    metrics = []
    if refusal is None:
        after = _best(pair, peak, step)
        metrics += [replace(peak, now=after.peak_bytes), replace(step, now=after.time_us)]
    else:
        metrics.append(replace(peak, now=refusal.least_peak_bytes, limit=refusal.budget_bytes, rule="budget"))
    metrics += [
        _number("unplanned_peak", "unplanned peak", Topic.PEAK, max(mine.free_peaks), max(yours.free_peaks), limits.peak),
        _number("unplanned_time", "unplanned time", Topic.TIME, mine.free_time_us, yours.free_time_us, limits.step),
        _number("unplanned_saved", "unplanned saved", Topic.SAVED, mine.free_saved_bytes, yours.free_saved_bytes, limits.saved),
    ]
    if (least := _least_peaks(pair)) is not None and refusal is None:
        metrics.append(_with_room(_number("least_peak", "least peak", Topic.PEAK, *least, limits.peak)))
    metrics = [_beside_unread(pair, metric) for metric in metrics]
    told = _number("static", "static", Topic.PEAK, mine.static_bytes, yours.static_bytes, None)
    count = Metric(
        key="graph_breaks",
        name="graph breaks",
        topic=Topic.BREAKS,
        unit=Unit.COUNT,
        committed=mine.num_breaks,
        now=yours.num_breaks,
        limit=breaks,
        rule=str(breaks),
    )
    return (*metrics, told, count)


def _beside_unread(pair: StepPair, metric: Metric) -> Metric:
    """A peak may grow by what the model holds and no graph reads, such as a parameter that is not used yet: the row "static" shows it."""
    more_bytes = pair.fresh.held.get(Kind.OTHER, 0) - pair.committed.held.get(Kind.OTHER, 0)
    if metric.topic is not Topic.PEAK or metric.limit is None or metric.rule == "budget" or more_bytes <= 0:
        return metric
    return replace(metric, limit=metric.limit + more_bytes)


def _least_peaks(pair: StepPair) -> tuple[int, int] | None:
    """Of both steps; None where only one of them was searched, or a graph's least peak depends on the plan of another.

    An equal graph can do what was found for the committed one, and what more a search finds is no property of the model.
    """
    mine, yours = pair.committed, pair.fresh
    if max(len(mine.problems), len(yours.problems)) > 1:
        return None
    if mine.least_peak_bytes is None or yours.least_peak_bytes is None:
        return None
    if pair.is_equal:
        return mine.least_peak_bytes, mine.least_peak_bytes
    return (mine.least_peak_bytes, yours.least_peak_bytes) if mine.is_explored is yours.is_explored else None


def _with_room(least: Metric) -> Metric:
    """Searches find least peaks of two like graphs that differ by as much."""
    limit = (1 + LEAST_PEAK_ROOM) * least.committed
    if least.limit is None or not least.rule.startswith("+") or limit <= least.limit:
        return least
    return replace(least, limit=limit, rule=f"+{LEAST_PEAK_ROOM:.0%}")


def _best(pair: StepPair, peak: Metric, step: Metric) -> Planned:
    """The fresh plan or the committed one on the fresh graph: which of them keeps the limits; of an equal graph first the committed one."""
    own, kept = pair.fresh.planned(), pair.carried_over()
    if kept is None:
        return own
    first, other = (kept, own) if pair.is_equal else (own, kept)

    def passes(one: Planned) -> bool:
        metrics = replace(peak, now=one.peak_bytes), replace(step, now=one.time_us)
        return all(metric.verdict is not Verdict.WORSE for metric in metrics)

    return other if passes(other) and not passes(first) else first


def _number(key: str, name: str, topic: Topic, committed: float, now: float, limit: Limit | None) -> Metric:
    return Metric(
        key=key,
        name=name,
        topic=topic,
        unit=Unit.TIME if topic is Topic.TIME else Unit.BYTES,
        committed=committed,
        now=now,
        limit=None if limit is None else limit.allowed(committed),
        rule="" if limit is None else limit.text,
    )
