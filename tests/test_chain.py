"""The graphs of one forward share its budget, however Dynamo came to cut it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from measure import measured_peak
from torch import Tensor, nn

import dyngran
from dyngran.compiler import torch_private
from dyngran.compiler.planned_graph import REPEAT_NOTE
from dyngran.compiler.registry import graphs_of
from dyngran.errors import BudgetTooSmall, NothingCompiled

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


class Tied(nn.Module):
    """A table that a break parts from the layers that read it again, and a head of its own after the last."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table, self.tower = nn.Embedding(1024, WIDTH), Tower(3)
        self.head = nn.Linear(WIDTH, 1024, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        torch._dynamo.graph_break()
        x = torch.tanh(self.tower(x))
        torch._dynamo.graph_break()
        return torch.relu(self.head(x[:4]))


def at_the_floor(make: Callable[[], nn.Module], ids: Tensor) -> tuple[int, int, Any]:
    """The measured peak at the least budget that no graph refuses, that budget, and the compiled model, which has no optimizer."""
    least_bytes = 1
    while True:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make()
        step = compiled(model, least_bytes)

        def run(step: Any = step) -> None:
            step(ids).sum().backward()

        try:
            for _ in range(2):
                run()
                model.zero_grad()
        except BudgetTooSmall as refusal:
            least_bytes = refusal.least_peak_bytes or 0
        else:
            return measured_peak(run, [*model.parameters(), ids]), least_bytes, step


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_later_graphs_are_foreseen_without_an_optimizer(tied: bool) -> None:
    """Backward of the layers runs beside the gradient of the head, and the head is compiled after them."""
    peak_bytes, least_bytes, step = at_the_floor(lambda: Tied(tied=tied), torch.randint(0, 1024, (ROWS,)))
    assert peak_bytes <= dyngran.explain(step).predicted_peak_bytes <= least_bytes


class Looped(nn.Module):
    """Blocks in a loop that Dynamo gives up, so that one graph runs for each, between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.stem, self.head = nn.Embedding(8, WIDTH), Tower(1), Tower(2)
        self.blocks = nn.ModuleList(Tower(3) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.stem(self.table(ids))
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.head(x)


def test_graphs_that_run_once_for_each_block_hold_what_every_run_saved() -> None:
    ids = torch.randint(0, 8, (ROWS,))
    peak_bytes, least_bytes, step = at_the_floor(Looped, ids)
    assert max(graph.runs_in_forward for graph in graphs_of(step)) >= 3
    assert peak_bytes <= least_bytes


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


class Scaled(nn.Module):
    """Begins with a graph that needs no backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(4)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs()
        torch._dynamo.graph_break()
        return (self.tower(x) * scale).square().mean()


def test_training_at_the_least_peak_goes_on_where_the_first_graph_needs_no_backward() -> None:
    x = torch.randn(ROWS, WIDTH)
    with pytest.raises(BudgetTooSmall) as refused:
        compiled(Scaled(), 1)(x)
    torch._dynamo.reset()
    model = Scaled()
    step = compiled(model, refused.value.least_peak_bytes)
    for _ in range(4):
        step(x).backward()
        model.zero_grad(set_to_none=True)
    assert not any("planned again" in note for one in graphs_of(step) for note in one.notes)


def test_a_later_graph_that_is_compiled_again_knows_those_before_it() -> None:
    step = Step(None)
    step.run()
    step.head.layers[0].register_forward_pre_hook(lambda module, inputs: None)
    step.run()
    newest = graphs_of(step.compiled)
    assert len(newest) == 3
    assert newest[-1].chain.members() == newest


class Wrapped(nn.Module):
    """Goes on after its model without a graph, as one that returns a dict does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        y = self.model(x)
        return {"out": y, "name": str(y.shape[0])}


def test_another_batch_is_another_forward_and_so_is_what_follows_a_refusal() -> None:
    step = compiled(Wrapped(Tower(4, breaks=True)))
    for rows in (ROWS, ROWS - 12, ROWS - 24):
        step(torch.randn(rows, WIDTH))["out"].sum().backward()
    assert set(sizes(graphs_of(step))) == {2}
    budgets = [dyngran.explain(step).predicted_peak_bytes // 2]
    for _ in range(3):  # a refusal speaks of one graph, and there are two
        again = compiled(Wrapped(Tower(4, breaks=True)), budgets[-1])
        try:
            again(torch.randn(ROWS, WIDTH))["out"].sum().backward()
        except BudgetTooSmall as refusal:
            budgets.append(refusal.least_peak_bytes)
    assert set(sizes(graphs_of(again))) == {2}
    assert len(budgets) > 1


class Late(nn.Module):
    """Makes its first graph inside of code of Dynamo's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Any:
        torch._dynamo.graph_break()
        return self.model(ids).tanh()


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).sin()
        torch._dynamo.graph_break()
        return x.cos()


