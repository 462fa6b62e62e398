"""Apply a plan: cut a joint graph into the forward graph that saves what the plan keeps and the backward graph that recomputes the rest."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.capture import Captured
from dyngran.passes.errors import GraphBroken
from dyngran.passes.rewrite import delay_recompute


def partition(captured: Captured, saved: Iterable[int]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(forward, backward) modules for a set of saved values, random masks replayed, recompute placed before its first reader.

    Raises GraphBroken if backward would read something that is neither saved nor recomputable.
    """
    joint = captured.joint.module
    keep = sorted(set(saved))
    saved_nodes = [
        node
        for node in joint.graph.nodes
        if node.op == "placeholder" and torch_private.is_primal(node) and not torch_private.is_sym_node(node)
    ]
    saved_nodes += [node for value in keep if (node := captured.nodes[value]) is not None]
    opaque = [node for node in saved_nodes if torch_private.is_opaque(node)]
    saved_nodes = [node for node in saved_nodes if node not in set(opaque)]
    symbols = _forward_symbols(captured)
    forward, backward = torch_private.extract_forward_and_backward(
        joint,
        saved_nodes,
        symbols,
        opaque,
        num_fwd_outputs=captured.joint.num_fwd_outputs,
        static_lifetime_nodes=captured.node_info.static_lifetime_input_nodes,  # type: ignore[attr-defined]  # torch's NodeInfo
    )
    _drop_unread_random(backward)
    forward, backward = _replay_random(captured, forward, backward, len(symbols))
    backward = delay_recompute(
        backward, is_root=lambda node: torch_private.is_tangent(node) or torch_private.must_be_in_backward(node) or _is_mutation(node)
    )
    _check_no_pinned_twice(captured, forward, backward)
    return torch_private.raise_getitems(forward), torch_private.raise_getitems(backward)


def _forward_symbols(captured: Captured) -> list[fx.Node]:
    """Every scalar that forward can compute; extraction drops those that backward does not read."""
    closure = captured.node_info.tangents_closure  # type: ignore[attr-defined]  # torch's NodeInfo
    return [
        node
        for node in captured.joint.module.graph.nodes
        if torch_private.is_sym_node(node) and node not in closure and not torch_private.is_assert_only(node)
    ]


def _drop_unread_random(backward: fx.GraphModule) -> None:
    """Extraction leaves random ops whose result was saved: torch takes drawing numbers for an effect. Here nobody reads them."""

    def is_needed(node: fx.Node) -> bool:
        return node.op in ("placeholder", "output") or (node.is_impure() and not torch_private.is_random(node))

    backward.graph.eliminate_dead_code(is_impure_node=is_needed)
    backward.recompile()


def _replay_random(
    captured: Captured, forward: fx.GraphModule, backward: fx.GraphModule, num_symbols: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Random ops that run in both graphs must draw the same numbers; one that runs only in backward must not move the user's stream."""
    in_forward = {node.name for node in forward.graph.nodes if torch_private.is_random(node)}
    in_backward = {node.name for node in backward.graph.nodes if torch_private.is_random(node)}
    twice = [
        node
        for node in captured.joint.module.graph.nodes
        if node.name in in_forward and node.name in in_backward and torch_private.is_random(node)
    ]
    if not twice:
        return forward, backward
    return torch_private.replay_random_state(captured.joint.module, forward, backward, twice, num_symbols)


def _is_mutation(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _check_no_pinned_twice(captured: Captured, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    names = {node.name for node in forward.graph.nodes}
    pinned = {op.name for op in captured.problem.ops if op.pinned}
    for node in backward.graph.nodes:
        if node.op == "call_function" and node.name in pinned and node.name in names:
            raise GraphBroken(f"pass partition would run {node.name} twice although it must run once")
