"""The fastest saved set for a budget as a mixed-integer program: the truth for graphs that are too large for brute force.

Checkmate's stages (Jain et al., MLSys 2020) with this project's accounting. There is one stage per op of backward and one for gradients
that depend on no tangent. Of each candidate value: is it saved; of each op that makes one: in which stage does it run again. Memory is
counted at every place where an op may run, not once a stage.

Exact for *saved-set plans* of problems that do not fuse: each value that backward needs is saved, or made once more just before its first
reader in backward, ops in the joint graph's order, which is what `Simulator.evaluate` judges. Every such plan is a solution and every
solution is such a plan, but for values that are saved without need (which makes no plan faster or smaller). It says nothing about
schedules, in which a value may be made more often or in another order: those can be faster.

Rows of memory are added where the simulator finds the last solution above the budget, until it finds none: each program is a relaxation
of the whole one, so the first solution that keeps the budget is the optimum.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pulp

from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.ilp import Limits, make_solver

MAX_ROUNDS = 60
LIMITS = Limits(gap=0.0, max_nodes=2**31 - 1, max_seconds=300.0)


@dataclass(frozen=True)
class Optimum:
    """The least time (us) of a saved-set plan within the budget, and a plan that takes it; ``num_rounds`` programs were solved."""

    time_us: float
    saved: frozenset[int]
    num_rounds: int


def exact_optimum(problem: Problem, budget_bytes: int, *, at_most_us: float | None = None) -> Optimum | None:
    """The optimum (bytes with static ones); None if no saved set fits. ``at_most_us``: look only for plans that take no longer, which
    is faster; None then also means that there is no such plan.

    Raises ValueError for problems with fusion, with ops of several results, or with rerun_bytes of FREE ops; RuntimeError if the solver
    gives up.
    """
    return _Program(problem, budget_bytes).solve(at_most_us)


class _Program:
    def __init__(self, problem: Problem, budget_bytes: int) -> None:
        if problem.fused or any(len(op.writes) > 1 or (op.side is Side.FREE and op.rerun_bytes) for op in problem.ops):
            raise ValueError("exact only without fusion, for ops of one result, without rerun_bytes of FREE ops")
        self._problem, self._budget_bytes = problem, budget_bytes
        self._simulator = Simulator(problem)
        self._candidates = self._simulator.candidates
        self._size = [0 if value.kind.is_static else value.size_bytes for value in problem.values]
        self._forward = [op for op in problem.ops if op.side is not Side.BACKWARD]
        self._backward = [op for op in problem.ops if op.side is Side.BACKWARD]
        self._late = {write for op in self._backward for write in op.writes}
        self._stage = {op.index: stage for stage, op in enumerate(self._backward)}
        self._num_stages = len(self._backward) + 1
        self._readers: dict[int, list[int]] = defaultdict(list)
        for op in problem.ops:
            for read in dict.fromkeys(op.reads):
                self._readers[read].append(op.index)
        self._model = pulp.LpProblem("exact", pulp.LpMinimize)
        self._num_variables = 0
        self._rows: set[tuple[int, int]] = set()
        self._make_variables()
        self._cost: Any = pulp.lpSum(op.cost_us for op in problem.ops if op.side is not Side.FREE)
        self._cost += pulp.lpSum(problem.ops[index].cost_us * variable for index, variable in self._early.items())
        self._cost += pulp.lpSum(problem.ops[index].cost_us * variable for (index, _), variable in self._again.items())
        self._model += self._cost
        self._need()
        self._early_rows()
        for stage in range(len(self._backward)):
            self._backward_row(stage, self._backward[stage].index)
        for place in range(len(self._forward)):
            self._forward_row(place)

    def solve(self, at_most_us: float | None) -> Optimum | None:
        if at_most_us is not None:
            self._model += self._cost <= at_most_us + 1e-6
        for round_number in range(1, MAX_ROUNDS + 1):
            self._model.solve(make_solver(LIMITS))
            if self._model.status == pulp.LpStatusInfeasible:
                return None
            if self._model.sol_status != pulp.LpSolutionOptimal or self._model.solutionTime >= LIMITS.max_seconds:
                raise RuntimeError(f"the exact program was not solved: {pulp.LpStatus[self._model.status]}")
            saved = frozenset(value for value, variable in self._saved.items() if variable.value() > 0.5)
            outcome = self._simulator.evaluate(saved)
            if outcome.peak_bytes <= self._budget_bytes:
                assert outcome.time_us <= pulp.value(self._cost) + 1e-3, (outcome, pulp.value(self._cost))
                return Optimum(outcome.time_us, outcome.saved, round_number)
            if not self._tighten(saved):
                raise AssertionError(f"every row holds, but {sorted(saved)} takes {outcome.peak_bytes} of {self._budget_bytes} bytes")
        raise RuntimeError(f"the exact program was not solved in {MAX_ROUNDS} rounds")

    def _tighten(self, saved: frozenset[int]) -> bool:
        """Rows for every place in backward where the simulator finds too much; True if any is new."""
        curve = self._simulator.native.curve(self._simulator.native.mask(saved))
        room = self._budget_bytes - self._problem.total_static_bytes
        stage, num_rows = len(self._backward), len(self._rows)
        for op, live_bytes in zip(curve.ops[: curve.num_forward - 1 : -1], curve.live_bytes[: curve.num_forward - 1 : -1], strict=True):
            stage = self._stage.get(op, stage)
            if live_bytes > room:
                self._backward_row(stage, op)
        return len(self._rows) > num_rows

    def _variable(self, *, binary: bool = True) -> Any:
        self._num_variables += 1
        add = getattr(self._model, "add_variable", pulp.LpVariable)
        return add(f"x{self._num_variables}", lowBound=0, upBound=1, cat="Binary" if binary else "Continuous")

    def _producer(self, value: int) -> int:
        producer = self._problem.values[value].producer
        assert producer is not None
        return producer

    def _make_variables(self) -> None:
        problem = self._problem
        self._saved = {value: self._variable() for value in self._candidates}
        self._direct: list[list[int]] = [[read for read in op.reads if read in self._saved] for op in self._backward]
        self._direct.append([value for value in sorted(problem.gradients) if value in self._saved])
        self._again: dict[tuple[int, int], Any] = {}
        for stage, wanted in enumerate(self._direct):
            stack, seen = list(wanted), set[int]()
            while stack:
                value = stack.pop()
                if value in seen or not self._may_run_again(value):
                    continue
                seen.add(value)
                self._again[self._producer(value), stage] = self._variable()
                stack.extend(read for read in problem.ops[self._producer(value)].reads if read in self._saved)
        self._stages_of: dict[int, list[int]] = defaultdict(list)
        for index, stage in sorted(self._again):
            self._stages_of[index].append(stage)
        self._early = {op.index: self._variable() for op in self._forward if op.side is Side.FREE}

    def _may_run_again(self, value: int) -> bool:
        op = self._problem.ops[self._producer(value)]
        return not op.pinned and (op.never_saved or not self._problem.keeps_as_small(value))

    def _ran(self, index: int, stage: int, op_place: int | None = None) -> Any:
        """1 if op ``index`` has run again when op ``op_place`` of a stage runs (itself included); None: when the stage is over."""
        return pulp.lpSum(
            self._again[index, at]
            for at in self._stages_of[index]
            if at < stage or (at == stage and (op_place is None or self._stage.get(op_place) == stage or index <= op_place))
        )

    def _need(self) -> None:
        """What is read is saved or has run; nothing runs that is saved, or unread, or for the second time."""
        problem = self._problem
        for stage, wanted in enumerate(self._direct):
            for value in wanted:
                self._model += self._saved[value] + self._ran(self._producer(value), stage) >= 1
        for (index, stage), variable in self._again.items():
            for read in dict.fromkeys(problem.ops[index].reads):
                if read in self._saved:
                    self._model += variable <= self._saved[read] + self._ran(self._producer(read), stage)
            value = problem.ops[index].writes[0]
            if value not in self._direct[stage]:
                readers = [reader for reader in self._readers[value] if (reader, stage) in self._again]
                self._model += variable <= pulp.lpSum(self._again[reader, stage] for reader in readers)
        for value, variable in self._saved.items():
            self._model += variable + self._ran(self._producer(value), self._num_stages) <= 1
            op = problem.ops[self._producer(value)]
            if op.never_saved and not op.pinned:
                variable.upBound = 0

    def _early_rows(self) -> None:
        """FREE ops run in forward if something saved is made of them."""
        for index, variable in self._early.items():
            value = self._problem.ops[index].writes[0]
            if value in self._saved:
                self._model += variable >= self._saved[value]
            for reader in self._readers[value]:
                if reader in self._early:
                    self._model += variable >= self._early[reader]

    @property
    def _room(self) -> int:
        return self._budget_bytes - self._problem.total_static_bytes

    def _forward_row(self, place: int) -> None:
        """Bytes live while the op at ``place`` runs in forward: of what was made, what is saved, returned or read from here on."""
        op = self._forward[place]
        live: Any = op.workspace_bytes * self._early.get(op.index, 1)
        ahead = {later.index for later in self._forward[place:]}
        for maker in self._forward[: place + 1]:
            for value in maker.writes:
                readers = [reader for reader in self._readers[value] if reader in ahead]
                is_here = 1 if value in self._problem.forward_outputs else 0
                is_here = max([is_here, *(reader not in self._early for reader in readers)])
                if maker.index == op.index or is_here:
                    live += self._size[value] * self._early.get(maker.index, 1)
                    continue
                reasons = [self._early[reader] for reader in readers] + ([self._saved[value]] if value in self._saved else [])
                live += self._size[value] * self._largest(reasons)
        self._model += pulp.LpAffineExpression(live) <= self._room

    def _largest(self, reasons: list[Any]) -> Any:
        if len(reasons) < 2:
            return reasons[0] if reasons else 0
        largest = self._variable(binary=False)
        for reason in reasons:
            self._model += largest >= reason
        return largest

    def _backward_row(self, stage: int, index: int) -> None:
        """Bytes live while op ``index`` runs in a stage of backward, the stage's own or one that runs again for it."""
        if (stage, index) in self._rows:
            return
        self._rows.add((stage, index))
        problem = self._problem
        op = problem.ops[index]
        live: Any = sum(value.size_bytes for value in problem.values if value.kind is Kind.TANGENT)
        if op.side is Side.BACKWARD:
            live += op.workspace_bytes
        else:
            live += (op.workspace_bytes + op.rerun_bytes) * self._again[index, stage]
        live += sum(self._size[value] for value in problem.forward_outputs if problem.values[value].producer is not None)
        for value in self._late:
            made = self._stage[self._producer(value)]
            last = max([made, *(self._stage[reader] for reader in self._readers[value])])
            begins = made <= stage if op.side is Side.BACKWARD else made < stage
            if begins and (value in problem.gradients or last >= stage):
                live += self._size[value]
        for value in self._candidates:
            if self._size[value]:
                live += self._size[value] * self._is_live(value, stage, index)
        self._model += pulp.LpAffineExpression(live) <= self._room

    def _is_live(self, value: int, stage: int, index: int) -> Any:
        """1 if a copy of a candidate is there and will still be read; that of an output which the caller holds is counted elsewhere."""
        producer = self._producer(value)
        made = self._ran(producer, stage, index)
        there = made if value in self._problem.forward_outputs else made + self._saved[value]
        direct = [self._stage[reader] for reader in self._readers[value] if reader in self._stage]
        if value in self._problem.gradients or max(direct, default=-1) >= stage:
            return there
        live = self._variable(binary=False)
        if (producer, stage) in self._again and producer == index:
            self._model += live >= self._again[producer, stage]
        for reader in self._readers[value]:
            left = [
                self._again[reader, at]
                for at in self._stages_of[reader]
                if at > stage or (at == stage and self._problem.ops[index].side is not Side.BACKWARD and reader >= index)
            ]
            if left:
                self._model += live >= there + pulp.lpSum(left) - 1
        return live
