"""From a joint graph to the planning problem: values, ops, sides, kinds, costs, and the way back from values to nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.loops import LoopKind, loop_kind
from dyngran.compiler.recomputable import pin_reason
from dyngran.compiler.storages import Storages, find_storages, planned_device, tensors_of
from dyngran.passes.problem import Kind, Op, Problem, Side, Value
from dyngran.passes.profile_cache import Measurement
from dyngran.passes.signature import guessed_size, symbol_bound

CPU_RANDOM_STATE_BYTES = 5056  # torch.get_rng_state() on CPU: a Mersenne Twister

Pricer = Callable[[Sequence[fx.Node], torch.device], Sequence[Measurement]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JointGraph:
    """A joint graph as the partitioner gets it. ``input_kinds`` has one kind per primal, in order, as far as they are known."""

    module: fx.GraphModule
    num_fwd_outputs: int
    static_input_indices: tuple[int, ...]
    input_kinds: tuple[Kind, ...]


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

    def values_of(self, nodes: Sequence[fx.Node]) -> frozenset[int]:
        """The planned values whose storage these nodes share."""
        found = {storage for node in nodes for storage in self.storages.of.get(node, ())}
        return frozenset(storage for storage in found if self.problem.values[storage].producer is not None)


def prepare(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Bring the graph into the form that the problem, the plan and the fingerprint refer to: dead code out, one copy of every
    subexpression, forced saves tagged, inputs that forward overwrites copied before they are read."""
    joint.graph.eliminate_dead_code()
    joint.graph = torch_private.common_subexpressions(joint.graph)
    torch_private.tag_forced_saves(joint)
    _copy_overwritten_inputs(joint, num_fwd_outputs)
    joint.recompile()


