"""The storage formats as PyTorch operators ``torch.ops.dyngran.*``: functional, one result each, which never shares memory with an
argument. Those that wait for a copy say that they write what is copied into, and have no result.

`register` makes them known; importing anything of `dyngran.kernels` does not. They work on fake tensors with symbolic sizes, under make_fx,
torch.compile and its code generators, and in CUDA graphs: no implementation waits for the card or allocates except through torch. They have
no derivative, since dyngran writes them into graphs whose backward is there already; torch warns if one is asked for.

Arguments named ``stride`` say in which dense layout the elements follow each other. Inductor may choose other layouts for its own buffers,
so every operator asks it (``needs_exact_strides``) for the ones that the graph was traced with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dyngran.kernels.bits import pack_bits, packed_bytes, unpack_bits
from dyngran.kernels.casts import cast
from dyngran.kernels.groups import stored_bytes
from dyngran.kernels.host_copies import fetch, fetch_wait, offload, offload_wait
from dyngran.kernels.layouts import dense_stride
from dyngran.kernels.quantize import dequantize, quantize
from dyngran.kernels.signs import pack_sign, unpack_sign
from dyngran.kernels.slices import gather_maps, pack_slice, resized, scatter_maps

NAMESPACE = "dyngran"
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
ON_HOST = (*TAGS, torch.Tag.cudagraph_unsafe)  # host memory is new at each call: Inductor runs these between its CUDA graphs


@dataclass(frozen=True, slots=True)
class Operator:
    """``run`` is its implementation on a CPU and on a card, ``fake`` what it returns without computing it."""

    schema: str
    run: Callable[..., Tensor | None]
    fake: Callable[..., Tensor | None]
    tags: tuple[torch.Tag, ...] = TAGS

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


def _fake_packed(x: Tensor, *_: object) -> Tensor:
    return x.new_empty((packed_bytes(x.numel()),), dtype=torch.uint8)


def _fake_unpacked(stored: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    return stored.new_empty_strided(size, stride, dtype=torch.bool)


def _fake_unpacked_sign(stored: Tensor, size: Sequence[int], stride: Sequence[int], threshold: float, dtype: torch.dtype) -> Tensor:
    return stored.new_empty_strided(size, stride, dtype=dtype)


def _fake_quantized(x: Tensor, stride: Sequence[int], format: str, group: int, *_: object) -> Tensor:
    return x.new_empty((stored_bytes(format, x.numel(), group),), dtype=torch.uint8)


def _fake_dequantized(stored: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *_: object) -> Tensor:
    return stored.new_empty_strided(size, stride, dtype=dtype)


def _fake_cast(x: Tensor, stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return x.new_empty_strided(x.shape, stride, dtype=dtype)


def _fake_slice(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    size = resized(x.shape, dim % x.dim(), length)
    return x.new_empty_strided(size, dense_stride(size, x.stride()))


def _fake_gathered(x: Tensor, index: Tensor, dim: int) -> Tensor:
    size = resized(x.shape, dim % x.dim(), index.shape[0])
    return x.new_empty_strided(size, dense_stride(size, x.stride()))


def _fake_scattered(base: Tensor, part: Tensor, index: Tensor, dim: int) -> Tensor:
    return base.new_empty_strided(base.shape, dense_stride(base.shape, base.stride()))


def _fake_offloaded(x: Tensor, stride: Sequence[int]) -> Tensor:
    return x.new_empty((x.numel(),), device="cpu")


def _fake_fetched(host: Tensor, size: Sequence[int], stride: Sequence[int], device: torch.device, after: Tensor | None = None) -> Tensor:
    return host.new_empty_strided(size, stride, device=device)


def _nothing(*_: object) -> None:
    """What an operator returns that is called for its effect."""


OPERATORS = (
    Operator("pack_bits(Tensor x, SymInt[] stride) -> Tensor", pack_bits, _fake_packed),
    Operator("unpack_bits(Tensor stored, SymInt[] size, SymInt[] stride) -> Tensor", unpack_bits, _fake_unpacked),
    Operator("pack_sign(Tensor x, SymInt[] stride, float threshold) -> Tensor", pack_sign, _fake_packed),
    Operator(
        "unpack_sign(Tensor stored, SymInt[] size, SymInt[] stride, float threshold, ScalarType dtype) -> Tensor",
        unpack_sign,
        _fake_unpacked_sign,
    ),
    Operator(
        "quantize(Tensor x, SymInt[] stride, str format, int group, bool stochastic, int value_id) -> Tensor", quantize, _fake_quantized
    ),
    Operator(
        "dequantize(Tensor stored, SymInt[] size, SymInt[] stride, ScalarType dtype, str format, int group) -> Tensor",
        dequantize,
        _fake_dequantized,
    ),
    Operator("cast(Tensor x, SymInt[] stride, ScalarType dtype) -> Tensor", cast, _fake_cast),
    Operator("pack_slice(Tensor x, int dim, SymInt start, SymInt length) -> Tensor", pack_slice, _fake_slice),
    Operator("gather_maps(Tensor x, Tensor index, int dim) -> Tensor", gather_maps, _fake_gathered),
    Operator("scatter_maps(Tensor base, Tensor part, Tensor index, int dim) -> Tensor", scatter_maps, _fake_scattered),
    Operator("offload(Tensor x, SymInt[] stride) -> Tensor", offload, _fake_offloaded, ON_HOST),
    Operator("offload_wait(Tensor(a!) host, Tensor x) -> ()", offload_wait, _nothing, ON_HOST),
    Operator(
        "fetch(Tensor host, SymInt[] size, SymInt[] stride, Device device, Tensor? after=None) -> Tensor", fetch, _fake_fetched, ON_HOST
    ),
    Operator("fetch_wait(Tensor(a!) x, Tensor? after=None) -> ()", fetch_wait, _nothing, ON_HOST),
)

_library: list[torch.library.Library] = []  # as long as it lives, so do the operators
_lock = threading.Lock()


def register() -> Any:
    """``torch.ops.dyngran``, with all operators defined; calling it again changes nothing."""
    with _lock:
        if not _library:
            library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch gives it no types
            for operator in OPERATORS:
                library.define(operator.schema, tags=operator.tags)
                run = torch.no_grad()(operator.run)  # else autograd would record what an implementation does inside
                for key in ("CPU", "CUDA"):
                    library.impl(operator.name, run, key)
                torch.library.register_fake(f"{NAMESPACE}::{operator.name}", operator.fake, lib=library)
            _library.append(library)
    return torch.ops.dyngran
