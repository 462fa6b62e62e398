"""What a device that is not in the table reaches, measured once: one copy and one matmul, together under 50 ms on a laptop core; and the
link between a card and its host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from dyngran.passes.copies import HostLink
from dyngran.passes.devices import LINK_SHARE, DeviceSpec
from dyngran.passes.profile import on_clean_thread
from dyngran.passes.profile_cache import Measurement, ProfileCache, device_settings

COPY_BYTES = 8 << 20
MATMUL_SIZE = 384
CARD_COPY_BYTES = 64 << 20
CARD_MATMUL_SIZE = 2048
CARD_LAUNCH_US = 2.5
LINK_LATENCY_US = 10.0
LAUNCH_US = 3.0  # one operator call through the dispatcher
_CONTROL_GROUPS = (  # files with the limit and with what is used
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
REDUCED_SHARE = 0.5  # bf16 and fp16 where the processor has no instructions for them; measured operators replace it


def measure_host_spec(cache: ProfileCache | None = None) -> DeviceSpec:
    """The roofline of the CPU with the number of threads in use now. Remembered in ``cache`` (default: the one on disk)."""
    store = cache if cache is not None else ProfileCache.default()
    settings = device_settings(torch.device("cpu"))
    copy_us = _remembered(store, settings, "host: copy", _copy_us)
    matmul_us = _remembered(store, settings, "host: matmul", _matmul_us)
    tflops = 2 * MATMUL_SIZE**3 / matmul_us / 1e6
    return DeviceSpec(
        name="cpu",
        matmul_tflops={"fp32": tflops, "fp64": tflops / 2, "bf16": tflops * REDUCED_SHARE, "fp16": tflops * REDUCED_SHARE},
        bandwidth_bytes_per_s=2 * COPY_BYTES / copy_us * 1e6,
        launch_us=LAUNCH_US,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        matmul_share=1.0,
        bandwidth_share=1.0,
    )


def measure_card_spec(device: torch.device, cache: ProfileCache | None = None) -> DeviceSpec:
    """The roofline of a CUDA card that `devices.match_device` does not know, from 64 MiB copied and one 2,048 matmul per dtype."""
    store = cache if cache is not None else ProfileCache.default()
    settings = device_settings(device)
    copy_us = _remembered(store, settings, "card: copy", partial(_card_copy_us, device))
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    rates = {
        name: 2 * CARD_MATMUL_SIZE**3 / 1e6 / _remembered(store, settings, f"card: matmul {name}", partial(_card_matmul_us, device, dtype))
        for name, dtype in dtypes.items()
    }
    properties = torch.cuda.get_device_properties(device)
    return DeviceSpec(
        name=properties.name,
        matmul_tflops=rates,
        bandwidth_bytes_per_s=2 * CARD_COPY_BYTES / copy_us * 1e6,
        launch_us=CARD_LAUNCH_US,
        memory_bytes=properties.total_memory,
        matmul_share=1.0,
        bandwidth_share=1.0,
    )


def measure_link(device: torch.device, cache: ProfileCache | None = None) -> HostLink:
    """Copies between a CUDA card and page-locked host memory: the best of three of 64 MiB in each direction."""
    store, settings = cache if cache is not None else ProfileCache.default(), device_settings(device)
    to_host, to_device = (
        CARD_COPY_BYTES / _remembered(store, settings, f"link: copy {way}", partial(_link_us, device, is_to_host))
        for way, is_to_host in (("to host", True), ("to device", False))
    )
    return HostLink(to_host_bytes_per_us=to_host, to_device_bytes_per_us=to_device, latency_us=LINK_LATENCY_US, source="measured")


def _link_us(device: torch.device, to_host: bool) -> float:
    there = torch.ones(CARD_COPY_BYTES, dtype=torch.uint8, device=device)
    here = torch.ones(CARD_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target, source = (here, there) if to_host else (there, here)
    return _best_us(lambda: target.copy_(source, non_blocking=True), lambda: torch.cuda.synchronize(device))


def link_of(spec: DeviceSpec) -> HostLink | None:
    """What the table says of a card's link to its host; None for a device that has none."""
    if not spec.link_bytes_per_s:
        return None
    bytes_per_us = LINK_SHARE * spec.link_bytes_per_s / 1e6
    return HostLink(to_host_bytes_per_us=bytes_per_us, to_device_bytes_per_us=bytes_per_us, latency_us=LINK_LATENCY_US, source="table")


def available_host_bytes() -> int:
    """What this process may still take of the host's memory: what the system has, and what its control group leaves it."""
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        for most, used in _CONTROL_GROUPS:
            with suppress(OSError, ValueError):  # no such control group, or "max"
                limits.append(max(0, int(Path(most).read_text()) - int(Path(used).read_text())))
        if limits:
            return min(limits)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _card_copy_us(device: torch.device) -> float:
    source = torch.ones(CARD_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _best_us(lambda: target.copy_(source), lambda: torch.cuda.synchronize(device))


def _card_matmul_us(device: torch.device, dtype: torch.dtype) -> float:
    left = torch.ones(CARD_MATMUL_SIZE, CARD_MATMUL_SIZE, dtype=dtype, device=device)
    return _best_us(lambda: torch.mm(left, left), lambda: torch.cuda.synchronize(device))


def _remembered(store: ProfileCache, settings: str, key: str, measure: Callable[[], float]) -> float:
    found = store.get(settings, key)
    if found is None:
        found = Measurement(cost_us=on_clean_thread(measure), workspace_bytes=0, source="measured: best of 3")
        store.put(settings, [(key, found)])
    return found.cost_us


def _copy_us() -> float:
    source, target = torch.ones(COPY_BYTES, dtype=torch.uint8), torch.zeros(COPY_BYTES, dtype=torch.uint8)
    return _best_us(lambda: target.copy_(source))


def _matmul_us() -> float:
    left = torch.ones(MATMUL_SIZE, MATMUL_SIZE)
    return _best_us(lambda: torch.mm(left, left))


def _best_us(call: Callable[[], object], wait: Callable[[], None] = lambda: None) -> float:
    times = []
    for _ in range(3):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        times.append((time.perf_counter() - begin) * 1e6)
    return max(min(times), 1e-3)
