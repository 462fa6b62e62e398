"""The Triton kernels against the references, bit for bit: in Triton's interpreter, and compiled where there is a card.

Triton decides when a kernel is defined whether it is interpreted. So on a CPU these tests run in a process of their own, which
`test_kernels_interpreted.py` starts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import DEVICES, FLOATS, KINDS, SIZES, same, values
from torch import Tensor

from dyngran.kernels import bits, casts, float8, launch, quantize, quantize_kernel, signs, slices
from dyngran.kernels.groups import FORMATS, find_format, stored_bytes
from dyngran.kernels.launch import tl
from dyngran.kernels.layouts import dense_stride

pytest.importorskip("triton")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_DEVICES = tuple(device for device in DEVICES if (device == "cpu") == IS_INTERPRETED)
if not KERNEL_DEVICES:
    pytest.skip("no card, and not in Triton's interpreter", allow_module_level=True)
on_devices = pytest.mark.parametrize("device", KERNEL_DEVICES)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@pytest.fixture(autouse=True)
def _hardware_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card rounds to even, as torch does; the interpreter cuts off, or rounds halves up and loses the carry."""
    if not IS_INTERPRETED:
        return
    import numpy as np
    from triton.runtime import interpreter

    torch_dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
    original = interpreter._convert_float

    def convert(data: Any, source: tl.dtype, target: tl.dtype, rounding: Any) -> Any:
        if source.name not in torch_dtypes or target.name not in torch_dtypes:
            return original(data, source, target, rounding)
        signed = torch.from_numpy(np.ascontiguousarray(data).view(f"int{source.primitive_bitwidth}"))
        result = signed.view(torch_dtypes[source.name]).to(torch_dtypes[target.name])
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[torch_dtypes[target.name].itemsize]
        return result.view(integers).numpy().view(f"uint{target.primitive_bitwidth}").reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture(params=[256, None], ids=["small", "default"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with blocks so small that every size above has several."""
    if request.param is not None:
        monkeypatch.setattr(launch, "DEFAULTS", everywhere(request.param))


def everywhere(block: int) -> dict[str, launch.Configuration]:
    return {family: launch.Configuration(block, 1) for family in launch.DEFAULTS}


def poisoned(num: int, dtype: torch.dtype, device: str) -> Tensor:
    """A line with a border on each side that no kernel may write to."""
    return torch.full((num + 64,), 77, device=device).to(dtype)


def check(write: Callable[[Tensor], None], reference: Callable[[Tensor], None], num: int, dtype: torch.dtype, device: str) -> None:
    kernel_result, expected = poisoned(num, dtype, device), poisoned(num, dtype, device)
    write(kernel_result[32 : 32 + num])
    reference(expected[32 : 32 + num])
    if dtype.is_floating_point:
        assert same(kernel_result, expected)
    else:
        assert torch.equal(kernel_result, expected)


@on_devices
@pytest.mark.parametrize("num", SIZES)
@pytest.mark.usefixtures("_blocks")
def test_bits(device: str, num: int) -> None:
    flags = torch.rand(num, device=device) < 0.5
    num_bytes = bits.packed_bytes(num)
    check(lambda out: bits.launch_pack(flags, out), lambda out: bits.pack_reference(flags, out), num_bytes, torch.uint8, device)
    stored = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    check(lambda out: bits.launch_unpack(stored, out), lambda out: bits.unpack_reference(stored, out), num, torch.bool, device)


@on_devices
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("num", SIZES)
@pytest.mark.parametrize("threshold", [0.0, -0.75])
@pytest.mark.usefixtures("_blocks")
def test_signs(device: str, dtype: torch.dtype, num: int, threshold: float) -> None:
    x = values(num, dtype, "special", num, device)
    x[::3] = threshold
    below, above = signs.two_sides(threshold, dtype)
    num_bytes = bits.packed_bytes(num)
    check(
        lambda out: signs.launch_pack_sign(x, out, below),
        lambda out: signs.pack_sign_reference(x, out, below),
        num_bytes,
        torch.uint8,
        device,
    )
    stored = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    check(
        lambda out: signs.launch_unpack_sign(stored, out, below, above),
        lambda out: signs.unpack_sign_reference(stored, out, below, above),
        num,
        dtype,
        device,
    )


@on_devices
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("_blocks")
def test_float_casts(device: str, source: torch.dtype, target: torch.dtype, kind: str) -> None:
    for num in (1, 1023, 1025):
        x = values(num, source, kind, num, device)
        check(functools.partial(casts.launch_cast, x), functools.partial(casts.cast_reference, x), num, target, device)


@on_devices
@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", INTEGERS)
def test_integer_casts(device: str, source: torch.dtype, target: torch.dtype) -> None:
    limits = torch.iinfo(source)
    x = torch.randint(limits.min, limits.max, (1025,), dtype=torch.int64).to(source).to(device)
    check(lambda out: casts.launch_cast(x, out), lambda out: casts.cast_reference(x, out), 1025, target, device)


@on_devices
@pytest.mark.parametrize("has_float8", [False, True], ids=["arithmetic", "instruction"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", tuple(FORMATS))
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize(device: str, dtype: torch.dtype, format: str, kind: str, has_float8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_float8 and device == "cuda" and not float8.has_float8(torch.device("cuda", 0)):
        pytest.skip("this card has no float8 instructions")
    if has_float8 and not format.startswith("fp8"):
        pytest.skip("the same kernel as without")
    monkeypatch.setattr(quantize, "has_float8", lambda _: has_float8)
    for num, group, block in ((1, 128, 4096), (1025, 16, 512), (2063, 128, 1024), (1100, 1024, 1024)):
        monkeypatch.setattr(launch, "DEFAULTS", everywhere(block))
        chosen = find_format(format, group)
        x = values(num, dtype, kind, num, device)
        num_bytes = stored_bytes(format, num, group)
        stored = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        quantize.quantize_reference(x, stored, chosen, group, None)
        check(
            functools.partial(quantize.launch_quantize, x, format=chosen, group=group, step=None, value_id=0),
            functools.partial(quantize.quantize_reference, x, format=chosen, group=group, seed=None),
            num_bytes,
            torch.uint8,
            device,
        )
        check(
            functools.partial(quantize.launch_dequantize, stored, format=chosen, group=group),
            functools.partial(quantize.dequantize_reference, stored, format=chosen, group=group),
            num,
            dtype,
            device,
        )


@on_devices
@pytest.mark.parametrize("format", tuple(FORMATS))
def test_every_code_means_what_the_reference_says(device: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 256, without a flag and with one; but of float8 none that nothing stores: a second NaN, or one without a flag."""
    monkeypatch.setattr(quantize, "has_float8", lambda _: False)
    chosen = find_format(format, 256)
    num = 512 * 8 // chosen.bits
    group = num // 2
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)
    is_special = torch.zeros(256, dtype=torch.bool)
    if not chosen.is_integer:
        is_special = ~torch.arange(256, dtype=torch.uint8).view(float8.FLOAT8[format]).float().isfinite()
    codes[:256][is_special] = 0
    for code in set(is_special.nonzero().flatten().tolist()) - {chosen.infinity, chosen.negative_infinity, chosen.nan}:
        codes[256 + code] = 0
    scales = torch.tensor([0.5, -0.25], dtype=torch.bfloat16).view(torch.uint8)
    stored = torch.cat([codes, scales]).to(device)
    expected, result = torch.zeros(num, device=device), torch.zeros(num, device=device)
    quantize.dequantize_reference(stored, expected, chosen, group)
    quantize.launch_dequantize(stored, result, chosen, group)
    assert same(result, expected)


@on_devices
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", tuple(FORMATS))
def test_values_that_do_not_begin_at_a_pair(device: str, dtype: torch.dtype, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two 4-bit codes are made of one load of two elements, if these lie at a multiple of their size."""
    monkeypatch.setattr(launch, "DEFAULTS", everywhere(512))
    monkeypatch.setattr(quantize, "has_float8", lambda _: False)
    chosen = find_format(format, 64)
    x = values(2065, dtype, "normal", 3, device)[1:]
    check(
        functools.partial(quantize.launch_quantize, x, format=chosen, group=64, step=None, value_id=0),
        functools.partial(quantize.quantize_reference, x, format=chosen, group=64, seed=None),
        stored_bytes(format, len(x), 64),
        torch.uint8,
        device,
    )


@launch.kernel
def reciprocal_kernel(scales_ptr: tl.tensor, result_ptr: tl.tensor, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result_ptr + place, quantize_kernel.reciprocal_of(tl.load(scales_ptr + place)))


@on_devices
def test_reciprocals_of_all_scales_are_rounded_to_nearest(device: str) -> None:
    """From 2^-126 to 2^126, in which is the largest scale: the largest float32 by 6."""
    scales = (torch.arange(1 << 7, (127 + 126) << 7, dtype=torch.int32, device=device) << 16).view(torch.float32)
    result = torch.empty_like(scales)
    reciprocal_kernel[(len(scales) // 128,)](scales, result, BLOCK=128, num_warps=1)
    assert torch.equal(result, scales.double().reciprocal().float())


def philox_bytes(num: int, step: int, value_id: int) -> Tensor:
    """Random bytes of the elements: four words of Philox4x32-7 (Salmon et al. 2011, section 4.3) for 16 elements, in plain Python."""
    mask = 0xFFFFFFFF
    drawn: list[int] = []
    for call in range(-(-num // 16)):
        counter = [call & mask, call >> 32, value_id & mask, (value_id >> 32) & mask]
        key = [step & mask, (step >> 32) & mask]
        for _ in range(7):
            left, right = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
            counter = [(right >> 32) ^ counter[1] ^ key[0], right & mask, (left >> 32) ^ counter[3] ^ key[1], left & mask]
            key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
        for word in counter:
            drawn += [(word >> shift) & 255 for shift in (0, 8, 16, 24)]
    return torch.tensor(drawn[:num], dtype=torch.int32)


@on_devices
@pytest.mark.parametrize(("step", "value_id"), [(0, 0), (3, 7), (2**33 + 1, 2**40 + 5)])
@pytest.mark.parametrize(("format", "group"), [("int8", 128), ("int4", 64), ("int8", 16)])
@pytest.mark.usefixtures("_blocks")
def test_stochastic_codes_are_those_of_philox(device: str, step: int, value_id: int, format: str, group: int) -> None:
    num = 1100
    chosen = find_format(format, group)
    x = values(num, torch.float32, "normal", 1, device)
    stored, nearest = (torch.zeros(stored_bytes(format, num, group), dtype=torch.uint8, device=device) for _ in range(2))
    quantize.launch_quantize(x, stored, chosen, group, torch.tensor([step], device=device), value_id)
    quantize.quantize_reference(x, nearest, chosen, group, None)
    codes, scales = quantize.split_stored(stored, chosen, group, num)
    assert torch.equal(scales, quantize.split_stored(nearest, chosen, group, num)[1])
    scale = (scales.int() << 16).view(torch.float32).repeat_interleave(group)[:num]
    fixed = (x.double() * scale.reciprocal().double() * 256).round().int().cpu()  # a double holds the product
    expected = (fixed + philox_bytes(num, step, value_id)) >> 8
    if chosen.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=2)
        expected = expected & 15
    assert torch.equal(codes.reshape(-1)[:num].cpu(), (expected & 255).to(torch.uint8))


@on_devices
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("shape", [(4, 5, 24), (3, 7, 11), (1, 2, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
@pytest.mark.usefixtures("_blocks")
def test_slices_and_maps(device: str, shape: tuple[int, ...], dtype: torch.dtype, order: tuple[int, ...]) -> None:
    place = [order.index(dim) for dim in range(3)]
    x = torch.randint(0, 100, [shape[dim] for dim in order], device=device).to(dtype).permute(place)
    for dim in range(3):
        length = x.shape[dim]
        for start, taken in ((0, length // 2), (1, length - 1), (length // 2, 1)):
            size = slices.resized(x.shape, dim, taken)
            result = x.new_empty_strided(size, dense_stride(size, x.stride()))
            if start + taken <= length:
                slices.launch_slice(x, dim, start, result)
                assert torch.equal(result, x.narrow(dim, start, taken))
        index = torch.randperm(length, device=device)[: length // 2 + 1]
        size = slices.resized(x.shape, dim, len(index))
        part = x.new_empty_strided(size, dense_stride(size, x.stride()))
        slices.launch_gather(x, index, dim, part)
        assert torch.equal(part, x.index_select(dim, index))
        base = torch.zeros_like(x)
        result = torch.empty_like(x)
        slices.launch_scatter(base, part, index, dim, result)
        assert torch.equal(result, base.index_copy(dim, index, part))


@on_devices
def test_an_index_outside_reads_nothing(device: str) -> None:
    x = torch.ones(2, 3, 8, device=device)
    part = torch.empty(2, 4, 8, device=device)
    slices.launch_gather(x, torch.tensor([0, 3, -1, 2**40], device=device), 1, part)
    assert part.sum(2).tolist() == [[8, 0, 0, 0]] * 2
