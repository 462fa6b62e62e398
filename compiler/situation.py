"""What tells two compilations of one graph apart: which gradients exist already, and how large its symbolic sizes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Situation:
    """Bytes of gradients that exist when forward starts, and the values of the graph's symbolic sizes."""

    gradient_bytes: int
    sizes: tuple[int, ...]

    def covers(self, other: Situation) -> bool:
        """A plan made for ``self`` keeps its budget in ``other`` too: no more gradients exist there, and no size is larger.

        A step without gradients has a plan of its own, which may be faster.
        """
        is_alike = bool(self.gradient_bytes) is bool(other.gradient_bytes) and self.gradient_bytes >= other.gradient_bytes
        return is_alike and all(a >= b for a, b in zip(self.sizes, other.sizes, strict=True))


def gradients_to_come(inputs: Sequence[Any]) -> dict[int, int]:
    """Bytes of the gradient of each trainable leaf, by its position; of a leaf whose size is symbolic, as large as it is in this call."""
    leaves = {place: item for place, item in enumerate(inputs) if isinstance(item, torch.Tensor) and item.is_leaf and item.requires_grad}
    return {place: int(leaf.numel()) * leaf.element_size() for place, leaf in leaves.items()}


def existing_gradient_bytes(to_come: Mapping[int, int], args: Sequence[Any]) -> int:
    """Bytes of those that exist. At a trainable leaf's position another call may give a tensor that was computed, which keeps none."""
    return sum([size for place, size in to_come.items() if args[place].is_leaf and args[place].grad is not None])
