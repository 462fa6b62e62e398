"""Activations as 8-bit or 4-bit codes with one scale for each group of neighbours: `dyngran.kernels.groups` has formats, layout and bounds.

Formula, for an element ``x`` of a group with scale ``s``, in float32:

    y = x * (1 / s)
    nearest       code = y rounded to the format, ties to even
    stochastic    code = floor((256 y rounded to an integer + r) / 256),  r uniform in 0 .. 255; integer formats only

A stochastic code is one of the two neighbours of ``y``, and its expectation is ``y`` rounded to 1/256: right to 2^-9 of a step, a
hundredth part of the noise of one rounding, and exact where ``y`` is an integer. `dyngran.kernels.randomness` says where ``r`` comes from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dyngran.kernels.casts import CAST_FLOATS, largest_finite
from dyngran.kernels.float8 import FLOAT8, decode_float8, has_float8
from dyngran.kernels.groups import LEAST_SCALE, Format, code_bytes, find_format, stored_bytes
from dyngran.kernels.launch import Configuration, configuration, kernel, launch, tl
from dyngran.kernels.layouts import CHUNK_ELEMENTS, check_stored, chunks, memory_order, new_in_layout
from dyngran.kernels.quantize_kernel import quantize_kernel
from dyngran.kernels.randomness import mixed
from dyngran.kernels.steps import step_tensor


def quantize(x: Tensor, stride: Sequence[int], format: str, group: int, stochastic: bool, value_id: int) -> Tensor:
    """``x``, float32, bfloat16 or float16 (on a CPU float64 too, as float32), any shape: uint8 of shape
    ``(stored_bytes(format, x.numel(), group),)``, in the order of the layout ``stride``.

    ``value_id`` is any number that no other value of the step has; it matters only if ``stochastic``. Raises TypeError if ``x`` has
    another type; ValueError if the format is unknown, ``group`` is not a power of two from 16 to 1024, the layout is not dense, or a
    float format is to be rounded stochastically.
    """
    chosen = find_format(format, group)
    if stochastic and not chosen.is_integer:
        raise ValueError(f"{format} is rounded to nearest: stochastic rounding is for int8 and int4")
    check_dtype(x.dtype, x.is_cuda)
    values = memory_order(x, stride)
    stored = values.new_empty(stored_bytes(format, values.numel(), group), dtype=torch.uint8)
    if values.is_cuda:
        launch_quantize(values, stored, chosen, group, step_tensor(values.device) if stochastic else None, value_id)
    else:
        seed = mixed(int(step_tensor(values.device).item()), value_id) if stochastic else None
        quantize_reference(values, stored, chosen, group, seed)
    return stored


def dequantize(stored: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, format: str, group: int) -> Tensor:
    """What `quantize` stored, as a tensor of ``dtype`` of that size in that layout. Finite values stay finite. Raises as `quantize`, and
    ValueError if ``stored`` is not as long as the size asks for."""
    chosen = find_format(format, group)
    check_dtype(dtype, stored.is_cuda)
    result, values = new_in_layout(stored, size, stride, dtype)
    check_stored(stored, stored_bytes(format, values.numel(), group), f"{values.numel()} elements of {format} in groups of {group}")
    (launch_dequantize if values.is_cuda else dequantize_reference)(stored, values, chosen, group)
    return result


def check_dtype(dtype: torch.dtype, is_cuda: bool) -> None:
    """Raises TypeError unless values of that type can be quantized."""
    if dtype not in CAST_FLOATS and (is_cuda or dtype != torch.float64):
        raise TypeError(f"values to quantize are float32, bfloat16 or float16 (on a CPU float64 too), got {dtype}")


def split_stored(stored: Tensor, format: Format, group: int, num_elements: int) -> tuple[Tensor, Tensor]:
    """Codes ``(groups, bytes of a group)`` and scales ``(groups,)``, the latter as int16: the upper halves of float32 numbers."""
    num_code_bytes = code_bytes(format.name, num_elements, group)
    codes = stored[:num_code_bytes].view(-1, group * format.bits // 8)
    return codes, stored[num_code_bytes:].view(torch.int16)


def quantize_reference(values: Tensor, stored: Tensor, format: Format, group: int, seed: int | None) -> None:
    """``values`` ``(n,)`` into ``stored``; stochastically if there is a seed. Temporaries: 6 MiB."""
    codes, scales = split_stored(stored, format, group, len(values))
    generator = None if seed is None else torch.Generator(values.device).manual_seed(seed)
    for part in chunks(len(scales), of=CHUNK_ELEMENTS // group):
        block = values[part.start * group : part.stop * group]
        if block.dtype == torch.float64:
            block = torch.where(block.isfinite(), block.clamp(*_within(torch.float32)), block)
        block = block.to(torch.float32)
        if len(block) % group:
            block = torch.nn.functional.pad(block, (0, -len(block) % group))
        block = block.view(-1, group)
        is_finite = block.isfinite()
        finite = torch.where(is_finite, block, 0.0)
        is_flagged = is_finite.all(1).logical_not_()
        scale = _scale(finite.abs().amax(1), is_flagged, format)
        code = _encode(finite.mul_(scale.reciprocal()[:, None]), format, generator)
        if is_flagged.any():
            code.masked_fill_(block == float("inf"), format.infinity)
            code.masked_fill_(block == float("-inf"), format.negative_infinity)
            code.masked_fill_(block.isnan(), format.nan)
        codes[part] = code if format.bits == 8 else (code[:, 0::2] & 15) | (code[:, 1::2] << 4)
        scales[part] = torch.where(is_flagged, -scale, scale).view(torch.int32).bitwise_right_shift_(16)


def _scale(largest: Tensor, is_flagged: Tensor, format: Format) -> Tensor:
    """Scales of groups whose largest finite magnitudes are given, float32."""
    reciprocal = torch.full_like(largest, 1 / format.top).masked_fill_(is_flagged, 1 / format.flagged_top)
    bits = (largest * reciprocal).view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    return bits.view(torch.float32).clamp_(min=LEAST_SCALE)


def _encode(scaled: Tensor, format: Format, generator: torch.Generator | None) -> Tensor:
    """Codes, uint8, of finite values that are divided by their scale. Overwrites them."""
    if not format.is_integer:
        return scaled.to(FLOAT8[format.name]).view(torch.uint8)
    if generator is None:
        return scaled.round_().to(torch.int8).view(torch.uint8)
    random = torch.randint(0, 256, scaled.shape, dtype=torch.int16, device=scaled.device, generator=generator)
    return random.add_(scaled.mul_(256.0).round_().to(torch.int16)).bitwise_right_shift_(8).to(torch.int8).view(torch.uint8)


def dequantize_reference(stored: Tensor, values: Tensor, format: Format, group: int) -> None:
    """The inverse of `quantize_reference`, into ``values`` ``(n,)``. Temporaries: 4 MiB."""
    codes, scales = split_stored(stored, format, group, len(values))
    for part in chunks(len(scales), of=CHUNK_ELEMENTS // group):
        code = codes[part]
        if format.bits == 4:
            code = torch.stack((code & 15, code >> 4), dim=2).view(-1, group)
        scale = scales[part].to(torch.int32).bitwise_left_shift_(16).view(torch.float32)[:, None]
        block = _decode(code, format).mul_(scale.abs()).clamp_(*_within(values.dtype))
        is_flagged = scale < 0
        if is_flagged.any():
            block.masked_fill_(is_flagged & (code == format.infinity), float("inf"))
            block.masked_fill_(is_flagged & (code == format.negative_infinity), float("-inf"))
            block.masked_fill_(is_flagged & (code == format.nan), float("nan"))
        target = values[part.start * group : part.stop * group]
        target.copy_(block.view(-1)[: len(target)])


def _decode(code: Tensor, format: Format) -> Tensor:
    """What codes mean before they are scaled, float32, new."""
    if not format.is_integer:
        return code.view(FLOAT8[format.name]).to(torch.float32)
    signed = code.view(torch.int8) if format.bits == 8 else ((code ^ 8).view(torch.int8) - 8)
    return signed.to(torch.float32)


def _within(dtype: torch.dtype) -> tuple[float, float]:
    limit = largest_finite(torch.float32 if dtype == torch.float64 else dtype)
    return -limit, limit


@kernel
def dequantize_kernel(
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    values_ptr: tl.tensor,
    num_elements: tl.tensor,
    num_groups: tl.tensor,
    limit: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    INFINITY: tl.constexpr,
    NEGATIVE_INFINITY: tl.constexpr,
    NAN: tl.constexpr,
    NATIVE_FLOAT8: tl.constexpr,
) -> None:
    first = tl.program_id(0).to(tl.int64) * GROUPS
    row = tl.arange(0, GROUPS)
    in_range = row < tl.minimum(num_groups - first, GROUPS).to(tl.int32)
    scale = (tl.load(scales_ptr + first + row, mask=in_range, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    place = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if BITS == 4:
        half = row[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        packed = tl.load(codes_ptr + first * (GROUP // 2) + half, mask=in_range[:, None], other=0)
        code = tl.reshape(tl.join(packed & 15, packed >> 4), [GROUPS, GROUP])
        decoded = ((code ^ 8).to(tl.int32) - 8).to(tl.float32)
    else:
        code = tl.load(codes_ptr + first * GROUP + place, mask=in_range[:, None], other=0)
        if MANTISSA == 0:
            decoded = code.to(tl.int8, bitcast=True).to(tl.float32)
        elif NATIVE_FLOAT8:
            decoded = code.to(tl.float8e4nv if MANTISSA == 3 else tl.float8e5, bitcast=True).to(tl.float32)
        else:
            decoded = decode_float8(code, MANTISSA, BIAS)

    values = tl.clamp(decoded * tl.abs(scale)[:, None], -limit, limit)
    if tl.min(scale, axis=0) < 0:
        special = tl.where(code == INFINITY, float("inf"), tl.where(code == NEGATIVE_INFINITY, float("-inf"), values))
        special = tl.where(code == NAN, float("nan"), special)
        values = tl.where(scale[:, None] < 0, special, values)
    left = tl.minimum(num_elements - first * GROUP, GROUPS * GROUP).to(tl.int32)
    tl.store(values_ptr + first * GROUP + place, values.to(values_ptr.dtype.element_ty), mask=place < left)


def launch_quantize(values: Tensor, stored: Tensor, format: Format, group: int, step: Tensor | None, value_id: int) -> None:
    """As `quantize_reference`, on a card; stochastically if a step (`dyngran.kernels.steps`) is given. Temporaries: none."""
    if len(values):
        codes, scales = split_stored(stored, format, group, len(values))
        rounding = "nearest" if step is None else "stochastic"
        chosen, constants = _how(f"quantize:{format.name}:{rounding}:{values.dtype}", values.device, format, group)
        numbers = (len(values), len(scales), 1 / format.top, 1 / format.flagged_top, value_id)
        arguments = (values, codes, scales, codes if step is None else step, *numbers)
        num_programs = -(-len(scales) // constants["GROUPS"])
        constants["STOCHASTIC"] = step is not None
        constants["ALIGNED"] = values.data_ptr() % (2 * values.element_size()) == 0
        launch(quantize_kernel, num_programs, arguments, on=values, num_warps=chosen.num_warps, **constants)


def launch_dequantize(stored: Tensor, values: Tensor, format: Format, group: int) -> None:
    """As `dequantize_reference`, on a card. Temporaries: none."""
    if len(values):
        codes, scales = split_stored(stored, format, group, len(values))
        chosen, constants = _how(f"dequantize:{format.name}:{values.dtype}", values.device, format, group)
        arguments = (codes, scales, values, len(values), len(scales), largest_finite(values.dtype))
        num_programs = -(-len(scales) // constants["GROUPS"])
        launch(dequantize_kernel, num_programs, arguments, on=values, num_warps=chosen.num_warps, **constants)


def _how(key: str, device: torch.device, format: Format, group: int) -> tuple[Configuration, dict[str, int | bool]]:
    chosen = configuration(key, device)
    constants: dict[str, int | bool] = {
        "GROUPS": max(1, chosen.block // group),
        "GROUP": group,
        "BITS": format.bits,
        "MANTISSA": format.mantissa_bits,
        "BIAS": format.exponent_bias,
        "INFINITY": format.infinity,
        "NEGATIVE_INFINITY": format.negative_infinity,
        "NAN": format.nan,
        "NATIVE_FLOAT8": has_float8(device),
    }
    return chosen, constants
