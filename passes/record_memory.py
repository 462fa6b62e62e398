"""Allocations inside of single calls, from the profiler's memory events: one session serves many calls, on the CPU and on CUDA alike.

Each call runs inside a marker, and an allocation belongs to the marker whose interval holds its time stamp: the caching allocator, like the
CPU's, reports from the thread that asks, at the moment it is asked. Nothing resets or raises a peak statistic.
"""

from __future__ import annotations

import bisect
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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


class MemoryEvent(NamedTuple):
    """One event of a thread: ``kind`` is "push" and "pop" where something named begins and ends, and "memory_alloc" where ``num_bytes`` are
    allocated, or freed if negative."""

    kind: str
    name: str
    num_bytes: int


BesideProfiler = Callable[[], AbstractContextManager[list[MemoryEvent]]]  # the list is filled when the context is left


@dataclass(slots=True)
class Recorder:
    """Marks calls while a session runs; afterwards ``calls`` has what each allocated on the device, by index."""

    calls: dict[int, CallMemory] = field(default_factory=dict)

    def mark(self, index: int) -> record_function:
        return record_function(f"{MARKER}{index}")


@contextmanager
def recorded(device: torch.device, beside: BesideProfiler | None = None) -> Iterator[Recorder | None]:
    """A session of the profiler for allocations on one device. While somebody else's is active, ``beside`` records those of this thread on
    the CPU; None without it."""
    with one_session:
        recorder = Recorder()
        if profiler_is_active():
            if beside is None:
                yield None
                return
            with beside() as events:
                yield recorder
            recorder.calls.update(_calls_in_order(events))
            return
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as session:
            yield recorder
        results = session.profiler.kineto_results if session.profiler is not None else None
        recorder.calls.update(_calls(results.events() if results is not None else [], device))


@dataclass(slots=True)
class _Tally:
    """Bytes of one call so far."""

    live: int = 0
    peak: int = 0
    allocated: int = 0

    def add(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        self.allocated += max(0, num_bytes)

    def memory(self) -> CallMemory:
        return CallMemory(max(0, self.peak - self.live), self.allocated)


def _calls(events: Sequence[Any], device: torch.device) -> dict[int, CallMemory]:
    marks = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name()) for event in events if event.name().startswith(MARKER)
    )
    starts = [mark[0] for mark in marks]
    here = getattr(torch.autograd.DeviceType, device.type.upper())  # type: ignore[attr-defined]  # torch does not export it by name
    tallies: dict[int, _Tally] = {}
    memory = [event for event in events if event.name() == "[memory]" and event.device_type() == here]
    for event in sorted(memory, key=lambda event: event.start_ns()):
        place = bisect.bisect_right(starts, event.start_ns()) - 1
        if place >= 0 and event.start_ns() <= marks[place][1]:
            tallies.setdefault(int(marks[place][2].removeprefix(MARKER)), _Tally()).add(event.nbytes())
    return {index: tally.memory() for index, tally in tallies.items()}


def _calls_in_order(events: Sequence[MemoryEvent]) -> dict[int, CallMemory]:
    tallies: dict[int, _Tally] = {}
    begun: list[str] = []
    inside: _Tally | None = None
    for event in events:
        if event.kind == "push":
            begun.append(event.name)
            if event.name.startswith(MARKER):
                inside = tallies.setdefault(int(event.name.removeprefix(MARKER)), _Tally())
        elif event.kind == "pop" and begun and begun.pop().startswith(MARKER):
            inside = None
        elif event.kind == "memory_alloc" and inside is not None:
            inside.add(event.num_bytes)
    return {index: tally.memory() for index, tally in tallies.items()}


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
