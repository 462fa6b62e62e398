"""Where Dynamo makes no graph of what was to be compiled, nobody can keep a budget: it is said, once, and only to people who set one."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dyngran
from dyngran.compiler import backend, given_up
from dyngran.errors import NothingCompiled


class Looped(nn.Module):
    """A graph break inside of a loop: Dynamo cannot go on after it, and leaves the whole function alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            torch._dynamo.graph_break()
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cells(x.unsqueeze(0))[0]
        return out


@pytest.fixture(autouse=True)
def _watched() -> None:
    """As in a process where `torch.compile` has just been told of this backend."""
    torch.compiler.reset()
    given_up.watch(backend.dyngran)


def train(module: nn.Module, name: str, **options: object) -> Tensor:
    loss = torch.compile(module, backend=name, options=options or None)(torch.randn(4, 8)).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize(("make", "reason"), [(Looped, "graph_break"), (Recurrent, "LSTM")])
def test_a_model_without_a_graph_is_named_with_the_reason(
    make: Callable[[], nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = make()
    with caplog.at_level(logging.WARNING, "dyngran"):
        train(module, "dyngran", codegen="eager", budget="1GiB")
    (said,) = {record.getMessage() for record in caplog.records if "forward (test_given_up.py" in record.getMessage()}
    assert reason in said and "budget does not cover" in said
    assert all(p.grad is not None for p in module.parameters())
    with pytest.raises(NothingCompiled, match=reason):
        dyngran.explain(module)


@pytest.mark.parametrize(("name", "options"), [("dyngran", {"codegen": "eager"}), ("aot_eager", {})])
def test_without_a_budget_and_with_another_backend_nothing_is_said(
    name: str, options: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "dyngran"):
        train(Looped(), name, **options)
    assert not caplog.records


def test_a_function_that_has_nothing_to_compute_and_a_model_of_one_graph_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dyngran"):
        train(nn.Sequential(nn.Linear(8, 8), nn.GELU()), "dyngran", codegen="eager", budget="1GiB")
        assert torch.compile(lambda x: 3, backend="dyngran", options={"codegen": "eager", "budget": "1GiB"})(torch.randn(2)) == 3
    assert not caplog.records
