"""Steps are counted where they end, peaks are what was allocated, and nothing is kept alive or changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.profiler import ProfilerActivity, profile

from dyngran.runtime import observe
from dyngran.runtime.memory import CpuAllocationTrace, device_memory
from dyngran.runtime.observe import StepObserver

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture(autouse=True)
def _unhooked() -> Iterator[None]:
    yield
    observe.stop_watching()


def graphs(observer: StepObserver) -> tuple[Any, Any]:
    """A forward that saves 4 MiB, and a backward that needs 2 MiB beside it."""

    def forward(args: list[Any]) -> list[torch.Tensor]:
        args.clear()
        return [torch.ones(MIB)]

    def backward(args: list[Any]) -> None:
        torch.ones(MIB // 2)
        args.clear()

    return observer.around(forward, False), observer.around(backward, True)


def run_step(forward: Any, backward: Any) -> None:
    saved = forward([None])
    backward(saved)


def test_an_optimizer_ends_steps_whatever_was_accumulated() -> None:
    observer = StepObserver()
    forward, backward = graphs(observer)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    run_step(forward, backward)
    optimizer.step()
    for _ in range(3):
        for _ in range(4):
            run_step(forward, backward)
        optimizer.step()
    optimizer.step()  # of somebody else: no backward ran since
    assert observer.observation.num_steps == 4
    step_us = observer.observation.step_us
    assert step_us is not None
    assert step_us > 0


def test_without_an_optimizer_a_forward_after_a_backward_ends_the_step() -> None:
    observer = StepObserver()
    forward, backward = graphs(observer)
    for _ in range(3):
        forward([None])
        saved = forward([None])  # a layer called twice is one step
        backward(saved)
    assert observer.observation.num_steps == 2


def test_on_the_cpu_one_step_is_traced_and_is_a_bound() -> None:
    observer = StepObserver()
    observer.expect(CPU, static_bytes=1000)
    forward, backward = graphs(observer)
    assert observer.observation.peak_bytes is None
    for _ in range(4):
        run_step(forward, backward)
    observation = observer.observation
    assert observation.peak_bytes == 1000 + 6 * MIB
    assert not observation.peak_is_exact
    assert observer.overshoot_bytes(1) == 0


def test_what_forward_returned_and_is_gone_is_not_there_in_backward() -> None:
    """The new statistics of a batch norm are written back into its buffers and dropped."""
    observer = StepObserver()
    observer.expect(CPU, static_bytes=0)
    buffer = torch.zeros(MIB)

    def compute(args: list[Any]) -> list[torch.Tensor]:
        (kept,) = args
        args.clear()
        return [torch.ones(MIB // 4), torch.ones(MIB), kept]

    forward, backward = observer.around(compute, False), graphs(observer)[1]
    for _ in range(4):
        results = forward([buffer])
        buffer[: MIB // 4].copy_(results.pop(0))
        backward(results)
    assert observer.observation.peak_bytes == 6 * MIB


def test_a_reported_peak_is_exact_and_can_overshoot() -> None:
    observer = StepObserver()
    observer.expect(CPU, static_bytes=10, peak_bytes=100)
    observer.report_peak(101)
    assert observer.observation.drift == ()
    observer.report_peak(150)
    observer.report_peak(120)
    assert observer.observation.peak_bytes == 150
    assert observer.observation.peak_is_exact
    assert observer.overshoot_bytes(140) == 10
    assert observer.overshoot_bytes(None) == 0
    assert observer.observation.drift == ("the measured peak is 50 B above the predicted one",)
    observer.forget()
    assert observer.observation.peak_bytes is None
    assert observer.overshoot_bytes(1) == 0


class FakeCard:
    """Stands for `torch.cuda.memory_stats`: bytes now and their peak."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = self.reads = 0
        monkeypatch.setattr(torch.cuda, "memory_stats", self.stats)

    def allocate(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def stats(self, device: torch.device) -> dict[str, int]:
        self.reads += 1
        return {"allocated_bytes.all.current": self.now, "allocated_bytes.all.peak": self.peak}


def card_step(observer: StepObserver, card: FakeCard, num_bytes: int) -> None:
    observer.around(lambda args: card.allocate(num_bytes), False)([])
    observer.around(lambda args: card.allocate(-num_bytes), True)([])
    observer._optimizer_stepped()


def test_on_a_card_the_peak_is_exact_only_if_it_rose_during_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    card, observer = FakeCard(monkeypatch), StepObserver()
    observer.expect(torch.device("cuda", 0), static_bytes=100)
    card.allocate(1000)  # compilation peaked higher than the step will
    card.allocate(-900)
    card_step(observer, card, 500)
    assert (observer.observation.peak_bytes, observer.observation.peak_is_exact) == (1000, False)
    assert observer.overshoot_bytes(10) == 0
    card_step(observer, card, 2000)
    assert (observer.observation.peak_bytes, observer.observation.peak_is_exact) == (2100, True)
    assert observer.overshoot_bytes(2000) == 100
    card_step(observer, card, 500)
    assert (observer.observation.peak_bytes, observer.observation.peak_is_exact) == (2100, True)
    assert observer.observation.static_bytes == 100


def test_later_steps_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    card, observer = FakeCard(monkeypatch), StepObserver()
    observer.expect(torch.device("cuda", 0), static_bytes=0)
    for _ in range(2 * observe.EVERY):
        card_step(observer, card, 10)
    assert observer.observation.num_steps == 2 * observe.EVERY
    assert card.reads == 2 * (observe.NUM_FIRST_STEPS + 1)


def test_nothing_is_kept_alive_and_the_hook_goes_away() -> None:
    def build() -> list[weakref.ref[Any]]:
        model, observer = nn.Linear(2, 2), StepObserver()
        run = observer.around(lambda args: model(*args), False)
        run([torch.ones(2)])
        return [weakref.ref(model), weakref.ref(observer)]

    watched = build()
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    hooks = _global_optimizer_post_hooks
    assert observe._after_optimizer_step in hooks.values()
    observe.watch_optimizer_steps()
    assert list(hooks.values()).count(observe._after_optimizer_step) == 1
    observe.stop_watching()
    assert observe._after_optimizer_step not in hooks.values()


def test_a_compiled_optimizer_step_is_not_broken_by_the_hook() -> None:
    observe.watch_optimizer_steps()
    param = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=1.0)
    param.grad = torch.ones(4)
    torch.compile(optimizer.step, backend="eager")()
    assert torch.equal(param.detach(), torch.zeros(4))


def test_the_trace_counts_bytes_and_yields_to_other_profilers() -> None:
    with CpuAllocationTrace() as trace:
        kept = torch.ones(MIB)
        torch.ones(MIB // 4)
    assert (trace.peak_bytes, trace.net_bytes, trace.is_exact) == (5 * MIB, 4 * MIB, True)
    del kept
    with profile(activities=[ProfilerActivity.CPU], acc_events=True), CpuAllocationTrace() as refused:
        torch.ones(MIB)
    assert (refused.peak_bytes, refused.is_exact) == (0, False)


def test_the_host_has_memory() -> None:
    memory = device_memory(CPU)
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert memory.allocated_bytes is None
