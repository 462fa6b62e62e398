"""Allocations inside of single calls, from the profiler's memory events: one session serves many calls, on the CPU and on CUDA alike.

Each call runs inside a marker, and an allocation belongs to the marker whose interval holds its time stamp: the caching allocator, like the
CPU's, reports from the thread that asks, at the moment it is asked. Nothing resets or raises a peak statistic.
"""

from __future__ import annotations

import bisect
import gc
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

MARKER = "dyngran::measure::"
LOG_LEVEL = "KINETO_LOG_LEVEL"

one_session = threading.RLock()  # held by whose session of the profiler is open: two at a time crash
_was_started: list[bool] = []


@dataclass(frozen=True, slots=True)
class CallMemory:
    """Bytes of one call: ``workspace`` is the peak inside it less what outlives it, ``allocated`` all that was ever asked for."""

    workspace: int
    allocated: int


@dataclass(slots=True)
class Recorder:
    """Marks calls while a session runs; afterwards ``calls`` has what each allocated on the device, by index."""

    calls: dict[int, CallMemory] = field(default_factory=dict)

    def mark(self, index: int) -> record_function:
        return record_function(f"{MARKER}{index}")


@contextmanager
def recorded(device: torch.device) -> Iterator[Recorder | None]:
    """A session of the profiler for allocations on one device; None while somebody else's is active."""
    with one_session:
        if profiler_is_active():
            yield None
            return
        recorder = Recorder()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as session:
            yield recorder
        results = session.profiler.kineto_results if session.profiler is not None else None
        recorder.calls.update(_calls(results.events() if results is not None else [], device))


def _calls(events: Sequence[Any], device: torch.device) -> dict[int, CallMemory]:
    marks = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name()) for event in events if event.name().startswith(MARKER)
    )
    starts = [mark[0] for mark in marks]
    here = getattr(torch.autograd.DeviceType, device.type.upper())  # type: ignore[attr-defined]  # torch does not export it by name
    live: dict[int, int] = {}
    peak: dict[int, int] = {}
    allocated: dict[int, int] = {}
    memory = [event for event in events if event.name() == "[memory]" and event.device_type() == here]
    for event in sorted(memory, key=lambda event: event.start_ns()):
        place = bisect.bisect_right(starts, event.start_ns()) - 1
        if place < 0 or event.start_ns() > marks[place][1]:
            continue
        index = int(marks[place][2].removeprefix(MARKER))
        live[index] = live.get(index, 0) + event.nbytes()
        peak[index] = max(peak.get(index, 0), live[index])
        allocated[index] = allocated.get(index, 0) + max(0, event.nbytes())
    return {index: CallMemory(max(0, peak[index] - live[index]), allocated[index]) for index in peak}


def profiler_is_active() -> bool:
    """True while anybody's profiler runs, or waits to run, in this process: two at a time crash (tried: segmentation fault in torch 2.13).

    torch tells of a running session only; one whose schedule is still warming up is found among the live objects.
    """
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        return True
    # Not `gc.get_objects`: it takes references to tuples that C code of another thread is filling, which then crashes (tried).
    sessions = [item for item in gc.get_referrers(profile) if type(item) is profile]
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
    with one_session:
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
