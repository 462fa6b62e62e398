"""What every operator of a graph costs on the device at hand: measured where it can be, priced by the roofline where it cannot.

Distinct calls are measured once (`signature.OpSignature`) and remembered on disk (`profile_cache.ProfileCache`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from dyngran.passes.costs import PLAIN_NAMESPACES, base_name, estimated_workspace_bytes, is_view, roofline_us
from dyngran.passes.devices import DeviceSpec
from dyngran.passes.errors import UnknownSize
from dyngran.passes.materialize import InputPool
from dyngran.passes.measure_cpu import Job, Progress, measure_on_cpu
from dyngran.passes.measure_cuda import measure_on_cuda
from dyngran.passes.profile_cache import Measurement, ProfileCache, device_settings
from dyngran.passes.record_memory import BesideProfiler, start_profiler_once
from dyngran.passes.signature import OpSignature, concrete, tensors_of

MEASURE_FROM_BYTES = 4096  # a smaller call has no workspace that could matter and costs one launch
LIMIT_S = 3.0
DOES_NOT_FIT = "does not fit the budget"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Request:
    """One call to be priced: the node's target, its arguments with fake tensors in place of nodes, and its ``meta["val"]``."""

    target: object
    args: tuple[object, ...]
    kwargs: dict[str, object] = field(default_factory=dict)
    outputs: object = None


