"""What all examples share: their arguments, the peak of one whole step as the allocator saw it, and whether the promise was kept."""

from __future__ import annotations

import argparse
import gc
import os
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

import dyngran

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would write its stages to stderr
MIB = 2**20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MARK = "the measured step begins"
STEP = 5  # the first steps compile, and create the optimizer's state


def argument_parser(doc: str | None, *, cpu: str, cuda: str) -> argparse.ArgumentParser:
    """``--budget``, of which ``cpu`` and ``cuda`` are the defaults, and ``--codegen``."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    budget = os.environ.get("DYNGRAN_BUDGET") or {"cpu": cpu, "cuda": cuda}[DEVICE.type]
    codegen = "inductor" if DEVICE.type == "cuda" else "eager"
    parser.add_argument("--budget", default=budget, help=f"peak of one training step (here {budget})")
    parser.add_argument("--codegen", choices=("eager", "inductor"), default=codegen, help=f"here {codegen}; Inductor compiles for longer")
    return parser


class StepPeak:
    """Context manager around training: the peak of the whole step number `STEP`, whoever runs the loop.

    Attributes:
        peak_bytes: everything that the process had allocated on the device at that step's worst moment; 0 if training ended before.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._num_steps = 0

    def __enter__(self) -> StepPeak:
        self._hook = register_optimizer_step_post_hook(self._after_step)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hook.remove()

    def _after_step(self, *_: Any) -> None:
        self._num_steps += 1
        if self._num_steps == STEP - 2:
            self._start()
        elif self._num_steps == STEP - 1:
            self._mark()
        elif self._num_steps == STEP:
            self.peak_bytes = self._end()

    def _start(self) -> None:
        """One step early: the profiler counts a block that is freed only if it saw that block being allocated."""
        if DEVICE.type == "cpu":
            gc.disable()  # as if what it frees were allocated to the end: `held_bytes` collects it
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
            self._profiler.__enter__()

    def _mark(self) -> None:
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            with torch.profiler.record_function(MARK):
                pass

    def _end(self) -> int:
        if DEVICE.type == "cuda":
            return torch.cuda.max_memory_allocated()
        self._profiler.__exit__(None, None, None)
        gc.enable()
        assert self._profiler.profiler is not None
        events = self._profiler.profiler.kineto_results.events()
        began = next(event.start_ns() for event in events if event.name() == MARK)
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]" and event.start_ns() > began)
        now = peak = held_bytes()
        for _, num_bytes in reversed(changes):  # from the end, where it is known what is held
            now -= num_bytes
            peak = max(peak, now)
        return peak


def held_bytes() -> int:
    """Bytes of all tensors that Python knows on the CPU, which has no allocator that counts."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu"]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def judge(losses: list[float], model: Any, peak: StepPeak) -> None:
    """Print what came of it; the process fails if the loss did not fall or the peak was above the budget."""
    report = dyngran.explain(model)
    budget_bytes = report.plan.budget_bytes
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps on {report.device}, codegen {report.codegen}")
    print(
        f"budget {(budget_bytes or 0) / MIB:.2f} MiB, predicted peak {report.predicted_peak_bytes / MIB:.2f} MiB, "
        f"measured peak {peak.peak_bytes / MIB:.2f} MiB, {sum(plan.num_recomputed for plan in report.plans)} ops recomputed"
    )
    if not losses[-1] < 0.5 * losses[0]:
        raise SystemExit("the loss did not halve")
    if budget_bytes is None or not 0 < peak.peak_bytes <= budget_bytes:
        raise SystemExit("the peak is not within the budget")
