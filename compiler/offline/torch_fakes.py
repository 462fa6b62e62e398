"""FakeTensors of a process that traces: real tensors made fake, and what Python does with them between graphs."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses import FakeTensor, FakeTensorMode

from dyngran.compiler.offline.target import user_place


def to_fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """The tensor without its data, for this trace: a model that the file makes once for all has met another before. Tensors on the meta
    device, where large models are made, are taken to be on the default device."""
    is_meta = tensor.device.type == "meta"
    if not isinstance(tensor, FakeTensor) and not is_meta:
        return mode.from_tensor(tensor, static_shapes=True)
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode and not is_meta:
        return tensor
    device = None if is_meta else tensor.device
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


@contextlib.contextmanager
def tests_denied(denied: list[str]) -> Iterator[None]:
    """Between graphs Python may test a tensor, as layer drop and checks for NaN do: without numbers it is false, and its place noted."""
    fakes: Any = FakeTensor
    ask = fakes.__bool__

    def answer(tensor: Any) -> bool:
        if TracingContext.try_get() is not None or tensor.constant is not None:
            return bool(ask(tensor))
        file, line = user_place([(frame.filename, frame.lineno) for frame in traceback.extract_stack()])
        denied.append(f"{Path(file).name}:{line}")
        return False

    fakes.__bool__ = torch.compiler.disable(answer)  # type: ignore[no-untyped-call]  # or Dynamo would trace it between graphs
    try:
        yield
    finally:
        del fakes.__bool__
