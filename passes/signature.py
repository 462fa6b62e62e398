"""What makes two calls of an operator cost the same: target, shapes, strides, dtypes, devices and plain arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy
import torch

from dyngran.passes.errors import UnknownSize

DATA_SIZE_GUESS = 1024  # elements along a dimension of which nothing at all is known
MAX_DATA_SIZE = 2**48  # a larger bound is torch's "anything"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The metadata of one tensor with concrete sizes (elements); strides of a tensor that is not strided are those of a dense one.

    ``is_conj`` and ``is_neg``: what lies in memory is to be conjugated, or negated, by whoever reads it. Most kernels copy it for that.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    is_strided: bool = True
    is_conj: bool = False
    is_neg: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Read a tensor, fake or real; symbolic sizes become their hints, data-dependent ones their bounds."""
        shape = tuple(hint(size) for size in tensor.shape)
        is_strided = tensor.layout is torch.strided and not tensor.is_quantized
        stride = tuple(hint(step) for step in tensor.stride()) if is_strided else dense_stride(shape)
        return cls(shape, stride, tensor.dtype, str(tensor.device), is_strided, tensor.is_conj(), tensor.is_neg())

    @property
    def num_elements(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def num_stored(self) -> int:
        """Elements from the first to the last one in memory: fewer than ``num_elements`` if a dimension is expanded."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def span_bytes(self) -> int:
        """Bytes from the first to the last element: what an allocation of these strides needs."""
        return self.num_stored * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes that a kernel touches: expanded elements are one, gaps between rows are not read."""
        return min(self.num_elements, self.num_stored) * self.dtype.itemsize

    def __str__(self) -> str:
        marks = "!" * (not self.is_strided) + "*" * self.is_conj + "-" * self.is_neg
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{list(self.stride)}@{self.device}{marks}"


@dataclass(frozen=True, slots=True)
class OpSignature:
    """One operator call with concrete arguments: tensors as `TensorSpec`, everything else as it is."""

    target: str
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]

    @classmethod
    def of(cls, target: object, args: tuple[object, ...], kwargs: dict[str, object]) -> OpSignature:
        concrete_args = tuple(concrete(argument) for argument in args)
        return cls(target_name(target), concrete_args, tuple((name, concrete(kwargs[name])) for name in sorted(kwargs)))

    @property
    def text(self) -> str:
        named = ", ".join(f"{name}={_show(value)}" for name, value in self.kwargs)
        return f"{self.target}({', '.join(map(_show, self.args))}; {named})"

    @property
    def key(self) -> str:
        """Stable between processes: a hash of `text`."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:32]

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(tensors_of((self.args, tuple(value for _, value in self.kwargs))))


_planned: ContextVar[Mapping[Any, int]] = ContextVar("planned sizes", default=MappingProxyType({}))


@contextmanager
def planned_sizes(sizes: Mapping[Any, int]) -> Iterator[None]:
    """Plan for other values of the graph's size symbols than those it was traced with."""
    token = _planned.set(sizes)
    try:
        yield
    finally:
        _planned.reset(token)


def hint(size: int | torch.SymInt) -> int:
    """The value that a symbolic size was traced with, or is planned for (`planned_sizes`); `bound` where it depends on data.

    0 for what names the ragged dimension of a nested tensor: no operator of the graph has it as a size. Never adds a guard.
    """
    if isinstance(size, int):
        return size
    if size.node.is_nested_int():
        return 0
    if planned := _planned.get():
        known = {**size.node.shape_env.backed_var_to_val, **{symbol: sympy.Integer(value) for symbol, value in planned.items()}}
        value = size.node.expr.xreplace(known)
        if value.is_number:
            return int(value)
    value = size.node.hint
    return value if isinstance(value, int) else bound(size)


def bound(size: torch.SymInt) -> int:
    """An upper bound of a size that depends on data, if tracing found one for each of its symbols (`nonzero`: the input's elements).

    A symbol without one is guessed (`guessed_size`). Raises `UnknownSize` if that gives no number.
    """
    shapes = size.node.shape_env
    traced = dict(shapes.backed_var_to_val)
    for symbol in size.node.expr.free_symbols - traced.keys():
        upper = symbol_bound(shapes, symbol)
        traced[symbol] = sympy.Integer(guessed_size(shapes) if upper is None else upper)
    value = size.node.expr.xreplace(traced)
    if not value.is_number:
        raise UnknownSize(f"size {size} depends on data: it has no value at compile time")
    return max(0, int(value))


def guessed_size(shapes: Any) -> int:
    """What a size without a bound is taken for: the largest symbolic size of the trace, `DATA_SIZE_GUESS` if there is none."""
    return max((int(value) for value in shapes.backed_var_to_val.values() if value.is_Integer), default=DATA_SIZE_GUESS)


def symbol_bound(shapes: Any, symbol: Any) -> int | None:
    """The largest value of a symbol that torch's shape environment knows of; None if it knows none that a size could reach."""
    upper = shapes.var_to_range[symbol].upper if symbol in shapes.var_to_range else None
    return int(upper) if upper is not None and upper.is_Integer and int(upper) < MAX_DATA_SIZE else None


def concrete(value: object) -> object:
    """The value with tensors as `TensorSpec` and symbolic numbers as their hints, through lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    if isinstance(value, torch.SymInt):
        return hint(value)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return value.node.hint
    if isinstance(value, (list, tuple)):
        return tuple(concrete(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, concrete(item)) for key, item in value.items())
    return value


def tensors_of(value: object) -> Iterator[TensorSpec]:
    """Every tensor in a nest of concrete or real arguments, in order."""
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, torch.Tensor):
        yield TensorSpec.of(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(tuple(value.values()))


def target_name(target: object) -> str:
    """``aten.mm.default`` for an overload, the qualified name for anything else; never an address in memory."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', type(target).__name__)}"


def _show(value: object) -> str:
    if isinstance(value, TensorSpec):
        return str(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_show, value)) + "]"
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return repr(value)
    return type(value).__name__


def dense_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor of this shape."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
