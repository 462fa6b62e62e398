"""The Pareto archive: every plan that was ever simulated for a problem, kept if no other is both smaller and faster.

Answering a budget with the fastest entry that fits makes the answer monotone by construction: a smaller budget picks from a subset.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dyngran.passes.simulate import Outcome, Simulator


@dataclass(frozen=True, slots=True)
class Entry:
    """One archived plan and the solver that proposed it first."""

    outcome: Outcome
    solver: str


class Archive:
    """Entries sorted by peak (bytes); along them time (us) strictly falls."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._peaks: list[int] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> bool:
        """Keep the entry if it is on the frontier; True if it was kept. An equal one that is there already stays."""
        outcome = entry.outcome
        at = bisect_right(self._peaks, outcome.peak_bytes)
        if at and self._entries[at - 1].outcome.time_us <= outcome.time_us:
            return False
        start = at - 1 if at and self._peaks[at - 1] == outcome.peak_bytes else at
        end = at
        while end < len(self._entries) and self._entries[end].outcome.time_us >= outcome.time_us:
            end += 1
        self._entries[start:end] = [entry]
        self._peaks[start:end] = [outcome.peak_bytes]
        return True

    def best(self, budget_bytes: int | None) -> Entry | None:
        """The fastest entry whose peak is at most the budget; None if there is none."""
        at = len(self._peaks) if budget_bytes is None else bisect_right(self._peaks, budget_bytes)
        return self._entries[at - 1] if at else None

    def least(self) -> Entry | None:
        """The entry with the least peak."""
        return self._entries[0] if self._entries else None

    def frontier(self) -> tuple[Entry, ...]:
        return tuple(self._entries)


class Judge:
    """Simulates saved sets, each once, and archives them together and by solver. Its count of simulations is the unit of work."""

    def __init__(self, simulator: Simulator, *, on_simulation: Callable[[], None] = lambda: None) -> None:
        self._on_simulation = on_simulation
        self.simulator = simulator
        self.archive = Archive()
        self.by_solver: dict[str, Archive] = {}
        self.num_evaluations = 0
        self._known: dict[frozenset[int], Outcome] = {}

    def __call__(self, saved: Iterable[int], solver: str) -> Outcome:
        crossing = self.simulator.normalize(saved)
        outcome = self._known.get(crossing)
        if outcome is None:
            outcome = self.simulator.evaluate_normalized(crossing)
            self._known[crossing] = outcome
            self.num_evaluations += 1
            self._on_simulation()
            self.archive.add(Entry(outcome, solver))
        self.by_solver.setdefault(solver, Archive()).add(Entry(outcome, solver))
        return outcome
