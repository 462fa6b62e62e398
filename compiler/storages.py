"""Which storage every node of a joint graph reads and makes: views and getitems are folded into the op that allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.passes.devices import rounded_bytes
from dyngran.passes.errors import UnknownSize

_UNDECLARED_VIEWS = frozenset({"aten::_unsafe_view"})  # share their argument's storage although the schema does not say so
_WRAPPERS = frozenset({"aten::_sparse_coo_tensor_with_dims_and_tensors", "aten::_sparse_coo_tensor_unsafe"})  # hold what they are given


@dataclass(slots=True)
class Storage:
    """One allocation: the node that stands for it (a placeholder, an op, or a getitem of one) and its bytes on the planned device."""

    index: int
    node: fx.Node
    size_bytes: int
    producer: fx.Node | None


@dataclass(slots=True)
class Storages:
    """Storages of a graph. ``of[node]`` are the storages a node's value lives in; ``reads[op]`` and ``writes[op]`` cover ops only."""

    storages: list[Storage] = field(default_factory=list)
    of: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    members: dict[fx.Node, tuple[int | None, ...]] = field(default_factory=dict)
    ops: list[fx.Node] = field(default_factory=list)
    reads: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    writes: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)


def find_storages(graph: fx.Graph, device: torch.device) -> Storages:
    """Walk the graph once. Sizes count only what lives on ``device``; raises UnknownSize for data-dependent sizes."""
    found = Storages()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            found.of[node] = _own(found, node, node.meta.get("val"), device, producer=None)
        elif node.op == "call_function":
            _visit(found, node, device)
    return found


def _visit(found: Storages, node: fx.Node, device: torch.device) -> None:
    if torch_private.is_getitem(node) and isinstance(node.args[0], fx.Node) and node.args[0] in found.members:
        member = found.members[node.args[0]][_position(node)]
        found.of[node] = () if member is None else (member,)
        if member is not None and found.storages[member].producer is node.args[0]:
            found.storages[member].node = node
        elif isinstance(node.meta.get("val"), (tuple, list)):
            found.of[node] = found.of[node.args[0]]
        return
    if torch_private.is_getitem(node) and isinstance(node.args[0], fx.Node) and node.args[0] not in found.writes:
        found.of[node] = found.of.get(node.args[0], ())  # a list of views lives where its base lives
        return
    alias = aliased_argument(node)
    if alias is not None:
        found.of[node] = found.of.get(alias, ())
        return
    reads = tuple(dict.fromkeys(storage for arg in node.all_input_nodes for storage in found.of.get(arg, ())))
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _WRAPPERS:
        found.of[node] = reads
        return
    if torch_private.is_sym_node(node) and not _reads_data(node):
        found.of[node] = ()
        return
    found.ops.append(node)
    found.reads[node] = reads
    value = node.meta.get("val")
    if isinstance(value, (tuple, list, dict)):
        members = [_member(found, node, item, device) for item in (value.values() if isinstance(value, dict) else value)]
        found.members[node] = tuple(members)
        found.of[node] = tuple(member for member in members if member is not None)
        found.writes[node] = tuple(member for member in found.of[node] if found.storages[member].producer is node)
    elif _returns_its_argument(node):
        found.of[node] = found.of.get(node.args[0], ()) if isinstance(node.args[0], fx.Node) else ()
        found.writes[node] = ()
    else:
        found.of[node] = _own(found, node, value, device, producer=node)
        found.writes[node] = found.of[node]


def _position(getitem: fx.Node) -> int:
    """Which member a getitem takes; results of Triton kernels are dictionaries, in the order of their keys."""
    owner, key = getitem.args
    value = owner.meta.get("val") if isinstance(owner, fx.Node) else None
    place = list(value).index(key) if isinstance(value, dict) else key
    assert isinstance(place, int)
    return place


def _member(found: Storages, node: fx.Node, value: Any, device: torch.device) -> int | None:
    if not isinstance(value, torch.Tensor):
        return None
    return _own(found, node, value, device, producer=node)[0]


def _own(found: Storages, node: fx.Node, value: Any, device: torch.device, *, producer: fx.Node | None) -> tuple[int, ...]:
    if not isinstance(value, torch.Tensor):
        return ()
    storage = Storage(len(found.storages), node, storage_bytes(value, device), producer)
    found.storages.append(storage)
    return (storage.index,)


def storage_bytes(value: torch.Tensor, device: torch.device, *, on_device: bool = False) -> int:
    """Bytes the allocator hands out for a fresh tensor like this one; 0 if it lives on another device, unless ``on_device``."""
    if not on_device and (
        value.device.type != device.type or (device.index is not None and value.device.index not in (None, device.index))
    ):
        return 0
    if value.layout is not torch.strided:
        return rounded_bytes(torch_private.size_hint(value.numel()) * value.dtype.itemsize, device)
    sizes = [torch_private.size_hint(size) for size in value.shape]
    if 0 in sizes:
        return 0
    extent = 1 + sum((size - 1) * torch_private.size_hint(stride) for size, stride in zip(sizes, value.stride(), strict=True))
    return rounded_bytes(extent * value.dtype.itemsize, device)


def aliased_argument(node: fx.Node) -> fx.Node | None:
    """The argument that the result is a view of, by the op's schema: ``(a)`` labels one view, ``(a -> *)`` a list of them (split)."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return None
    schema = node.target._schema
    if schema.name in _UNDECLARED_VIEWS:
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    if len(schema.returns) != 1 or schema.returns[0].alias_info is None:
        return None
    labels = schema.returns[0].alias_info.before_set
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and (argument.alias_info.before_set & labels or "*" in argument.alias_info.after_set):
            actual = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return actual if isinstance(actual, fx.Node) else None
    return None


def _returns_its_argument(node: fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable and isinstance(node.meta.get("val"), torch.Tensor)
    )


def _reads_data(node: fx.Node) -> bool:
    """True for scalars that are read from a tensor's data (``item()``), not from its shape."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.data_dependent_output in node.target.tags


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a node's value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(item)


def num_elements(node: fx.Node) -> int:
    """Iteration space: the largest tensor the op reads or makes."""
    shapes = [t for n in (node, *node.all_input_nodes) for t in tensors_of(n.meta.get("val"))]
    return max((torch_private.size_hint(tensor.numel()) for tensor in shapes), default=0)


def planned_device(graph: fx.Graph) -> torch.device:
    """The device that holds most of the graph's bytes."""
    totals: dict[torch.device, int] = {}
    for node in graph.nodes:
        for tensor in tensors_of(node.meta.get("val")):
            try:
                size = torch_private.size_hint(tensor.numel()) * tensor.dtype.itemsize
            except UnknownSize:
                continue
            totals[tensor.device] = totals.get(tensor.device, 0) + size + 1
    return max(totals, key=lambda device: (totals[device], str(device)), default=torch.device("cpu"))
