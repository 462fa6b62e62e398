"""Which planned graphs belong to which model: a backend is given no model, so they are found by the identity of parameters."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from dyngran.compiler import given_up
from dyngran.compiler.planned_graph import PlannedGraph
from dyngran.passes.errors import NothingCompiled

_lock = threading.Lock()
_graphs: list[weakref.ref[PlannedGraph]] = []


def remember(graph: PlannedGraph) -> None:
    with _lock:
        _graphs[:] = [ref for ref in _graphs if ref() is not None]
        _graphs.append(weakref.ref(graph))


def graphs_of(handle: torch.nn.Module | Callable[..., Any] | None) -> list[PlannedGraph]:
    """The planned graphs of a module, a compiled module or function; of the last compilation if there are no parameters to tell by.

    Only graphs with backward are planned. Later compilations of the same frame come last. Raises NothingCompiled if there is none.
    """
    with _lock:
        alive = [graph for ref in _graphs if (graph := ref()) is not None and graph.plan is not None]
    modules = _modules_of(handle)
    if modules:
        wanted = {id(parameter) for module in modules for parameter in module.parameters()}
        found = [graph for graph in alive if graph.parameter_ids() & wanted]
    else:
        found = [graph for graph in alive if graph.chain is alive[-1].chain]
    if not found:
        raise NothingCompiled(
            "dyngran has not planned a graph of this model yet: call it once with gradients enabled, and check that it needs gradients."
            + "".join(f" {sentence[0].upper()}{sentence[1:]}" for sentence in given_up.told())
        )
    return found


def _modules_of(handle: Any) -> list[torch.nn.Module]:
    """Of these, the ones with parameters: the module itself, the owner of a compiled method, the modules that a compiled function names."""
    function = getattr(handle, "_torchdynamo_orig_callable", handle)
    named = [handle, getattr(function, "__self__", None)]
    if isinstance(function, FunctionType):
        names = inspect.getclosurevars(function)
        named += [*names.nonlocals.values(), *names.globals.values()]
    return [module for module in named if isinstance(module, torch.nn.Module) and any(True for _ in module.parameters())]
