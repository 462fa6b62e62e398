"""One graph in several situations: gradients that exist already, in whole or in part, and threads that meet a new one at the same time."""

from __future__ import annotations

import contextlib
import copy
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from measure import forward_backward, held_tensors, measured_peak
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dyngran
from dyngran.compiler import registry
from dyngran.compiler.registry import graphs_of
from dyngran.compiler.situation import Situation
from dyngran.errors import BudgetTooSmall

WIDTH, ROWS = 256, 128
EAGER: dict[str, object] = {"codegen": "eager", "keep_below": 0}


def layers(num_layers: int = 4, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Sigmoid()) for _ in range(num_layers)])


def held(leaves: list[Tensor], x: Tensor) -> list[Tensor]:
    return [x, *leaves, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def least_peak(loss: object, x: Tensor) -> int:
    torch._dynamo.reset()
    with pytest.raises(BudgetTooSmall) as refusal:
        torch.compile(loss, backend="dyngran", options={**EAGER, "budget": 1})(x)
    torch._dynamo.reset()
    return int(refusal.value.least_peak_bytes)


def test_gradients_of_plain_leaf_tensors_that_appear_late_are_within_the_budget_or_refused() -> None:
    x, leaves = torch.randn(ROWS, WIDTH), [torch.randn(WIDTH, WIDTH).div_(16).requires_grad_() for _ in range(4)]

    def loss(x: Tensor) -> Tensor:
        for leaf in leaves:
            x = torch.sigmoid(x @ leaf)
        return x.mean()

    least_bytes = least_peak(loss, x)
    gradients_bytes = 4 * WIDTH * WIDTH * 4
    for room_bytes, is_enough in ((100_000, False), (gradients_bytes, True)):
        budget_bytes = least_bytes + room_bytes
        torch._dynamo.reset()
        step = torch.compile(loss, backend="dyngran", options={**EAGER, "budget": budget_bytes})
        for _ in range(8):
            for leaf in leaves:
                leaf.grad = None
            step(x).backward()
        if not is_enough:
            with pytest.raises(BudgetTooSmall):
                step(x)
            continue
        for _ in range(2):
            assert measured_peak(lambda step=step: step(x).backward(), held(leaves, x)) <= budget_bytes


def test_gradients_that_appear_bit_by_bit_take_two_more_plans_and_stay_within_the_budget() -> None:
    model, x = layers(6), torch.randn(ROWS, WIDTH)
    leaves = list(model.parameters())
    budget_bytes = least_peak(lambda x: model(x).mean(), x) + sum(leaf.numel() for leaf in leaves) * 4
    step = torch.compile(lambda x: model(x).mean(), backend="dyngran", options={**EAGER, "budget": budget_bytes})
    for num_kept in range(7):  # layers whose gradients of the step before are still there
        for place, layer in enumerate(model):
            if place >= num_kept:
                layer.zero_grad()
        assert measured_peak(lambda: step(x).backward(), held(leaves, x)) <= budget_bytes or num_kept == 0  # compiles at first
    (graph,) = registry.graphs_of(model)
    assert len({id(run) for run in graph._rungs.values()}) == 3
    assert dyngran.explain(model).plan.static_bytes >= 2 * sum(leaf.numel() for leaf in leaves) * 4


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_accumulating_gradients_takes_a_second_plan_and_leaves_the_first(momentum: float) -> None:
    """Steps of two micro-batches, which no plan for the first fits with gradients beside it. State that appears later concerns both."""
    model, x = layers(6), torch.randn(16 * ROWS, WIDTH)
    leaves = list(model.parameters())
    gradients_bytes = sum(leaf.numel() for leaf in leaves) * 4
    budget_bytes = least_peak(lambda x: model(x).mean(), x) + 2 * gradients_bytes
    optimizer = torch.optim.SGD(leaves, lr=0.01, momentum=momentum, foreach=False)
    step = torch.compile(lambda x: model(x).mean(), backend="dyngran", options={**EAGER, "budget": budget_bytes})
    for num_steps in range(4):
        model.zero_grad()
        for _ in range(2):
            kept = [*held(leaves, x), *(state["momentum_buffer"] for state in optimizer.state.values() if momentum)]
            peak_bytes = measured_peak(lambda: step(x).backward(), kept)
            assert peak_bytes <= budget_bytes or num_steps == 0
        if num_steps == 0:
            first, second = dict(registry.graphs_of(model)[0]._rungs).values()
        optimizer.step()
    (graph,) = registry.graphs_of(model)
    assert first.peak_bytes + gradients_bytes > budget_bytes, "the first plan would do with gradients as well"
    is_planned_again = any("planned again" in note for note in graph.notes)
    assert is_planned_again is bool(momentum)
    assert {first, second}.isdisjoint(graph._rungs.values()) is bool(momentum)
    assert len(graph._rungs) == 2


def test_where_all_gradients_together_never_fit_those_that_exist_are_planned_for() -> None:
    model, x = layers(6), torch.randn(ROWS, WIDTH)
    leaves = list(model.parameters())
    budget_bytes = least_peak(lambda x: model(x).mean(), x) + 2 * (WIDTH * WIDTH + WIDTH) * 4
    step = torch.compile(lambda x: model(x).mean(), backend="dyngran", options={**EAGER, "budget": budget_bytes})
    for num_kept in range(3):
        for place, layer in enumerate(model):
            if place >= num_kept:
                layer.zero_grad()
        assert measured_peak(lambda: step(x).backward(), held(leaves, x)) <= budget_bytes or num_kept == 0
    with pytest.raises(BudgetTooSmall, match=r"1\.506 MiB of that peak are gradients of earlier calls, .* zero_grad\(\) before it"):
        step(x)  # all six


def test_parameters_can_be_swapped_between_steps() -> None:
    """`load_state_dict` and `to` do so under `torch.__future__.set_swap_module_params_on_conversion`: nobody may refer weakly to them."""
    model, other, x = layers(2), layers(2), torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    step = torch.compile(lambda x: model(x).square().mean(), backend="dyngran", options={**EAGER, "budget": 2**30})
    step(x).backward()
    expected, found = other(x).square().mean(), list(model.parameters())
    expected.backward()
    model.zero_grad()
    for mine, theirs in zip(found, copy.deepcopy(other).parameters(), strict=True):
        torch.utils.swap_tensors(mine, theirs)
    loss = step(x)
    loss.backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in zip(found, other.parameters(), strict=True))
    assert graphs_of(model)


