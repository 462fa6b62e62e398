"""From a joint graph to the planning problem: values, ops, sides, kinds, costs, and the way back from values to nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.labels import label_of, region_of
from dyngran.compiler.loops import LoopKind, loop_kind
from dyngran.compiler.recomputable import pin_reason
from dyngran.compiler.storages import Storages, find_storages, num_elements, planned_device, storage_bytes
from dyngran.passes.carry import with_carried
from dyngran.passes.costs import base_name
from dyngran.passes.problem import Kind, Op, Problem, Side, Value
from dyngran.passes.profile_cache import Measurement
from dyngran.passes.signature import guessed_size, symbol_bound

TAKE_OVER = "gradients in the layout of their parameters"  # the name of the op that stands for autograd's copies
STORAGE_COPIES = frozenset({"copy", "select_scatter", "slice_scatter", "diagonal_scatter", "as_strided_scatter"})
CPU_RANDOM_STATE_BYTES = 5056  # torch.get_rng_state() on CPU: a Mersenne Twister

Pricer = Callable[[Sequence[fx.Node], torch.device], Sequence[Measurement]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JointGraph:
    """A joint graph as the partitioner gets it. ``input_kinds`` has one kind per primal, in order, as far as they are known; ``leaves``
    are the positions of those whose gradient autograd accumulates."""

    module: fx.GraphModule
    num_fwd_outputs: int
    static_input_indices: tuple[int, ...]
    input_kinds: tuple[Kind, ...]
    leaves: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The problem of one joint graph and what is needed to apply a plan to it."""

    joint: JointGraph
    problem: Problem
    device: torch.device
    nodes: tuple[fx.Node | None, ...]  # the node that stands for each value; None for random states, which the rewriter adds
    storages: Storages
    node_info: object
    guesses: tuple[str, ...] = ()  # sentences about sizes that depend on data: what was assumed for them

    def carrying(self, carried_bytes: int) -> Captured:
        """With so many bytes of the step before live in forward."""
        problem = with_carried(self.problem, carried_bytes)
        return replace(self, problem=problem, nodes=(*self.nodes, *(None for _ in problem.values[len(self.nodes) :])))

    def values_of(self, nodes: Sequence[fx.Node]) -> frozenset[int]:
        """The planned values whose storage these nodes share."""
        found = {storage for node in nodes for storage in self.storages.of.get(node, ())}
        return frozenset(storage for storage in found if self.problem.values[storage].producer is not None)


