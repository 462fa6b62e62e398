"""What an order of ops must respect beyond who reads what, read off the joint graph."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.capture import Captured
from dyngran.compiler.unroll import makers, nodes_of_ops
from dyngran.passes.order_rules import OrderRules, distinct_pairs
from dyngran.passes.problem import Kind, Side

DRAWS_INSIDE = "its body draws random numbers, which another run would not draw again"
OVERWRITTEN = "what it makes is overwritten afterwards"


def order_rules(captured: Captured) -> OrderRules:
    """The rules that a schedule for this graph must keep (`passes.order_rules.check_order`)."""
    problem, storages = captured.problem, captured.storages
    nodes = nodes_of_ops(captured)
    carried = {value.index for value in problem.values if value.kind is Kind.CARRIED}
    by_runtime = [
        op for op, node in zip(problem.ops, nodes, strict=True) if node is None and op.target != "random state" and op.side is Side.FORWARD
    ]
    bodies = {index for index, node in enumerate(nodes) if node is not None and _body_draws(captured.joint.module, node)}
    written: dict[int, list[int]] = {}  # storage: ops that overwrite it
    touching: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        if node is None:
            continue
        for storage in dict.fromkeys((*storages.reads[node], *storages.writes[node])):
            touching.setdefault(storage, []).append(index)
        for argument in _overwritten(node):
            for storage in storages.of.get(argument, ()):
                written.setdefault(storage, []).append(index)
    return OrderRules(
        first=tuple(op.index for op in by_runtime if carried.intersection(op.writes)),
        last=tuple(op.index for op in by_runtime if not carried.intersection(op.writes)),
        draws=tuple(i for i, node in enumerate(nodes) if node is not None and (torch_private.is_random(node) or i in bodies)),
        fences=distinct_pairs(
            (min(one, other), max(one, other)) for storage, ops in written.items() for one in ops for other in touching[storage]
        ),
        needs=_needs(captured, nodes),
        once=(
            *((index, DRAWS_INSIDE) for index in sorted(bodies)),
            *((made, OVERWRITTEN) for storage in written if (made := problem.values[storage].producer) is not None),
        ),
    )


def _needs(captured: Captured, nodes: list[fx.Node | None]) -> tuple[tuple[int, int], ...]:
    """What ops take from one another beside storages: sizes that data decide, numbers read from tensors, objects."""
    made, of = makers(captured), captured.storages.of
    index = {node: position for position, node in enumerate(nodes) if node is not None}
    unseen: dict[fx.Node, frozenset[fx.Node]] = {}  # ops behind what a node holds that is no storage
    pairs: list[tuple[int, int]] = []
    for node, ops in made.items():
        behind = frozenset().union(*(unseen[operand] for operand in node.all_input_nodes if operand in unseen))
        if node in index:
            pairs += [(index[op], index[node]) for op in behind]
            behind = frozenset()
        unseen[node] = behind if of.get(node) else ops
    return distinct_pairs(pairs)


def _overwritten(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that an op writes into, by its schema."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        actual = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        for one in actual if isinstance(actual, (tuple, list)) else (actual,):
            if isinstance(one, fx.Node):
                yield one


def _body_draws(joint: fx.GraphModule, node: fx.Node) -> bool:
    """Whether one of a higher-order operator's bodies holds a random op."""
    bodies = [getattr(joint, str(arg.target), None) for arg in node.all_input_nodes if arg.op == "get_attr"]
    return any(
        torch_private.is_random(inner)
        for body in bodies
        if isinstance(body, fx.GraphModule)
        for module in body.modules()
        if isinstance(module, fx.GraphModule)
        for inner in module.graph.nodes
    )