@pytest.mark.parametrize(
    ("known", "other", "is_covered"),
    [
        ((0, ()), (0, ()), True),
        ((0, ()), (8, ()), False),
        ((8, ()), (0, ()), False),
        ((8, ()), (4, ()), True),
        ((4, ()), (8, ()), False),
        ((0, (4,)), (0, (3,)), True),
        ((0, (4,)), (0, (5,)), False),
    ],
)
def test_a_plan_covers_what_holds_no_more(known: tuple[int, tuple[int, ...]], other: tuple[int, tuple[int, ...]], is_covered: bool) -> None:
    assert Situation(*known).covers(Situation(*other)) is is_covered


def test_threads_may_meet_new_situations_at_the_same_time() -> None:
    """Three models, compiled one after the other; then each thread's second step is the first with gradients, which is planned anew."""
    x = torch.randn(32, 64)
    models = [layers(8, 64) for _ in range(3)]
    steps = [torch.compile(model, backend="dyngran", options={**EAGER, "budget": "100MiB"}) for model in models]
    for step in steps:
        step(x).sum().backward()

    def work(step: nn.Module) -> None:
        for _ in range(3):
            step(x).sum().backward()

    with ThreadPoolExecutor(max_workers=len(steps)) as pool:
        list(pool.map(work, steps))  # raises what a thread died of
    alone = layers(8, 64)
    for _ in range(4):
        alone(x).sum().backward()
    for model in models:
        for want, got in zip(alone.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad)


