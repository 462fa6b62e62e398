"""Real inputs for measuring an operator: the strides of the graph, numbers without surprises, indices that are in range.

Floating point tensors hold uniform numbers in [0.1, 1): no NaN from logarithms or roots and no denormals, which are slow on the CPU.
Expanded dimensions stay expanded. The generator is our own: the user's random stream is not touched by filling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dyngran.passes.costs import base_name
from dyngran.passes.signature import TensorSpec

_BLOCK = 1 << 14  # elements drawn at random; longer buffers repeat them


class InputPool:
    """Buffers that are used again from one measured operator to the next: fresh pages cost more than many operators do."""

    def __init__(self, device: torch.device, *, limit_bytes: int | None) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._generator = torch.Generator(device=device).manual_seed(0)
        self._free: dict[tuple[torch.dtype, int, int], list[torch.Tensor]] = {}
        self._used: list[tuple[tuple[torch.dtype, int, int], torch.Tensor]] = []
        self._held_bytes = 0

    def arguments(
        self, target: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Real arguments for concrete ones (`signature.concrete`). Those of the call before may be overwritten."""
        for key, buffer in self._used:
            self._free.setdefault(key, []).append(buffer)
        self._used.clear()
        bound = index_bound(target, args)
        real_args = tuple(self._real(value, bound, position) for position, value in enumerate(args))
        return real_args, {name: self._real(value, bound, -1) for name, value in kwargs.items()}

    def trim(self, needed_bytes: int) -> None:
        """Let the buffers go if ``needed_bytes`` more would pass the limit."""
        if self._limit_bytes is not None and self._held_bytes + needed_bytes > self._limit_bytes:
            self.clear()

    def keep_used(self) -> None:
        """Let the buffers go that the last call's arguments leave free: room for a workspace that nobody knows yet."""
        self._free.clear()
        self._held_bytes = sum(num_elements * dtype.itemsize for (dtype, num_elements, _), _ in self._used)

    def clear(self) -> None:
        self._free.clear()
        self._used.clear()
        self._held_bytes = 0

    def _real(self, value: object, bound: Callable[[int, int], int], position: int, item: int = 0) -> Any:
        if isinstance(value, TensorSpec):
            return self._tensor(value, bound(position, item))
        if isinstance(value, (tuple, list)):
            return [self._real(part, bound, position, index) for index, part in enumerate(value)]
        return value

    def _tensor(self, spec: TensorSpec, bound: int) -> torch.Tensor:
        is_index = spec.dtype in (torch.int64, torch.int32) and bound > 1
        key = (spec.dtype, max(spec.num_stored, 1), bound if is_index else 0)
        ready = self._free.get(key)
        buffer = ready.pop() if ready else self._fill(key)
        self._used.append((key, buffer))
        real = buffer.as_strided(spec.shape, spec.stride)
        if spec.is_conj:
            real = real.conj()
        return torch.ops.aten._neg_view.default(real) if spec.is_neg else real

    def _fill(self, key: tuple[torch.dtype, int, int]) -> torch.Tensor:
        dtype, num_elements, bound = key
        buffer = torch.empty(num_elements, dtype=dtype, device=self._device)
        self._held_bytes += num_elements * dtype.itemsize
        head = buffer[: min(_BLOCK, num_elements)]
        if dtype.is_complex:
            torch.view_as_real(head).uniform_(0.1, 1.0, generator=self._generator)
        elif dtype.is_floating_point and dtype.itemsize >= 2:
            head.uniform_(0.1, 1.0, generator=self._generator)
        elif dtype.is_floating_point:
            head.copy_(torch.empty(len(head), device=self._device).uniform_(0.1, 1.0, generator=self._generator))
        elif dtype is torch.bool:
            head.random_(0, 2, generator=self._generator)
        elif bound:
            head.random_(0, bound, generator=self._generator)
        else:
            head.zero_()
        filled = len(head)
        while filled < num_elements:
            step = min(filled, num_elements - filled)
            buffer[filled : filled + step].copy_(buffer[:step])
            filled += step
        return buffer


def index_bound(target: torch._ops.OpOverload, args: tuple[object, ...]) -> Callable[[int, int], int]:
    """For an argument's position (and its place in a list): the bound of the indices it may hold; 1 (only zeros) where nothing is known."""
    name = base_name(target)

    def shape(position: int) -> tuple[int, ...]:
        value = args[position] if position < len(args) else None
        return value.shape if isinstance(value, TensorSpec) else ()

    def number(position: int) -> int:
        value = args[position] if position < len(args) else None
        return value if isinstance(value, int) else 0

    def bound(position: int, item: int) -> int:
        if name == "embedding" and position == 1:
            return _size(shape(0), 0)
        if name == "embedding_dense_backward" and position == 1:
            return max(number(2), 1)
        if name in ("gather", "index_select", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy") and position == 2:
            return _size(shape(0), number(1))
        if name in ("index", "index_put", "_unsafe_index", "_unsafe_index_put") and position == 1:
            return _size(shape(0), item)
        if name == "nll_loss_forward" and position == 1:
            return _size(shape(0), -1)
        if name == "nll_loss_backward" and position == 2:
            return _size(shape(1), -1)
        if name == "max_pool2d_with_indices_backward" and position == 7:
            return _size(shape(1), -1) * _size(shape(1), -2)
        return 1

    return bound


def result_strides(result: object) -> tuple[tuple[int, ...], ...]:
    """Strides in elements of every tensor in a result, in order; a tensor without storage is left out."""
    return tuple(tensor.stride() for tensor in _stored(result))


def _stored(result: object) -> list[torch.Tensor]:
    """Every tensor with a storage, in order."""
    if isinstance(result, torch.Tensor):
        return [result] if result.layout is torch.strided else []
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in _stored(item)]
    return []


def new_bytes(result: object, arguments: object) -> tuple[int, ...]:
    """Bytes that each result tensor allocated: 0 where it shares storage with an argument or an earlier result."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in _stored(_flatten(arguments)) if tensor.untyped_storage().nbytes()}
    sizes = []
    for tensor in _stored(result):
        storage = tensor.untyped_storage()
        sizes.append(0 if storage.data_ptr() in seen else storage.nbytes())
        if storage.nbytes():
            seen.add(storage.data_ptr())
    return tuple(sizes)


def _flatten(arguments: object) -> list[object]:
    if isinstance(arguments, dict):
        return _flatten(list(arguments.values()))
    if isinstance(arguments, (tuple, list)):
        return [leaf for item in arguments for leaf in _flatten(item)]
    return [arguments]


def _size(shape: tuple[int, ...], dimension: int) -> int:
    if not shape or not -len(shape) <= dimension < len(shape):
        return 1
    return max(shape[dimension], 1)
