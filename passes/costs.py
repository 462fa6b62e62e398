"""The roofline price of one operator call: the larger of its arithmetic and its bytes, on one device.

Plain rooflines were met beside measured H200 times when the project was planned (`planning-notes.md`, section 2): matmuls agree within
10 %, attention is 1.8 (1,024 keys) to 3.7 (197 keys) times slower and convolutions 3 times slower than their flops say. Those factors
are stated below. Flops of matmuls and convolutions come from `torch.utils.flop_counter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from dyngran.passes.devices import DeviceSpec
from dyngran.passes.signature import TensorSpec, concrete, tensors_of

CONVOLUTION_SLOWDOWN = 3.0
ATTENTION_SLOWDOWN = 1.8
SHORT_ATTENTION_SLOWDOWN = 3.7  # below SHORT_ATTENTION keys
SHORT_ATTENTION = 512
BACKWARD_ATTENTION_FLOPS = 2.5  # five matmuls where forward has two (FlashAttention-2, Dao 2023, section 3)
COLLECTIVE_SHARE = 1 / 8  # of the memory bandwidth: NVLink 4 moves 450 GB/s where HBM3 moves 3.35 TB/s
COLLECTIVE_FLOOR_US = 20.0
CUSTOM_FACTOR = 2.0  # bytes of an operator of unknown work
CUSTOM_FLOOR_LAUNCHES = 5.0

COLLECTIVE_NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"})
PLAIN_NAMESPACES = frozenset({"aten", "prims", "dyngran"})

# Passes over memory beyond one read of the inputs and one write of the outputs. Our estimates; measured costs replace them.
_BYTE_FACTORS: dict[str, float] = {
    **dict.fromkeys(("sort", "argsort", "topk", "kthvalue", "median", "mode", "unique_consecutive", "_unique2", "msort"), 10.0),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "index_put", "_unsafe_index_put", "index_add", "index_copy"), 4.0),
    **dict.fromkeys(("embedding_dense_backward", "max_pool2d_with_indices_backward", "_embedding_bag_dense_backward"), 4.0),
    **dict.fromkeys(("gather", "index", "_unsafe_index", "index_select", "embedding", "_embedding_bag", "masked_scatter"), 1.5),
    **dict.fromkeys(("rand", "randn", "rand_like", "randn_like", "bernoulli", "native_dropout", "uniform", "normal", "randint"), 1.5),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "_softmax", "_log_softmax"), 1.5),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit_functional", "native_batch_norm_backward", "cudnn_batch_norm"), 1.5),
    **dict.fromkeys(("linalg_qr", "linalg_eigh", "_linalg_eigh", "_linalg_svd", "linalg_inv_ex", "linalg_lu_factor_ex"), 50.0),
    **dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c", "_cdist_forward", "_cdist_backward", "linalg_cholesky_ex"), 8.0),
}
_FREE = frozenset(
    {
        "sym_size",
        "sym_stride",
        "sym_numel",
        "sym_storage_offset",
        "empty",
        "empty_strided",
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "empty_permuted",
    }
)
_HOLD_ONE_MORE_RESULT = frozenset({"sort", "argsort", "topk", "native_dropout", "cumsum", "_fft_r2c", "_fft_c2r", "_fft_c2c"})
_INDEXING = frozenset({"index", "_unsafe_index", "index_put", "_unsafe_index_put"})
_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_addmm_activation", "_int_mm"}) | {
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
}


def is_matmul(target: object) -> bool:
    """A matrix product of the BLAS library's."""
    return isinstance(target, torch._ops.OpOverload) and base_name(target) in _MATMULS


def roofline_us(target: object, args: object, outputs: object, spec: DeviceSpec, *, kwargs: Mapping[str, object] | None = None) -> float:
    """Device microseconds of one call.

    Args:
        target: what the FX node calls: an `OpOverload`, a higher-order operator or a Python function.
        args, kwargs: the node's arguments with tensors (fake, meta or real) in place of nodes, nested as they are.
        outputs: the node's ``meta["val"]``; None if unknown.

    Views, bare allocations and scalar arithmetic are free; nothing that moves bytes is.
    """
    plain_args = cast("tuple[object, ...]", concrete(args if isinstance(args, (tuple, list)) else (args,)))
    plain_kwargs = {name: concrete(value) for name, value in (kwargs or {}).items()}
    reads = list(tensors_of((plain_args, plain_kwargs)))
    writes = list(tensors_of(concrete(outputs)))
    if not isinstance(target, torch._ops.OpOverload):
        return _other_us(target, plain_args, reads, writes, spec)
    name = base_name(target)
    if is_view(target) or name in _FREE or not (reads or writes):
        return 0.0
    num_bytes = sum(tensor.size_bytes for tensor in reads) + sum(tensor.size_bytes for tensor in writes)
    if target.namespace in COLLECTIVE_NAMESPACES:
        return max(COLLECTIVE_FLOOR_US, num_bytes / (spec.bytes_per_us * COLLECTIVE_SHARE))
    if target.namespace not in PLAIN_NAMESPACES:
        return max(CUSTOM_FLOOR_LAUNCHES * spec.launch_us, num_bytes * CUSTOM_FACTOR / spec.bytes_per_us)
    memory_us = num_bytes * _BYTE_FACTORS.get(name, 1.0) / spec.bytes_per_us
    return spec.launch_us + max(memory_us, _arithmetic_us(target, plain_args, plain_kwargs, reads, writes, spec))


