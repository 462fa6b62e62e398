"""Every error that dyngran raises on purpose: one sentence that says what, how much and what to do."""

from __future__ import annotations

import math


class DyngranError(Exception):
    """Base class of dyngran's own errors."""


class InvalidOption(DyngranError, ValueError):
    """An option or its value is not one that dyngran knows."""


class InvalidBudget(InvalidOption):
    """The budget cannot be read as an amount of memory."""


class UnknownSize(DyngranError):
    """A value of the graph has no size that could be counted."""


class GraphBroken(DyngranError):
    """A pass left a graph that does not compute what it must: a fault of dyngran, not of the user."""


class ToolMissing(DyngranError):
    """The code generator needs something that this machine does not have."""


class PlanMismatch(DyngranError):
    """A plan was made for another graph than the one it is applied to."""


class TargetError(DyngranError):
    """What `dyngran-plan` was told to trace cannot be loaded, called or traced."""


class NothingCompiled(DyngranError):
    """No graph of this model has been compiled by dyngran yet."""


class PlanFileError(DyngranError, ValueError):
    """A plan file cannot be read: not JSON, another schema, or a field that is missing or wrong."""


def format_bytes(num_bytes: float) -> str:
    """A byte count for people: binary units, three significant digits (``1.25 GiB``)."""
    sign, amount = ("-" if num_bytes < 0 else ""), abs(float(num_bytes))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{sign}{amount:.0f} B" if unit == "B" else f"{sign}{amount:.4g} {unit}"
        amount /= 1024
    return f"{sign}{amount:.4g} TiB"


def format_bytes_up(num_bytes: int) -> str:
    """As `format_bytes`, rounded up: an amount that is copied from a message is enough."""
    unit = 1024 ** min(4, max(0, (max(num_bytes, 1).bit_length() - 1) // 10))
    step = unit / 10 ** (4 - len(str(num_bytes // unit)))
    rounded = format_bytes(math.ceil(num_bytes / step) * step)
    return rounded if unit > 1 else format_bytes(num_bytes)


def format_us(time_us: float) -> str:
    """A duration for people: three significant digits in us or ms, four in s (``12.5 ms``)."""
    amount = abs(time_us)
    if amount < 999.5:
        return f"{time_us:.3g} us"
    if amount < 999.5e3:
        return f"{time_us / 1e3:.3g} ms"
    return f"{time_us / 1e6:.4g} s"


class BudgetTooSmall(DyngranError):
    """No plan that dyngran knows keeps the peak of one step within the budget.

    Attributes:
        budget_bytes: the budget that was asked for.
        least_peak_bytes: the least peak that a known plan reaches; training at this budget works.
        pinned: ``(name, bytes)`` of the largest values that are live at that peak, largest first.
        of_file: the plan file that was asked for, if it is the peak of its plan and not of any.
    """

    def __init__(
        self, *, budget_bytes: int, least_peak_bytes: int, pinned: tuple[tuple[str, int], ...], hint: str = "", of_file: str = ""
    ) -> None:
        self.budget_bytes = budget_bytes
        self.least_peak_bytes = least_peak_bytes
        self.pinned = pinned
        self.hint = hint
        self.of_file = of_file
        what = f"what the plan of {of_file} needs here," if of_file else "the least reachable peak"
        largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in pinned[:5]) or "nothing that is planned"
        advice = hint or "Raise the budget to the least peak or lower the batch size."
        super().__init__(
            f"budget {format_bytes(budget_bytes)} ({budget_bytes} bytes) is below {what} "
            f"{format_bytes_up(least_peak_bytes)} ({least_peak_bytes} bytes). At that peak these cannot be freed: {largest}. {advice}"
        )

    def __reduce__(self) -> tuple[object, tuple[int, int, tuple[tuple[str, int], ...], str, str]]:
        return (_budget_too_small, (self.budget_bytes, self.least_peak_bytes, self.pinned, self.hint, self.of_file))


def _budget_too_small(
    budget_bytes: int, least_peak_bytes: int, pinned: tuple[tuple[str, int], ...], hint: str, of_file: str
) -> BudgetTooSmall:
    return BudgetTooSmall(budget_bytes=budget_bytes, least_peak_bytes=least_peak_bytes, pinned=pinned, hint=hint, of_file=of_file)
