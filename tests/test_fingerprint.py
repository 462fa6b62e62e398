"""The fingerprint is equal exactly for isomorphic problems; networkx says which are."""

from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from problems import Builder, chain, problems, transformer

from dyngran.passes.fingerprint import fingerprint, role_of
from dyngran.passes.problem import Kind, Op, Problem, Side


def renumbered(problem: Problem, op_order: list[int], value_order: list[int]) -> Problem:
    """The same graph with ops and values in other places and under other names."""
    op_place = {old: new for new, old in enumerate(op_order)}
    place = {old: new for new, old in enumerate(value_order)}
    values = tuple(
        replace(
            problem.values[old],
            index=new,
            name=f"renamed_{new}",
            label="elsewhere",
            producer=None if (producer := problem.values[old].producer) is None else op_place[producer],
        )
        for new, old in enumerate(value_order)
    )
    ops = tuple(
        replace(
            problem.ops[old],
            index=new,
            name=f"other_{new}",
            region="elsewhere",
            reads=tuple(place[read] for read in problem.ops[old].reads),
            writes=tuple(place[write] for write in problem.ops[old].writes),
        )
        for new, old in enumerate(op_order)
    )
    outputs, gradients = (frozenset(place[v] for v in marked) for marked in (problem.forward_outputs, problem.gradients))
    return replace(problem, values=values, ops=ops, forward_outputs=outputs, gradients=gradients)


@st.composite
def topological_orders(draw: st.DrawFn, problem: Problem) -> list[int]:
    """Any order of the ops in which each comes after the producers of its reads."""
    needs = {op.index: {problem.values[read].producer for read in op.reads} - {None} for op in problem.ops}
    order: list[int] = []
    while len(order) < len(problem.ops):
        ready = [index for index, producers in needs.items() if index not in order and producers <= set(order)]
        order.append(draw(st.sampled_from(ready)))
    return order


def labelled(problem: Problem) -> nx.DiGraph:
    graph = nx.DiGraph()
    for v in problem.values:
        mark = (v.size_bytes, role_of(v), v.index in problem.forward_outputs, v.index in problem.gradients)
        graph.add_node(("value", v.index), mark=mark)
    for op in problem.ops:
        mark = (op.target, op.side, bool(op.pinned), op.fusible, op.reduction, op.num_elements)
        graph.add_node(("op", op.index), mark=mark)
        for position, read in enumerate(op.reads):
            graph.add_edge(("value", read), ("op", op.index), position=position)
        for position, write in enumerate(op.writes):
            graph.add_edge(("op", op.index), ("value", write), position=position)
    return graph


def isomorphic(first: Problem, second: Problem) -> bool:
    same_mark, same_place = (nx.algorithms.isomorphism.categorical_node_match("mark", None), lambda a, b: a == b)
    graphs = labelled(first), labelled(second)
    return first.fused == second.fused and nx.is_isomorphic(*graphs, node_match=same_mark, edge_match=same_place)


@given(problem=problems(), data=st.data())
def test_other_names_and_another_order_of_independent_ops_change_nothing(problem: Problem, data: st.DataObject) -> None:
    op_order = data.draw(topological_orders(problem))
    value_order = data.draw(st.permutations(range(len(problem.values))))
    other = renumbered(problem, op_order, list(value_order))
    assert fingerprint(other) == fingerprint(problem)


@given(problem=problems(), data=st.data())
def test_one_changed_read_counts_unless_the_graphs_are_isomorphic(problem: Problem, data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(problem.ops))
    position = data.draw(st.integers(0, len(op.reads) - 1))
    earlier = [v.index for v in problem.values if (v.producer is None or v.producer < op.index) and v.index not in op.reads]
    assume(earlier)
    reads = (*op.reads[:position], data.draw(st.sampled_from(earlier)), *op.reads[position + 1 :])
    other = with_op(problem, replace(op, reads=reads))
    assert (fingerprint(other) == fingerprint(problem)) == isomorphic(other, problem)


@given(problem=problems(), data=st.data())
def test_a_changed_target_or_size_counts(problem: Problem, data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(problem.ops))
    value = data.draw(st.sampled_from(problem.values))
    assert fingerprint(with_op(problem, replace(op, target="another"))) != fingerprint(problem)
    grown = tuple(replace(v, size_bytes=v.size_bytes + 7) if v is value else v for v in problem.values)
    assert fingerprint(replace(problem, values=grown)) != fingerprint(problem)


def with_op(problem: Problem, op: Op) -> Problem:
    return replace(problem, ops=(*problem.ops[: op.index], op, *problem.ops[op.index + 1 :]))


def test_marks_sides_kinds_and_fusion_count() -> None:
    problem = chain(3)
    last = problem.ops[-1]
    others = [
        replace(problem, fused=True),
        replace(problem, gradients=frozenset()),
        replace(problem, forward_outputs=problem.forward_outputs | {1}),
        replace(problem, values=(replace(problem.values[0], kind=Kind.TANGENT), *problem.values[1:])),
        with_op(problem, replace(last, side=Side.FREE)),
        with_op(problem, replace(last, pinned="random")),
        with_op(problem, replace(last, reads=last.reads[::-1])),
        chain(4),
    ]
    prints = [fingerprint(problem), *map(fingerprint, others)]
    assert len(set(prints)) == len(prints)


def test_what_is_measured_or_chosen_does_not_count() -> None:
    problem = chain(3)
    costly = with_op(problem, replace(problem.ops[1], cost_us=99.0, cost_source="cuda events", workspace_bytes=5))
    other = replace(costly, static_bytes={Kind.OPTIMIZER: 8}, keep_below_bytes=4, bytes_per_us=1.0, launch_us=9.0, stock={"a": frozenset()})
    assert fingerprint(other) == fingerprint(problem)


@pytest.mark.parametrize("crossed", [False, True])
def test_who_shares_a_reader_counts(crossed: bool) -> None:
    """Two lines read by op(a, a'), op(b, b') or crosswise: every op and value looks alike from above."""

    def build(pairs: list[tuple[int, int]]) -> Problem:
        builder = Builder()
        source = builder.given(1, Kind.INPUT)
        left = [builder.op([source], 1, target="left") for _ in range(2)]
        right = [builder.op([left[i]], 1, target="right") for i in range(2)]
        for i, j in pairs:
            builder.outputs.add(builder.op([left[i], right[j]], 1, target="join"))
        return builder.build()

    straight, other = build([(0, 0), (1, 1)]), build([(0, 1), (1, 0)] if crossed else [(1, 1), (0, 0)])
    assert (fingerprint(straight) == fingerprint(other)) == isomorphic(straight, other) == (not crossed)


def test_repeated_layers_are_told_from_fewer() -> None:
    assert fingerprint(transformer(2)) == fingerprint(transformer(2))
    assert len({fingerprint(transformer(layers)) for layers in (1, 2, 3)}) == 3
