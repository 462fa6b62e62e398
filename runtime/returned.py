"""Whether what a compiled forward returned is held while its backward runs: seen from outside, by weak references to storages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeGuard

import torch
from torch.multiprocessing.reductions import StorageWeakRef

PLAIN = (torch.Tensor, torch.nn.Parameter)  # tensors with memory of their own; subclasses and sparse ones have none that could be watched
Watched = dict[int, tuple[StorageWeakRef, int]]  # storages by identity, and their bytes


class ReturnedOutputs:
    """Watches the storages that a forward makes and returns. What is alive when its backward has ended was held all the time.

    Attributes:
        held_bytes: most that was held through a backward.
        dropped_bytes: least that was gone at the end of one; 0 before the first.
    """

    def __init__(self, kinds: tuple[type, ...] = PLAIN) -> None:
        """``kinds``: types of tensors whose storages are watched."""
        self._kinds = kinds
        self.held_bytes = 0
        self.dropped_bytes = 0
        self._has_ended = False
        self._made: tuple[int, ...] | None = None  # positions of outputs that are not inputs, the same in every call
        self._open: list[Watched] = []
        self._latest: Watched = {}

    def watch(self, outputs: Sequence[object], inputs: Iterable[object]) -> None:
        """A forward returned ``outputs``; those that lie in the memory of ``inputs`` are the caller's own."""
        if self._made is None:
            own = {item.untyped_storage()._cdata for item in inputs if self._is_watched(item)}
            self._made = tuple(
                place for place, item in enumerate(outputs) if self._is_watched(item) and item.untyped_storage()._cdata not in own
            )
        storages = [item.untyped_storage() for place in self._made if self._is_watched(item := outputs[place])]
        found = {storage._cdata: storage for storage in storages}
        watched = {
            identity: (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]  # torch gives it no types
            for identity, storage in found.items()
        }
        self._open = [*self._open[-1:], watched]
        self._latest = watched

    def alive(self) -> dict[int, int]:
        """Bytes of each storage that the latest forward made and returned and that is still held, by its identity."""
        return {identity: size for identity, (storage, size) in self._latest.items() if not _is_gone(storage)}

    def _is_watched(self, item: object) -> TypeGuard[torch.Tensor]:
        return isinstance(item, torch.Tensor) and type(item) in self._kinds and item.layout is torch.strided

    def carried_bytes(self) -> int:
        """Of what the latest forward returned, what is still held although its backward has ended: it lives while the next forward runs."""
        return 0 if self._open else _held_bytes(self._latest)

    def end_backward(self) -> None:
        """A backward has ended. It tells something only if it is that of the one forward since the last."""
        latest, self._open = self._open, []
        if len(latest) != 1:
            return
        held = _held_bytes(latest[0])
        dropped = sum(size for _, size in latest[0].values()) - held
        self.held_bytes = max(self.held_bytes, held)
        self.dropped_bytes = min(self.dropped_bytes, dropped) if self._has_ended else dropped
        self._has_ended = True


def _held_bytes(watched: Watched) -> int:
    return sum(size for storage, size in watched.values() if not _is_gone(storage))


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]  # torch gives it no types
