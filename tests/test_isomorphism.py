"""An isomorphism is read op by op by a checker of this file alone; where two graphs have none, networkx says so too."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import Builder, encoder_decoder, layered, problems, transformer, two_towers
from test_fingerprint import isomorphic, renumbered, topological_orders, with_op

from dyngran.passes.fingerprint import fingerprint
from dyngran.passes.isomorphism import Isomorphism, isomorphism
from dyngran.passes.plan import Schedule
from dyngran.passes.problem import Kind, Op, Problem, Side, Value
from dyngran.passes.schedule import replay_schedule
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.anneal import schedule_of

FAR = 100  # ops in a row: farther than the fingerprint looks from one of two twins (64)


def shuffled(problem: Problem, seed: int) -> Problem:
    """Another topological order, other numbers, other names."""
    draw = Random(seed)
    waits = {op.index: {problem.values[read].producer for read in op.reads} - {None} for op in problem.ops}
    after: dict[int, list[int]] = {op.index: [] for op in problem.ops}
    for index, producers in waits.items():
        for producer in producers:
            assert producer is not None
            after[producer].append(index)
    left = {index: len(producers) for index, producers in waits.items()}
    ready = [index for index, count in left.items() if not count]
    order = []
    while ready:
        order.append(ready.pop(draw.randrange(len(ready))))
        for index in after[order[-1]]:
            left[index] -= 1
            if not left[index]:
                ready.append(index)
    return renumbered(problem, order, draw.sample(range(len(problem.values)), len(problem.values)))


def faults(first: Problem, second: Problem, found: Isomorphism) -> list[str]:
    """What does not hold of a map, read op by op and value by value."""
    said = []
    for name, mapped, size in (("values", found.values, len(second.values)), ("ops", found.ops, len(second.ops))):
        if sorted(mapped) != list(range(size)):
            said.append(f"{name} are not mapped one to one")
    for value in first.values:
        there = found.values[value.index]
        other = second.values[there]
        maker = None if value.producer is None else found.ops[value.producer]
        roles = [value.kind.is_static or value.kind, other.kind.is_static or other.kind]  # which of those that are held is no structure
        if (maker, value.size_bytes, roles[0]) != (other.producer, other.size_bytes, roles[1]):
            said.append(f"{value.name} became {other.name}")
        if (value.index in first.forward_outputs) != (there in second.forward_outputs):
            said.append(f"{value.name} became {other.name}, and one of them is an output")
        if (value.index in first.gradients) != (there in second.gradients):
            said.append(f"{value.name} became {other.name}, and one of them is a gradient")
    for op in first.ops:
        twin = second.ops[found.ops[op.index]]
        reads, writes = ([found.values[value] for value in part] for part in (op.reads, op.writes))
        if (reads, writes) != ([*twin.reads], [*twin.writes]):
            said.append(f"{op.name} became {twin.name}, which reads or writes other values")
        if look(op) != look(twin):
            said.append(f"{op.name} became {twin.name}, which is another op")
    return said


def look(op: Op) -> tuple[object, ...]:
    return op.target, op.side, bool(op.pinned), op.fusible, op.reduction, op.num_elements


def found_in(first: Problem, second: Problem) -> Isomorphism:
    """Found and right in both directions; returns the one from ``first`` to ``second``."""
    there, back = isomorphism(first, second), isomorphism(second, first)
    assert there is not None and back is not None
    assert faults(first, second, there) == faults(second, first, back) == []
    return there


def with_value(problem: Problem, value: Value) -> Problem:
    return replace(problem, values=(*problem.values[: value.index], value, *problem.values[value.index + 1 :]))


@given(problem=problems(), data=st.data())
def test_another_order_with_other_names_is_mapped(problem: Problem, data: st.DataObject) -> None:
    op_order = data.draw(topological_orders(problem))
    value_order = data.draw(st.permutations(range(len(problem.values))))
    found_in(problem, renumbered(problem, op_order, list(value_order)))


@given(problem=problems())
def test_the_same_order_is_mapped_onto_itself(problem: Problem) -> None:
    """Twins too, so that a plan file of the same model says what it always said."""
    renamed = renumbered(problem, list(range(len(problem.ops))), list(range(len(problem.values))))
    for other in (problem, renamed):
        assert found_in(problem, other).is_identity


CHANGES: dict[str, Callable[[Problem, Op, Value], Problem]] = {
    "size": lambda problem, _, value: with_value(problem, replace(value, size_bytes=value.size_bytes + 7)),
    "kind": lambda problem, _, value: with_value(problem, replace(value, kind=Kind.CARRIED)),
    "output": lambda problem, _, value: replace(problem, forward_outputs=problem.forward_outputs ^ {value.index}),
    "gradient": lambda problem, _, value: replace(problem, gradients=problem.gradients ^ {value.index}),
    "target": lambda problem, op, _: with_op(problem, replace(op, target="another")),
    "side": lambda problem, op, _: with_op(problem, replace(op, side=Side.FREE if op.side is Side.FORWARD else Side.FORWARD)),
    "pinned": lambda problem, op, _: with_op(problem, replace(op, pinned="" if op.pinned else "random")),
    "elements": lambda problem, op, _: with_op(problem, replace(op, num_elements=op.num_elements + 1)),
    "fusible": lambda problem, op, _: with_op(problem, replace(op, fusible=not op.fusible)),
    "reduction": lambda problem, op, _: with_op(problem, replace(op, reduction=not op.reduction)),
    "fused": lambda problem, _op, _value: replace(problem, fused=not problem.fused),
    "one op less": lambda problem, _op, _value: without_last(problem),
    "one input more": lambda problem, _op, _value: replace(
        problem, values=(*problem.values, Value(index=len(problem.values), name="more", size_bytes=1, kind=Kind.INPUT))
    ),
}


def without_last(problem: Problem) -> Problem:
    last = problem.ops[-1].index
    values = tuple(replace(value, producer=None) if value.producer == last else value for value in problem.values)
    return replace(problem, ops=problem.ops[:-1], values=values)


@pytest.mark.parametrize("what", CHANGES)
@settings(max_examples=20)
@given(problem=problems(), data=st.data())
def test_a_single_change_is_another_graph(what: str, problem: Problem, data: st.DataObject) -> None:
    op, value = data.draw(st.sampled_from(problem.ops)), data.draw(st.sampled_from(problem.values))
    other = CHANGES[what](problem, op, value)
    moved = shuffled(other, data.draw(st.integers(0, 99)))
    assert [isomorphism(problem, other), isomorphism(other, problem), isomorphism(problem, moved)] == [None] * 3
    found_in(other, moved)


@given(problem=problems(), data=st.data())
def test_a_replaced_read_is_another_graph_unless_networkx_has_a_map(problem: Problem, data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(problem.ops))
    position = data.draw(st.integers(0, len(op.reads) - 1))
    earlier = [v.index for v in problem.values if (v.producer is None or v.producer < op.index) and v.index not in op.reads]
    assume(earlier)
    reads = (*op.reads[:position], data.draw(st.sampled_from(earlier)), *op.reads[position + 1 :])
    other = shuffled(with_op(problem, replace(op, reads=reads)), data.draw(st.integers(0, 99)))
    if isomorphic(with_roles(problem), with_roles(other)):
        found_in(problem, other)
    else:
        assert isomorphism(problem, other) is None


def with_roles(problem: Problem) -> Problem:
    """What the caller holds is all of one kind."""
    return replace(problem, values=tuple(replace(v, kind=Kind.PARAMETER) if v.kind.is_static else v for v in problem.values))


@given(problem=problems(), data=st.data())
def test_it_does_not_matter_as_what_a_value_is_held(problem: Problem, data: st.DataObject) -> None:
    held = data.draw(st.sampled_from([value for value in problem.values if value.kind.is_static]))
    found_in(problem, with_value(problem, replace(held, kind=data.draw(st.sampled_from([kind for kind in Kind if kind.is_static])))))


def projections(*, is_crossed: bool) -> Problem:
    """``silu(a) * a, silu(b) * b`` of two projections of one input, or crosswise."""
    build = Builder()
    source = build.given(1, Kind.INPUT)
    made = [build.op([source, build.given(1)], 1) for _ in range(2)]
    curved = [build.op([value], 1, target="silu") for value in made]
    for value, other in zip(curved, reversed(made) if is_crossed else made, strict=True):
        build.outputs.add(build.op([value, other], 1, target="mul"))
    return build.build()


def joined_chains(joins: list[int], *, length: int) -> Problem:
    """From each of some starts a left and a right chain; left i is joined with right ``joins[i]``."""
    build = Builder()
    source = build.given(1, Kind.INPUT)
    ends: dict[str, list[int]] = {"left": [], "right": []}
    for _ in joins:
        start = build.op([source], 1, target="start")
        for target, made in ends.items():
            current = start
            for _ in range(length):
                current = build.op([current], 1, target=target)
            made.append(current)
    for left, right in enumerate(joins):
        build.outputs.add(build.op([ends["left"][left], ends["right"][right]], 1, target="join"))
    return build.build()


def experts(count: int) -> Problem:
    """Experts that only share their input and the gradient that arrives: every one looks like every other."""
    build = Builder()
    tokens, arrived = build.given(8, Kind.INPUT), build.given(8, Kind.TANGENT)
    for _ in range(count):
        up, down = build.given(4), build.given(4)
        hidden = build.op([tokens, up], 8)
        active = build.op([hidden], 8, target="gelu")
        build.outputs.add(build.op([active, down], 8))
        back = build.op([arrived, down], 8, side=Side.BACKWARD, target="mm_backward")
        build.gradients.add(build.op([back, active], 4, side=Side.BACKWARD, target="mm_weight"))
        back = build.op([back, hidden], 8, side=Side.BACKWARD, target="gelu_backward")
        build.gradients.add(build.op([back, tokens], 4, side=Side.BACKWARD, target="mm_weight"))
    return build.build()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "problem",
    [
        *(projections(is_crossed=is_crossed) for is_crossed in (False, True)),
        joined_chains([0, 1, 2], length=3),
        joined_chains([1, 2, 0, 3], length=FAR),
        experts(40),
        two_towers(2),
        encoder_decoder(2),
    ],
    ids=["straight", "crossed", "chains", "long chains", "experts", "towers", "encoder-decoder"],
)
def test_twins_are_told_apart_by_what_they_share(problem: Problem, seed: int) -> None:
    assert found_in(problem, problem).is_identity
    found_in(problem, shuffled(problem, seed))


@pytest.mark.parametrize("seed", range(2))
def test_twins_that_meet_crosswise_are_another_graph(seed: int) -> None:
    """Even where they meet too far away for the fingerprint, which is then the same."""
    crossed = shuffled(projections(is_crossed=True), seed)
    assert isomorphism(projections(is_crossed=False), crossed) is None
    for joins, others in (([0, 1], [1, 0]), ([1, 2, 3, 4, 5, 0], [1, 2, 0, 4, 5, 3])):  # a ring of six and two of three
        one, two = joined_chains(joins, length=FAR), shuffled(joined_chains(others, length=FAR), seed)
        assert fingerprint(one) == fingerprint(two)
        assert isomorphism(one, two) is None and isomorphism(two, one) is None


@pytest.mark.parametrize(
    "make", [partial(transformer, 150), partial(layered, 1, 1400), partial(experts, 1400)], ids=lambda make: make.func.__name__
)
def test_graphs_of_ten_thousand_ops(make: Callable[[], Problem]) -> None:
    problem = make()
    assert 9_500 < len(problem.ops) < 12_000
    other = shuffled(problem, 7)
    found = isomorphism(problem, other)
    assert found is not None and not found.is_identity and faults(problem, other, found) == []
    middle = other.ops[len(other.ops) // 2]
    assert isomorphism(problem, with_op(other, replace(middle, target="another"))) is None


@settings(max_examples=50)
@given(problem=problems(fused=False), data=st.data())
def test_a_schedule_goes_along(problem: Problem, data: st.DataObject) -> None:
    """Ops that run several times included: the mapped order makes the same values, in the same bytes and time."""
    other = shuffled(problem, data.draw(st.integers(0, 99)))
    found = found_in(problem, other)
    simulator = Simulator(problem)
    saved = data.draw(st.frozensets(st.sampled_from(simulator.candidates))) if simulator.candidates else frozenset()
    schedule = schedule_of(simulator, saved)
    forward, backward = (tuple(found.ops[op] for op in part) for part in (schedule.forward, schedule.backward))
    mapped = Schedule(forward, backward, frozenset(found.values[value] for value in schedule.saved))
    here, there = replay_schedule(problem, schedule), replay_schedule(other, mapped)
    assert (there.peak_bytes, there.time_us, there.num_recomputed) == (here.peak_bytes, here.time_us, here.num_recomputed)
    assert there.saved == {found.values[value] for value in here.saved}


def test_problems_of_nothing() -> None:
    nothing = Problem(values=(), ops=(), forward_outputs=frozenset(), gradients=frozenset())
    assert isomorphism(nothing, nothing) == Isomorphism((), ())
    unread = Builder()
    for size in (1, 2, 2):
        unread.given(size)
    problem = unread.build()
    assert found_in(problem, shuffled(problem, 1)).ops == ()
    assert isomorphism(problem, nothing) is None


def test_no_map_depends_on_the_order_of_hashes() -> None:
    program = (
        "from test_isomorphism import experts, isomorphism, joined_chains, layered, shuffled\n"
        "for problem in (experts(9), joined_chains([1, 2, 0], length=4), layered(3, 20)):\n"
        "    print(isomorphism(problem, shuffled(problem, 5)))\n"
    )
    printed = set()
    for seed in ("0", "1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.count("Isomorphism(") == 3
        printed.add(done.stdout)
    assert len(printed) == 1
