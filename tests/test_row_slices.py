"""Rows made apart are the rows of the whole: every rule, every dimension, every range, on real numbers; and what has no rows apart."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from dyngran.compiler import row_rules
from dyngran.compiler.row_slices import Exactness, Part, Rows, SlicedCall, independent_dimensions, sliced_call

aten = torch.ops.aten

PRIMS = frozenset({"convert_element_type.default"})  # all other cases are of ATen
ROUNDING = 1e-12  # of float64, for sums of a few terms about 1
# Pointwise operators of which CPU kernels round otherwise what they do not take several numbers at a time: the ends of what lies in a row,
# and all that does not.
ENDS_DIFFER = frozenset(
    {"aten.atan2.default", "aten.exp2.default", "aten.gelu.default", "aten.gelu_backward.default", "aten.mish_backward.default"}
    | {"aten.pow.Tensor_Tensor", "aten.pow.Tensor_Scalar", "aten.sigmoid.default", "aten.silu.default", "aten.silu_backward.default"}
    | {"aten.softplus_backward.default"}
)


def x(*shape: int) -> Tensor:
    """Numbers that differ, near 1 and of both signs."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(math.prod(shape) + len(shape)))


def ids(num: int, *shape: int) -> Tensor:
    return torch.randint(0, num, shape, generator=torch.Generator().manual_seed(num))


