"""A joint graph whose backward makes slices whole again: before it is cut in two, so that whatever that takes is found and crosses too.

Forward and backward share the nodes of a joint graph. So where a value is stored as a slice, everybody reads what is loaded instead of it;
once the graph has been cut, forward's readers get the value itself back, and what loads it is erased there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from dyngran.compiler.capture import Captured
from dyngran.compiler.codecs import Writer, origin
from dyngran.compiler.slices import Slice
from dyngran.passes.forms import loaded_name, stored_name
from dyngran.passes.rewrite import drop_unread


@dataclass(frozen=True, slots=True)
class SlicedJoint:
    """``module``: the graph. ``nodes``: its nodes, by those of the graph that it was made from; ``stored``: what is to cross, by value."""

    module: fx.GraphModule
    nodes: dict[fx.Node, fx.Node]
    stored: dict[int, fx.Node]
    _loaded: dict[str, str]  # names of what is loaded, each with that of its value
    _loading: frozenset[str]  # of everything that loads

    def restore(self, forward: fx.GraphModule) -> None:
        """Let forward read the values themselves."""
        nodes = {node.name: node for node in forward.graph.nodes}
        for loaded, value in self._loaded.items():
            if loaded in nodes:
                nodes[loaded].replace_all_uses_with(nodes[value])
        drop_unread(forward.graph, is_needed=lambda node: node.name not in self._loading)
        forward.recompile()


def with_slices(captured: Captured, slices: Mapping[int, Slice]) -> SlicedJoint:
    """The joint graph with every value of ``slices`` stored and loaded."""
    joint, fused = captured.joint.module, captured.problem.fused
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in joint.graph.nodes:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
    stored: dict[int, fx.Node] = {}
    loaded: dict[fx.Node, fx.Node] = {}
    loading: set[str] = set()
    storing: set[fx.Node] = set()
    for value, codec in sorted(slices.items()):
        original = captured.nodes[value]
        assert original is not None
        node = nodes[original]
        like, meta = node.meta["val"], origin(node)
        with graph.inserting_before(node.next):
            store, load = (Writer(graph, like, fused=fused, meta=meta) for _ in range(2))
            stored[value] = codec.store(store, node)
            loaded[node] = codec.load(load, stored[value], original, nodes)
        stored[value].name, loaded[node].name = (name(node.name, codec.format) for name in (stored_name, loaded_name))
        storing.update(store.nodes)
        loading.update(one.name for one in load.nodes)
    for node, made in loaded.items():
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user not in storing)
    module = fx.GraphModule(joint, graph)
    return SlicedJoint(module, nodes, stored, {made.name: node.name for node, made in loaded.items()}, frozenset(loading))


def moved(nodes: Sequence[fx.Node], joint: SlicedJoint | None) -> list[fx.Node]:
    """The nodes as they stand in a graph with slices, if there is one."""
    return list(nodes) if joint is None else [joint.nodes[node] for node in nodes]
