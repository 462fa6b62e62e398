"""Layouts: which order the elements of a tensor have in memory, and tensors as one line in that order.

A layout is a tuple of strides. It is dense if the elements fill a piece of memory without gaps and none lies on another: the strides of a
permuted contiguous tensor, channels-last among them. The stride of a dimension of size 1 says nothing and may be any number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18
"""What a reference handles at once: its temporaries stay within a few MiB and in the processor's cache, whatever the size of the tensor."""


@functools.lru_cache(maxsize=4096)
def is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether ``stride`` is a dense layout for ``size``. Any layout of no elements is."""
    if 0 in size:
        return True
    expected = 1
    for step, length in sorted((step, length) for step, length in zip(stride, size, strict=True) if length != 1):
        if step != expected:
            return False
        expected *= length
    return True


def check_dense(size: Sequence[int], stride: Sequence[int]) -> None:
    """Raises ValueError, which names the strides, unless they are a dense layout for ``size``."""
    if len(size) != len(stride):
        raise ValueError(f"stride {tuple(stride)} has {len(stride)} entries for the {len(size)} dimensions of size {tuple(size)}")
    if not is_dense(tuple(size), tuple(stride)):
        raise ValueError(
            f"stride {tuple(stride)} leaves gaps or overlaps for size {tuple(size)}: give the strides of a permuted contiguous tensor"
        )


def check_stored(stored: Tensor, num_bytes: int, content: str) -> None:
    """Raises ValueError unless ``stored`` is a line of ``num_bytes`` bytes, as ``content`` takes."""
    if stored.dtype != torch.uint8 or tuple(stored.shape) != (num_bytes,) or not stored.is_contiguous():
        raise ValueError(f"{content} are {num_bytes} contiguous bytes of uint8, got {stored.dtype} of shape {tuple(stored.shape)}")


def memory_order(x: Tensor, stride: Sequence[int]) -> Tensor:
    """The elements of ``x`` in the order of the layout ``stride``, contiguous, shape ``(x.numel(),)``.

    It shares the memory of ``x`` if ``x`` lies in that layout, else ``x`` is copied into it. Raises ValueError if the layout is not dense.
    """
    check_dense(x.shape, stride)
    if any(length != 1 and step != wanted for length, step, wanted in zip(x.shape, x.stride(), stride, strict=True)):
        x = x.new_empty_strided(x.shape, tuple(stride)).copy_(x)
    return x.as_strided((x.numel(),), (1,))


def new_in_layout(like: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A new tensor in the layout ``stride``, and its memory as one line. Raises ValueError if the layout is not dense."""
    check_dense(size, stride)
    result = like.new_empty_strided(tuple(size), tuple(stride), dtype=dtype)
    return result, result.as_strided((math.prod(size),), (1,))


def dense_stride(size: Sequence[int], order_of: Sequence[int]) -> tuple[int, ...]:
    """The dense layout for ``size`` whose dimensions follow each other in memory as under the strides ``order_of``."""
    stride, step = [0] * len(size), 1
    for dimension in reversed(slowest_first(order_of)):
        stride[dimension] = step
        step = step * size[dimension]
    return tuple(stride)


def slowest_first(stride: Sequence[int]) -> list[int]:
    """Dimensions by falling stride; of equal ones the first comes first, as in a contiguous tensor."""
    return sorted(range(len(stride)), key=lambda dimension: stride[dimension], reverse=True)


def chunks(num_elements: int, *, of: int = CHUNK_ELEMENTS) -> Iterator[slice]:
    """Consecutive slices of at most ``of`` elements that cover ``num_elements``."""
    for first in range(0, num_elements, of):
        yield slice(first, min(first + of, num_elements))
