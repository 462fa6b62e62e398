"""Predicted optimizer state against the state that a real first step creates."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dyngran.runtime.optimizer_state import attach, find_optimizers, note_optimizer, predicted_state_bytes


class Sparse(Optimizer):
    """A user's optimizer: one buffer per row, options of its own, a constructor without defaults."""

    def __init__(self, rate: float, params: Any) -> None:
        self.calls: list[int] = []
        super().__init__(params, {"rate": rate})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.calls.append(1)
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                if "rows" not in state:
                    state["rows"] = torch.zeros_like(param.sum(-1))
                param.data.sub_(group["rate"] * param.grad)


def network() -> nn.Sequential:
    first = nn.Linear(32, 64)
    first.bias.requires_grad_(False)
    return nn.Sequential(first, nn.LayerNorm(64), nn.Linear(64, 8))


def state_bytes(optimizer: Optimizer) -> int:
    owned = {param.untyped_storage().data_ptr() for group in optimizer.param_groups for param in group["params"]}
    sizes = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    return sum(size for pointer, size in sizes.items() if pointer not in owned)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "foreach Adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "user's": lambda p: Sparse(1e-3, p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_prediction_is_what_the_first_step_creates(name: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    before = predicted_state_bytes(optimizer)
    assert before.present_bytes == state_bytes(optimizer)
    model(torch.rand(4, 32)).sum().backward()
    optimizer.step()
    after = predicted_state_bytes(optimizer)
    assert before.present_bytes + before.future_bytes == state_bytes(optimizer) == after.present_bytes
    assert after.future_bytes == 0
    assert not before.source.startswith("unknown")


def test_predicting_touches_nothing() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)  # patches optimizer.step
    stepped: list[object] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    handle = register_optimizer_step_pre_hook(lambda *_: stepped.append(2))
    weights = [param.detach().clone() for param in model.parameters()]
    random_state = torch.get_rng_state()
    try:
        with FakeTensorMode():  # as while a graph is being compiled
            assert predicted_state_bytes(optimizer).future_bytes > 0
    finally:
        handle.remove()
    assert stepped == []
    assert dict(optimizer.state) == {}
    assert scheduler.last_epoch == 0
    assert all(param.grad is None for param in model.parameters())
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
    assert torch.equal(random_state, torch.get_rng_state())
    custom = Sparse(1e-3, model.parameters())
    predicted_state_bytes(custom)
    assert custom.calls == []


def test_what_cannot_be_known_is_zero_and_says_so() -> None:
    model = network()
    for optimizer in (torch.optim.LBFGS(model.parameters()), Sparse(1e-3, model.parameters())):
        if isinstance(optimizer, Sparse):
            vars(optimizer)["inner"] = torch.optim.SGD(model.parameters(), lr=1.0)  # stepping a copy would step the real one
        prediction = predicted_state_bytes(optimizer)
        assert prediction.future_bytes == 0
        assert prediction.source.startswith("unknown: ")


def test_optimizers_are_found_by_the_identity_of_parameters() -> None:
    first, second = network(), network()
    mine = torch.optim.SGD(first.parameters(), lr=1.0)
    other = torch.optim.SGD(second.parameters(), lr=1.0)
    assert find_optimizers(first.parameters()) == [mine]
    assert find_optimizers(list(second.parameters())[-1:]) == [other]
    assert find_optimizers([nn.Parameter(torch.ones(2))]) == []


def test_an_optimizer_made_after_the_search_is_found_when_it_steps() -> None:
    model = network()
    assert find_optimizers(model.parameters()) == []
    late = torch.optim.SGD(model.parameters(), lr=1.0)
    assert find_optimizers(model.parameters()) == []
    note_optimizer(late)
    assert find_optimizers(model.parameters()) == [late]


def test_attached_optimizers_come_first_and_nothing_is_kept_alive() -> None:
    model = network()
    discovered = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attach(model, optimizer)
    assert find_optimizers(model.parameters()) == [optimizer]
    attach(model, discovered)
    assert set(map(id, find_optimizers(model.parameters()))) == {id(optimizer), id(discovered)}
    predicted_state_bytes(optimizer)
    watched: list[weakref.ref[Any]] = [weakref.ref(optimizer), weakref.ref(model)]
    del optimizer, discovered, model
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