@dataclass(frozen=True)
class Case:
    """A call of one operator, and the dimensions of its (first) result along which rows are made apart."""

    target: str
    args: tuple[Any, ...]
    dimensions: tuple[int, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def operator(self) -> Any:
        packet, overload = self.target.split(".")
        namespace = torch.ops.prims if self.target in PRIMS else aten
        return getattr(getattr(namespace, packet, None), overload, None)


UNARY = ["relu", "gelu", "silu", "sigmoid", "tanh", "exp", "neg", "abs", "sin", "exp2", "square", "erf", "isnan", "logical_not"]
BINARY = ["add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum.default", "pow.Tensor_Tensor", "eq.Tensor", "atan2.default"]
BACKWARD = [
    "sigmoid_backward",
    "tanh_backward",
    "silu_backward",
    "gelu_backward",
    "hardswish_backward",
    "hardsigmoid_backward",
    "mish_backward",
]

POINTWISE = [
    *(Case(f"{name}.default", (x(4, 5),), (0, 1)) for name in [*UNARY, "hardswish"]),
    *(Case(name, (x(4, 5).abs(), x(5)), (0, 1)) for name in BINARY),
    *(Case(f"{name}.default", (x(4, 5), x(4, 5)), (0, 1)) for name in BACKWARD),
    Case("add.Tensor", (x(3, 1, 4), x(2, 1)), (0, 1, 2)),
    Case("add.Tensor", (x(3, 4), 2), (0, 1), {"alpha": 3}),
    Case("mul.Tensor", (x(3, 4), x()), (0, 1)),
    Case("add.Scalar", (x(3, 4), 2), (0, 1)),
    Case("rsqrt.default", (x(4, 5).abs(),), (0, 1)),
    Case("where.self", (x(4, 1) > 0, x(4, 5), x(5)), (0, 1)),
    Case("clamp.Tensor", (x(4, 5), x(5).neg().abs().neg(), None), (0, 1)),
    Case("addcmul.default", (x(4, 1), x(5), x(4, 5)), (0, 1), {"value": 2}),
    Case("lerp.Tensor", (x(4, 5), x(4, 5).neg(), x(5)), (0, 1)),
    Case("threshold_backward.default", (x(4, 5), x(4, 5).neg(), 0), (0, 1)),
    Case("native_dropout_backward.default", (x(4, 5), x(4, 5) > 0, 2.0), (0, 1)),
    Case("masked_fill.Scalar", (x(4, 5), x(4, 1) > 0, 2.0), (0, 1)),
    Case("masked_fill.Tensor", (x(4, 5), x(4, 1) > 0, x()), (0, 1)),
    Case("convert_element_type.default", (x(4, 5), torch.float16), (0, 1)),
    Case("_to_copy.default", (x(4, 5),), (0, 1), {"dtype": torch.bfloat16}),
    Case("copy.default", (x(4, 5).float(), x(5)), (0, 1)),
    Case("fill.Scalar", (x(4, 5), 3), (0, 1)),
    Case("fill.Tensor", (x(4, 5), x()), (0, 1)),
    Case("floor_divide.default", (x(4, 5), x(5)), (0, 1)),
    Case("rsub.Tensor", (x(4, 5), x(5)), (0, 1)),
    Case("hardtanh_backward.default", (x(4, 5), x(4, 5).neg(), -0.5, 0.5), (0, 1)),
    Case("leaky_relu_backward.default", (x(4, 5), x(4, 5).neg(), 0.1, False), (0, 1)),
    Case("elu_backward.default", (x(4, 5), 1.0, 1.0, 1.0, False, x(4, 5).neg()), (0, 1)),
    Case("softplus_backward.default", (x(4, 5), x(4, 5).neg(), 1, 20), (0, 1)),
    Case("softshrink_backward.default", (x(4, 5), x(4, 5).neg(), 0.5), (0, 1)),
    Case("hardshrink_backward.default", (x(4, 5), x(4, 5).neg(), 0.5), (0, 1)),
    Case("nll_loss_backward.default", (x(), x(6, 5), ids(5, 6), x(5), 1, 2, x().abs()), (0,)),
    Case("nll_loss_backward.default", (x(6), x(6, 5), ids(5, 6), None, 0, -100, x()), (0,)),
    Case("nll_loss_backward.default", (x(), x(5), ids(5), None, 1, -100, x().abs()), ()),
    Case("frexp.Tensor", (x(4, 5),), ()),  # two results
]

LIBRARY = [
    Case("mm.default", (x(4, 3), x(3, 5)), (0, 1)),
    Case("mm.default", (x(3, 4).t(), x(5, 3).t()), (0, 1)),
    *(Case("addmm.default", (x(*bias), x(4, 3), x(3, 5)), (0, 1), {"beta": 2, "alpha": 3}) for bias in [(5,), (4, 5), (4, 1), (1,), ()]),
    Case("bmm.default", (x(2, 4, 3), x(2, 3, 5)), (0, 1, 2)),
    *(Case("baddbmm.default", (x(*bias), x(2, 4, 3), x(2, 3, 5)), (0, 1, 2)) for bias in [(5,), (4, 1), (2, 1, 5), (1, 4, 5)]),
    Case("convolution.default", (x(3, 4, 6, 5), x(6, 4, 3, 3), x(6), [1, 2], [1, 0], [1, 1], False, [0, 0], 1), (0, 1)),
    Case("convolution.default", (x(3, 4, 6), x(6, 4, 3), None, [1], [1], [2], False, [0], 1), (0, 1)),
    Case("convolution.default", (x(3, 4, 6), x(6, 2, 3), x(6), [1], [1], [1], False, [0], 2), (0,)),
    Case("convolution.default", (x(3, 4, 6), x(4, 6, 3), x(6), [1], [1], [1], True, [0], 1), ()),
    Case("native_layer_norm.default", (x(3, 4, 5), [5], x(5), x(5), 1e-5), (0, 1)),
    Case("native_layer_norm.default", (x(3, 4, 5), [4, 5], None, None, 1e-5), (0,)),
    Case("_fused_rms_norm.default", (x(3, 4, 5), [5], x(5), None), (0, 1)),
    Case("native_group_norm.default", (x(3, 4, 5, 2), x(4), x(4), 3, 4, 10, 2, 1e-5), (0,)),
    *(
        Case("_native_batch_norm_legit_no_training.default", (x(3, 4, 5, 2), *affine, x(4), x(4).abs(), 0.1, 1e-5), (0, 1, 2, 3))
        for affine in [(x(4), x(4)), (None, None)]
    ),
    Case("_softmax.default", (x(3, 4, 5), -1, False), (0, 1)),
    Case("_softmax.default", (x(3, 4, 5), 1, False), (0, 2)),
    Case("_log_softmax.default", (x(3, 4, 5), 0, False), (1, 2)),
    Case("_safe_softmax.default", (x(3, 4, 5), -2), (0, 2)),
    Case("_softmax_backward_data.default", (x(3, 4), x(3, 4).softmax(1), 1, torch.float64), (0,)),
    Case("_log_softmax_backward_data.default", (x(3, 4), x(3, 4).log_softmax(0), 0, torch.float64), (1,)),
    Case("sum.dim_IntList", (x(3, 4, 5), [1]), (0, 1)),
    Case("sum.dim_IntList", (x(3, 4, 5), [-1, 0], True), (1,)),
    Case("sum.dim_IntList", (x(3, 4, 5), [], True), ()),
    Case("sum.dim_IntList", (x(3, 4, 5), None, True), (), {"dtype": torch.float32}),
    Case("mean.dim", (x(3, 4, 5), [-2]), (0, 1)),
    Case("prod.dim_int", (x(3, 4, 5), 0), (0, 1)),
    Case("amax.default", (x(3, 4, 5), [0, 2]), (0,)),
    Case("amax.default", (x(3, 4, 5),), ()),
    Case("amin.default", (x(3, 4, 5), [1], True), (0, 2)),
    Case("var.correction", (x(3, 4, 5), [1]), (0, 1), {"correction": 0, "keepdim": False}),
    Case("var.correction", (x(3, 4, 5), None), (), {"correction": 0, "keepdim": True}),
    Case("logsumexp.default", (x(3, 4, 5), [-1], True), (0, 1)),
    Case("linalg_vector_norm.default", (x(3, 4, 5), 2, [1]), (0, 1)),
    *(Case(f"{name}.dim", (x(3, 4) > 1, 1), (0,)) for name in ("any", "all")),
    *(Case(f"{name}.dims", (x(3, 4, 5) > 1, [0, 2], True), (1,)) for name in ("any", "all")),
    Case("any.dims", (x(3, 4) > 1, []), ()),  # nothing is reduced
    Case("argmax.default", (x(3, 4, 5), 1), (0, 1)),
    Case("argmin.default", (x(3, 4, 5), -1, True), (0, 1)),
    Case("argmax.default", (x(3, 4), None, True), ()),
    Case("cumsum.default", (x(3, 4, 5), -2), (0, 2)),
]

COPY = [
    *(Case(f"{name}.default", (x(4, 5),), (0, 1)) for name in ("clone", "alias", "detach", "lift_fresh_copy", "zeros_like", "ones_like")),
    Case("clone.default", (x(2, 3, 4, 5),), (0, 1, 2, 3), {"memory_format": torch.channels_last}),
    Case("full_like.default", (x(4, 5), 7), (0, 1), {"dtype": torch.int64}),
    Case("new_zeros.default", (x(4, 5), [4, 5]), (0, 1)),
    Case("new_ones.default", (x(4, 5), [3, 7]), (0, 1), {"dtype": torch.int64}),
    Case("new_full.default", (x(4, 5), [3, 7], 2.5), (0, 1)),
    Case("embedding.default", (x(7, 4), ids(7, 2, 3), 1), (0, 1, 2)),
    Case("index_select.default", (x(7, 4), 0, ids(7, 5)), (0, 1)),
    Case("index_select.default", (x(7, 4), -1, ids(4, 5)), (0, 1)),
    Case("gather.default", (x(5, 4), 1, ids(4, 5, 3)), (0,)),
    Case("gather.default", (x(5, 4), 1, ids(4, 5, 4)), (0,)),
    Case("gather.default", (x(5, 4), 1, ids(4, 3, 3)), ()),
    Case("scatter.value", (x(5, 4), -1, ids(4, 5, 1), 3.0), (0,)),
    Case("scatter.value", (x(5, 4), 1, ids(4, 3, 1), 3.0), ()),
    Case("scatter.src", (x(5, 4), 1, ids(4, 5, 1), x(6, 2)), (0,)),
    Case("view.default", (x(4, 6), [-1, 3]), (0,)),
    Case("view.default", (x(4, 6), [2, 2, 6]), (0, 2)),
    Case("view.default", (x(2, 2, 6), [4, 6]), (0, 1)),
    Case("view.default", (x(2, 3, 4), [2, 12]), (0,)),
    Case("view.default", (x(2, 12), [2, 4, 3]), (0, 1)),
    Case("view.default", (x(3, 4), [4, 3]), ()),
    Case("view.default", (x(3, 4), [2, 6]), ()),
    Case("view.default", (x(1, 4, 1), [4, 1, 1]), (0,)),
    Case("view.default", (x(0, 4), [4, 0]), ()),
    Case("_unsafe_view.default", (x(4, 6), [24]), (0,)),
    Case("reshape.default", (x(6, 4).t(), [2, 2, 6]), (0, 2)),
    Case("reshape.default", (x(6, 4).t(), [8, 3]), (0,)),
    Case("unsqueeze.default", (x(4, 5), 1), (0, 2)),
    Case("unsqueeze.default", (x(4, 5), -1), (0, 1)),
    Case("squeeze.default", (x(1, 4, 1, 5),), (0, 1)),
    Case("squeeze.dim", (x(1, 4, 1, 5), 0), (0, 2)),
    Case("squeeze.dim", (x(4, 5), 0), (0, 1)),
    Case("squeeze.dims", (x(1, 4, 1, 5), [0, 1, -2]), (0, 1)),
    Case("permute.default", (x(2, 3, 4), [2, 0, -2]), (0, 1, 2)),
    Case("transpose.int", (x(2, 3, 4), 0, -1), (0, 1, 2)),
    Case("transpose.int", (x(2, 3, 4), 1, 1), (0, 1, 2)),
    Case("t.default", (x(2, 3),), (0, 1)),
    Case("t.default", (x(3),), (0,)),
    Case("expand.default", (x(3, 1), [2, -1, 4]), (0, 1, 2)),
    Case("slice.Tensor", (x(7, 4),), (0, 1)),
    Case("slice.Tensor", (x(7, 4), 0, 2, 6), (0, 1)),
    Case("slice.Tensor", (x(7, 4), -1, -3, 2**63 - 1), (0, 1)),
    Case("slice.Tensor", (x(7, 4), 0, -100, -2, 2), (0, 1)),
    Case("slice.Tensor", (x(8, 4), 0, 1, None, 3), (0, 1)),
    Case("select.int", (x(3, 4, 5), 1, -1), (0, 1)),
    Case("select.int", (x(3, 4, 5), -3, 0), (0, 1)),
    Case("cat.default", ([x(2, 4), x(3, 4)],), (1,)),
    Case("cat.default", ([x(0), x(4, 2), x(4, 3)], -1), (0,)),
    Case("constant_pad_nd.default", (x(3, 4, 5), [1, 0, 0, 0], 2.0), (0, 1)),
    Case("constant_pad_nd.default", (x(3, 4, 5), [0, 0, 0, -1]), (0, 2)),
    Case("repeat.default", (x(4, 5), [1, 2]), (0,)),
    Case("repeat.default", (x(5), [2, 1]), (1,)),
    Case("repeat.default", (x(5), [1, 1]), (1,)),
    Case("roll.default", (x(3, 4), [1], [-1]), (0,)),
    Case("roll.default", (x(3, 4), [1]), ()),
    Case("flip.default", (x(3, 4, 5), [0, -1]), (1,)),
]

ATTENTION = "_scaled_dot_product_{}.default"
HEADS = (x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 8).neg())
SHARED_HEADS = (x(2, 4, 5, 8), x(2, 2, 6, 8), x(2, 2, 6, 8).neg())
ON_CPU = ATTENTION.format("flash_attention_for_cpu")
ATTENTIONS = [
    Case(ON_CPU, HEADS, (0, 1)),
    Case(ON_CPU, (x(2, 4, 5, 8), x(2, 4, 5, 8), x(2, 4, 5, 8), 0.0, True), (0, 1), {"scale": 0.3}),
    *(Case(ON_CPU, HEADS, (0, 1), {"attn_mask": x(*mask)}) for mask in [(5, 6), (2, 4, 5, 6), (2, 1, 5, 6), (1, 4, 5, 6), (1, 1, 5, 6)]),
    Case(ATTENTION.format("flash_attention"), (*HEADS, 0.0, False), (0, 1)),
    Case(ATTENTION.format("flash_attention"), SHARED_HEADS, (0,)),
    Case(ATTENTION.format("flash_attention"), (*HEADS, 0.1), ()),
    *(
        Case(ATTENTION.format(name), (*HEADS, bias, *more), (0, 1))
        for name, more in [("efficient_attention", (True,)), ("cudnn_attention", (False,)), ("fused_attention_overrideable", ())]
        for bias in [None, x(2, 4, 5, 6), x(2, 1, 5, 6), x(1, 4, 5, 6)]
    ),
]

