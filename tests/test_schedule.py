"""Replay of schedules against a replay that keeps no books, and against the simulator for every saved set."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import Builder, chain, problems, transformer

from dyngran.passes.plan import Schedule
from dyngran.passes.problem import Kind, Op, Problem, Side, Value
from dyngran.passes.schedule import check_schedule, replay_schedule
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.order import held_outputs


def naive_peak_bytes(problem: Problem, schedule: Schedule) -> int:
    """At every position, look ahead through all that is still to run for who reads each copy that exists."""
    order = (*schedule.forward, *schedule.backward)
    num_forward = len(schedule.forward)
    copies = [(value, position) for position, index in enumerate(order) for value in problem.ops[index].writes]

    def newest(value: int, end: int) -> int:
        return max((first for made, first in copies if made == value and first < end), default=-1)

    def source(value: int, position: int) -> int:
        crossed = newest(value, num_forward)
        if position >= num_forward and value in schedule.saved and crossed >= 0:
            return crossed
        return newest(value, position)

    def is_live(value: int, first: int, position: int) -> bool:
        if first == position:
            return True
        if first > position:
            return False
        if value in problem.forward_outputs and first == newest(value, num_forward):
            return True
        if value in problem.gradients and first == source(value, len(order)):
            return True
        readers = [late for late in range(position, len(order)) if value in problem.ops[order[late]].reads]
        return any(source(value, late) == first for late in readers)

    peak = 0
    for position, index in enumerate(order):
        live = [value for value, first in copies if is_live(value, first, position)]
        if position >= num_forward:
            live += [value.index for value in problem.values if value.kind is Kind.TANGENT]
        op = problem.ops[index]
        bytes_now = sum(problem.values[value].size_bytes for value in live if not problem.values[value].kind.is_static)
        bytes_now += op.workspace_bytes + (op.rerun_bytes if index in order[:position] else 0)
        peak = max(peak, bytes_now)
    return problem.total_static_bytes + peak


@st.composite
def with_siblings(draw: st.DrawFn) -> Problem:
    """An unfused problem, some of whose ops make a second result that later ops read as well, some holding bytes when they run again."""
    problem = draw(problems(fused=False))
    values, ops = list(problem.values), list(problem.ops)
    for index in range(len(ops)):
        op = replace(ops[index], rerun_bytes=draw(st.sampled_from([0, 0, 3])))
        ops[index] = op
        if op.side is Side.BACKWARD or not draw(st.booleans()):
            continue
        sibling = len(values)
        values.append(
            Value(index=sibling, name=f"sibling_{sibling}", size_bytes=draw(st.integers(0, 6)), kind=Kind.ACTIVATION, producer=index)
        )
        ops[index] = replace(op, writes=(*op.writes, sibling))
        for reader in range(index + 1, len(ops)):
            if draw(st.booleans()):
                ops[reader] = replace(ops[reader], reads=(*ops[reader].reads, sibling))
    return replace(problem, values=tuple(values), ops=tuple(ops))


@st.composite
def schedules(draw: st.DrawFn, problem: Problem) -> Schedule:
    """A schedule of the simulator's with further runs put in where they may stand."""
    simulator = Simulator(problem)
    saved = simulator.normalize(draw(st.sets(st.sampled_from(range(len(problem.values))))))
    forward, backward = simulator.schedule(saved)
    for _ in range(draw(st.integers(0, 4))):
        op = draw(st.sampled_from([op for op in problem.ops if op.side is not Side.BACKWARD and not op.pinned] or [None]))
        if op is None:
            break
        late = draw(st.booleans())
        part = backward if late else forward
        part.insert(draw(st.integers(0, len(part))), op.index)
    return Schedule(tuple(forward), tuple(backward), draw(st.sampled_from([saved, frozenset()])))


@given(problem=with_siblings(), data=st.data())
def test_the_simulators_schedules_cost_what_the_simulator_says(problem: Problem, data: st.DataObject) -> None:
    simulator = Simulator(problem)
    outcome = simulator.evaluate(data.draw(st.sets(st.sampled_from(range(len(problem.values))))))
    forward, backward = simulator.schedule(outcome.saved)
    schedule = Schedule(tuple(forward), tuple(backward), outcome.saved)
    check_schedule(problem, schedule)
    replayed = replay_schedule(problem, schedule)
    assert (replayed.peak_bytes, replayed.time_us, replayed.num_recomputed) == (outcome.peak_bytes, outcome.time_us, outcome.num_recomputed)
    assert (replayed.saved, replayed.saved_bytes) == (outcome.saved, outcome.saved_bytes)
    assert replayed.recompute_us == pytest.approx(outcome.recompute_us)
    newest = Schedule(tuple(forward), tuple(backward), held_outputs(problem))
    assert replay_schedule(problem, newest).peak_bytes <= outcome.peak_bytes


