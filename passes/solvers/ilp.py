"""The global program: what to save and what to recompute as binaries, live bytes by prefix differences, solved by HiGHS (or CBC).

For each candidate value ``v`` made by op ``o``: saved ``s_v`` and recomputed ``r_o``, with

    s_v + r_o >= 1          if backward reads v directly
    r_o <= s_u + r_p        for every value u that o reads, made by p (closure)
    L_k = L_(k-1) + births_k - deaths_k <= budget - base_k     at each slot k of forward and backward
    minimize  sum cost_o r_o

About four nonzeros a value instead of a dense timeline. It is a generator of plans, not an answer: a recomputed value is given a fixed
interval (from the first to the last slot where its own region may need it) and costs are additive. Each solution is therefore
simulated and the program's budget moved by what it missed, a few times. If chains of recompute that run through several regions make it
miss by far, the program is solved again with ``r_o <= s_u`` for every u from another region, under which the intervals hold. One
thread, a fixed seed, limits on nodes and gap; the clock is a safety stop.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import isinf, isqrt
from typing import Any

import pulp

from dyngran.passes.plan import Plan
from dyngran.passes.problem import Problem, Side
from dyngran.passes.regions import even_boundaries, find_separators, region_numbers
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.solving import solve_with

# PuLP keeps the error of each solver that it misses, and with it the frames that imported it: the user's first, and the model in them.
for _api in vars(pulp.apis).values():
    if isinstance(_missing := getattr(_api, "err", None), BaseException):
        _missing.__traceback__ = None

MAX_SLOTS = 300  # slots per side: neighbouring ops share one beyond that
MAX_ROUNDS = 5
MISSED_BY_FAR = 0.05  # of the transient budget: then chains cross regions and the contained program is the better one
CLOSE = 0.01  # of the transient budget left unused: near enough
FUSED_COST = 0.5  # pointwise ops cost about half when they are folded into a neighbour's loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much work one program may take. ``max_seconds`` is a safety stop only."""

    gap: float = 0.005
    max_nodes: int = 2000
    max_seconds: float = 20.0


class _Highs(pulp.HiGHS):  # type: ignore[misc]  # PuLP ships no types
    """PuLP 3.3 does not know the status with which HiGHS stops at its node limit."""

    def findSolutionValues(self, lp: Any) -> tuple[int, int]:
        model = lp.solverModel
        if model.getModelStatus().name != "kSolutionLimit":
            status: tuple[int, int] = super().findSolutionValues(lp)
            return status
        if isinf(model.getObjectiveValue()):
            return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
        found = model.getSolution().col_value
        for variable in lp.variables():
            variable.varValue = found[variable.index]
        return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible


@cache
def _start_quietly() -> None:
    """HiGHS 1.16 prints a banner when a process first creates it, before any option can forbid that: send that one to nowhere."""
    highspy = import_module("highspy")
    sys.stdout.flush()
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        highspy.Highs()
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)


def make_solver(limits: Limits) -> Any:
    """HiGHS through highspy, or the CBC that PuLP ships if highspy is not installed."""
    if pulp.HiGHS(msg=False).available():
        _start_quietly()
        return _Highs(
            msg=False,
            threads=1,
            gapRel=limits.gap,
            timeLimit=limits.max_seconds,
            random_seed=0,
            log_to_console=False,
            mip_max_nodes=limits.max_nodes,
        )
    return pulp.PULP_CBC_CMD(
        msg=False, threads=1, gapRel=limits.gap, timeLimit=limits.max_seconds, options=["randomSeed 0", f"maxNodes {limits.max_nodes}"]
    )


def propose(
    simulator: Simulator,
    *,
    budget_bytes: int | None = None,
    limits: Limits | None = None,
    max_rounds: int = MAX_ROUNDS,
    cut_off: Callable[[], None] = lambda: None,
) -> Iterator[frozenset[int]]:
    """Solutions at a budget, each round with the program's budget moved by what the simulator says it missed.

    ``cut_off`` is called whenever the clock stopped a solve, so that the caller can say that the plan is truncated.
    """
    yield simulator.default_saved
    if budget_bytes is None or not simulator.candidates:
        return
    for contained in (False, True):
        missed_bytes = 0
        program = Program(simulator, contained=contained, cut_off=cut_off)
        for saved in _rounds(simulator, budget_bytes, program, limits or Limits(), max_rounds):
            yield saved
            missed_bytes = simulator.evaluate(saved).peak_bytes - budget_bytes
            if not contained and missed_bytes > MISSED_BY_FAR * (budget_bytes - simulator.problem.total_static_bytes):
                break
        else:
            if missed_bytes <= 0:
                return


