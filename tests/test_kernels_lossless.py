"""Storage that loses nothing: bits, signs, narrow integers, slices and feature maps come back bit for bit, in whatever layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICES, FLOATS, KINDS, SEEDS, SIZES, Layout, layouts, same, strides_matter, values

from dyngran.kernels.bits import pack_bits, packed_bytes, unpack_bits
from dyngran.kernels.casts import cast
from dyngran.kernels.layouts import dense_stride, is_dense, memory_order
from dyngran.kernels.signs import pack_sign, unpack_sign
from dyngran.kernels.slices import gather_maps, pack_slice, scatter_maps

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
on_devices = pytest.mark.parametrize("device", DEVICES)


def flags_of(num: int, seed: int, device: str) -> torch.Tensor:
    return (torch.rand(num, generator=torch.Generator().manual_seed(seed)) < 0.5).to(device)


@on_devices
@given(layout=layouts(), seed=SEEDS)
def test_bits_come_back(device: str, layout: Layout, seed: int) -> None:
    x = layout.tensor(flags_of(layout.num_elements, seed, device))
    stored = pack_bits(x, layout.stride)
    assert stored.shape == (-(-x.numel() // 8),) and stored.dtype == torch.uint8
    result = unpack_bits(stored, x.shape, layout.stride)
    assert torch.equal(result, x) and strides_matter(x.shape, result.stride()) == strides_matter(x.shape, layout.stride)
    assert set(result.view(torch.uint8).unique().tolist()) <= {0, 1}


@on_devices
@pytest.mark.parametrize("num", SIZES)
def test_bit_i_of_the_packed_bytes_is_flag_i(device: str, num: int) -> None:
    x = flags_of(num, num, device)
    expected = [sum(int(flag) << place for place, flag in enumerate(x[first : first + 8].tolist())) for first in range(0, num, 8)]
    assert pack_bits(x, (1,)).tolist() == expected


@on_devices
@pytest.mark.parametrize("offset", [1, 3, 8])
def test_flags_that_do_not_begin_at_a_word(device: str, offset: int) -> None:
    x = flags_of(4111, 0, device)[offset:]
    assert torch.equal(unpack_bits(pack_bits(x, (1,)), x.shape, (1,)), x)


@on_devices
@given(
    layout=layouts(),
    seed=SEEDS,
    dtype=st.sampled_from((*FLOATS, torch.float64)),
    kind=st.sampled_from(KINDS),
    threshold=st.sampled_from((0.0, 0.5, -0.75, 6.0, 20.0, -(2.0**-14), 2.0**15)),
)
def test_every_element_stays_on_its_side(device: str, layout: Layout, seed: int, dtype: torch.dtype, kind: str, threshold: float) -> None:
    flat = values(layout.num_elements, dtype, kind, seed, device)
    flat[::5] = threshold
    x = layout.tensor(flat)
    surrogate = unpack_sign(pack_sign(x, layout.stride, threshold), x.shape, layout.stride, threshold, dtype)
    assert surrogate.dtype == dtype
    assert torch.equal(surrogate <= threshold, x <= threshold)
    gradient = torch.ones_like(x)
    masked = torch.ops.aten.threshold_backward(gradient, x, threshold)
    assert torch.equal(torch.ops.aten.threshold_backward(gradient, surrogate, threshold), masked)


@on_devices
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_sides_of_zero_are_zero_and_one(device: str, dtype: torch.dtype) -> None:
    x = torch.tensor([-1.0, -0.0, 0.0, 1e-7, float("nan"), float("inf"), float("-inf")], dtype=dtype, device=device)
    assert unpack_sign(pack_sign(x, (1,), 0.0), (7,), (1,), 0.0, dtype).tolist() == [0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("threshold", "dtype", "error", "says"),
    [
        (0.1, torch.bfloat16, ValueError, "threshold 0.1 is not representable in torch.bfloat16: it would be 0.10009765625"),
        (1e6, torch.float16, ValueError, "not representable in torch.float16"),
        (float("nan"), torch.float32, ValueError, "threshold must be finite, got nan"),
        (float("inf"), torch.float32, ValueError, "threshold must be finite, got inf"),
        (0.0, torch.int32, TypeError, "got torch.int32"),
    ],
)
def test_thresholds_that_have_no_two_sides(threshold: float, dtype: torch.dtype, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        pack_sign(torch.zeros(3, dtype=dtype), (1,), threshold)


@on_devices
@given(layout=layouts(), seed=SEEDS, source=st.sampled_from(INTEGERS), target=st.sampled_from(INTEGERS))
def test_integers_that_fit_come_back(device: str, layout: Layout, seed: int, source: torch.dtype, target: torch.dtype) -> None:
    low = max(torch.iinfo(source).min, torch.iinfo(target).min)
    high = min(torch.iinfo(source).max, torch.iinfo(target).max)
    flat = torch.randint(low, high, (layout.num_elements,), generator=torch.Generator().manual_seed(seed), dtype=torch.int64)
    flat[:1], flat[1:2] = low, high
    x = layout.tensor(flat.to(source).to(device))
    narrow = cast(x, layout.stride, target)
    assert narrow.dtype == target and torch.equal(narrow, x.to(target))
    assert torch.equal(cast(narrow, layout.stride, source), x)


@on_devices
@given(
    layout=layouts(),
    seed=SEEDS,
    source=st.sampled_from((*FLOATS, torch.float64)),
    target=st.sampled_from((*FLOATS, torch.float64)),
    kind=st.sampled_from(KINDS),
)
def test_floats_are_rounded_as_by_aten_and_stay_finite(
    device: str, layout: Layout, seed: int, source: torch.dtype, target: torch.dtype, kind: str
) -> None:
    x = layout.tensor(values(layout.num_elements, source, kind, seed, device))
    result = cast(x, layout.stride, target)
    assert strides_matter(x.shape, result.stride()) == strides_matter(x.shape, layout.stride)
    limit = torch.finfo(target).max
    expected = x.to(target)
    expected = torch.where(x.isfinite() & expected.isinf(), expected.sign() * limit, expected)
    assert same(result, expected)
    assert torch.equal(result.isfinite(), x.isfinite())


def test_a_cast_to_the_same_type_is_a_copy() -> None:
    x = torch.randn(3, 4)
    assert cast(x, x.stride(), x.dtype).data_ptr() != x.data_ptr()


def test_no_cast_between_families() -> None:
    with pytest.raises(TypeError, match=r"no cast from torch\.float32 to torch\.int8"):
        cast(torch.zeros(2), (1,), torch.int8)


ELEMENTS = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@on_devices
@given(data=st.data(), layout=layouts(min_dims=1), dtype=st.sampled_from(ELEMENTS), seed=SEEDS)
def test_a_slice_is_narrow_by_itself(device: str, data: st.DataObject, layout: Layout, dtype: torch.dtype, seed: int) -> None:
    flat = torch.randint(0, 2 if dtype == torch.bool else 100, (layout.num_elements,), generator=torch.Generator().manual_seed(seed))
    x = layout.tensor(flat.to(dtype).to(device))
    dim = data.draw(st.integers(0, x.dim() - 1))
    start = data.draw(st.integers(0, x.shape[dim]))
    length = data.draw(st.integers(0, x.shape[dim] - start))
    result = pack_slice(x, dim - x.dim() if seed % 2 else dim, start, length)
    assert torch.equal(result, x.narrow(dim, start, length))
    assert is_dense(tuple(result.shape), result.stride()) and result.untyped_storage().nbytes() == result.numel() * result.element_size()
    if not layout.has_gaps and result.numel():
        assert strides_matter(result.shape, result.stride()) == strides_matter(result.shape, dense_stride(result.shape, layout.stride))


@on_devices
@given(data=st.data(), layout=layouts(min_dims=1, min_side=1), dtype=st.sampled_from(ELEMENTS), seed=SEEDS)
def test_maps_are_gathered_and_put_back(device: str, data: st.DataObject, layout: Layout, dtype: torch.dtype, seed: int) -> None:
    flat = torch.randint(0, 2 if dtype == torch.bool else 100, (layout.num_elements,), generator=torch.Generator().manual_seed(seed))
    x = layout.tensor(flat.to(dtype).to(device))
    dim = data.draw(st.integers(0, x.dim() - 1))
    chosen = data.draw(st.lists(st.integers(0, x.shape[dim] - 1), unique=True))
    index = torch.tensor(chosen, dtype=torch.int64, device=device)
    part = gather_maps(x, index, dim)
    assert torch.equal(part, x.index_select(dim, index)) and is_dense(tuple(part.shape), part.stride())
    base = torch.zeros_like(x)
    result = scatter_maps(base, part, index, dim)
    assert torch.equal(result, base.index_copy(dim, index, part)) and is_dense(tuple(result.shape), result.stride())
    assert torch.equal(scatter_maps(x, part, index, dim), x)
    other_layout = part.contiguous()[..., :]
    assert torch.equal(scatter_maps(base, other_layout, index, dim), result)


@on_devices
@pytest.mark.parametrize("shape", [(6, 5, 40), (3, 64, 7, 7), (4, 33, 130), (2, 3, 4099)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_of_every_alignment(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype).to(device)
    index = torch.arange(0, shape[1], 2, device=device)
    for dim in range(1, len(shape)):
        for start in (0, 1, 2):
            assert torch.equal(pack_slice(x, dim, start, shape[dim] - start - 1), x.narrow(dim, start, shape[dim] - start - 1))
    part = gather_maps(x, index, 1)
    assert torch.equal(part, x[:, ::2]) and torch.equal(scatter_maps(torch.zeros_like(x), part, index, 1)[:, ::2], part)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: pack_slice(x, 3, 0, 1), IndexError, "dim 3 of a tensor with 2 dimensions"),
        (lambda x: pack_slice(x, 1, 2, 3), ValueError, "start 2 and length 3 are not within dimension 1 of size 4"),
        (lambda x: gather_maps(x, torch.zeros(2), 0), TypeError, "index must be int64, got torch.float32"),
        (lambda x: gather_maps(x, torch.zeros(2, 2, dtype=torch.int64), 0), ValueError, "index must have one dimension, got 2"),
        (lambda x: scatter_maps(x, x.double(), torch.arange(3), 0), TypeError, "part is torch.float64 and base is torch.float32"),
        (lambda x: scatter_maps(x, x, torch.arange(2), 0), ValueError, r"part of size \(3, 4\) does not have the 2 maps along dimension 0"),
        (lambda x: pack_bits(x, (4, 1)), TypeError, "pack_bits takes bool, got torch.float32"),
        (lambda x: pack_bits(x > 0, (4, 2)), ValueError, r"stride \(4, 2\) leaves gaps or overlaps for size \(3, 4\)"),
        (lambda x: pack_bits(x > 0, (0, 1)), ValueError, r"stride \(0, 1\) leaves gaps or overlaps"),
        (lambda x: pack_bits(x > 0, (1,)), ValueError, r"stride \(1,\) has 1 entries for the 2 dimensions"),
        (lambda x: unpack_bits(torch.zeros(3, dtype=torch.uint8), (3, 4), (4, 1)), ValueError, "12 bits are 2 contiguous bytes of uint8"),
    ],
)
def test_what_is_refused_and_why(call: Callable[[torch.Tensor], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call(torch.zeros(3, 4))


def test_strides_of_single_rows_say_nothing() -> None:
    x = torch.arange(6.0).as_strided((2, 1, 3), (3, 77, 1))
    line = memory_order(x, (3, 5, 1))
    assert line.data_ptr() == x.data_ptr() and line.tolist() == [0, 1, 2, 3, 4, 5]


def test_packed_bytes() -> None:
    assert [packed_bytes(num) for num in (0, 1, 8, 9)] == [0, 1, 1, 2]
