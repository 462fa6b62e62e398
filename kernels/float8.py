"""Float8 by integer arithmetic, for cards and interpreters without the instructions, and which cards have them.

Micikevicius et al., FP8 Formats for Deep Learning (2022), table 1: e4m3 has 3 bits of mantissa and bias 7, e5m2 has 2 and 15.
"""

from __future__ import annotations

import functools

import torch

from dyngran.kernels.launch import kernel, tl

FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@functools.cache
def has_float8(device: torch.device) -> bool:
    """Whether a card converts to float8 by itself: from compute capability 8.9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@kernel
def encode_float8(scaled: tl.tensor, MANTISSA: tl.constexpr, BIAS: tl.constexpr) -> tl.tensor:
    """Codes, uint8, of float32 numbers whose magnitude is in the format's range.

    Below the smallest normal number the sum with ``2^(24 - MANTISSA - BIAS)`` has the code in its lowest bits; above, half a unit less one,
    and the last bit kept, carry into it.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    MAGIC: tl.constexpr = (128 - BIAS + SHIFT) << 23
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = (tl.abs(scaled) + tl.full([1], MAGIC, tl.int32).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - MAGIC
    carried = magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)
    code = tl.where(magnitude < ((128 - BIAS) << 23), small, (carried >> SHIFT) - ((127 - BIAS) << MANTISSA))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@kernel
def decode_float8(code: tl.tensor, MANTISSA: tl.constexpr, BIAS: tl.constexpr) -> tl.tensor:
    """What finite codes mean, float32: exponent and mantissa at their places in a float32, whose bias is larger."""
    wide = code.to(tl.int32)
    bits = ((wide & 0x7F) << (23 - MANTISSA)) | ((wide & 0x80) << 24)
    rebias = tl.full([1], (254 - BIAS) << 23, tl.int32).to(tl.float32, bitcast=True)
    return bits.to(tl.float32, bitcast=True) * rebias
