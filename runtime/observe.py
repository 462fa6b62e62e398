"""What a training step really took: peak bytes and microseconds, read at the borders of compiled graphs and at the optimizer's step.

Nothing here synchronizes the device, resets a statistic or keeps a model alive. A step ends at the optimizer's post-step hook; until one
has been seen, at the first forward after a backward.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from dyngran.passes.errors import format_bytes
from dyngran.runtime.identity import TensorMark
from dyngran.runtime.memory import CpuAllocationTrace
from dyngran.runtime.optimizer_state import note_optimizer

NUM_FIRST_STEPS = 5  # every one of them is observed
EVERY = 50  # and then one in so many
TRACED_STEP = 1  # on the CPU, the one step whose allocations are traced: compilation and state creation are over
STATIC_DRIFT_BYTES = 2**20
PEAK_DRIFT = 1.02

Boxed = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Whole steps, as seen so far.

    Attributes:
        peak_bytes: largest peak of an observed step; None before one was seen. On CUDA ``max_memory_allocated``: ``peak_is_exact`` if it
            rose during the step, else an upper bound (something before the step peaked higher). On the CPU static bytes plus what was
            traced inside the compiled graphs: a lower bound unless the runner reported it.
        static_bytes: held when a step starts.
        step_us: median wall time between the ends of consecutive steps; None before two.
        drift: sentences on where observation and expectation disagree.
    """

    num_steps: int
    peak_bytes: int | None
    peak_is_exact: bool
    static_bytes: int
    step_us: float | None
    drift: tuple[str, ...]


