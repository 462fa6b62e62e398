"""Apply a plan: cut a joint graph into the forward graph that saves what the plan keeps and the backward graph that recomputes the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.capture import Captured
from dyngran.compiler.codecs import Codec, Offload, Writer, origin
from dyngran.compiler.copy_nodes import CopyWriter
from dyngran.compiler.order_rules import order_rules
from dyngran.compiler.slice_nodes import SlicedJoint, moved, with_slices
from dyngran.compiler.slices import Slice
from dyngran.compiler.unroll import unroll
from dyngran.passes.errors import GraphBroken, InvalidOption
from dyngran.passes.forms import loaded_name, stored_name
from dyngran.passes.order_rules import check_order
from dyngran.passes.plan import Schedule
from dyngran.passes.rewrite import delay_recompute, drop_unread, raise_shape_reads
from dyngran.passes.schedule import check_schedule


def partition(
    captured: Captured, saved: Iterable[int], schedule: Schedule | None = None, *, codecs: Mapping[int, tuple[int, Codec | Slice]] = {}
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(forward, backward) modules for a set of saved values, random masks replayed, recompute placed before its first reader.

    Saved values beyond those of the graph are stored forms: ``codecs`` says of which value each is, and how it is stored.

    With a ``schedule`` both run its ops in its order, as often as it says; runs whose results nobody reads are left out.

    Raises GraphBroken if backward would read something that is neither saved nor recomputable, or if the schedule cannot run
    (`check_runnable`); InvalidOption for a schedule where the code generator orders ops itself.
    """
    if schedule is not None:
        return _partition_scheduled(captured, frozenset(saved), schedule)
    stored = dict(codecs[value] for value in saved if value in codecs)
    crossing = {codecs[value][0] if value in codecs else value for value in saved}
    sliced = _with_slices(captured, stored)
    joint = captured.joint.module if sliced is None else sliced.module
    saved_nodes = [node for value in sorted(crossing) if (node := _crossing_node(captured, value, sliced)) is not None]
    symbols = _forward_symbols(captured)
    forward, backward = _extract(
        captured,
        joint,
        _inputs_of_backward(captured, joint, saved_nodes) + saved_nodes,
        moved(symbols, sliced),
        None if sliced is None else sliced.nodes,
    )
    if sliced is not None:
        sliced.restore(forward)
    _drop_unread_random(backward)
    forward, backward = _replay_random(captured, forward, backward)
    backward = delay_recompute(
        backward, is_root=lambda node: torch_private.is_tangent(node) or torch_private.must_be_in_backward(node) or _is_mutation(node)
    )
    _check_no_pinned_twice(captured, forward, backward)
    _store(captured, {value: codec for value, codec in stored.items() if not isinstance(codec, Slice)}, forward, backward)
    return _raised(forward), _raised(backward)


def _with_slices(captured: Captured, stored: Mapping[int, Codec | Slice]) -> SlicedJoint | None:
    slices = {value: codec for value, codec in stored.items() if isinstance(codec, Slice)}
    return with_slices(captured, slices) if slices else None


def _crossing_node(captured: Captured, value: int, sliced: SlicedJoint | None) -> fx.Node | None:
    """What crosses of a value: it itself, or the slice of it."""
    node = captured.nodes[value]
    return node if node is None or sliced is None else sliced.stored.get(value, sliced.nodes[node])


