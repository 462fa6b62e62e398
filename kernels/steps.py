"""The number of the step, on each device: with the identity of a value it is all that stochastic rounding draws its randomness from.

A number on the device and not an argument, so that a captured CUDA graph draws anew at each replay, and a step that is run again draws
the same.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_steps: dict[torch.device, Tensor] = {}
_lock = threading.Lock()


def step_tensor(device: torch.device) -> Tensor:
    """The step of a device: int64, shape ``(1,)``, 0 at first, the same tensor for the life of the process. To set it, fill it.

    Whoever compiles a graph that rounds stochastically calls this beforehand: what is first called for while a CUDA graph is recorded
    would be set to 0 again by each replay. That raises RuntimeError.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    step = _steps.get(device)
    if step is not None:
        return step
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"a CUDA graph is being captured: call dyngran.kernels.steps.step_tensor({device!r}) before the capture")
    with _lock, torch.inference_mode(False), _disable_current_modes():
        return _steps.setdefault(device, torch.zeros(1, dtype=torch.int64, device=device))


def advance_step() -> None:
    """Add one to the step of every device, in its current stream and without waiting for it."""
    with torch.inference_mode(False), _disable_current_modes():
        for step in list(_steps.values()):
            step.add_(1)