@given(problem=with_siblings(), data=st.data())
def test_the_replay_agrees_with_one_that_looks_ahead(problem: Problem, data: st.DataObject) -> None:
    schedule = data.draw(schedules(problem))
    try:
        replayed = replay_schedule(problem, schedule)
    except ValueError:  # an operand is read before it is made: nothing to compare
        return
    assert replayed.peak_bytes == naive_peak_bytes(problem, schedule)
    order = (*schedule.forward, *schedule.backward)
    assert replayed.time_us == sum(problem.ops[index].cost_us for index in order)
    assert replayed.num_recomputed == len(order) - len(set(order))


def test_a_transformer_costs_what_the_simulator_says() -> None:
    problem = transformer(3)
    simulator = Simulator(problem)
    for saved in (simulator.default_saved, frozenset(), frozenset(simulator.candidates[::3])):
        outcome = simulator.evaluate(saved)
        forward, backward = simulator.schedule(saved)
        replayed = replay_schedule(problem, Schedule(tuple(forward), tuple(backward), outcome.saved))
        assert (replayed.peak_bytes, replayed.time_us) == (outcome.peak_bytes, outcome.time_us)


def test_a_value_made_three_times_is_held_three_times_briefly() -> None:
    problem = chain(3)  # ops 0 1 2 make 1 byte each, 3 is the loss, 4 5 6 read the results of 2 -> 1 -> 0's input
    once = replay_schedule(problem, Schedule((0, 1, 2, 3), (4, 5, 6)))
    assert (once.peak_bytes, once.time_us, once.saved_bytes) == (3, 7.0, 2)
    again = replay_schedule(problem, Schedule((0, 1, 2, 3), (0, 1, 4, 0, 5, 6)))
    assert (again.peak_bytes, again.time_us, again.num_recomputed, again.saved) == (2, 10.0, 3, frozenset())


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule((0, 1, 2, 3), (4, 5)), "must run in backward"),
        (Schedule((0, 1, 2), (4, 5, 6)), "must run in forward"),
        (Schedule((0, 2, 1, 3), (4, 5, 6)), "which nothing has made yet"),
        (Schedule((0, 1, 2, 3, 4), (4, 5, 6)), "cannot run in forward"),
        (Schedule((0, 1, 2, 3), (5, 4, 6)), "which nothing has made yet"),
        (Schedule((0, 1, 2, 3), (4, 5, 6, 9)), "the problem has 7 ops"),
    ],
)
def test_what_cannot_run_is_named(schedule: Schedule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_schedule(chain(3), schedule)


def _guarded(**changes: object) -> Problem:
    problem = chain(3)
    first: Op = replace(problem.ops[0], **changes)
    return replace(problem, ops=(first, *problem.ops[1:]))


def test_pinned_ops_run_once_and_never_saved_values_do_not_cross() -> None:
    with pytest.raises(ValueError, match="must not run twice: random"):
        check_schedule(_guarded(pinned="random"), Schedule((0, 1, 2, 3), (0, 1, 4, 5, 6)))
    with pytest.raises(ValueError, match="never saved"):
        check_schedule(_guarded(never_saved=True), Schedule((0, 1, 2, 3), (4, 5, 6)))
    check_schedule(_guarded(never_saved=True), Schedule((0, 1, 2, 3), (4, 0, 5, 6)))


def test_problems_whose_code_generator_fuses_are_refused() -> None:
    with pytest.raises(ValueError, match="fused=False"):
        replay_schedule(replace(chain(2), fused=True), Schedule((0, 1, 2), (3, 4)))


def test_a_problem_without_backward_is_all_forward() -> None:
    build = Builder()
    source = build.given(0, Kind.INPUT)
    wide = build.op([source], 5)
    build.outputs.add(build.op([wide], 2))
    problem = build.build()
    check_schedule(problem, Schedule((0, 1), ()))
    assert replay_schedule(problem, Schedule((0, 1), ())).peak_bytes == 7
