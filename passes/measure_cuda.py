"""Time and workspace of operators on a CUDA device: events around launches that wait behind a spin, and the profiler's allocation events.

The launches are queued while the device still spins, so what lies between the two events is device time, not Python time. (CUDA graph
replays would do the same, but a capture needs a side stream, for which cuBLAS keeps another workspace for ever.)
Nothing here resets a peak statistic or empties the caching allocator; inputs and results return to its free blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from dyngran.passes.attention_pair import is_attention_backward, with_real_forward
from dyngran.passes.materialize import InputPool, new_bytes, result_strides
from dyngran.passes.measure_cpu import FAILURES, Job, Progress, first_line
from dyngran.passes.profile_cache import Measurement
from dyngran.passes.record_memory import CallMemory, recorded

MAX_LAUNCHES = 10
BATCH_US = 3000.0  # launches of one batch add up to about this much device time
NUM_BATCHES = 2
SPIN_CYCLES_PER_US = 2000  # 2 GHz: no card of the table spins for a shorter time than asked
MAX_SPIN_US = 20000.0


def measure_on_cuda(
    jobs: Sequence[Job], pool: InputPool, device: torch.device, *, limit_s: float, on_progress: Progress | None = None
) -> list[Measurement | str]:
    """One measurement per job, or the reason why there is none. After ``limit_s`` the rest is left to the roofline."""
    stop = time.perf_counter() + limit_s
    answers: list[Measurement | str] = []
    with torch.cuda.device(device), recorded(device) as recorder:
        for index, job in enumerate(jobs):
            if on_progress is not None:
                on_progress(index, len(jobs))
            if time.perf_counter() > stop:
                answers.append(f"the profiler's {limit_s:g} s were spent")
                continue
            try:
                answers.append(_measure(job, pool, device, recorder.mark(index) if recorder is not None else nullcontext()))
            except FAILURES as error:  # out of memory is a RuntimeError
                answers.append(first_line(error))
        torch.cuda.synchronize(device)
    return answers if recorder is None else [with_recorded_peak(answer, recorder.calls.get(index)) for index, answer in enumerate(answers)]


def with_recorded_peak(answer: Measurement | str, seen: CallMemory | None) -> Measurement | str:
    """The workspace as the peak of recorded allocations, where the record is complete; else it stays the sum of all temporaries."""
    if isinstance(answer, str) or seen is None or seen.allocated < answer.workspace_bytes + sum(answer.result_bytes or ()):
        return answer
    return replace(answer, workspace_bytes=min(answer.workspace_bytes, seen.workspace))


def _measure(job: Job, pool: InputPool, device: torch.device, mark: AbstractContextManager[object]) -> Measurement:
    target, args, kwargs, needed_bytes = job
    pool.trim(needed_bytes)
    real_args, real_kwargs = pool.arguments(target, args, kwargs)
    pool.keep_used()
    if is_attention_backward(target):
        real_args, real_kwargs = with_real_forward(target, real_args, real_kwargs)
    cuda: Any = torch.cuda  # events and the spin are not annotated
    stream = torch.cuda.current_stream(device)
    target(*real_args, **real_kwargs)  # library handles, their workspaces and algorithm choices are made here
    stream.synchronize()

    allocated_before = _allocated_bytes(device)
    begin = time.perf_counter()
    with mark:
        result = target(*real_args, **real_kwargs)
    host_us = (time.perf_counter() - begin) * 1e6
    allocated_bytes = _allocated_bytes(device) - allocated_before
    stream.synchronize()
    total_us = (time.perf_counter() - begin) * 1e6
    result_bytes = new_bytes(result, (real_args, real_kwargs))
    strides = result_strides(result)
    del result

    num_launches = max(1, min(MAX_LAUNCHES, int(BATCH_US / max(total_us, 1.0))))
    spin_us = min(MAX_SPIN_US, 2.0 * host_us * num_launches + 50.0)
    costs = []
    for _ in range(NUM_BATCHES if total_us < 4 * BATCH_US else 1):
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda._sleep(int(spin_us * SPIN_CYCLES_PER_US))
        start.record(stream)
        for _ in range(num_launches):
            target(*real_args, **real_kwargs)
        end.record(stream)
        end.synchronize()
        costs.append(start.elapsed_time(end) * 1e3 / num_launches)
    return Measurement(
        cost_us=min(costs),
        workspace_bytes=max(0, allocated_bytes - sum(result_bytes)),
        source=f"measured: device time of {num_launches} launches",
        result_bytes=result_bytes,
        result_strides=strides,
    )


def _allocated_bytes(device: torch.device) -> int:
    """Bytes requested from the caching allocator since the process started; never falls, so freed temporaries count too."""
    stats = torch.cuda.memory_stats(device)
    return int(stats.get("requested_bytes.all.allocated", stats["allocated_bytes.all.allocated"]))
