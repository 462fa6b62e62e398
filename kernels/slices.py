"""A part of a tensor by itself, so that the rest can be freed: a range along one dimension, or some of its feature maps; and maps put back.

Formula, for a tensor that lies in memory as ``[outer, size of the dimension, inner]``:

    pack_slice      out[o, j, i] = x[o, start + j, i]
    gather_maps     out[o, j, i] = x[o, index[j], i]
    scatter_maps    out[o, m, i] = part[o, place[m], i] if m is in index, at place[m], else base[o, m, i]

All are copies of runs of neighbours, ``inner`` elements (for a range ``length * inner``), made in words as wide as the run, its distance
to the next and its address allow. What type the elements have makes no difference. A range of the slowest dimension is one run, and left
to the device's own copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dyngran.kernels.launch import configuration, kernel, launch, tl
from dyngran.kernels.layouts import dense_stride, is_dense, memory_order, slowest_first

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_UNIT_BYTES = 16  # the widest load of a thread


def pack_slice(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """``x.narrow(dim, start, length)`` as a new dense tensor whose dimensions follow each other in memory as those of ``x``.

    Raises IndexError if there is no such dimension, ValueError if the range is not within it.
    """
    dim = checked_dimension(x, dim)
    if start < 0 or length < 0 or start + length > x.shape[dim]:
        raise ValueError(f"start {start} and length {length} are not within dimension {dim} of size {x.shape[dim]}")
    size = resized(x.shape, dim, length)
    result = x.new_empty_strided(size, dense_stride(size, x.stride()))
    (launch_slice if x.is_cuda else slice_reference)(x, dim, start, result)
    return result


def gather_maps(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """``x.index_select(dim, index)`` as a new dense tensor whose dimensions follow each other in memory as those of ``x``.

    ``index`` is int64, one-dimensional. On a CPU an index outside of the dimension raises IndexError or RuntimeError; on a card, which
    nobody waits for, it gives a map of zeros. Raises IndexError if there is no such dimension, TypeError or ValueError if ``index`` is
    not as described.
    """
    dim = checked_dimension(x, dim)
    check_index(index)
    size = resized(x.shape, dim, index.shape[0])
    result = x.new_empty_strided(size, dense_stride(size, x.stride()))
    (launch_gather if x.is_cuda else gather_reference)(x, index, dim, result)
    return result


def scatter_maps(base: Tensor, part: Tensor, index: Tensor, dim: int) -> Tensor:
    """``base.index_copy(dim, index, part)`` as a new dense tensor whose dimensions follow each other in memory as those of ``base``.

    No index may be there twice: which of its maps wins is not defined. Raises as `gather_maps`, except that on a card an index outside of
    the dimension is a device-side assertion; TypeError if ``part`` has another type than ``base``, ValueError if its size does not fit.
    """
    dim = checked_dimension(base, dim)
    check_index(index)
    if part.dtype != base.dtype:
        raise TypeError(f"part is {part.dtype} and base is {base.dtype}")
    if tuple(part.shape) != resized(base.shape, dim, index.shape[0]):
        raise ValueError(
            f"part of size {tuple(part.shape)} does not have the {index.shape[0]} maps along dimension {dim} of base, {tuple(base.shape)}"
        )
    result = base.new_empty_strided(base.shape, dense_stride(base.shape, base.stride()))
    (launch_scatter if base.is_cuda else scatter_reference)(base, part, index, dim, result)
    return result


def checked_dimension(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"dim {dim} of a tensor with {x.dim()} dimensions")
    return dim % x.dim()


def check_index(index: Tensor) -> None:
    if index.dtype != torch.int64:
        raise TypeError(f"index must be int64, got {index.dtype}")
    if index.dim() != 1:
        raise ValueError(f"index must have one dimension, got {index.dim()}")


def resized(size: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    """The size with another length of one dimension."""
    return (*size[:dim], length, *size[dim + 1 :])


def slice_reference(x: Tensor, dim: int, start: int, result: Tensor) -> None:
    """Into ``result``, which has the size of the slice. Temporaries: none."""
    result.copy_(x.narrow(dim, start, result.shape[dim]))


def gather_reference(x: Tensor, index: Tensor, dim: int, result: Tensor) -> None:
    """Into ``result``, which has the size of the maps. Temporaries: none."""
    torch.index_select(x, dim, index, out=result)


def scatter_reference(base: Tensor, part: Tensor, index: Tensor, dim: int, result: Tensor) -> None:
    """Into ``result``, which has the size of ``base``. Temporaries: none."""
    result.copy_(base).index_copy_(dim, index, part)


@dataclass(frozen=True, slots=True)
class Runs:
    """A dense tensor as ``[outer, length, inner]`` around one of its dimensions; ``inner`` in bytes."""

    outer: int
    length: int
    inner_bytes: int

    @classmethod
    def of(cls, x: Tensor, dim: int) -> Runs:
        order = slowest_first(x.stride())
        place = order.index(dim)
        outer = math.prod(x.shape[other] for other in order[:place])
        inner = math.prod(x.shape[other] for other in order[place + 1 :])
        return cls(outer, x.shape[dim], inner * x.element_size())


@kernel
def slice_kernel(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    num_rows: tl.tensor,
    run_units: tl.tensor,
    stride_units: tl.tensor,
    start_units: tl.tensor,
    num_column_blocks: tl.tensor,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Row ``r`` of the target is the run that begins ``start`` after ``r * stride``. The factor UNIT tells Triton how far it can
    vectorize."""
    first_row = (tl.program_id(0) // num_column_blocks).to(tl.int64) * ROWS
    first_column = (tl.program_id(0) % num_column_blocks).to(tl.int64) * COLUMNS
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    run, stride, start = run_units.to(tl.int64) * UNIT, stride_units.to(tl.int64) * UNIT, start_units.to(tl.int64) * UNIT
    num_rows_left = tl.minimum(num_rows - first_row, ROWS).to(tl.int32)
    num_columns_left = tl.minimum(run - first_column, COLUMNS).to(tl.int32)
    source = source_ptr + first_row * stride + start + first_column + (row * stride + column)
    target = target_ptr + first_row * run + first_column + (row * run + column)
    if (num_rows_left == ROWS) & (num_columns_left == COLUMNS):
        tl.store(target, tl.load(source))
    else:
        inside = (row < num_rows_left) & (column < num_columns_left)
        tl.store(target, tl.load(source, mask=inside), mask=inside)


@kernel
def gather_kernel(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    index_ptr: tl.tensor,
    num_maps: tl.tensor,
    num_chosen: tl.tensor,
    run_units: tl.tensor,
    num_column_blocks: tl.tensor,
    num_row_blocks: tl.tensor,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """A program copies ROWS of the chosen maps at one outer index, which needs no division for each row."""
    block = tl.program_id(0) // num_column_blocks
    column = (tl.program_id(0) % num_column_blocks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    outer = (block // num_row_blocks).to(tl.int64)
    row = (block % num_row_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    run = run_units.to(tl.int64) * UNIT
    chosen = tl.load(index_ptr + row, mask=row < num_chosen, other=0)
    inside = (row < num_chosen)[:, None] & (column < run)[None, :]
    readable = inside & ((chosen >= 0) & (chosen < num_maps))[:, None]
    words = tl.load(source_ptr + ((outer * num_maps + chosen) * run)[:, None] + column[None, :], mask=readable, other=0)
    tl.store(target_ptr + ((outer * num_chosen + row) * run)[:, None] + column[None, :], words, mask=inside)


@kernel
def scatter_kernel(
    base_ptr: tl.tensor,
    part_ptr: tl.tensor,
    place_ptr: tl.tensor,
    target_ptr: tl.tensor,
    num_maps: tl.tensor,
    num_chosen: tl.tensor,
    run_units: tl.tensor,
    num_column_blocks: tl.tensor,
    num_row_blocks: tl.tensor,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """As `gather_kernel`, over all maps of the base: from the part where ``place`` is not negative, with one load for both."""
    block = tl.program_id(0) // num_column_blocks
    column = (tl.program_id(0) % num_column_blocks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    outer = (block // num_row_blocks).to(tl.int64)
    row = (block % num_row_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    run = run_units.to(tl.int64) * UNIT
    place = tl.load(place_ptr + row, mask=row < num_maps, other=-1)
    inside = (row < num_maps)[:, None] & (column < run)[None, :]
    here = (outer * num_maps + row) * run
    source = tl.where(place >= 0, part_ptr + (outer * num_chosen + place) * run, base_ptr + here)
    source = tl.multiple_of(source, UNIT * (base_ptr.dtype.element_ty.primitive_bitwidth // 8))  # which Triton forgets at the choice
    words = tl.load(source[:, None] + column[None, :], mask=inside, other=0)
    tl.store(target_ptr + here[:, None] + column[None, :], words, mask=inside)


def launch_slice(x: Tensor, dim: int, start: int, result: Tensor) -> None:
    """As `slice_reference`, on a card. Temporaries: none."""
    runs = Runs.of(x, dim)
    if runs.outer <= 1 or not is_dense(tuple(x.shape), x.stride()):
        slice_reference(x, dim, start, result)
    elif result.numel():
        distances_bytes = [length * runs.inner_bytes for length in (result.shape[dim], runs.length, start)]
        words = Words.of(distances_bytes, (x, result))
        run, stride, begin = (words.units(distance) for distance in distances_bytes)
        tile = Tile.of("slice", x.device, words, run * words.unit, runs.outer)
        arguments = (words.view(x), words.view(result), runs.outer, run, stride, begin, tile.num_column_blocks)
        _launch_tiles(slice_kernel, tile, 1, arguments, words)


def launch_gather(x: Tensor, index: Tensor, dim: int, result: Tensor) -> None:
    """As `gather_reference`, on a card. Temporaries: a dense copy of ``x`` if it is not dense."""
    if result.numel():
        x = in_dense_layout(x)
        runs = Runs.of(x, dim)
        words = Words.of((runs.inner_bytes,), (x, result))
        run = words.units(runs.inner_bytes)
        tile = Tile.of("gather", x.device, words, run * words.unit, len(index))
        sizes = (runs.length, len(index), run, tile.num_column_blocks, tile.num_row_blocks)
        _launch_tiles(gather_kernel, tile, runs.outer, (words.view(x), words.view(result), index.contiguous(), *sizes), words)


def launch_scatter(base: Tensor, part: Tensor, index: Tensor, dim: int, result: Tensor) -> None:
    """As `scatter_reference`, on a card. Temporaries: 8 bytes per map of ``base`` and of ``part``, and a dense copy of either if it does
    not lie as the result does."""
    if result.numel():
        runs = Runs.of(result, dim)
        base = memory_order(base, result.stride())
        part = memory_order(part, dense_stride(part.shape, result.stride()))
        place = torch.full((runs.length,), -1, dtype=torch.int64, device=index.device)
        place.scatter_(0, index, torch.arange(len(index), device=index.device))
        words = Words.of((runs.inner_bytes,), (base, part, result))
        run = words.units(runs.inner_bytes)
        tile = Tile.of("scatter", base.device, words, run * words.unit, runs.length)
        sizes = (runs.length, len(index), run, tile.num_column_blocks, tile.num_row_blocks)
        arguments = (words.view(base), words.view(part), place, words.view(result), *sizes)
        _launch_tiles(scatter_kernel, tile, runs.outer, arguments, words)


def in_dense_layout(x: Tensor) -> Tensor:
    """``x``, or if it is not dense a dense copy whose dimensions follow each other in memory as its own."""
    if is_dense(tuple(x.shape), x.stride()):
        return x
    return x.new_empty_strided(x.shape, dense_stride(x.shape, x.stride())).copy_(x)


@dataclass(frozen=True, slots=True)
class Words:
    """In what a run is copied: words of ``word_bytes``, of which ``unit`` begin at an address that is divisible by their size."""

    word_bytes: int
    unit: int

    @classmethod
    def of(cls, distances_bytes: Sequence[int], tensors: Sequence[Tensor]) -> Words:
        """The widest that every distance and the address of every tensor allow."""
        offsets = (tensor.storage_offset() * tensor.element_size() for tensor in tensors)
        addresses = (tensor.data_ptr() for tensor in tensors)
        unit_bytes = math.gcd(MAX_UNIT_BYTES, *distances_bytes, *offsets, *addresses)
        word_bytes = min(unit_bytes, max(WORDS))
        return cls(word_bytes, unit_bytes // word_bytes)

    def units(self, num_bytes: int) -> int:
        return num_bytes // (self.word_bytes * self.unit)

    def view(self, x: Tensor) -> Tensor:
        """The memory of a dense tensor as words, one line."""
        return x.as_strided((x.numel(),), (1,)).view(torch.uint8).view(WORDS[self.word_bytes])


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program copies: ``rows`` runs, ``columns`` words of each; and how many tiles cover the rows and the columns."""

    rows: int
    columns: int
    num_row_blocks: int
    num_column_blocks: int
    num_warps: int

    @classmethod
    def of(cls, family: str, device: torch.device, words: Words, run: int, num_rows: int) -> Tile:
        """As wide as a run, rounded up to a power of two, and as high as the configured ``block`` of bytes allows and there are rows."""
        chosen = configuration(f"{family}:{words.word_bytes}", device)
        num_words = max(1, chosen.block // words.word_bytes)
        columns = min(_power_of_two(run), num_words)
        rows = min(_power_of_two(num_rows), num_words // columns)
        return cls(rows, columns, -(-num_rows // rows), -(-run // columns), chosen.num_warps)


def _power_of_two(number: int) -> int:
    """The least that is not smaller."""
    return 1 << (number - 1).bit_length()


def _launch_tiles(function: Any, tile: Tile, num_outer: int, arguments: tuple[Any, ...], words: Words) -> None:
    num_programs = num_outer * tile.num_row_blocks * tile.num_column_blocks
    constants = {"UNIT": words.unit, "ROWS": tile.rows, "COLUMNS": tile.columns}
    launch(function, num_programs, arguments, on=arguments[0], num_warps=tile.num_warps, **constants)
