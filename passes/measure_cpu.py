"""Time and workspace of operators on the CPU: wall clock for the time, the profiler's allocation events for the bytes.

One profiler session serves many operators: each call runs inside a marker, and an allocation belongs to the marker whose interval
holds its time stamp. The session's overhead (tens of microseconds a call) stays out of the times of short operators, which are
taken again outside of it.
"""

from __future__ import annotations

import bisect
import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from dyngran.passes.materialize import InputPool, new_bytes
from dyngran.passes.profile_cache import Measurement

MARKER = "dyngran::measure::"
FAILURES = (RuntimeError, IndexError, TypeError, ValueError, AssertionError, KeyError, AttributeError)
LOG_LEVEL = "KINETO_LOG_LEVEL"
MAX_RUNS = 5
SINGLE_RUN_US = 100e3  # a first run slower than this is taken as it is, cold caches and all
RUNS_US = 20e3  # time spent on repeating one operator

_one_session = threading.Lock()
_was_started: list[bool] = []

Progress = Callable[[int, int], None]  # (operators measured, operators in all)
Job = tuple[torch._ops.OpOverload, tuple[object, ...], dict[str, object], int]


def profiler_is_active() -> bool:
    """True while anybody's profiler runs, or waits to run, in this process: two at a time crash (tried: segmentation fault in torch 2.13).

    torch tells of a running session only; one whose schedule is still warming up is found among the live objects.
    """
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        return True
    sessions = [item for item in gc.get_objects() if type(item) is profile]
    return any(
        session.current_action is not ProfilerAction.NONE
        and session.profiler is not None
        and getattr(session.profiler, "kineto_results", None) is None  # a session that has ended keeps its results
        for session in sessions
    )


def start_profiler_once() -> None:
    """Start and stop an empty session on the caller's thread: the profiler complains on stderr if its first one is on another thread.

    It also writes two marks to stderr for every session of the process, unless its log level says otherwise when the first one starts.
    """
    with _one_session:
        if not _was_started and not profiler_is_active():
            with _quiet_profiler(), profile(activities=[ProfilerActivity.CPU], acc_events=True):
                _was_started.append(True)


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """``KINETO_LOG_LEVEL``, which the profiler reads once, for as long as it takes to read it; a level of the user's stays."""
    own = LOG_LEVEL not in os.environ
    if own:
        os.environ[LOG_LEVEL] = "99"
    try:
        yield
    finally:
        if own:
            os.environ.pop(LOG_LEVEL, None)


def measure_on_cpu(jobs: Sequence[Job], pool: InputPool, *, limit_s: float, on_progress: Progress | None = None) -> list[Measurement | str]:
    """One measurement per job, or the reason why there is none. Times stop being refined after ``limit_s``; bytes are always measured."""
    with _one_session:
        if profiler_is_active():
            return ["another profiler is active"] * len(jobs)
        first, workspaces = _run_recorded(jobs, pool, on_progress)
    stop = time.perf_counter() + limit_s
    answers: list[Measurement | str] = []
    for index, (job, outcome) in enumerate(zip(jobs, first, strict=True)):
        if isinstance(outcome, str):
            answers.append(outcome)
            continue
        first_us, result_bytes = outcome
        cost_us, source = first_us, "measured: 1 run"
        if first_us < SINGLE_RUN_US and time.perf_counter() < stop:
            runs = _time_runs(job, pool)
            cost_us, source = statistics.median(runs), f"measured: median of {len(runs)}"
        answers.append(Measurement(cost_us=cost_us, workspace_bytes=workspaces.get(index, 0), source=source, result_bytes=result_bytes))
    return answers


def _run_recorded(
    jobs: Sequence[Job], pool: InputPool, on_progress: Progress | None
) -> tuple[list[tuple[float, tuple[int, ...]] | str], dict[int, int]]:
    outcomes: list[tuple[float, tuple[int, ...]] | str] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as session:
        for index, (target, args, kwargs, needed_bytes) in enumerate(jobs):
            pool.trim(needed_bytes)
            if on_progress is not None:
                on_progress(index, len(jobs))
            try:
                real_args, real_kwargs = pool.arguments(target, args, kwargs)
                with record_function(f"{MARKER}{index}"):
                    begin = time.perf_counter()
                    result = target(*real_args, **real_kwargs)
                    elapsed_us = (time.perf_counter() - begin) * 1e6
                outcomes.append((elapsed_us, new_bytes(result, (real_args, real_kwargs))))
                del result
            except FAILURES as error:
                outcomes.append(first_line(error))
    results = session.profiler.kineto_results if session.profiler is not None else None
    return outcomes, _workspaces(results.events() if results is not None else [])


def _workspaces(events: Sequence[Any]) -> dict[int, int]:
    """Per marker: the peak of bytes live inside it less the bytes that outlive it."""
    marks = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name()) for event in events if event.name().startswith(MARKER)
    )
    starts = [mark[0] for mark in marks]
    live: dict[int, int] = {}
    peak: dict[int, int] = {}
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        place = bisect.bisect_right(starts, event.start_ns()) - 1
        if place < 0 or event.start_ns() > marks[place][1]:
            continue
        index = int(marks[place][2].removeprefix(MARKER))
        live[index] = live.get(index, 0) + event.nbytes()
        peak[index] = max(peak.get(index, 0), live[index])
    return {index: max(0, peak[index] - live[index]) for index in peak}


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
