"""One model of the zoo, trained for one step every way: plainly, by stock torch, and by dyngran free, in the middle and at the floor.

What enters: how to make the model and its inputs, a device and a code generator. What leaves: a `Row`, which says of each way whether it
trained and what differed, and of each budget what was allowed, predicted and measured. Nothing raises: an error is what a row tells.
"""

from __future__ import annotations

import gc
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from families import repeatable
from measure import Snapshot, differences, held_tensors, measured_peak, snapshot, storage_bytes
from torch import Tensor, nn

import dyngran
from dyngran.compiler import given_up
from dyngran.errors import BudgetTooSmall

Inputs = dict[str, Any]
Make = Callable[[], tuple[nn.Module, Inputs]]

TOLERANCE = (
    2e-3  # of the largest entry of a tensor: what stock's own fusions may change in fp32; also what tells noise from a wrong gradient
)
MOST_REFUSALS = 40  # a step of several graphs may be refused by one after the other


class Step(nn.Module):
    """A model and its loss in one graph: the model's own loss, or the mean square of everything that it returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        outputs = self.model(**inputs)
        loss = getattr(outputs, "loss", None)
        if isinstance(loss, Tensor) and loss.requires_grad:
            return loss
        found = [t for t in tensors(outputs) if t.requires_grad and (t.is_floating_point() or t.is_complex())]
        return torch.stack([t.abs().float().square().mean() for t in found]).sum()


def tensors(value: object) -> list[Tensor]:
    """The tensors in a model's output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for one in value for t in tensors(one)] if isinstance(value, (list, tuple)) else []


@dataclass(slots=True)
class Way:
    """How one way of training went.

    Attributes:
        status: "equal" (bit for bit what the reference has), "close" (within `TOLERANCE`), "differs", "refused" (by a named error of
            dyngran's) or "fails".
        detail: what differed or failed. error: largest error of a tensor, as a share of its largest entry (of the largest gradient, for
            a gradient that is zero in mathematics).
        budget_bytes, predicted_bytes, peak_bytes: what was allowed, predicted and measured. num_recomputed: operators that run again.
        num_graphs: compiled graphs of the step that were planned. not_planned: functions of which dyngran said that torch made no graph
            and the budget does not cover them. is_within: measured within the budget.
    """

    status: str
    detail: str = ""
    error: float | None = None
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    peak_bytes: int | None = None
    num_recomputed: int | None = None
    num_graphs: int | None = None
    notes: list[str] = field(default_factory=list)
    not_planned: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def trains(self) -> bool:
        return self.status in ("equal", "close")

    @property
    def is_within(self) -> bool:
        return self.budget_bytes is None or self.peak_bytes is None or self.peak_bytes <= self.budget_bytes


@dataclass(slots=True)
class Row:
    """One model. ``static_bytes``: parameters, buffers and inputs. ``ways`` by budget: "free", "middle", "floor"."""

    name: str
    device: str
    codegen: str
    versions: dict[str, str]
    num_parameters: int = 0
    static_bytes: int = 0
    eager: Way | None = None
    stock: Way | None = None
    ways: dict[str, Way] = field(default_factory=dict)


