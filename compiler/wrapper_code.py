"""Reading generated wrappers: their statements, the operators they call, and the nodes of the graph that these calls stand for."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.passes.signature import TensorSpec


class UnreadableWrapper(Exception):
    """The wrapper does something that the replay does not know; the simulator's prediction stays."""


def function_bodies(source: str) -> dict[str, list[ast.stmt]]:
    """Statements of the wrapper's functions: ``call`` and the bodies of higher-order operators. Of one name the last definition runs."""
    found = {node.name: node.body for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    if "call" not in found:
        raise UnreadableWrapper("no function named call")
    return found


def flatten(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.With):
            yield from flatten(statement.body)
        elif isinstance(statement, (ast.For, ast.While, ast.Try)):
            raise UnreadableWrapper(type(statement).__name__)
        else:
            yield statement


def method_chain(call: ast.expr) -> tuple[ast.expr, list[tuple[str, ast.Call]]]:
    """(``x``, calls of ``f`` and ``g`` by name) of ``x.f(...).g(...)``."""
    chain: list[tuple[str, ast.Call]] = []
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        chain.insert(0, (call.func.attr, call))
        call = call.func.value
    return call, chain


def dtype_of(expression: ast.expr) -> torch.dtype:
    dtype = getattr(torch, ast.unparse(expression).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise UnreadableWrapper(f"dtype {ast.unparse(expression)}")
    return dtype


def target_name(function: str) -> str:
    parts = function.removeprefix("torch.ops.").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def op_name(target: str) -> str:
    """``mm`` for ``aten.mm.default``."""
    return target_name(target.removeprefix("torch.ops."))


def _name_of(node: fx.Node) -> str | None:
    """The operator's name without namespace and overload; None for a node that calls none."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1]
    if isinstance(node.target, torch_private.HIGHER_ORDER_TYPE):
        name: str = node.target.name()  # type: ignore[no-untyped-call]  # torch gives it no types
        return name
    return None


def by_target(nodes: Iterable[fx.Node]) -> dict[str, list[fx.Node]]:
    """Calls by the operator that the wrapper names: for an operator that Inductor put into a body to keep its order, that one."""
    found: dict[str, list[fx.Node]] = {}
    for node in nodes:
        name = _name_of(node)
        if name == "control_deps":
            name = _name_of(inner) if (inner := _inner(node)) is not None else None
        if name is not None:
            found.setdefault(name, []).append(node)
    return found


def nodes_of_bodies(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Nodes of the graphs that a graph's higher-order operators run, however deep."""
    for child in module.modules():
        if child is not module and isinstance(child, fx.GraphModule):
            yield from child.graph.nodes


def _inner(node: fx.Node) -> fx.Node | None:
    """The one call in the body of an operator that holds others in place."""
    bodies = [getattr(node.graph.owning_module, str(arg.target), None) for arg in node.all_input_nodes if arg.op == "get_attr"]
    calls = [one for body in bodies if isinstance(body, fx.GraphModule) for one in body.graph.nodes if _name_of(one) is not None]
    return calls[0] if len(calls) == 1 else None


def wrapped_operator(node: fx.Node) -> str | None:
    """The operator that a higher-order operator runs, as in ``run_with_rng_state(state, op, ...)``."""
    call = _inner(node) if _name_of(node) == "control_deps" else node
    return None if call is None else next((str(arg) for arg in call.args if isinstance(arg, torch._ops.OpOverload)), None)


def result_of(node: fx.Node) -> Any:
    """A node's value; for nodes that a rewriter added without one, what its getitems say of its members."""
    if "val" in node.meta:
        return node.meta["val"]
    members: dict[Any, Any] = {user.args[1]: result_of(user) for user in node.users if torch_private.is_getitem(user)}
    return [members.get(position) for position in range(max(members, default=-1) + 1)]


def takes(node: fx.Node, shapes: Sequence[tuple[int, ...] | None]) -> bool:
    """Whether these may be the shapes of a node's first tensors; None is a shape that is not known."""
    values = [arg.meta.get("val") for arg in node.args if isinstance(arg, fx.Node)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return all(shape is None or shape == TensorSpec.of(tensor).shape for shape, tensor in zip(shapes, tensors, strict=False))