def base_name(target: torch._ops.OpOverload) -> str:
    """``mm`` for ``aten.mm.default``; in-place names without their underscore."""
    return target._schema.name.split("::")[1].removesuffix("_") or target._schema.name


def is_view(target: object) -> bool:
    """True if every result aliases an argument and nothing is written."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    schema = target._schema
    if base_name(target) == "_unsafe_view":
        return True
    return bool(schema.returns) and not schema.is_mutable and all(returned.alias_info is not None for returned in schema.returns)


def is_heavy(target: object) -> bool:
    """True for matmuls, convolutions and attention: priced by arithmetic, never fused."""
    return isinstance(target, torch._ops.OpOverload) and (
        base_name(target) in _MATMULS or _is_convolution(target) or _is_attention(str(target))
    )


def estimated_workspace_bytes(target: object, args: object, outputs: object) -> int:
    """A guess of the bytes an operator needs beyond its results, for calls that were not run. Ours: one copy of what each kind rewrites.

    Convolutions reorder their largest tensor, attention backward accumulates the query's gradient in float32 (FlashAttention-2), sorts
    and dropouts hold one more result, and what chooses by a mask holds positions in int64. Everything else is counted as 0.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return 0
    reads, writes = list(tensors_of(concrete(args))), list(tensors_of(concrete(outputs)))
    if _is_convolution(target):
        return max((tensor.size_bytes for tensor in (*reads, *writes)), default=0)
    if _is_attention(str(target)) and "backward" in str(target):
        return 4 * writes[0].num_elements if writes else 0
    if base_name(target) in _HOLD_ONE_MORE_RESULT:
        return writes[0].size_bytes if writes else 0
    return _positions_bytes(base_name(target), reads, writes)


def _positions_bytes(name: str, reads: list[TensorSpec], writes: list[TensorSpec]) -> int:
    """Most bytes of the positions that an operator with masks computes from those; measured on the CPU.

    `masked_select` sums its mask there before it has a result; one that must be expanded it copies, and sums twice. Indexing finds all
    coordinates of what is chosen.
    """
    masks = [tensor for tensor in reads if tensor.dtype in (torch.bool, torch.uint8)]
    if name in _INDEXING:
        return sum(8 * len(mask.shape) * mask.num_elements for mask in masks if mask is not reads[0])
    if name != "masked_select" or not masks:
        return 0
    num_elements = max(tensor.num_elements for tensor in reads)
    if any(tensor.num_elements < num_elements for tensor in reads):
        return 16 * num_elements + masks[-1].num_elements + 8
    return 8 + max(0, 8 * num_elements - sum(tensor.size_bytes for tensor in writes))


def _is_convolution(target: torch._ops.OpOverload) -> bool:
    return "convolution" in base_name(target) or base_name(target).startswith(("conv1d", "conv2d", "conv3d", "conv_transpose"))


def _is_attention(name: str) -> bool:
    return "attention" in name


def _arithmetic_us(
    target: torch._ops.OpOverload,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    reads: list[TensorSpec],
    writes: list[TensorSpec],
    spec: DeviceSpec,
) -> float:
    if not is_heavy(target):
        return 0.0
    if _is_attention(str(target)):
        return _attention_us(reads, spec, is_backward="backward" in str(target))
    is_convolution = _is_convolution(target)
    flops = _registered_flops(target, args, kwargs, writes)
    if flops is None:
        flops = _convolution_flops(reads, writes) if is_convolution else _matmul_flops(reads, writes)
    dtype = next((tensor.dtype for tensor in reads if tensor.dtype.is_floating_point), reads[0].dtype if reads else torch.float32)
    rate = spec.flops_per_us(dtype, tf32=allows_tf32(convolution=is_convolution))
    return flops * (CONVOLUTION_SLOWDOWN if is_convolution else 1.0) / rate


