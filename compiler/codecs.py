"""Formats in which values are stored between forward and backward: each as nodes that store a value and nodes that load it again.

A codec writes its nodes into any graph: into the compiled ones, and into one of its own when it is priced. Where the code generator fuses,
what ATen can say is said in ATen, so that storing becomes a part of the loop that makes the value and loading a part of the loop that
reads it; where every node is a kernel, one operator of `dyngran.kernels` does all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.kernels.operators import register
from dyngran.passes.plan import Action
from dyngran.passes.signature import dense_stride

aten = torch.ops.aten
prims = torch.ops.prims

GROUP = {"fp8": 128, "fp8_e5m2": 128, "int8": 128, "int4": 64}  # elements that share a scale
STOCHASTIC = frozenset({"int4"})  # rounded at random, so that linear readers see no bias
_KERNEL_FORMAT = {"fp8": "fp8_e4m3"}  # what the kernels call it, where that is not the name
_ROUNDINGS = {
    "bf16": "up to 2^-9 of each number",
    "fp16": "up to 2^-12 of each number; below 6e-5 up to 3e-8; above 65504 it is 65504",
    "fp8": "up to 2^-4 of each number; of small ones up to 2^-18 of the largest of 128",
    "fp8_e5m2": "up to 2^-3 of each number; of small ones up to 2^-32 of the largest of 128",
    "int8": "up to 0.4 % of the largest of 128",
    "int4": "up to 15 % of the largest of 64, right on average",
}


class Codec(Protocol):
    """One format. ``error`` is for people: by how much what is loaded may differ, "" if it serves its readers bit by bit."""

    @property
    def action(self) -> Action: ...

    @property
    def format(self) -> str: ...

    @property
    def error(self) -> str: ...

    def store(self, writer: Writer, value: fx.Node) -> fx.Node:
        """Nodes that make what is stored of ``value``, one tensor; the last of them."""

    def load(self, writer: Writer, stored: fx.Node, like: torch.Tensor) -> fx.Node:
        """Nodes that make ``value``, whose fake tensor is ``like``, of what is stored; the last of them."""


class Writer:
    """Writes nodes with their fake values where the graph inserts; ``fused``: for a code generator that fuses. ``like`` is some fake tensor
    of the graph.

    ``meta`` is taken over by every node (where it is from, for people and profilers). ``nodes`` are those written so far.
    """

    def __init__(self, graph: fx.Graph, like: torch.Tensor, *, fused: bool, meta: dict[str, Any] | None = None) -> None:
        register()
        self._mode_of = like
        self.graph = graph
        self.fused = fused
        self.nodes: list[fx.Node] = []
        self._meta = meta or {}

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self._call(None, target, args, kwargs)

    def call_on_host(self, target: torch._ops.OpOverload, *args: Any) -> fx.Node:
        """A node whose result is in host memory."""
        return self._call(torch.device("cpu"), target, args, {})

    def _call(self, device: torch.device | None, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values, named = fx.node.map_arg((args, kwargs), lambda one: one.meta["val"])
        node.meta = {**self._meta, "val": torch_private.fake_call(self._mode_of, target, values, named, device=device)}
        self.nodes.append(node)
        return node

    def convert(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if self.fused:
            return self.call(prims.convert_element_type.default, node, dtype)
        return self.call(aten._to_copy.default, node, dtype=dtype)


def origin(node: fx.Node) -> dict[str, Any]:
    """Where a node is from, for people and profilers: the meta of what is written for it."""
    return {name: node.meta[name] for name in ("nn_module_stack", "stack_trace", "seq_nr") if name in node.meta}


@dataclass(frozen=True, slots=True)
class Bits:
    """Boolean values, eight to a byte, in the order of memory."""

    action: Action = Action.PACK
    format: str = "bits"
    error: str = ""

    def store(self, writer: Writer, value: fx.Node) -> fx.Node:
        like = value.meta["val"]
        if not writer.fused:
            return writer.call(torch.ops.dyngran.pack_bits.default, value, list(like.stride()))
        flat = _flattened(writer, value)
        if like.numel() % 8:
            flat = writer.call(aten.constant_pad_nd.default, flat, [0, -like.numel() % 8])
        rows = writer.convert(writer.call(aten.reshape.default, flat, [-1, 8]), torch.uint8)
        shifted = writer.call(aten.bitwise_left_shift.Tensor, rows, self._places(writer, like))
        return writer.call(aten.sum.dim_IntList, shifted, [1], dtype=torch.uint8)

    def load(self, writer: Writer, stored: fx.Node, like: torch.Tensor) -> fx.Node:
        if not writer.fused:
            return writer.call(torch.ops.dyngran.unpack_bits.default, stored, list(like.shape), list(like.stride()))
        rows = writer.call(aten.unsqueeze.default, stored, 1)
        shifted = writer.call(aten.bitwise_right_shift.Tensor, rows, self._places(writer, like))
        flat = writer.call(aten.reshape.default, writer.call(aten.bitwise_and.Scalar, shifted, 1), [-1])
        if like.numel() % 8:
            flat = writer.call(aten.slice.Tensor, flat, 0, 0, like.numel())
        return _unflattened(writer, writer.convert(flat, torch.bool), like)

    def _places(self, writer: Writer, like: torch.Tensor) -> fx.Node:
        how = {"start": 0, "step": 1, "dtype": torch.uint8, "device": like.device, "requires_grad": False}
        return writer.call(prims.iota.default, 8, **how)


@dataclass(frozen=True, slots=True)
class Sign:
    """Values of which backward asks whether they are above ``threshold``. What is loaded answers that alike, and nothing else."""

    threshold: float
    action: Action = Action.PACK
    format: str = "sign"
    error: str = ""

    def store(self, writer: Writer, value: fx.Node) -> fx.Node:
        return writer.call(torch.ops.dyngran.pack_sign.default, value, list(value.meta["val"].stride()), self.threshold)

    def load(self, writer: Writer, stored: fx.Node, like: torch.Tensor) -> fx.Node:
        return writer.call(torch.ops.dyngran.unpack_sign.default, stored, list(like.shape), list(like.stride()), self.threshold, like.dtype)


@dataclass(frozen=True, slots=True)
class Shape:
    """Values of which backward reads nothing but sizes and strides: memory of that shape is made again, and nothing is stored."""

    action: Action = Action.PACK
    format: str = "shape"
    error: str = ""

    def store(self, writer: Writer, value: fx.Node) -> fx.Node:
        return writer.call(aten.new_empty.default, value, [0])

    def load(self, writer: Writer, stored: fx.Node, like: torch.Tensor) -> fx.Node:
        return writer.call(aten.new_empty_strided.default, stored, list(like.shape), list(like.stride()))


@dataclass(frozen=True, slots=True)
class Cast:
    """Values in another type: integers in a range that the narrower type has, or floating point numbers rounded to nearest."""

    dtype: torch.dtype
    action: Action
    format: str
    error: str = ""

    def store(self, writer: Writer, value: fx.Node) -> fx.Node:
        like = value.meta["val"]
        if self.dtype is not torch.float16:
            return writer.convert(value, self.dtype)
        if not writer.fused:
            return writer.call(torch.ops.dyngran.cast.default, value, list(like.stride()), self.dtype)
        largest = torch.finfo(torch.float16).max
        clamped = writer.call(aten.clamp.default, value, -largest, largest)
        is_infinite = writer.call(aten.isinf.default, value)
        return writer.convert(writer.call(aten.where.self, is_infinite, value, clamped), self.dtype)

    def load(self, writer: Writer, stored: fx.Node, like: torch.Tensor) -> fx.Node:
        return writer.convert(stored, like.dtype)


@dataclass(frozen=True, slots=True)
class Groups:
    """Values in 8 or 4 bits with a scale for each group of neighbours in memory: `dyngran.kernels.quantize`, whatever generates code.

    Inductor's own code for the formula is as fast by itself, but it does not become a part of the loops around it (the groups are other
    rows than those of a norm), and two tensors cross instead of one: a Llama that stored 140 values so was slower than with the kernels.
    """

    format: str
    value_id: int
    action: Action = Action.NARROW

    @property
    def error(self) -> str:
        return _ROUNDINGS[self.format]

    def store(self, writer: Writer, value: fx.Node) -> fx.Node:
        stride = list(value.meta["val"].stride())
        how = (_KERNEL_FORMAT.get(self.format, self.format), GROUP[self.format], self.format in STOCHASTIC, self.value_id)
        return writer.call(torch.ops.dyngran.quantize.default, value, stride, *how)

    def load(self, writer: Writer, stored: fx.Node, like: torch.Tensor) -> fx.Node:
        how = (like.dtype, _KERNEL_FORMAT.get(self.format, self.format), GROUP[self.format])
        return writer.call(torch.ops.dyngran.dequantize.default, stored, list(like.shape), list(like.stride()), *how)


@dataclass(frozen=True, slots=True)
class Offload:
    """Values in host memory, copied there and back beside the kernels of the step. ``start``, ``done`` and ``fetch`` are ops of the graph:
    the copy starts after the first and has arrived after the second, the copy back starts before the third."""

    start: int
    done: int
    fetch: int
    action: Action = Action.OFFLOAD
    format: str = "host"
    error: str = ""

    def store(self, writer: Writer, value: fx.Node) -> fx.Node:
        return writer.call_on_host(torch.ops.dyngran.offload.default, value, list(value.meta["val"].stride()))

    def stored(self, writer: Writer, stored: fx.Node, value: fx.Node) -> None:
        """A node that waits until ``value`` has been stored; it is read up to there."""
        writer.call(torch.ops.dyngran.offload_wait.default, stored, value)

    def load(self, writer: Writer, stored: fx.Node, like: torch.Tensor, after: fx.Node | None = None) -> fx.Node:
        """The node that starts the copy back, once ``after`` has been made; nobody may read it before `loaded`."""
        return writer.call(torch.ops.dyngran.fetch.default, stored, list(like.shape), list(like.stride()), like.device, after)

    def loaded(self, writer: Writer, value: fx.Node, after: fx.Node | None = None) -> None:
        """A node that waits until ``value`` has been loaded, once ``after`` has been made."""
        writer.call(torch.ops.dyngran.fetch_wait.default, value, after)

    def moved(self, num_ops: int) -> Offload:
        """For a graph with so many more ops before the others."""
        return replace(self, start=self.start + num_ops, done=self.done + num_ops, fetch=self.fetch + num_ops)


def lossy_codec(name: str, dtype: torch.dtype, value_id: int) -> Codec | None:
    """The codec of a format that users name, for values of ``dtype``; None if it would save nothing.

    ``value_id`` tells apart what is rounded at random in one step.
    """
    cast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
    if cast is None:
        return Groups(name, value_id)
    return Cast(cast, Action.NARROW, name, _ROUNDINGS[name]) if dtype.itemsize > cast.itemsize else None


def integer_codec(lowest: int, highest: int, dtype: torch.dtype) -> Codec | None:
    """The narrowest integers that hold a range of values of ``dtype``; None if none is narrower."""
    for narrow in (torch.uint8, torch.int8, torch.int16, torch.int32):
        info = torch.iinfo(narrow)
        if info.min <= lowest and highest <= info.max and narrow.itemsize < dtype.itemsize:
            return Cast(narrow, Action.PACK, str(narrow).removeprefix("torch."))
    return None


def _flattened(writer: Writer, value: fx.Node) -> fx.Node:
    """All elements in the order of memory: views."""
    like = value.meta["val"]
    return writer.call(aten.reshape.default, writer.call(aten.permute.default, value, _memory_order(like)), [like.numel()])


def _unflattened(writer: Writer, flat: fx.Node, like: torch.Tensor) -> fx.Node:
    """The reverse of `_flattened`."""
    order = _memory_order(like)
    lying = writer.call(aten.reshape.default, flat, [like.shape[dimension] for dimension in order])
    return writer.call(aten.permute.default, lying, sorted(range(len(order)), key=order.__getitem__))


def _memory_order(like: torch.Tensor) -> list[int]:
    """Dimensions from the outermost in memory to the innermost."""
    strides = like.stride()
    return sorted(range(like.dim()), key=lambda dimension: (-strides[dimension], dimension))


def is_storable(like: object) -> bool:
    """Whether a fake tensor is a plain block of memory of known size: strided, dense in some order of its dimensions, not to be conjugated
    or negated when it is read."""
    if not torch_private.is_plain_fake(like) or like.layout is not torch.strided or like.is_conj() or like.is_neg():
        return False
    numbers = (*like.shape, *like.stride(), like.storage_offset())
    if not all(isinstance(number, int) for number in numbers) or like.storage_offset() or not like.numel():
        return False
    order = [dimension for dimension in _memory_order(like) if like.shape[dimension] > 1]
    sizes, strides = tuple(like.shape[dimension] for dimension in order), tuple(like.stride(dimension) for dimension in order)
    return strides == dense_stride(sizes)
