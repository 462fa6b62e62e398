"""The simulator against replays that are written to be obvious."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from brute_force import naive_replay
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Builder, chain, problems, transformer

from dyngran.passes.carry import with_carried
from dyngran.passes.native.graph import NativeGraph, NativeOutcome, NativeSearch
from dyngran.passes.problem import Kind, Op, Problem, Side, Value
from dyngran.passes.simulate import Simulator


def any_saved(data: st.DataObject, simulator: Simulator) -> frozenset[int]:
    if not simulator.candidates:
        return frozenset()
    return frozenset(data.draw(st.sets(st.sampled_from(simulator.candidates))))


@settings(max_examples=300, deadline=None)
@given(problem=problems(), data=st.data())
def test_the_native_replay_equals_the_timeline(problem: Problem, data: st.DataObject) -> None:
    simulator = Simulator(problem)
    saved = any_saved(data, simulator)
    outcome, timeline = simulator.evaluate(saved), simulator.timeline(saved)
    assert outcome.peak_bytes - problem.total_static_bytes == max(timeline.live_bytes, default=0)
    assert outcome.time_us == pytest.approx(timeline.time_us, abs=1e-5)
    assert outcome.recompute_us == pytest.approx(timeline.recompute_us, abs=1e-5)


def plans_in_a_row(simulator: Simulator, data: st.DataObject) -> list[frozenset[int]]:
    """Plans most of which differ little from the one before."""
    plans = [simulator.default_saved]
    for _ in range(10):
        changed = any_saved(data, simulator) if data.draw(st.integers(0, 4)) == 0 else frozenset(list(any_saved(data, simulator))[:2])
        plans.append(plans[-1] ^ changed)
    return plans


COMPARED = [name for name, _ in NativeOutcome._fields_ if name != "work"]


@settings(max_examples=300, deadline=None)
@given(problem=problems(), segment_ops=st.integers(1, 6), data=st.data())
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


@pytest.mark.parametrize("fused", [False, True])
def test_of_a_long_graph_little_is_replayed_for_a_small_change(fused: bool) -> None:
    problem = transformer(40, fused=fused)
    simulator = Simulator(problem)
    moving = NativeSearch(simulator.native_graph)
    saved, rng = simulator.default_saved, Random(0)
    _, whole = moving.evaluate(moving.mask(saved))
    work = 0
    for _ in range(50):
        saved = saved ^ {rng.choice(simulator.candidates)}
        mask = moving.mask(saved)
        _, outcome = moving.evaluate(mask)
        _, fresh = NativeSearch(simulator.native_graph).evaluate(mask)
        assert [getattr(outcome, name) for name in COMPARED] == [getattr(fresh, name) for name in COMPARED]
        work += outcome.work
    assert work < 50 * whole.work / 4


def test_a_nest_that_moves_away_leaves_the_ops_that_it_does_not_feed_a_nest_of_their_own() -> None:
    build, unit = Builder(fused=True), 1 << 20
    source, weight = build.given(unit, Kind.INPUT), build.given(64)
    product = build.op([source, weight], unit, target="mm")
    build.outputs.add(build.op([product, weight], unit, target="mm"))
    tangent = build.given(unit, Kind.TANGENT)
    gradient = build.op([tangent, product], unit, side=Side.BACKWARD, target="mm")
    for _ in range(70):  # further than a nest reaches
        gradient = build.op([gradient, weight], unit, side=Side.BACKWARD, target="mm")
    feeds = build.op([product, tangent], unit, side=Side.BACKWARD, target="mul", fusible=True)  # as deep as `product` is made
    apart = build.op([tangent, source], unit, side=Side.BACKWARD, target="mul", fusible=True)
    build.gradients.update((gradient, feeds, apart))
    problem = build.build()
    graph = NativeGraph(problem, segment_ops=1)
    moving = NativeSearch(graph)
    times = []
    for saved in ({product}, set(), {product}):
        _, outcome = moving.evaluate(moving.mask(saved))
        _, fresh = NativeSearch(graph).evaluate(moving.mask(saved))
        assert outcome.time_us == fresh.time_us
        times.append(outcome.time_us)
    again_us = 1.0
    assert times[1] == pytest.approx(times[0] + again_us + problem.launch_us + unit / problem.bytes_per_us)  # a launch and a load more


def residual_stream(num_layers: int) -> tuple[Problem, list[int], list[int]]:
    """Layers ``x = x + mm(center(x))``, fused: the problem, the sums, the products."""
    build, unit = Builder(fused=True), 1 << 20
    stream, weight = build.given(unit, Kind.INPUT), build.given(64)
    sums, products, centered = [], [], []
    for _ in range(num_layers):
        centered.append(build.op([stream], unit, target="center", fusible=True))
        products.append(build.op([centered[-1], weight], unit, target="mm"))
        stream = build.op([stream, products[-1]], unit, target="add", fusible=True)
        sums.append(stream)
    gradient = build.given(unit, Kind.TANGENT)
    for value in reversed(centered):
        build.gradients.add(build.op([gradient, value], 64, side=Side.BACKWARD, target="mm"))
        gradient = build.op([gradient, weight], unit, side=Side.BACKWARD, target="mm")
    build.outputs.add(stream)
    return build.build(), sums, products


def test_sums_of_a_residual_stream_that_backward_makes_again_are_written_and_wait_for_their_layer() -> None:
    """As in Inductor's code (2.11, 2.13) for a ViT whose branches are saved: a fourth of the sums, where the first of them is needed."""
    problem, sums, products = residual_stream(60)
    simulator = Simulator(problem)
    saved = simulator.normalize(set(products) & set(simulator.candidates))
    timeline = simulator.timeline(saved)
    place = {name: position for position, name in enumerate(timeline.names) if position >= timeline.num_forward}
    written = [
        place[problem.ops[op].name]
        for value in sums[:-1]
        if (op := problem.values[value].producer) is not None and problem.ops[op].name in place
    ]
    assert 5 <= len(written) <= 15
    assert max(written) < timeline.num_forward + 20
    assert simulator.evaluate(saved).peak_bytes - problem.total_static_bytes == max(timeline.live_bytes)
    for seed in range(20):
        some = [value for value in simulator.candidates if Random(seed * 10_000 + value).random() < 0.5]
        assert simulator.evaluate(some).peak_bytes - problem.total_static_bytes == max(simulator.timeline(some).live_bytes)


