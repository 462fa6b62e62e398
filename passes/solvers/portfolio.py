"""The portfolio: several solvers propose saved sets, the simulator judges them, the archive answers every budget.

The search does not look at the budget: it fills the whole frontier once. So the answer to a budget does not depend on which budgets
were asked before, a smaller budget never gives a larger peak or a faster step, and a new budget costs one look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from time import monotonic

from dyngran.passes.archive import Archive, Judge
from dyngran.passes.decide import decide
from dyngran.passes.errors import BudgetTooSmall, InvalidOption, format_bytes
from dyngran.passes.plan import Plan
from dyngran.passes.problem import Kind, Problem
from dyngran.passes.simulate import Outcome, Simulator
from dyngran.passes.solvers import default, ilp, mutwo, region, selective, stock
from dyngran.passes.solvers.improve import Improver, work_limit

SOLVERS: tuple[str, ...] = ("auto", "default", "stock", "region", "selective", "mutwo", "ilp")

MAX_MUTWO_PLANS = 40  # of the greedy's way, as seeds; solver="mutwo" tries more
ILP_SHARES = (0.6, 0.3)  # of the default plan's transient: budgets of the programs that seed the search
MAX_ILP_CANDIDATES = 250  # above it three programs took 2 to 23 s and moved the frontier by less than other moves did
ILP_LIMITS = ilp.Limits(gap=0.01, max_nodes=20, max_seconds=10.0)


class Planner:
    """Plans one problem for any number of budgets.

    Args:
        problem: what is planned.
        progress: called with a short line whenever a stage of the search starts, and about every second while it lasts.
    """

    def __init__(self, problem: Problem, *, progress: Callable[[str], None] | None = None) -> None:
        self.problem = problem
        self.simulator = Simulator(problem)
        self.judge = Judge(self.simulator, on_simulation=self._tick)
        self.truncated = False
        self._progress = progress or (lambda line: None)
        self._done: set[str] = set()
        self._stage, self._said_at = "", 0.0

    def solve(self, budget_bytes: int | None, *, solver: str = "auto") -> Plan:
        """The fastest known plan whose peak, static bytes included, is at most the budget (None: no limit).

        Raises:
            BudgetTooSmall: no known plan fits; it says the least peak and what is live there.
            InvalidOption: no such solver.
        """
        if solver not in SOLVERS:
            raise InvalidOption(f"solver must be one of {', '.join(SOLVERS)}, got {solver!r}")
        self._run("default", budget_bytes)
        archive = self._search(solver, budget_bytes)
        entry = archive.best(budget_bytes)
        if entry is None:
            assert budget_bytes is not None
            raise self._too_small(budget_bytes, archive, solver)
        fastest = self.judge.archive.best(None)
        assert fastest is not None
        return decide(
            self.simulator,
            entry.outcome,
            budget_bytes=budget_bytes,
            solver=entry.solver,
            fastest_us=fastest.outcome.time_us,
            truncated=self.truncated,
        )

    def frontier(self) -> tuple[Outcome, ...]:
        """Every plan on the Pareto frontier, least peak first; runs the search if it has not run."""
        self._search("auto", 0)
        return tuple(entry.outcome for entry in self.judge.archive.frontier())

    def add(self, saved: Iterable[int], solver_name: str) -> Outcome:
        """Simulate and archive a saved set from elsewhere (a plan file, a person)."""
        return self.judge(saved, solver_name)

    def _search(self, solver: str, budget_bytes: int | None) -> Archive:
        if solver != "auto":
            self._run(solver, budget_bytes)
            return self.judge.by_solver.get(solver, Archive())
        free = self.judge.archive.best(None)
        if not self.problem.fused and (budget_bytes is None or (free is not None and free.outcome.peak_bytes <= budget_bytes)):
            return self.judge.archive  # without fusion nothing is faster than running every op once
        for name in ("default", "stock", "region", "selective"):
            self._run(name, None)
        self._once("mutwo seeds", "mutwo", mutwo.propose(self.simulator, max_plans=MAX_MUTWO_PLANS))
        if len(self.simulator.candidates) <= MAX_ILP_CANDIDATES:
            self._once("ilp seeds", "ilp", self._ilp_seeds())
        if "improve" not in self._done:
            self._done.add("improve")
            limit = work_limit(len(self.problem.ops), fused=self.problem.fused)
            self._say(f"improving {len(self.judge.archive)} plans with up to {limit} simulations")
            improver = Improver(self.judge, limit=limit)
            improver.run()
            self.truncated |= improver.truncated
        return self.judge.archive

    def _run(self, name: str, budget_bytes: int | None) -> None:
        """Let one solver propose; only the ILP looks at the budget, so only it runs again for another one."""
        if name == "ilp":
            self._once(f"ilp for {budget_bytes} bytes", name, ilp.propose(self.simulator, budget_bytes=budget_bytes, cut_off=self._cut_off))
            return
        proposers = {
            "default": default.propose,
            "stock": stock.propose,
            "region": region.propose,
            "selective": selective.propose,
            "mutwo": mutwo.propose,
        }
        self._once(name, name, proposers[name](self.simulator))

    def _once(self, stage: str, solver: str, proposed: Iterator[frozenset[int]]) -> None:
        if stage in self._done:
            return
        self._done.add(stage)
        self._say(stage)
        for saved in proposed:
            self.judge(saved, solver)

    def _say(self, stage: str) -> None:
        self._stage, self._said_at = stage, monotonic()
        self._progress(f"planning: {stage}")

    def _tick(self) -> None:
        if monotonic() - self._said_at > 1.0:
            self._said_at = monotonic()
            self._progress(f"planning: {self._stage or 'first plans'} ({self.judge.num_evaluations} plans simulated)")

    def _cut_off(self) -> None:
        self.truncated = True

    def _ilp_seeds(self) -> Iterator[frozenset[int]]:
        static = self.problem.total_static_bytes
        transient = self.simulator.evaluate(self.simulator.default_saved).peak_bytes - static
        for share in ILP_SHARES:
            budget_bytes = static + int(share * transient)
            yield from ilp.propose(self.simulator, budget_bytes=budget_bytes, limits=ILP_LIMITS, max_rounds=1, cut_off=self._cut_off)

    def _too_small(self, budget_bytes: int, archive: Archive, solver: str) -> BudgetTooSmall:
        least = archive.least() or self.judge.archive.least()
        assert least is not None
        values = self.problem.values
        pinned = [(values[v].label or values[v].name, size) for v, size in self.simulator.timeline(least.outcome.saved).live_at_peak]
        return BudgetTooSmall(
            budget_bytes=budget_bytes,
            least_peak_bytes=least.outcome.peak_bytes,
            pinned=tuple(pinned[:8]),
            hint=self.hint(budget_bytes, least.outcome, solver=solver),
        )

    def hint(self, budget_bytes: int, least: Outcome, *, solver: str = "auto") -> str:
        """What the least reachable peak consists of, and what would help."""
        timeline = self.simulator.timeline(least.saved)
        live, workspace_bytes = timeline.live_at_peak, timeline.workspace_at_peak_bytes
        anywhere = self.judge.archive.best(budget_bytes)
        if solver != "auto":
            found = " has a plan that fits." if anywhere else " may find a smaller plan."
            return f"This is the least that solver={solver!r} alone reaches: solver='auto'{found}"
        static = self.problem.total_static_bytes
        if budget_bytes <= static:
            return (
                f"Parameters, optimizer state and inputs alone take {format_bytes(static)}: raise the budget, "
                "lower the batch size, use a smaller optimizer state or freeze parameters."
            )
        kinds: dict[Kind, int] = {}
        for value, size in live:
            kind = self.problem.values[value].kind
            kinds[kind] = kinds.get(kind, 0) + size
        parts = sorted(((size, kind.value) for kind, size in kinds.items()), reverse=True)
        parts.append((workspace_bytes, "workspace"))
        shares = ", ".join(f"{name} {format_bytes(size)}" for size, name in [(static, "static"), *parts] if size)
        return f"Of that peak: {shares}. Raise the budget to the least peak or lower the batch size."
