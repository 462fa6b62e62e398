"""On which side of a threshold an element lies, at one bit each: all that the backward of `relu` and of `threshold` asks of its input.

Formula. Bit ``i`` of the packed bytes (`dyngran.kernels.bits`) is 0 if ``x[i] <= t`` and 1 if not, so NaN is 1: `aten.threshold_backward`
blocks a gradient where ``x <= t`` and lets it pass elsewhere, NaN included. What is unpacked is a tensor of two values,

    t                 where the bit is 0
    t + max(1, |t|)   where it is 1: never a denormal number, which a kernel may take for zero

so that for every element ``unpacked <= t`` is ``x <= t``. For the threshold 0 they are 0 and 1.

``t`` is the threshold in the type of ``x``. In a type of 16 bits it must be representable: implementations differ in whether they round
it before they compare, and bits that are right for one would be wrong for another.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dyngran.kernels.bits import CHUNK_WORDS, check_packed, launch_pack, launch_unpack, pack_reference, packed_bytes, unpack_reference
from dyngran.kernels.launch import configuration, kernel, launch, tl
from dyngran.kernels.layouts import chunks, memory_order, new_in_layout

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNK_ELEMENTS = 8 * CHUNK_WORDS  # whole bytes


def pack_sign(x: Tensor, stride: Sequence[int], threshold: float) -> Tensor:
    """``x``, floating point, any shape: uint8 of shape ``(packed_bytes(x.numel()),)``, in the order of the layout ``stride``.

    Raises TypeError if ``x`` is not floating point; ValueError if the layout is not dense, the threshold not finite, or not representable
    in the type of ``x`` where that has 16 bits.
    """
    below, _ = two_sides(threshold, x.dtype)
    values = memory_order(x, stride)
    stored = values.new_empty(packed_bytes(values.numel()), dtype=torch.uint8)
    (launch_pack_sign if values.is_cuda else pack_sign_reference)(values, stored, below)
    return stored


def unpack_sign(stored: Tensor, size: Sequence[int], stride: Sequence[int], threshold: float, dtype: torch.dtype) -> Tensor:
    """A tensor of ``dtype`` that lies on the side of the threshold where each element of ``x`` did. Raises as `pack_sign`, and ValueError
    if ``stored`` is not as long as the size asks for."""
    sides = two_sides(threshold, dtype)
    result, values = new_in_layout(stored, size, stride, dtype)
    check_packed(stored, values.numel())
    (launch_unpack_sign if values.is_cuda else unpack_sign_reference)(stored, values, *sides)
    return result


@functools.lru_cache(maxsize=256)
def two_sides(threshold: float, dtype: torch.dtype) -> tuple[float, float]:
    """The threshold in ``dtype``, and a value above it. Raises as `pack_sign`."""
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise TypeError(f"the side of a threshold is that of a float16, bfloat16, float32 or float64, got {dtype}")
    if not math.isfinite(threshold):
        raise ValueError(f"threshold must be finite, got {threshold}")
    below = torch.tensor(threshold, dtype=torch.float64).to(dtype).item()
    if not math.isfinite(below) or (dtype.itemsize == 2 and below != threshold):
        raise ValueError(f"threshold {threshold} is not representable in {dtype}: it would be {below}")
    return below, torch.tensor(below + max(1.0, abs(below)), dtype=torch.float64).to(dtype).item()


def pack_sign_reference(values: Tensor, stored: Tensor, below: float) -> None:
    """``values`` ``(n,)`` into ``stored`` uint8 ``(packed_bytes(n),)``. Temporaries: 512 KiB."""
    for part in chunks(len(values), of=CHUNK_ELEMENTS):
        bytes_of_part = slice(part.start // 8, packed_bytes(part.stop))
        pack_reference((values[part] <= below).logical_not_(), stored[bytes_of_part])


def unpack_sign_reference(stored: Tensor, values: Tensor, below: float, above: float) -> None:
    """The surrogate of the values that `pack_sign_reference` was given. Temporaries: 2 MiB.

    It looks the sides up, which takes a fifth of the time of `masked_fill_`: that one branches, and signs cannot be predicted.
    """
    sides = torch.tensor([below, above], dtype=values.dtype, device=values.device)
    for part in chunks(len(values), of=CHUNK_ELEMENTS):
        flags = values.new_empty(part.stop - part.start, dtype=torch.bool)
        unpack_reference(stored[part.start // 8 : packed_bytes(part.stop)], flags)
        torch.index_select(sides, 0, flags.view(torch.uint8).to(torch.int32), out=values[part])


@kernel
def pack_sign_kernel(values_ptr: tl.tensor, stored_ptr: tl.tensor, num_elements: tl.tensor, below: tl.tensor, BYTES: tl.constexpr) -> None:
    first = tl.program_id(0).to(tl.int64) * BYTES
    byte, bit = tl.arange(0, BYTES), tl.arange(0, 8)
    place = byte[:, None] * 8 + bit[None, :]
    left = tl.minimum(num_elements - first * 8, BYTES * 8).to(tl.int32)
    values = tl.load(values_ptr + first * 8 + place, mask=place < left, other=float("-inf")).to(tl.float32)
    packed = tl.sum(tl.where(values <= below, 0, (1 << bit)[None, :]), axis=1)
    tl.store(stored_ptr + first + byte, packed.to(tl.uint8), mask=byte * 8 < left)


@kernel
def unpack_sign_kernel(
    stored_ptr: tl.tensor, values_ptr: tl.tensor, num_elements: tl.tensor, below: tl.tensor, above: tl.tensor, BYTES: tl.constexpr
) -> None:
    first = tl.program_id(0).to(tl.int64) * BYTES
    byte, bit = tl.arange(0, BYTES), tl.arange(0, 8)
    place = byte[:, None] * 8 + bit[None, :]
    left = tl.minimum(num_elements - first * 8, BYTES * 8).to(tl.int32)
    packed = tl.load(stored_ptr + first + byte, mask=byte * 8 < left, other=0).to(tl.int32)
    is_above = (packed[:, None] & (1 << bit)[None, :]) != 0
    values = tl.where(is_above, above, below).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + first * 8 + place, values, mask=place < left)


def launch_pack_sign(values: Tensor, stored: Tensor, below: float) -> None:
    """As `pack_sign_reference`, on a card. Temporaries: none; for float64, whose comparison is left to torch, two bytes an element."""
    if values.dtype not in KERNEL_DTYPES:
        launch_pack((values <= below).logical_not_(), stored)
    elif len(values):
        chosen = configuration(f"pack_sign:{values.dtype}", values.device)
        num_programs = -(-len(stored) // chosen.block)
        arguments = (values, stored, len(values), below)
        launch(pack_sign_kernel, num_programs, arguments, on=values, num_warps=chosen.num_warps, BYTES=chosen.block)


def launch_unpack_sign(stored: Tensor, values: Tensor, below: float, above: float) -> None:
    """As `unpack_sign_reference`, on a card. Temporaries: none; for float64 one byte an element."""
    if values.dtype not in KERNEL_DTYPES:
        flags = values.new_empty(len(values), dtype=torch.bool)
        launch_unpack(stored, flags)
        values.fill_(below).masked_fill_(flags, above)
    elif len(values):
        chosen = configuration(f"unpack_sign:{values.dtype}", values.device)
        num_programs = -(-len(stored) // chosen.block)
        arguments = (stored, values, len(values), below, above)
        launch(unpack_sign_kernel, num_programs, arguments, on=values, num_warps=chosen.num_warps, BYTES=chosen.block)