class OpProfiler:
    """Measures operators on one device.

    Args:
        spec: prices what is not measured.
        device: where to run; ``None`` prices everything by the roofline (planning for a card that is not here).
        cache: remembers measurements between calls and processes.
        limit_bytes: inputs and results of one measured call, and the inputs kept for the next one, stay within this; None is no limit.
        limit_s: time for one `measure_all`; the rest falls back to the roofline (on the CPU: is timed by one run).
        on_progress: called with (operators measured, operators in all) before each measured operator, on the measuring thread.
        plain_dispatch: a context in which operators of the caller's thread run on real tensors as they are. With it a card's operators run
            there: cuBLAS keeps 33 MiB for every thread that multiplies, and the caller's does so in any step. Without it, and on the CPU,
            they run on a fresh thread.
        beside_profiler: records allocations on the CPU while somebody else's profiler is active. Without it nothing is measured then.
    """

    def __init__(
        self,
        spec: DeviceSpec,
        device: torch.device | None,
        *,
        cache: ProfileCache,
        limit_bytes: int | None = None,
        limit_s: float = LIMIT_S,
        on_progress: Progress | None = None,
        plain_dispatch: Callable[[], AbstractContextManager[object]] | None = None,
        beside_profiler: BesideProfiler | None = None,
    ) -> None:
        self.spec = spec
        self.device = device
        self.cache = cache
        self.limit_bytes = limit_bytes
        self.limit_s = limit_s
        self.on_progress = on_progress
        self.plain_dispatch = plain_dispatch
        self.beside_profiler = beside_profiler

    def measure(self, target: object, args: tuple[object, ...], kwargs: dict[str, object], outputs: object = None) -> Measurement:
        """`measure_all` of one call."""
        return self.measure_all([Request(target, args, kwargs, outputs)])[0]

    def measure_all(self, requests: Sequence[Request]) -> list[Measurement]:
        """One measurement per request, in order; equal signatures are run once. Raises `UnknownSize` where a size has no hint."""
        settings = device_settings(self.device) if self.device is not None else ""
        answers: list[Measurement | None] = []
        wanted: dict[str, list[int]] = {}
        jobs: dict[str, Job] = {}
        for request in requests:
            reason = self._never(request.target)
            signature = OpSignature.of(request.target, request.args, request.kwargs) if reason is None else None
            if signature is not None:
                reason = self._why_not(request, signature)
            if signature is None or reason is not None:
                answers.append(self._roofline(request, reason or ""))
                continue
            key = signature.key
            cached = self.cache.get(settings, key)
            if cached is None:
                wanted.setdefault(key, []).append(len(answers))
                jobs.setdefault(key, self._job(request, signature))
            answers.append(cached)
        if jobs and self.device is not None:
            for key, found in self._run_alone(settings, jobs, self.device).items():
                for position in wanted[key]:
                    answers[position] = found if isinstance(found, Measurement) else self._roofline(requests[position], found)
        return [answer for answer in answers if answer is not None]

    def _run_alone(self, settings: str, jobs: dict[str, Job], device: torch.device) -> dict[str, Measurement | str]:
        """Run what no other process has measured by the time it is our turn; a reason in place of a measurement where there is none."""
        with self.cache.alone(settings):
            known = {key: self.cache.get(settings, key) for key in jobs}
            missing = [key for key, found in known.items() if found is None]
            measured = dict(zip(missing, self._run([jobs[key] for key in missing], device), strict=True)) if missing else {}
            self.cache.put(settings, [(key, found) for key, found in measured.items() if isinstance(found, Measurement)])
        return measured | {key: found for key, found in known.items() if found is not None}

    def _never(self, target: object) -> str | None:
        """The reason why no call of an operator is run, or None."""
        if self.device is None:
            return self.spec.name
        if not isinstance(target, torch._ops.OpOverload):
            return "not an operator"
        if is_view(target) or base_name(target).startswith("empty"):
            return "moves no bytes"
        if target.namespace not in PLAIN_NAMESPACES:
            return f"{target.namespace} operators are not run for measuring"
        if target._schema.is_mutable:
            return "writes its arguments"
        return None

    def _why_not(self, request: Request, signature: OpSignature) -> str | None:
        """The reason why this call is not run, or None."""
        if _depends_on_data(request.target, signature.args):
            return "its result depends on data"
        kind = self.device.type if self.device is not None else ""
        touched = [*signature.tensors, *tensors_of(concrete(request.outputs))]
        if any(tensor.device.partition(":")[0] != kind for tensor in touched if tensor.shape):
            return "another device"
        if not all(tensor.is_strided for tensor in touched):
            return "a tensor is not strided"
        num_bytes = sum(tensor.span_bytes for tensor in touched)
        if num_bytes < MEASURE_FROM_BYTES:
            return "small"
        if self.limit_bytes is not None and num_bytes > self.limit_bytes:
            return DOES_NOT_FIT
        return None

    def _roofline(self, request: Request, reason: str) -> Measurement:
        cost_us = roofline_us(request.target, request.args, request.outputs, self.spec, kwargs=request.kwargs)
        workspace_bytes = estimated_workspace_bytes(request.target, request.args, request.outputs)
        return Measurement(cost_us=cost_us, workspace_bytes=workspace_bytes, source=f"roofline: {reason}")

    def _job(self, request: Request, signature: OpSignature) -> Job:
        if not isinstance(request.target, torch._ops.OpOverload):
            raise UnknownSize(f"{signature.target} is not an operator that can be run")
        num_bytes = sum(tensor.span_bytes for tensor in (*signature.tensors, *tensors_of(concrete(request.outputs))))
        return request.target, signature.args, dict(signature.kwargs), num_bytes

    def _run(self, jobs: list[Job], device: torch.device) -> list[Measurement | str]:
        def measure() -> list[Measurement | str]:
            with torch.no_grad(), _kept_random_state(device):
                pool = InputPool(device, limit_bytes=self.limit_bytes)
                if device.type == "cuda":
                    return measure_on_cuda(jobs, pool, device, limit_s=self.limit_s, on_progress=self.on_progress)
                return measure_on_cpu(jobs, pool, limit_s=self.limit_s, on_progress=self.on_progress, beside=self.beside_profiler)

        start_profiler_once()
        if device.type == "cuda" and self.plain_dispatch is not None:
            with self.plain_dispatch():
                return measure()
        return on_clean_thread(measure)


def _depends_on_data(target: object, args: tuple[object, ...]) -> bool:
    """Whether the size of the result does; indexing is tagged so, but only masks make it true."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if base_name(target) in ("index", "_unsafe_index", "index_put", "_unsafe_index_put"):
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_of(args[1]))
    return torch.Tag.dynamic_output_shape in target.tags or torch.Tag.data_dependent_output in target.tags


def on_clean_thread(work: Callable[[], _T]) -> _T:
    """Run ``work`` on a fresh thread and wait: dispatch modes (fake tensors, tracing), autocast and grad mode belong to a thread."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread below, KeyboardInterrupt included
            errors.append(error)

    thread = threading.Thread(target=body, name="dyngran-profile", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def _kept_random_state(device: torch.device) -> Iterator[None]:
    cpu_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
