"""Which ops Inductor turns into loops that fuse with their neighbours, and which it hands to a library or a kernel of their own."""

from __future__ import annotations

from enum import Enum

import torch
from torch import fx

from dyngran.compiler import torch_private


class LoopKind(Enum):
    """NONE: an external kernel, a scatter, a copy between devices: its results always reach memory."""

    NONE = "none"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"


_REDUCTIONS = frozenset(
    f"aten::{name}"
    for name in (
        "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "any", "all", "var", "var_mean", "std", "std_mean",
        "logsumexp", "norm", "linalg_vector_norm", "_softmax", "_log_softmax", "native_layer_norm", "native_group_norm",
        "_native_batch_norm_legit_functional", "_softmax_backward_data", "_log_softmax_backward_data",
    )
) | {"prims::sum", "prims::amax", "prims::amin", "prims::var"}  # fmt: skip

_POINTWISE_ATEN = frozenset(
    f"aten::{name}"
    for name in (
        "_to_copy", "where", "clone", "full", "full_like", "zeros_like", "ones_like", "arange", "empty", "embedding", "gather",
        "index_select", "cat",
        "constant_pad_nd", "slice_scatter", "select_scatter", "gelu", "gelu_backward", "silu_backward", "sigmoid_backward",
        "tanh_backward", "threshold_backward", "native_dropout_backward", "copy", "lift_fresh_copy", "scalar_tensor", "upsample_nearest2d",
        "hardtanh_backward", "leaky_relu_backward", "elu_backward", "flip", "roll", "repeat", "tril", "triu", "iota", "index",
    )
)  # fmt: skip

_POINTWISE = _POINTWISE_ATEN | {
    "prims::convert_element_type",
    "prims::iota",
    "prims::inductor_random",
    "prims::inductor_lookup_seed",
    "prims::inductor_randint",
}


def loop_kind(node: fx.Node) -> LoopKind:
    """How a fusing code generator sees this op."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return LoopKind.NONE
    name = target._schema.name
    if name in _REDUCTIONS:
        return LoopKind.REDUCTION
    if name in _POINTWISE or torch.Tag.pointwise in target.tags:
        return LoopKind.NONE if torch_private.is_random(node) else LoopKind.POINTWISE
    return LoopKind.NONE
