"""Inductor's buffer reuse raises peaks; it is off where a plan of ours needs the memory, and nowhere else."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import compile_fx, config

import dyngran


def train(budget: int | None, **options: object) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))))
    compiled = torch.compile(module, backend="dyngran", options={"budget": budget, **options} if budget else options)
    compiled(torch.randn(512, 64)).square().mean().backward()
    return dyngran.explain(compiled).plan


@cache
def free_plan() -> Any:
    return train(None)


@pytest.mark.parametrize(
    ("share", "options", "is_reused"),
    [
        pytest.param(0.75, {}, False, id="a plan of ours"),
        pytest.param(0.75, {"allow_buffer_reuse": True}, True, id="the user wants it"),
        pytest.param(0.75, {"allow_buffer_reuse": False}, False, id="the user does not want it"),
        pytest.param(2.0, {}, True, id="torch's own partition fits"),
        pytest.param(None, {}, True, id="no budget"),
    ],
)
def test_read_buffers_are_freed_at_once_under_a_plan_of_ours_only(
    share: float | None, options: dict[str, object], is_reused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = free_plan()
    budget = None if share is None else int(free.peak_bytes - (1 - share) * free.transient_bytes)
    seen: list[bool] = []
    real = compile_fx.compile_fx_inner

    def recording(*args: Any, **kwargs: Any) -> Any:
        seen.append(config.allow_buffer_reuse)
        return real(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", recording)
    plan = train(budget, **options)
    assert budget is None or plan.peak_bytes <= budget
    assert seen
    assert set(seen) == {is_reused}
    assert config.allow_buffer_reuse
