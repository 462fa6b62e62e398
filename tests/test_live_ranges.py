"""Live ranges add up to the timelines that they are drawn beside, byte for byte."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import chain, problems, transformer
from test_schedule import schedules, with_siblings

from dyngran.passes.live_ranges import LiveStep, live_step, live_step_of_schedule
from dyngran.passes.plan import Schedule
from dyngran.passes.problem import Kind, Problem
from dyngran.passes.schedule import schedule_timeline
from dyngran.passes.simulate import Simulator, Timeline


def check_adds_up(problem: Problem, step: LiveStep, timeline: Timeline) -> None:
    assert step.live_bytes == list(timeline.live_bytes)
    assert tuple(problem.ops[op].name for op in step.ops) == timeline.names
    assert step.num_forward == timeline.num_forward
    assert sum(step.costs_us) == pytest.approx(timeline.time_us)
    again_us = sum(cost_us for cost_us, is_again in zip(step.costs_us, step.is_again, strict=True) if is_again)
    assert again_us == pytest.approx(timeline.recompute_us)
    assert all(0 <= one.first <= one.last < len(step.ops) and one.size_bytes > 0 for one in step.ranges)


@given(problem=problems(), data=st.data())
def test_ranges_of_a_saved_set_add_up(problem: Problem, data: st.DataObject) -> None:
    simulator = Simulator(problem)
    saved = data.draw(st.sets(st.sampled_from(range(len(problem.values)))))
    check_adds_up(problem, live_step(simulator, saved), simulator.timeline(saved))


@given(problem=with_siblings(), fused=st.booleans(), data=st.data())
def test_ranges_of_siblings_add_up(problem: Problem, fused: bool, data: st.DataObject) -> None:
    simulator = Simulator(replace(problem, fused=fused))
    saved = data.draw(st.sets(st.sampled_from(range(len(problem.values)))))
    check_adds_up(problem, live_step(simulator, saved), simulator.timeline(saved))


@given(problem=with_siblings(), data=st.data())
def test_ranges_of_a_schedule_add_up(problem: Problem, data: st.DataObject) -> None:
    schedule = data.draw(schedules(problem))
    try:
        timeline = schedule_timeline(problem, schedule)
    except ValueError:  # an op put where its operands are not yet made
        return
    check_adds_up(problem, live_step_of_schedule(problem, schedule), timeline)


def test_a_transformer_whose_kernels_write_in_place_adds_up() -> None:
    simulator = Simulator(transformer(2, fused=True))
    for saved in (simulator.default_saved, frozenset[int](), frozenset(simulator.candidates[::3])):
        timeline, step = simulator.timeline(saved), live_step(simulator, saved)
        check_adds_up(simulator.problem, step, timeline)
        by_kind = {kind: sum(sizes) for kind, sizes in timeline.by_kind.items()}
        assert sum(by_kind.values()) > sum(timeline.live_bytes), "some operand is written over, or this shows nothing"


def test_what_is_made_again_has_two_ranges() -> None:
    problem = chain(3)
    first = 1
    step = live_step(Simulator(problem), ())
    assert [(one.first, one.last) for one in step.ranges if one.value == first] == [(0, 1), (4, 7)], (
        "made at 4 for mm_1, and read by the last grad"
    )
    assert [problem.ops[op].name for op, is_again in zip(step.ops, step.is_again, strict=True) if is_again] == ["mm_0", "mm_1"]


def test_tangents_are_live_over_all_of_backward() -> None:
    problem = chain(2)
    values = tuple(replace(value, size_bytes=7) if value.kind is Kind.TANGENT else value for value in problem.values)
    problem = replace(problem, values=values)
    simulator = Simulator(problem)
    forward, backward = simulator.schedule(simulator.default_saved)
    schedule = Schedule(tuple(forward), tuple(backward), simulator.default_saved)
    for step in (live_step(simulator, simulator.default_saved), live_step_of_schedule(problem, schedule)):
        assert [(one.first, one.last) for one in step.ranges if one.size_bytes == 7] == [(3, 4)]
