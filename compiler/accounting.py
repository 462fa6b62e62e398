"""What Inductor's generated wrappers allocate, line by line: the peak of one step as the code that will run implies it.

Fusion, buffer reuse and the order of kernels are Inductor's to decide, so a prediction made before code generation is approximate. The
generated wrapper is plain: buffers are allocated, kernels launched, names deleted. Replaying its statements with the storages each name
is bound to gives the peak exactly, but for workspaces inside kernels, which are added where they were measured.
"""

from __future__ import annotations

import ast
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.capture import CPU_RANDOM_STATE_BYTES, Captured
from dyngran.compiler.storages import storage_bytes, tensors_of
from dyngran.passes.errors import UnknownSize
from dyngran.passes.plan import Plan
from dyngran.passes.signature import TensorSpec

log = logging.getLogger("dyngran.accounting")

_ALIASES = frozenset({"reinterpret_tensor", "_reinterpret_tensor", "as_strided", "alloc_from_pool"})
_REINTERPRETS = frozenset({"reinterpret_tensor", "_reinterpret_tensor", "as_strided"})
_VIEWS = frozenset({"as_strided", "view", "reshape", "permute", "transpose", "t", "detach", "squeeze", "unsqueeze", "expand", "view_as"})
_SCALARS = frozenset({"item", "size", "stride", "tolist", "numel"})
_LIBRARY = ("extern_kernels.", "torch.ops.", "aten.")


Measure = Callable[[object, tuple[object, ...]], int | None]

_CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
_Tree = Union[tuple[int, ...], "list[_Tree]"]  # storages of a result, nested as the result is


_BUFFER = re.compile(r"(buf|workspace_?)\d|$")  # Inductor's names for memory; a result that is returned as it is has none


class UnreadableWrapper(Exception):
    """The wrapper does something that the replay does not know; the simulator's prediction stays."""


@dataclass(slots=True)
class WrapperAccount:
    """The generated code of one compilation: forward and backward, in the order in which they were generated."""

    codes: list[torch_private.GeneratedCode] = field(default_factory=list)

    def add(self, code: torch_private.GeneratedCode) -> None:
        self.codes.append(code)

    def single(self, *, is_backward: bool) -> torch_private.GeneratedCode | None:
        found = [code for code in self.codes if code.is_backward is is_backward]
        return found[0] if len(found) == 1 else None


def wrapper_peak(account: WrapperAccount, captured: Captured, plan: Plan, measure: Measure | None = None) -> int | None:
    """Transient peak of one step in bytes, or None if there is no generated code or it cannot be read.

    ``measure(target, arguments)`` gives the workspace of a call in bytes: convolutions get it for the layouts that the code really uses.
    """
    forward, backward = account.single(is_backward=False), account.single(is_backward=True)
    if forward is None or backward is None:
        return None
    held = captured.problem.forward_outputs
    kept = frozenset(node.name for value, node in enumerate(captured.nodes) if node is not None and value in held and value in plan.saved)
    still_held = sum(captured.problem.values[value].size_bytes for value in held if value not in plan.saved)
    try:
        first = _Replay(forward, captured, measure=measure)
        in_forward = first.peak()
        saved = first.returned[captured.joint.num_fwd_outputs :]
        in_backward = _Replay(backward, captured, measure=measure, saved=saved, never_freed=kept).peak()
    except (UnreadableWrapper, UnknownSize) as error:
        log.info("generated code is not accounted for: %s", error)
        return None
    return max(in_forward, in_backward + still_held)


