"""The portfolio: several solvers propose plans, the simulator judges them, the archive answers every budget.

The search does not look at the budget: it fills the whole frontier once. So how fast the answer to a budget is does not depend on which
budgets were asked before (solvers that were asked by name before leave their plans to it), a smaller budget never gives a larger peak or a
faster step, and a new budget costs one look-up. Only where no saved set is proven to be the fastest and order is ours (no fusing code
generator) are schedules searched as well, in which values may be made more often: on rungs that do not depend on the budget either. One of
them may take the place of a saved set that is as fast and peaks higher, for budgets asked later.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from threading import Timer
from time import monotonic

from dyngran.passes.archive import TIE_US, Accepts, Archive, Entry, Judge, Proposal
from dyngran.passes.bounds import lower_bound
from dyngran.passes.errors import InvalidOption
from dyngran.passes.forms import crossing_values, with_fewer_forms
from dyngran.passes.moves import LARGE
from dyngran.passes.native.graph import Stop
from dyngran.passes.plan import Action, Plan, Schedule
from dyngran.passes.problem import Problem, Side
from dyngran.passes.simulate import Outcome, Simulator
from dyngran.passes.solvers import (
    anneal,
    default,
    dtr,
    every,
    exhaustive,
    forms,
    hierarchical,
    ilp,
    mincut,
    mutwo,
    region,
    revolve,
    selective,
    sqrt,
    stock,
)
from dyngran.passes.solvers.polish import polish, rungs
from dyngran.passes.solvers.solving import CUT_SHORT, Propose, hint_of, plan_from

PROPOSERS: dict[str, Propose] = {
    "hierarchical": hierarchical.propose,
    "ilp": ilp.propose,
    "mutwo": mutwo.propose,
    "mincut": mincut.propose,
    "anneal": anneal.propose,
    "default": default.propose,
    "stock": stock.propose,
    "region": region.propose,
    "every": every.propose,
    "sqrt": sqrt.propose,
    "selective": selective.propose,
    "revolve": revolve.propose,
    "dtr": dtr.propose,
}
SOLVERS: tuple[str, ...] = ("auto", *PROPOSERS)
LOOK_AT_BUDGET = ("hierarchical", "ilp", "mincut", "anneal", "revolve", "dtr")  # these run again for another budget

MAX_SECONDS = 30.0  # safety stop
SEED_WORK, SEED_WORK_IF_LARGE = 400_000, 200_000  # op visits of the plans that each classic policy may seed the search with
MIN_SEEDS = 12
MAX_BETWEEN_CUTS = 4  # times as many plans between cuts as a policy may seed
NUM_CUT_RUNGS = 10
CUT_SWEEPS = 2  # that are looked into for each rung
NUM_FORM_STARTS = 12  # plans without forms that are looked at with forms
SLICE_WORK = 3_000_000  # op visits of plans that are looked at with one slice more
SHARE_OF_FEWER = 0.8  # of the time that the safety stop allows, for the search with one kind of forms less
MIN_SLICE_STARTS, MAX_SLICE_STARTS = 6, 60  # those plans
NUM_GUIDES = 12  # plans of others whose choices are options of the hierarchical planner
MAX_MUTWO_OPS = 5000  # above it others find as much in less time
MAX_MUTWO_PLANS = 40  # of the greedy's way, as seeds; solver="mutwo" tries more
SHARES_OF_LEAST = (0.0, 0.6, 0.75, 0.9, 1.0)  # of the least transient of all saved sets: rungs for orders
SHARES_ABOVE = (0.25, 0.5, 0.75)  # of the way from there to the fastest plan
MAX_POLICY_OPS = 1000  # above it revolve and DTR, whose work grows faster than the graph, start no orders
RUNG_WORK = 20_000_000  # moves times ops for each
MAX_RUNG_MOVES = 20_000
LONG_WALK_OPS = 400  # above it two walks over orders share the moves of one
ILP_SHARES = (0.6, 0.3)  # of the default plan's transient: budgets of the programs that seed the search
MAX_ILP_CANDIDATES = 80  # above it other moves find as much in less time
ILP_LIMITS = ilp.Limits(gap=0.01, max_nodes=20, max_seconds=10.0)


def solve(problem: Problem, budget_bytes: int | None) -> Plan:
    """The fastest plan that any solver finds for a budget (bytes, static bytes included; None: no limit).

    Raises BudgetTooSmall if none fits.
    """
    return Planner(problem).solve(budget_bytes)


class Planner:
    """Plans one problem for any number of budgets, in one thread at a time.

    Args:
        problem: what is planned.
        progress: called with a short line whenever a stage of the search starts, and about every second while it lasts.
        max_seconds: safety stop of each search; a plan from what was found until then says ``truncated``. Ctrl-C does the same.
        accepts: schedules pass through it before they are plans: what more than a problem knows can mend them, or drop them.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        progress: Callable[[str], None] | None = None,
        max_seconds: float = MAX_SECONDS,
        accepts: Accepts = lambda schedule: schedule,
    ) -> None:
        self.problem = problem
        self.simulator = Simulator(problem)
        self._bare = self.simulator.bare  # for those who know no forms
        self.judge = Judge(self.simulator, on_simulation=self._tick, accepts=accepts)
        self._accepts = accepts
        self._fewer: Planner | None = None  # of the problem with fewer forms
        self.truncated = False
        self._progress = progress or (lambda line: None)
        self._max_seconds = max_seconds
        self._stop = Stop()
        self._done: set[str] = set()
        self._stage, self._said_at = "", 0.0
        self._cuts: mincut.Sweeps | None = None
        self._hierarchies: dict[str, hierarchical.Hierarchy] = {}

    def solve(self, budget_bytes: int | None, *, solver: str = "auto") -> Plan:
        """The fastest known plan whose peak, static bytes included, is at most the budget (None: no limit).

        Raises:
            BudgetTooSmall: no known plan fits; it says the least peak and what is live there.
            InvalidOption: no such solver.
        """
        if solver not in SOLVERS:
            raise InvalidOption(f"solver must be one of {', '.join(SOLVERS)}, got {solver!r}")
        self.judge(self.simulator.default_saved, "default")
        if solver == "auto":
            self.search_schedules(budget_bytes)
            archive = self.judge.archive
        else:
            self._run(solver, budget_bytes)
            if not self.found_by(solver):  # too small a graph to checkpoint anything in
                self.judge(self.simulator.default_saved, solver)
            archive = self.judge.by_solver[solver]
        is_proven = self.problem.fused and "exhaustive" in self._done and not self.truncated and solver == "auto"
        proof = exhaustive.PROOF if is_proven else ""
        hint = "" if solver == "auto" else self._hint_of_other_solvers(budget_bytes, solver)
        return plan_from(self.judge, archive, budget_bytes, solver=solver, truncated=self.truncated, proof=proof, hint=hint)

    def frontier(self, *, with_orders: bool = False) -> tuple[Outcome, ...]:
        """Every plan on the Pareto frontier, least peak first; runs the search if it has not run, and that over orders if asked to."""
        self._search()
        if with_orders and not self.truncated and not self._is_all_forward:
            self._search_rungs_of_orders()
        return tuple(entry.outcome for entry in self.judge.archive.frontier())

    def found_by(self, solver: str) -> tuple[Entry, ...]:
        """The frontier of what one solver has proposed so far, least peak first."""
        return self.judge.by_solver.get(solver, Archive()).frontier()

    def finder_of(self, outcome: Outcome) -> str:
        """The solver that proposed a plan of the frontier first."""
        return next((entry.solver for entry in self.judge.archive.frontier() if entry.outcome == outcome), "found before")

    def add(self, saved: Iterable[int], solver_name: str) -> Outcome:
        """Simulate and archive a saved set from elsewhere (a plan file, a person)."""
        return self.judge(saved, solver_name)

    def add_schedule(self, schedule: Schedule, solver_name: str) -> Outcome | None:
        """Simulate and archive a prescribed order from elsewhere; None if it was not accepted."""
        return self.judge.judge_schedule(schedule, solver_name)

    def hint(self, budget_bytes: int, least: Outcome, *, solver: str = "auto") -> str:
        """What the least reachable peak consists of, or which solver may find a smaller one, and what would help."""
        found = hint_of(self.judge, budget_bytes, least) if solver == "auto" else self._hint_of_other_solvers(budget_bytes, solver)
        return (CUT_SHORT if self.truncated else "") + found

    def _hint_of_other_solvers(self, budget_bytes: int | None, solver: str) -> str:
        """What a refusal of a solver asked for by name says of the others: with fusion their plans may need more than simulated."""
        is_one_known = not self.problem.fused and self.judge.archive.best(budget_bytes) is not None
        found = " has a plan that fits." if is_one_known else " may find a smaller plan."
        return f"This is the least that solver={solver!r} alone reaches: solver='auto'{found}"

    @property
    def _is_all_forward(self) -> bool:
        """Nothing runs in backward, as in graphs published without sides: then only orders differ."""
        return not self.problem.fused and all(op.side is Side.FORWARD for op in self.problem.ops)

    def _search(self) -> None:
        """Fill the frontier, once."""
        if "search" in self._done:
            return
        self._done.add("search")
        with self._searching():
            for name in ("default", "stock"):
                self._once(name, name, PROPOSERS[name](self._bare))
            if exhaustive.applies(self.simulator):
                self._once("exhaustive", "exhaustive", exhaustive.propose(self.simulator))
            elif not self._is_all_forward:
                self._search_widely()

    def _search_widely(self) -> None:
        if self.problem.forms:
            self._search_with_forms()
        else:
            self._search_plain()
        if not self._stop:
            self._say("polishing")
            polish(self.judge, self._stop)
        self._once("slices", "forms", self._with_one_slice())

    def _search_with_forms(self) -> None:
        """On from all that is found with one kind of forms less: whoever allows one more way to store values gets no slower plan for it."""
        self._take_over(self._with_fewer_forms())
        self._once("forms", "forms", forms.propose(self.simulator, self._along_the_frontier(NUM_FORM_STARTS)))
        self._once("regions", "hierarchical", self._by_regions("auto", None, guides=NUM_GUIDES))
        found = [entry.outcome.saved for entry in self.judge.archive.frontier() if entry.outcome.schedule is None]
        self._once("offload", "forms", forms.offloaded(self.simulator, found))

    def _with_one_slice(self) -> Iterator[frozenset[int]]:
        num_slices = sum(form.action is Action.SLICE for form in self.problem.forms)
        num_plans = SLICE_WORK // max(1, len(self.problem.ops))
        if num_slices:
            starts = self._along_the_frontier(max(MIN_SLICE_STARTS, min(MAX_SLICE_STARTS, num_plans // num_slices)))
            yield from forms.sliced(self.simulator, starts)

    def _with_fewer_forms(self) -> Planner:
        """A planner of the problem with one kind of forms less, which has searched."""
        if self._fewer is None:
            seconds, problem = self._max_seconds * SHARE_OF_FEWER, with_fewer_forms(self.problem)
            self._fewer = Planner(problem, progress=self._progress, max_seconds=seconds, accepts=self._accepts)
            self._fewer._search()
        return self._fewer

    def _take_over(self, fewer: Planner) -> None:
        for entry in fewer.judge.archive.frontier():
            schedule = entry.outcome.schedule
            if schedule is None:
                self.judge(entry.outcome.saved, entry.solver)
            else:
                self.judge.judge_schedule(schedule, entry.solver)
        self.truncated |= fewer.truncated

    def _search_plain(self) -> None:
        num_ops = len(self.problem.ops)
        count = max(MIN_SEEDS, (SEED_WORK if num_ops <= LARGE else SEED_WORK_IF_LARGE) // max(1, num_ops))
        for name in ("region", "every", "sqrt", "selective"):
            self._once(name, name, islice(PROPOSERS[name](self._bare), count))
        if len(self.problem.ops) <= MAX_MUTWO_OPS:
            self._once("mutwo seeds", "mutwo", mutwo.propose(self._bare, max_plans=min(count, MAX_MUTWO_PLANS)))
        self._once("mincut", "mincut", self._cuts_and_between(count))
        self._once("mincut by rungs", "mincut", self._mincut_by_rungs())
        if len(self._bare.candidates) <= MAX_ILP_CANDIDATES:
            self._once("ilp seeds", "ilp", self._ilp_seeds())
        self._once("regions", "hierarchical", self._by_regions("auto", None, guides=NUM_GUIDES))

    def _by_regions(self, who: str, budget_bytes: int | None, *, guides: int) -> Iterator[Proposal]:
        hierarchy = self._hierarchy_of(who, guides=guides)
        yield from hierarchical.propose(self.simulator, budget_bytes=budget_bytes, hierarchy=hierarchy)

    def _sweeps(self) -> mincut.Sweeps:
        if self._cuts is None:
            self._cuts = mincut.Sweeps(self._bare)
        return self._cuts

    def _mincut(self, budget_bytes: int | None) -> Iterator[Proposal]:
        return mincut.propose(self._bare, budget_bytes=budget_bytes, known=self._sweeps())

    def _cuts_and_between(self, count: int) -> Iterator[Proposal]:
        yield from self._sweeps().masks()
        yield from islice(self._sweeps().spread(), MAX_BETWEEN_CUTS * count)

    def _mincut_by_rungs(self) -> Iterator[bytes]:
        for budget_bytes in rungs(self.judge, NUM_CUT_RUNGS):
            yield from self._sweeps().near(budget_bytes, num_sweeps=CUT_SWEEPS)

    def search_schedules(self, budget_bytes: int | None) -> None:
        """Schedules, after the saved sets that they start from, where one of them could be the answer to a budget. Which are found does
        not depend on it, except where nothing runs in backward. A search that was cut short is not followed by another."""
        self._search()
        if self.truncated:
            return
        if self.problem.forms and not self.problem.fused:  # orders use no forms
            self._with_fewer_forms().search_schedules(budget_bytes)
            self._take_over(self._with_fewer_forms())
        elif self._is_all_forward:
            self.search_orders(budget_bytes)
        elif not self._is_fastest_proven(budget_bytes):
            self._search_rungs_of_orders()

    def search_orders(self, budget_bytes: int | None) -> None:
        """Schedules for one budget that no saved set fits: revolve, DTR, and annealing from the least of all."""
        stage = f"orders for {budget_bytes} bytes"
        if self.problem.fused or budget_bytes is None or budget_bytes <= self.problem.total_static_bytes or stage in self._done:
            return
        with self._searching():
            for name in ("revolve", "dtr"):
                self._once(f"{name} for {budget_bytes} bytes", name, PROPOSERS[name](self._bare, budget_bytes=budget_bytes))
            self._once(stage, "anneal", self._orders(budget_bytes))

    def _orders(self, budget_bytes: int) -> Iterator[Schedule]:
        """Walks from the best that is known; where only orders differ, from the given one as well, since the best may be a dead end."""
        starts = [self._start_of_orders(budget_bytes)]
        if self._is_all_forward:
            starts.append(anneal.schedule_of(self._bare, self._bare.default_saved))
        moves = anneal.MAX_MOVES // (1 if len(self.problem.ops) <= LONG_WALK_OPS else len(starts))
        for start in starts:
            yield from anneal.orders(self._bare, budget_bytes, start, self._stop, max_moves=moves)

    def _is_fastest_proven(self, budget_bytes: int | None) -> bool:
        """Whether no order of ops could be faster than the best saved set for a budget; with a fusing code generator order is not ours."""
        entry = self.judge.archive.best(budget_bytes)
        if self.problem.fused or entry is None:
            return self.problem.fused
        return entry.outcome.time_us <= lower_bound(self.problem, budget_bytes).time_us + TIE_US

    def _search_rungs_of_orders(self) -> None:
        """Schedules at budgets that do not depend on the one asked for, so that answers stay monotone: some below the least peak of all
        saved sets, down to the least that any order reaches, some between that and the fastest plan."""
        if self.problem.fused or "rungs of orders" in self._done:
            return
        self._done.add("rungs of orders")
        static = self.problem.total_static_bytes
        entries = self.judge.archive.frontier()
        least, most = entries[0].outcome.peak_bytes - static, entries[-1].outcome.peak_bytes - static
        rungs_below = [least - 1, *(int(least * share) for share in SHARES_OF_LEAST)]  # the first: the most that no saved set fits
        rungs_above = [least + int((most - least) * share) for share in SHARES_ABOVE]
        with self._searching():
            for transient_bytes in sorted({*rungs_below, *rungs_above}, reverse=True):
                budget_bytes = static + transient_bytes
                for name in ("revolve", "dtr") if len(self.problem.ops) <= MAX_POLICY_OPS else ():
                    self._once(f"{name} for {budget_bytes} bytes", name, PROPOSERS[name](self._bare, budget_bytes=budget_bytes))
                start = self._start_of_orders(budget_bytes)
                proposed = anneal.orders(self._bare, budget_bytes, start, self._stop, work=RUNG_WORK, max_moves=MAX_RUNG_MOVES)
                self._once(f"orders for {budget_bytes} bytes", "anneal", proposed)

    def _start_of_orders(self, budget_bytes: int) -> Schedule:
        entry = self.judge.archive.best(budget_bytes) or self.judge.archive.least()
        assert entry is not None
        return entry.outcome.schedule or anneal.schedule_of(self._bare, crossing_values(self.problem, entry.outcome.saved))

    def _run(self, name: str, budget_bytes: int | None) -> None:
        """Let one solver propose."""
        stage = f"{name} for {budget_bytes} bytes" if name in LOOK_AT_BUDGET else name
        with self._searching():
            if name == "hierarchical":
                proposed: Iterator[Proposal] = self._by_regions(name, budget_bytes, guides=0)
            elif name == "mincut":
                proposed = self._mincut(budget_bytes)
            elif name == "ilp":
                proposed = ilp.propose(self._bare, budget_bytes=budget_bytes, cut_off=self._cut_off)
            elif name == "anneal":
                proposed = anneal.propose(self._bare, budget_bytes=budget_bytes, stop=self._stop)
            else:
                proposed = PROPOSERS[name](self._bare, budget_bytes=budget_bytes)
            self._once(stage, name, proposed)

    def _hierarchy_of(self, who: str, *, guides: int) -> hierarchical.Hierarchy | None:
        """The regions and options that one solver plans with: what is asked of one says nothing to another."""
        if who not in self._hierarchies and self.simulator.candidates:
            guiding = self._along_the_frontier(guides)
            self._hierarchies[who] = hierarchical.Hierarchy(self.simulator, guides=guiding, stop=self._stop)
        return self._hierarchies.get(who)

    def _along_the_frontier(self, count: int) -> list[frozenset[int]]:
        """At most so many saved sets of the plans found so far, evenly spread."""
        entries = self.judge.archive.frontier()
        return list(dict.fromkeys(entries[place * len(entries) // count].outcome.saved for place in range(count)))

    @contextmanager
    def _searching(self) -> Iterator[None]:
        """Within the safety stop. An error on the way, of a progress line perhaps, leaves half a search: plans from it say so."""
        is_whole = False
        try:
            with _SafetyStop(self._max_seconds, self._stop) as safety:
                yield
            is_whole = True
        finally:
            self.truncated |= not is_whole
        self._note(safety)

    def _once(self, stage: str, solver: str, proposed: Iterator[Proposal]) -> None:
        if stage in self._done or self._stop:
            return
        self._done.add(stage)
        self._say(stage)
        num_values = len(self.problem.values)
        for proposal in proposed:
            if isinstance(proposal, bytes):  # those who know no forms know nothing of the last values
                proposal = proposal.ljust(num_values, b"\0")
            self.judge.judge_any(proposal, solver)
            if self._stop:
                return

    def _say(self, stage: str) -> None:
        self._stage, self._said_at = stage, monotonic()
        self._progress(f"planning: {stage}")

    def _tick(self) -> None:
        if monotonic() - self._said_at > 1.0:
            self._said_at = monotonic()
            self._progress(f"planning: {self._stage or 'first plans'} ({self.judge.num_evaluations} plans simulated)")

    def _cut_off(self) -> None:
        self.truncated = True

    def _note(self, safety: _SafetyStop) -> None:
        if safety.was_needed:
            self.truncated = True
            self._progress(f"planning: cut short after {safety.seconds:.1f} s, going on with the best plans found")

    def _ilp_seeds(self) -> Iterator[frozenset[int]]:
        static = self.problem.total_static_bytes
        transient = self.simulator.evaluate(self.simulator.default_saved).peak_bytes - static
        for share in ILP_SHARES:
            budget_bytes = static + int(share * transient)
            yield from ilp.propose(self._bare, budget_bytes=budget_bytes, limits=ILP_LIMITS, max_rounds=1, cut_off=self._cut_off)


class _SafetyStop:
    """Sets a stop when its time is over or Ctrl-C is pressed, and takes the latter to mean: go on with what there is.

    Python's search for garbage in cycles waits until the end: plans make none, and looking through a process with torch in it several
    times took a tenth of the planning time of a large graph.
    """

    def __init__(self, max_seconds: float, stop: Stop) -> None:
        self._stop = stop
        self._timer = Timer(max_seconds, stop.set)
        self._timer.daemon = True
        self._started = monotonic()
        self.was_needed = False
        self.seconds = 0.0
        self._is_collecting = gc.isenabled()

    def __enter__(self) -> _SafetyStop:
        self._stop.clear()
        self._timer.start()
        gc.disable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if self._is_collecting:
            gc.enable()
        self._timer.cancel()
        self.seconds = monotonic() - self._started
        self.was_needed = bool(self._stop) or kind is KeyboardInterrupt
        self._stop.clear()
        return kind is KeyboardInterrupt
