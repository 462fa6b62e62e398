"""Another type for the same values, in memory order.

Formula. From float to float: rounded to nearest, ties to even; a finite value beyond the largest finite one becomes that, with its sign, so
it stays finite (ATen makes it infinite); infinities and NaN stay what they are. From integer to integer: modulo 2^bits, so values that
fit are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dyngran.kernels.launch import configuration, kernel, launch, tl
from dyngran.kernels.layouts import chunks, memory_order, new_in_layout

CAST_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CAST_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def cast(x: Tensor, stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``x`` as a new tensor of ``dtype`` in the layout ``stride``.

    Raises TypeError unless both types are floating (float16, bfloat16, float32, float64) or both integer (int64 to int8, uint8),
    ValueError if the layout is not dense.
    """
    check_types(x.dtype, dtype)
    values = memory_order(x, stride)
    result, target = new_in_layout(x, x.shape, stride, dtype)
    has_kernel = values.is_cuda and torch.float64 not in (x.dtype, dtype)
    (launch_cast if has_kernel else cast_reference)(values, target)
    return result


def check_types(source: torch.dtype, target: torch.dtype) -> None:
    """Raises TypeError unless there is a cast between the two."""
    for family in ((*CAST_FLOATS, torch.float64), CAST_INTEGERS):
        if source in family and target in family:
            return
    raise TypeError(f"no cast from {source} to {target}: only among float types of 16 to 64 bits, and among int64 to int8 and uint8")


def largest_finite(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def loses_range(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a finite value of the source can be beyond what the target holds."""
    return source.is_floating_point and largest_finite(source) > largest_finite(target)


def cast_reference(values: Tensor, target: Tensor) -> None:
    """``values`` ``(n,)`` into ``target`` ``(n,)``. Temporaries: 5 MiB if the target has less range, else none."""
    if not loses_range(values.dtype, target.dtype):
        target.copy_(values)
        return
    limit = largest_finite(target.dtype)
    for part in chunks(len(values)):
        block = values[part]
        target[part] = torch.where(block.isinf(), block, block.clamp(-limit, limit))


@kernel
def cast_kernel(
    values_ptr: tl.tensor, target_ptr: tl.tensor, num_elements: tl.tensor, limit: tl.tensor, SATURATE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    left = tl.minimum(num_elements - first, BLOCK).to(tl.int32)
    if left == BLOCK:
        values = tl.load(values_ptr + first + place)
        tl.store(target_ptr + first + place, converted(values, limit, SATURATE, target_ptr.dtype.element_ty))
    else:
        values = tl.load(values_ptr + first + place, mask=place < left, other=0)
        tl.store(target_ptr + first + place, converted(values, limit, SATURATE, target_ptr.dtype.element_ty), mask=place < left)


@kernel
def converted(values: tl.tensor, limit: tl.tensor, SATURATE: tl.constexpr, TYPE: tl.constexpr) -> tl.tensor:
    if SATURATE:
        values = values.to(tl.float32)
        is_finite = tl.abs(values) < float("inf")
        values = tl.where(is_finite, tl.clamp(values, -limit, limit), values)
    return values.to(TYPE)


def launch_cast(values: Tensor, target: Tensor) -> None:
    """As `cast_reference`, on a card; not for float64. Temporaries: none."""
    if len(values):
        saturate = loses_range(values.dtype, target.dtype)
        limit = largest_finite(target.dtype) if saturate else 0.0
        chosen = configuration(f"cast:{values.dtype}:{target.dtype}", values.device)
        block = max(1, chosen.block // max(values.element_size(), target.element_size()))
        num_programs = -(-len(values) // block)
        constants = {"SATURATE": saturate, "BLOCK": block}
        launch(cast_kernel, num_programs, (values, target, len(values), limit), on=values, num_warps=chosen.num_warps, **constants)