@settings(max_examples=100, deadline=None)
@given(problem=problems(fused=False), data=st.data())
def test_working_bytes_are_live_under_every_plan(problem: Problem, data: st.DataObject) -> None:
    simulator = Simulator(problem)
    curve = simulator.native.curve(simulator.native.mask(any_saved(data, simulator)))
    live = list(zip(curve.ops, curve.live_bytes, strict=True))
    in_forward, in_backward = simulator.working_bytes()
    for least, seen in ((in_forward, live[: curve.num_forward]), (in_backward, live[curve.num_forward :])):
        found = dict(seen)
        own = [(op, num_bytes) for op, num_bytes in least if op in found and problem.ops[op].side is not Side.FREE]
        assert all(num_bytes <= found[op] for op, num_bytes in own)


@settings(max_examples=300, deadline=None)
@given(problem=problems(fused=False), data=st.data())
def test_without_fusion_peak_and_time_equal_a_naive_replay(problem: Problem, data: st.DataObject) -> None:
    simulator = Simulator(problem)
    saved = any_saved(data, simulator)
    outcome = simulator.evaluate(saved)
    truth = naive_replay(problem, saved)
    assert outcome.peak_bytes == truth.peak_bytes
    assert outcome.time_us == pytest.approx(truth.time_us)
    assert outcome.num_recomputed == truth.num_recomputed


@settings(max_examples=100, deadline=None)
@given(problem=problems(fused=False), carried_bytes=st.integers(0, 8), data=st.data())
def test_what_is_carried_from_the_step_before_lies_on_all_of_forward(problem: Problem, carried_bytes: int, data: st.DataObject) -> None:
    simulator, carrying = Simulator(problem), Simulator(with_carried(problem, carried_bytes))
    saved = any_saved(data, simulator)
    assert carrying.candidates == simulator.candidates
    timeline = simulator.timeline(saved)
    in_forward = max(timeline.live_bytes[: timeline.num_forward], default=0) + carried_bytes
    in_backward = max(timeline.live_bytes[timeline.num_forward :], default=0)
    outcome = carrying.evaluate(saved)
    assert outcome.peak_bytes == problem.total_static_bytes + max(in_forward, in_backward)
    assert outcome.peak_bytes == naive_replay(carrying.problem, saved).peak_bytes
    assert outcome.time_us == simulator.evaluate(saved).time_us


@pytest.mark.parametrize("fused", [False, True])
def test_the_native_replay_equals_the_timeline_on_a_transformer(fused: bool) -> None:
    problem = transformer(3, fused=fused)
    simulator = Simulator(problem)
    for saved in (simulator.default_saved, frozenset(), frozenset(sorted(simulator.candidates)[::3]), frozenset(simulator.candidates)):
        outcome, timeline = simulator.evaluate(saved), simulator.timeline(saved)
        assert outcome.peak_bytes - problem.total_static_bytes == max(timeline.live_bytes)
        assert outcome.time_us == pytest.approx(timeline.time_us)
        assert sum(dict(timeline.live_at_peak).values()) + timeline.workspace_at_peak_bytes >= max(timeline.live_bytes)


