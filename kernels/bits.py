"""Booleans at one bit each.

Formula. Flag ``i`` in memory order is bit ``i % 8`` of byte ``i // 8``; the last byte is filled up with zeros. Eight flags are eight
bytes that are 0 or 1, that is one 64-bit word ``w``, and the byte that packs them is

    (w * 0x0102040810204080 mod 2^64) >> 56

in which the product moves bit 8 i to bit 56 + i, and no two bits to one place. Back again

    r = b * 0x0101010101010101 & 0x8040201008040201          in byte i only bit i of b is left
    w = (r + 0x7F7F7F7F7F7F7F7F) >> 7 & 0x0101010101010101    it carries into the highest bit of its byte

(multiplication as a gather of bits: Warren, Hacker's Delight, 2nd ed., chapter 7). Few operations for eight elements, where shifts and sums
of single bytes would take longer than the memory does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dyngran.kernels.launch import configuration, kernel, launch, tl
from dyngran.kernels.layouts import check_stored, chunks, memory_order, new_in_layout

GATHER = 0x0102040810204080
REPEAT = 0x0101010101010101
SELECT = 0x8040201008040201 - (1 << 64)  # as a signed number
CARRY = 0x7F7F7F7F7F7F7F7F
CHUNK_WORDS = 1 << 15


def packed_bytes(num_elements: int) -> int:
    """Bytes that hold ``num_elements`` bits. Needs no torch, and takes symbolic sizes."""
    return (num_elements + 7) // 8


def pack_bits(x: Tensor, stride: Sequence[int]) -> Tensor:
    """``x``, bool, any shape: uint8 of shape ``(packed_bytes(x.numel()),)``, in the order of the layout ``stride``.

    Raises TypeError if ``x`` is not bool, ValueError if the layout is not dense.
    """
    if x.dtype != torch.bool:
        raise TypeError(f"pack_bits takes bool, got {x.dtype}")
    flags = memory_order(x, stride)
    stored = flags.new_empty(packed_bytes(flags.numel()), dtype=torch.uint8)
    (launch_pack if flags.is_cuda else pack_reference)(flags, stored)
    return stored


def unpack_bits(stored: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """What `pack_bits` was given: bool of that size in that layout. Raises ValueError if ``stored`` is not as long as the size asks for."""
    result, flags = new_in_layout(stored, size, stride, torch.bool)
    check_packed(stored, flags.numel())
    (launch_unpack if flags.is_cuda else unpack_reference)(stored, flags)
    return result


def check_packed(stored: Tensor, num_elements: int) -> None:
    """Raises ValueError unless ``stored`` holds ``num_elements`` bits."""
    check_stored(stored, packed_bytes(num_elements), f"{num_elements} bits")


def pack_reference(flags: Tensor, stored: Tensor) -> None:
    """``flags`` bool ``(n,)`` into ``stored`` uint8 ``(packed_bytes(n),)``. Temporaries: 256 KiB."""
    words, tail = split_into_words(flags)
    for part in chunks(len(words), of=CHUNK_WORDS):
        stored[part].copy_((words[part] * GATHER).bitwise_right_shift_(56))  # as a signed number: the copy takes it modulo 256
    if len(tail):
        stored[-1] = (tail.to(torch.uint8) << torch.arange(len(tail), dtype=torch.uint8, device=tail.device)).sum(dtype=torch.uint8)


def unpack_reference(stored: Tensor, flags: Tensor) -> None:
    """The inverse of `pack_reference`. Temporaries: 768 KiB."""
    num_words = len(flags) // 8
    words = flags[: 8 * num_words].view(torch.int64)
    for part in chunks(num_words, of=CHUNK_WORDS):
        repeated = (stored[part].to(torch.int64) * REPEAT).bitwise_and_(SELECT)
        words[part] = repeated.add_(CARRY).bitwise_right_shift_(7).bitwise_and_(REPEAT)
    tail = flags[8 * num_words :]
    if len(tail):
        tail.copy_((stored[-1] >> torch.arange(len(tail), dtype=torch.uint8, device=tail.device)) & 1)


def split_into_words(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Flags as int64 words of eight, and those that are left. Flags that do not begin where a word may are copied."""
    if flags.storage_offset() % 8 or flags.data_ptr() % 8:
        flags = flags.clone()
    num_words = len(flags) // 8
    return flags[: 8 * num_words].view(torch.int64), flags[8 * num_words :]


@kernel
def pack_kernel(
    words_ptr: tl.tensor, tail_ptr: tl.tensor, stored_ptr: tl.tensor, num_words: tl.tensor, num_tail: tl.tensor, BLOCK: tl.constexpr
) -> None:
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    inside = place < tl.minimum(num_words - first, BLOCK).to(tl.int32)
    words = tl.load(words_ptr + first + place, mask=inside, other=0)
    tl.store(stored_ptr + first + place, ((words * 0x0102040810204080) >> 56).to(tl.uint8), mask=inside)
    if (tl.program_id(0) == tl.num_programs(0) - 1) & (num_tail > 0):
        bit = tl.arange(0, 8)
        flags = tl.load(tail_ptr + bit, mask=bit < num_tail, other=0).to(tl.int32)
        tl.store(stored_ptr + num_words, tl.sum(flags << bit, axis=0).to(tl.uint8))


@kernel
def unpack_kernel(
    stored_ptr: tl.tensor, words_ptr: tl.tensor, tail_ptr: tl.tensor, num_words: tl.tensor, num_tail: tl.tensor, BLOCK: tl.constexpr
) -> None:
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    inside = place < tl.minimum(num_words - first, BLOCK).to(tl.int32)
    packed = tl.load(stored_ptr + first + place, mask=inside, other=0).to(tl.int64)
    selected = (packed * 0x0101010101010101) & -0x7FBFDFEFF7FBFDFF
    words = ((selected + 0x7F7F7F7F7F7F7F7F) >> 7) & 0x0101010101010101
    tl.store(words_ptr + first + place, words, mask=inside)
    if (tl.program_id(0) == tl.num_programs(0) - 1) & (num_tail > 0):
        bit = tl.arange(0, 8)
        last = tl.load(stored_ptr + num_words).to(tl.int32)
        tl.store(tail_ptr + bit, ((last >> bit) & 1).to(tl.uint8), mask=bit < num_tail)


def launch_pack(flags: Tensor, stored: Tensor) -> None:
    """As `pack_reference`, on a card. Temporaries: none, or a copy of the flags if their memory is not aligned to eight bytes."""
    if len(flags):
        words, tail = split_into_words(flags)
        chosen = configuration("pack_bits", flags.device)
        arguments = (words, tail.view(torch.uint8), stored, len(words), len(tail))
        num_programs = max(1, -(-len(words) // chosen.block))
        launch(pack_kernel, num_programs, arguments, on=flags, num_warps=chosen.num_warps, BLOCK=chosen.block)


def launch_unpack(stored: Tensor, flags: Tensor) -> None:
    """As `unpack_reference`, on a card. Temporaries: none."""
    if len(flags):
        num_words = len(flags) // 8
        words, tail = flags[: 8 * num_words].view(torch.int64), flags[8 * num_words :].view(torch.uint8)
        chosen = configuration("unpack_bits", flags.device)
        num_programs = max(1, -(-num_words // chosen.block))
        arguments = (stored, words, tail, num_words, len(tail))
        launch(unpack_kernel, num_programs, arguments, on=flags, num_warps=chosen.num_warps, BLOCK=chosen.block)
