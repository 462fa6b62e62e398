"""`quantize` and `dequantize` for 8-bit formats in plain tensor operations, for code generators that fuse them with what makes the values
and with what reads them.

The formula is that of `dyngran.kernels.groups` but for the order of roundings, with codes and scales in tensors of their own: ``(groups,
group)`` in the format's type, and ``(groups, 1)`` in bfloat16, negated for groups that hold an infinity or a NaN. A code generator makes
one loop over groups of it, in which what makes the values can be a part; Inductor's code for it moves memory as fast as the kernels do
(`bench/storage_kernels.py`), and what it fuses with need not move the values at all. Choices are arithmetic here: a number to choose
would be a tensor to make, in a graph that has all its tensors.

In a group with a negated scale the largest code stands for an infinity, in e5m2 too: a card's conversion saturates, and makes a large
number of its infinity. Finite values do without that code there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dyngran.kernels.groups import LEAST_SCALE, find_format

CODE_TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
FLAGGED_TOP = {"fp8_e4m3": 416.0, "fp8_e5m2": 49152.0, "int8": 126.0}  # the largest code of a finite value in a group with a negated scale
ROUNDED_UP = 1 + 2.0**-7  # times this, rounded to a bfloat16: not less than before
INFINITY_BITS = 0x7F800000  # of a float32
INT8_NAN = -128.0  # no finite value has this code


def encode(values: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Codes ``(groups, group)`` and scales ``(groups, 1)`` of ``values`` ``(groups, group)``, float32, bfloat16 or float16, to nearest."""
    chosen = find_format(format, values.shape[1])
    bits = values.to(torch.float32).view(torch.int32)
    magnitude = bits & 0x7FFFFFFF  # as integers magnitudes are in order, infinity and NaN above all others
    is_finite = (magnitude < INFINITY_BITS).to(torch.int32)
    finite = (bits * is_finite).view(torch.float32)
    flag = 1 - is_finite.amin(1, keepdim=True).to(torch.float32)
    share = ROUNDED_UP / chosen.top
    scale = finite.abs().amax(1, keepdim=True) * (share + flag * (ROUNDED_UP / FLAGGED_TOP[format] - share))
    scale = scale.to(torch.bfloat16).to(torch.float32).clamp(min=LEAST_SCALE)
    infinity = (magnitude == INFINITY_BITS).to(torch.float32) * (1 - 2 * (bits < 0).to(torch.float32))
    code = (finite * scale.reciprocal()).clamp(-chosen.top, chosen.top) + infinity * chosen.top
    is_nan = (magnitude > INFINITY_BITS).to(torch.float32)
    code = code.round() + is_nan * INT8_NAN if chosen.is_integer else code / (1 - is_nan)  # nothing divided by nothing is no number
    return code.to(CODE_TYPES[format]), (scale * (1 - 2 * flag)).to(torch.bfloat16)


def decode(codes: Tensor, scales: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """What `encode` was given, ``(groups, group)`` of ``dtype``. Finite values stay finite."""
    chosen = find_format(format, codes.shape[1])
    code, scale = codes.to(torch.float32), scales.to(torch.float32)
    limit = torch.finfo(dtype).max
    value = (code * scale.abs()).clamp(-limit, limit)
    special = ((code.abs() == chosen.top) & (scale < 0)).to(torch.float32)  # divided by nothing, it is infinite
    if chosen.is_integer:
        is_nan = (code == INT8_NAN).to(torch.float32)  # and nothing divided by nothing is no number
        value, special = value * (1 - is_nan), special + is_nan
    return (value / (1 - special)).to(dtype)
