"""The one door to torch's private API: partitioner helpers, AOTAutograd and Inductor entries, for torch 2.11 to 2.13.

Everything that moves between releases is imported here and nowhere else; `tests/test_torch_private.py` calls each on every
supported release.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import operator
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeGuard

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._prims_common import compute_required_storage_length
from torch.utils.checkpoint import CheckpointPolicy

from dyngran.passes.devices import CUDA_BLOCK_BYTES, CUDA_UNSPLIT_BYTES, rounded_bytes
from dyngran.passes.record_memory import MemoryEvent
from dyngran.passes.signature import hint

Boxed = Callable[[list[Any]], Any]
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
SizeReader = Callable[[Sequence[Any]], Any]

HIGHER_ORDER_TYPE = torch._ops.HigherOrderOperator
MUST_SAVE = CheckpointPolicy.MUST_SAVE
_tracing_threads: set[int] = set()
_planned_compilations: set[str] = set()

LAID_OUT_AS_OPERANDS: dict[object, Callable[..., Any]] = {
    torch.ops.aten.native_dropout_backward.default: lambda gradient, mask, _scale: gradient * mask,
    torch.ops.aten.softplus_backward.default: lambda gradient, x, *_: gradient * x,
}
VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
SETS_GRAD_MODE = torch._C._set_grad_enabled
RESUME_NAMES = ("__resume_at", "torch_dynamo_resume_in")
LEAVING = ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")  # opcodes after which the next is not run
MAX_NESTING = 8  # of containers in a function's variables
MAX_NODES = 100_000  # of autograd's graph that are looked at
UNSHARED_REFERENCES = 3  # to a dict: of whom it belongs to, of the variable that it is in, and of who counts them
USER_RECOMPUTES = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def common_subexpressions(graph: fx.Graph) -> fx.Graph:
    """The graph after common-subexpression elimination; random ops and outputs keep their copies.

    torch's function knows some random ops by name, and would take two `uniform_` or `exponential_` of one shape for one.
    """
    from torch._functorch.compile_utils import fx_graph_cse

    draws = [node for node in graph.nodes if is_random(node)]
    for node in draws:
        node.target = _Once(node.target)
    simplified: fx.Graph = fx_graph_cse(graph)
    for node in (*draws, *simplified.nodes):
        if isinstance(node.target, _Once):
            node.target = node.target.of
    return simplified


class _Once:
    """Stands for a target, and is equal to no other."""

    def __init__(self, of: Any) -> None:
        self.of, self.__name__ = of, str(of)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.of(*args, **kwargs)


def tag_forced_saves(joint: fx.GraphModule) -> None:
    """Mark what torch itself never recomputes: checkpoint boundaries, collectives, effectful ops, sources of mutation."""
    from torch._functorch import partitioners as p

    if p.has_recomputable_ops(joint):
        p.cleanup_recompute_tags(joint, is_default_partition=False)
    p.force_save_collectives(joint)
    p.force_save_effectful_ops(joint)
    p.force_save_bw_mutation_src(joint)


def classify(joint: fx.GraphModule, static_lifetime_input_indices: Sequence[int], num_fwd_outputs: int) -> Any:
    """torch's NodeInfo: which nodes forward needs, which depend on tangents, which belong to neither."""
    from torch._functorch.partitioners import classify_nodes

    return classify_nodes(joint, list(static_lifetime_input_indices), num_fwd_outputs)


def stock_saved_nodes(joint: fx.GraphModule, node_info: Any, memory_budget: float) -> list[fx.Node]:
    """The values torch's min-cut partitioner would save at ``memory_budget`` (1.0: its default)."""
    from torch._functorch.partitioners import choose_saved_values_set

    for node in reversed(joint.graph.nodes):  # the partitioner's own preparation: distance of every node from backward
        if node.op == "output":
            node.dist_from_bw = int(1e9)
        elif not node_info.is_required_fw(node):
            node.dist_from_bw = 0
        else:
            node.dist_from_bw = min((user.dist_from_bw + 1 for user in node.users), default=int(1e9))
    return choose_saved_values_set(joint.graph, node_info, memory_budget=memory_budget)


def split_outputs(joint: fx.GraphModule, num_fwd_outputs: int) -> tuple[list[Any], list[Any], list[Any]]:
    """(forward outputs, backward outputs, descriptors of the forward outputs) of a joint graph; entries may be None."""
    from torch._functorch.partitioners import _extract_fwd_bwd_outputs

    forward, backward, descriptors, _ = _extract_fwd_bwd_outputs(joint, num_fwd_outputs=num_fwd_outputs)
    return list(forward), list(backward), list(descriptors)


def mutated_input_descriptors(descriptors: Sequence[Any]) -> list[Any]:
    """Descriptors of the graph inputs that an output is written back to after forward."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    return [descriptor.mutated_input for descriptor in descriptors if isinstance(descriptor, InputMutationAOTOutput)]


def is_sym_node(node: fx.Node) -> bool:
    """True if the node holds a symbolic or plain scalar and no tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_copy_into(node: fx.Node, target: fx.Node) -> bool:
    """True if the node overwrites ``target`` in place at the end of forward or backward."""
    return node.target is torch.ops.aten.copy_.default and node.args[0] is target


def is_primal(node: fx.Node) -> bool:
    from torch._functorch._aot_autograd.utils import _is_primal

    return bool(_is_primal(node))


def is_tangent(node: fx.Node) -> bool:
    from torch._functorch._aot_autograd.utils import _is_tangent

    return bool(_is_tangent(node))


