"""Training in the middle of what a budget may be: half way between the least peak that a refusal names and the default partition's.

A `Feature` builds one training step around whatever compiles it. It is trained in plain eager and under dyngran, op by op, at that budget:
losses, gradients, buffers and the random state must be the same bit for bit, something must really be recomputed, and the measured peak
must be within the budget.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from measure import Snapshot, differences, held_tensors, measured_peak, snapshot
from torch import Tensor, nn
from torch.nn import functional as F

import dyngran
from dyngran.compiler.report import Report
from dyngran.errors import BudgetTooSmall

Compile = Callable[[Any], Any]
EAGER: Mapping[str, object] = {"codegen": "eager", "keep_below": 0}
INDUCTOR: Mapping[str, object] = {"keep_below": 0}
NUM_STEPS = 2


@dataclass(frozen=True, slots=True)
class Training:
    """A module, what the loop holds beside it, its compiled loss, and one forward and backward that returns the loss without a graph."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[..., Tensor]
    step: Callable[[], Tensor]


Feature = Callable[[Compile], Training]


@dataclass(frozen=True, slots=True)
class Trained:
    """What `check` saw under dyngran."""

    budget_bytes: int
    peak_bytes: int
    report: Report


class Block(nn.Module):
    """A residual block with dropout: (..., width) → (..., width)."""

    def __init__(self, width: int = 64, dropout: float = 0.1) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)


class Net(nn.Module):
    """Two blocks and a mean square. ``around(block, x)`` is how each block is called."""

    def __init__(self, around: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x), *, dropout: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(2))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.around(block, x)
        return x.square().mean()


def rows(num_rows: int = 128, width: int = 64) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(num_rows))


def stepped(module: nn.Module, inputs: tuple[Tensor, ...], loss: Callable[..., Tensor]) -> Training:
    """Forward is ``loss(*inputs)``."""

    def step() -> Tensor:
        found = loss(*inputs)
        found.backward()  # type: ignore[no-untyped-call]
        return found.detach()

    return Training(module, inputs, loss, step)


def plain(compile_it: Compile, module: nn.Module, *inputs: Tensor) -> Training:
    """The module is compiled, and returns its loss."""
    return stepped(module, inputs, compile_it(module))


def compiler(options: Mapping[str, object] = EAGER, **how: Any) -> Compile:
    """torch.compile under dyngran with ``options``; ``how`` are further arguments of torch.compile."""
    return lambda function: torch.compile(function, backend="dyngran", options=dict(options), **how)


def as_it_is(function: Any) -> Any:
    return function


def stock(function: Any) -> Any:
    """torch's own graphs, op by op: what eager code cannot be compared with bit for bit (autocast rounds elsewhere there)."""
    return torch.compile(function, backend="aot_eager")


def fresh(feature: Feature, compile_it: Compile) -> Training:
    torch.compiler.reset()
    gc.collect()
    torch.manual_seed(0)
    return feature(compile_it)


def train(training: Training, num_steps: int = NUM_STEPS) -> list[Snapshot]:
    """Steps of plain gradient descent; what each of them computed."""
    optimizer = torch.optim.SGD(training.module.parameters(), lr=0.01)
    torch.manual_seed(7)
    seen = []
    for _ in range(num_steps):
        seen.append(snapshot(training.module, training.step()))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def peak_of(training: Training) -> int:
    """Measured peak of a step that starts without gradients."""
    training.module.zero_grad()
    peak_bytes = measured_peak(training.step, held_tensors(training.module, training.inputs))
    training.module.zero_grad()
    return peak_bytes


def middle_budget(feature: Feature, options: Mapping[str, object] = EAGER, **how: Any) -> int:
    """Half way between the least peak that a refusal names and the measured peak of torch's default partition."""
    free = fresh(feature, compiler({**options, "solver": "default"}, **how))
    free.step()
    free_bytes = peak_of(free)
    with pytest.raises(BudgetTooSmall) as refusal:
        fresh(feature, compiler({**options, "budget": 1}, **how)).step()
    assert refusal.value.least_peak_bytes < free_bytes
    return (refusal.value.least_peak_bytes + free_bytes) // 2


def check(feature: Feature, *, reference: Compile = as_it_is, **how: Any) -> Trained:
    """Train as ``reference`` does and in the middle of the budgets, and compare. ``how`` are arguments of torch.compile."""
    want = train(fresh(feature, reference))
    budget_bytes = middle_budget(feature, **how)
    training = fresh(feature, compiler({**EAGER, "budget": budget_bytes}, **how))
    for position, (expected, got) in enumerate(zip(want, train(training), strict=True)):
        assert differences(expected, got) == [], f"step {position}"
    peak_bytes = peak_of(training)
    report = dyngran.explain(training.module)
    assert isinstance(report, Report), "one graph was expected"
    assert report.plan.num_recomputed > 0, str(report)
    assert peak_bytes <= budget_bytes, str(report)
    return Trained(budget_bytes, peak_bytes, report)