@settings(max_examples=100, deadline=None)
@given(problem=problems(), data=st.data())
def test_normalizing_twice_changes_nothing_and_saves_no_more_than_asked(problem: Problem, data: st.DataObject) -> None:
    simulator = Simulator(problem)
    saved = any_saved(data, simulator)
    crossing = simulator.normalize(saved)
    assert simulator.normalize(crossing) == crossing
    forced = {v for v in crossing - saved if not problem.ops[problem.values[v].producer].pinned}  # type: ignore[index]
    assert all(problem.values[v].size_bytes <= problem.keep_below_bytes for v in forced)


@settings(max_examples=100, deadline=None)
@given(problem=problems(), data=st.data())
def test_what_is_never_saved_crosses_only_if_it_must_not_run_twice(problem: Problem, data: st.DataObject) -> None:
    simulator = Simulator(problem)
    for saved in (any_saved(data, simulator), frozenset(simulator.candidates), simulator.default_saved):
        makers = [problem.ops[problem.values[value].producer] for value in simulator.normalize(saved)]  # type: ignore[index]  # not an input
        assert all(op.pinned or not op.never_saved for op in makers)


def test_a_chain_whose_links_are_the_users_saves_what_stands_before_them() -> None:
    problem = chain(16)
    ops = [replace(op, never_saved=4 <= op.index < 8) for op in problem.ops]
    simulator = Simulator(replace(problem, ops=tuple(ops)))
    assert simulator.default_saved == frozenset(op.writes[0] for op in ops[:15] if not op.never_saved)
    assert simulator.evaluate(simulator.default_saved).recompute_us == 4


def test_a_chain_saved_whole_costs_one_byte_a_link_and_saved_nothing_costs_the_same() -> None:
    problem = chain(16)
    simulator = Simulator(problem)
    everything, nothing = simulator.evaluate(simulator.default_saved), simulator.evaluate(frozenset())
    assert everything.peak_bytes == 16 - 1 + 1  # links 1..15 are read by backward, and link 16 lives while the loss reads it
    assert nothing.peak_bytes == 15
    assert everything.recompute_us == 0
    assert nothing.recompute_us == 15


def test_a_chain_kept_at_every_fourth_link_peaks_at_two_square_roots() -> None:
    problem = chain(16)
    simulator = Simulator(problem)
    links = [op.writes[0] for op in problem.ops[:16]]
    outcome = simulator.evaluate(frozenset(links[3:15:4]))
    assert outcome.peak_bytes == 3 + 3  # three kept links and the three of the last part that are made again
    assert outcome.recompute_us == 12


def test_a_saved_sibling_that_an_op_makes_again_first_in_backward_is_not_loaded_for_nothing() -> None:
    def op(index: int, side: Side, reads: tuple[int, ...], writes: tuple[int, ...], num_elements: int, *, reduction: bool = False) -> Op:
        return Op(
            index=index,
            name=f"op_{index}",
            target="t",
            side=side,
            reads=reads,
            writes=writes,
            cost_us=1.0,
            fusible=True,
            reduction=reduction,
            num_elements=num_elements,
        )

    kinds = (Kind.INPUT, Kind.ACTIVATION, Kind.ACTIVATION, Kind.TANGENT, Kind.GRADIENT, Kind.GRADIENT)
    made_by = (None, 0, 0, None, 1, 2)
    problem = Problem(
        values=tuple(
            Value(index=index, name=f"value_{index}", size_bytes=8, kind=kind, producer=producer)
            for index, (kind, producer) in enumerate(zip(kinds, made_by, strict=True))
        ),
        ops=(
            op(0, Side.FORWARD, (0,), (1, 2), 9, reduction=True),
            op(1, Side.BACKWARD, (3, 2), (4,), 8),
            op(2, Side.BACKWARD, (3, 1, 4), (5,), 9),
        ),
        forward_outputs=frozenset(),
        gradients=frozenset({4, 5}),
        fused=True,
        bytes_per_us=2.0,
    )
    simulator = Simulator(problem)
    for saved in ((), (1,), (2,), (1, 2)):
        assert simulator.evaluate(saved).time_us == simulator.timeline(saved).time_us


def test_what_crosses_to_a_backward_that_runs_nothing_has_a_timeline() -> None:
    build = Builder(fused=True)
    made = build.op([build.given(8, Kind.INPUT)], 8)
    build.outputs.add(build.op([made], 8))
    build.op([build.given(8, Kind.TANGENT), made], 8, side=Side.BACKWARD, fusible=True)  # nobody reads it: no kernel
    simulator = Simulator(build.build())
    outcome = simulator.evaluate(simulator.default_saved)
    assert max(simulator.timeline(simulator.default_saved).live_bytes) == outcome.peak_bytes - simulator.problem.total_static_bytes
