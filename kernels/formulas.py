"""`quantize` and `dequantize` for 8-bit formats in plain tensor operations, for code generators that fuse them with what makes the values
and with what reads them.

The formula is that of `dyngran.kernels.groups` but for the order of roundings, with codes and scales in tensors of their own: ``(groups,
group)`` in the format's type, and ``(groups, 1)`` in bfloat16, negated for groups that hold an infinity or a NaN. A code generator makes
one loop over groups of it, in which what makes the values can be a part; Inductor's code for it moves memory as fast as the kernels do
(`bench/storage_kernels.py`), and what it fuses with need not move the values at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dyngran.kernels.groups import LEAST_SCALE, Format, find_format

CODE_TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
ROUNDED_UP = 1 + 2.0**-7  # times this, rounded to a bfloat16: not less than before


def encode(values: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Codes ``(groups, group)`` and scales ``(groups, 1)`` of ``values`` ``(groups, group)``, float32, bfloat16 or float16, to nearest."""
    chosen = find_format(format, values.shape[1])
    wide = values.to(torch.float32)
    is_finite = wide.isfinite()
    is_flagged = is_finite.logical_not().any(1, keepdim=True)
    largest = torch.where(is_finite, wide.abs(), 0.0).amax(1, keepdim=True)
    scale = largest * torch.where(is_flagged, ROUNDED_UP / chosen.flagged_top, ROUNDED_UP / chosen.top)
    scale = scale.to(torch.bfloat16).to(torch.float32).clamp(min=LEAST_SCALE)
    infinity = torch.where(wide < 0, -_infinity(chosen), _infinity(chosen))
    code = torch.where(is_finite, wide * scale.reciprocal(), torch.where(wide.isnan(), _nan(format), infinity))
    code = code.round() if chosen.is_integer else code
    return code.to(CODE_TYPES[format]), torch.where(is_flagged, -scale, scale).to(torch.bfloat16)


def decode(codes: Tensor, scales: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """What `encode` was given, ``(groups, group)`` of ``dtype``. Finite values stay finite."""
    chosen = find_format(format, codes.shape[1])
    code, scale = codes.to(torch.float32), scales.to(torch.float32)
    limit = torch.finfo(dtype).max
    finite = (code * scale.abs()).clamp(-limit, limit)
    infinity = torch.where(code < 0, -torch.inf, torch.inf)
    special = torch.where(code.abs() == _infinity(chosen), infinity, finite)
    if chosen.is_integer:
        special = torch.where(code == _nan(format), torch.nan, special)
    return torch.where(scale < 0, special, finite).to(dtype)  # of a float format NaN is what it was, and no number is clamped


def _infinity(format: Format) -> float:
    """What stands for an infinity in a group that has one: the largest code where finite numbers then do without it."""
    return format.top if format.flagged_top < format.top else float("inf")


def _nan(format: str) -> float:
    """What stands for NaN before it is a code."""
    return -128.0 if format == "int8" else float("nan")
