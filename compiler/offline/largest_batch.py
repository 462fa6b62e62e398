"""The largest batch whose step fits a budget: peaks are nearly linear in the batch, so each trace says where to look next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dyngran.compiler.plans.planfile import PlanDocument
from dyngran.compiler.plans.unplanned import Unplanned, unplanned_step

MAX_BATCH = 2**24
FIRST_BATCHES = (2, 4)  # not 1: sizes of 1 are traced as constants, and batch norm refuses them
MAX_GROWTH = 64  # times: from one trace to the next, where no batch is known to be too large


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPoint:
    """One batch: the step without a plan, and the least peak that a plan reaches, bytes with static ones."""

    batch: int
    unplanned: Unplanned
    least_peak_bytes: int


class BatchSearch:
    """Looks for largest batches; every batch is traced once, whichever question it answers.

    Args:
        plan: the document of a batch, without a budget.
    """

    def __init__(self, plan: Callable[[int], PlanDocument]) -> None:
        self._plan = plan
        self._points: dict[int, BatchPoint] = {}

    @property
    def points(self) -> tuple[BatchPoint, ...]:
        """Every batch that was looked at, smallest first."""
        return tuple(self._points[batch] for batch in sorted(self._points))

    def look(self, batch: int) -> BatchPoint:
        """Trace a batch, unless that was done."""
        if batch not in self._points:
            document = self._plan(batch)
            least = max(graph.frontier[0][0] if graph.frontier else graph.plan.peak_bytes for graph in document.graphs)
            self._points[batch] = BatchPoint(batch=batch, unplanned=unplanned_step(document), least_peak_bytes=least)
        return self._points[batch]

    def largest(self, peak_bytes: Callable[[BatchPoint], int], budget_bytes: int) -> int:
        """The largest batch whose ``peak_bytes``, which grows with it, is within the budget; 0 if not even one example is.

        By turns where a straight line meets the budget, and half way where that has not halved what is left.
        """
        good, bad, is_middle_next = *self._known(peak_bytes, budget_bytes), False
        while bad - good > 1:
            width = bad - good
            batch = (good + bad) // 2 if is_middle_next else self._guess(good, bad, peak_bytes, budget_bytes)
            if peak_bytes(self.look(batch)) <= budget_bytes:
                good = batch
            else:
                bad = batch
            is_middle_next = good > 0 and bad <= MAX_BATCH and 2 * (bad - good) > width
        return good

    def _known(self, peak_bytes: Callable[[BatchPoint], int], budget_bytes: int) -> tuple[int, int]:
        """The largest batch that is known to fit and the smallest that is not, 0 and more than any where there is none."""
        for batch in FIRST_BATCHES:
            if peak_bytes(self.look(batch)) > budget_bytes:
                break
        bad = min((one.batch for one in self.points if peak_bytes(one) > budget_bytes), default=MAX_BATCH + 1)
        return max((one.batch for one in self.points if one.batch < bad), default=0), bad

    def _guess(self, good: int, bad: int, peak_bytes: Callable[[BatchPoint], int], budget_bytes: int) -> int:
        """Between the two, where the line through them meets the budget; without a ``bad`` one, that through the largest good ones."""
        if good == 0:
            return bad // 2
        if bad <= MAX_BATCH:
            low, high = self._points[good], self._points[bad]
        else:
            low, high = (self._points[batch] for batch in sorted(batch for batch in self._points if batch <= good)[-2:])
        slope = (peak_bytes(high) - peak_bytes(low)) / (high.batch - low.batch)
        met = low.batch + int((budget_bytes - peak_bytes(low)) / slope) if slope > 0 else MAX_BATCH
        return max(good + 1, min(bad - 1, met, MAX_GROWTH * good))