def _attention_us(reads: list[TensorSpec], spec: DeviceSpec, *, is_backward: bool) -> float:
    """Two matmuls over (queries, keys, head) forward; masks and causality are not subtracted, as in the measured factors."""
    blocks = [tensor for tensor in reads if len(tensor.shape) >= 3 and tensor.dtype.is_floating_point]
    if not blocks:
        return 0.0
    query = blocks[0]
    num_keys = max(blocks[min(2 if is_backward else 1, len(blocks) - 1)].shape[-2], 1)
    flops = 4.0 * query.num_elements * num_keys * (BACKWARD_ATTENTION_FLOPS if is_backward else 1.0)
    slowdown = ATTENTION_SLOWDOWN if num_keys >= SHORT_ATTENTION else SHORT_ATTENTION_SLOWDOWN
    return flops * slowdown / spec.flops_per_us(query.dtype, tf32=allows_tf32(convolution=False))


def _registered_flops(
    target: torch._ops.OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object], writes: list[TensorSpec]
) -> float | None:
    registry = cast("dict[Any, Callable[..., int]]", flop_registry)
    count = registry.get(target.overloadpacket)
    if count is None or not writes:
        return None
    outputs = [_meta(tensor) for tensor in writes]
    out: object = outputs[0] if len(target._schema.returns) == 1 else tuple(outputs)
    if base_name(target) == "convolution_backward":  # results that are not wanted are None: the formula asks by position
        wanted = iter(outputs)
        out = tuple(next(wanted, None) if mask else None for mask in cast("tuple[bool, ...]", args[10]))
    return float(count(*on_meta(args), **{name: on_meta(value) for name, value in kwargs.items()}, out_val=out))


def on_meta(value: Any) -> Any:
    """The value with tensors of torch's meta device in place of `TensorSpec`, through tuples and lists."""
    if isinstance(value, TensorSpec):
        return _meta(value)
    return type(value)(on_meta(item) for item in value) if isinstance(value, (tuple, list)) else value


def _meta(tensor: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride, dtype=tensor.dtype, device="meta")


def _matmul_flops(reads: list[TensorSpec], writes: list[TensorSpec]) -> float:
    """``2 m k n``: every element of the result is a dot product over the last dimension of the first matrix."""
    matrices = [tensor for tensor in reads if len(tensor.shape) >= 2]
    return 2.0 * sum(tensor.num_elements for tensor in writes[:1]) * (matrices[0].shape[-1] if matrices else 1)


def _convolution_flops(reads: list[TensorSpec], writes: list[TensorSpec]) -> float:
    """``2 x outputs x (weight elements per output channel)``; groups are in the weight's shape."""
    weights = reads[1] if len(reads) > 1 else reads[0]
    return 2.0 * sum(tensor.num_elements for tensor in writes[:1]) * math.prod(weights.shape[1:])


def allows_tf32(*, convolution: bool) -> bool:
    """Whether float32 matmuls (or convolutions) may run in TF32 now; the CPU ignores it."""
    cudnn: Any = torch.backends.cudnn  # its submodules are not annotated
    setting = cudnn.conv if convolution else torch.backends.cuda.matmul
    return bool(setting.fp32_precision == "tf32")


def _other_us(target: object, args: tuple[object, ...], reads: list[TensorSpec], writes: list[TensorSpec], spec: DeviceSpec) -> float:
    """Higher-order operators cost what their subgraphs cost; Python functions on sizes and getitems are free."""
    if not isinstance(target, torch._ops.HigherOrderOperator):
        return 0.0
    if _is_attention(str(target)):
        return spec.launch_us + _attention_us(reads, spec, is_backward=False) * (
            BACKWARD_ATTENTION_FLOPS if "backward" in str(target) else 1.0
        )
    moved_us = (sum(tensor.size_bytes for tensor in reads) + sum(tensor.size_bytes for tensor in writes)) / spec.bytes_per_us
    graphs = [argument for argument in args if isinstance(argument, fx.GraphModule)]
    inner_us = sum(node_us(node, spec) for graph in graphs for node in graph.graph.nodes)
    return max(inner_us, moved_us + spec.launch_us)


def node_us(node: fx.Node, spec: DeviceSpec) -> float:
    """`roofline_us` of one FX node that carries ``meta["val"]``, as do its arguments."""
    if node.op != "call_function":
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), node_value)
    return roofline_us(node.target, args, node.meta.get("val"), spec, kwargs=kwargs)


def node_value(node: fx.Node) -> Any:
    """What a node stands for when a price is asked: its fake value, or the subgraph that a ``get_attr`` names."""
    if node.op == "get_attr" and "val" not in node.meta:
        owner: object = node.graph.owning_module
        for part in str(node.target).split("."):
            owner = getattr(owner, part)
        return owner
    return node.meta.get("val")
