"""The graphs of one forward share its budget, however Dynamo came to cut it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from measure import measured_peak
from torch import Tensor, nn

import dyngran
from dyngran.compiler.registry import graphs_of
from dyngran.errors import BudgetTooSmall

WIDTH, ROWS = 64, 512
TENSOR_BYTES = 4 * WIDTH * ROWS


class Tower(nn.Module):
    def __init__(self, depth: int, *, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        if self.breaks:
            torch._dynamo.graph_break()
        for layer in self.layers[2:]:
            x = torch.tanh(layer(x))
        return x


class Step:
    """A loss around a model with a break in its middle."""

    def __init__(self, budget_bytes: int | None) -> None:
        torch.manual_seed(0)
        self.model, self.head, self.x = Tower(4, breaks=True), Tower(3), torch.randn(ROWS, WIDTH)
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *self.head.parameters()], lr=0.1)
        self.compiled = compiled(lambda x: self.head(self.model(x)).square().mean(), budget_bytes)

    def run(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.compiled(self.x).backward()

    def peak_bytes(self) -> int:
        for _ in range(3):
            self.run()
        self.optimizer.zero_grad(set_to_none=True)
        return measured_peak(self.run, [*self.model.parameters(), *self.head.parameters(), self.x])


def compiled(model: Callable[..., Any], budget_bytes: int | None = None) -> Any:
    return torch.compile(model, backend="dyngran", options={"budget": budget_bytes, "codegen": "eager", "keep_below": 0})


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    gc.collect()


def sizes(graphs: Sequence[Any]) -> list[int]:
    return [len(one.chain.members()) for one in graphs]


def test_a_loss_around_a_model_with_a_break_is_one_step() -> None:
    free = Step(None)
    assert free.peak_bytes() == dyngran.explain(free.compiled).predicted_peak_bytes
    assert sizes(graphs_of(free.compiled)) == [3, 3, 3]


def test_its_budget_is_kept_or_refused() -> None:
    free_bytes = Step(None).peak_bytes()
    refused = []
    for saved in range(1, 9):
        budget_bytes = free_bytes - saved * TENSOR_BYTES
        torch._dynamo.reset()
        step = Step(budget_bytes)
        try:
            peak_bytes = step.peak_bytes()
        except BudgetTooSmall:
            refused.append(saved)
        else:
            assert peak_bytes <= dyngran.explain(step.compiled).predicted_peak_bytes <= budget_bytes
    assert refused == [*range(3, 9)]  # two tensors less can be had, and no budget in between is refused


def test_a_function_that_only_passes_on_what_it_calls_is_followed_by_nothing() -> None:
    model = Tower(4, breaks=True)

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Any:
            return self.model(x)

    step = compiled(Wrapper())
    step(torch.randn(ROWS, WIDTH)).sum().backward()
    first, second = graphs_of(step)
    assert (first.chain.continues(first), second.chain.continues(second)) == (True, False)


def test_a_model_that_takes_what_another_returned_counts_what_that_holds() -> None:
    x = torch.randn(ROWS, WIDTH)
    maker, judge = compiled(Tower(4)), compiled(Tower(3))
    judge(maker(x)).sum().backward()
    (made,), (judged,) = graphs_of(maker), graphs_of(judge)
    assert made.chain is judged.chain
    assert judged.chain.members() == [made, judged]
    alone = compiled(Tower(3))
    alone(torch.randn(ROWS, WIDTH)).sum().backward()
    (by_itself,) = graphs_of(alone)
    assert by_itself.chain.members() == [by_itself]
    extra_bytes = judged.plan.peak_bytes - by_itself.plan.peak_bytes
    held_bytes = sum(parameter.nbytes for parameter in maker.parameters()) + x.nbytes
    assert extra_bytes == held_bytes + made.plan.saved_bytes - TENSOR_BYTES  # what it takes is its input, and counted there


def test_what_went_through_other_operators_is_followed_as_well() -> None:
    maker, judge = compiled(Tower(2)), compiled(Tower(3))
    judge(maker(torch.randn(ROWS, WIDTH)).flip(0) * 2).sum().backward()
    (made,), (judged,) = graphs_of(maker), graphs_of(judge)
    assert judged.chain.members() == [made, judged]


def test_a_detached_result_binds_nothing() -> None:
    maker, judge = compiled(Tower(2)), compiled(Tower(3))
    judge(maker(torch.randn(ROWS, WIDTH)).detach()).sum().backward()
    assert sizes([*graphs_of(maker), *graphs_of(judge)]) == [1, 1]


def test_a_break_that_no_graph_followed_ends_with_its_backward() -> None:
    def stops(x: Tensor) -> Any:
        y = torch.tanh(x @ weight)
        torch._dynamo.graph_break()
        return y

    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    first, other = compiled(stops), compiled(Tower(2))
    first(torch.randn(ROWS, WIDTH)).sum().backward()
    other(torch.randn(ROWS, WIDTH)).sum().backward()
    assert sizes([*graphs_of(first), *graphs_of(other)]) == [1, 1]


def test_a_later_graph_that_is_compiled_again_knows_those_before_it() -> None:
    step = Step(None)
    step.run()
    step.head.layers[0].register_forward_pre_hook(lambda module, inputs: None)
    step.run()
    newest = graphs_of(step.compiled)
    assert len(newest) == 3
    assert newest[-1].chain.members() == newest
