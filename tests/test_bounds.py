"""Lower bounds against the truth: every saved set, and every schedule of very small problems."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

import pytest
from brute_force import best_time, every_plan
from exact_program import exact_optimum
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import chain, conv_net, layered, problems, transformer, unet

from dyngran.passes.bounds import RELAXATION, lower_bound
from dyngran.passes.errors import BudgetTooSmall
from dyngran.passes.plan import Plan, Schedule
from dyngran.passes.problem import Kind, Op, Problem, Side
from dyngran.passes.schedule import check_schedule, replay_schedule
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers import exhaustive
from dyngran.passes.solvers.portfolio import SOLVERS, Planner

SLOW = [HealthCheck.too_slow]


class EverySchedule:
    """The fastest schedule of a problem without fusion, of all there are: shortest paths (Dijkstra 1959) over what is in memory.

    A state is (ops that ran, values in memory, is it backward, backward ops that ran); a step runs an op, forgets a value, or begins
    backward. For ops of one result, of which no second copy is ever of use.
    """

    def __init__(self, problem: Problem, budget_bytes: int) -> None:
        self._problem = problem
        self._room = budget_bytes - problem.total_static_bytes
        self._size = [0 if value.kind.is_static else value.size_bytes for value in problem.values]
        self._given = frozenset(value.index for value in problem.values if value.producer is None)
        self._must = frozenset(op.index for op in problem.ops if op.side is Side.FORWARD)
        self._late = frozenset(op.index for op in problem.ops if op.side is Side.BACKWARD)
        self._outputs = problem.forward_outputs - self._given
        self._hidden = frozenset(write for op in problem.ops if op.never_saved and not op.pinned for write in op.writes)
        self._base = sum(value.size_bytes for value in problem.values if value.kind is Kind.TANGENT)
        self._base += sum(self._size[value] for value in self._outputs)

    def best(self) -> tuple[float, Schedule] | None:
        """Time (us) and schedule; None if nothing fits."""
        ticket = count()
        queue = [(0.0, next(ticket), frozenset[int](), frozenset[int](), False, (), ())]
        done = set()
        while queue:
            time_us, _, ran, live, is_backward, forward, backward = heappop(queue)
            if (ran, live, is_backward) in done:
                continue
            done.add((ran, live, is_backward))
            if is_backward and self._late <= ran and self._problem.gradients <= live | self._given:
                return time_us, Schedule(forward, backward)
            for cost_us, *state in self._steps(ran, live, is_backward, forward, backward):
                if tuple(state[:3]) not in done:
                    heappush(queue, (time_us + cost_us, next(ticket), *state))
        return None

    def _steps(self, ran, live, is_backward, forward, backward) -> Iterator[tuple]:
        for value in live:
            if not (is_backward and value in self._outputs - self._hidden):
                yield 0.0, ran, live - {value}, is_backward, forward, backward
        if not is_backward and self._must <= ran and self._outputs <= live:
            yield 0.0, ran, live - self._hidden, True, forward, backward
        for op in self._problem.ops:
            if (op.side is Side.BACKWARD and not is_backward) or (op.pinned and op.index in ran):
                continue
            if live.issuperset(op.writes) or not live.issuperset(set(op.reads) - self._given):
                continue
            held = live - (self._outputs - self._hidden) if is_backward else live
            num_bytes = sum(self._size[value] for value in held | set(op.writes)) + (self._base if is_backward else 0)
            if num_bytes + op.workspace_bytes <= self._room:
                places = (forward, (*backward, op.index)) if is_backward else ((*forward, op.index), backward)
                yield op.cost_us, ran | {op.index}, live | set(op.writes), is_backward, *places
