"""Trains a workload under one set of dyngran's options and measures it without asking dyngran: peak bytes, step time, losses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from demo_models import Workload
from demo_progress import Ticker
from torch import Tensor, nn
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

import dyngran
from dyngran.errors import BudgetTooSmall

NUM_WARM = 2  # the first step compiles, the second sees the optimizer's state for the first time
NUM_PROFILED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run; ``step_us`` is the median of steady steps, ``static_bytes`` what is held between steps."""

    losses: tuple[float, ...]
    predicted_peak_bytes: int
    measured_peak_bytes: int
    static_bytes: int
    step_us: float
    num_recomputed: int
    explanation: str


class Training:
    """A fresh model with the same first weights and the same random stream every time."""

    def __init__(self, workload: Workload, device: torch.device, options: dict[str, Any]) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self._workload = workload
        self._device = device
        self.model: nn.Module = workload.make().to(device)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.compiled: Callable[..., Tensor] = torch.compile(self.model, backend="dyngran", options=options)
        dyngran.attach(self.model, self.optimizer)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        first, second = self._workload.batch(step)
        return first.to(self._device), second.to(self._device)

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self.compiled(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def static_bytes(self, batch: tuple[Tensor, Tensor]) -> int:
        """Distinct storages of parameters, buffers, optimizer state and the batch."""
        state = (t for values in self.optimizer.state.values() for t in values.values() if isinstance(t, Tensor))
        return storage_bytes([*self.model.parameters(), *self.model.buffers(), *state, *batch])


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def run(workload: Workload, *, device: torch.device, options: dict[str, Any], num_steps: int, ticker: Ticker) -> Run:
    """Train ``num_steps`` steps, then measure the peak of steady ones.

    Raises:
        BudgetTooSmall: at the first step.
    """
    training = Training(workload, device, options)
    losses, times_us = [], []
    for step in range(num_steps):
        batch = training.batch(step)
        if device.type == "cuda" and step == NUM_WARM:
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        losses.append(float(training.step(batch)))
        if step >= NUM_WARM:
            times_us.append((time.perf_counter() - began) * 1e6)
        ticker.advance()
    batch = training.batch(num_steps)
    static_bytes = training.static_bytes(batch)
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else static_bytes + _event_peak_bytes(training, batch)
    report = dyngran.explain(training.compiled)
    return Run(
        losses=tuple(losses),
        predicted_peak_bytes=report.predicted_peak_bytes,
        measured_peak_bytes=peak_bytes,
        static_bytes=static_bytes,
        step_us=statistics.median(times_us),
        num_recomputed=sum(plan.num_recomputed for plan in report.plans),
        explanation=str(report),
    )


def least_peak_bytes(workload: Workload, *, device: torch.device, options: dict[str, Any]) -> int:
    """The floor: what `BudgetTooSmall` says of a budget of one byte."""
    training = Training(workload, device, {**options, "budget": 1})
    try:
        training.compiled(*training.batch(0))
    except BudgetTooSmall as error:
        return error.least_peak_bytes
    raise SystemExit("dyngran accepted a budget of one byte: this is a fault of dyngran.")


def _event_peak_bytes(training: Training, batch: tuple[Tensor, Tensor]) -> int:
    """The CPU has no allocator counter: the highest sum of the profiler's allocation events over steady steps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(NUM_PROFILED):
            training.step(batch)
    kineto = profiler.profiler
    if kineto is None:
        raise RuntimeError("the profiler kept no events")
    events = sorted((event.start_ns(), event.nbytes()) for event in kineto.kineto_results.events() if event.name() == "[memory]")
    now = peak = 0
    for _, num_bytes in events:
        now += num_bytes
        peak = max(peak, now)
    return peak
