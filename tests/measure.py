"""What a training step really does: peak of allocated bytes (on the CPU from the profiler's events, on CUDA from the allocator's counters)
and snapshots to compare.

Nothing here knows dyngran: this is the independent truth that predictions and plans are judged by.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors`` (tied weights and views count once)."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def held_tensors(module: nn.Module, inputs: Iterable[Tensor], optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    """What the caller holds before a step: parameters, buffers, inputs, gradients that exist already, optimizer state."""
    held = [*module.parameters(), *module.buffers(), *inputs]
    held += [p.grad for p in module.parameters() if p.grad is not None]
    if optimizer is not None:
        held += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return held


def event_peak_bytes(step: Callable[[], object]) -> int:
    """Highest sum of allocation events while ``step`` runs, above what was allocated before it.

    The garbage collector waits: cycles of an earlier test, freed in the middle of the step, would count as the step's.
    """
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
    finally:
        gc.enable()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    allocations = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    assert allocations, "the profiler recorded no allocation"
    now = peak = 0
    for _, num_bytes in allocations:
        now += num_bytes
        peak = max(peak, now)
    return peak


def measured_peak(step: Callable[[], object], held: Iterable[Tensor]) -> int:
    """Peak bytes of one step: the storages in ``held``, which exist before it, plus what it allocates on top.

    On CUDA it is all that the process has allocated there at the peak, ``held`` or not, as `torch.cuda.max_memory_allocated` counts it.
    """
    held = list(held)
    if any(t.is_cuda for t in held):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    static = storage_bytes(held)
    return static + event_peak_bytes(step)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One step's results: loss, gradients and buffers by name, and the state of the random generator after it."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    rng_state: Tensor


def snapshot(module: nn.Module, loss: Tensor) -> Snapshot:
    """Copies on the CPU: a card's memory is what is measured there."""
    return Snapshot(
        loss=copied(loss.detach()),
        gradients={name: None if p.grad is None else copied(p.grad) for name, p in module.named_parameters()},
        buffers={name: copied(b) for name, b in module.named_buffers()},
        rng_state=torch.cuda.get_rng_state() if loss.is_cuda else torch.get_rng_state(),
    )


def copied(tensor: Tensor) -> Tensor:
    return tensor.clone().cpu()


def forward_backward(step: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
    """One forward and one backward of a module that returns its loss. The returned loss holds no graph."""
    loss = step(*inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def differences(want: Snapshot, got: Snapshot) -> list[str]:
    """Names of everything that is not bit for bit equal; empty if the steps agree."""
    bad = [] if torch.equal(want.loss, got.loss) else [f"loss {got.loss.item()} instead of {want.loss.item()}"]
    for kind, left, right in (("gradient", want.gradients, got.gradients), ("buffer", want.buffers, got.buffers)):
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            other = right[name]
            if not (tensor is other if tensor is None or other is None else torch.equal(tensor, other)):
                bad.append(f"{kind} of {name}")
    if not torch.equal(want.rng_state, got.rng_state):
        bad.append("state of the random generator")
    return bad
