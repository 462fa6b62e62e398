"""What a device's memory looks like now, read without side effects: nothing here resets a statistic or empties a cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dyngran.passes.record_memory import one_session, profiler_is_active, start_profiler_once

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of one device. What the host does not count (allocated, reserved, peak) is None on the CPU.

    Attributes:
        free_bytes: what the driver would still hand out; on the CPU, what the kernel calls available.
        allocated_bytes, reserved_bytes, peak_allocated_bytes: of this process, by PyTorch's caching allocator.
        library_bytes: what libraries will allocate in a step and keep, where nothing counts it (`imagined_device`).
        held_bytes: what is known to be held there; None where nobody says so.
    """

    total_bytes: int
    free_bytes: int
    allocated_bytes: int | None
    reserved_bytes: int | None
    peak_allocated_bytes: int | None
    library_bytes: int = 0
    held_bytes: int | None = None


_imagined: ContextVar[DeviceMemory | None] = ContextVar("imagined device", default=None)


@contextmanager
def imagined_device(total_bytes: int, *, library_bytes: int, held_bytes: int) -> Iterator[None]:
    """Every device has so many bytes, all of them free and none counted: planning for a card that is not here."""
    memory = DeviceMemory(
        total_bytes=total_bytes,
        free_bytes=total_bytes,
        allocated_bytes=None,
        reserved_bytes=None,
        peak_allocated_bytes=None,
        library_bytes=library_bytes,
        held_bytes=held_bytes,
    )
    token = _imagined.set(memory)
    try:
        yield
    finally:
        _imagined.reset(token)


def device_memory(device: torch.device) -> DeviceMemory:
    """Read the device's memory; synchronizes nothing."""
    if (imagined := _imagined.get()) is not None:
        return imagined
    if device.type != "cuda":
        total, available = _host_bytes()
        return DeviceMemory(total_bytes=total, free_bytes=available, allocated_bytes=None, reserved_bytes=None, peak_allocated_bytes=None)
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    return DeviceMemory(
        total_bytes=total,
        free_bytes=free,
        allocated_bytes=int(stats.get("allocated_bytes.all.current", 0)),
        reserved_bytes=int(stats.get("reserved_bytes.all.current", 0)),
        peak_allocated_bytes=int(stats.get("allocated_bytes.all.peak", 0)),
    )


def _host_bytes() -> tuple[int, int]:
    """Total and available bytes of the host, within the limit of the control group if there is one."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    available = page * os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else total
    available = _meminfo_bytes("MemAvailable") or available
    limit = _read(CGROUP_LIMIT).strip()
    if limit.isdigit():
        total, available = min(total, int(limit)), min(available, int(limit))
    return total, available


def _meminfo_bytes(field: str) -> int | None:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not Linux, or no control group
        return ""


class CpuAllocationTrace:
    """Context manager: every CPU allocation of this thread while it is open, from the profiler's memory events.

    Attributes after leaving it:
        peak_bytes: most bytes live above what was live at the start; net_bytes: change from start to end.
        is_exact: False if another profiler was active, so nothing was recorded and both numbers are 0.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.net_bytes = 0
        self.is_exact = False
        self._session: Any = None  # a torch.profiler.profile, which is not annotated

    def __enter__(self) -> CpuAllocationTrace:
        if not one_session.acquire(blocking=False):  # another thread's
            return self
        try:
            start_profiler_once()
            if not profiler_is_active():
                session: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
                session.__enter__()
                self._session = session
        finally:
            if self._session is None:
                one_session.release()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        try:
            session.__exit__(kind, error, trace)
        finally:
            one_session.release()
        results = session.profiler.kineto_results if session.profiler is not None else None
        if results is None:
            return
        changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
        for _, num_bytes in changes:
            self.net_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.net_bytes)
        self.is_exact = True
