"""A plan whose code cannot be generated is not the end: a plainer one that fits is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dyngran
from dyngran.compiler import torch_private
from dyngran.compiler.strategy import Strategy
from dyngran.passes.plan import Plan


def deep_net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    return nn.Sequential(*layers), torch.randn(512, 64)


def train_under(budget: int | None) -> Any:
    torch._dynamo.reset()
    module, batch = deep_net()
    compiled = torch.compile(module, backend="dyngran", options={"budget": budget} if budget else {})
    compiled(batch).square().mean().backward()
    return dyngran.explain(compiled), [parameter.grad for parameter in module.parameters()]


def fail(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> list[frozenset[int]]:
    """Let the code generator fail on the first plans that are tried, which are in the list afterwards."""
    real, failed = torch_private.compile_inductor, []
    rule_out = Strategy.rule_out

    def failing(*args: Any, **options: Any) -> Any:
        run = real(*args, **options)
        if len(failed) < num_failures:
            raise torch_private.code_generation_error()(RuntimeError("out of registers"), None)
        return run

    def ruled_out(self: Strategy, plan: Plan) -> bool:
        failed.append(plan.saved)
        return rule_out(self, plan)

    monkeypatch.setattr(torch_private, "compile_inductor", failing)
    monkeypatch.setattr(Strategy, "rule_out", ruled_out)
    return failed


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_plainer_plan_is_taken_and_said(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
    free, want = train_under(None)
    frontier_budget = int(free.plan.peak_bytes - 0.3 * free.plan.transient_bytes)
    failed = fail(monkeypatch, num_failures)
    found, gradients = train_under(frontier_budget)
    assert len(failed) == len({*failed, found.plan.saved}) - 1 == num_failures
    assert found.plan.peak_bytes <= frontier_budget
    assert any("code generator failed" in note for note in found.notes)
    for gradient, wanted in zip(gradients, want, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)


def test_a_refusal_says_what_plans_need_whose_code_can_be_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    free, _ = train_under(None)
    failed = fail(monkeypatch, 2)
    with pytest.raises(dyngran.errors.BudgetTooSmall) as refusal:
        train_under(1)
    assert len(failed) == 2
    least_bytes = refusal.value.least_peak_bytes
    found, _ = train_under(least_bytes)
    assert found.plan.peak_bytes <= least_bytes < free.plan.peak_bytes
    assert found.plan.saved not in failed


def test_a_graph_that_fails_whatever_is_saved_raises_what_the_code_generator_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    free, _ = train_under(None)

    def failing(*args: Any, **options: Any) -> Any:
        raise torch_private.code_generation_error()(RuntimeError("out of registers"), None)

    monkeypatch.setattr(torch_private, "compile_inductor", failing)
    with pytest.raises(Exception, match="out of registers"):
        train_under(int(free.plan.peak_bytes - 0.3 * free.plan.transient_bytes))
