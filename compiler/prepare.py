"""The form of a joint graph that the problem, the plan and the fingerprint refer to."""

from __future__ import annotations

import torch
from torch import fx

from dyngran.compiler import torch_private


def prepare(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Bring the graph into the form that the problem, the plan and the fingerprint refer to: dead code out, one copy of every
    subexpression, forced saves tagged, inputs that forward overwrites copied before they are read."""
    joint.graph.eliminate_dead_code()
    joint.graph = torch_private.common_subexpressions(joint.graph)
    torch_private.tag_forced_saves(joint)
    _copy_overwritten_inputs(joint, num_fwd_outputs)
    joint.recompile()


def _copy_overwritten_inputs(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
    """An input that forward overwrites holds other numbers by the time backward runs: whatever may run in backward reads a copy.

    The copy is made once, before its first reader, and tagged so that it is never made again from the overwritten input. Inputs that only
    feed forward (counters, statistics nobody differentiates through) get none.
    """
    _, _, descriptors = torch_private.split_outputs(joint, num_fwd_outputs)
    mutated = torch_private.mutated_input_descriptors(descriptors)
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    feeds_backward = _feeding_backward(joint.graph)
    for node in placeholders:
        is_returned = any(node.meta.get("desc") == descriptor for descriptor in mutated)
        if not isinstance(node.meta.get("val"), torch.Tensor) or not (is_returned or any(_overwrites(u, node) for u in node.users)):
            continue
        readers = [user for user in node.users if user.op != "output" and not torch_private.is_copy_into(user, node)]
        if not any(reader in feeds_backward for reader in readers):
            continue
        with joint.graph.inserting_before(min(readers)):
            copy = joint.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = {key: value for key, value in node.meta.items() if key not in ("desc", "grapharg")}
        copy.meta["val"] = node.meta["val"].clone()
        copy.meta["partitioner_tag"] = "is_forward"
        copy.meta["recompute"] = torch_private.MUST_SAVE
        for reader in readers:
            reader.replace_input_with(node, copy)


def _overwrites(user: fx.Node, placeholder: fx.Node) -> bool:
    """True for the copy_ that ends forward; what backward writes into its own buffers is read after forward as it stands."""
    return torch_private.is_copy_into(user, placeholder) and not torch_private.must_be_in_backward(user)


def _feeding_backward(graph: fx.Graph) -> set[fx.Node]:
    """Every node from which a node that depends on a tangent, or that must run in backward, can be reached."""
    late = {node for node in graph.nodes if node.op == "placeholder" and torch_private.is_tangent(node)}
    for node in graph.nodes:
        if node.op == "call_function" and (torch_private.must_be_in_backward(node) or any(arg in late for arg in node.all_input_nodes)):
            late.add(node)
    feeding = set(late)
    for node in reversed(graph.nodes):
        if any(user in feeding for user in node.users):
            feeding.add(node)
    return feeding