@dataclass(slots=True)
class Trial:
    """The ways of one model, one after the other, each from the same seeds."""

    make: Make
    device: str
    codegen: str
    row: Row
    _want: Snapshot | None = None
    _unplanned: Snapshot | None = None

    def run(self) -> Row:
        with repeatable(self.device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.device == "cuda":
                fill_workspaces()
            self.row.eager = self._eager()
            if self.row.eager.trains:
                self.row.stock = self._stock()
                self._dyngran()
        return self.row

    def _eager(self) -> Way:
        started = time.perf_counter()
        try:
            step, inputs = self._fresh()
            self.row.num_parameters = sum(p.numel() for p in step.parameters())
            self.row.static_bytes = storage_bytes(held_tensors(step, tensors(inputs)))
            self._want = trained(step, step, inputs)
            del step, inputs
            again = differences(self._want, trained(*self._twice()))
        except Exception as error:  # noqa: BLE001 - whatever stops a model is what its row says
            return failed(error, started)
        if not all(bool(g.isfinite().all()) for g in self._want.gradients.values() if g is not None):
            return Way("differs", "gradients that are not finite", seconds=time.perf_counter() - started)
        status = Way("equal", seconds=time.perf_counter() - started)
        if again:
            status.status, status.detail = "close", "two eager steps differ: " + ", ".join(again[:3])
        return status

    def _stock(self) -> Way:
        """torch's own backend of this code generator: Inductor, or aot_eager."""
        started = time.perf_counter()
        backend, options = ("inductor", {"fallback_random": True}) if self.codegen == "inductor" else ("aot_eager", None)
        try:
            with clean():
                step, inputs = self._fresh()
                got = trained(torch.compile(step, backend=backend, options=options), step, inputs)
        except Exception as error:  # noqa: BLE001 - as above
            return failed(error, started)
        self._unplanned = got
        return self._judged(got, started)

    def _dyngran(self) -> None:
        free = self.row.ways["free"] = self._planned(None)
        if free.peak_bytes is None:
            return
        floor = self.row.ways["floor"] = self._floor()
        if floor.trains and (least_bytes := floor.budget_bytes or 0) > 1:
            self.row.ways["middle"] = self._planned((max(free.peak_bytes, least_bytes) + least_bytes) // 2)

    def _floor(self) -> Way:
        """At the least budget that is not refused: what a refusal names must train."""
        budget_bytes = 1
        for _ in range(MOST_REFUSALS):
            way = self._planned(budget_bytes)
            if way.status != "refused" or way.budget_bytes is None:
                return way
            budget_bytes = way.budget_bytes
        return way

    def _planned(self, budget_bytes: int | None) -> Way:
        started = time.perf_counter()
        options: dict[str, object] = {"codegen": self.codegen, "keep_below": 0, "budget": budget_bytes}
        if self.codegen == "inductor":
            options["fallback_random"] = True
        try:
            with clean():
                step, inputs = self._fresh()
                run = torch.compile(step, backend="dyngran", options=options)
                way = self._judged(trained(run, step, inputs), started)
                way.not_planned = said_not_planned()
                report = dyngran.explain(step)
                way.budget_bytes, way.predicted_bytes = budget_bytes, report.predicted_peak_bytes
                way.num_recomputed = sum(plan.num_recomputed for plan in report.plans)
                way.num_graphs = len(report.plans)
                way.notes = sorted(set(report.notes))
                step.zero_grad()
                way.peak_bytes = measured_peak(lambda: forward_backward(run, inputs), held_tensors(step, tensors(inputs)))
        except BudgetTooSmall as refusal:
            return Way("refused", str(refusal)[:300], budget_bytes=refusal.least_peak_bytes, seconds=time.perf_counter() - started)
        except Exception as error:  # noqa: BLE001 - as above
            return failed(error, started)
        way.seconds = time.perf_counter() - started
        return way

    def _judged(self, got: Snapshot, started: float) -> Way:
        """``got`` beside the plain step, and beside stock's where that has run: equal to either is equal. Where stock itself is wrong,
        which counts for nobody, close to it is close."""
        assert self._want is not None
        seconds = time.perf_counter() - started
        error, where = largest_error(self._want, got)
        unequal = differences(self._want, got)
        if unequal and self._unplanned is not None and self._unplanned is not got:
            unequal = differences(self._unplanned, got)
            if self.row.stock is not None and not self.row.stock.trains:
                error, where = min((error, where), largest_error(self._unplanned, got))
        if not torch.equal(self._want.rng_state, got.rng_state):
            return Way("differs", "state of the random generator", error, seconds=seconds)
        if not unequal:
            return Way("equal", "", error, seconds=seconds)
        if error <= TOLERANCE:
            return Way("close", ", ".join(unequal[:3]), error, seconds=seconds)
        return Way("differs", f"{where} by {error:.2g}; {', '.join(unequal[:3])}", error, seconds=seconds)

    def _fresh(self) -> tuple[nn.Module, Inputs]:
        model, inputs = self.make()
        moved = {name: t.to(self.device) if isinstance(t, Tensor) else t for name, t in inputs.items()}
        return Step(model).to(self.device), moved

    def _twice(self) -> tuple[nn.Module, nn.Module, Inputs]:
        step, inputs = self._fresh()
        return step, step, inputs


class _AddmmInBackward(torch.autograd.Function):
    """Of a square matrix; its backward's thread multiplies too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.addmm(x[0], x, x)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.addmm(x[0], x, tangents[0])


def fill_workspaces() -> None:
    """Have the libraries of a card take what they keep for each thread: cuBLASLt takes 1 MiB for backward's where an addmm runs again
    there, and a budget found before that would be that much too small after."""
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    product: Tensor = _AddmmInBackward.apply(x)  # type: ignore[no-untyped-call]  # torch does not annotate it
    torch.autograd.backward(product.sum())


@contextmanager
def clean() -> Iterator[None]:
    """Nothing compiled before, and no garbage of an earlier way on the card."""
    torch.compiler.reset()
    gc.collect()
    yield
    torch.compiler.reset()


def said_not_planned() -> list[str]:
    """The functions, with file and line, of which dyngran has said in this process that torch made no graph of them. It says so once."""
    found = (re.match(r"torch made no graph to plan of (.+?): ", sentence) for sentence in given_up.told())
    return [said[1] for said in found if said is not None]


def failed(error: BaseException, started: float) -> Way:
    lines = str(error).strip().splitlines() or [""]
    return Way("fails", f"{type(error).__name__}: {lines[0][:300]}", seconds=time.perf_counter() - started)


def forward_backward(run: Callable[..., Tensor], inputs: Inputs) -> Tensor:
    loss = run(**inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def trained(run: Callable[..., Tensor], step: nn.Module, inputs: Inputs) -> Snapshot:
    random.seed(7)
    numpy.random.seed(7)  # masks of spectrograms, layers that are dropped
    torch.manual_seed(7)
    return snapshot(step, forward_backward(run, inputs))


def largest_error(want: Snapshot, got: Snapshot) -> tuple[float, str]:
    """The largest error of a tensor as a share of its largest entry, and that tensor's name; gradients that vanish are noise, measured
    against a thousandth of the model's largest one."""
    gradients = [g for g in want.gradients.values() if g is not None and g.numel()]
    floor = 1e-3 * max((g.abs().max().item() for g in gradients), default=0.0)
    pairs: list[tuple[str, Tensor | None, Tensor | None, float]] = [("loss", want.loss, got.loss, 0.0)]
    pairs += [(f"gradient of {name}", g, got.gradients[name], floor) for name, g in want.gradients.items()]
    pairs += [(f"buffer {name}", b, got.buffers[name], 0.0) for name, b in want.buffers.items()]
    worst = (0.0, "")
    for name, left, right, least in pairs:
        if left is None or right is None:
            error = 0.0 if left is right else float("inf")
        elif left.shape != right.shape or left.dtype != right.dtype:
            error = float("inf")
        elif left.numel() == 0:
            error = 0.0
        else:
            exact, other = (torch.view_as_real(t) if t.is_complex() else t for t in (left, right))
            exact, other = exact.double(), other.double()
            error = ((exact - other).abs().nan_to_num(nan=float("inf")).max() / max(exact.abs().max().item(), least, 1e-12)).item()
            if torch.equal(torch.isnan(exact), torch.isnan(other)) and torch.equal(exact.nan_to_num(), other.nan_to_num()):
                error = 0.0
        worst = max(worst, (error, name))
    return worst