def is_assert_only(node: fx.Node) -> bool:
    """A SymBool that only run-time assertions read: never worth saving."""
    return isinstance(node.meta.get("val"), torch.SymBool) and all(
        user.target is torch.ops.aten._assert_scalar.default for user in node.users
    )


def is_opaque(node: fx.Node) -> bool:
    """True for nodes that hold a script or opaque object instead of a tensor."""
    try:
        from torch._functorch._aot_autograd.graph_compile import is_opaque_node
    except ImportError:  # torch 2.11 and 2.12 may keep it elsewhere; they pass such objects among the saved values
        from torch._library.fake_class_registry import FakeScriptObject

        return isinstance(node.meta.get("val"), FakeScriptObject)
    return bool(is_opaque_node(node))


def is_effect(node: fx.Node) -> bool:
    from torch._functorch._aot_autograd.utils import is_with_effects

    return bool(is_with_effects(node))


def must_be_in_backward(node: fx.Node) -> bool:
    from torch._functorch.partitioners import _must_be_in_backward

    return bool(_must_be_in_backward(node))


def extract_forward_and_backward(
    joint: fx.GraphModule,
    saved: list[fx.Node],
    saved_symbols: list[fx.Node],
    saved_opaque: list[fx.Node],
    *,
    num_fwd_outputs: int,
    static_lifetime_nodes: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Copy the joint graph twice: forward returns ``saved`` beside its outputs, backward starts from those of them that it reads."""
    import inspect

    from torch._functorch.partitioners import _extract_fwd_bwd_modules

    extra: dict[str, Any] = {}
    if "saved_opaque_nodes" in inspect.signature(_extract_fwd_bwd_modules).parameters:
        extra["saved_opaque_nodes"] = saved_opaque
    else:
        saved = saved + saved_opaque
    return _extract_fwd_bwd_modules(
        joint,
        saved,
        saved_sym_nodes=saved_symbols,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_nodes=static_lifetime_nodes,
        **extra,
    )


def replay_random_state(
    joint: fx.GraphModule, forward: fx.GraphModule, backward: fx.GraphModule, random_nodes: Sequence[fx.Node], num_symbols: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Make recomputed random ops draw what they drew in forward, which returns the generator's state before each for backward to set."""
    from torch._functorch.partitioners import functionalize_rng_ops
    from torch._prims.rng_prims import run_with_rng_state

    names = {node.name for node in random_nodes}
    again = [node.meta["val"] for node in backward.graph.nodes if node.name in names]
    before = {node: node.meta.get("recompute") for node in random_nodes}
    for node in joint.graph.nodes:  # functionalize_rng_ops reads this tag: exactly these nodes are to be replayed
        if "recompute" in node.meta and node not in before and node.meta["recompute"] in USER_RECOMPUTES and is_random(node):
            before[node] = node.meta["recompute"]
            node.meta["recompute"] = None
    for node in random_nodes:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    try:
        with functorch_config(graphsafe_rng_functionalization=False):  # the graph-safe form changes the random stream of forward
            forward, backward = functionalize_rng_ops(joint, forward, backward, num_symbols)
    finally:
        for node, tag in before.items():
            if tag is None:
                node.meta.pop("recompute", None)
            else:
                node.meta["recompute"] = tag
    replays = [node for node in backward.graph.nodes if node.target is run_with_rng_state]
    for node, value in zip(replays, again, strict=True):  # torch leaves them without one
        node.meta["val"] = value
    return forward, backward


def random_state_operators() -> tuple[HIGHER_ORDER_TYPE, HIGHER_ORDER_TYPE]:
    """``save(op, *args)`` runs a random op and returns (the generator's state before it, its result); ``again(state, op, *args)`` runs it
    from that state and leaves the generator as it was."""
    from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

    return run_and_save_rng_state, run_with_rng_state


def sample_random_state(node: fx.Node) -> torch.Tensor:
    """What stands for the generator's state before a random op where only shapes count: on the CPU, whichever generator it is."""
    value = node.meta["val"]
    result: torch.Tensor = next(one for one in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(one, torch.Tensor))
    state = torch.cuda.get_rng_state() if result.device.type == "cuda" else torch.get_rng_state()
    return result.new_empty((state.numel(),), dtype=state.dtype, device=state.device)


def is_random(node: fx.Node) -> bool:
    """True if the op draws from a generator of torch."""
    return _draws(node.target)


def _draws(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def raise_getitems(module: fx.GraphModule) -> fx.GraphModule:
    """Move every getitem next to its producer, so that a tuple does not keep its unused members alive."""
    from torch._functorch.compile_utils import raise_getitems as raise_

    return raise_(module)


def size_hint(amount: Any) -> int:
    """The size of an int or symbolic int that the trace saw; an upper bound or a guess if it depends on data (`signature.bound`)."""
    return hint(amount)


def data_dependent_symbols(value: Any) -> dict[Any, Any]:
    """Symbols in a tensor's shape or a symbolic int that only running the graph can tell, each with its shape environment."""
    sizes = [*value.shape] if isinstance(value, torch.Tensor) else [value] if isinstance(value, torch.SymInt) else []
    return {
        symbol: size.node.shape_env
        for size in sizes
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
        if symbol not in size.node.shape_env.backed_var_to_val
    }


def correct_fake_values(graph: fx.Graph) -> None:
    """Give values on the CPU the strides and dtypes of real kernels where torch's fake kernels think of others, and what comes of those.

    `native_dropout_backward` and `softplus_backward` (torch 2.11 to 2.13) are traced as contiguous; the CPU's kernels lay their results out
    as their operands. What is read otherwise than planned is copied inside of operators, and gradients when they are accumulated. Attention
    in float64 has the logarithms of its sums in float64; torch 2.11 traces float32.
    """
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            changed.update(_with_logsumexp_of_float64(node))
        if node.target not in LAID_OUT_AS_OPERANDS and not changed.intersection(node.all_input_nodes):
            continue
        found = _traced_again(node)
        if found is None:
            continue
        strides = [tuple(size_hint(stride) for stride in one.stride()) for one in (node.meta["val"], found)]
        if strides[0] != strides[1] or getattr(node.target, "is_view", False):
            node.meta["val"] = found
            changed.add(node)


def _with_logsumexp_of_float64(attention: fx.Node) -> list[fx.Node]:
    """The parts of an attention's result whose dtype was wrong and is right now."""
    result, logsumexp = attention.meta["val"]
    if not isinstance(query := attention.args[0], fx.Node) or query.meta["val"].dtype is not torch.float64:
        return []
    with logsumexp.fake_mode:
        right = logsumexp.to(torch.float64)
    attention.meta["val"] = (result, right)
    parts = [user for user in attention.users if user.target is operator.getitem and user.args[1] == 1]
    for part in parts:
        part.meta["val"] = right
    return parts


def _traced_again(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor that an operator on the CPU gives for the values that its operands have now; None where that cannot be told."""
    from torch._subclasses.fake_tensor import FakeTensor

    value, target = node.meta.get("val"), node.target
    if not isinstance(value, FakeTensor) or not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    if value.device.type != "cpu" or data_dependent_symbols(value) or any("val" not in read.meta for read in node.all_input_nodes):
        return None
    args: Any = fx.node.map_arg(node.args, lambda read: read.meta["val"])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda read: read.meta["val"])
    run = LAID_OUT_AS_OPERANDS.get(target, torch.ops.aten.reshape.default if target in VIEWS else target)
    with value.fake_mode:
        found: torch.Tensor = run(*args, **kwargs)
    return found


def is_plain_fake(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a fake tensor and no subclass of one that wraps others."""
    from torch._subclasses.fake_tensor import FakeTensor

    return type(value) is FakeTensor


def fake_call(
    like: torch.Tensor, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, device: torch.device | None = None
) -> Any:
    """What an operator returns for fake tensors, in the mode that made ``like``. It is on ``device``, the one of ``like`` by default (a
    card's may be seen on the CPU, where there is none)."""
    mode: Any = like.fake_mode  # type: ignore[attr-defined]  # fake tensors have it
    with mode:
        made = target(*args, **kwargs)
    if is_plain_fake(made) and made.device != (device or like.device):
        made.fake_device = device or like.device  # type: ignore[attr-defined]  # likewise
    return made


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The graph as a function of one list that it empties, so that inputs die as they are consumed."""
    from torch.fx.graph import _BoxedCodeGen

    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    forward = module.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for this attribute
    return run


def _with_lenient_views(module: fx.GraphModule) -> fx.GraphModule:
    for target in VIEWS:
        for node in module.graph.find_nodes(op="call_function", target=target):
            node.target = torch.ops.aten.reshape.default
    return module


def compile_eager(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    partition: Partitioner,
    around: Callable[[Boxed, bool], Boxed],
    replays_views: bool = True,
) -> Callable[..., Any]:
    """AOTAutograd without decompositions; both graphs run op by op as FX orders them, and a view copies where what it is of lies otherwise
    than the trace thought (stock aot_eager raises: softplus_backward, in the gated delta rule of Qwen3-Next).

    ``around(run, is_backward)`` may wrap the boxed callable that runs a graph; inference graphs are not wrapped. ``replays_views``: views
    are made anew for the caller by the views that the trace saw, else by their strides.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch_config

    def finish(is_backward: bool) -> Compiler:
        return lambda gm, _inputs: around(boxed(_with_lenient_views(gm)), is_backward)

    compiled = aot_autograd(
        fw_compiler=finish(False), bw_compiler=finish(True), inference_compiler=lambda gm, _inputs: boxed(gm), partition_fn=partition
    )
    # nothing here writes over what was saved: a graph may be retained
    with functorch_config.patch(donated_buffer=False, **_making_views(replays_views)):
        run = compiled(module, inputs)
    return run


def _making_views(replays_views: bool) -> dict[str, Any]:
    return {} if replays_views else {"view_replay_for_aliased_outputs": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedCode:
    """What Inductor made of one graph: the Python wrapper that allocates, launches and frees, and the graph it came from."""

    source: str
    graph: fx.GraphModule
    is_backward: bool


def code_generation_error() -> type[Exception]:
    """What Inductor raises when it cannot generate or compile code for a graph."""
    from torch._inductor.exc import InductorError

    return InductorError


def compile_inductor(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: dict[str, Any],
    partition: Partitioner,
    uuid: str,
    around: Callable[[Boxed, bool], Boxed],
    on_code: Callable[[GeneratedCode], None],
    budget_bytes: Callable[[], int | None],
    frees_at_once: Callable[[], bool],
    keeps_order: Callable[[], bool],
    replays_views: bool = True,
) -> Callable[..., Any]:
    """Inductor, with our partition in its own door.

    ``on_code`` sees the generated wrapper of each graph; ``around(run, is_backward)`` may wrap the boxed callable that runs it;
    ``budget_bytes`` is what may be allocated on the card while kernels are tuned in the first run, None as much as they like.
    ``frees_at_once`` and ``keeps_order`` are asked once the graph is cut: if so, a buffer that has been read is freed, and not held for a
    later one of its size; kernels are not moved to save memory, and copies from host memory stay ahead (`fetched_ahead`).
    ``replays_views`` as for `compile_eager`.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        is_backward = bool(kwargs.get("is_backward", False))
        if is_backward:
            _keep_saved_tensors_intact()
        changed: dict[str, Any] = {"allow_buffer_reuse": False} if frees_at_once() else {}
        if keeps_order():
            changed["reorder_for_peak_memory"] = False
            if getattr(config, "_post_fusion_custom_pass", fetched_ahead) is None:  # a pass of the user's stays
                changed["_post_fusion_custom_pass"] = fetched_ahead
        with _random_order_kept(), config.patch(changed):
            compiled: Any = compile_fx_inner(gm, example_inputs, **kwargs)
        if getattr(compiled, "source_code", None):
            on_code(GeneratedCode(source=compiled.source_code, graph=gm, is_backward=is_backward))
        if not kwargs.get("is_inference", False) and getattr(compiled, "current_callable", None) is not None:
            compiled.current_callable = around(tuned_within(compiled.current_callable, budget_bytes), is_backward)
        return compiled

    def cut(*args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = partition(*args, **kwargs)
        for half in (forward, backward):
            hold_layouts_of_draws(half)
        return forward, backward

    patches = {**options, "custom_partitioner_fn": DyngranPartitioner(cut, uuid)}
    # AOTAutograd's cache is looked up before the joint graph exists and would skip the partitioner: off for our graphs.
    # Inductor's own cache of generated code stays on; it is keyed by the two graphs and by the partitioner's uuid.
    # Backward is compiled at once too, so that its code can be accounted for before the first step.
    with functorch_config(enable_autograd_cache=False, force_non_lazy_backward_lowering=True, **_making_views(replays_views)):
        compiled: Any = compile_fx(module, list(inputs), inner_compile=inner, config_patches=patches)
    run: Callable[..., Any] = compiled
    return run


def trace_inductor(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: dict[str, Any],
    partition: Partitioner,
    around_passes: Callable[[], contextlib.AbstractContextManager[None]],
) -> Callable[..., Any]:
    """As `compile_inductor` up to the partition, without code: what partition gives runs op by op, on fake tensors for example.

    Inductor's passes over the joint graph run within ``around_passes()``.
    """
    from torch._inductor import compile_fx as entry
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    passes: Any = entry._recursive_joint_graph_passes

    def within(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        with around_passes():
            return passes(gm, *args, **kwargs)

    def inner(gm: fx.GraphModule, _inputs: Sequence[Any], **_kwargs: Any) -> Any:
        return boxed(gm)

    patches = {**options, "custom_partitioner_fn": DyngranPartitioner(partition, "traced only")}
    entry._recursive_joint_graph_passes = within
    try:
        with functorch_config(enable_autograd_cache=False, force_non_lazy_backward_lowering=True), config.patch(force_disable_caches=True):
            compiled: Any = compile_fx(module, list(inputs), inner_compile=inner, config_patches=patches)
    finally:
        entry._recursive_joint_graph_passes = passes
    run: Callable[..., Any] = compiled
    return run


@contextlib.contextmanager
def seen_on(device: torch.device, tensors: Sequence[Any]) -> Iterator[None]:
    """Fake tensors say that they are on ``device``; before and after, where they were traced."""
    from torch._subclasses.fake_tensor import FakeTensor

    fakes = {id(tensor): tensor for tensor in tensors if isinstance(tensor, FakeTensor)}
    before = [(fake, fake.fake_device) for fake in fakes.values()]
    try:
        for fake, _ in before:
            fake.fake_device = device
        yield
    finally:
        for fake, device_before in before:
            fake.fake_device = device_before


def mapped_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with every tensor in its containers replaced by ``change`` of it; one that stands there twice is changed once."""
    from torch.utils._pytree import tree_map_only

    changed: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
        return changed[id(tensor)]

    return tree_map_only(torch.Tensor, once, tree)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in its containers, in order."""
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def fake_tensor_type() -> type[torch.Tensor]:
    """The class of tensors that have shapes and no data."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def fake_tensor_mode() -> Any:
    """A mode in which tensors have shapes and no data; real tensors that meet them are taken as fake ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def break_reason(module: fx.GraphModule) -> tuple[str, str] | None:
    """(reason, "file.py:12") of the graph break after one of Dynamo's graphs; None if none follows."""
    if not ends_in_graph_break(module):
        return None
    reason: Any = module.compile_subgraph_reason
    frames = list(reason.user_stack or ())
    where = f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
    return str(reason.reason).strip().splitlines()[0], where


def tuned_within(run: Boxed, budget_bytes: Callable[[], int | None]) -> Boxed:
    """``run``, whose kernels choose among their configurations when they are first launched, with the step's memory around them."""
    is_tuned = False

    def tuned(args: list[Any]) -> Any:
        nonlocal is_tuned
        if is_tuned:
            return run(args)
        is_tuned = True
        with _benchmarks_within(budget_bytes()):
            return run(args)

    tuned._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's mark of this calling convention
    return tuned


_benchmarking = threading.local()


@contextlib.contextmanager
def _benchmarks_within(budget_bytes: int | None) -> Iterator[None]:
    """Inductor's benchmarks of kernels, on this thread, leave room in a budget of bytes on the card, if there is one.

    They clear the L2 cache by writing a buffer of its size (50 MiB on an H100), beside copies of what a kernel writes over; here the
    buffer is what the budget leaves beside those and all that is allocated, at most.
    """
    from torch._inductor.runtime.benchmarking import benchmarker

    whole_bytes = 0 if budget_bytes is None else getattr(benchmarker, "L2_cache_size", 0)  # 0: a benchmarker of another kind
    if not whole_bytes:
        yield
        return
    _watch_benchmarks()
    _benchmarking.budget_bytes, _benchmarking.whole_bytes = budget_bytes, whole_bytes
    try:
        yield
    finally:
        _benchmarking.budget_bytes = None
        benchmarker.__dict__["L2_cache_size"] = whole_bytes  # where the cached property keeps its value


@functools.cache
def _watch_benchmarks() -> None:
    """Set the buffer's size whenever Inductor has decided, before a benchmark, which arguments it sets aside in host memory: those whose
    copies on the card would raise the peak. Of forward code it does not ask itself, so it is told to."""
    from torch._inductor.runtime.benchmarking import benchmarker
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    set_aside: Any = CachingAutotuner.copy_args_to_cpu_if_needed

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        budget_bytes = getattr(_benchmarking, "budget_bytes", None)
        asks, self.optimize_mem = self.optimize_mem, self.optimize_mem or budget_bytes is not None
        try:
            copies = set_aside(self, *args, **kwargs)
        finally:
            self.optimize_mem = asks
        if budget_bytes is not None:
            named = dict(zip(self.fn.arg_names, args, strict=False)) | kwargs
            copied = [named[name] for name in self.mutated_arg_names if name in named and name not in copies]
            taken_bytes = torch.cuda.memory_allocated() + sum(map(_copy_bytes, copied)) + CUDA_UNSPLIT_BYTES * (1 + len(copied))
            room_bytes = (budget_bytes - taken_bytes) // CUDA_BLOCK_BYTES * CUDA_BLOCK_BYTES
            benchmarker.__dict__["L2_cache_size"] = max(0, min(_benchmarking.whole_bytes, room_bytes))
        return copies

    CachingAutotuner.copy_args_to_cpu_if_needed = watched  # type: ignore[method-assign]  # nothing else runs between choice and benchmark


def _copy_bytes(tensor: torch.Tensor) -> int:
    """What a copy with the same strides asks of the caching allocator."""
    num_bytes = tensor.element_size() * compute_required_storage_length(tensor.shape, tensor.stride(), 0)
    return rounded_bytes(num_bytes, torch.device("cuda"))


def _keep_saved_tensors_intact() -> None:
    """Backward code must not write over saved tensors: it is generated before anyone knows whether ``retain_graph`` will be used."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None and context.fw_metadata.bw_donated_idxs:
        context.fw_metadata.bw_donated_idxs = []


@functools.cache
def _laid_out() -> torch._ops.OpOverload:
    """``laid_out(x, strides)``: x in memory in the order of these strides; Inductor copies where it chose another order."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    def laid_out(x: torch.Tensor, strides: list[int]) -> torch.Tensor:
        return x.clone()

    torch.library.custom_op("dyngran::laid_out", laid_out, mutates_args=()).register_fake(laid_out)
    target: torch._ops.OpOverload = torch.ops.dyngran.laid_out.default
    lower: Any = register_lowering(target, type_promotion_kind=None)
    lower(lambda x, strides: ir.ExternKernel.require_stride_order(x, ir.get_stride_order(strides)))
    return target


def hold_layouts_of_draws(module: fx.GraphModule) -> None:
    """Make Inductor hand to random ops what they read as the graph lays it out, before AOTAutograd has seen what strides forward returns.

    An op that is not fused (all of them under ``fallback_random``) draws in the order of memory, and Inductor lays out what lies between
    kernels as it likes, in forward and in backward each for itself: a mask that runs again would be another one. Torch 2.13 holds plain
    `native_dropout`, not one whose generator state is saved; 2.11 none.
    """
    save, again = random_state_operators()
    for node in module.graph.nodes:
        target = node.args[0] if node.target is save else node.args[1] if node.target is again else node.target
        if not _draws(target) or "attention" in target._schema.name:  # fused attention draws by index
            continue
        for read in node.all_input_nodes:
            value = read.meta.get("val")
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dim() > 1:
                with module.graph.inserting_before(node):
                    laid = module.graph.call_function(_laid_out(), (read, [size_hint(stride) for stride in value.stride()]))
                laid.meta["val"] = value
                node.replace_input_with(read, laid)
    module.recompile()


class RandomOrder(CustomGraphPass):
    """A pass of Inductor's that holds random ops in the graph's order, as eager code draws from torch's generator.

    The scheduler reorders to save memory. Of itself it holds only plain random ops in place (torch 2.13; 2.11 none), not those whose
    generator state is saved, so that a plan that recomputes some masks would draw others than the unplanned step.

    Args:
        before: the user's pass, or passes, at the same place; they run first.
    """

    def __init__(self, before: Any) -> None:
        self._before = before if isinstance(before, (list, tuple)) else [before] if before is not None else []

    def __call__(self, graph: fx.Graph) -> None:
        from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
        from torch._prims.rng_prims import run_and_save_rng_state
        from torch.utils._ordered_set import OrderedSet

        for user_pass in self._before:
            user_pass(graph)
        draws = [node for node in graph.nodes if node.users and (is_random(node) or node.target is run_and_save_rng_state)]
        preserve_node_ordering(graph, {later: OrderedSet([_tensor_of(earlier)]) for earlier, later in pairwise(draws)})

    def uuid(self) -> tuple[object, ...] | None:
        """None, which keeps the code out of Inductor's cache, if a pass of the user's has none."""
        inner = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self._before]
        return None if None in inner else ("dyngran: random order 2", *inner)


def _tensor_of(node: fx.Node) -> fx.Node:
    """The node, or one that takes a tensor out of the tuple that it gives, moved next to it: Inductor (2.11) waits for no tuple."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return node
    for user in list(node.users):
        if user.target is operator.getitem:
            node.append(user)
            return _tensor_of(user)
    return node


def _random_order_kept() -> contextlib.AbstractContextManager[None]:
    """`RandomOrder` where order matters: under ``fallback_random``; else masks come from seeds of their own."""
    from torch._inductor import config

    if not config.fallback_random:
        return contextlib.nullcontext()
    kept: contextlib.AbstractContextManager[None] = config.patch(post_grad_custom_post_pass=RandomOrder(config.post_grad_custom_post_pass))
    return kept


def fetched_ahead(kernels: list[Any]) -> list[Any]:
    """Inductor's kernels (`BaseSchedulerNode`) with each copy from host memory right after what it reads, as the graph has it.

    A loop that became a part of an earlier one takes along whatever it reads: kernels that the copy was to run beside then stand before it.
    """
    fetches = [kernel for kernel in kernels if getattr(kernel.node, "op_overload", None) is torch.ops.dyngran.fetch.default]
    ordered = [kernel for kernel in kernels if kernel not in fetches]
    for fetch in fetches:
        place = {name: at for at, kernel in enumerate(ordered) for name in kernel.get_buffer_names()}
        before = [place[read.name] for read in fetch.unmet_dependencies if read.name in place]
        ordered.insert(max(before) + 1 if before else 0, fetch)
    return ordered


def lays_out_channels_last(module: fx.GraphModule) -> bool:
    """Whether Inductor turns the images of this graph's convolutions to channels-last."""
    from torch._inductor.graph import GraphLowering

    return bool(GraphLowering.decide_layout_opt(module, is_inference=False))


def missing_tool(device_types: Collection[str]) -> str | None:
    """What Inductor needs for these devices and does not find, as a sentence; None if it has everything."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if "cuda" in device_types and not has_triton():
        return "Inductor needs triton for CUDA and finds none that works: install the triton of this torch build"
    if "cpu" in device_types:
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "Inductor needs a C++ compiler on the CPU and finds none: install one (apt install g++), or set CXX to it"
    return None


def stock_partition(
    joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, static_lifetime_input_indices: Sequence[int] | None, fused: bool
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's own partition: min-cut for Inductor, everything that backward reads for eager code."""
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

    cut = min_cut_rematerialization_partition if fused else default_partition
    indices = list(static_lifetime_input_indices or ())
    return cut(joint, inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=indices)


def is_nested_joint(joint: fx.GraphModule) -> bool:
    """True for the joint graph of a higher-order operator's body, which AOTAutograd sends through the same partitioner."""
    return not any("desc" in node.meta for node in joint.graph.nodes if node.op in ("placeholder", "output"))


def fake_inputs(module: fx.GraphModule) -> list[Any]:
    """Dynamo's fake tensors for the inputs of one of its graphs, in order."""
    return [node.meta.get("example_value", node.meta.get("val")) for node in module.graph.nodes if node.op == "placeholder"]


def size_symbols(module: fx.GraphModule) -> dict[Any, SizeReader]:
    """The symbols that sizes of one of Dynamo's graphs depend on, each with the way to read it from the arguments of a call.

    They are symbolic integers among them, and sizes of what wrappers hold. The name of a nested tensor's ragged dimension is no size, and
    its longest sequence (kept as the size of a tensor without elements) counts where the graph makes something of that size.
    """
    readers: dict[Any, SizeReader] = {}
    used = {symbol for node in module.graph.nodes for symbol in _symbols_of_sizes(node.meta.get("example_value"))}
    for place, value in enumerate(fake_inputs(module)):
        if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol and not value.node.is_nested_int():
            readers.setdefault(value.node.expr, operator.itemgetter(place))
        for number, inner in enumerate(inner_tensors(value) if isinstance(value, torch.Tensor) else ()):
            is_empty = any(hint(size) == 0 for size in inner.shape)
            for dim, size in enumerate(inner.shape if inner is not value else ()):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and (not is_empty or size.node.expr in used):
                    readers.setdefault(size.node.expr, functools.partial(_inner_size, place=place, number=number, dim=dim))
    return readers


def _inner_size(args: Sequence[Any], *, place: int, number: int, dim: int) -> Any:
    return list(inner_tensors(args[place]))[number].shape[dim]


def _symbols_of_sizes(value: Any) -> set[Any]:
    shape: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else ()
    return {symbol for size in shape if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold the elements of ``tensor``: itself, or those inside of a wrapper (a nested tensor)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from inner_tensors(inner)


def keep_copy(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of one of Dynamo's graphs that code generators may rewrite; it shares tensors and keeps what Dynamo notes on it, but for the
    examples of inputs, which Dynamo lets go too (with them, nobody could swap a parameter)."""
    graph = fx.Graph()
    moved: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        moved[node] = graph.node_copy(node, moved.__getitem__)
        moved[node].meta = {key: value for key, value in node.meta.items() if key != "grapharg"}
        if hasattr(node, "_dynamo_source"):
            moved[node]._dynamo_source = node._dynamo_source  # Dynamo keeps it there
    copy = fx.GraphModule(module, graph)
    copy.meta = dict(module.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks", "compile_subgraph_reason", "device_mesh"):
        if hasattr(module, name):
            setattr(copy, name, getattr(module, name))
    return copy


@contextlib.contextmanager
def tracing_again(inputs: Sequence[Any]) -> Iterator[None]:
    """The context in which AOTAutograd can compile a kept Dynamo graph once more, outside of Dynamo."""
    from torch._guards import TracingContext, detect_fake_mode, tracing

    mode = detect_fake_mode(list(inputs))
    with tracing(TracingContext(mode)):
        yield


@contextlib.contextmanager
def tracing_here() -> Iterator[None]:
    """While this thread traces, others may call what is compiled: torch keeps one flag for all threads, by which it refuses such calls."""
    _let_other_threads_call()
    thread = threading.get_ident()
    is_outermost = thread not in _tracing_threads
    _tracing_threads.add(thread)
    try:
        yield
    finally:
        if is_outermost:
            _tracing_threads.discard(thread)


@functools.cache
def _let_other_threads_call() -> None:
    """`is_fx_symbolic_tracing` is true for the thread that traces. Its code is exchanged, since wrappers of Dynamo's hold the function."""
    from torch.fx import _symbolic_trace

    function: Any = _symbolic_trace.is_fx_symbolic_tracing
    before = FunctionType(function.__code__, function.__globals__)

    def is_tracing() -> bool:
        return bool(before()) and (not _tracing_threads or threading.get_ident() in _tracing_threads)

    function.__globals__["_dyngran_is_tracing"] = is_tracing
    function.__code__ = (lambda: _dyngran_is_tracing()).__code__  # type: ignore[name-defined]  # noqa: F821  # a global of torch's module


def forget_compiled() -> None:
    """Dynamo knows nothing of what it compiled before."""
    import torch._dynamo

    torch._dynamo.reset()


def compile_lock() -> contextlib.AbstractContextManager[object]:
    """The lock that Dynamo holds while it compiles: tracing changes state that all threads share. Its holder may take it again."""
    from torch._dynamo.convert_frame import compile_lock as lock

    return lock


@contextlib.contextmanager
def plain_dispatch() -> Iterator[None]:
    """Operators run on real tensors as they are: no fake tensors, tracing, autocast, default device or function mode of this thread's."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
        yield


@contextlib.contextmanager
def cpu_memory_events() -> Iterator[list[MemoryEvent]]:
    """What this thread begins, ends and allocates on the CPU inside, in order: there once the context is left. For this torch's older
    profiler serves, which runs beside one of the newer kind, if that was not started on this thread."""
    from torch.autograd import profiler_legacy

    autograd: Any = torch.autograd
    session: Any = profiler_legacy.profile
    events: list[MemoryEvent] = []
    autograd._enable_profiler_legacy(session(profile_memory=True).config())
    try:
        yield events
    finally:
        for thread in autograd._disable_profiler_legacy():
            events.extend(MemoryEvent(event.kind(), event.name(), event.cpu_memory_usage()) for event in thread)


class DyngranPartitioner(CustomPartitionerFn):
    """Inductor's door for a partitioner; the uuid makes its caches tell our plans apart."""

    def __init__(self, partition: Partitioner | None, uuid: str) -> None:
        self._partition = partition
        self._uuid = uuid

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        kwargs.pop("compiler", None)
        assert self._partition is not None  # only a copy out of a cache key has none
        return self._partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return self._uuid

    def __reduce__(self) -> tuple[Any, ...]:
        return (DyngranPartitioner, (None, self._uuid))


@contextlib.contextmanager
def functorch_config(**changes: Any) -> Iterator[None]:
    """Thread-local override of AOTAutograd's configuration."""
    from torch._functorch import config

    with config.patch(**changes):
        yield


def inductor_option_names() -> tuple[str, ...]:
    """Every option that Inductor's configuration knows."""
    from torch._inductor import config

    return tuple(config.get_config_copy())


def mode_options(mode: str) -> dict[str, Any]:
    """The Inductor options that a mode of torch.compile stands for."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options().get(mode, {}))


def ends_in_graph_break(module: fx.GraphModule) -> bool:
    """True if Dynamo left the user's function in the middle: more graphs of the same step follow."""
    reason = getattr(module, "compile_subgraph_reason", None)
    return bool(reason is not None and reason.graph_break)


def frame_id() -> int | None:
    """Dynamo's number of the code that is being compiled, the same whenever that is compiled again; None outside of a compilation."""
    from torch._guards import CompileContext

    found = CompileContext.current_compile_id()
    return None if found is None else found.frame_id


def tensors_of_frame() -> list[torch.Tensor]:
    """Tensors that the function which Dynamo is compiling holds: its arguments and variables, and what modules and containers among them
    hold, whether the graph reads them or not. None outside of a compilation."""
    from torch._dynamo.output_graph import OutputGraph

    for frame in _running_frames():
        owner = _variable(frame, "self")
        if isinstance(owner, OutputGraph):
            return list(_tensors_held(list(owner.local_scope.values()), MAX_NESTING))
    return []


def modules_being_called() -> list[torch.nn.Module]:
    """Modules whose methods this thread is in, innermost first."""
    owners = [_variable(frame, "self") for frame in _running_frames()]
    return list({id(owner): owner for owner in owners if isinstance(owner, torch.nn.Module)}.values())


def _running_frames() -> Iterator[FrameType]:
    """Those of this thread, from the caller's on, the innermost first."""
    frame = sys._getframe().f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _variable(frame: FrameType, name: str) -> object:
    """A variable of a function that is running; None if it has none of this name.

    Until Python 3.13 reading one leaves a copy of all of them in the frame, in which what the function drops afterwards, a batch perhaps,
    would live until it returns. The copy is emptied here, unless somebody else has asked for it before and holds it.
    """
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED or name not in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        return None
    variables = frame.f_locals
    found = variables.get(name)
    if type(variables) is dict and sys.getrefcount(variables) <= UNSHARED_REFERENCES:
        variables.clear()
    return found


def _tensors_held(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, (list, tuple, dict)) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_held(item, depth - 1)


@dataclass(frozen=True, slots=True)
class CompiledFor:
    """What `torch.compile` was told: the backend's function, and its keyword arguments."""

    backend: object
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A function that Dynamo could not compile, where it begins ("file.py:12"), and why, in one sentence."""

    function: str
    place: str
    reason: str


def note_planned() -> None:
    """The compilation that is going on has come to a graph that was planned, or refused: it is not given up."""
    from torch._guards import CompileContext

    _planned_compilations.add(str(CompileContext.current_compile_id()))


class GivenUpWatch:
    """Calls ``tell`` whenever Dynamo ends a compilation without a planned graph because of a graph break: one that it cannot resume after,
    or one before which nothing needs gradients. `torch.compiler.reset` ends it; ``start`` may be called as often as one likes."""

    def __init__(self, tell: Callable[[CompiledFor, GivenUp], object]) -> None:
        self._tell = tell
        self._breaks_before: dict[str, dict[str, int]] = {}

    def start(self) -> None:
        from torch._dynamo.callback import callback_handler

        if self._ended not in callback_handler.end_callbacks:
            callback_handler.register_start_callback(self._started)
            callback_handler.register_end_callback(self._ended)

    def _started(self, arguments: Any) -> None:
        from torch._dynamo.utils import counters

        self._breaks_before[arguments.compile_id] = dict(counters["graph_break"])

    def _ended(self, arguments: Any) -> None:
        from torch._dynamo.exc import Unsupported
        from torch._dynamo.utils import counters

        before, error = self._breaks_before.pop(arguments.compile_id, {}), sys.exc_info()[1]
        if arguments.compile_id in _planned_compilations:
            _planned_compilations.discard(arguments.compile_id)
            return
        new = [reason for reason, count in counters["graph_break"].items() if count > before.get(reason, 0)]
        reason = str(error) if isinstance(error, Unsupported) else new[-1] if new and error is None else ""
        for frame in _running_frames() if reason else ():
            if frame.f_code.co_name != "_compile":
                continue
            code, compiler = _variable(frame, "code"), _variable(frame, "compiler_fn")
            if isinstance(code, CodeType) and compiler is not None:
                inner = getattr(compiler, "_torchdynamo_orig_backend", compiler)
                place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
                given_up = GivenUp(code.co_name, place, reason.strip().splitlines()[0].rstrip(".") + ".")
                self._tell(CompiledFor(getattr(inner, "compiler_fn", inner), getattr(inner, "kwargs", {})), given_up)
                return


def is_in_backward() -> bool:
    """True while autograd runs a backward: what is called then is called again, by a checkpoint, or differentiated on its own."""
    return torch._C._current_graph_task_id() != -1


def are_saved_tensors_hooked() -> bool:
    """True inside of `torch.autograd.graph.saved_tensors_hooks` (and `save_on_cpu`): what is saved goes through functions of the user's."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_nested() -> bool:
    """True if code that Dynamo has made is being run: what is compiled now is called by it, or goes on after it."""
    return any(True for _ in _compiled_frames())


def is_awaited() -> bool:
    """True if a function that Dynamo has compiled goes on after a graph break once what is being compiled now, which it calls, returns."""
    return any(_resumes_after(frame) for frame in _compiled_frames())


def _compiled_frames() -> Iterator[FrameType]:
    """Of the calls that are being run, those of code that Dynamo has made."""
    from torch._dynamo.convert_frame import output_codes

    return (frame for frame in _running_frames() if frame.f_code in output_codes)


def _resumes_after(frame: FrameType) -> bool:
    """Whether code of Dynamo's can come to a call of one of its resume functions from the instruction at which ``frame`` stands: a global
    one, or one made there if it has free variables."""
    code = list(dis.get_instructions(frame.f_code))
    places = {instruction.offset: place for place, instruction in enumerate(code)}
    seen: set[int] = set()
    left = [sum(instruction.offset <= frame.f_lasti for instruction in code)]
    while left:
        place = left.pop()
        if place in seen or place >= len(code):
            continue
        seen.add(place)
        instruction = code[place]
        name = instruction.argval.co_name if isinstance(instruction.argval, CodeType) else instruction.argval
        if isinstance(name, str) and name.startswith(RESUME_NAMES):
            return True
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            left.append(places[instruction.argval])
        if not instruction.opname.startswith(LEAVING):
            left.append(place + 1)
    return False


def compiled_backwards(tensors: Iterable[Any]) -> list[Any]:
    """The nearest nodes of autograd on which ``tensors`` depend and that belong to compiled forwards, in the order in which those ran."""
    found: list[Any] = []
    seen: set[Any] = set()
    left = [tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None]
    while left and len(seen) < MAX_NODES:
        node: Any = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "CompiledFunctionBackward":
            found.append(node)
        else:
            left += [before for before, _ in node.next_functions if before is not None]
    return sorted(found, key=lambda node: node._sequence_nr())


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem
