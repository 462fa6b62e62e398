"""How far some gradients are from others, without ever holding two full sets of them.

Formula: the count sketch of a gradient g, S(g)[j] = sum of s_i g_i over all i that leave the remainder j when divided by `SIZE`, with signs
s_i drawn once. S is linear, and |S(a) - S(b)|^2 is |a - b|^2 on average, with a relative standard deviation of at most sqrt(2 / SIZE), 4 %:
so each gradient is sketched as soon as it exists and may go. Source: Charikar, Chen, Farach-Colton 2002.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SIZE = 1024
BLOCK = 1 << 19  # elements that are sketched at once: temporaries stay within a few MiB


@dataclass(frozen=True, slots=True)
class Sketch:
    """``sums``: float32, shape ``(SIZE,)``; ``norm_squared``: float64, of the gradient itself. Both on its device."""

    sums: Tensor
    norm_squared: Tensor


def sketch(gradient: Tensor) -> Sketch:
    """The sketch of a gradient of floating point or complex numbers, whatever its layout."""
    values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    line = values.detach().reshape(-1)
    sums = torch.zeros(SIZE, device=line.device)
    norm_squared = torch.zeros((), dtype=torch.float64, device=line.device)
    for number, first in enumerate(range(0, line.numel(), BLOCK)):
        block = line[first : first + BLOCK].float()
        norm_squared += block.square().sum(dtype=torch.float64)
        if block.numel() % SIZE:
            block = torch.nn.functional.pad(block, (0, -block.numel() % SIZE))
        signed = block * _signs(line.device)[: block.numel()]
        sums.add_(signed.view(-1, SIZE).sum(0), alpha=_sign_of_block(number))
    return Sketch(sums, norm_squared)


def sketches(gradients: Iterable[object]) -> list[Sketch]:
    """Those of all tensors of floating point or complex numbers, in order."""
    return [sketch(one) for one in gradients if isinstance(one, Tensor) and (one.is_floating_point() or one.is_complex())]


def relative_error(found: Sequence[Sketch], exact: Sequence[Sketch]) -> float:
    """The norm of the difference of all gradients over that of the exact ones; waits for the device. NaN if one is not finite, 0 if all
    are zero."""
    if not exact:
        return 0.0
    differences = torch.stack([(one.sums - other.sums).double().square().sum() for one, other in zip(found, exact, strict=True)])
    norms = torch.stack([one.norm_squared for one in exact])
    difference, norm = float(differences.sum()), float(norms.sum())
    if not (math.isfinite(difference) and math.isfinite(norm)):
        return math.nan
    return math.sqrt(difference / norm) if norm else (0.0 if not difference else math.inf)


@functools.lru_cache(maxsize=16)
def _signs(device: torch.device) -> Tensor:
    """Of one block, the same on every device: int8, shape ``(BLOCK,)``."""
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randint(0, 2, (BLOCK,), dtype=torch.int8, generator=generator) - 1).to(device)


@functools.lru_cache(maxsize=4096)
def _sign_of_block(number: int) -> int:
    return random.Random(number).choice((-1, 1))
