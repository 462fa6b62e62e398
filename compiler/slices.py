"""Slices: the first rows of a value are stored, and in backward the others are made again, they alone, of what is there.

What makes rows again is the cone of the value: its producer, the views and cheap operators above it as far as rows of theirs suffice, and
the leaves that these read. Leaves are values that a plan may have in backward anyway (what torch's own partition saves, inputs), or results
of operators of which nobody knows how to make a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.codecs import Writer
from dyngran.compiler.row_slices import Exactness, Part, Rows, SlicedCall, sliced_call
from dyngran.compiler.storages import aliased_argument
from dyngran.passes.plan import Action

aten = torch.ops.aten

MAX_CALLS = 12  # that run again beside the value's own
_WORSE = (Exactness.COPY, Exactness.POINTWISE, Exactness.LIBRARY)


@dataclass(frozen=True, slots=True)
class CallOnRows:
    """Rows of what a node makes, and how exact they are. ``is_block``: they lie one after the other, and so do rows of each operand."""

    node: fx.Node
    rows: Rows
    exactness: Exactness
    is_block: bool


@dataclass(frozen=True, slots=True)
class Cone:
    """How ``rows`` of ``value`` are made again. ``leaves`` are read, ``calls`` run on rows, both in the order of the graph."""

    value: fx.Node
    rows: Rows
    leaves: tuple[fx.Node, ...]
    calls: tuple[CallOnRows, ...]

    @property
    def exactness(self) -> Exactness:
        """Of the least exact of the calls."""
        return max((call.exactness for call in self.calls), key=_WORSE.index, default=Exactness.COPY)

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """What runs on rows."""
        return tuple(call.node for call in self.calls)


def find_cone(value: fx.Node, rows: Rows, *, is_leaf: Callable[[fx.Node], bool], may_run: Callable[[fx.Node], bool]) -> Cone | None:
    """The cone of rows of a value; None if they cannot be made apart.

    ``is_leaf``: nodes above ``value`` that are read as they are. ``may_run``: whether an operator may run a second time. Of several results
    rows are those of the first.
    """
    forced: set[fx.Node] = set()
    while True:
        leaves, calls = _walk(value, rows, forced, is_leaf, may_run)
        if value not in calls or any(isinstance(leaf.meta.get("val"), (tuple, list)) for leaf in leaves):
            return None
        several = {node for node, made in calls.items() if node in leaves or len(made) > 1}
        if not several:
            return Cone(value, rows, tuple(sorted(leaves)), tuple(next(iter(calls[node])) for node in sorted(calls)))
        if value in several:
            return None
        forced |= several  # somebody reads all of it, or other rows: then rows are taken of the whole


def _walk(
    value: fx.Node, rows: Rows, forced: set[fx.Node], is_leaf: Callable[[fx.Node], bool], may_run: Callable[[fx.Node], bool]
) -> tuple[set[fx.Node], dict[fx.Node, set[CallOnRows]]]:
    """Leaves, and the calls that make rows of what is none."""
    own = {value, value.all_input_nodes[0]} if torch_private.is_getitem(value) else {value}
    leaves: set[fx.Node] = set()
    calls: dict[fx.Node, set[CallOnRows]] = {}
    waiting: list[Part] = [Part(value, rows)]
    seen: set[Part] = set()
    while waiting:
        part = waiting.pop()
        if part in seen:
            continue
        seen.add(part)
        call = None
        if part.node in own or (part.node not in forced and part.rows is not None and not is_leaf(part.node)):
            call = _call_of(part, may_run)
        is_dear = part.node not in own and (call is None or call.exactness is Exactness.LIBRARY or len(calls) > MAX_CALLS)
        if call is None or part.rows is None or is_dear:
            leaves.add(part.node)
        else:
            parts = _parts_of((call.args, call.kwargs))
            is_block = all(map(_is_block, (part, *parts)))
            calls.setdefault(part.node, set()).add(CallOnRows(part.node, part.rows, call.exactness, is_block))
            waiting.extend(parts)
    return leaves, calls


def _call_of(part: Part, may_run: Callable[[fx.Node], bool]) -> SlicedCall | None:
    node = part.node
    is_free = torch_private.is_getitem(node) or aliased_argument(node) is not None
    if part.rows is None or node.op != "call_function" or not (is_free or may_run(node)):
        return None
    return sliced_call(node, part.rows)


def _is_block(part: Part) -> bool:
    """Whether rows lie one after the other, if what they are of is contiguous."""
    value = part.node.meta["val"]
    sizes: tuple[int, ...] = tuple((value[0] if isinstance(value, (tuple, list)) else value).shape)
    return part.rows is None or math.prod(sizes[: part.rows.dimension]) == 1


def _parts_of(arguments: Any) -> list[Part]:
    if isinstance(arguments, Part):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = tuple(arguments.values())
    return [part for one in arguments for part in _parts_of(one)] if isinstance(arguments, (tuple, list)) else []


@dataclass(frozen=True, slots=True)
class Slice:
    """A value of which only what stands before ``rows`` is stored, the first rows along one dimension: a codec, but that what is missing is
    made of other values when it is loaded. ``leaves`` are the names of those, in any trace of the graph."""

    rows: Rows
    leaves: frozenset[str]
    action: Action = Action.SLICE
    error: str = ""

    @classmethod
    def of(cls, cone: Cone) -> Slice:
        return cls(cone.rows, frozenset(leaf.name for leaf in cone.leaves))

    @property
    def format(self) -> str:
        return f"rows{self.rows.dimension}_{self.rows.begin}_of_{self.rows.end}"

    @property
    def fraction(self) -> float:
        """How much of the value is stored."""
        return self.rows.begin / self.rows.end

    def store(self, writer: Writer, value: fx.Node) -> fx.Node:
        """Nodes that make what is stored of ``value``, one tensor; the last of them. Inductor takes ATen's copy of first rows for a view,
        and the whole value would live on."""
        return writer.call(torch.ops.dyngran.pack_slice.default, value, self.rows.dimension, 0, self.rows.begin)

    def load(self, writer: Writer, stored: fx.Node, value: fx.Node, here: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Nodes that make ``value`` of what is stored and of the leaves above it; the last of them. ``here``: what stands for each leaf."""
        made: dict[Part, fx.Node] = {}

        def rows_of(part: Part) -> fx.Node:
            known = made.get(part)
            if known is None:
                known = made[part] = make(part.node, part.rows)
            return known

        def make(node: fx.Node, rows: Rows | None) -> fx.Node:
            if node.name in self.leaves:
                leaf = here[node]
                return leaf if rows is None else writer.call(aten.slice.Tensor, leaf, rows.dimension, rows.begin, rows.end)
            call = None if rows is None else sliced_call(node, rows)
            assert call is not None, f"{node.name} stands above no leaf of {value.name}"
            args, kwargs = (_with_parts(arguments, rows_of) for arguments in (call.args, call.kwargs))
            return writer.call(call.target, *args, **kwargs)

        return writer.call(aten.cat.default, [stored, make(value, self.rows)], self.rows.dimension)


def _with_parts(arguments: Any, found: Callable[[Part], fx.Node]) -> Any:
    if isinstance(arguments, Part):
        return found(arguments)
    if isinstance(arguments, dict):
        return {name: _with_parts(one, found) for name, one in arguments.items()}
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(_with_parts(one, found) for one in arguments)
    return arguments
