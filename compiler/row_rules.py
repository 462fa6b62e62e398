"""For each operator: which rows of its operands are read for rows along one dimension of its (first) result.

A rule names every operand of a call, and what other arguments change; None says that these rows cannot be made apart. Operators that have
no rule are not known: among them all that draw random numbers, write into an operand or keep statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


class Exactness(Enum):
    """Whether rows that are made apart have the bits of those that are made together.

    COPY: they do: views, copies, elements that are chosen. POINTWISE: they do, unless a kernel treats the ends of rows otherwise: one
    number at a time. LIBRARY: they may not: sums whose order a library chooses by shape, and every other reduction.
    """

    COPY = "copy"
    POINTWISE = "pointwise"
    LIBRARY = "library"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows ``begin`` to ``end`` (excluded) along one dimension (>= 0) of a tensor; one at least."""

    dimension: int
    begin: int
    end: int

    def __post_init__(self) -> None:
        if self.dimension < 0 or not 0 <= self.begin < self.end:
            raise ValueError(f"{self.begin}:{self.end} along dimension {self.dimension} are no rows")

    @property
    def count(self) -> int:
        return self.end - self.begin

    def along(self, dimension: int) -> Rows:
        """Rows of the same numbers along another dimension."""
        return Rows(dimension, self.begin, self.end)


Need = Rows | None | list[Rows | None] | list[int] | int
Needs = Mapping[str, Need]  # by argument: rows of an operand, or None for all of it; what any other argument is for these rows


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a node by name, defaults included, and the sizes of its (first) result."""

    arguments: Mapping[str, Any]
    sizes: tuple[int, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def operand(self, name: str) -> tuple[int, ...]:
        """Sizes of an operand."""
        return tuple(self.arguments[name].meta["val"].shape)

    def dimensions(self, name: str, rank: int) -> frozenset[int]:
        """Those that an argument names, counted from the first."""
        named = self.arguments[name]
        every = named if isinstance(named, (tuple, list)) else () if named is None else (named,)
        return frozenset(dimension % rank for dimension in every)

    def broadcast(self, operand: fx.Node | None, rows: Rows) -> Rows | None:
        """Rows of an operand whose sizes are the result's, counted from the last dimension, or 1."""
        if operand is None:
            return None
        sizes = operand.meta["val"].shape
        dimension = rows.dimension - len(self.sizes) + len(sizes)
        return rows.along(dimension) if dimension >= 0 and sizes[dimension] != 1 else None

    def resized(self, rows: Rows) -> list[int]:
        """Sizes of rows of the result."""
        return [rows.count if dimension == rows.dimension else size for dimension, size in enumerate(self.sizes)]


