"""Views that a graph returns, where AOTAutograd (torch 2.11 to 2.13) gives them a gradient or numbers that eager mode does not.

AOTAutograd makes a returned view anew when it returns: of what it is a view of, by the views that the trace saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, fx

from dyngran.compiler import torch_private


def detach_cut_views(module: fx.GraphModule) -> None:
    """Return views that were made under ``no_grad`` detached: made anew, outside of it, they would have a gradient.

    Views of what has no gradient stay views: where the caller writes something with a gradient into one, what it is a view of gets it.
    """
    if not module.graph.find_nodes(op="call_function", target=torch_private.SETS_GRAD_MODE):
        return
    (output,) = module.graph.find_nodes(op="output")
    with_gradient = {value.untyped_storage()._cdata for _, value in _tensors(module.graph.nodes) if value.requires_grad}
    for node, value in list(_tensors(output.all_input_nodes)):
        if value.untyped_storage()._cdata in with_gradient and _is_cut_view(node, value):
            with module.graph.inserting_before(output):
                detached = module.graph.call_method("detach", (node,))
            detached.meta = {**node.meta, "example_value": value.detach()}
            output.replace_input_with(node, detached)
    module.recompile()


def can_replay_views(module: fx.GraphModule) -> bool:
    """False where views must be made anew by their strides.

    Where a view and something without a gradient in the same memory are returned, as in ``return y, y.detach()``, AOTAutograd takes the
    view for the base of the other, and applies the view to it twice.
    """
    (output,) = module.graph.find_nodes(op="output")
    returned = [value for _, value in _tensors(output.all_input_nodes)]
    with_gradient = {value.untyped_storage()._cdata for value in returned if value.requires_grad and value._base is not None}
    return not any(value.untyped_storage()._cdata in with_gradient for value in returned if not value.requires_grad)


def _tensors(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, Tensor]]:
    """Those of the nodes that stand for plain tensors, with what Dynamo knows of them."""
    for node in nodes:
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and value.layout is torch.strided:
            yield node, value


def _is_cut_view(node: fx.Node, value: Tensor) -> bool:
    """Whether the graph makes this view, and it has no gradient or one that flows nowhere."""
    if node.op in ("placeholder", "get_attr") or value._base is None:
        return False
    functions = [value.grad_fn]
    seen = set(functions)
    while functions:
        function = functions.pop()
        if function is None:
            continue
        if not function.next_functions:
            return False  # a leaf of autograd's, or what the trace knows of a tensor that was computed before
        found = {following for following, _ in function.next_functions} - seen
        seen.update(found)
        functions.extend(found)
    return True