class _Replay:
    """Replays one wrapper. Primals and tangents belong to the caller; what else backward is given dies as it is consumed.

    ``returned`` are the results' storages with their bytes, so that backward can be given what forward really saved: for an input that
    a convolution reads, forward may save its own channels-last copy under the input's name.
    """

    def __init__(
        self,
        code: torch_private.GeneratedCode,
        captured: Captured,
        *,
        measure: Measure | None,
        saved: Sequence[dict[int, int] | None] = (),
        never_freed: frozenset[str] = frozenset(),
    ) -> None:
        self.returned: list[dict[int, int] | None] = []  # per result: bytes by storage; None for what is no tensor
        self._device = captured.device
        self._measure = measure
        self._saved = saved
        self._placeholders = [node for node in code.graph.graph.nodes if node.op == "placeholder"]
        self._is_backward = code.is_backward
        self._never_freed = never_freed
        self._body = _call_body(code.source)
        self._size_of: dict[int, int] = {storage: size for item in saved if item is not None for storage, size in item.items()}
        self._fresh = itertools.count(max(self._size_of, default=-1) + 1)
        self._bound: dict[str, tuple[int, ...]] = {}
        self._members: dict[str, _Tree] = {}
        self._symbols: dict[str, int] = {}
        self._layouts: dict[str, TensorSpec] = {}  # what each name is bound to, as far as the code says it
        self._results_of: dict[str, Any] = {}  # results of library calls as the graph has them, nested as they are
        self._unused = _by_target(code.graph)
        self._workspace = {op.name: (_op_name(op.target), op.workspace_bytes) for op in captured.problem.ops}
        sizes = [value.size_bytes for value in captured.problem.values]
        self._results = {op.name: (_op_name(op.target), [sizes[w] for w in op.writes if sizes[w]]) for op in captured.problem.ops}
        self._like: dict[tuple[str, int], int] = {}  # for calls of no op's name: most that this operator needs for as many bytes of results
        for op in captured.problem.ops:
            key = (_op_name(op.target), sum(sizes[write] for write in op.writes))
            self._like[key] = max(op.workspace_bytes, self._like.get(key, 0))

    def peak(self) -> int:
        highest = 0
        for statement in _flatten(self._body):
            workspace = self._run(statement)
            highest = max(highest, self._live() + workspace)
        return highest

    def _live(self) -> int:
        alive = {storage for storages in self._bound.values() for storage in storages}
        return sum(self._size_of[storage] for storage in alive)

    def _run(self, statement: ast.stmt) -> int:
        if isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._unbind(target)
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            return self._assign(statement.targets[0], statement.value)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self._read_assertion(statement.value)
            return self._workspace_of(statement.value)
        elif isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
            self.returned = [self._result(item) for item in statement.value.elts]
        return 0

    def _result(self, item: ast.expr) -> dict[int, int] | None:
        if isinstance(item, ast.Constant) or (isinstance(item, ast.Name) and item.id in self._symbols):
            return None
        storages, _ = self._evaluate("", item)
        return {storage: self._size_of[storage] for storage in storages} if storages else None

    def _unbind(self, target: ast.expr) -> None:
        for name in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(name, ast.Name):
                self._bound.pop(name.id, None)
                self._members.pop(name.id, None)

    def _assign(self, target: ast.expr, value: ast.expr) -> int:
        if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, ast.Name) and value.id == "args":
            self._bind_arguments([name.id for name in target.elts if isinstance(name, ast.Name)])
            return 0
        if not isinstance(target, ast.Name):
            if isinstance(value, ast.Call):
                raise UnreadableWrapper(f"{ast.unparse(target)} = {ast.unparse(value.func)}")
            return 0
        storages, workspace = self._evaluate(target.id, value)
        layout = self._layout(value)
        if layout is not None:
            self._layouts[target.id] = layout
        if storages:
            self._bound[target.id] = storages
        elif isinstance(value, ast.Constant) and value.value is None:
            self._bound.pop(target.id, None)
        return workspace

    def _bind_arguments(self, names: list[str]) -> None:
        if len(names) != len(self._placeholders):
            raise UnreadableWrapper(f"{len(names)} arguments for {len(self._placeholders)} placeholders")
        saved = self._saved_tensors()
        for name, node in zip(names, self._placeholders, strict=True):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                self._layouts[name] = TensorSpec.of(value)
            if isinstance(value, (torch.SymInt, int)):
                self._symbols[name] = torch_private.size_hint(value)
            if not self._is_backward or not isinstance(value, torch.Tensor):
                storages = self._new(0)
            elif torch_private.is_tangent(node):
                storages = self._new(storage_bytes(value, self._device))
            else:
                storages = next(saved)
            self._bound[name] = storages
            if node.name in self._never_freed or torch_private.is_tangent(node):
                self._bound[f"held {name}"] = storages

    def _saved_tensors(self) -> Iterator[tuple[int, ...]]:
        """Storages of the tensors that forward saved, in the order in which backward takes them: forward's own, scalars left out."""
        tensors = [tuple(item) for item in self._saved if item is not None]
        given = [
            node for node in self._placeholders if isinstance(node.meta.get("val"), torch.Tensor) and not torch_private.is_tangent(node)
        ]
        if self._is_backward and len(tensors) != len(given):
            raise UnreadableWrapper(f"forward saves {len(tensors)} tensors and backward takes {len(given)}")
        return iter(tensors)

    def _new(self, size_bytes: int) -> tuple[int, ...]:
        storage = next(self._fresh)
        self._size_of[storage] = size_bytes
        return (storage,)

    def _evaluate(self, name: str, value: ast.expr) -> tuple[tuple[int, ...], int]:
        """(storages of the result, workspace in bytes) of one right-hand side."""
        if isinstance(value, ast.Name):
            if value.id in self._symbols:
                self._symbols[name] = self._symbols[value.id]
            if value.id in self._members:
                self._members[name] = self._members[value.id]
            return self._bound.get(value.id, ()), 0
        if isinstance(value, ast.Subscript):
            tree = self._member(value)
            if isinstance(tree, list):
                self._members[name] = tree
            return _leaves(tree), 0
        if isinstance(value, ast.Call):
            return self._call(name, value)
        return (), 0

    def _member(self, value: ast.expr) -> _Tree:
        if isinstance(value, ast.Name):
            return self._members.get(value.id, self._bound.get(value.id, ()))
        if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant) and isinstance(value.slice.value, int):
            tree = self._member(value.value)
            return tree[value.slice.value] if isinstance(tree, list) else tree
        raise UnreadableWrapper(f"{ast.unparse(value)}")

    def _call(self, name: str, call: ast.Call) -> tuple[tuple[int, ...], int]:
        function = ast.unparse(call.func)
        last = function.rsplit(".", 1)[-1]
        owner = call.func.value.id if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) else None
        if last.startswith("empty_strided"):
            return self._new(self._allocation(call) if last.endswith(self._device.type) else 0), 0
        if last in _ALIASES and call.args and isinstance(call.args[0], ast.Name):
            return self._bound.get(call.args[0].id, ()), 0
        if function.startswith(_LIBRARY):
            return self._library_call(name, call)
        if owner in self._bound and last in _VIEWS:
            return self._bound[owner], 0
        if _BUFFER.match(name) and not (owner in self._bound and last in _SCALARS):
            raise UnreadableWrapper(f"{name} = {function}")
        return (), 0

    def _allocation(self, call: ast.Call) -> int:
        sizes, strides = (self._numbers(argument) for argument in call.args[:2])
        dtype = _dtype(call.args[2])
        return storage_bytes(torch.empty_strided(sizes, strides, dtype=dtype, device="meta"), self._device, on_device=True)

    def _layout(self, value: ast.expr) -> TensorSpec | None:
        """Shape, strides and dtype of an expression, or None where the code does not say them."""
        if isinstance(value, ast.Name) and value.id in self._layouts:
            return self._layouts[value.id]
        if isinstance(value, (ast.Name, ast.Subscript)):
            result = self._result_at(value)
            return TensorSpec.of(result) if isinstance(result, torch.Tensor) else None
        if not isinstance(value, ast.Call) or len(value.args) < 3:
            return None
        last = ast.unparse(value.func).rsplit(".", 1)[-1]
        if last.startswith("empty_strided"):
            return self._laid_out(TensorSpec((), (), _dtype(value.args[2]), str(self._device)), value.args[0], value.args[1])
        base = self._layout(value.args[0]) if last in _REINTERPRETS else None
        return None if base is None else self._laid_out(base, value.args[1], value.args[2])

    def _read_assertion(self, call: ast.Call) -> None:
        """``assert_size_stride(name, size, stride, ...)`` says how a result really lies in memory."""
        if ast.unparse(call.func) == "assert_size_stride" and isinstance(call.args[0], ast.Name):
            layout = self._layout(call.args[0])
            layout = None if layout is None else self._laid_out(layout, call.args[1], call.args[2])
            if layout is not None:
                self._layouts[call.args[0].id] = layout

    def _laid_out(self, layout: TensorSpec, size: ast.expr, stride: ast.expr) -> TensorSpec | None:
        try:
            return replace(layout, shape=tuple(self._numbers(size)), stride=tuple(self._numbers(stride)))
        except UnreadableWrapper:
            return None

    def _result_at(self, value: ast.expr) -> Any:
        """What the graph says of the result of a library call, or of a member of one."""
        if isinstance(value, ast.Name):
            return self._results_of.get(value.id)
        if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant) and isinstance(value.slice.value, int):
            owner = self._result_at(value.value)
            return owner[value.slice.value] if isinstance(owner, (list, tuple)) and value.slice.value < len(owner) else None
        return None

    def _numbers(self, expression: ast.expr) -> list[int]:
        if not isinstance(expression, ast.Tuple):
            raise UnreadableWrapper(f"size {ast.unparse(expression)}")
        return [self._number(item) for item in expression.elts]

    def _number(self, expression: ast.expr) -> int:
        if isinstance(expression, ast.Constant) and isinstance(expression.value, int):
            return expression.value
        if isinstance(expression, ast.Name) and expression.id in self._symbols:
            return self._symbols[expression.id]
        if isinstance(expression, ast.BinOp):
            left, right = self._number(expression.left), self._number(expression.right)
            if isinstance(expression.op, ast.Mult):
                return left * right
            if isinstance(expression.op, ast.Add):
                return left + right
            if isinstance(expression.op, ast.Sub):
                return left - right
            if isinstance(expression.op, ast.FloorDiv):
                return left // right
        raise UnreadableWrapper(f"size {ast.unparse(expression)}")

    def _library_call(self, name: str, call: ast.Call) -> tuple[tuple[int, ...], int]:
        function = ast.unparse(call.func)
        node = self._take(call)
        if node is None:
            raise UnreadableWrapper(f"{function} is not in the graph")
        self._results_of[name] = _result_of(node)
        self._layouts.pop(name, None)
        tree = self._allocate(self._results_of[name])
        if isinstance(tree, list):
            self._members[name] = tree
        return _leaves(tree), self._workspace_at(node, call, tree)

    def _workspace_at(self, node: fx.Node, call: ast.Call, tree: _Tree) -> int:
        operator, wrapped = _target_name(ast.unparse(call.func)), _wrapped(node)
        results = tree[1] if wrapped and isinstance(tree, list) and len(tree) == 2 and isinstance(tree[1], list) else tree
        num_bytes = sum(self._size_of[storage] for storage in _leaves(results))
        state_bytes = CPU_RANDOM_STATE_BYTES if self._device.type == "cpu" and operator == "run_with_rng_state" else 0
        self._enlarge(node, operator, _leaves(results))
        exact = self._measured_here(node, call) if operator in _CONVOLUTIONS else None
        return exact if exact is not None else state_bytes + self._measured(node, _op_name(wrapped) if wrapped else operator, num_bytes)

    def _measured_here(self, node: fx.Node, call: ast.Call) -> int | None:
        """Workspace of a call with the layouts that it really has; None where the code does not tell them all."""
        layouts = self._layouts_of(call)
        if self._measure is None or None in layouts or len(layouts) > len(node.args):
            return None
        without_bias = [None] * (sum(isinstance(arg, fx.Node) for arg in node.args) - len(layouts))
        rest = fx.node.map_arg(node.args[len(layouts) + len(without_bias) :], lambda one: one.meta.get("val"))
        return self._measure(node.target, (*layouts, *without_bias, *rest))

    def _layouts_of(self, call: ast.Call) -> list[TensorSpec | None]:
        """Of the tensors among a call's arguments, in order."""
        symbols = self._symbols
        tensors = [one for one in call.args if isinstance(one, ast.Call) or (isinstance(one, ast.Name) and one.id not in symbols)]
        return [self._layout(one) for one in tensors]

    def _enlarge(self, node: fx.Node, operator: str, results: tuple[int, ...]) -> None:
        """Some kernels allocate more for a result than its shape says: the problem's values have what was measured."""
        named, sizes = self._results.get(node.name, ("", []))
        fresh = [storage for storage in results if self._size_of[storage]]
        if named == operator and len(fresh) == len(sizes):
            for storage, size_bytes in zip(fresh, sizes, strict=True):
                self._size_of[storage] = max(self._size_of[storage], size_bytes)

    def _measured(self, node: fx.Node | None, operator: str, num_bytes: int) -> int:
        """Workspace of a library call: that of the op it stands for, or of its like where code generation renamed or replaced the node."""
        named, workspace_bytes = self._workspace.get(node.name if node is not None else "", ("", 0))
        return workspace_bytes if named == operator else self._like.get((operator, num_bytes), 0)

    def _allocate(self, value: Any) -> _Tree:
        if isinstance(value, (tuple, list)):
            return [self._allocate(item) for item in value]
        return self._new(sum(storage_bytes(tensor, self._device) for tensor in tensors_of(value)))

    def _take(self, call: ast.Call) -> fx.Node | None:
        """The next node of this target that no line has been matched with; one of the same shapes if there is one."""
        nodes = self._unused.get(_target_name(ast.unparse(call.func)), [])
        shapes = [layout.shape if layout is not None else None for layout in self._layouts_of(call)]
        place = next((place for place, node in enumerate(nodes) if _takes(node, shapes)), 0)
        return nodes.pop(place) if nodes else None

    def _workspace_of(self, call: ast.Call) -> int:
        """Workspace of a library call that writes into ``out`` or is made for its effect."""
        function = ast.unparse(call.func)
        if not function.startswith(_LIBRARY):
            return 0
        node = self._take(call)
        out = next((keyword.value for keyword in call.keywords if keyword.arg == "out"), None)
        storages = self._evaluate("", out)[0] if out is not None else ()
        return self._measured(node, _target_name(function), sum(self._size_of[storage] for storage in storages))


