"""Random bytes for stochastic rounding, drawn from a step, a value and a place in it, and from nothing else.

The kernels draw by Philox4x32 with seven rounds, the fewest with which it passes BigCrush (Salmon et al., Parallel Random Numbers: As Easy
as 1, 2, 3, SC 2011, table 2): the key is the step, the counter the number of the cell in the tensor and ``value_id``. A cell is 16 elements
in memory order, and element ``i`` of it takes byte ``i`` of the call's four words. A draw depends on neither the configuration of the
launch nor the card nor what ran before. The references draw other numbers, from torch's generator, which depend on the same.
"""

from __future__ import annotations

from dyngran.kernels.launch import kernel, tl

CELL = 16  # elements that one call of Philox serves
STREAM_BITS = 63  # of a seed of torch's generator


def mixed(step: int, value_id: int) -> int:
    """A seed of torch's generator for a step and a value: splitmix64's finalizer, so that near pairs get far seeds (Steele et al.,
    2014)."""
    state = (step * 0x9E3779B97F4A7C15 + value_id * 0xD1342543DE82EF95) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (state ^ (state >> 31)) >> (64 - STREAM_BITS)


@kernel
def random_words(step_ptr: tl.tensor, value_id: tl.tensor, first: tl.tensor, CELLS: tl.constexpr) -> tl.tuple:
    """Four random words for each of the cells ``first .. first + CELLS``, which do not cross a multiple of 2^32: ``first`` is a multiple of
    CELLS, a power of two. Each of shape ``[CELLS, 1]``."""
    low = (first & 0xFFFFFFFF).to(tl.uint32) + tl.arange(0, CELLS).to(tl.uint32)
    high = (first >> 32).to(tl.uint32)
    value = value_id.to(tl.int64)
    value_low, value_high = (value & 0xFFFFFFFF).to(tl.uint32), ((value >> 32) & 0xFFFFFFFF).to(tl.uint32)
    step = tl.load(step_ptr)
    key_low, key_high = (step & 0xFFFFFFFF).to(tl.uint32), ((step >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = philox_round(low, high, value_low, value_high, key_low, key_high)
    for _ in tl.static_range(6):
        key_low, key_high = key_low + 0x9E3779B9, key_high + 0xBB67AE85
        a, b, c, d = philox_round(a, b, c, d, key_low, key_high)
    return a[:, None], b[:, None], c[:, None], d[:, None]


@kernel
def philox_round(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, key_low: tl.tensor, key_high: tl.tensor) -> tl.tuple:
    """As in `tl.philox`, which takes two multiplications for the halves of a product; one of 64 bits is a single instruction."""
    left, right = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
    return (right >> 32).to(tl.uint32) ^ b ^ key_low, right.to(tl.uint32), (left >> 32).to(tl.uint32) ^ d ^ key_high, left.to(tl.uint32)


@kernel
def random_bytes(words: tl.tuple, place: tl.tensor) -> tl.tensor:
    """Byte ``place`` of the words of each cell, as int32. Where a thread has whole cells, all of this but shift and mask is known to the
    compiler."""
    a, b, c, d = words
    word = tl.where(place < 8, tl.where(place < 4, a, b), tl.where(place < 12, c, d))
    return ((word >> ((place & 3) * 8).to(tl.uint32)) & 255).to(tl.int32)