def _store(captured: Captured, stored: Mapping[int, Codec], forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Let forms of saved values cross instead: stored as soon as they are made, loaded just before they are read, and copied to host memory
    and back where their codec says.

    Raises GraphBroken if a value does not cross as it is.
    """
    made = {node.name: node for node in forward.graph.nodes}
    given = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    output = forward.graph.output_node()
    results: list[Any] = [*output.args[0]]  # type: ignore[misc]  # it returns a tuple
    copies = CopyWriter(captured.problem, forward.graph, backward.graph)
    copies.delay_readers(
        [
            given[node.name]
            for value, codec in stored.items()
            if isinstance(codec, Offload) and (node := captured.nodes[value]) and node.name in given
        ]
    )
    for value, codec in sorted(stored.items()):
        original = captured.nodes[value]
        assert original is not None
        name = original.name
        num_outputs = captured.joint.num_fwd_outputs  # among which it may be as well, to be copied into a buffer
        places = [place for place, result in enumerate(results) if result is made.get(name) and place >= num_outputs]
        if not places and name not in given:
            continue  # extraction found that backward reads nothing of it
        if name not in given or len(places) != 1:
            raise GraphBroken(f"pass partition cannot store {name} as {codec.format}: it does not cross to backward by itself")
        if isinstance(codec, Offload):
            results[places[0]] = copies.out(codec, made[name])
            copies.back(codec, given[name], results[places[0]])
        else:
            results[places[0]] = _stored(codec, made[name], fused=captured.problem.fused)
            _load(codec, given[name], results[places[0]], fused=captured.problem.fused)
    output.args = (tuple(results),)
    for module in (forward, backward):
        module.recompile()


def _stored(codec: Codec, value: fx.Node, *, fused: bool) -> fx.Node:
    with value.graph.inserting_before(value.next):
        stored = codec.store(Writer(value.graph, value.meta["val"], fused=fused, meta=origin(value)), value)
    stored.name = stored_name(value.name, codec.format)
    return stored


def _load(codec: Codec, read: fx.Node, stored: fx.Node, *, fused: bool) -> None:
    """Put what is stored in the place of an input of backward."""
    with read.graph.inserting_before(read):
        placeholder = read.graph.placeholder(stored.name)
    placeholder.meta = {**read.meta, **stored.meta}
    if read.users:
        like = read.meta["val"]
        with read.graph.inserting_before(min(read.users)):
            loaded = codec.load(Writer(read.graph, like, fused=fused, meta=origin(read)), placeholder, like)
        loaded.name = loaded_name(read.name, codec.format)
        read.replace_all_uses_with(loaded)
    read.graph.erase_node(read)


def check_runnable(captured: Captured, schedule: Schedule) -> None:
    """Raises ValueError with the first thing that keeps a schedule from running exactly on this graph: who reads what, what must run once
    or in forward, the order of random draws and of what overwrites memory."""
    check_schedule(captured.problem, schedule)
    check_order(captured.problem, order_rules(captured), schedule)


def _partition_scheduled(captured: Captured, saved: frozenset[int], schedule: Schedule) -> tuple[fx.GraphModule, fx.GraphModule]:
    if captured.problem.fused:
        raise InvalidOption("this plan prescribes the order of ops, which needs codegen='eager': Inductor orders its kernels itself")
    try:
        check_runnable(captured, schedule)
    except ValueError as error:
        raise GraphBroken(f"the plan's schedule cannot run: {error}") from error
    unrolled = unroll(captured, schedule)
    if unplanned := unrolled.values - saved:
        name = captured.problem.values[min(unplanned)].name
        raise GraphBroken(f"the plan's schedule reads {name} in backward as forward made it, and the plan does not save it")
    forward, backward = _extract(
        captured,
        unrolled.module,
        [*_inputs_of_backward(captured, unrolled.module, unrolled.crossing), *unrolled.crossing],
        list(unrolled.symbols),
        unrolled.inputs,
    )
    for module, names in ((forward, unrolled.forward), (backward, unrolled.backward)):
        _keep_only(module, names)
    return _raised(forward), _raised(backward)


def _raised(module: fx.GraphModule) -> fx.GraphModule:
    """The same with everything that reads a tensor and makes none, which the timeline does not see, next to the tensor."""
    return torch_private.raise_getitems(raise_shape_reads(module))


def _extract(
    captured: Captured,
    joint: fx.GraphModule,
    saved: list[fx.Node],
    symbols: list[fx.Node],
    inputs: dict[fx.Node, fx.Node] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Both graphs out of ``joint``, whose placeholders are those of the captured graph, or stand for them in ``inputs``."""
    opaque = [node for node in saved if torch_private.is_opaque(node)]
    static_nodes = captured.node_info.static_lifetime_input_nodes  # type: ignore[attr-defined]  # torch's NodeInfo
    return torch_private.extract_forward_and_backward(
        joint,
        [node for node in saved if node not in set(opaque)],
        symbols,
        opaque,
        num_fwd_outputs=captured.joint.num_fwd_outputs,
        static_lifetime_nodes=static_nodes if inputs is None else type(static_nodes)(inputs[node] for node in static_nodes),
    )


def _inputs_of_backward(captured: Captured, joint: fx.GraphModule, crossing: Iterable[fx.Node]) -> list[fx.Node]:
    """The caller's tensors that backward may read as they are.

    Not those that only random draws read which nobody wants there: extraction takes such draws for effects, and would save what they read.
    Autograd refuses a saved input that is written to before backward, read or not.
    """
    _, gradients, _ = torch_private.split_outputs(joint, captured.joint.num_fwd_outputs)
    wanted = [node for node in gradients if isinstance(node, fx.Node)]
    wanted += [node for node in joint.graph.nodes if node.op == "call_function" and node.is_impure() and not torch_private.is_random(node)]
    seen = set(crossing)
    while wanted:
        node = wanted.pop()
        if node not in seen:
            seen.add(node)
            wanted.extend(node.all_input_nodes)
    return [
        node
        for node in joint.graph.nodes
        if node.op == "placeholder" and node in seen and torch_private.is_primal(node) and not torch_private.is_sym_node(node)
    ]


def _keep_only(module: fx.GraphModule, names: Collection[str]) -> None:
    """Extraction leaves what it takes for an effect, random draws among it, on either side: each side keeps its own, and scalars that it
    computes from saved sizes (a comparison cannot be saved)."""
    drop_unread(module.graph, is_needed=lambda node: node.name in names)
    calls = (node for node in module.graph.nodes if node.op == "call_function" and not torch_private.is_sym_node(node))
    astray = [node.name for node in calls if node.name not in names]
    if astray:
        raise GraphBroken(f"{astray[0]} belongs to the other side of the schedule, and something on this side reads it")


def _forward_symbols(captured: Captured) -> list[fx.Node]:
    """Every scalar that forward can compute; extraction drops those that backward does not read."""
    closure = captured.node_info.tangents_closure  # type: ignore[attr-defined]  # torch's NodeInfo
    return [
        node
        for node in captured.joint.module.graph.nodes
        if torch_private.is_sym_node(node) and node not in closure and not torch_private.is_assert_only(node)
    ]


def _drop_unread_random(backward: fx.GraphModule) -> None:
    """Extraction leaves random ops whose result was saved: torch takes drawing numbers for an effect. Here nobody reads them."""

    def is_needed(node: fx.Node) -> bool:
        return node.op in ("placeholder", "output") or (node.is_impure() and not torch_private.is_random(node))

    backward.graph.eliminate_dead_code(is_impure_node=is_needed)
    backward.recompile()


def _replay_random(captured: Captured, forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Random ops that run in both graphs must draw the same numbers; one that runs only in backward must not move the user's stream."""
    in_forward = {node.name for node in forward.graph.nodes if torch_private.is_random(node)}
    in_backward = {node.name for node in backward.graph.nodes if torch_private.is_random(node)}
    twice = [
        node
        for node in captured.joint.module.graph.nodes
        if node.name in in_forward and node.name in in_backward and torch_private.is_random(node)
    ]
    if not twice:
        return forward, backward
    results: list[Any] = [*forward.graph.output_node().args[0]]  # type: ignore[misc]  # it returns a tuple
    saved = [node for node in results[captured.joint.num_fwd_outputs :] if isinstance(node, fx.Node)]
    num_symbols = sum(torch_private.is_sym_node(node) for node in saved)  # those that backward reads: they come last
    return torch_private.replay_random_state(captured.joint.module, forward, backward, twice, num_symbols)


def _is_mutation(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _check_no_pinned_twice(captured: Captured, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    names = {node.name for node in forward.graph.nodes}
    pinned = {op.name for op in captured.problem.ops if op.pinned}
    for node in backward.graph.nodes:
        if node.op == "call_function" and node.name in pinned and node.name in names:
            raise GraphBroken(f"pass partition would run {node.name} twice although it must run once")