UNKNOWN = [
    Case("rrelu.default", (x(4, 5), 0.1, 0.3, True), ()),  # pointwise, and random
    Case("bernoulli.p", (x(4, 5), 0.5), ()),
    Case("rand_like.default", (x(4, 5),), ()),
    Case("native_dropout.default", (x(4, 5), 0.5, True), ()),
    Case("add_.Tensor", (x(4, 5), x(4, 5)), ()),  # pointwise, and writes
    Case("relu_.default", (x(4, 5),), ()),
    Case("sort.default", (x(4, 5),), ()),
    Case("topk.default", (x(4, 5), 2), ()),
    Case("split.Tensor", (x(4, 5), 2), ()),
    Case("view.dtype", (x(4, 5), torch.int32), ()),
    Case("as_strided.default", (x(4, 5), [4, 5], [5, 1]), ()),
    Case("full.default", ([4, 5], 1.0), ()),
    Case("arange.default", (5,), ()),
    Case("_native_batch_norm_legit.default", (x(3, 4, 5), x(4), x(4), x(4), x(4).abs(), True, 0.1, 1e-5), ()),
    Case("_native_batch_norm_legit_functional.default", (x(3, 4, 5), x(4), x(4), x(4), x(4).abs(), True, 0.1, 1e-5), ()),
    Case("_batch_norm_with_update_functional.default", (x(3, 4, 5), x(4), x(4), x(4), x(4).abs(), 0.1, 1e-5), ()),
]

