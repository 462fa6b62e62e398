"""From a module, a compiled module, a function or nothing to the graphs that were planned for it."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dyngran
from dyngran.compiler import registry
from dyngran.compiler.registry import graphs_of
from dyngran.errors import NothingCompiled
from dyngran.passes.problem import Kind

OPTIONS: dict[str, object] = {"budget": "1GiB", "codegen": "eager"}


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().sum()


def train(function: Callable[..., Any], width: int) -> None:
    function(torch.randn(4, width)).backward()


def widths_of(handle: Any) -> set[int]:
    """Widths of the models whose graphs a handle finds, by the bytes of their parameters: 2 (width^2 + width) float32."""
    return {math.isqrt(graph.static_of((Kind.PARAMETER,)) // 8) for graph in graphs_of(handle)}


@pytest.fixture(name="models")
def _models() -> tuple[nn.Module, nn.Module, Any, Any]:
    """Two models of widths 8 and 16, compiled in this order, and their compiled forms."""
    small, large = Net(8), Net(16)
    compiled = [torch.compile(model, backend="dyngran", options=OPTIONS) for model in (small, large)]
    train(compiled[0], 8)
    train(compiled[1], 16)
    return small, large, *compiled  # type: ignore[return-value]  # two modules, two callables


def test_a_module_and_its_compiled_form_find_the_same_graph(models: tuple[nn.Module, nn.Module, Any, Any]) -> None:
    small, large, compiled_small, compiled_large = models
    assert graphs_of(small) == graphs_of(compiled_small)
    assert graphs_of(large) == graphs_of(compiled_large)
    assert widths_of(small) == {8}
    assert widths_of(large) == {16}
    assert widths_of(small.first) == {8}  # type: ignore[arg-type]  # a part of a model is found by its parameters
    assert dyngran.explain(small).plan == dyngran.explain(compiled_small).plan


def test_nothing_means_what_was_compiled_last(models: tuple[nn.Module, nn.Module, Any, Any]) -> None:
    small, _, compiled_small, _ = models
    assert graphs_of(None) == graphs_of(models[1])
    torch._dynamo.reset()
    train(compiled_small, 8)
    assert widths_of(None) == {8}
    assert graphs_of(None)[-1] is graphs_of(small)[-1]


def test_a_module_without_parameters_means_what_was_compiled_last() -> None:
    compiled = torch.compile(nn.Tanh(), backend="dyngran", options=OPTIONS)
    compiled(torch.randn(4, 4, requires_grad=True)).sum().backward()
    assert [graph.parameter_ids() for graph in graphs_of(compiled)] == [set()]


def test_a_module_compiled_in_place_is_found() -> None:
    module = Net(8)
    module.compile(backend="dyngran", options=OPTIONS)
    train(module, 8)
    assert widths_of(module) == {8}
    assert dyngran.explain(module).plan.num_recomputed == 0


def test_a_compiled_method_finds_the_model_it_belongs_to() -> None:
    module, other = Net(8), Net(16)
    step = torch.compile(module.forward, backend="dyngran", options=OPTIONS)
    train(step, 8)
    train(torch.compile(other, backend="dyngran", options=OPTIONS), 16)
    assert widths_of(step) == {8}


def test_a_compiled_function_of_one_model_is_found() -> None:
    module = Net(8)

    def loss(x: Tensor) -> Tensor:
        return module(x) * 2

    step = torch.compile(loss, backend="dyngran", options=OPTIONS)
    train(step, 8)
    train(torch.compile(Net(16), backend="dyngran", options=OPTIONS), 16)
    assert widths_of(step) == {8}


def test_a_function_that_gets_its_model_as_an_argument_finds_what_was_compiled_last() -> None:
    module = Net(8)
    step = torch.compile(lambda model, x: model(x), backend="dyngran", options=OPTIONS)
    step(module, torch.randn(4, 8)).backward()
    assert widths_of(step) == {8}


def test_a_model_that_was_not_compiled_is_named_as_such(models: tuple[nn.Module, nn.Module, Any, Any]) -> None:
    assert models
    for ask in (dyngran.explain, dyngran.frontier, graphs_of):
        with pytest.raises(NothingCompiled, match="call it once with gradients enabled"):
            ask(Net(8))


def test_a_model_whose_calls_needed_no_gradients_is_named_as_such() -> None:
    module = Net(8)
    step = torch.compile(module, backend="dyngran", options=OPTIONS)
    with torch.no_grad():
        step(torch.randn(4, 8))
    with pytest.raises(NothingCompiled):
        dyngran.explain(step)


def test_recompilations_of_one_model_come_last(models: tuple[nn.Module, nn.Module, Any, Any]) -> None:
    small, _, compiled_small, _ = models
    (first,) = graphs_of(small)
    compiled_small(torch.randn(6, 8)).backward()
    found = graphs_of(small)
    assert found[0] is first
    assert len(found) == 2
    assert dyngran.explain(small).plan is found[-1].plan


def test_models_and_their_graphs_are_not_kept_alive() -> None:
    module = Net(8)
    step = torch.compile(module, backend="dyngran", options=OPTIONS)
    train(step, 8)
    (graph,) = graphs_of(module)
    gone = [weakref.ref(module), weakref.ref(module.first.weight), weakref.ref(graph)]
    del module, step, graph
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    registry_size = len([ref for ref in registry._graphs if ref() is not None])
    train(torch.compile(Net(16), backend="dyngran", options=OPTIONS), 16)
    assert len(registry._graphs) <= registry_size + 1


def test_after_a_model_is_gone_another_one_is_not_mistaken_for_it() -> None:
    """Identities of freed parameters are used again by Python; a dead graph must not answer for a new model."""
    for _ in range(5):
        module = Net(8)
        train(torch.compile(module, backend="dyngran", options=OPTIONS), 8)
        del module
        torch._dynamo.reset()
        gc.collect()
    with pytest.raises(NothingCompiled):
        graphs_of(Net(8))
