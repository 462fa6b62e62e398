"""Nodes that copy values to host memory and back, where a plan wants them in two graphs that may be ordered again.

Inductor orders kernels by what they read and makes loops one kernel wherever it can. A loop that reads a fetched value could so become part
of an earlier kernel, take fetch and wait along, and stand still there for the whole copy; or the wait could stand before kernels that do
not need the value. So where loops fuse, loops that read a fetched value move to just before the first kernel that needs them and is no
loop, and fetch and wait read what the last such kernel before them made.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.codecs import Offload, Writer, origin
from dyngran.compiler.loops import LoopKind, loop_kind
from dyngran.compiler.storages import aliased_argument
from dyngran.kernels.operators import NAMESPACE
from dyngran.passes.forms import loaded_name, stored_name
from dyngran.passes.problem import Op, Problem


class CopyWriter:
    """Writes the copies of one plan. `Offload` names ops of ``problem``, which have nodes of their name where they run."""

    def __init__(self, problem: Problem, forward: fx.Graph, backward: fx.Graph) -> None:
        self._fused = problem.fused
        self._ops: Sequence[Op] = problem.ops
        self._made = {node.name: node for node in forward.nodes}
        self._backward = {node.name: node for node in backward.nodes}

    def delay_readers(self, given: Iterable[fx.Node]) -> None:
        """Move loops of backward that read what is to be fetched, and loops that read those, as late as kernels that are none allow.

        ``given``: the placeholders that stand for what is fetched. To be called before `back`, once.
        """
        for read in given if self._fused else ():
            loops: dict[fx.Node, None] = {}
            for node in read.graph.nodes:
                if node is read or (loops.keys().isdisjoint(node.all_input_nodes) and read not in node.all_input_nodes):
                    continue
                if node.op == "output" or not is_loop_or_view(node):
                    for loop in loops:
                        node.prepend(loop)
                    break
                loops[node] = None

    def out(self, codec: Offload, value: fx.Node) -> fx.Node:
        """Copies a value of forward to host memory and holds it until it is there; returns the copy."""
        writer = Writer(value.graph, value.meta["val"], fused=False, meta=origin(value))
        start, done = self._last_made(codec.start), self._last_made(codec.done)
        begin = value if start is None else max(value, start)
        with value.graph.inserting_before(begin.next):
            stored = codec.store(writer, value)
        stored.name = stored_name(value.name, codec.format)
        with value.graph.inserting_before(stored.next if done is None or done < stored else done.next):
            codec.stored(writer, stored, value)
        return stored

    def back(self, codec: Offload, read: fx.Node, stored: fx.Node) -> None:
        """Put a copy in host memory in the place of an input of backward."""
        with read.graph.inserting_before(read):
            placeholder = read.graph.placeholder(stored.name)
        placeholder.meta = {**read.meta, **stored.meta}
        if read.users:
            like, first = read.meta["val"], min(read.users)
            fetch = self._backward.get(self._ops[codec.fetch].name, first)
            writer, begin = Writer(read.graph, like, fused=False, meta=origin(read)), min(first, fetch)
            with read.graph.inserting_before(begin):
                loaded = codec.load(writer, placeholder, like, self._kernel_before(begin))
            loaded.name = loaded_name(read.name, codec.format)
            with read.graph.inserting_before(first):
                codec.loaded(writer, loaded, self._kernel_before(first))
            read.replace_all_uses_with(loaded)
        read.graph.erase_node(read)

    def _last_made(self, op: int) -> fx.Node | None:
        """The last node that runs in forward of the ops up to one."""
        return next((node for one in reversed(self._ops[: op + 1]) if (node := self._made.get(one.name)) is not None), None)

    def _kernel_before(self, node: fx.Node) -> fx.Node | None:
        """A result of the last kernel before a node that is no loop; None if there is none, or where nothing is ordered again."""
        before = node.prev
        while self._fused and before.op == "call_function":
            made = _maker(before)
            is_operator = isinstance(made.target, torch._ops.OpOverload) and made.target.namespace != NAMESPACE
            if is_operator and not is_loop_or_view(made) and torch_private.is_plain_fake(before.meta.get("val")):
                return before
            before = before.prev
        return None


def _maker(node: fx.Node) -> fx.Node:
    """The node itself, or the one of whose results it takes one."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def is_loop_or_view(node: fx.Node) -> bool:
    """Whether a fusing code generator makes no kernel of a node that stands where the node does."""
    made = _maker(node)
    return loop_kind(made) is not LoopKind.NONE or aliased_argument(made) is not None