class StepObserver:
    """Counts and measures the steps of one compiled graph. ``around`` is how the graph's callables report to it."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._expected_static_bytes = 0
        self._expected_peak_bytes: int | None = None
        self._sees_optimizer = False
        self._step_us: deque[float] = deque(maxlen=64)
        self.forget()
        _observers.add(self)

    def forget(self) -> None:
        """Start over: what was measured belongs to another plan."""
        self._num_steps = 0
        self._has_run_backward = False
        self._is_open = False
        self._ended_at: float | None = None
        self._peak_bytes: int | None = None
        self._is_exact = False
        self._exact_peak_bytes = 0
        self._static_bytes = 0
        self._peak_before = 0
        self._traced_peak_bytes = 0
        self._traced_live_bytes = 0
        self._traced_results: dict[int | None, TensorMark] = {}
        self._step_us.clear()

    def expect(self, device: torch.device, *, static_bytes: int, peak_bytes: int | None = None) -> None:
        """What the plan predicts of a step on ``device``; ``peak_bytes`` includes static bytes."""
        self.device = device
        self._expected_static_bytes = static_bytes
        self._expected_peak_bytes = peak_bytes

    def around(self, run: Boxed, is_backward: bool) -> Boxed:
        """Wrap the boxed callable of one graph (it empties the list that it is given)."""
        watch_optimizer_steps()

        def observed(args: list[Any]) -> Any:
            if is_backward:
                self._has_run_backward = True
            else:
                self.start_forward()
            if not self._is_traced():
                return run(args)
            self._traced_live_bytes -= self._let_go()
            given = {mark.memory for mark in _marks(args)}
            with CpuAllocationTrace() as trace:
                results = run(args)
            if trace.is_exact:
                self._traced_peak_bytes = max(self._traced_peak_bytes, self._traced_live_bytes + trace.peak_bytes)
                self._traced_live_bytes += trace.net_bytes
                self._traced_results |= {mark.memory: mark for mark in _marks(results) if mark.memory not in given}
            return results

        observed._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's mark of this calling convention
        return observed

    def _let_go(self) -> int:
        """Bytes that earlier graphs of this step returned and that are gone: written back into buffers, or dropped by the user."""
        gone = [memory for memory, mark in self._traced_results.items() if not mark.is_alive()]
        return sum(self._traced_results.pop(memory).num_bytes for memory in gone)

    def start_forward(self) -> None:
        """A forward begins: it ends the step before if no optimizer does, and opens the next one."""
        if self._has_run_backward and not self._sees_optimizer:
            self.end_step()
        if self._is_open:
            return
        self._is_open = True
        self._traced_peak_bytes = self._traced_live_bytes = 0
        self._traced_results.clear()
        if self.device.type == "cuda" and self._is_sampled():
            stats = torch.cuda.memory_stats(self.device)
            self._static_bytes = int(stats.get("allocated_bytes.all.current", 0))
            self._peak_before = int(stats.get("allocated_bytes.all.peak", 0))

    def end_step(self) -> None:
        """The step is over: read what it peaked at and how long it took."""
        now = time.perf_counter()
        if self._ended_at is not None:
            self._step_us.append((now - self._ended_at) * 1e6)
        self._ended_at = now
        if self._is_open and self.device.type == "cuda" and self._is_sampled():
            peak = int(torch.cuda.memory_stats(self.device).get("allocated_bytes.all.peak", 0))
            self._take(peak, is_exact=peak > self._peak_before)
        elif self._traced_peak_bytes:
            self._take(self._expected_static_bytes + self._traced_peak_bytes, is_exact=False)
        self._num_steps += 1
        _steps_ended[0] += 1
        self._is_open = self._has_run_backward = False

    def report_peak(self, peak_bytes: int) -> None:
        """The runner knows the exact peak of a step, static bytes included (eager code on the CPU)."""
        self._take(peak_bytes, is_exact=True)

    def overshoot_bytes(self, budget_bytes: int | None) -> int:
        """Bytes by which an exactly measured peak was above the budget; 0 if none was."""
        return 0 if budget_bytes is None else max(0, self._exact_peak_bytes - budget_bytes)

    @property
    def num_steps(self) -> int:
        """Steps that have ended."""
        return self._num_steps

    @property
    def observation(self) -> Observation:
        """Everything measured so far; looking changes nothing."""
        return Observation(
            num_steps=self._num_steps,
            peak_bytes=self._peak_bytes,
            peak_is_exact=self._is_exact,
            static_bytes=self._static_bytes or self._expected_static_bytes,
            step_us=statistics.median(self._step_us) if self._step_us else None,
            drift=self._drift(),
        )

    def _drift(self) -> tuple[str, ...]:
        found = []
        grown = self._static_bytes - self._expected_static_bytes
        if self._expected_static_bytes and grown > STATIC_DRIFT_BYTES:
            found.append(f"a step starts with {format_bytes(grown)} more than the plan assumed")
        expected = self._expected_peak_bytes
        if expected is not None and self._exact_peak_bytes > expected * PEAK_DRIFT:
            found.append(f"the measured peak is {format_bytes(self._exact_peak_bytes - expected)} above the predicted one")
        return tuple(found)

    def _take(self, peak_bytes: int, *, is_exact: bool) -> None:
        """Keep the largest peak; an exact one replaces any bound."""
        if is_exact:
            self._exact_peak_bytes = max(self._exact_peak_bytes, peak_bytes)
            self._peak_bytes, self._is_exact = self._exact_peak_bytes, True
        elif not self._is_exact:
            self._peak_bytes = peak_bytes if self.device.type == "cuda" else max(self._peak_bytes or 0, peak_bytes)

    def _is_sampled(self) -> bool:
        return self._num_steps < NUM_FIRST_STEPS or self._num_steps % EVERY == 0

    def _is_traced(self) -> bool:
        return self.device.type == "cpu" and self._num_steps == TRACED_STEP

    def _optimizer_stepped(self) -> None:
        if self._has_run_backward:
            self._sees_optimizer = True
            self.end_step()


def _marks(values: Any) -> list[TensorMark]:
    return [TensorMark(value) for value in values or () if isinstance(value, torch.Tensor)]


_steps_ended = [0]


def any_step_has_run() -> bool:
    """True once a step of any graph has ended in this process: what libraries keep for themselves is allocated by then."""
    return _steps_ended[0] > 0


_observers: weakref.WeakSet[StepObserver] = weakref.WeakSet()
_handle: list[RemovableHandle] = []


def watch_optimizer_steps() -> None:
    """Register one global hook after optimizer steps; again only after `stop_watching`."""
    if not _handle:
        _handle.append(register_optimizer_step_post_hook(_after_optimizer_step))


def stop_watching() -> None:
    """Remove the global hook."""
    while _handle:
        _handle.pop().remove()


def _after_optimizer_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():  # a compiled optimizer traces its hooks: there is nothing for it here
        return
    note_optimizer(optimizer)
    for observer in list(_observers):
        observer._optimizer_stepped()
