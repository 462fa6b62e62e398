"""Copies to host memory and back that run beside the kernels of a step.

Formula: the identity. `offload` starts a copy of ``x`` into page-locked host memory; `offload_wait` is where the device has to have done
it, and up to which whoever calls keeps ``x`` alive and unchanged. `fetch` starts the copy back; `fetch_wait` is where its result may be
read. Each direction has a stream of its own on each device, which begins a copy once what the current stream was given before has run.
Nothing waits on the host.

On a CPU the memory of host and device is one: the copies are made at once, into memory that torch's allocator does not count.

Page-locked memory comes from torch's host allocator, which gives it back only when the copies that use it have run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dyngran.kernels.layouts import check_dense, memory_order, new_in_layout


@dataclass(frozen=True, slots=True)
class _Started:
    """A copy that the current stream has not waited for. ``source`` is kept until then."""

    event: torch.cuda.Event
    source: Tensor


_streams: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}
_started: dict[int, _Started] = {}  # by the address of what is copied into


def offload(x: Tensor, stride: Sequence[int]) -> Tensor:
    """The elements of ``x`` in host memory in the order of the layout ``stride``, shape ``(x.numel(),)``; not there yet.

    Raises ValueError if the layout is not dense.
    """
    values = memory_order(x, stride)
    if not values.is_cuda:
        host = torch.frombuffer(bytearray(max(1, values.nbytes)), dtype=torch.uint8)[: values.nbytes].view(values.dtype)
        return host.copy_(values)
    host = _page_locked(values)
    _start(host, values, to_host=True)
    return host


def host_bytes(num_bytes: int) -> int:
    """What torch's host allocator takes for page-locked memory of so many bytes: the next power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def offload_wait(host: Tensor, x: Tensor) -> None:
    """Let the current stream of the device of ``x`` wait until ``host``, made by `offload` of ``x``, is there."""
    _wait(host, x.device, to_host=True)


def fetch(host: Tensor, size: Sequence[int], stride: Sequence[int], device: torch.device, after: Tensor | None = None) -> Tensor:
    """What `offload` stored, in a new tensor of the device in the layout ``stride``; not there yet.

    ``after`` is not looked at: whoever orders calls by what they read makes it before. Raises ValueError if ``host`` does not hold that
    many elements, or the layout is not dense.
    """
    check_dense(size, stride)
    result, line = new_in_layout(torch.empty(0, device=device), size, stride, host.dtype)
    if line.shape != host.shape:
        raise ValueError(f"{host.numel()} elements were stored, and size {tuple(size)} has {line.numel()}")
    if result.is_cuda:
        _start(line, host, to_host=False)
    else:
        line.copy_(host)
    return result


def fetch_wait(x: Tensor, after: Tensor | None = None) -> None:
    """Let the current stream wait until ``x``, made by `fetch`, is there. ``after``: as there."""
    _wait(x, x.device, to_host=False)


def _page_locked(values: Tensor) -> Tensor:
    try:
        return torch.empty(values.numel(), dtype=values.dtype, pin_memory=True)
    except RuntimeError as error:
        raise RuntimeError(
            f"the host has no {host_bytes(values.nbytes):,} bytes of page-locked memory left for a value that the plan offloads: give "
            "dyngran's option offload an amount that this host can spare, or remove it"
        ) from error


def _start(target: Tensor, source: Tensor, *, to_host: bool) -> None:
    device = source.device if to_host else target.device
    stream, event = _stream(device, to_host=to_host), torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
    stream.wait_stream(torch.cuda.current_stream(device))
    _copy(target, source, stream)
    event.record(stream)
    _started[target.data_ptr()] = _Started(event, source)


def _copy(target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)


def _wait(target: Tensor, device: torch.device, *, to_host: bool) -> None:
    if device.type != "cuda" or not target.numel():
        return
    started = _started.pop(target.data_ptr(), None)
    current = torch.cuda.current_stream(device)
    if started is None:  # somebody has waited for this copy before; waiting for all of them is right whatever has happened
        current.wait_stream(_stream(device, to_host=to_host))
    else:
        current.wait_event(started.event)


def _stream(device: torch.device, *, to_host: bool) -> torch.cuda.Stream:
    return _streams.get((device, to_host)) or _streams.setdefault((device, to_host), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # torch gives it no types