def _call_body(source: str) -> list[ast.stmt]:
    """Statements of the wrapper's ``call``; the last definition of that name is the one that runs."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == "call"]
    if not found:
        raise UnreadableWrapper("no function named call")
    return found[-1].body


def _flatten(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _flatten(statement.body)
        elif isinstance(statement, (ast.If, ast.For, ast.While, ast.Try)):
            raise UnreadableWrapper(type(statement).__name__)
        else:
            yield statement


def _takes(node: fx.Node, shapes: Sequence[tuple[int, ...] | None]) -> bool:
    """Whether these may be the shapes of a node's first tensors; None is a shape that is not known."""
    values = [arg.meta.get("val") for arg in node.args if isinstance(arg, fx.Node)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return all(shape is None or shape == TensorSpec.of(tensor).shape for shape, tensor in zip(shapes, tensors, strict=False))


def _dtype(expression: ast.expr) -> torch.dtype:
    dtype = getattr(torch, ast.unparse(expression).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise UnreadableWrapper(f"dtype {ast.unparse(expression)}")
    return dtype


def _target_name(function: str) -> str:
    parts = function.removeprefix("torch.ops.").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _op_name(target: str) -> str:
    """``mm`` for ``aten.mm.default``."""
    return _target_name(target.removeprefix("torch.ops."))


def _name_of(node: fx.Node) -> str | None:
    """The operator's name without namespace and overload; None for a node that calls none."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1]
    if isinstance(node.target, torch_private.HIGHER_ORDER_TYPE):
        name: str = node.target.name()  # type: ignore[no-untyped-call]  # torch gives it no types
        return name
    return None


def _by_target(module: fx.GraphModule) -> dict[str, list[fx.Node]]:
    """Calls by the operator that the wrapper names: for an operator that Inductor put into a body to keep its order, that one."""
    found: dict[str, list[fx.Node]] = {}
    for node in module.graph.nodes:
        name = _name_of(node)
        if name == "control_deps":
            name = _name_of(inner) if (inner := _inner(node)) is not None else None
        if name is not None:
            found.setdefault(name, []).append(node)
    return found


def _inner(node: fx.Node) -> fx.Node | None:
    """The one call in the body of an operator that holds others in place."""
    bodies = [getattr(node.graph.owning_module, str(arg.target), None) for arg in node.all_input_nodes if arg.op == "get_attr"]
    calls = [one for body in bodies if isinstance(body, fx.GraphModule) for one in body.graph.nodes if _name_of(one) is not None]
    return calls[0] if len(calls) == 1 else None


def _wrapped(node: fx.Node) -> str | None:
    """The operator that a higher-order operator runs, as in ``run_with_rng_state(state, op, ...)``."""
    call = _inner(node) if _name_of(node) == "control_deps" else node
    return None if call is None else next((str(arg) for arg in call.args if isinstance(arg, torch._ops.OpOverload)), None)


def _result_of(node: fx.Node) -> Any:
    """A node's value; for nodes that a rewriter added without one, what its getitems say of its members."""
    if "val" in node.meta:
        return node.meta["val"]
    members: dict[Any, Any] = {user.args[1]: _result_of(user) for user in node.users if torch_private.is_getitem(user)}
    return [members.get(position) for position in range(max(members, default=-1) + 1)]


def _leaves(tree: _Tree) -> tuple[int, ...]:
    if isinstance(tree, list):
        return tuple(storage for item in tree for storage in _leaves(item))
    return tree
