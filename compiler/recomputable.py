"""Which ops must not run twice, and why."""

from __future__ import annotations

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.storages import aliased_argument

OWN_NAMESPACES = frozenset({"aten", "prims", "prim", "inductor", "quantized_decomposed", "torchvision", "dyngran"})
REPEATABLE_HIGHER_ORDER = frozenset({"flex_attention", "triton_kernel_wrapper_functional"})
NEVER_TWICE = frozenset({"inductor::seeds", "prims::inductor_seeds", "prims::inductor_seed", "aten::_local_scalar_dense"})
CHOOSE_AMONG_EQUALS = frozenset(
    f"aten::{name}" for name in ("topk", "sort", "argsort", "kthvalue", "median", "nanmedian", "mode", "argmax", "argmin")
)


def pin_reason(node: fx.Node, *, fused: bool = False) -> str:
    """Why this op must not be run again in backward; '' if it may. ``fused``: the code generator rounds and lays out what is made again as
    it likes, so that a choice among equal, or nearly equal, elements may be another one."""
    target = node.target
    tag = node.meta.get("recompute")
    if tag == torch_private.MUST_SAVE:
        if target is torch.ops.aten.clone.default and _is_input_or_window(node.all_input_nodes[0]):
            return "copy of an input that forward overwrites"
        return "torch.utils.checkpoint policy or torch says it must be saved"
    if torch_private.is_effect(node):
        return "has an effect outside the graph"
    if isinstance(target, torch_private.HIGHER_ORDER_TYPE):
        name = target.name()  # type: ignore[no-untyped-call]  # torch gives it no types
        if name in REPEATABLE_HIGHER_ORDER or tag in torch_private.USER_RECOMPUTES:
            return ""
        return f"higher-order operator {name}"
    if not isinstance(target, torch._ops.OpOverload):
        return "" if getattr(target, "__module__", "") in ("_operator", "math", "torch") else "not a torch operator"
    if target._schema.is_mutable:
        return "mutates its argument"
    name = target._schema.name
    if name in NEVER_TWICE:
        return "must run once"
    if fused and name in CHOOSE_AMONG_EQUALS and tag not in torch_private.USER_RECOMPUTES:
        return "may choose otherwise among equal elements"
    if torch.Tag.dynamic_output_shape in target.tags or torch.Tag.data_dependent_output in target.tags:
        return "its size depends on the data"
    if target.namespace not in OWN_NAMESPACES and tag not in torch_private.USER_RECOMPUTES:
        return f"custom operator of {target.namespace}: it may have effects (checkpoint it yourself if it may run twice)"
    if torch_private.is_random(node) and any(isinstance(arg, torch.Generator) for arg in (*node.args, *node.kwargs.values())):
        return "draws from a generator of the user's"
    return ""


def _is_input_or_window(node: fx.Node) -> bool:
    base: fx.Node | None = node
    if node.target is torch.ops.aten.as_strided.default:
        while base is not None and base.op != "placeholder":
            base = aliased_argument(base)
    return base is not None and base.op == "placeholder"
