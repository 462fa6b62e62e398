"""What the tests of `dyngran.kernels` are given: tensors of every type, layout and kind of values, and the devices that there are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

DEVICES = ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 7, 8, 9, 127, 128, 129, 1023, 1024, 1025, 4111)  # ragged tails of words, groups and blocks
KINDS = ("normal", "magnitudes", "constant", "zeros", "tiny", "huge", "special")


@dataclass(frozen=True)
class Layout:
    """A shape, the order of its dimensions in memory, and whether a tensor of it has gaps."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    has_gaps: bool

    @property
    def stride(self) -> tuple[int, ...]:
        """Of the dense tensor with this order."""
        stride, step = [0] * len(self.shape), 1
        for dimension in reversed(self.order):
            stride[dimension], step = step, step * max(1, self.shape[dimension])
        return tuple(stride)

    def tensor(self, flat: Tensor) -> Tensor:
        """A tensor of this layout whose elements, in the order of `stride`, are ``flat``."""
        dense = flat.as_strided(self.shape, self.stride) if flat.numel() else flat.reshape(self.shape)
        if not self.has_gaps or not self.shape:
            return dense
        wide = flat.new_zeros((*self.shape[:-1], 2 * self.shape[-1]))
        wide[..., ::2] = dense
        return wide[..., ::2]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@st.composite
def layouts(draw: st.DrawFn, *, min_dims: int = 0, min_side: int = 0) -> Layout:
    shape = tuple(draw(st.lists(st.integers(min_side, 13), min_size=min_dims, max_size=4)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    return Layout(shape, order, draw(st.booleans()))


SEEDS = st.integers(0, 2**31)


def values(num_elements: int, dtype: torch.dtype, kind: str, seed: int, device: str = "cpu") -> Tensor:
    """One line of floats of a kind: ``magnitudes`` from denormal to huge, ``special`` with infinities and NaN among normal ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_elements, dtype=torch.float64, generator=generator)
    limits = torch.finfo(dtype)
    low, high = math.log2(limits.smallest_normal) - 12, math.log2(limits.max)
    if kind == "magnitudes":
        x = x.sign() * 2 ** (low + (high - low) * torch.rand(num_elements, dtype=torch.float64, generator=generator))
    elif kind == "constant":
        x = torch.full_like(x, 0.1 * (1 + seed % 97))
    elif kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "tiny":
        x = x * limits.smallest_normal * 2.0**-8
    elif kind == "huge":
        x = x.sign() * limits.max
    elif kind == "special":
        where = torch.randint(0, 12, (num_elements,), generator=generator)
        for place, special in enumerate((math.inf, -math.inf, math.nan)):
            x[where == place] = special
    return x.clamp(-limits.max, limits.max).to(dtype).to(device) if kind != "special" else x.to(dtype).to(device)


def same(left: Tensor, right: Tensor) -> bool:
    """Equal bit for bit, any NaN with any other."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.nan_to_num(12345.0), right.nan_to_num(12345.0))
        and torch.equal(left.isnan(), right.isnan())
    )


def strides_matter(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The strides of the dimensions that have one."""
    return [step for step, length in zip(stride, shape, strict=True) if length != 1]