RowsNeeded = Callable[[Call, Rows], Needs | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """``target``: what is called in place of the operator, with what ``needs`` names, in that order, and nothing else."""

    needs: RowsNeeded
    exactness: Exactness
    target: torch._ops.OpOverload | None = None


def sizes_of(value: object) -> tuple[int, ...] | None:
    """Of a strided tensor, if they are known."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def rule_of(target: torch._ops.OpOverload) -> Rule | None:
    """None for what is not known. Attention has a rule although it may draw random numbers, and says itself when it does not."""
    schema = target._schema
    if schema.is_mutable:
        return None
    if (rule := _RULES.get(str(target))) is not None:
        return rule
    is_plain = torch.Tag.nondeterministic_seeded not in target.tags and len(schema.returns) == 1
    return Rule(_broadcast, Exactness.POINTWISE) if is_plain and torch.Tag.pointwise in target.tags else None


def _broadcast(call: Call, rows: Rows) -> Needs | None:
    """Every number of the result is made of one number of each operand."""
    needs: dict[str, Need] = {}
    for name, value in call.arguments.items():
        every = value if isinstance(value, (tuple, list)) else (value,)
        nodes = [one if isinstance(one, fx.Node) else None for one in every]
        if not all(_is_broadcast(tuple(one.meta["val"].shape), call.sizes) for one in nodes if one is not None):
            return None
        if any(one is not None for one in nodes):
            found = [call.broadcast(one, rows) for one in nodes]
            needs[name] = found if isinstance(value, (tuple, list)) else found[0]
    return needs


def _is_broadcast(sizes: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(sizes) <= len(to) and all(size in (1, wanted) for size, wanted in zip(reversed(sizes), reversed(to), strict=False))


def _same(*operands: str) -> RowsNeeded:
    """The same rows of operands of the result's sizes."""
    return lambda call, rows: dict.fromkeys(operands, rows) if all(call.operand(name) == call.sizes for name in operands) else None


def _same_but_along(argument: str, *operands: str) -> RowsNeeded:
    """The same rows of operands of the result's sizes, along dimensions that an argument does not name; if it names none, along none."""

    def needs(call: Call, rows: Rows) -> Needs | None:
        named = call.dimensions(argument, len(call.sizes))
        return dict.fromkeys(operands, rows) if named and rows.dimension not in named else None

    return needs


def _new(call: Call, rows: Rows) -> Needs:
    """Of the operand only dtype and device count: its rows where it has as many, so that the whole need not be there."""
    return {"self": rows if call.operand("self") == call.sizes else None, "size": call.resized(rows)}


def _matmul(first: str, second: str) -> RowsNeeded:
    """``self``, if it is neither of the two, is broadcast and added."""

    def needs(call: Call, rows: Rows) -> Needs:
        num_batch, dimension = len(call.sizes) - 2, rows.dimension
        found: dict[str, Need] = {} if first == "self" else {"self": call.broadcast(call["self"], rows)}
        found[first] = rows if dimension <= num_batch else None
        found[second] = rows if dimension != num_batch else None
        return found

    return needs


def _convolution(call: Call, rows: Rows) -> Needs | None:
    """Images apart; output channels apart where each reads all input channels."""
    if call["transposed"] or len(call.operand("input")) != len(call.operand("weight")):
        return None
    if rows.dimension == 0:
        return {"input": rows, "weight": None, "bias": None}
    if rows.dimension == 1 and call["groups"] == 1:
        return {"input": None, "weight": rows.along(0), "bias": rows.along(0)}
    return None


def _layer_norm(call: Call, rows: Rows) -> Needs | None:
    if rows.dimension >= len(call.sizes) - len(call["normalized_shape"]):
        return None
    return {"input": rows, "weight": None, "bias": None} if "bias" in call.arguments else {"input": rows, "weight": None}


def _group_norm(call: Call, rows: Rows) -> Needs | None:
    if rows.dimension != 0 or call["N"] != call.sizes[0]:
        return None
    return {"input": rows, "weight": None, "bias": None, "N": rows.count}


def _batch_norm(call: Call, rows: Rows) -> Needs:
    """With statistics that are given; dimension 1 are the channels."""
    of_channels = rows.along(0) if rows.dimension == 1 else None
    return {"input": rows, **dict.fromkeys(("weight", "bias", "running_mean", "running_var"), of_channels)}


def _attention(*masks: str) -> RowsNeeded:
    """Batch and heads apart, where no head is shared and nothing is dropped."""

    def needs(call: Call, rows: Rows) -> Needs | None:
        operands = ("query", "key", "value")
        if call["dropout_p"] != 0.0 or len(call.sizes) != 4 or rows.dimension > 1:
            return None
        if any(call.operand(name)[rows.dimension] != call.sizes[rows.dimension] for name in operands):
            return None
        return {**dict.fromkeys(operands, rows), **{mask: call.broadcast(call[mask], rows) for mask in masks}}

    return needs


def _reduction(call: Call, rows: Rows) -> Needs | None:
    """``dim`` are those that are reduced; all of them if it names none."""
    sizes = call.operand("self")
    reduced = call.dimensions("dim", len(sizes)) or frozenset(range(len(sizes)))
    kept = [dimension for dimension in range(len(sizes)) if call["keepdim"] or dimension not in reduced]
    if [1 if dimension in reduced else sizes[dimension] for dimension in kept] != list(call.sizes):
        return None
    return None if kept[rows.dimension] in reduced else {"self": rows.along(kept[rows.dimension])}


def _embedding(call: Call, rows: Rows) -> Needs:
    if rows.dimension < len(call.operand("indices")):
        return {"weight": None, "indices": rows}
    return {"weight": rows.along(1), "indices": None}


def _index_select(call: Call, rows: Rows) -> Needs | None:
    if rows.dimension not in call.dimensions("dim", len(call.sizes)):
        return {"self": rows, "index": None}
    return {"self": None, "index": rows.along(0)} if len(call.operand("index")) == 1 else None


def _indexed(*operands: str) -> RowsNeeded:
    """Along a dimension that is not the indexed one, and in which the index is as long as what it indexes."""

    def needs(call: Call, rows: Rows) -> Needs | None:
        (dim,) = call.dimensions("dim", len(call.sizes))
        sizes = [call.operand(name) for name in ("self", "index")]
        apart = all(len(one) == len(call.sizes) and one[rows.dimension] == call.sizes[rows.dimension] for one in sizes)
        return dict.fromkeys(operands, rows) if apart and rows.dimension != dim else None

    return needs


def _nll_loss_backward(call: Call, rows: Rows) -> Needs | None:
    """Of sizes (rows, classes): the gradient of a row is its own where losses are not reduced (0), else a number for all."""
    if len(call.sizes) != 2 or rows.dimension != 0:
        return None
    gradient = rows if call["reduction"] == 0 else None
    return {"grad_output": gradient, "self": rows, "target": rows, "weight": None, "total_weight": None}


def _reshape(call: Call, rows: Rows) -> Needs | None:
    """Rows along the operand's dimension that has as many blocks of elements before it: the blocks below are the same, and what is a run
    of rows in each of one is a run of rows in each of the other, if it begins and ends between two rows.

    Rows that are not all of their dimension are a run in no other dimension of the operand.
    """
    before = call.operand("self")
    if 0 in before:
        return None
    num_outer, block = math.prod(call.sizes[: rows.dimension]), math.prod(call.sizes[rows.dimension + 1 :])
    matching = [dimension for dimension in range(len(before)) if math.prod(before[:dimension]) == num_outer]
    if not matching:
        return None
    dimension = matching[-1]  # others are of one row
    begin, end, row = rows.begin * block, rows.end * block, math.prod(before[dimension + 1 :])
    return None if begin % row or end % row else {"self": Rows(dimension, begin // row, end // row), "size": call.resized(rows)}


def _permute(call: Call, rows: Rows) -> Needs:
    return {"self": rows.along(call["dims"][rows.dimension] % len(call.sizes))}


def _transpose(call: Call, rows: Rows) -> Needs:
    first, second = (call[name] % len(call.sizes) for name in ("dim0", "dim1"))
    return {"self": rows.along({first: second, second: first}.get(rows.dimension, rows.dimension))}


def _expand(call: Call, rows: Rows) -> Needs:
    return {"self": call.broadcast(call["self"], rows), "size": call.resized(rows)}


def _slice(call: Call, rows: Rows) -> Needs:
    """Along the sliced dimension: from the first row that is read to the last."""
    dim, step = call["dim"] % len(call.sizes), call["step"]
    if rows.dimension != dim:
        return {"self": rows}
    size, start = call.operand("self")[dim], call["start"] or 0
    first = min(max(start + size if start < 0 else start, 0), size) + rows.begin * step
    length = (rows.count - 1) * step + 1
    return {"self": Rows(dim, first, first + length), "start": 0, "end": length}


def _select(call: Call, rows: Rows) -> Needs:
    dim = call["dim"] % (len(call.sizes) + 1)
    return {"self": rows.along(rows.dimension + (rows.dimension >= dim))}


def _cat(call: Call, rows: Rows) -> Needs | None:
    """An operand of sizes (0,) is left out whatever the others' sizes."""
    if rows.dimension == call["dim"] % len(call.sizes):
        return None
    return {"tensors": [None if tuple(one.meta["val"].shape) == (0,) else rows for one in call["tensors"]]}


def _pad(call: Call, rows: Rows) -> Needs | None:
    """``pad`` has two numbers for each dimension, from the last."""
    place = 2 * (len(call.sizes) - 1 - rows.dimension)
    return None if any(call["pad"][place : place + 2]) else {"self": rows}


def _repeat(call: Call, rows: Rows) -> Needs | None:
    dimension = rows.dimension - len(call.sizes) + len(call.operand("self"))
    return {"self": rows.along(dimension)} if call["repeats"][rows.dimension] == 1 and dimension >= 0 else None


def _t(call: Call, rows: Rows) -> Needs:
    return {"self": rows.along(len(call.sizes) - 1 - rows.dimension)}


def _rules(exactness: Exactness, needs: RowsNeeded, *names: str, target: torch._ops.OpOverload | None = None) -> dict[str, Rule]:
    return {f"aten.{name}": Rule(needs, exactness, target) for name in names}


_COPY, _POINTWISE, _LIBRARY = Exactness.COPY, Exactness.POINTWISE, Exactness.LIBRARY

_RULES: dict[str, Rule] = {
    **_rules(
        _POINTWISE, _broadcast,
        "_to_copy.default", "copy.default", "fill.Scalar", "fill.Tensor", "masked_fill.Tensor", "floor_divide.default", "rsub.Tensor",
        "hardswish.default", "hardswish_backward.default", "hardsigmoid_backward.default", "hardtanh_backward.default",
        "leaky_relu_backward.default", "elu_backward.default", "softplus_backward.default", "softshrink_backward.default",
        "hardshrink_backward.default", "mish_backward.default",
    ),  # torch does not tag them
    "prims.convert_element_type.default": Rule(_broadcast, _POINTWISE),
    **_rules(_COPY, _same("self"), "clone.default", "alias.default", "detach.default", "lift_fresh_copy.default"),
    **_rules(_COPY, _same("self"), "full_like.default", "zeros_like.default", "ones_like.default"),
    **_rules(_COPY, _new, "new_zeros.default", "new_ones.default", "new_full.default"),
    **_rules(_LIBRARY, _matmul("self", "mat2"), "mm.default", "mm.dtype", "bmm.default", "bmm.dtype"),
    **_rules(_LIBRARY, _matmul("mat1", "mat2"), "addmm.default", "addmm.dtype"),
    **_rules(_LIBRARY, _matmul("batch1", "batch2"), "baddbmm.default", "baddbmm.dtype"),
    **_rules(_LIBRARY, _convolution, "convolution.default"),
    **_rules(_LIBRARY, _layer_norm, "native_layer_norm.default", "_fused_rms_norm.default"),
    **_rules(_LIBRARY, _group_norm, "native_group_norm.default"),
    **_rules(_LIBRARY, _batch_norm, "_native_batch_norm_legit_no_training.default"),
    **_rules(_LIBRARY, _attention(), "_scaled_dot_product_flash_attention.default"),
    **_rules(_LIBRARY, _attention("attn_mask"), "_scaled_dot_product_flash_attention_for_cpu.default"),
    **_rules(
        _LIBRARY, _attention("attn_bias"),
        "_scaled_dot_product_efficient_attention.default", "_scaled_dot_product_cudnn_attention.default",
        "_scaled_dot_product_fused_attention_overrideable.default",
    ),
    **_rules(_LIBRARY, _same_but_along("dim", "self"), "_softmax.default", "_log_softmax.default", "_safe_softmax.default"),
    **_rules(
        _LIBRARY, _same_but_along("dim", "grad_output", "output"), "_softmax_backward_data.default", "_log_softmax_backward_data.default"
    ),
    **_rules(_LIBRARY, _same_but_along("dim", "self"), "cumsum.default"),
    **_rules(
        _LIBRARY, _reduction,
        "sum.dim_IntList", "mean.dim", "prod.dim_int", "amax.default", "amin.default", "var.correction", "logsumexp.default",
        "linalg_vector_norm.default", "any.dim", "any.dims", "all.dim", "all.dims", "argmax.default", "argmin.default",
    ),
    **_rules(_POINTWISE, _nll_loss_backward, "nll_loss_backward.default"),
    **_rules(_COPY, _embedding, "embedding.default"),
    **_rules(_COPY, _index_select, "index_select.default"),
    **_rules(_COPY, _indexed("self", "index"), "gather.default", "scatter.value"),
    **_rules(_COPY, _indexed("self", "index", "src"), "scatter.src"),
    **_rules(
        _COPY, _reshape,
        "view.default", "_unsafe_view.default", "reshape.default", "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims",
        target=aten.reshape.default,
    ),
    **_rules(_COPY, _permute, "permute.default"),
    **_rules(_COPY, _transpose, "transpose.int"),
    **_rules(_COPY, _t, "t.default"),
    **_rules(_COPY, _expand, "expand.default"),
    **_rules(_COPY, _slice, "slice.Tensor"),
    **_rules(_COPY, _select, "select.int"),
    **_rules(_COPY, _cat, "cat.default"),
    **_rules(_COPY, _pad, "constant_pad_nd.default"),
    **_rules(_COPY, _repeat, "repeat.default"),
    **_rules(_COPY, _same_but_along("dims", "self"), "flip.default", "roll.default"),
}  # fmt: skip