class Sideways(nn.Module):
    """Reads one of its two layers, and one of its two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.unread = nn.Linear(64, 64), nn.Linear(512, 512)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.sin(torch.sin(self.read(x))).square().mean()


def test_what_the_model_holds_and_no_graph_reads_is_counted() -> None:
    module, inputs = Sideways(), (torch.randn(256, 64), torch.ones(256, 512))
    step = torch.compile(module, backend="dyngran", options={"codegen": "eager", "keep_below": 0})
    forward_backward(step, inputs)
    module.zero_grad()
    peak_bytes = measured_peak(lambda: forward_backward(step, inputs), held_tensors(module, inputs))
    assert peak_bytes == dyngran.explain(step).predicted_peak_bytes
    module.zero_grad()
    again = copy.deepcopy(module)  # the same code serves another instance, which holds as much and not twice as much
    tight = torch.compile(module, backend="dyngran", options={"codegen": "eager", "keep_below": 0, "budget": peak_bytes})
    forward_backward(tight, inputs)
    other = torch.compile(again, backend="dyngran", options={"codegen": "eager", "keep_below": 0, "budget": peak_bytes})
    forward_backward(other, inputs)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.read.parameters(), again.read.parameters(), strict=True))


class Widening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 128), nn.LayerNorm(128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.norm(torch.nn.functional.gelu(self.up(x))))
        return out


class Repeated(nn.Module):
    """Two blocks that are compiled in place, each under an eager checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Widening() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


@pytest.mark.parametrize("budget_bytes", [2**30, 600_000])
def test_a_checkpoint_repeats_a_call_by_the_plan_that_the_call_ran_by(budget_bytes: int) -> None:
    """Whatever has come up between the two: gradients, other sizes, more of what is held."""
    plain, module = Repeated(), Repeated()
    module.load_state_dict(plain.state_dict())
    for block in module.blocks:
        block.compile(backend="dyngran", options={"codegen": "eager", "keep_below": 0, "budget": budget_bytes})
    for num_rows in (64, 96, 96, 64):
        x = torch.randn(num_rows, 32)
        for model in (plain, module):
            forward_backward(model, (x,))
        for name, parameter in plain.named_parameters():
            assert torch.allclose(parameter.grad, module.get_parameter(name).grad, atol=1e-6), name
    for graph in graphs_of(module):
        assert not any("several times" in note for note in graph.notes)


@pytest.mark.parametrize("is_hooked", [False, True])
def test_hooks_on_what_is_saved_are_said_to_be_outside_of_the_plan(is_hooked: bool, caplog: pytest.LogCaptureFixture) -> None:
    module, x = layers(2), torch.randn(ROWS, WIDTH)
    step = torch.compile(lambda x: module(x).square().mean(), backend="dyngran", options={**EAGER, "budget": 2**30})
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t) if is_hooked else contextlib.nullcontext()
    with caplog.at_level(logging.WARNING, "dyngran"), hooks:
        forward_backward(step, (x,))
    assert any("saved-tensor hooks" in note for note in dyngran.explain(module).notes) is is_hooked
    assert bool(caplog.records) is is_hooked


class Reentrant(Repeated):
    """Its blocks only ever run with gradients from within a backward."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x.square().mean()


def test_calls_that_a_reentrant_checkpoint_makes_are_planned_like_any() -> None:
    """Their steps are observed and the first of them looked at, although all come from within a backward."""
    module, x = Reentrant(), torch.randn(64, 32, requires_grad=True)
    for block in module.blocks:
        block.compile(backend="dyngran", options={"codegen": "eager", "keep_below": 0, "budget": 2**30})
    for _ in range(3):
        forward_backward(module, (x,))
    graphs = graphs_of(module)
    assert graphs
    assert all(graph.observer.num_steps > 1 and graph._num_calls > 0 for graph in graphs)
