"""How results really lie in memory, where the kernel that runs lays them out otherwise than the graph says.

An operator copies operands that do not lie as its kernel wants them, so its workspace depends on their strides. Those of a graph are what
fake kernels and decompositions return: the gradient of a layer norm, for one, lies as what came in there, and row by row on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.passes.costs import is_view, on_meta
from dyngran.passes.measure_cpu import FAILURES
from dyngran.passes.profile_cache import Measurement
from dyngran.passes.signature import TensorSpec, concrete, tensors_of

Layouts = Mapping[fx.Node, Any]


def real_layouts(graph: fx.Graph, prices: Mapping[fx.Node, Measurement]) -> Layouts:
    """What nodes return, with `TensorSpec` in place of fake tensors, where it lies otherwise than traced: results, and views of those."""
    found: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        price = prices.get(node)
        if price is not None and price.result_strides is not None:
            real = _laid_out(concrete(node.meta.get("val")), price.result_strides)
        elif any(operand in found for operand in node.all_input_nodes):
            real = _part_or_view(node, found)
        else:
            continue
        if real is not None:
            found[node] = real
    return found


def values_of(arguments: Any, layouts: Layouts) -> Any:
    """Arguments of a node with what other nodes return, as it really lies, in place of those nodes."""
    return fx.node.map_arg(arguments, lambda node: layouts.get(node, node.meta.get("val")))


def _laid_out(traced: object, strides: tuple[tuple[int, ...], ...]) -> object | None:
    """A result with the strides that its kernel gave it; None if they are those of the graph."""
    tensors = list(tensors_of(traced))
    if [len(tensor.shape) for tensor in tensors] != [len(stride) for stride in strides]:
        return None
    if all(map(_lies_so, tensors, strides)):
        return None
    return _with_strides(traced, iter(strides))


def _lies_so(tensor: TensorSpec, stride: tuple[int, ...]) -> bool:
    """Whether every element lies where ``stride`` says."""
    return 0 in tensor.shape or all(size == 1 or have == step for size, have, step in zip(tensor.shape, tensor.stride, stride, strict=True))


def _with_strides(traced: object, strides: Iterator[tuple[int, ...]]) -> object:
    if isinstance(traced, TensorSpec):
        return replace(traced, stride=next(strides))
    return tuple(_with_strides(item, strides) for item in traced) if isinstance(traced, tuple) else traced


def _part_or_view(node: fx.Node, layouts: Layouts) -> object | None:
    """What a getitem or a view takes of a result that lies otherwise than traced; None for what makes memory of its own."""
    args = tuple(concrete(value) for value in values_of(node.args, layouts))
    if torch_private.is_getitem(node):
        owner, key = args
        return owner[key] if isinstance(owner, tuple) and isinstance(key, int) else None
    if not (isinstance(node.target, torch._ops.OpOverload) and is_view(node.target)):
        return None
    kwargs = {name: concrete(value) for name, value in values_of(node.kwargs, layouts).items()}
    try:
        with torch_private.plain_dispatch():
            viewed = node.target(*on_meta(args), **{name: on_meta(value) for name, value in kwargs.items()})
    except FAILURES:  # a view that a layout forbids is traced as a copy
        return None
    return _laid_out(concrete(node.meta.get("val")), tuple(tensor.stride for tensor in tensors_of(viewed)))
