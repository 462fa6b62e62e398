"""The formulas that a code generator fuses: what comes back is within the formats' bounds, and NaN and infinities are what they were."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import values

from dyngran.kernels.formulas import CODE_TYPES, decode, encode
from dyngran.kernels.groups import FORMATS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def round_trip(x: torch.Tensor, format: str, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = encode(x.view(-1, group), format)
    assert codes.dtype is CODE_TYPES[format] and scales.dtype is torch.bfloat16 and scales.shape == (x.numel() // group, 1)
    wide = decode(codes, scales, format, torch.float32).view(-1)
    return wide, scales.abs().double().expand(-1, group).reshape(-1)


@settings(max_examples=60, deadline=None)
@given(
    format=st.sampled_from(tuple(CODE_TYPES)),
    dtype=st.sampled_from(DTYPES),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 1000),
    special=st.booleans(),
)
def test_what_comes_back_is_within_the_bound(format: str, dtype: torch.dtype, exponent: int, seed: int, special: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(16 * 128, generator=generator) * torch.randn(16, generator=generator).exp().repeat_interleave(128) * 2.0**exponent).to(
        dtype
    )
    if special:
        x[torch.randint(0, len(x), (5,), generator=generator)] = torch.tensor(
            [torch.inf, -torch.inf, torch.nan, 0.0, torch.inf], dtype=dtype
        )
    back, scale = round_trip(x, format, 128)
    finite = x.isfinite()
    assert torch.equal(back[~finite].nan_to_num(nan=7.0), x[~finite].float().nan_to_num(nan=7.0))
    assert back[finite].isfinite().all()
    error, size = (back.double() - x.double()).abs()[finite], x.double().abs()[finite]
    mantissa = FORMATS[format].mantissa_bits
    if mantissa:
        least = scale[finite] * 2.0 ** (-FORMATS[format].exponent_bias - mantissa)
        bound = torch.maximum(size * 2.0 ** -(mantissa + 1), least) * (1 + 2**-14)
    else:
        bound = scale[finite] * (0.5 + 2**-14)
    assert bool((error <= bound).all())


@pytest.mark.parametrize("format", tuple(CODE_TYPES))
def test_the_largest_numbers_and_zeros_come_back(format: str) -> None:
    x = torch.zeros(4, 128)
    x[1] = torch.finfo(torch.float32).max * torch.linspace(-1, 1, 128)
    x[2, 5] = 1e-40
    x[3] = 3.5
    back, _ = round_trip(x.view(-1), format, 128)
    back = back.view(4, 128)
    assert back.isfinite().all() and torch.equal(back[0], x[0]) and bool((back[3] == back[3, 0]).all())
    assert abs(float(back[1, -1]) / float(x[1, -1]) - 1) < 0.13


@pytest.mark.parametrize("format", tuple(CODE_TYPES))
def test_the_error_is_that_of_the_operators(format: str) -> None:
    """Both round the same numbers to the same number of codes."""
    from dyngran.kernels.operators import register

    x = values(64 * 128, torch.float32, "normal", 0, "cpu")
    ops = register()
    theirs = ops.dequantize(ops.quantize(x, (1,), format, 128, False, 0), (len(x),), (1,), torch.float32, format, 128)
    ours, _ = round_trip(x, format, 128)
    one, other = ((back - x).norm() for back in (ours, theirs))
    assert abs(float(one / other) - 1) < 0.05