def test_a_refusal_while_a_graph_runs_again_ends_its_forward() -> None:
    ids, budget_bytes, was_running = torch.randint(0, 8, (ROWS,)), 1, False
    while not was_running:
        torch._dynamo.reset()
        refused = compiled(Late(Looped()), budget_bytes)
        with pytest.raises(BudgetTooSmall) as refusal:
            refused(ids)
        budget_bytes = refusal.value.least_peak_bytes
        with suppress(NothingCompiled):  # the first graph was refused
            was_running = any("planned again" in note for graph in graphs_of(refused) for note in graph.notes)
    smaller = compiled(Late(Halves()))
    smaller(ids).sum().backward()
    assert set(sizes(graphs_of(smaller))) == {3}


def test_the_first_step_holds_nothing_of_its_caller() -> None:
    """Without the garbage collector: what was held while the graphs were compiled, and what the caller drops in the course of it."""

    class Loop:
        def __init__(self) -> None:
            self.step = compiled(Wrapped(Tower(4, breaks=True)), 2**30)

        def run(self) -> tuple[list[weakref.ref[Tensor]], list[bool]]:
            x = torch.randn(ROWS, WIDTH)
            out = self.step(x)["out"]
            torch.autograd.backward(out.sum())
            seen = [weakref.ref(x), weakref.ref(out)]
            del x, out
            return seen, [ref() is None for ref in seen]

    gc.disable()
    try:
        seen, was_gone = Loop().run()
        assert was_gone == [True, True]
        assert [ref() is None for ref in seen] == [True, True]
    finally:
        gc.enable()


def test_a_forward_that_is_thrown_away_is_no_part_of_the_next() -> None:
    step = compiled(Wrapped(Tower(4, breaks=True)))
    for rows in (ROWS, ROWS - 12):
        step(torch.randn(rows, WIDTH))
    assert set(sizes(graphs_of(step))) == {2}


@pytest.mark.parametrize("is_first", [True, False])
def test_the_other_branch_of_a_condition_is_nothing_that_follows(is_first: bool) -> None:
    left, right = Tower(2), Tower(3)

    def step(x: Tensor) -> Tensor:
        y = torch.tanh(x * weight)
        if (y.sum() > -1e9) is is_first:
            return left(y).sum()
        return right(y).sum()

    weight = nn.Parameter(torch.ones(WIDTH))
    run = compiled(step)
    run(torch.ones(ROWS, WIDTH)).backward()
    last = graphs_of(run)[-1]
    assert not last.chain.continues(last)


def test_a_graph_that_runs_twice_in_a_step_is_known_without_an_optimizer() -> None:
    tower = Tower(3)
    part = compiled(tower, 2**30)
    for _ in range(5):
        (part(torch.randn(ROWS, WIDTH)) + part(torch.randn(ROWS, WIDTH))).sum().backward()
    (graph,) = graphs_of(part)
    assert REPEAT_NOTE in graph.notes


def test_models_train_in_two_threads() -> None:
    """The allocations of a step are traced by torch's profiler, of which two at a time crash."""
    towers = [Tower(2), Tower(3)]
    steps = [compiled(tower) for tower in towers]

    def train(step: Any) -> int:
        step(torch.randn(ROWS, WIDTH)).sum().backward()
        step.zero_grad()  # so that no step needs another plan: torch refuses calls while another thread traces
        return 1

    assert [train(step) for step in steps] == [1, 1]

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda step: sum(train(step) for _ in range(20)), steps)] == [20, 20]


def test_a_part_without_gradients_counts_in_what_follows_it() -> None:
    head, weight = Tower(3), torch.randn(WIDTH, 8 * WIDTH)

    def step(x: Tensor) -> Tensor:
        y = (x @ weight)[:, :WIDTH] * 2
        torch._dynamo.graph_break()
        return head(y).square().mean()

    x, run = torch.randn(ROWS, WIDTH), compiled(step)
    run(x).backward()
    head.zero_grad()
    (graph,) = graphs_of(run)
    static_bytes = graph.plan.static_bytes
    assert static_bytes >= weight.nbytes + x.nbytes + sum(parameter.nbytes for parameter in head.parameters())
    assert static_bytes <= weight.nbytes + x.nbytes + sum(parameter.nbytes for parameter in head.parameters()) + TENSOR_BYTES


class Unread(nn.Module):
    """Has parameters that no graph reads, which count where the first graph was made, and calls what takes its results."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.unread = Tower(4, breaks=True), nn.Parameter(torch.ones(4 * TENSOR_BYTES))

    def forward(self, x: Tensor) -> Any:
        return self.tower(x)


def test_parameters_beside_the_first_graph_count_once_when_it_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Unread(), torch.randn(ROWS, WIDTH)
    step = compiled(model, 2**30)
    step(x).sum().backward()
    first, _ = graphs_of(step)
    own = [p for p in model.parameters() if id(p) in first.parameter_ids()]
    monkeypatch.setattr(torch_private, "modules_being_called", lambda: [model])
    gradients_bytes = sum(p.nbytes for p in model.parameters()) - sum(p.nbytes for p in own)
    assert first.chain.bytes_after(first, [x, *own]) == gradients_bytes + model.unread.nbytes  # of which the tower's function knows nothing
