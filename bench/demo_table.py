"""One table of the demo: a workload trained without a budget and at several, each row measured beside its prediction."""

from __future__ import annotations

import argparse
import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from demo_measure import Run, least_peak_bytes, run
from demo_models import Workload
from demo_progress import Ticker
from rich import box
from rich.console import Console
from rich.table import Table

from dyngran.errors import BudgetTooSmall
from dyngran.passes.errors import format_bytes, format_us

FRACTIONS = (0.75, 0.5, 0.3)  # of the way from the floor to the free peak
QUICK_FRACTIONS = (0.5,)
INDUCTOR_FRACTION = 0.5
SAME_MASKS = {"fallback_random": True}  # Inductor then draws dropout masks as eager does, so that losses can be compared


def why_no_inductor(device: torch.device) -> str:
    """Why Inductor cannot run here, with what to install; '' if it can."""
    compilers = [os.environ.get("CXX", ""), "g++", "clang++"]
    if not any(name and shutil.which(name) for name in compilers):
        return "no C++ compiler was found (g++ or clang++). Install one, for example: apt install g++"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's C headers are missing. Install them, for example: apt install python3-dev"
    if device.type == "cuda" and find_spec("triton") is None:
        return "triton is not installed. Install it: pip install triton"
    return ""


class Demo:
    """One table: a workload trained without a budget and at several."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device, workload: Workload, console: Console) -> None:
        self._arguments = arguments
        self._device = device
        self._workload = workload
        self._console = console
        self._table = Table(title=workload.name, title_justify="left", box=box.SIMPLE_HEAD)
        for name in ("budget", "predicted peak", "measured peak", "step", "recomputed ops", "loss"):
            self._table.add_column(name, justify="left" if name in ("budget", "loss") else "right")

    def show(self) -> None:
        """Train every row behind a progress bar, then print the table."""
        arguments = self._arguments
        fractions = QUICK_FRACTIONS if arguments.quick else FRACTIONS
        missing = why_no_inductor(self._device)
        with_inductor = not arguments.quick and arguments.codegen == "eager" and not missing
        self._console.print(f"\n{self._workload.name}: {self._workload.source}", soft_wrap=True, markup=False, highlight=False)
        options: dict[str, Any] = {"codegen": arguments.codegen}
        with Ticker(self._console, total=arguments.steps * (1 + len(fractions) + with_inductor)) as ticker:
            ticker.stage("training without a budget")
            free = self._train(ticker, {**options, "budget": None})
            self._add_row("none", free)
            ticker.stage("asking for the least reachable peak")
            floor_bytes = least_peak_bytes(self._workload, device=self._device, options=options)
            way_bytes = free.predicted_peak_bytes - floor_bytes
            last = free
            for fraction in fractions:
                budget_bytes = floor_bytes + int(fraction * way_bytes)
                ticker.stage(f"training at {format_bytes(budget_bytes)}")
                last = self._train(ticker, {**options, "budget": budget_bytes})
                self._add_row(f"{format_bytes(budget_bytes)} ({fraction:.0%} of the way)", last, free, budget_bytes)
            if with_inductor:
                self._add_inductor(ticker, floor_bytes + int(INDUCTOR_FRACTION * way_bytes), free)
        self._console.print(self._table)
        held, floor = format_bytes(free.static_bytes), format_bytes(floor_bytes)
        way = "The way is from the least reachable peak to the peak without a budget."
        self._console.print(f"Least reachable peak: {floor}, of which held over the whole step: {held}. {way}", highlight=False)
        if missing and not arguments.quick and arguments.codegen == "eager":
            self._console.print(f"No Inductor row: {missing}.", markup=False, highlight=False)
        if arguments.explain:
            self._console.print("\n" + last.explanation, markup=False, highlight=False, soft_wrap=True)

    def _train(self, ticker: Ticker, options: dict[str, Any]) -> Run:
        return run(self._workload, device=self._device, options=options, num_steps=self._arguments.steps, ticker=ticker)

    def _add_inductor(self, ticker: Ticker, budget_bytes: int, free: Run) -> None:
        label = f"{format_bytes(budget_bytes)}, Inductor"
        ticker.stage(f"compiling with Inductor, then training at {format_bytes(budget_bytes)}")
        try:
            trained = self._train(ticker, {"codegen": "inductor", "budget": budget_bytes, **SAME_MASKS})
        except BudgetTooSmall as error:
            self._table.add_row(label, "-", "-", "-", "-", f"refused: the least peak is {format_bytes(error.least_peak_bytes)}")
        else:
            self._add_row(label, trained, free, budget_bytes)

    def _add_row(self, label: str, trained: Run, free: Run | None = None, budget_bytes: int | None = None) -> None:
        loss = f"{trained.losses[-1]:.6f}"
        if free is not None:
            difference = max(abs(a - b) for a, b in zip(trained.losses, free.losses, strict=True))
            loss += ", equal" if trained.losses == free.losses else f", differs by up to {difference:.1e}"
        measured = format_bytes(trained.measured_peak_bytes)
        if budget_bytes is not None and trained.measured_peak_bytes > budget_bytes:
            measured = f"[red]above the budget[/red] {measured}"
        self._table.add_row(
            label,
            format_bytes(trained.predicted_peak_bytes),
            measured,
            format_us(trained.step_us),
            str(trained.num_recomputed),
            loss,
        )