def capture(
    joint: JointGraph,
    *,
    price: Pricer,
    fused: bool,
    static_bytes: dict[Kind, int],
    bytes_per_us: float,
    launch_us: float,
    keep_below_bytes: int | None = None,
    holds_outputs: bool = True,
) -> Captured:
    """Build the problem of a prepared joint graph.

    ``price`` gives each op its cost; ``keep_below_bytes`` None scales with the graph: a 256th of the largest value, which
    is more than the statistics of a norm over rows of 256, at most 1 MiB.
    ``holds_outputs``: the caller holds what forward returns until backward ends; else until backward begins.
    Sizes that depend on data are planned at their upper bound, or at a guess: ``Captured.guesses`` says which.
    """
    graph = joint.module.graph
    device = planned_device(graph)
    if not fused:
        torch_private.correct_fake_values(graph)
    storages = find_storages(graph, device)
    node_info = torch_private.classify(joint.module, joint.static_input_indices, joint.num_fwd_outputs)
    returned, gradients, epilogue = _outputs(joint, storages)
    forward_outputs = frozenset(returned if holds_outputs else ())
    costs = price(storages.ops, device)
    _use_measured_sizes(storages, costs)
    if not fused:
        _use_sizes_of_copied_storages(storages)
    ops, states = _ops(storages, node_info, costs, device, fused=fused)
    if epilogue:
        ops.append(_at_the_end(len(ops), "write back mutated inputs", "copy_", epilogue, pinned="mutates an input"))
    if not holds_outputs and returned:
        ops.append(_at_the_end(len(ops), "return outputs", "output", returned, pinned="ends forward"))
    if copied_bytes := _copied_gradient_bytes(joint, storages):
        end = _at_the_end(len(ops), TAKE_OVER, "clone", tuple(sorted(gradients)), pinned="the caller's")
        ops.append(replace(end, side=Side.BACKWARD, workspace_bytes=copied_bytes))
    values = _values(joint, storages, ops, forward_outputs, gradients, states)
    if keep_below_bytes is None:
        keep_below_bytes = min(2**20, max((value.size_bytes for value in values if not value.kind.is_static), default=0) // 256)
    problem = Problem(
        values=values,
        ops=tuple(ops),
        forward_outputs=forward_outputs,
        gradients=gradients,
        static_bytes=static_bytes,
        fused=fused,
        bytes_per_us=bytes_per_us,
        launch_us=launch_us,
        keep_below_bytes=keep_below_bytes,
    )
    return Captured(
        joint=joint,
        problem=problem,
        device=device,
        nodes=(*(storage.node for storage in storages.storages), *(None for _ in states)),
        storages=storages,
        node_info=node_info,
        guesses=_guesses(graph),
    )


def _guesses(graph: fx.Graph) -> tuple[str, ...]:
    """One sentence for each size that depends on data: which op makes it and what it was taken for."""
    found: dict[object, str] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for symbol, shapes in torch_private.data_dependent_symbols(node.meta.get("val")).items():
            if symbol in found:
                continue
            upper = symbol_bound(shapes, symbol)
            size = f"size {symbol} of {label_of(node)} depends on the data"
            if upper is None:
                found[symbol] = f"{size} and nothing bounds it: planned as {guessed_size(shapes)}, a guess; larger data may pass the budget"
            else:
                found[symbol] = f"{size}: planned at its upper bound, {upper}"
    return tuple(found.values())


def _use_measured_sizes(storages: Storages, costs: Sequence[Measurement]) -> None:
    """Some kernels allocate more for a result than its shape says; what was measured is what the allocator will hand out."""
    for node, cost in zip(storages.ops, costs, strict=True):
        members = storages.members.get(node, tuple(storages.writes[node]))
        if cost.result_bytes is None or len(cost.result_bytes) != len(members):
            continue
        for member, size_bytes in zip(members, cost.result_bytes, strict=True):
            if member is not None and member in storages.writes[node] and size_bytes > storages.storages[member].size_bytes:
                storages.storages[member].size_bytes = size_bytes


def _use_sizes_of_copied_storages(storages: Storages) -> None:
    """Some kernels copy all of the memory that their first operand lies in, so that the result lies in its copy as the operand did: of a
    view the result is as large as its base."""
    for node in storages.ops:
        if not (isinstance(node.target, torch._ops.OpOverload) and base_name(node.target) in STORAGE_COPIES):
            continue
        operand = node.args[0]
        for made in storages.writes[node]:
            for base in storages.of.get(operand, ()) if isinstance(operand, fx.Node) else ():
                storages.storages[made].size_bytes = max(storages.storages[made].size_bytes, storages.storages[base].size_bytes)


def _outputs(joint: JointGraph, storages: Storages) -> tuple[tuple[int, ...], frozenset[int], tuple[int, ...]]:
    """(values the caller is given by forward, gradients, values written back into inputs at the end of forward)."""
    forward, backward, descriptors = torch_private.split_outputs(joint.module, joint.num_fwd_outputs)
    mutated = set(map(id, torch_private.mutated_input_descriptors(descriptors)))

    def planned(nodes: Sequence[object]) -> list[int]:
        found = [storage for node in nodes if isinstance(node, fx.Node) for storage in storages.of.get(node, ())]
        return [storage for storage in found if storages.storages[storage].producer is not None]

    written_back = [n for n, d in zip(forward, descriptors, strict=True) if id(getattr(d, "mutated_input", None)) in mutated]
    held = [n for n, d in zip(forward, descriptors, strict=True) if id(getattr(d, "mutated_input", None)) not in mutated]
    return tuple(dict.fromkeys(planned(held))), frozenset(planned(backward)), tuple(dict.fromkeys(planned(written_back)))


def _copied_gradient_bytes(joint: JointGraph, storages: Storages) -> int:
    """Most bytes of gradients that autograd copies at one time, for they have not the layout of their parameter: after backward, one
    parameter after the other, and what was copied is freed with the last gradient that lies in its storage.

    Source: torch/csrc/autograd/functions/accumulate_grad.h, utils/grad_layout_contract.h.
    """
    _, backward, _ = torch_private.split_outputs(joint.module, joint.num_fwd_outputs)
    primals = [node for node in joint.module.graph.nodes if node.op == "placeholder" and torch_private.is_primal(node)]
    copied: dict[tuple[int, ...], int] = {}
    if len(primals) == len(joint.input_kinds) == len(backward):
        for position in joint.leaves:
            gradient, leaf = backward[position], primals[position].meta.get("val")
            if isinstance(gradient, fx.Node) and isinstance(leaf, torch.Tensor) and not _is_taken_over(gradient.meta.get("val"), leaf):
                place = storages.of.get(gradient, ())
                copied[place] = copied.get(place, 0) + storage_bytes(leaf, planned_device(joint.module.graph))
    return max(copied.values(), default=0)


def _is_taken_over(gradient: object, leaf: torch.Tensor) -> bool:
    """Whether a gradient becomes the leaf's as it is: in its layout if that is dense, else row by row. True for what is no plain tensor."""
    if not isinstance(gradient, torch.Tensor) or gradient.layout is not torch.strided:
        return True
    have, wanted = _layout(gradient), _layout(leaf)
    return have == (wanted if _is_dense(wanted) else _layout(torch.empty([size for size, _ in wanted], device="meta")))


def _layout(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride) of every dimension along which there is more than one element."""
    sizes = [torch_private.size_hint(size) for size in tensor.shape]
    return [(size, torch_private.size_hint(stride)) for size, stride in zip(sizes, tensor.stride(), strict=True) if size != 1]


def _is_dense(layout: list[tuple[int, int]]) -> bool:
    """Whether the elements fill a block of memory, each at a place of its own."""
    extent = 1
    for size, stride in sorted(layout, key=lambda dimension: dimension[1]):
        if stride != extent:
            return False
        extent *= size
    return True


def _ops(
    storages: Storages, node_info: object, costs: Sequence[Measurement], device: torch.device, *, fused: bool
) -> tuple[list[Op], list[Value]]:
    """All ops in order. Before each random op that may run again stands one that makes the generator's state, which then must be saved."""
    ops: list[Op] = []
    states: list[Value] = []
    for node, cost in zip(storages.ops, costs, strict=True):
        op = _op(node, len(ops), storages, node_info, cost, fused=fused)
        if torch_private.is_random(node) and not op.pinned and op.side is Side.FORWARD and device.type == "cpu":
            state = Value(
                index=len(storages.storages) + len(states),
                name=f"{node.name}_state",
                size_bytes=CPU_RANDOM_STATE_BYTES,
                kind=Kind.ACTIVATION,
                producer=len(ops),
                label=f"random state of {label_of(node)}",
            )
            states.append(state)
            ops.append(
                Op(
                    index=len(ops),
                    name=state.name,
                    target="random state",
                    side=Side.FREE,
                    reads=(),
                    writes=(state.index,),
                    cost_us=0.0,
                    cost_source="free",
                    pinned="random numbers are drawn again from it",
                    region=op.region,
                )
            )
            # the state of the moment is set aside while the op draws from the saved one
            op = replace(op, index=len(ops), reads=(*op.reads, state.index), rerun_bytes=CPU_RANDOM_STATE_BYTES)
        ops.append(op)
    return ops, states


def _at_the_end(index: int, name: str, target: str, values: tuple[int, ...], *, pinned: str) -> Op:
    """What the runtime does with values at the end of forward (mutated inputs are written back, outputs returned): until then they live."""
    return Op(
        index=index,
        name=name,
        target=target,
        side=Side.FORWARD,
        reads=values,
        writes=(),
        cost_us=0.0,
        cost_source="free",
        pinned=pinned,
    )


def _op(node: fx.Node, position: int, storages: Storages, node_info: object, cost: Measurement, *, fused: bool) -> Op:
    if node in node_info.tangents_closure or torch_private.must_be_in_backward(node):  # type: ignore[attr-defined]  # torch's NodeInfo
        side = Side.BACKWARD
    elif _runs_in_forward(node, node_info):
        side = Side.FORWARD
    else:
        side = Side.FREE
    kind = loop_kind(node)
    return Op(
        index=position,
        name=node.name,
        target=str(node.target),
        side=side,
        reads=storages.reads[node],
        writes=storages.writes[node],
        cost_us=cost.cost_us,
        cost_source=cost.source,
        workspace_bytes=cost.workspace_bytes,
        pinned="" if side is Side.BACKWARD else pin_reason(node, fused=fused),
        region=region_of(node),
        never_saved=node.meta.get("recompute") in torch_private.USER_RECOMPUTES or _is_constant(node),
        fusible=kind is not LoopKind.NONE,
        reduction=kind is LoopKind.REDUCTION,
        num_elements=num_elements(node),
    )


def _is_constant(node: fx.Node) -> bool:
    """Made from nothing (``full``, ``arange``): never worth saving, and as a saved operand it would keep loops from inlining."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and not node.all_input_nodes
        and not torch_private.is_random(node)
        and not pin_reason(node)
    )


def _runs_in_forward(node: fx.Node, node_info: object) -> bool:
    """A forward output needs it, or it is a scalar or makes one: scalars are cheap to save and shapes depend on them."""
    is_required: bool = node_info.is_required_fw(node)  # type: ignore[attr-defined]  # torch's NodeInfo
    return is_required or torch_private.is_sym_node(node) or any(torch_private.is_sym_node(user) for user in node.users)


def _values(
    joint: JointGraph,
    storages: Storages,
    ops: Sequence[Op],
    outputs: frozenset[int],
    gradients: frozenset[int],
    states: Sequence[Value],
) -> tuple[Value, ...]:
    producer = {write: op.index for op in ops for write in op.writes}
    needed_late = _needed_late(ops)
    primals = [node for node in joint.module.graph.nodes if node.op == "placeholder" and torch_private.is_primal(node)]
    kinds = dict(zip(primals, joint.input_kinds, strict=False)) if len(primals) == len(joint.input_kinds) else {}
    values = []
    for storage in storages.storages:
        node = storage.node
        if storage.producer is None:
            kind = Kind.TANGENT if torch_private.is_tangent(node) else kinds.get(node, Kind.INPUT)
        elif storage.index in gradients:
            kind = Kind.GRADIENT
        elif storage.index in outputs:
            kind = Kind.OUTPUT
        elif ops[producer[storage.index]].side is not Side.BACKWARD and storage.index in needed_late:
            kind = Kind.ACTIVATION
        else:
            kind = Kind.TEMPORARY
        values.append(
            Value(
                index=storage.index,
                name=node.name,
                size_bytes=storage.size_bytes,
                kind=kind,
                producer=producer.get(storage.index),
                label=label_of(storage.producer or node),
            )
        )
    return (*values, *states)


def _needed_late(ops: Sequence[Op]) -> set[int]:
    """Values that backward reads, or that something it reads could be computed from again."""
    needed = {read for op in ops if op.side is Side.BACKWARD for read in op.reads}
    for op in reversed(ops):
        if op.side is not Side.BACKWARD and not op.pinned and needed.intersection(op.writes):
            needed.update(op.reads)
    return needed