def _rounds(simulator: Simulator, budget_bytes: int, program: Program, limits: Limits, max_rounds: int) -> Iterator[frozenset[int]]:
    """Solve, simulate, move the program's budget by the miss, until the plan fits closely or repeats."""
    target = budget_bytes
    seen: set[frozenset[int]] = set()
    for _ in range(max_rounds):
        saved = program.solve(target, limits)
        if saved is None:
            if target >= budget_bytes:
                return
            target += (budget_bytes - target + 1) // 2
            continue
        crossing = simulator.normalize(saved)
        if crossing in seen:
            return
        seen.add(crossing)
        yield crossing
        room = budget_bytes - simulator.evaluate(crossing).peak_bytes
        if 0 <= room <= CLOSE * (budget_bytes - simulator.problem.total_static_bytes):
            return
        target += room


class Program:
    """The program of one problem; `solve` sets the budget and runs the solver. ``contained``: no chain of recompute leaves a region."""

    def __init__(self, simulator: Simulator, *, contained: bool = False, cut_off: Callable[[], None] = lambda: None) -> None:
        self._cut_off = cut_off
        self._contained = contained
        self._simulator = simulator
        self._problem = simulator.problem
        self._candidates = frozenset(simulator.candidates)
        self._slots = _Slots(self._problem, simulator)
        self._lines: list[tuple[Any, int]] = []
        self._model = pulp.LpProblem("save", pulp.LpMinimize)
        self._saved = {v: self._variable(f"s{v}", cat="Binary") for v in simulator.candidates}
        producers = sorted({self._producer(v) for v in simulator.candidates})
        self._again = {o: self._variable(f"r{o}", cat="Binary") for o in producers if not self._problem.ops[o].pinned}
        self._objective()
        self._closure()
        self._memory()

    def solve(self, budget_bytes: int, limits: Limits) -> frozenset[int] | None:
        """Saved values of the best solution found; None if the program has none within its limits."""
        room = budget_bytes - self._problem.total_static_bytes
        for variable, base in self._lines:
            if room < base:
                return None
            variable.upBound = room - base
        self._model.solve(make_solver(limits))
        if self._model.solutionTime >= limits.max_seconds:
            self._cut_off()
        values = [variable.value() for variable in self._saved.values()]
        if self._model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible) or None in values:
            return None
        return frozenset(v for v, variable in self._saved.items() if variable.value() > 0.5)

    def _variable(self, name: str, **bounds: Any) -> Any:
        add = getattr(self._model, "add_variable", pulp.LpVariable)  # PuLP 3.3 warns about the constructor, earlier ones have only that
        return add(name, **bounds)

    def _producer(self, value: int) -> int:
        producer = self._problem.values[value].producer
        assert producer is not None
        return producer

    def _cost(self, index: int) -> float:
        op = self._problem.ops[index]
        if op.side is Side.FREE:
            return 0.0
        return op.cost_us * (FUSED_COST if self._problem.fused and op.fusible else 1.0)

    def _objective(self) -> None:
        total = sum(self._problem.values[v].size_bytes for v in self._candidates) or 1
        tie_us = 1e-3 * (sum(self._cost(o) for o in self._again) or 1.0) / total
        terms = [self._cost(o) * variable for o, variable in self._again.items()]
        terms += [tie_us * self._problem.values[v].size_bytes * variable for v, variable in self._saved.items()]
        self._model += pulp.lpSum(terms)

    def _closure(self) -> None:
        problem = self._problem
        for value in self._slots.direct:
            again = self._again.get(self._producer(value))
            if again is None:
                self._saved[value].lowBound = 1
            else:
                self._model += self._saved[value] + again >= 1
        for value, variable in self._saved.items():
            op = problem.ops[self._producer(value)]
            if op.never_saved and not op.pinned:
                variable.upBound = 0
        for index, variable in self._again.items():
            for read in problem.ops[index].reads:
                if read in self._candidates:
                    producer = self._producer(read)
                    source = self._again.get(producer)
                    if self._contained and self._slots.region[producer] != self._slots.region[index]:
                        source = None
                    self._model += variable <= self._saved[read] + (source if source is not None else 0)

    def _memory(self) -> None:
        changes: list[list[Any]] = [[] for _ in range(self._slots.num_slots + 1)]
        for value, variable in self._saved.items():
            size = self._problem.values[value].size_bytes
            if not size:
                continue
            if value not in self._problem.forward_outputs:
                start, end = self._slots.saved_interval(value)
                changes[start].append(size * variable)
                changes[end + 1].append(-size * variable)
            again = self._again.get(self._producer(value))
            if again is not None and self._slots.is_written_again(value):
                start, end = self._slots.again_interval(value)
                changes[start].append(size * again)
                changes[end + 1].append(-size * again)
        previous: Any = 0
        for slot in range(self._slots.num_slots):
            if not changes[slot] and slot:
                variable, base = self._lines[-1]
                self._lines[-1] = (variable, max(base, self._slots.base[slot]))
                continue
            live = self._variable(f"L{slot}", lowBound=0)
            self._model += live == previous + pulp.lpSum(changes[slot])
            self._lines.append((live, self._slots.base[slot]))
            previous = live


