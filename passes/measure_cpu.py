"""Time and workspace of operators on the CPU: wall clock for the time, the profiler's allocation events for the bytes.

The session's overhead (tens of microseconds a call) stays out of the times of short operators, which are taken again outside of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from dyngran.passes.materialize import InputPool, new_bytes, result_strides
from dyngran.passes.profile_cache import Measurement
from dyngran.passes.record_memory import BesideProfiler, Recorder, recorded

FAILURES = (RuntimeError, IndexError, TypeError, ValueError, AssertionError, KeyError, AttributeError)
MAX_RUNS = 5
SINGLE_RUN_US = 100e3  # a first run slower than this is taken as it is, cold caches and all
RUNS_US = 20e3  # time spent on repeating one operator

Progress = Callable[[int, int], None]  # (operators measured, operators in all)
Job = tuple[torch._ops.OpOverload, tuple[object, ...], dict[str, object], int]


def measure_on_cpu(
    jobs: Sequence[Job], pool: InputPool, *, limit_s: float, on_progress: Progress | None = None, beside: BesideProfiler | None = None
) -> list[Measurement | str]:
    """One measurement per job, or the reason why there is none. Times stop being refined after ``limit_s``; bytes are always measured,
    where another profiler is active by ``beside``, on a thread that is not the other's."""
    with recorded(torch.device("cpu"), beside) as recorder:
        if recorder is None:
            return ["another profiler is active"] * len(jobs)
        first = [_run_once(job, pool, recorder, index, len(jobs), on_progress) for index, job in enumerate(jobs)]
    stop = time.perf_counter() + limit_s
    answers: list[Measurement | str] = []
    for index, (job, outcome) in enumerate(zip(jobs, first, strict=True)):
        if isinstance(outcome, str):
            answers.append(outcome)
            continue
        first_us, result_bytes, strides = outcome
        cost_us, source = first_us, "measured: 1 run"
        if first_us < SINGLE_RUN_US and time.perf_counter() < stop:
            runs = _time_runs(job, pool)
            cost_us, source = statistics.median(runs), f"measured: median of {len(runs)}"
        workspace_bytes = recorder.calls[index].workspace if index in recorder.calls else 0
        answers.append(
            Measurement(cost_us=cost_us, workspace_bytes=workspace_bytes, source=source, result_bytes=result_bytes, result_strides=strides)
        )
    return answers


def _run_once(
    job: Job, pool: InputPool, recorder: Recorder, index: int, num_jobs: int, on_progress: Progress | None
) -> tuple[float, tuple[int, ...], tuple[tuple[int, ...], ...]] | str:
    """(microseconds, bytes of each result, its strides) of one marked call, or why it cannot run."""
    target, args, kwargs, needed_bytes = job
    pool.trim(needed_bytes)
    if on_progress is not None:
        on_progress(index, num_jobs)
    try:
        real_args, real_kwargs = pool.arguments(target, args, kwargs)
        with recorder.mark(index):
            begin = time.perf_counter()
            result = target(*real_args, **real_kwargs)
            elapsed_us = (time.perf_counter() - begin) * 1e6
        return elapsed_us, new_bytes(result, (real_args, real_kwargs)), result_strides(result)
    except FAILURES as error:
        return first_line(error)


def _time_runs(job: Job, pool: InputPool) -> list[float]:
    target, args, kwargs, needed_bytes = job
    pool.trim(needed_bytes)
    real_args, real_kwargs = pool.arguments(target, args, kwargs)

    def call() -> float:
        begin = time.perf_counter()
        target(*real_args, **real_kwargs)
        return (time.perf_counter() - begin) * 1e6

    first = call()
    return repeat(call, max_runs=MAX_RUNS, limit_us=RUNS_US - first)


def repeat(call: Callable[[], float], *, max_runs: int, limit_us: float) -> list[float]:
    """Call at least once and until the times add up to ``limit_us``, at most ``max_runs`` times."""
    runs: list[float] = []
    while not runs or (len(runs) < max_runs and sum(runs) < limit_us):
        runs.append(call())
    return runs


def first_line(error: BaseException) -> str:
    """The class and the first line of an error, short enough for a table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120] if lines else ''}"
