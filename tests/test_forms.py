"""Forms of storage in a planning problem: what is replayed, and that nothing changes for plans that use none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from brute_force import naive_replay
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Builder, problems, problems_with_forms, storable
from test_simulate import COMPARED, any_saved, plans_in_a_row

from dyngran.passes.forms import (
    Offer,
    Transfer,
    base_ops,
    crossing_values,
    kind_of,
    offers_of,
    with_fewer_forms,
    with_forms,
    without_forms,
)
from dyngran.passes.native.graph import NativeGraph, NativeSearch
from dyngran.passes.plan import Action
from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.simulate import Simulator


@settings(max_examples=400, deadline=None)
@given(problem=problems_with_forms(), data=st.data())
def test_the_native_replay_equals_the_timeline(problem: Problem, data: st.DataObject) -> None:
    simulator = Simulator(problem)
    saved = any_saved(data, simulator)
    outcome, timeline = simulator.evaluate(saved), simulator.timeline(saved)
    assert outcome.peak_bytes - problem.total_static_bytes == max(timeline.live_bytes, default=0)
    assert outcome.time_us == pytest.approx(timeline.time_us, abs=1e-5)
    assert outcome.recompute_us == pytest.approx(timeline.recompute_us, abs=1e-5)


@settings(max_examples=400, deadline=None)
@given(problem=problems_with_forms(), segment_ops=st.integers(1, 6), data=st.data())
def test_what_is_replayed_from_the_plan_before_equals_a_replay_of_the_whole(
    problem: Problem, segment_ops: int, data: st.DataObject
) -> None:
    simulator = Simulator(problem)
    graph = NativeGraph(problem, segment_ops=segment_ops)
    moving = NativeSearch(graph)
    for saved in plans_in_a_row(simulator, data):
        fresh, mask = NativeSearch(graph), moving.mask(saved)
        (crossing, outcome), (fresh_crossing, fresh_outcome) = moving.evaluate(mask), fresh.evaluate(mask)
        assert crossing == fresh_crossing
        assert [getattr(outcome, name) for name in COMPARED] == [getattr(fresh_outcome, name) for name in COMPARED]
        timeline = simulator.timeline(saved)
        assert moving.curve(mask).live_bytes == timeline.live_bytes
        assert outcome.time_us == pytest.approx(timeline.time_us, abs=1e-5)


@settings(max_examples=400, deadline=None)
@given(problem=problems_with_forms(fused=False), data=st.data())
def test_without_fusion_forms_are_replayed_as_the_obvious_replay_does(problem: Problem, data: st.DataObject) -> None:
    simulator = Simulator(problem)
    saved = any_saved(data, simulator)
    outcome, truth = simulator.evaluate(saved), naive_replay(problem, saved)
    assert (outcome.peak_bytes, outcome.num_recomputed) == (truth.peak_bytes, truth.num_recomputed)
    assert outcome.time_us == pytest.approx(truth.time_us)


@settings(max_examples=200, deadline=None)
@given(problem=problems_with_forms(), data=st.data())
def test_a_plan_without_forms_costs_what_it_costs_in_the_problem_without_them(problem: Problem, data: st.DataObject) -> None:
    base = without_forms(problem)
    simulator, plain = Simulator(problem), Simulator(base)
    saved = any_saved(data, plain)
    one, other = simulator.evaluate(saved), plain.evaluate(saved)
    assert replace(one, time_us=0, recompute_us=0) == replace(other, time_us=0, recompute_us=0)
    assert one.time_us == pytest.approx(other.time_us)
    assert frozenset(plain.candidates) == frozenset(simulator.candidates) - problem.form_of.keys()


@settings(max_examples=200, deadline=None)
@given(problem=problems(), data=st.data())
def test_the_problem_without_forms_is_the_one_that_they_were_put_into(problem: Problem, data: st.DataObject) -> None:
    cost = Transfer(cost_us=1.0)
    values = data.draw(st.lists(st.sampled_from(storable(problem)), max_size=4)) if storable(problem) else []
    offers = [Offer(value=value, action=Action.PACK, format="bits", size_bytes=1, store=cost, load=cost) for value in values]
    formed = with_forms(problem, offers)
    assert without_forms(formed) == problem
    assert [formed.ops[index].name for index in base_ops(formed)] == [op.name for op in problem.ops]
    for form, offer in zip(formed.forms, offers, strict=True):
        assert (form.value, formed.ops[form.store].reads) == (offer.value, (offer.value,))
        assert formed.ops[form.store].writes == formed.ops[form.load].reads == (form.stored,)
        assert formed.values[form.stored].producer == form.store
    assert crossing_values(formed, [form.stored for form in formed.forms]) == frozenset(values)


@settings(max_examples=200, deadline=None)
@given(problem=problems_with_forms())
def test_forms_are_read_back_as_they_were_offered(problem: Problem) -> None:
    assert with_forms(without_forms(problem), offers_of(problem)) == problem


@settings(max_examples=200, deadline=None)
@given(problem=problems_with_forms(), errors=st.lists(st.sampled_from(["", "bf16", "int8"]), max_size=4))
def test_fewer_kinds_of_forms_keep_their_numbers(problem: Problem, errors: list[str]) -> None:
    """What a plan saves means the same with one kind less, as long as it names none of that kind."""
    offers = offers_of(problem)
    kinds = [*errors, *([""] * len(offers))][: len(offers)]
    named = [replace(offer, error=kind, format=kind or offer.format) for offer, kind in zip(offers, sorted(kinds), strict=True)]
    formed = with_forms(without_forms(problem), named)
    fewer = with_fewer_forms(formed)
    gone = formed.forms[len(fewer.forms) :]
    assert len({kind_of(form) for form in gone}) == min(1, len(formed.forms))
    assert [(form.value, form.stored, form.format) for form in fewer.forms] == [
        (form.value, form.stored, form.format) for form in formed.forms[: len(fewer.forms)]
    ]
    if fewer.forms and gone:
        assert kind_of(fewer.forms[-1]) != kind_of(gone[0])


@pytest.mark.parametrize("parts", [(3,), (2,)])
def test_a_slice_is_made_of_what_is_there_before_it(parts: tuple[int, ...]) -> None:
    """Neither of a tangent nor of itself."""
    build = Builder()
    given = build.given(1, Kind.INPUT)
    first = build.op([given], 4)
    second = build.op([first], 4)
    tangent = build.given(1, Kind.TANGENT)
    build.gradients.add(build.op([tangent, second], 1, side=Side.BACKWARD))
    cost = Transfer(cost_us=1.0)
    offer = Offer(value=second, action=Action.SLICE, format="rows0_1_of_2", size_bytes=2, store=cost, load=cost, parts=(first,))
    assert with_forms(build.build(), [offer]).forms
    with pytest.raises(ValueError, match="is not there before it"):
        with_forms(build.build(), [replace(offer, parts=parts)])


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_what_the_caller_holds_has_no_forms(problem: Problem) -> None:
    cost = Transfer(cost_us=1.0)
    for value in set(range(len(problem.values))) - set(storable(problem)):
        with pytest.raises(ValueError, match="cannot be stored as bits"):
            with_forms(problem, [Offer(value=value, action=Action.PACK, format="bits", size_bytes=1, store=cost, load=cost)])
