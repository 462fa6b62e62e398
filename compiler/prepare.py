"""The form of a joint graph that the problem, the plan and the fingerprint refer to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.storages import aliased_argument
from dyngran.passes.signature import TensorSpec, dense_stride, hint

aten = torch.ops.aten


def prepare(joint: fx.GraphModule, num_fwd_outputs: int, *, channels_last: bool) -> None:
    """Bring the graph into the form that the problem, the plan and the fingerprint refer to: dead code out, one copy of every
    subexpression, forced saves tagged, inputs that forward overwrites copied before they are read.

    ``channels_last``: the code generator lays out images so whatever the graph's strides say; then nothing may rely on those.
    """
    joint.graph.eliminate_dead_code()
    joint.graph = torch_private.common_subexpressions(joint.graph)
    if channels_last:
        fix_layouts_under_strided_views(joint.graph)
    torch_private.tag_forced_saves(joint)
    _copy_overwritten_inputs(joint, num_fwd_outputs)
    joint.recompile()


def fix_layouts_under_strided_views(graph: fx.Graph) -> None:
    """Make ``as_strided``, which reads memory and not elements, find the memory that the trace had.

    A value that forward saves may be channels-last although the trace had it contiguous, and so is what backward recomputes from it: an
    ``as_strided`` of that reads other elements, silently (torch's group norm on the CPU has two). Where it only renames dimensions it
    becomes a view; else what it looks into is made contiguous first, which is no copy where it is contiguous already.
    """
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        source, size, stride = node.args[:3]
        if (
            _is_dense(source)
            and _is_dense(node)
            and TensorSpec.of(source.meta["val"]).num_elements == TensorSpec.of(node.meta["val"]).num_elements
        ):
            with graph.inserting_before(node):
                steady = graph.call_function(aten.view.default, (source, size))
        else:
            base = source
            while (below := aliased_argument(base)) is not None:
                base = below
            if not _is_dense(base) or not _looks_into(node, base):
                continue
            with graph.inserting_before(node):
                copy = graph.call_function(aten.clone.default, (base,), {"memory_format": torch.contiguous_format})
                steady = graph.call_function(aten.as_strided.default, (copy, size, stride, node.meta["val"].storage_offset()))
            copy.meta = _without_identity(base)
            copy.meta["val"] = base.meta["val"].clone(memory_format=torch.contiguous_format)
            copy.meta["partitioner_tag"] = node.meta.get("partitioner_tag")
        steady.meta = dict(node.meta)
        node.replace_all_uses_with(steady)
        graph.erase_node(node)


def _is_dense(node: fx.Node) -> bool:
    """Contiguous from the first byte of its memory on, as the trace has it."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    spec = TensorSpec.of(value)
    return hint(value.storage_offset()) == 0 and spec == replace(spec, stride=dense_stride(spec.shape))


def _looks_into(node: fx.Node, base: fx.Node) -> bool:
    """Whether a strided view stays within the elements of ``base``, in its dtype: not so for a chunk of something larger."""
    value, spec, whole = node.meta["val"], TensorSpec.of(node.meta["val"]), TensorSpec.of(base.meta["val"])
    return spec.dtype == whole.dtype and hint(value.storage_offset()) + spec.num_stored <= whole.num_elements


def _without_identity(node: fx.Node) -> dict[str, object]:
    """A node's meta for another node: without what says which input of the graph it is."""
    return {key: value for key, value in node.meta.items() if key not in ("desc", "grapharg")}


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
        windows, ways_there = _strided_windows(node)
        readers = [
            user
            for user in node.users
            if user.op != "output" and user not in (*windows, *ways_there) and not torch_private.is_copy_into(user, node)
        ]
        if not any(reader in feeds_backward for reader in (*readers, *windows)):
            continue
        for source in (node, *windows):
            if mine := readers if source is node else [user for user in source.users if user.op != "output"]:
                _copy_for(joint.graph, source, mine)


def _strided_windows(placeholder: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Every ``as_strided`` of an input, made to read the input itself: it sees all memory that the input lies in, which a copy has not.

    One that begins where a view does, at an offset that only the view knows, gets views of its own; those come second.
    """
    aliases, windows, ways_there = {placeholder}, list[fx.Node](), list[fx.Node]()
    for node in list(placeholder.graph.nodes):
        if aliased_argument(node) not in aliases:
            continue
        aliases.add(node)
        if node.target is aten.as_strided.default:
            offset = node.args[3] if len(node.args) > 3 else node.meta["val"].storage_offset()
            if isinstance(offset, (int, fx.Node)):
                node.args = (placeholder, *node.args[1:3], offset)
            else:
                ways_there.extend(_view_again(placeholder, node))
            windows.append(node)
    return windows, ways_there


def _view_again(placeholder: fx.Node, window: fx.Node) -> list[fx.Node]:
    """Copies of the views that lead from an input to ``window``, which then reads those."""
    views = list[fx.Node]()
    while (below := aliased_argument([window, *views][-1])) is not placeholder:
        assert below is not None
        views.append(below)
    copies = {placeholder: placeholder}
    with placeholder.graph.inserting_before(window):
        for view in reversed(views):
            copies[view] = placeholder.graph.node_copy(view, lambda argument: copies.get(argument, argument))
    if views:
        window.replace_input_with(views[0], copies[views[0]])
    return [copies[view] for view in views]


def _copy_for(graph: fx.Graph, node: fx.Node, readers: Sequence[fx.Node]) -> None:
    """A copy of ``node`` that forward makes once, before the first of its ``readers``, and that they read."""
    with graph.inserting_before(min(readers)):
        copy = graph.call_function(aten.clone.default, (node,))
    copy.meta = _without_identity(node)
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
