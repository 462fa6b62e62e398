"""Memory inside higher-order operators (``cond``, ``map``, ``scan``, nested compile regions): their bodies are graphs of their own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.loops import LoopKind, loop_kind
from dyngran.compiler.storages import Storages, find_storages, num_elements, storage_bytes, tensors_of
from dyngran.passes.problem import Kind, Op, Problem, Side, Value
from dyngran.passes.simulate import Simulator

STACKS_RESULTS = frozenset({"map", "map_impl"})  # make the result of every row, then copy all into one tensor


def body_workspace_bytes(node: fx.Node, device: torch.device, *, fused: bool) -> int:
    """Bytes that a higher-order operator allocates beside its results: the most that is live in one of its bodies; 0 for any other node.

    ``fused``: the code generator gives no memory to what only loops read.
    """
    if not isinstance(node.target, torch_private.HIGHER_ORDER_TYPE):
        return 0
    bodies = list(_bodies(node))
    if not bodies:
        return 0
    results_bytes = sum(storage_bytes(tensor, device) for tensor in tensors_of(node.meta.get("val")))
    name = node.target.name()  # type: ignore[no-untyped-call]  # torch gives it no types
    in_body = max(_peak_bytes(body.graph, device, fused=fused) for body in bodies)
    return in_body + (results_bytes if name in STACKS_RESULTS else -min(in_body, results_bytes))


def _bodies(node: fx.Node) -> Iterator[fx.GraphModule]:
    for operand in node.all_input_nodes:
        body = getattr(node.graph.owning_module, str(operand.target), None) if operand.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            yield body


def _peak_bytes(graph: fx.Graph, device: torch.device, *, fused: bool) -> int:
    """Most bytes of the graph's own storages, results included, that are live at once, by the simulator; its inputs are the caller's."""
    found = find_storages(graph, device)
    producer = {write: position for position, op in enumerate(found.ops) for write in found.writes[op]}
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    results = {index for result in output.all_input_nodes for index in found.of.get(result, ())} & producer.keys()
    problem = Problem(
        values=tuple(
            Value(
                index=storage.index,
                name=storage.node.name,
                size_bytes=storage.size_bytes,
                kind=Kind.INPUT if storage.producer is None else Kind.TEMPORARY,
                producer=producer.get(storage.index),
            )
            for storage in found.storages
        ),
        ops=tuple(_op(node, position, found, device, fused=fused) for position, node in enumerate(found.ops)),
        forward_outputs=frozenset(results),
        gradients=frozenset(),
        fused=fused,
    )
    return Simulator(problem).evaluate(()).peak_bytes


def _op(node: fx.Node, position: int, found: Storages, device: torch.device, *, fused: bool) -> Op:
    kind = loop_kind(node)
    return Op(
        index=position,
        name=node.name,
        target=str(node.target),
        side=Side.FORWARD,
        reads=found.reads[node],
        writes=found.writes[node],
        cost_us=0.0,
        workspace_bytes=body_workspace_bytes(node, device, fused=fused),
        fusible=kind is not LoopKind.NONE,
        reduction=kind is LoopKind.REDUCTION,
        num_elements=num_elements(node),
    )
