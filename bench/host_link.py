"""How fast a card reaches page-locked host memory, and what kernels lose beside copies.

    python bench/host_link.py

Prints JSON: GB/s in each direction (64 MiB, mean of 10 copies), and the time of a bf16 matmul of 8,192 and of a 256 MiB copy on the card,
alone and while copies run on another stream. Device events, in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

COPY_BYTES, KERNEL_BYTES, MATMUL_SIZE = 64 << 20, 256 << 20, 8192
NUM_COPIES = 40  # that run beside the kernels, longer than these


def mean_ms(call: Callable[[], object], count: int) -> float:
    """Device time of one call, after one that does not count."""
    call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def beside(target: Tensor, source: Tensor, kernel: Callable[[], object], count: int) -> float:
    """Device time of one kernel while copies from ``source`` to ``target`` run."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(NUM_COPIES):
            target.copy_(source, non_blocking=True)
    return mean_ms(kernel, count)


def main() -> None:
    device = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    host = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    left = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16)
    large = torch.empty(KERNEL_BYTES, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(large)
    row: dict[str, object] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    ways = {"to_host": (host, device), "to_device": (device, host)}
    for way, (target, source) in ways.items():
        row[f"{way}_gb_per_s"] = round(COPY_BYTES / 1e6 / mean_ms(lambda t=target, s=source: t.copy_(s, non_blocking=True), 10), 2)
    kernels: dict[str, tuple[Callable[[], object], int]] = {"matmul": (lambda: left @ left, 20), "copy": (lambda: other.copy_(large), 60)}
    for name, (kernel, count) in kernels.items():
        row[f"{name}_ms"] = round(mean_ms(kernel, count), 4)
        for way, (target, source) in ways.items():
            row[f"{name}_beside_{way}_ms"] = round(beside(target, source, kernel, count), 4)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
