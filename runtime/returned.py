"""Whether what a compiled forward returned is still held when its backward begins: seen from outside, by weak references."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch


class ReturnedOutputs:
    """Watches the tensors of the latest forward. A tensor that a view, an autograd graph or a variable refers to counts as held;
    a detached alias of its memory is not seen.

    Attributes:
        held_bytes: most that was still held at the beginning of a backward.
        dropped_bytes: least that was gone by then; 0 before the first backward.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self.dropped_bytes = 0
        self._has_begun = False
        self._watched: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def watch(self, outputs: Iterable[object]) -> None:
        """Forward returned ``outputs``. Leaves are the caller's own tensors, and not watched."""
        tensors = [item for item in outputs if isinstance(item, torch.Tensor) and item.grad_fn is not None]
        self._watched = [(weakref.ref(tensor), tensor.untyped_storage().nbytes()) for tensor in tensors]

    def begin_backward(self) -> None:
        """Their backward begins."""
        if not self._watched:
            return
        held = sum(size for tensor, size in self._watched if tensor() is not None)
        dropped = sum(size for _, size in self._watched) - held
        self.held_bytes = max(self.held_bytes, held)
        self.dropped_bytes = min(self.dropped_bytes, dropped) if self._has_begun else dropped
        self._has_begun = True
        self._watched = []
