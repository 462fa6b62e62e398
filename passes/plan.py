"""The plan: an action and a reason for every value, with the peak and the time it is predicted to have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """What happens to a value between forward and backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    SLICE = "slice"
    PACK = "pack"
    NARROW = "narrow"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One value's action. What is neither kept nor recomputed has a ``format``, ``stored_bytes`` (instead of ``size_bytes``) and an
    ``error``: by how much what is read in backward may differ, "" if it does not. ``dimension`` and ``fraction`` belong to SLICE.
    """

    value: int
    name: str
    action: Action
    reason: str
    size_bytes: int
    recompute_us: float = 0.0
    label: str = ""
    dimension: int | None = None
    fraction: float | None = None
    format: str | None = None
    stored_bytes: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Op indices in the order in which forward and backward run them. An op may stand in both and more than once: each time its results
    are made anew, and a reader takes the newest.

    ``saved`` are values whose copy from forward backward reads even where an op that ran again for a sibling made a newer one; a copy
    that backward makes of them dies at once. Empty: the newest is read everywhere.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    saved: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A complete answer to one problem and one budget.

    Attributes:
        budget_bytes: peak that was asked for; None if there was no limit.
        saved: values that cross from forward to backward, stored forms (`Problem.forms`) among them. Every other value that backward needs
            is recomputed.
        peak_bytes: predicted peak of the step, static bytes included.
        time_us: predicted device time of forward and backward; overhead_us: of which beyond the fastest known plan.
        solver: who found it; truncated: True if a safety stop cut the search short.
        bound_us: no plan for this problem that keeps the budget is faster (us, as ``time_us``: device time of forward and backward); 0.0 if
            nothing was proven. bound: how it was proven, "exact" or "relaxation: ..." with the relaxation's name; "" if it was not.
        schedule: the order of every op where the plan prescribes it (values may then be made more than twice); None: the joint graph's
            order, each recomputed value made once, just before its first reader in backward.
    """

    budget_bytes: int | None
    saved: frozenset[int]
    decisions: tuple[Decision, ...]
    peak_bytes: int
    static_bytes: int
    saved_bytes: int
    time_us: float
    overhead_us: float
    recompute_us: float
    num_recomputed: int
    solver: str
    order: str = "joint graph, recompute before first reader"
    truncated: bool = False
    schedule: Schedule | None = None
    bound_us: float = 0.0
    bound: str = ""

    @property
    def gap(self) -> float:
        """Share of ``time_us`` that a faster plan could save at most: 0.0 where the plan is proven to be the fastest, or takes no time."""
        return (self.time_us - self.bound_us) / self.time_us if self.time_us else 0.0

    @property
    def transient_bytes(self) -> int:
        return self.peak_bytes - self.static_bytes