class _Slots:
    """When things happen: ops mapped to slots, with the bytes that no decision changes (``base``) and intervals for those that do."""

    def __init__(self, problem: Problem, simulator: Simulator) -> None:
        self._problem = problem
        forward = [op.index for op in problem.ops if op.side is Side.FORWARD]
        backward = [op.index for op in problem.ops if op.side is Side.BACKWARD]
        num_forward = min(MAX_SLOTS, len(forward))
        num_backward = min(MAX_SLOTS, len(backward))
        self.num_slots = num_forward + num_backward + 1  # the last one: gradients that read no tangent
        self.slot = {index: place * num_forward // len(forward) for place, index in enumerate(forward)}
        self.slot |= {index: num_forward + place * num_backward // len(backward) for place, index in enumerate(backward)}
        self._first_backward = num_forward
        self._end = self.num_slots - 1
        self._candidates = frozenset(simulator.candidates)
        crossings = simulator.crossings
        separators = find_separators(crossings)
        if len(separators) < 2:  # as in a plain chain, where no place is narrower than another
            separators = even_boundaries(problem, crossings, isqrt(len(forward)))
        self.region = region_numbers(problem, separators, crossings)
        self._readers: dict[int, list[int]] = {}
        for op in problem.ops:
            for read in op.reads:
                self._readers.setdefault(read, []).append(op.index)
        self.direct = [
            v for v in simulator.candidates if v in problem.gradients or any(self._is_backward(r) for r in self._readers.get(v, ()))
        ]
        self._first, self._last = self._intervals()
        self.base = self._base(simulator)

    def _is_backward(self, index: int) -> bool:
        return self._problem.ops[index].side is Side.BACKWARD

    def _fold(self, value: int, pick: Callable[..., int], known: dict[int, int], default: int) -> int:
        """First or last slot at which ``value`` is read: by backward itself, or by an op of its region that is made again then."""
        slots = [self._end] if value in self._problem.gradients else []
        producer = self._problem.values[value].producer
        assert producer is not None
        for reader in self._readers.get(value, ()):
            if self._is_backward(reader):
                slots.append(self.slot[reader])
            elif self.region[reader] == self.region[producer]:
                slots.extend(self._starts[write] for write in self._problem.ops[reader].writes if write in self._starts)
        return pick(slots, default=default)

    def _intervals(self) -> tuple[dict[int, int], dict[int, int]]:
        self._starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        for value in sorted(self._candidates, reverse=True):
            self._starts[value] = self._fold(value, min, self._starts, self._end)
        for value in self._candidates:
            ends[value] = max(self._fold(value, max, self._starts, self._first_backward), self._starts[value] * (value in self.direct))
        return self._starts, ends

    def saved_interval(self, value: int) -> tuple[int, int]:
        """From its last forward use, after which it waits, to its last use in backward."""
        producer = self._problem.values[value].producer
        assert producer is not None
        uses = [self.slot[reader] for reader in self._readers.get(value, ()) if reader in self.slot and not self._is_backward(reader)]
        start = min(max(uses, default=self.slot.get(producer, 0) - 1) + 1, self._first_backward)
        return max(start, 0), max(self._last[value], self._first_backward)

    def again_interval(self, value: int) -> tuple[int, int]:
        start = self._first[value]
        return start, max(start, self._last[value] if self._last[value] >= self._first_backward else start)

    def is_written_again(self, value: int) -> bool:
        """Whether a value that is made again takes memory: not if a fusing code generator may inline it wherever it is read."""
        producer = self._problem.values[value].producer
        assert producer is not None
        ops = self._problem.ops
        is_inlined = self._problem.fused and ops[producer].fusible and all(ops[reader].fusible for reader in self._readers.get(value, ()))
        return not is_inlined

    def _base(self, simulator: Simulator) -> list[int]:
        """Most bytes live in each slot whatever is decided: forward working set, outputs, tangents, gradients, workspaces."""
        base = [0] * self.num_slots
        slot = 0
        for op, live in (kernel for side in simulator.working_bytes() for kernel in side):
            slot = self.slot.get(op, slot)  # what neither runs in forward nor needs a tangent counts where it runs
            base[slot] = max(base[slot], live)
        base[self._end] = sum(self._problem.values[v].size_bytes for v in self._problem.gradients | self._problem.forward_outputs)
        return base


def solve(problem: Problem, budget_bytes: int | None) -> Plan:
    """The fastest of these plans for a budget (bytes, static bytes included; None: no limit). Raises BudgetTooSmall if none fits."""
    return solve_with(propose, "ilp", problem, budget_bytes)
