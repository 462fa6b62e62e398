"""Another batch or dtype than the target's own, where its function takes no argument for it."""

from __future__ import annotations

import torch

from dyngran.compiler import torch_private
from dyngran.compiler.offline.target import Target
from dyngran.passes.errors import TargetError


def with_batch(target: Target, batch: int) -> Target:
    """Every input and target whose first dimension is that of the first input gets another one."""
    first = next((t for t in torch_private.tensors_in((target.inputs, dict(target.keywords))) if t.dim()), None)
    if first is None:
        raise TargetError("--batch: the target has no input with a first dimension. Let its function take an argument named batch.")
    before = first.shape[0]
    return target.mapped(lambda t: _resized(t, batch) if t.dim() and t.shape[0] == before else t)


def _resized(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    is_last = tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    made = torch.empty(
        (batch, *tensor.shape[1:]),
        dtype=tensor.dtype,
        device=tensor.device,
        memory_format=torch.channels_last if is_last else torch.contiguous_format,
    )
    return made.requires_grad_(tensor.requires_grad)


def with_dtype(target: Target, dtype: torch.dtype) -> Target:
    """Parameters, buffers and inputs of floating dtypes get another one."""
    if target.module is not None:
        target.module.to(dtype)
    return target.mapped(lambda t: t.detach().to(dtype).requires_grad_(t.requires_grad) if t.is_floating_point() else t)