TABLE = [*POINTWISE, *LIBRARY, *COPY, *ATTENTIONS, *UNKNOWN]
EXACTNESS = (
    {case.target: Exactness.POINTWISE for case in POINTWISE}
    | {case.target: Exactness.LIBRARY for case in (*LIBRARY, *ATTENTIONS)}
    | {case.target: Exactness.COPY for case in COPY}
)
NEEDS_A_CARD = frozenset({"mm.dtype", "addmm.dtype", "bmm.dtype", "baddbmm.dtype"})  # and have the arguments of those that are here


def on_a_card(target: Any) -> Callable[..., Any]:
    """Attention by its formula, with the arguments of an operator that only cards have."""
    names = [argument.name for argument in target._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = given["query"], given["key"], given["value"]
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        scores = query @ key.mT / math.sqrt(query.shape[-1]) + (0.0 if given.get("attn_bias") is None else given["attn_bias"])
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    return run


def run_target(target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    is_absent = "attention" in str(target) and "for_cpu" not in str(target)
    return (on_a_card(target) if is_absent else target)(*args, **kwargs)


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """With every object of a kind changed, through lists, tuples and dictionaries."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(one, kind, change) for one in value)
    return {name: mapped(one, kind, change) for name, one in value.items()} if isinstance(value, dict) else value


def node_of(case: Case) -> tuple[fx.Node, dict[fx.Node, Any]]:
    """A node that calls the operator, and what it and its operands are."""
    graph, values = fx.Graph(), {}

    def operand(tensor: Tensor) -> fx.Node:
        node = graph.placeholder(f"operand_{len(values)}")
        node.meta["val"], values[node] = tensor.to("meta"), tensor.clone()
        return node

    node = graph.call_function(case.operator, *mapped((case.args, case.kwargs), Tensor, operand))
    torch.manual_seed(0)
    values[node] = run_target(case.operator, *mapped((case.args, case.kwargs), Tensor, Tensor.clone))
    node.meta["val"] = mapped(values[node], Tensor, lambda tensor: tensor.to("meta"))
    return node, values


def first(value: Any) -> Tensor:
    tensor: Tensor = value[0] if isinstance(value, (tuple, list)) else value
    return tensor


def narrowed(tensor: Tensor, rows: Rows) -> Tensor:
    return tensor.narrow(rows.dimension, rows.begin, rows.end - rows.begin)


def run_call(call: SlicedCall, values: Mapping[fx.Node, Any], *, copies: bool) -> Tensor:
    """``copies``: rows lie as they do when they were made apart."""

    def value_of(part: Part) -> Any:
        whole = values[part.node]
        if part.rows is None:
            return whole
        rows = narrowed(first(whole), part.rows)
        rows = rows.clone(memory_format=torch.contiguous_format) if copies else rows
        return (rows, *whole[1:]) if isinstance(whole, (tuple, list)) else rows

    return first(run_target(call.target, mapped(call.args, Part, value_of), mapped(call.kwargs, Part, value_of)))


def all_rows(sizes: tuple[int, ...]) -> Iterator[Rows]:
    for dimension, size in enumerate(sizes):
        yield from (Rows(dimension, begin, end) for end in range(size + 1) for begin in range(end))


def check_rows(node: fx.Node, values: Mapping[fx.Node, Any]) -> int:
    """That all rows that can be made apart are those of the whole; how many there are."""
    whole, num_made = first(values[node]), 0
    for rows in all_rows(tuple(whole.shape)):
        call = sliced_call(node, rows)
        if call is None:
            continue
        num_made += 1
        want = narrowed(whole, rows)
        for copies in (False, True):
            got = run_call(call, values, copies=copies)
            assert (got.shape, got.dtype) == (want.shape, want.dtype), (node.target, rows)
            is_rounded = call.exactness is Exactness.LIBRARY or str(call.target) in ENDS_DIFFER
            if is_rounded and got.is_floating_point():
                assert torch.allclose(got, want, rtol=ROUNDING, atol=ROUNDING), (node.target, rows)
            else:
                assert torch.equal(got, want), (node.target, rows)
    return num_made


@pytest.mark.parametrize("case", [pytest.param(case, id=f"{number}-{case.target}") for number, case in enumerate(TABLE)])
def test_rows_made_apart_are_those_of_the_whole(case: Case) -> None:
    if case.operator is None:
        pytest.skip(f"this torch has no {case.target}")
    node, values = node_of(case)
    assert independent_dimensions(node) == case.dimensions
    assert check_rows(node, values) or not case.dimensions
    sizes = first(values[node]).shape
    for dimension in case.dimensions:
        call = sliced_call(node, Rows(dimension, sizes[dimension] // 2, sizes[dimension]))
        assert call is not None and call.exactness is EXACTNESS[case.target]
    for dimension in set(range(len(sizes))) - set(case.dimensions):
        if sizes[dimension] > 1 and "view" not in case.target and "reshape" not in case.target:  # views have some rows apart, others not
            assert all(sliced_call(node, rows) is None for rows in all_rows(tuple(sizes)) if rows.dimension == dimension)


def test_every_rule_has_a_case() -> None:
    met = {f"{'prims' if case.target in PRIMS else 'aten'}.{case.target}" for case in TABLE if case.dimensions}
    assert set(row_rules._RULES) - met == {f"aten.{name}" for name in NEEDS_A_CARD}


def test_of_an_operand_no_more_is_read_than_the_rows_need() -> None:
    """What a call asks of a matrix product, a broadcast sum and a slice, by name."""
    node, _ = node_of(Case("addmm.default", (x(5), x(4, 3), x(3, 5)), ()))
    bias, first_matrix, second_matrix = node.all_input_nodes
    of_rows, of_columns = sliced_call(node, Rows(0, 1, 3)), sliced_call(node, Rows(1, 2, 5))
    assert of_rows is not None and of_rows.args == (Part(bias, None), Part(first_matrix, Rows(0, 1, 3)), Part(second_matrix, None))
    assert of_columns is not None
    assert of_columns.args == (Part(bias, Rows(0, 2, 5)), Part(first_matrix, None), Part(second_matrix, Rows(1, 2, 5)))
    node, _ = node_of(Case("slice.Tensor", (x(9, 4), 0, 2), ()))
    shifted = sliced_call(node, Rows(0, 1, 3))
    assert shifted is not None and shifted.args == (Part(node.all_input_nodes[0], Rows(0, 3, 5)), 0, 0, 2)


def test_a_getitem_has_the_rows_of_the_first_result_alone() -> None:
    norm, values = node_of(Case("native_layer_norm.default", (x(3, 4, 5), [5], x(5), x(5), 1e-5), ()))
    parts = [norm.graph.call_function(operator.getitem, (norm, member)) for member in range(3)]
    for member, part in enumerate(parts):
        values[part], part.meta["val"] = values[norm][member], norm.meta["val"][member]
    assert [independent_dimensions(part) for part in parts] == [(0, 1), (), ()]
    call = sliced_call(parts[0], Rows(1, 1, 3))
    assert call == SlicedCall(operator.getitem, (Part(norm, Rows(1, 1, 3)), 0), {}, Exactness.COPY)
    assert check_rows(parts[0], values)
    split, _ = node_of(Case("split.Tensor", (x(4, 5), 2), ()))
    half = split.graph.call_function(operator.getitem, (split, 0))
    half.meta["val"] = split.meta["val"][0]
    assert independent_dimensions(half) == ()


def block(tokens: Tensor, labels: Tensor, table: Tensor, mixing: Tensor, out: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """A small language model with everything that its training reads: the loss and all gradients."""
    num_batch, num_tokens, width = (*tokens.shape, table.shape[1])
    hidden = F.embedding(tokens, table)
    query, key, value = (F.layer_norm(hidden, (width,), scale) @ mixing).chunk(3, -1)
    heads = [one.reshape(num_batch, num_tokens, 2, width // 2).transpose(1, 2) for one in (query, key, value)]
    attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(num_batch, num_tokens, width)
    hidden = hidden + F.gelu(attended * F.rms_norm(hidden, (width,), scale).softmax(-1))
    logits = torch.addmm(out.sum(0), hidden.flatten(0, 1), out)
    loss = F.cross_entropy(logits, labels.flatten())
    return loss, *torch.autograd.grad(loss, (table, mixing, out, scale))


def images(image: Tensor, kernel: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Convolution, norms and pooling by a mean, with gradients."""
    grown = F.relu(F.group_norm(F.conv2d(image, kernel, padding=1), 2, weight))
    loss = (F.pad(grown, [1, 1, 0, 0]).mean((2, 3)) * weight.cumsum(0)).log_softmax(1).square().sum()
    return loss, *torch.autograd.grad(loss, (kernel, weight))


class Recorder(fx.Interpreter):
    """What every node made, before somebody writes into it."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, node: fx.Node) -> Any:
        made = super().run_node(node)
        self.values[node] = mapped(made, Tensor, Tensor.clone)
        return made


def parameters(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.requires_grad_(tensor.is_floating_point()) for tensor in tensors)


@pytest.mark.parametrize(
    ("step", "inputs", "at_least"),
    [
        (block, (ids(7, 4, 6), ids(7, 4, 6), x(7, 8), x(8, 24), x(8, 7), x(8)), {"mm", "_log_softmax", "_softmax_backward_data", "cat"}),
        (images, (x(4, 3, 6, 6), x(6, 3, 3, 3), x(6)), {"convolution", "native_group_norm", "mean", "threshold_backward"}),
    ],
    ids=["language", "images"],
)
def test_rows_of_all_nodes_of_a_training_step(step: Callable[..., Any], inputs: tuple[Tensor, ...], at_least: set[str]) -> None:
    inputs = parameters(*inputs)
    module = make_fx(step, tracing_mode="fake")(*inputs)
    recorder = Recorder(module)
    with torch.no_grad():
        recorder.run(*(tensor.detach() for tensor in inputs))
        made = {
            node.target._schema.name
            for node in module.graph.nodes
            if independent_dimensions(node) and check_rows(node, recorder.values) and node.target is not operator.getitem
        }
    assert {f"aten::{name}" for name in at_least} <= made


@pytest.mark.parametrize("step", [lambda a, b: (a @ b).relu(), lambda a, b: a.view(-1)[:, None] + b[0]])
def test_sizes_that_are_symbols_have_no_rows(step: Callable[..., Any]) -> None:
    module = make_fx(step, tracing_mode="symbolic")(x(4, 6), x(6, 3))
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    assert len(nodes) >= 2 and all(independent_dimensions(node) == () and sliced_call(node, Rows(0, 0, 1)) is None for node in nodes)


def test_an_operand_of_a_symbolic_size_has_no_rows() -> None:
    """Though the result's sizes are known."""
    module = make_fx(lambda a: a.sum(1), tracing_mode="symbolic")(x(4, 6))
    node = next(node for node in module.graph.nodes if node.op == "call_function")
    node.meta["val"] = torch.empty(4, device="meta")
    assert sliced_call(node, Rows(0, 0, 1)) is None


def test_inputs_and_python_functions_have_no_rows() -> None:
    node, _ = node_of(Case("relu.default", (x(4, 5),), ()))
    assert independent_dimensions(node.all_input_nodes[0]) == ()
    python = node.graph.call_function(operator.add, (node, 1))
    python.meta["val"] = node.meta["val"]
    assert independent_dimensions(python) == ()


@pytest.mark.parametrize(("dimension", "begin", "end"), [(-1, 0, 1), (0, -1, 1), (0, 2, 2), (0, 3, 2)])
def test_no_rows_are_refused(dimension: int, begin: int, end: int) -> None:
    with pytest.raises(ValueError, match="are no rows"):
        Rows(dimension, begin, end)


@pytest.mark.parametrize("rows", [Rows(0, 2, 5), Rows(2, 0, 1)])
def test_rows_that_a_result_does_not_have_are_refused(rows: Rows) -> None:
    node, _ = node_of(Case("relu.default", (x(4, 5),), ()))
    with pytest.raises(ValueError, match="has no rows"):
        sliced_call(node, rows)


@st.composite
def two_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of as many elements: the same factors, grouped in two ways, with ones between them."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=1, max_size=5))

    def grouped() -> tuple[int, ...]:
        order = draw(st.permutations(factors)) if draw(st.booleans()) else factors
        sizes = [1]
        for factor in order:
            if draw(st.booleans()):
                sizes[-1] *= factor
            else:
                sizes.append(factor)
        return tuple(sizes)

    return grouped(), grouped()


@settings(max_examples=300, deadline=None)
@given(shapes=two_shapes(), data=st.data())
def test_a_view_has_exactly_the_rows_that_are_rows_of_its_operand(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    """By trying all rows of the operand: those that are in the result in the same order."""
    before, after = shapes
    elements = torch.arange(math.prod(before)).view(before)
    node, values = node_of(Case("view.default", (elements, list(after)), ()))
    rows = data.draw(st.sampled_from(list(all_rows(after))))
    want = narrowed(values[node], rows)
    exists = any(torch.equal(narrowed(elements, one).flatten(), want.flatten()) for one in all_rows(before))
    call = sliced_call(node, rows)
    if want.numel() < elements.numel():  # else all of any dimension are the same
        assert (call is not None) == exists
    if call is not None:
        assert torch.equal(run_call(call, values, copies=data.draw(st.booleans())), want)
