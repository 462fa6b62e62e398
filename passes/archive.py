"""The Pareto archive: every plan that was ever simulated for a problem, kept if no other is both smaller and faster.

Answering a budget with the fastest entry that fits makes the answer monotone by construction: a smaller budget picks from a subset.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dyngran.passes.native.graph import NativeOutcome
from dyngran.passes.plan import Plan, Schedule
from dyngran.passes.schedule import replay_schedule, timeline_of, with_sources
from dyngran.passes.simulate import Outcome, Simulator, Timeline

Proposal = frozenset[int] | bytes | Schedule  # what a solver proposes: values to save, as a set or a mask, or the order of every op
Accepts = Callable[[Schedule], Schedule | None]  # a schedule as it can run, mended if need be; None if it cannot
TIE_US = 1e-5  # times that differ by less are equal: sums of the same costs in another order


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

    def accepts(self, peak_bytes: int, time_us: float) -> bool:
        """Whether a plan of that peak and time would be on the frontier. An equal one that is there already stays."""
        at = bisect_right(self._peaks, peak_bytes)
        return not at or self._entries[at - 1].outcome.time_us > time_us + TIE_US

    def add(self, entry: Entry) -> bool:
        """Keep the entry if it is on the frontier; True if it was kept."""
        outcome = entry.outcome
        if not self.accepts(outcome.peak_bytes, outcome.time_us):
            return False
        at = bisect_right(self._peaks, outcome.peak_bytes)
        start = at - 1 if at and self._peaks[at - 1] == outcome.peak_bytes else at
        end = at
        while end < len(self._entries) and self._entries[end].outcome.time_us >= outcome.time_us - TIE_US:
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
    """Simulates proposals, and archives them together and by solver; schedules that ``accepts`` refuses are dropped."""

    def __init__(
        self,
        simulator: Simulator,
        *,
        on_simulation: Callable[[], None] = lambda: None,
        accepts: Accepts = lambda schedule: schedule,
    ) -> None:
        self._on_simulation = on_simulation
        self._accepts = accepts
        self.simulator = simulator
        self.archive = Archive()
        self.by_solver: dict[str, Archive] = {}
        self.num_evaluations = 0
        self._known: dict[bytes, Outcome] = {}
        self._drawn: tuple[Plan | Outcome, Timeline] | None = None

    def __call__(self, saved: Iterable[int], solver: str) -> Outcome:
        native = self.simulator.native
        return self.judge_mask(native.mask(saved), solver)

    def judge_mask(self, wished: bytes, solver: str) -> Outcome:
        """As a call, for a mask of values (see `NativeSearch`)."""
        native = self.simulator.native
        crossing = native.normalize(wished)
        outcome = self._known.get(crossing)
        if outcome is None:
            outcome = self.simulator.outcome_of(*native.evaluate(crossing))
            self._known[crossing] = outcome
            self._count(1)
        self._keep(outcome, solver)
        return outcome

    def judge_schedule(self, proposed: Schedule, solver: str) -> Outcome | None:
        """Simulate and archive a prescribed order of ops, as it was accepted; None if it was not."""
        self._count(1)
        schedule = self._accepts(with_sources(self.simulator.bare.problem, proposed))
        if schedule is None:
            return None
        found = replay_schedule(self.simulator.bare.problem, schedule)
        outcome = Outcome(
            saved=found.saved,
            peak_bytes=found.peak_bytes,
            time_us=round(found.time_us, 6),
            recompute_us=found.recompute_us,
            saved_bytes=found.saved_bytes,
            num_recomputed=found.num_recomputed,
            schedule=schedule,
        )
        self._keep(outcome, solver)
        return outcome

    def timeline(self, outcome: Plan | Outcome) -> Timeline:
        """The curve of what a plan runs; that of the last one is kept, since refusals ask for the same one again."""
        if self._drawn is None or self._drawn[0] is not outcome:
            self._drawn = outcome, timeline_of(self.simulator, outcome)
        return self._drawn[1]

    def judge_any(self, proposal: Proposal, solver: str) -> None:
        """Simulate what a solver proposes, and archive it if it is on a frontier."""
        if isinstance(proposal, Schedule):
            self.judge_schedule(proposal, solver)
            return
        native = self.simulator.native
        crossing, found = native.evaluate(proposal if isinstance(proposal, bytes) else native.mask(proposal))
        self._count(1)
        self._offer(crossing, found, solver)

    def take(self, plans: Iterable[tuple[bytes, NativeOutcome]], num_evaluations: int, solver: str) -> None:
        """Archive what a native walk of ``num_evaluations`` plans has found."""
        self._count(num_evaluations)
        for crossing, found in plans:
            self._offer(crossing, found, solver)

    def _offer(self, crossing: bytes, found: NativeOutcome, solver: str) -> None:
        """Archive an evaluated mask; one that is on no frontier costs nothing more."""
        peak_bytes, time_us = self.simulator.problem.total_static_bytes + found.peak_bytes, round(found.time_us, 6)
        own = self.by_solver.setdefault(solver, Archive())
        if own.accepts(peak_bytes, time_us) or self.archive.accepts(peak_bytes, time_us):
            self._keep(self.simulator.outcome_of(crossing, found), solver)

    def _keep(self, outcome: Outcome, solver: str) -> None:
        entry = Entry(outcome, solver)
        self.archive.add(entry)
        self.by_solver.setdefault(solver, Archive()).add(entry)

    def _count(self, num_evaluations: int) -> None:
        self.num_evaluations += num_evaluations
        self._on_simulation()
