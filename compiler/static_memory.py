"""What the caller holds over the whole step: parameters, buffers, inputs, gradients, optimizer state and everything else allocated."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dyngran.compiler import torch_private
from dyngran.compiler.budget import Budget
from dyngran.passes.devices import rounded_bytes
from dyngran.passes.problem import Kind
from dyngran.runtime.memory import device_memory
from dyngran.runtime.observe import any_step_has_run
from dyngran.runtime.optimizer_state import find_optimizers, predicted_state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticMemory:
    """Static bytes by kind at one moment, and where the optimizer's share comes from."""

    bytes_by_kind: dict[Kind, int]
    optimizer_source: str

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_kind.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Outputs of the step before that the caller holds while forward runs: now, and at most so far, which is what is planned for."""

    present_bytes: int = 0
    planned_bytes: int = 0


def input_kinds(inputs: Sequence[Any]) -> tuple[Kind, ...]:
    """Parameter, buffer or input, by what the graph was called with: module tensors that need no gradient count as buffers."""
    return tuple(
        Kind.PARAMETER if isinstance(value, torch.nn.Parameter) else Kind.BUFFER if isinstance(value, torch.nn.Buffer) else Kind.INPUT
        for value in inputs
    )


def resolve_budget(budget: Budget | None, device: torch.device) -> int | None:
    """The budget in bytes on this device; None sets no limit. Raises InvalidBudget if "auto" leaves nothing."""
    if budget is None:
        return None
    memory = device_memory(device)
    held = memory.reserved_bytes or 0
    return budget.resolve(device_total_bytes=memory.total_bytes, device_free_bytes=memory.free_bytes, held_by_us_bytes=held)


def profiling_limit(budget: Budget | None, static: StaticMemory, device: torch.device) -> int | None:
    """Bytes that profiling may allocate: what the budget leaves beside what is held already; without a budget half of the free device."""
    limit = resolve_budget(budget, device)
    return device_memory(device).free_bytes // 2 if limit is None else max(0, limit - static.total_bytes)


def measure_static(inputs: Sequence[Any], device: torch.device, *, carried_bytes: int = 0) -> StaticMemory:
    """What is held on ``device`` now, with the optimizer state that the first optimizer step will add, and without ``carried_bytes``, which
    are held now but not over the whole step.

    On CUDA everything the allocator handed out counts (`Kind.OTHER` is what none of the known tensors explains); on CPU, where no
    counter exists, the graph's inputs, their gradients and the state of optimizers that own its parameters.
    """
    seen: set[int] = set()
    totals: dict[Kind, int] = {}
    for value, kind in zip(inputs, input_kinds(inputs), strict=True):
        if isinstance(value, torch.Tensor):
            _count(totals, seen, value, kind, device)
    leaves = [value for value in inputs if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad]
    for leaf in leaves:
        if leaf.grad is not None:
            _count(totals, seen, leaf.grad, Kind.GRADIENT, device)
    present, future, source = _optimizer_bytes(leaves)
    totals[Kind.OPTIMIZER] = present + future
    memory = device_memory(device)
    unread_bytes = 0 if memory.held_bytes is None else max(0, memory.held_bytes - sum(totals.values()) + future)
    totals[Kind.OTHER] = memory.library_bytes + unread_bytes
    if (allocated := memory.allocated_bytes) is not None:
        totals[Kind.OTHER] = max(0, allocated - carried_bytes - sum(totals.values()) + future) + _future_workspace_bytes(device)
    return StaticMemory(bytes_by_kind={kind: size for kind, size in totals.items() if size}, optimizer_source=source)


def storage_bytes(tensors: Iterable[Any], device: torch.device) -> dict[int, int]:
    """Bytes of every storage on ``device`` that ``tensors`` lie in, by its identity as long as it lives."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            for storage in _storages(tensor, device):
                sizes[storage._cdata] = rounded_bytes(storage.nbytes(), device)
    return sizes


def _storages(tensor: torch.Tensor, device: torch.device) -> list[torch.UntypedStorage]:
    inner = torch_private.inner_tensors(tensor)
    return [one.untyped_storage() for one in inner if one.device.type == device.type and one.layout is torch.strided]


def _future_workspace_bytes(device: torch.device) -> int:
    """The matmul workspace that the backward thread's library handle will keep, if no step has run in this process yet.

    Source: https://docs.nvidia.com/cuda/cublas (CUBLAS_WORKSPACE_CONFIG) and torch's defaults: 32 MiB on Hopper, 8.125 MiB elsewhere.
    """
    if any_step_has_run():
        return 0
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    pairs = re.findall(r":(\d+):(\d+)", config)
    if pairs:
        return sum(int(size) * int(count) * 1024 for size, count in pairs)
    return 32 * 2**20 if torch.cuda.get_device_capability(device)[0] == 9 else 8320 * 1024


def _count(totals: dict[Kind, int], seen: set[int], tensor: torch.Tensor, kind: Kind, device: torch.device) -> None:
    for storage in _storages(tensor, device):
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            totals[kind] = totals.get(kind, 0) + rounded_bytes(storage.nbytes(), device)


def _optimizer_bytes(parameters: Iterable[torch.Tensor]) -> tuple[int, int, str]:
    present = future = 0
    sources = []
    for optimizer in find_optimizers(parameters):
        prediction = predicted_state_bytes(optimizer)
        present += prediction.present_bytes
        future += prediction.future_bytes
        sources.append(f"{type(optimizer).__name__}: {prediction.source}")
    return present, future, "; ".join(sources) or "no optimizer found: its state is not counted until it exists"
