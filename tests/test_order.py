"""Annealed orders against the best order there is: a search through every state that a step can be in."""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dyngran.passes.plan import Schedule
from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.schedule import check_schedule, replay_schedule
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.order import anneal_order
from tests.problems import Builder, chain, problems, transformer

State = tuple[bool, frozenset[int], frozenset[int]]  # in backward?, ops that ran, values in memory


def best_cost(problem: Problem, budget_bytes: int) -> float | None:
    """The least time of any schedule within the budget, by Dijkstra over what ran and what is in memory; None if there is none.

    Exponential: for problems of about ten ops, each with one result.
    """
    sizes = [0 if value.kind.is_static else value.size_bytes for value in problem.values]
    given_values = frozenset(value.index for value in problem.values if value.producer is None)
    tangent_bytes = sum(value.size_bytes for value in problem.values if value.kind is Kind.TANGENT)
    room = budget_bytes - problem.total_static_bytes
    recomputed_only = {write for op in problem.ops if op.never_saved and not op.pinned for write in op.writes}
    forward_outputs = frozenset(problem.forward_outputs - given_values)
    gradients = problem.gradients - given_values
    must_forward = frozenset(op.index for op in problem.ops if op.side is Side.FORWARD)
    must_run = frozenset(op.index for op in problem.ops if op.side is not Side.FREE)

    def successors(state: State) -> list[tuple[float, State]]:
        late, ran, memory = state
        held = forward_outputs if late else frozenset()
        found: list[tuple[float, State]] = [(0.0, (late, ran, memory - {value})) for value in memory - held]
        if not late and must_forward <= ran and forward_outputs <= memory:
            found.append((0.0, (True, ran, memory - (recomputed_only - forward_outputs))))
        hidden = recomputed_only & forward_outputs if late else frozenset()  # held, but not to be read
        readable = (memory - hidden) | given_values
        for op in problem.ops:
            if (op.side is Side.BACKWARD and not late) or (op.pinned and op.index in ran) or not set(op.reads) <= readable:
                continue
            write = op.writes[0]
            if write in memory and write not in hidden:
                continue
            live = sum(sizes[value] for value in memory) + sizes[write] + op.workspace_bytes
            if late:
                live += tangent_bytes + (op.rerun_bytes if op.index in ran else 0)
            if live <= room and write not in hidden:
                found.append((op.cost_us, (late, ran | {op.index}, memory | {write})))
        return found

    start: State = (False, frozenset(), frozenset())
    ticket = count()
    queue = [(0.0, next(ticket), start)]
    done: set[State] = set()
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        if state[0] and must_run <= state[1] and gradients <= state[2]:
            return cost
        for step, following in successors(state):
            if following not in done:
                heapq.heappush(queue, (cost + step, next(ticket), following))
    return None


def default_schedule(problem: Problem) -> Schedule:
    simulator = Simulator(problem)
    forward, backward = simulator.schedule(simulator.default_saved)
    return Schedule(tuple(forward), tuple(backward), simulator.default_saved)


def annealed(problem: Problem, budget_bytes: int, *, num_moves: int = 5_000, seed: int = 0) -> tuple[Schedule, int, float]:
    found, _ = anneal_order(problem, budget_bytes, default_schedule(problem), num_moves=num_moves, seed=seed)
    outcome = replay_schedule(problem, found)
    return found, outcome.peak_bytes, outcome.time_us


@settings(max_examples=60)
@given(problem=problems(max_forward=4, fused=False), budget_bytes=st.integers(0, 40))
def test_what_fits_is_never_better_than_the_best_order(problem: Problem, budget_bytes: int) -> None:
    if any(problem.ops[problem.values[v].producer or 0].never_saved for v in problem.forward_outputs):
        return  # a copy that is held and another that is read: the search above does not know two copies
    if any(problem.values[v].producer is None for v in problem.gradients):
        return
    found, peak_bytes, time_us = annealed(problem, budget_bytes, num_moves=2_000)
    check_schedule(problem, found)
    best = best_cost(problem, budget_bytes)
    if peak_bytes <= budget_bytes:
        assert best is not None and time_us >= best


def test_small_problems_are_solved() -> None:
    problem = transformer(1, width_bytes=1024)
    del problem


@pytest.mark.parametrize(("length", "budget_bytes"), [(4, 2), (5, 2), (6, 3), (7, 2), (7, 3), (7, 4)])
def test_a_chain_is_reversed_as_cheaply_as_possible(length: int, budget_bytes: int) -> None:
    problem = chain(length)
    best = best_cost(problem, budget_bytes)
    _, peak_bytes, time_us = annealed(problem, budget_bytes)
    assert peak_bytes <= budget_bytes and time_us == best


def test_values_are_made_more_than_twice_where_that_is_the_only_way() -> None:
    problem = chain(8)
    found, peak_bytes, _ = annealed(problem, 2)
    assert peak_bytes == 2
    assert max((*found.forward, *found.backward).count(op) for op in range(8)) > 2
