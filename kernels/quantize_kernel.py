"""What `dyngran.kernels.quantize` runs on a card: there are formula, reference and launcher.

A program takes whole groups. A thread takes a cell of 16 neighbours, and all bytes that their codes fill, so that nothing but the largest
magnitude of a group and its scale goes from one thread to another.

With ``y`` an element divided by its scale, ``y + 1.5 * 2^23`` has in its lowest bits ``y`` rounded to an integer, and ``y + 1.5 * 2^15``
has ``256 y``, ties to even, in two's complement (Warren, Hacker's Delight, 2nd ed., chapter 17).

A tile whose groups are all there and all finite, which the largest magnitude says, is done without a mask or a choice; any other one is
done again, with both.
"""

from __future__ import annotations

from dyngran.kernels.float8 import encode_float8
from dyngran.kernels.launch import kernel, tl
from dyngran.kernels.randomness import random_bytes, random_words


@kernel
def load_pairs(
    values_ptr: tl.tensor, first: tl.tensor, left: tl.tensor, place: tl.tensor, MASKED: tl.constexpr, ALIGNED: tl.constexpr
) -> tl.tuple:
    """Elements ``2 * place`` and ``2 * place + 1`` from ``first`` on, as float32. A pair is one word, so that both are in the thread that
    makes one byte of them."""
    TYPE: tl.constexpr = values_ptr.dtype.element_ty
    if MASKED or not ALIGNED:
        even = tl.load(values_ptr + first + 2 * place, mask=2 * place < left, other=0.0).to(tl.float32)
        odd = tl.load(values_ptr + first + 2 * place + 1, mask=2 * place + 1 < left, other=0.0).to(tl.float32)
    elif tl.float32 == TYPE:
        wide = tl.load(values_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + first // 2 + place)
        even, odd = wide.to(tl.int32).to(tl.float32, bitcast=True), (wide >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        word = tl.load(values_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + first // 2 + place)
        if tl.bfloat16 == TYPE:
            even, odd = (word << 16).to(tl.float32, bitcast=True), (word & -0x10000).to(tl.float32, bitcast=True)
        else:
            even = word.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
            odd = (word >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return even, odd


@kernel
def finite_magnitude(values: tl.tensor) -> tl.tensor:
    """As an integer; 0 for infinities and NaN."""
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(magnitude < 0x7F800000, magnitude, 0)


@kernel
def reciprocal_of(scale: tl.tensor) -> tl.tensor:
    """``1 / scale`` rounded to nearest, without the branches of `tl.div_rn`. One step of Newton leaves a relative error of 2^-44 in what is
    rounded, and the inverse of a bfloat16, 2^k / m with m < 256, is 2^-33 or more from where rounding changes."""
    about = 1.0 / scale
    return tl.fma(about, tl.fma(-scale, about, 1.0), about)


@kernel
def encode(
    values: tl.tensor,
    inverse: tl.tensor,
    words: tl.tuple,
    place: tl.tensor,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    INFINITY: tl.constexpr,
    NEGATIVE_INFINITY: tl.constexpr,
    NAN: tl.constexpr,
    NATIVE_FLOAT8: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SPECIAL: tl.constexpr,
) -> tl.tensor:
    """Codes, of which the lowest bits count, of values at ``place`` in their cells."""
    if STOCHASTIC:
        fixed = tl.fma(values, inverse, 49152.0).to(tl.int32, bitcast=True)
        code = (fixed + random_bytes(words, place)) >> 8
    elif MANTISSA == 0:
        code = (values * inverse + 12582912.0).to(tl.int32, bitcast=True)
    elif NATIVE_FLOAT8:
        code = (values * inverse).to(tl.float8e4nv if MANTISSA == 3 else tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        code = encode_float8(values * inverse, MANTISSA, BIAS)
    if SPECIAL:
        magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        infinity = tl.where(values < 0, NEGATIVE_INFINITY, INFINITY)
        special = tl.where(magnitude == 0x7F800000, infinity, NAN)
        code = tl.where(magnitude >= 0x7F800000, special, code)
    return code


@kernel
def quantize_tile(
    values_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    step_ptr: tl.tensor,
    first: tl.tensor,
    left: tl.tensor,
    num_groups: tl.tensor,
    reciprocal: tl.tensor,
    flagged_reciprocal: tl.tensor,
    value_id: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    INFINITY: tl.constexpr,
    NEGATIVE_INFINITY: tl.constexpr,
    NAN: tl.constexpr,
    NATIVE_FLOAT8: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    ANY: tl.constexpr,
) -> tl.tensor:
    """Quantize groups ``first .. first + GROUPS``, and return the largest magnitude, as an integer, in which infinity and NaN are above all
    others. Unless ANY, all of the groups are there, and all of their values finite."""
    CELLS: tl.constexpr = GROUP // 16
    WORDS: tl.constexpr = 2 * BITS  # of a cell: elements, or pairs of them
    row, column = tl.arange(0, GROUPS * CELLS)[:, None], tl.arange(0, WORDS)[None, :]
    place = row * WORDS + column
    start = first * GROUP
    if BITS == 4:
        even, odd = load_pairs(values_ptr, start, left, place, ANY, ALIGNED)
        magnitude = tl.maximum(tl.abs(even), tl.abs(odd), propagate_nan=tl.PropagateNan.ALL).to(tl.int32, bitcast=True)
    else:
        even = tl.load(values_ptr + start + place, mask=place < left, other=0.0) if ANY else tl.load(values_ptr + start + place)
        even = even.to(tl.float32)
        odd, magnitude = even, even.to(tl.int32, bitcast=True) & 0x7FFFFFFF

    largest = tl.max(tl.reshape(tl.max(magnitude, axis=1), [GROUPS, CELLS]), axis=1)
    finite, factor = largest, reciprocal
    if ANY:
        is_flagged = largest >= 0x7F800000
        finite = tl.max(tl.reshape(tl.max(tl.maximum(finite_magnitude(even), finite_magnitude(odd)), axis=1), [GROUPS, CELLS]), axis=1)
        factor = tl.where(is_flagged, flagged_reciprocal, reciprocal)
    scale = finite.to(tl.float32, bitcast=True) * factor
    bits = tl.maximum((scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000, 0x00800000)  # 2^-126
    inverse = reciprocal_of(bits.to(tl.float32, bitcast=True))
    inverse = tl.reshape(tl.broadcast_to(inverse[:, None], [GROUPS, CELLS]), [GROUPS * CELLS])[:, None]

    words = random_words(step_ptr, value_id, first * CELLS, GROUPS * CELLS) if STOCHASTIC else (bits, bits, bits, bits)
    if BITS == 4:
        low = encode(even, inverse, words, 2 * column, MANTISSA, BIAS, INFINITY, NEGATIVE_INFINITY, NAN, NATIVE_FLOAT8, STOCHASTIC, ANY)
        high = encode(odd, inverse, words, 2 * column + 1, MANTISSA, BIAS, INFINITY, NEGATIVE_INFINITY, NAN, NATIVE_FLOAT8, STOCHASTIC, ANY)
        code = (low & 15) | (high << 4)
    else:
        code = encode(even, inverse, words, column, MANTISSA, BIAS, INFINITY, NEGATIVE_INFINITY, NAN, NATIVE_FLOAT8, STOCHASTIC, ANY)
    codes = codes_ptr + start * BITS // 8 + place
    group = tl.arange(0, GROUPS)
    if ANY:
        num_left = tl.minimum(num_groups - first, GROUPS).to(tl.int32)
        tl.store(codes, code.to(tl.uint8), mask=row < num_left * CELLS)
        signed = (bits >> 16) | tl.where(is_flagged, 0x8000, 0)
        tl.store(scales_ptr + first + group, signed.to(tl.int16), mask=group < num_left)
    else:
        tl.store(codes, code.to(tl.uint8))
        tl.store(scales_ptr + first + group, (bits >> 16).to(tl.int16))
    return tl.max(largest, axis=0)


@kernel
def quantize_kernel(
    values_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    step_ptr: tl.tensor,
    num_elements: tl.tensor,
    num_groups: tl.tensor,
    reciprocal: tl.tensor,
    flagged_reciprocal: tl.tensor,
    value_id: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    INFINITY: tl.constexpr,
    NEGATIVE_INFINITY: tl.constexpr,
    NAN: tl.constexpr,
    NATIVE_FLOAT8: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """As if all groups were there and finite; then, where that was wrong, again: a few groups at a time, so that it takes few registers."""
    PARTS: tl.constexpr = min(GROUPS, 4)
    first = tl.program_id(0).to(tl.int64) * GROUPS
    left = tl.minimum(num_elements - first * GROUP, GROUPS * GROUP).to(tl.int32)
    pointers = (values_ptr, codes_ptr, scales_ptr, step_ptr)
    numbers = (num_groups, reciprocal, flagged_reciprocal, value_id)
    largest = 0x7F800000
    if left == GROUPS * GROUP:
        largest = quantize_tile(
            *pointers,
            *(first, left),
            *numbers,
            *(GROUPS, GROUP, BITS, MANTISSA, BIAS, INFINITY, NEGATIVE_INFINITY, NAN, NATIVE_FLOAT8, STOCHASTIC, ALIGNED, False),
        )
    if largest >= 0x7F800000:
        tl.debug_barrier()  # what is written twice is to be written last by this
        for part in range(PARTS):
            skipped = part * (GROUPS // PARTS)
            quantize_tile(
                *pointers,
                *(first + skipped, left - skipped * GROUP),
                *numbers,
                *(GROUPS // PARTS, GROUP, BITS, MANTISSA, BIAS, INFINITY, NEGATIVE_INFINITY, NAN, NATIVE_FLOAT8, STOCHASTIC, ALIGNED, True),
            )
