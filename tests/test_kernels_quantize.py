"""Lossy storage: the error of every element is within its format's bound, infinities and NaN survive, stochastic rounding is unbiased."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICES, FLOATS, KINDS, SEEDS, SIZES, Layout, layouts, same, strides_matter, values
from torch import Tensor

from dyngran.kernels.casts import cast
from dyngran.kernels.groups import FORMATS, LEAST_SCALE, code_bytes, default_group, stored_bytes
from dyngran.kernels.quantize import dequantize, quantize
from dyngran.kernels.steps import advance_step, step_tensor

INTEGERS = ("int8", "int4")
GROUPS = st.sampled_from((16, 64, 128, 1024))
on_devices = pytest.mark.parametrize("device", DEVICES)
NEAREST = 2.0**-16  # of a scale: two roundings of x * (1 / scale), which is at most 127
VALUE_IDS = (7, 8, 9)
Rounding = Callable[[Tensor, int, int], Tensor]  # what comes back for a value with an identity, in a step


def scales_of(stored: Tensor, format: str, num: int, group: int) -> Tensor:
    """float64, one per element; negative where the group holds an infinity or a NaN."""
    scales = stored[code_bytes(format, num, group) :].view(torch.bfloat16).double()
    return scales.repeat_interleave(group)[:num]


def largest_of(flat: Tensor, group: int) -> Tensor:
    """The largest finite magnitude in the group of each element, float64."""
    finite = torch.where(flat.isfinite(), flat.double().abs(), 0.0)
    padded = torch.nn.functional.pad(finite, (0, -len(flat) % group)).view(-1, group)
    return padded.amax(1).repeat_interleave(group)[: len(flat)]


def bound(format: str, flat: Tensor, scale: Tensor, *, stochastic: bool = False) -> Tensor:
    """What `dyngran.kernels.groups` promises for finite values; and half a denormal float32, since the result is one."""
    magnitude, scale = flat.double().abs(), scale.abs()
    if format in INTEGERS:
        steps = scale * ((1 + 2.0**-9 if stochastic else 0.5) + NEAREST)
    else:
        relative, absolute = (2.0**-4, 2.0**-10) if format == "fp8_e4m3" else (2.0**-3, 2.0**-17)
        steps = torch.maximum(magnitude * relative, scale * absolute) * (1 + NEAREST)
    return steps + 2.0**-150


@on_devices
@given(
    layout=layouts(),
    seed=SEEDS,
    dtype=st.sampled_from(FLOATS),
    kind=st.sampled_from(KINDS),
    format=st.sampled_from(tuple(FORMATS)),
    group=GROUPS,
    stochastic=st.booleans(),
)
def test_errors_are_within_the_bound_and_specials_survive(
    device: str, layout: Layout, seed: int, dtype: torch.dtype, kind: str, format: str, group: int, stochastic: bool
) -> None:
    stochastic = stochastic and format in INTEGERS
    flat = values(layout.num_elements, dtype, kind, seed, device)
    x = layout.tensor(flat)
    stored = quantize(x, layout.stride, format, group, stochastic, seed)
    assert stored.shape == (stored_bytes(format, len(flat), group),) and stored.dtype == torch.uint8
    result = dequantize(stored, x.shape, layout.stride, torch.float32, format, group)
    assert strides_matter(x.shape, result.stride()) == strides_matter(x.shape, layout.stride)
    line = result.as_strided((len(flat),), (1,))
    finite = flat.isfinite()
    assert torch.equal(line.isfinite(), finite)
    assert same(line[~finite], flat[~finite].float())
    scale, most = scales_of(stored, format, len(flat), group), largest_of(flat, group)
    error = (line.double() - flat.double()).abs()[finite]
    assert (error <= bound(format, flat, scale, stochastic=stochastic)[finite]).all()
    assert torch.equal(scale < 0, largest_of((~finite).float(), group) > 0)
    top = torch.where(scale < 0, FORMATS[format].flagged_top, FORMATS[format].top)
    assert (scale.abs() >= most / top * (1 - 2.0**-22)).all()
    assert (scale.abs() <= (most / top * (1 + 2.0**-7)).clamp(min=LEAST_SCALE)).all()
    assert not line[flat == 0].any()  # zeros stay zeros, stochastically too


@on_devices
@given(
    num=st.sampled_from(SIZES),
    seed=SEEDS,
    kind=st.sampled_from(KINDS),
    format=st.sampled_from(tuple(FORMATS)),
    dtype=st.sampled_from((torch.bfloat16, torch.float16)),
)
def test_a_narrow_result_is_the_float32_one_rounded(device: str, num: int, seed: int, kind: str, format: str, dtype: torch.dtype) -> None:
    x = values(num, dtype, kind, seed, device)
    stored = quantize(x, (1,), format, 64, False, 0)
    wide = dequantize(stored, (num,), (1,), torch.float32, format, 64)
    assert same(dequantize(stored, (num,), (1,), dtype, format, 64), cast(wide, (1,), dtype))


@on_devices
@pytest.mark.parametrize("format", tuple(FORMATS))
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_finite_values_stay_finite(device: str, format: str, dtype: torch.dtype) -> None:
    """The scale is rounded up, so the largest code can mean more than the largest value: 2048 exponents and mantissas near the limit."""
    x = (torch.finfo(dtype).max * torch.linspace(0.9, 1.0, 2048, dtype=torch.float64)).to(dtype).to(device).repeat_interleave(16)
    stored = quantize(x, (1,), format, 16, False, 0)
    assert dequantize(stored, x.shape, (1,), dtype, format, 16).isfinite().all()


def test_ties_go_to_even() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    result = dequantize(quantize(x, (1,), "int8", 16, False, 0), (8,), (1,), torch.float32, "int8", 16)
    assert result.tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


def test_a_double_beyond_float32_becomes_its_largest() -> None:
    x = torch.tensor([1e300, -1e300, math.inf, math.nan], dtype=torch.float64)
    result = dequantize(quantize(x, (1,), "int8", 16, False, 0), (4,), (1,), torch.float64, "int8", 16)
    assert result.isfinite().tolist() == [True, True, False, False] and result[0] == -result[1] > 3.3e38


# ---------------------------------------------------------------------------------------------------------------- stochastic rounding


def rounding(format: str, device: str) -> Rounding:
    def run(x: Tensor, value_id: int, step: int) -> Tensor:
        step_tensor(torch.device(device)).fill_(step)
        return dequantize(quantize(x, (1,), format, 64, True, value_id), x.shape, (1,), torch.float32, format, 64)

    return run


def always_down(format: str) -> Rounding:
    """The fault that the check is to find: no randomness is added before the floor."""

    def run(x: Tensor, value_id: int, step: int) -> Tensor:
        scale = scales_of(quantize(x, (1,), format, 64, False, 0), format, len(x), 64)
        return ((x.double() / scale).floor() * scale).float()

    return run


def num_unbiased(run: Rounding, format: str, device: str) -> int:
    """How many of three values are rounded without bias. Draws are deterministic, and one of 100 unbiased ones is outside of its band; two
    of three are in less than one of 1000."""
    return sum(is_unbiased(run, format, device, value_id) for value_id in VALUE_IDS)


def is_unbiased(run: Rounding, format: str, device: str, value_id: int, *, num_repeats: int = 256) -> bool:
    """Whether means over repeats are where unbiased ones are in 99 of 100 trials: all elements together, and as a share of single ones.

    The variance of rounding ``y`` is ``f (1 - f)`` with ``f`` its distance from the integer below (in scales); ``f`` is the element's
    own, so no distribution of values is assumed. 2^-9 of a scale is what the kernels promise at best.
    """
    x = values(4096, torch.float32, "normal", 3, device)
    scale = scales_of(quantize(x, (1,), format, 64, False, 0), format, len(x), 64)
    mean = sum(run(x, value_id, step).double() for step in range(num_repeats)) / num_repeats
    fraction = (x.double() / scale) % 1
    error = (mean - x.double()) / scale
    deviation = (fraction * (1 - fraction) / num_repeats).sqrt()
    all_together = error.mean().abs() <= 2.576 * deviation.square().sum().sqrt() / len(x) + 2.0**-9 / len(x) ** 0.5
    outside = (error.abs() > 2.576 * deviation + 2.0**-9).double().mean()
    return bool(all_together) and float(outside) <= 0.01 + 2.576 * (0.01 * 0.99 / len(x)) ** 0.5


@on_devices
@pytest.mark.parametrize("format", INTEGERS)
def test_stochastic_rounding_is_unbiased(device: str, format: str) -> None:
    assert num_unbiased(rounding(format, device), format, device) >= 2


@pytest.mark.parametrize("format", INTEGERS)
def test_the_check_finds_a_rounding_that_is_biased(format: str) -> None:
    assert num_unbiased(always_down(format), format, "cpu") == 0


@on_devices
@pytest.mark.parametrize("format", INTEGERS)
def test_a_draw_depends_on_step_and_value_alone(device: str, format: str) -> None:
    x = values(4111, torch.float32, "normal", 5, device)
    step = step_tensor(torch.device(device)).fill_(41)

    def draw(value_id: int) -> Tensor:
        return quantize(x, (1,), format, 64, True, value_id)

    before = torch.random.get_rng_state()
    first, other = draw(1), draw(2)
    torch.manual_seed(123)
    assert torch.equal(draw(1), first) and not torch.equal(first, other)
    assert not torch.equal(draw(1 + 2**32), first)
    advance_step()
    assert step.item() == 42 and not torch.equal(draw(1), first) and not torch.equal(draw(1), other)
    step.fill_(41)
    assert torch.equal(draw(1), first) and torch.equal(draw(2), other)
    torch.random.set_rng_state(before)
    draw(3)
    assert torch.equal(torch.random.get_rng_state(), before)


@on_devices
def test_draws_of_neighbours_are_not_alike(device: str) -> None:
    """Elements, groups, values and steps have bits of their own: of two independent draws of 0.5, half are equal."""
    x = torch.full((4096,), 0.5, device=device)
    x[::64] = 127.0
    step = step_tensor(torch.device(device)).fill_(0)
    codes = []
    for number, value_id in ((0, 0), (0, 1), (1, 0)):
        step.fill_(number)
        codes.append(quantize(x, (1,), "int8", 64, True, value_id)[:4096].cpu())
    pairs = [
        (codes[0], codes[1]),
        (codes[0], codes[2]),
        (codes[1], codes[2]),
        *((codes[0][lag:], codes[0][:-lag]) for lag in (1, 4, 16, 64)),
    ]
    for left, right in pairs:
        assert abs((left == right).double().mean().item() - 0.5) < 0.5 * 4 / 63  # four deviations of 4032 coins, and the 127s


def test_the_step_is_the_same_tensor_in_every_mode() -> None:
    with torch.inference_mode():
        step = step_tensor(torch.device("cpu"))
    before = int(step)
    advance_step()
    assert step_tensor(torch.device("cpu")) is step and int(step) == before + 1


# ------------------------------------------------------------------------------------------------------------------------ sizes, errors


@given(num=st.integers(0, 5000), format=st.sampled_from(tuple(FORMATS)), group=GROUPS)
def test_stored_bytes_are_what_is_stored(num: int, format: str, group: int) -> None:
    stored = quantize(torch.zeros(num), (1,), format, group, False, 0)
    assert stored.untyped_storage().nbytes() == stored_bytes(format, num, group)
    assert dequantize(stored, (num,), (1,), torch.float32, format, group).shape == (num,)


def test_stored_bytes_of_known_sizes() -> None:
    assert [default_group(format) for format in FORMATS] == [128, 128, 128, 64]
    assert stored_bytes("int8", 1 << 20, 128) == (1 << 20) + 2 * (1 << 13)
    assert stored_bytes("int4", 1 << 20, 64) == (1 << 19) + 2 * (1 << 14)
    assert stored_bytes("int4", 1, 64) == 34 and stored_bytes("int4", 0, 64) == 0


def test_sizes_need_no_torch() -> None:
    script = "import sys; from dyngran.kernels.groups import stored_bytes; stored_bytes('int8', 5, 128); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: quantize(x, (1,), "int3", 64, False, 0), ValueError, "unknown format 'int3': one of fp8_e4m3, fp8_e5m2, int8, int4"),
        (lambda x: quantize(x, (1,), "int8", 96, False, 0), ValueError, "group must be a power of two from 16 to 1024, got 96"),
        (lambda x: quantize(x, (1,), "int8", 8, False, 0), ValueError, "group must be a power of two from 16 to 1024, got 8"),
        (lambda x: quantize(x, (1,), "fp8_e4m3", 64, True, 0), ValueError, "fp8_e4m3 is rounded to nearest"),
        (lambda x: quantize(x.long(), (1,), "int8", 64, False, 0), TypeError, r"got torch\.int64"),
        (lambda x: quantize(x, (2,), "int8", 64, False, 0), ValueError, r"stride \(2,\) leaves gaps"),
        (lambda x: dequantize(x.byte(), (5,), (1,), torch.float32, "int8", 64), ValueError, "5 elements of int8 in groups of 64 are 66 "),
        (lambda x: dequantize(x.byte(), (5,), (1,), torch.int8, "int8", 64), TypeError, r"got torch\.int8"),
    ],
)
def test_what_is_refused_and_why(call: Callable[[Tensor], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call(torch.zeros(5))
