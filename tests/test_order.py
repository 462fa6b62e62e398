"""Annealed orders against the best order there is: a search through every state that a step can be in."""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Builder, chain, problems, transformer

from dyngran.passes.plan import Schedule
from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.schedule import check_schedule, replay_schedule
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.order import anneal_order

State = tuple[bool, frozenset[int], frozenset[int]]  # in backward?, ops that ran, values in memory


def best_cost(problem: Problem, budget_bytes: int) -> float | None:
    """The least time of any schedule within the budget, by Dijkstra over what ran and what is in memory; None if there is none.

    Exponential: for problems of about ten ops, each with one result; forward outputs must be such as may be saved.
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
            found.append((0.0, (True, ran, memory - recomputed_only)))
        readable = memory | given_values
        for op in problem.ops:
            if (op.side is Side.BACKWARD and not late) or (op.pinned and op.index in ran) or not set(op.reads) <= readable:
                continue
            write = op.writes[0]
            if write in memory:
                continue
            live = sum(sizes[value] for value in memory) + sizes[write] + op.workspace_bytes
            if late:
                live += tangent_bytes + (op.rerun_bytes if op.index in ran else 0)
            if live <= room:
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


def is_for_the_oracle(problem: Problem) -> bool:
    """False where one value has two copies at once (a forward output that is never saved), or an input is returned as a gradient."""
    makers = [problem.values[value].producer for value in problem.forward_outputs]
    return not any(problem.ops[maker].never_saved for maker in makers if maker is not None) and all(
        problem.values[value].producer is not None for value in problem.gradients
    )


@settings(max_examples=80)
@given(problem=problems(max_forward=4, fused=False), share=st.integers(0, 12))
def test_what_fits_is_never_better_than_the_best_order(problem: Problem, share: int) -> None:
    start = default_schedule(problem)
    free = replay_schedule(problem, start)
    budget_bytes = free.peak_bytes * (12 - share) // 12
    found, peak_bytes, time_us = annealed(problem, budget_bytes)
    check_schedule(problem, found)
    if free.peak_bytes <= budget_bytes:
        assert peak_bytes <= budget_bytes and time_us <= free.time_us
    assert peak_bytes <= max(free.peak_bytes, budget_bytes)
    if is_for_the_oracle(problem) and peak_bytes <= budget_bytes:
        best = best_cost(problem, budget_bytes)
        assert best is not None and time_us >= best


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


def wide(width: int) -> Problem:
    """One value that many ops read, whose results are joined two by two."""
    build = Builder()
    root = build.op([build.given(0, Kind.INPUT)], 3)
    level = [build.op([root], 1 + place % 3) for place in range(width)]
    while len(level) > 1:
        level = [build.op(level[place : place + 2], 1) for place in range(0, len(level), 2)]
    build.outputs.add(level[0])
    return build.build()


def diamonds(count_of: int, size_bytes: int) -> Problem:
    """Diamonds in a row; the backward reads every corner."""
    build = Builder()
    current = build.op([build.given(0, Kind.INPUT)], size_bytes)
    corners = []
    for _ in range(count_of):
        left, right = build.op([current], size_bytes), build.op([current], size_bytes)
        current = build.op([left, right], size_bytes)
        corners += [left, right, current]
    build.outputs.add(build.op([current], 0, target="loss"))
    gradient = build.given(0, Kind.TANGENT)
    for corner in reversed(corners):
        gradient = build.op([corner, gradient], size_bytes, side=Side.BACKWARD, kind=Kind.TEMPORARY)
    build.gradients.add(gradient)
    return build.build()


def giant() -> Problem:
    """A chain with one value a million times as large as the others."""
    problem = chain(12)
    values = tuple(replace(value, size_bytes=10**6) if value.index == 5 else value for value in problem.values)
    return replace(problem, values=values)


@pytest.mark.parametrize(
    "problem",
    [wide(200), diamonds(20, 1), diamonds(20, 0), giant(), replace(chain(5), ops=tuple(replace(op, cost_us=0.0) for op in chain(5).ops))],
    ids=["fan-out", "diamonds", "zero sizes", "one giant value", "zero costs"],
)
@pytest.mark.parametrize("fraction", [0.0, 0.4, 0.8])
def test_awkward_graphs_end(problem: Problem, fraction: float) -> None:
    start = (
        default_schedule(problem) if any(op.side is Side.BACKWARD for op in problem.ops) else Schedule(tuple(range(len(problem.ops))), ())
    )
    before = replay_schedule(problem, start)
    found, truncated = anneal_order(problem, int(fraction * before.peak_bytes), start, num_moves=6_000, max_seconds=60.0)
    after = replay_schedule(problem, found)
    check_schedule(problem, found)
    assert not truncated
    assert after.peak_bytes <= before.peak_bytes


def test_order_alone_lowers_a_peak_for_nothing() -> None:
    problem = wide(64)
    start = Schedule(tuple(range(len(problem.ops))), ())
    before = replay_schedule(problem, start)
    found, _ = anneal_order(problem, before.peak_bytes // 3, start)
    after = replay_schedule(problem, found)
    assert after.peak_bytes <= before.peak_bytes // 3
    assert (after.time_us, after.num_recomputed) == (before.time_us, 0)


def test_the_same_seed_gives_the_same_schedule() -> None:
    problem = transformer(2)
    start = default_schedule(problem)
    budget_bytes = problem.total_static_bytes + (replay_schedule(problem, start).peak_bytes - problem.total_static_bytes) // 2
    first, second = (anneal_order(problem, budget_bytes, start, num_moves=10_000, seed=3)[0] for _ in range(2))
    assert first == second
    assert replay_schedule(problem, first).peak_bytes <= budget_bytes


def test_a_good_start_is_never_made_worse() -> None:
    problem = transformer(2)
    simulator = Simulator(problem)
    saved = simulator.normalize(simulator.candidates[::2])
    outcome = simulator.evaluate(saved)
    forward, backward = simulator.schedule(saved)
    found, _ = anneal_order(problem, outcome.peak_bytes, Schedule(tuple(forward), tuple(backward), saved), num_moves=10_000)
    after = replay_schedule(problem, found)
    assert after.peak_bytes <= outcome.peak_bytes and after.time_us <= outcome.time_us


def test_pinned_ops_and_user_checkpoints_are_respected() -> None:
    problem = chain(6)
    ops = list(problem.ops)
    ops[2] = replace(ops[2], pinned="random")
    ops[3] = replace(ops[3], never_saved=True)
    guarded = replace(problem, ops=tuple(ops))
    for budget_bytes in range(1, 7):
        found, _, _ = annealed(guarded, budget_bytes, num_moves=4_000)
        check_schedule(guarded, found)
        assert (*found.forward, *found.backward).count(2) == 1


def _interrupt() -> bool:
    raise KeyboardInterrupt


@pytest.mark.parametrize("options", [{"should_stop": lambda: True}, {"max_seconds": 0.0}, {"should_stop": _interrupt}])
def test_a_search_that_is_stopped_returns_what_it_has(options: dict[str, Any]) -> None:
    problem = chain(8)
    found, truncated = anneal_order(problem, 3, default_schedule(problem), **options)
    check_schedule(problem, found)
    assert truncated


def test_problems_whose_code_generator_fuses_are_refused() -> None:
    problem = chain(3)
    with pytest.raises(ValueError, match="fused=False"):
        anneal_order(replace(problem, fused=True), 3, default_schedule(problem))
