"""A joint graph in which every run of a schedule is a node of its own: forward's runs, then backward's, each in the schedule's order.

What a run reads is the newest copy before it, and what backward's runs read of forward's is what must be saved. Cutting such a graph in two
(`compiler/partition.py`) leaves nothing to decide. Views and members of tuples are no ops of the problem: members are taken where their
op runs, views are made where they are first read, once for each copy of their base and on each side, so that neither outlives its base for
the sake of a later reader. Scalars are read off a tensor as soon as forward has it, and saved.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.capture import Captured
from dyngran.passes.errors import GraphBroken
from dyngran.passes.plan import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrolled:
    """A joint graph that runs a schedule.

    Attributes:
        module: the graph; inputs and outputs are those of the joint graph it was made from.
        inputs: its placeholders, by those of that graph.
        crossing: forward's nodes that backward reads; symbols: the scalars that it may read.
        values: the planned values behind ``crossing``.
        forward, backward: names of the nodes of each side.
    """

    module: fx.GraphModule
    inputs: dict[fx.Node, fx.Node]
    crossing: tuple[fx.Node, ...]
    symbols: tuple[fx.Node, ...]
    values: frozenset[int]
    forward: frozenset[str]
    backward: frozenset[str]


def unroll(captured: Captured, schedule: Schedule) -> Unrolled:
    """Write out a schedule that can run (`passes.schedule.check_schedule`, `passes.order_rules.check_order`).

    Random ops that run more than once draw the same numbers each time: the first run keeps the generator's state, the others start from it.
    Raises GraphBroken if a run reads what no run before it has made.
    """
    return _Unroller(captured, schedule).unroll()


def nodes_of_ops(captured: Captured) -> list[fx.Node | None]:
    """The node that each op of the problem stands for; None for what the runtime does (random states, what happens at forward's end)."""
    known = {node.name: node for node in captured.storages.ops}
    nodes = [known.get(op.name) if op.target != "random state" else None for op in captured.problem.ops]
    if sum(node is not None for node in nodes) != len(known):
        raise GraphBroken("the problem's ops are not those of the joint graph")
    return nodes


def makers(captured: Captured) -> dict[fx.Node, frozenset[fx.Node]]:
    """For every call of the joint graph the ops that it is a result or a view of, or that it computes scalars from; an op is its own."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in captured.joint.module.graph.nodes:
        if node in captured.storages.writes:
            found[node] = frozenset((node,))
        elif node.op == "call_function":
            found[node] = frozenset().union(*(found.get(operand, frozenset()) for operand in node.all_input_nodes))
    return found


class _Unroller:
    """Runs a schedule symbolically. ``_newest`` has the newest copy of inputs, ops and members of tuples."""

    def __init__(self, captured: Captured, schedule: Schedule) -> None:
        self._captured = captured
        self._schedule = schedule
        self._nodes = nodes_of_ops(captured)
        self._joint = captured.joint.module
        self._graph = fx.Graph()
        self._newest: dict[fx.Node, fx.Node] = {}
        self._from_forward: dict[fx.Node, fx.Node] | None = None  # None while forward is being written
        self._values = self._values_of_results()
        self._views: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}
        self._scalars: dict[fx.Node, fx.Node] = {}
        self._num_runs = Counter((*schedule.forward, *schedule.backward))
        self._states: dict[fx.Node, fx.Node] = {}
        self._state_values: dict[fx.Node, int] = {}
        self._copies: Counter[fx.Node] = Counter()
        self._forward: set[fx.Node] = set()
        self._crossing: dict[fx.Node, int | None] = {}

    def unroll(self) -> Unrolled:
        joint, num_outputs = self._joint, self._captured.joint.num_fwd_outputs
        inputs = {node: self._emit(node) for node in joint.graph.nodes if node.op == "placeholder"}
        self._newest.update(inputs)
        waiting = self._waiting_scalars()
        self._read_scalars(waiting, None)
        for index in self._schedule.forward:
            self._run(index)
            self._read_scalars(waiting, self._nodes[index])
        output = next(iter(joint.graph.find_nodes(op="output")))
        results = list(_leaves(output.args[0]))
        is_made = self._made()
        returned = [self._read(node) if isinstance(node, fx.Node) and is_made[node] else None for node in results[:num_outputs]]
        forward = [node for node in self._graph.nodes if node.op != "placeholder"]
        self._forward.update(forward)
        self._from_forward = dict(self._newest)
        self._views.clear()
        for index in self._schedule.backward:
            self._run(index)
        for place, node in enumerate(results):
            if place >= num_outputs:
                returned.append(self._read(node) if isinstance(node, fx.Node) else node)
            elif returned[place] is None:  # no tensor, or memory that only backward writes
                returned[place] = self._read(node) if isinstance(node, fx.Node) else node
        self._graph.output(tuple(returned)).meta = dict(output.meta)
        self._graph.lint()
        names = frozenset(node.name for node in forward)
        return Unrolled(
            module=fx.GraphModule(joint, self._graph),
            inputs=inputs,
            crossing=tuple(self._crossing),
            symbols=tuple(node for node in (*inputs.values(), *forward) if _is_scalar(node)),
            values=frozenset(value for value in self._crossing.values() if value is not None),
            forward=names,
            backward=frozenset(node.name for node in self._graph.nodes if node.op == "call_function" and node.name not in names),
        )

    def _values_of_results(self) -> dict[fx.Node, int | None]:
        """Ops and members of their tuples, each with the value that it is, None for none or several."""
        storages = self._captured.storages
        found: dict[fx.Node, int | None] = {}
        for node in storages.ops:
            writes = storages.writes[node]
            found[node] = writes[0] if node not in storages.members and writes else None
            for member in self._members(node):
                of = storages.of.get(member, ())
                found[member] = of[0] if len(of) == 1 else None
        return found

    def _members(self, op: fx.Node) -> list[fx.Node]:
        """The getitems that take the members of an op's tuple."""
        return [user for user in op.users if torch_private.is_getitem(user)] if op in self._captured.storages.members else []

    def _emit(self, node: fx.Node, target: Any = None, args: tuple[Any, ...] | None = None) -> fx.Node:
        """A copy of a node of the joint graph; it reads what its operands are now, or ``args`` if given."""
        count = self._copies[node]
        self._copies[node] += 1
        read = fx.node.map_arg
        copy = self._graph.create_node(
            node.op,
            node.target if target is None else target,
            read(node.args, self._read) if args is None else args,
            read(node.kwargs, self._read),
            f"{node.name}_run{count + 1}" if count else node.name,
            node.type,
        )
        copy.meta = dict(node.meta)
        return copy

    def _run(self, index: int) -> None:
        node = self._nodes[index]
        if node is None:
            return
        if torch_private.is_random(node) and self._num_runs[index] > 1:
            self._newest[node] = self._draw(node, index)
        else:
            self._newest[node] = self._emit(node)
        for member in self._members(node):
            self._newest[member] = self._emit(member)

    def _draw(self, node: fx.Node, index: int) -> fx.Node:
        """A random op that runs several times: the first run returns the generator's state beside the result."""
        save, again = torch_private.random_state_operators()
        args = fx.node.map_arg(node.args, self._read)
        if node in self._states:
            return self._emit(node, again, (self._cross(self._states[node], self._state_values.get(node)), node.target, *args))
        pair = self._emit(node, save, (node.target, *args))
        state = self._graph.create_node("call_function", operator.getitem, (pair, 0), {}, f"{node.name}_state")
        result = self._graph.create_node("call_function", operator.getitem, (pair, 1), {}, f"{node.name}_result", node.type)
        result.meta = dict(node.meta)
        state.meta["val"] = torch_private.sample_random_state(node)
        pair.meta["val"] = (state.meta["val"], node.meta.get("val"))
        self._states[node] = state
        before = self._captured.problem.ops[index - 1]
        if index and before.target == "random state":
            self._state_values[node] = before.writes[0]
        return result

    def _read(self, node: fx.Node) -> fx.Node:
        """The copy of a node's result that whatever is written next reads; views of it are made now."""
        if node.op == "placeholder":
            return self._newest[node]
        if node.op == "get_attr":
            return self._newest.get(node) or self._newest.setdefault(node, self._emit(node))
        if node in self._values:
            return self._result(node)
        if node in self._scalars:
            return self._scalars[node]
        key = (node, tuple(self._read(operand) for operand in node.all_input_nodes))
        if key not in self._views:
            self._views[key] = self._emit(node)
        return self._views[key]

    def _result(self, node: fx.Node) -> fx.Node:
        value = self._values[node]
        found = self._newest.get(node)
        if self._from_forward is not None and value in self._schedule.saved:
            found = self._from_forward.get(node, found)
        if found is None:
            raise GraphBroken(f"the schedule reads {node.name} before anything has made it")
        return self._cross(found, value)

    def _cross(self, found: fx.Node, value: int | None) -> fx.Node:
        """Note that backward reads a node of forward's."""
        if found in self._forward and not torch_private.is_sym_node(found):
            if not isinstance(found.meta.get("val"), torch.Tensor) and not torch_private.is_opaque(found):
                raise GraphBroken(f"backward would read {found.name}, which forward makes and which is no tensor")
            self._crossing[found] = value
        return found

    def _waiting_scalars(self) -> dict[fx.Node | None, list[tuple[fx.Node, set[fx.Node]]]]:
        """Scalars that are no ops and depend on no tangent, by each op that they wait for (None: none), with all that they wait for."""
        closure = self._captured.node_info.tangents_closure  # type: ignore[attr-defined]  # torch's NodeInfo
        waiting: dict[fx.Node | None, list[tuple[fx.Node, set[fx.Node]]]] = {}
        for node, ops in makers(self._captured).items():
            if node not in self._values and torch_private.is_sym_node(node) and node not in closure:
                entry = (node, set(ops))
                for one in ops or (None,):
                    waiting.setdefault(one, []).append(entry)
        return waiting

    def _read_scalars(self, waiting: dict[fx.Node | None, list[tuple[fx.Node, set[fx.Node]]]], made: fx.Node | None) -> None:
        """Write the scalars that waited for this op and now for no other."""
        for node, missing in waiting.pop(made, ()):
            missing.discard(made)
            if not missing:
                self._scalars[node] = self._read(node)

    def _made(self) -> dict[fx.Node, bool]:
        """Whether each node of the joint graph is, or is a view of, something that exists by now."""
        made: dict[fx.Node, bool] = {}
        for node in self._joint.graph.nodes:
            if node in self._values:
                made[node] = node in self._newest
            elif node.op == "call_function":
                made[node] = all(map(made.__getitem__, node.all_input_nodes))
            else:
                made[node] = not torch_private.is_tangent(node)
        return made


def _is_scalar(node: fx.Node) -> bool:
    return torch_private.is_sym_node(node) and not torch_private.is_assert_only(node)


def _leaves(results: Any) -> Iterator[Any]:
    if isinstance(results, (tuple, list)):
        for result in results:
            yield from _leaves(result)
    else:
        yield results
