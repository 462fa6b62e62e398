"""Which tensor it was, for those who must neither keep it alive nor refer to it weakly: `torch.utils.swap_tensors` refuses such tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class TensorMark:
    """A tensor by its ``id()``, which is its own for as long as the memory that it had is alive: that is what is referred to weakly.

    Attributes: ``id``; ``num_bytes`` of that memory.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        reference: Any = StorageWeakRef  # not annotated
        self.id = id(tensor)
        storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
        self.num_bytes = 0 if storage is None else storage.nbytes()
        self._memory = None if storage is None else reference(storage)

    @property
    def memory(self) -> int | None:
        """The same number for all tensors that lie in one memory; None for what has none of its own."""
        return None if self._memory is None else int(self._memory.cdata)

    def is_alive(self) -> bool:
        """False also if the tensor was given other memory (``tensor.data = ...``), and for what has none of its own (sparse tensors)."""
        return self._memory is not None and not self._memory.expired()

    def is_of(self, tensor: object) -> bool:
        return id(tensor) == self.id and self.is_alive()
