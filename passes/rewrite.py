"""The rewriter's last step: recomputed subgraphs move to just before their first reader in backward.

After extraction a backward graph starts with every recomputed op, all of whose results would then be live at once. `delay_recompute`
brings each op that does not depend on a tangent in front of the first op that needs it, in the graph's own order, as
`passes/simulate.py` assumes. Method: the lazy insertion that reverse-mode engines do (and `torch._functorch`'s reordering pass).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from dyngran.passes.errors import GraphBroken

aten = torch.ops.aten
SHAPE_READS = (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default)


def delay_recompute(module: fx.GraphModule, *, is_root: Callable[[fx.Node], bool]) -> fx.GraphModule:
    """A module that runs the same ops; those that neither are roots nor depend on one run as late as possible, unread ones not at all.

    Assertions on sizes are among the unread ones: forward has made them.

    ``is_root`` marks tangents and ops that must keep their place (mutations). Raises GraphBroken if an op got lost.
    """
    order = {node: position for position, node in enumerate(module.graph.nodes)}
    fixed: set[fx.Node] = set()
    for node in module.graph.nodes:
        if is_root(node) or (node.op != "placeholder" and any(operand in fixed for operand in node.all_input_nodes)):
            fixed.add(node)

    new_graph = fx.Graph()
    moved: dict[fx.Node, fx.Node] = {}

    def place(node: fx.Node) -> None:
        missing: set[fx.Node] = set()
        stack = [node]
        while stack:
            current = stack.pop()
            if current in moved or current in missing:
                continue
            missing.add(current)
            stack.extend(current.all_input_nodes)
        for current in sorted(missing, key=order.__getitem__):
            moved[current] = new_graph.node_copy(current, moved.__getitem__)

    for node in module.graph.nodes:
        if node.op == "placeholder":
            moved[node] = new_graph.node_copy(node, moved.__getitem__)
    for node in module.graph.nodes:
        if node.op == "output" or (node in fixed and node.op != "placeholder"):
            place(node)
    lost = [node.name for node in module.graph.nodes if node not in moved and any(user in moved for user in node.users)]
    if lost:
        raise GraphBroken(f"pass delay-recompute lost {lost[0]} although something reads it")
    new_graph.lint()
    return fx.GraphModule(module, new_graph)


def drop_unread(graph: fx.Graph, *, is_needed: Callable[[fx.Node], bool]) -> None:
    """Erase calls that nobody reads and that are not needed for what they do, and what only they read."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and not is_needed(node):
            graph.erase_node(node)


def raise_shape_reads(module: fx.GraphModule) -> fx.GraphModule:
    """Move every op that reads a size of a tensor next to what makes the tensor, so that a late one does not keep it alive."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in list(module.graph.nodes):
        if node.target in SHAPE_READS:
            (tensor,) = node.all_input_nodes
            (inputs[-1] if tensor.op == "placeholder" else tensor).append(node)
    module.recompile()
    return module