def _copy_overwritten_inputs(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
    """An input that forward overwrites holds other numbers by the time backward runs: whatever may run in backward reads a copy.

    The copy is made once, before its first reader, and tagged so that it is never made again from the overwritten input. Inputs that only
    feed forward (counters, statistics nobody differentiates through) get none.
    """
    _, _, descriptors = torch_private.split_outputs(joint, num_fwd_outputs)
    mutated = torch_private.mutated_input_descriptors(descriptors)
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    feeds_backward = _feeding_backward(joint.graph)
    for node in placeholders:
        is_returned = any(node.meta.get("desc") == descriptor for descriptor in mutated)
        if not isinstance(node.meta.get("val"), torch.Tensor) or not (is_returned or any(_overwrites(u, node) for u in node.users)):
            continue
        readers = [user for user in node.users if user.op != "output" and not torch_private.is_copy_into(user, node)]
        if not any(reader in feeds_backward for reader in readers):
            continue
        with joint.graph.inserting_before(min(readers)):
            copy = joint.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = {key: value for key, value in node.meta.items() if key not in ("desc", "grapharg")}
        copy.meta["val"] = node.meta["val"].clone()
        copy.meta["partitioner_tag"] = "is_forward"
        copy.meta["recompute"] = torch_private.MUST_SAVE
        for reader in readers:
            reader.replace_input_with(node, copy)


def _overwrites(user: fx.Node, placeholder: fx.Node) -> bool:
    """True for the copy_ that ends forward; what backward writes into its own buffers is read after forward as it stands."""
    return torch_private.is_copy_into(user, placeholder) and not torch_private.must_be_in_backward(user)


def _feeding_backward(graph: fx.Graph) -> set[fx.Node]:
    """Every node from which a node that depends on a tangent, or that must run in backward, can be reached."""
    late = {node for node in graph.nodes if node.op == "placeholder" and torch_private.is_tangent(node)}
    for node in graph.nodes:
        if node.op == "call_function" and (torch_private.must_be_in_backward(node) or any(arg in late for arg in node.all_input_nodes)):
            late.add(node)
    feeding = set(late)
    for node in reversed(graph.nodes):
        if any(user in feeding for user in node.users):
            feeding.add(node)
    return feeding


def capture(
    joint: JointGraph,
    *,
    price: Pricer,
    fused: bool,
    static_bytes: dict[Kind, int],
    bytes_per_us: float,
    launch_us: float,
    keep_below_bytes: int | None = None,
) -> Captured:
    """Build the problem of a prepared joint graph.

    ``price`` gives each op its cost; ``keep_below_bytes`` None scales with the graph (a 4096th of the largest value, at most 64 KiB).
    Sizes that depend on data are planned at their upper bound, or at a guess: ``Captured.guesses`` says which.
    """
    graph = joint.module.graph
    device = planned_device(graph)
    storages = find_storages(graph, device)
    node_info = torch_private.classify(joint.module, joint.static_input_indices, joint.num_fwd_outputs)
    forward_outputs, gradients, epilogue = _outputs(joint, storages)
    costs = price(storages.ops, device)
    _use_measured_sizes(storages, costs)
    ops, states = _ops(storages, node_info, costs, device)
    if epilogue:
        ops.append(_write_back(len(ops), epilogue))
    values = _values(joint, storages, ops, forward_outputs, gradients, states)
    if keep_below_bytes is None:
        keep_below_bytes = min(2**16, max((value.size_bytes for value in values if not value.kind.is_static), default=0) // 4096)
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


def _outputs(joint: JointGraph, storages: Storages) -> tuple[frozenset[int], frozenset[int], tuple[int, ...]]:
    """(values the caller holds after forward, gradients, values written back into inputs at the end of forward)."""
    forward, backward, descriptors = torch_private.split_outputs(joint.module, joint.num_fwd_outputs)
    mutated = set(map(id, torch_private.mutated_input_descriptors(descriptors)))

    def planned(nodes: Sequence[object]) -> list[int]:
        found = [storage for node in nodes if isinstance(node, fx.Node) for storage in storages.of.get(node, ())]
        return [storage for storage in found if storages.storages[storage].producer is not None]

    written_back = [n for n, d in zip(forward, descriptors, strict=True) if id(getattr(d, "mutated_input", None)) in mutated]
    held = [n for n, d in zip(forward, descriptors, strict=True) if id(getattr(d, "mutated_input", None)) not in mutated]
    return frozenset(planned(held)), frozenset(planned(backward)), tuple(dict.fromkeys(planned(written_back)))


def _ops(storages: Storages, node_info: object, costs: Sequence[Measurement], device: torch.device) -> tuple[list[Op], list[Value]]:
    """All ops in order. Before each random op that may run again stands one that makes the generator's state, which then must be saved."""
    ops: list[Op] = []
    states: list[Value] = []
    for node, cost in zip(storages.ops, costs, strict=True):
        op = _op(node, len(ops), storages, node_info, cost)
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


def _write_back(index: int, values: tuple[int, ...]) -> Op:
    """The runtime copies new values into mutated inputs at the end of forward; until then they live."""
    return Op(
        index=index,
        name="write back mutated inputs",
        target="copy_",
        side=Side.FORWARD,
        reads=values,
        writes=(),
        cost_us=0.0,
        cost_source="free",
        pinned="mutates an input",
    )


def _op(node: fx.Node, position: int, storages: Storages, node_info: object, cost: Measurement) -> Op:
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
        pinned="" if side is Side.BACKWARD else pin_reason(node),
        region=region_of(node),
        user_recompute=node.meta.get("recompute") in torch_private.USER_RECOMPUTES or _is_constant(node),
        fusible=kind is not LoopKind.NONE,
        reduction=kind is LoopKind.REDUCTION,
        num_elements=_num_elements(node),
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


def _num_elements(node: fx.Node) -> int:
    """Iteration space: the largest tensor the op reads or makes."""
    shapes = [t for n in (node, *node.all_input_nodes) for t in tensors_of(n.meta.get("val"))]
    return max((torch_private.size_hint(tensor.numel()) for tensor in shapes), default=0)


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


_SOURCE_LINE = re.compile(r'File "([^"]+)", line (\d+), in')


def module_path(node: fx.Node) -> str:
    """Dotted path of the module that the op belongs to, as the user named it ('' if unknown)."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"L\['(\w+)'\]\.?", "", path)
    return re.sub(r"(?:_modules)?\[['\"]?(\w+)['\"]?\]", r".\1", path).replace("._modules", "").strip(".")


def region_of(node: fx.Node) -> str:
    """The repeated block that an op belongs to: the module path up to its first number (``layers.3``), else its first name."""
    parts = module_path(node).split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return parts[0]


def label_of(node: fx.Node) -> str:
    """Module path, op and source line, for people."""
    op = str(node.target).removeprefix("aten.").removesuffix(".default")
    lines = _SOURCE_LINE.findall(node.meta.get("stack_trace") or "")
    where = f" ({lines[-1][0].rsplit('/', 1)[-1]}:{lines[-1][1]})" if lines else ""
    path = module_path(node)
    return f"{path + ': ' if path else ''}{op}{where}"
