"""What a step costs, measured from outside of dyngran: allocator peaks, wall time, time that the device was busy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes over some steady steps. ``static_bytes`` are allocated just before a step: parameters, optimizer state, inputs, and what
    libraries hold; ``reserved_bytes`` is 0 on a CPU."""

    static_bytes: int
    peak_bytes: int
    reserved_bytes: int


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_memory(step: Step, device: torch.device, held: Iterable[Tensor], *, num_steps: int) -> Memory:
    """Peak over ``num_steps`` steps. On CUDA the allocator's own counters; on a CPU one step's allocation events over ``held``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        static_bytes = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize(device)
        return Memory(
            static_bytes=static_bytes,
            peak_bytes=torch.cuda.max_memory_allocated(device),
            reserved_bytes=torch.cuda.max_memory_reserved(device),
        )
    static_bytes = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    now = peak = 0
    for _, num_bytes in sorted((e.start_ns(), e.nbytes()) for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"):
        now += num_bytes
        peak = max(peak, now)
    return Memory(static_bytes=static_bytes, peak_bytes=static_bytes + peak, reserved_bytes=0)


def wall_times_ms(step: Step, device: torch.device, *, num_steps: int) -> list[float]:
    """Wall time of single steps in milliseconds, the device synchronized before and after each."""
    times_ms = []
    for _ in range(num_steps):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        times_ms.append(1e3 * (time.perf_counter() - start))
    return times_ms


def summary(times_ms: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes of at least two step times, in milliseconds."""
    quarter, median, three = statistics.quantiles(times_ms, n=4)
    return {
        "step_ms": round(median, 3),
        "step_ms_q1": round(quarter, 3),
        "step_ms_q3": round(three, 3),
        "step_ms_min": round(min(times_ms), 3),
        "step_ms_max": round(max(times_ms), 3),
        "num_timed_steps": len(times_ms),
    }


def measure_busy_ms(step: Step, device: torch.device, *, num_steps: int) -> float | None:
    """Milliseconds of a step in which at least one kernel or copy ran on the device (profiler's device events); None on a CPU."""
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize(device)
    assert profiler.profiler is not None
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    )
    busy_ns = end = 0
    for start, stop in spans:
        busy_ns += max(0, stop - max(start, end))
        end = max(end, stop)
    return round(busy_ns / num_steps / 1e6, 3)
