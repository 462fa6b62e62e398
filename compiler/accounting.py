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
from dataclasses import dataclass, field
from typing import Any, Union

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.capture import CPU_RANDOM_STATE_BYTES, TAKE_OVER, Captured
from dyngran.compiler.storages import storage_bytes, tensors_of
from dyngran.compiler.wrapper_code import (
    UnreadableWrapper,
    by_target,
    dtype_of,
    flatten,
    function_bodies,
    method_chain,
    nodes_of_bodies,
    op_name,
    result_of,
    takes,
    target_name,
    wrapped_operator,
)
from dyngran.compiler.wrapper_layouts import Layouts
from dyngran.passes.errors import UnknownSize
from dyngran.passes.plan import Plan
from dyngran.passes.problem import Kind, Problem

log = logging.getLogger("dyngran.accounting")

_ALIASES = frozenset({"reinterpret_tensor", "_reinterpret_tensor", "as_strided", "alloc_from_pool"})
_VIEWS = frozenset({"as_strided", "view", "reshape", "permute", "transpose", "t", "detach", "squeeze", "unsqueeze", "expand", "view_as"})
_SCALARS = frozenset({"item", "size", "stride", "tolist", "numel"})
_REDUCTIONS = frozenset({"sum", "prod", "amax", "amin"})
_LIBRARY = ("extern_kernels.", "torch.ops.", "aten.")
_TO_HOST = "torch.ops.dyngran.offload.default"  # whose result is no memory of the device, or is counted by nobody
_CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
_BUFFER = re.compile(r"(buf|workspace_?)\d|$")  # Inductor's names for memory; a result that is returned as it is has none

Measure = Callable[[object, tuple[object, ...]], int | None]  # workspace in bytes of a call: (target, arguments); None if it cannot be run
_Tree = Union[tuple[int, ...], "list[_Tree]"]  # storages of a result, nested as the result is


@dataclass(slots=True)
class WrapperAccount:
    """The generated code of one compilation: forward and backward, in the order in which they were generated."""

    codes: list[torch_private.GeneratedCode] = field(default_factory=list)

    def add(self, code: torch_private.GeneratedCode) -> None:
        self.codes.append(code)

    def single(self, *, is_backward: bool) -> torch_private.GeneratedCode | None:
        found = [code for code in self.codes if code.is_backward is is_backward]
        return found[0] if len(found) == 1 else None


def wrapper_peak(
    account: WrapperAccount, captured: Captured, plan: Plan, measure: Measure | None = None, *, problem: Problem | None = None
) -> int | None:
    """Transient peak of one step in bytes, or None if there is no generated code or it cannot be read.

    ``problem`` is that of ``captured``, unless the plan is of one with forms.
    ``measure(target, arguments)`` gives the workspace of a call in bytes: convolutions get it for the layouts that the code really uses.
    """
    forward, backward = account.single(is_backward=False), account.single(is_backward=True)
    if forward is None or backward is None:
        return None
    held = captured.problem.forward_outputs
    kept = frozenset(node.name for value, node in enumerate(captured.nodes) if node is not None and value in held and value in plan.saved)
    still_held = sum(captured.problem.values[value].size_bytes for value in held if value not in plan.saved)
    copied = sum(op.workspace_bytes for op in captured.problem.ops if op.name == TAKE_OVER)
    problem = problem or captured.problem
    try:
        first = _Replay(forward, captured, problem, measure=measure)
        in_forward = first.peak()
        saved = first.returned[captured.joint.num_fwd_outputs :]
        second = _Replay(backward, captured, problem, measure=measure, saved=saved, never_freed=kept)
        in_backward = max(second.peak(), second.live() + copied)
    except (UnreadableWrapper, UnknownSize) as error:
        log.info("generated code is not accounted for: %s", error)
        return None
    carried = sum(value.size_bytes for value in captured.problem.values if value.kind is Kind.CARRIED)
    return max(in_forward + carried, in_backward + still_held)


@dataclass(slots=True)
class _Frame:
    """One call of a body: the list that it is given, the storages in it, and those of each result."""

    list_name: str
    operands: list[tuple[int, ...]]
    results: Sequence[tuple[int, ...]] = ()


class _Replay:
    """Replays one wrapper. Primals and tangents belong to the caller; what else backward is given dies as it is consumed.

    ``returned`` are the results' storages with their bytes, so that backward can be given what forward really saved: for an input that
    a convolution reads, forward may save its own channels-last copy under the input's name.
    """

    def __init__(
        self,
        code: torch_private.GeneratedCode,
        captured: Captured,
        problem: Problem,
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
        self._functions = function_bodies(code.source)
        self._highest = 0
        self._size_of: dict[int, int] = {storage: size for item in saved if item is not None for storage, size in item.items()}
        self._fresh = itertools.count(max(self._size_of, default=-1) + 1)
        self._bound: dict[str, tuple[int, ...]] = {}
        self._members: dict[str, _Tree] = {}
        self._lists: dict[str, list[tuple[int, ...]]] = {}  # arguments of bodies, by the name of the list
        self._frames: list[_Frame] = []
        self._layouts = Layouts(captured.device)
        self._unused = by_target(code.graph.graph.nodes)
        self._in_bodies = by_target(nodes_of_bodies(code.graph))
        self._workspace = {op.name: (op_name(op.target), op.workspace_bytes) for op in problem.ops}
        sizes = [value.size_bytes for value in problem.values]
        self._results = {op.name: (op_name(op.target), [sizes[w] for w in op.writes if sizes[w]]) for op in problem.ops}
        self._like: dict[tuple[str, int], int] = {}  # for calls of no op's name: most that this operator needs for as many bytes of results
        for op in problem.ops:
            key = (op_name(op.target), sum(sizes[write] for write in op.writes))
            self._like[key] = max(op.workspace_bytes, self._like.get(key, 0))

    def peak(self) -> int:
        self._execute(self._functions["call"])
        return self._highest

    def _execute(self, body: list[ast.stmt]) -> None:
        for statement in flatten(body):
            if isinstance(statement, ast.If):
                self._branch(statement)
            else:
                workspace = self._run(statement)
                self._highest = max(self._highest, self.live() + workspace)

    def _branch(self, statement: ast.If) -> None:
        """Both branches from the same state; what holds more afterwards goes on."""
        bound, members, lists = self._bound, self._members, self._lists
        ends = []
        for body in (statement.body, statement.orelse):
            self._bound, self._members, self._lists = dict(bound), dict(members), dict(lists)
            self._execute(body)
            ends.append((self.live(), self._bound, self._members))
        _, self._bound, self._members = max(ends, key=lambda end: end[0])

    def _run_body(self, target: str, call: ast.Call) -> None:
        """``target = body(list)``: the list is emptied by the body, whose names die with it."""
        name = call.args[0].id if len(call.args) == 1 and isinstance(call.args[0], ast.Name) else ""
        if name not in self._lists:
            raise UnreadableWrapper(ast.unparse(call))
        outer = set(self._bound)
        self._frames.append(_Frame(name, self._lists.pop(name)))
        self._execute(self._functions[ast.unparse(call.func)])
        results = self._frames.pop().results
        for local in self._bound.keys() - outer:
            del self._bound[local]
        self._members[target] = list(results)
        self._bound[target] = _leaves(self._members[target])

    def live(self) -> int:
        alive = {storage for storages in self._bound.values() for storage in storages}
        return sum(self._size_of[storage] for storage in alive)

    def _run(self, statement: ast.stmt) -> int:
        if isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._unbind(target)
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            return self._assign(statement.targets[0], statement.value)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self._layouts.read_assertion(statement.value)
            return self._workspace_of(statement.value)
        elif isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple) and self._frames:
            self._frames[-1].results = [self._evaluate("", item)[0] for item in statement.value.elts]
        elif isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
            self.returned = [self._result(item) for item in statement.value.elts]
        return 0

    def _result(self, item: ast.expr) -> dict[int, int] | None:
        if isinstance(item, ast.Constant) or (isinstance(item, ast.Name) and item.id in self._layouts.symbols):
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
            names = [name.id for name in target.elts if isinstance(name, ast.Name)]
            if self._frames:
                self._bind_operands(names, self._frames[-1])
            else:
                self._bind_arguments(names)
            return 0
        if not isinstance(target, ast.Name):
            if isinstance(value, ast.Call):
                raise UnreadableWrapper(f"{ast.unparse(target)} = {ast.unparse(value.func)}")
            return 0
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in self._functions:
            self._run_body(target.id, value)
            return 0
        if isinstance(value, ast.List):
            self._lists[target.id] = [self._evaluate("", item)[0] for item in value.elts]
            self._bound[target.id] = tuple(storage for item in self._lists[target.id] for storage in item)
            return 0
        storages, workspace = self._evaluate(target.id, value)
        self._layouts.bind(target.id, value)
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
                self._layouts.bind_tensor(name, value)
            if isinstance(value, (torch.SymInt, int)):
                self._layouts.symbols[name] = torch_private.size_hint(value)
            if not self._is_backward or not isinstance(value, torch.Tensor):
                storages = self._new(0)
            elif torch_private.is_tangent(node):
                storages = self._new(storage_bytes(value, self._device))
            else:
                storages = next(saved)
            self._bound[name] = storages
            if node.name in self._never_freed or torch_private.is_tangent(node):
                self._bound[f"held {name}"] = storages

    def _bind_operands(self, names: list[str], frame: _Frame) -> None:
        if len(names) != len(frame.operands):
            raise UnreadableWrapper(f"{len(names)} names for {len(frame.operands)} operands of a body")
        self._bound |= dict(zip(names, frame.operands, strict=True))
        self._bound.pop(frame.list_name, None)

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
            if value.id in self._layouts.symbols:
                self._layouts.symbols[name] = self._layouts.symbols[value.id]
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
        if (sizes := self._last_round(call)) is not None:
            *temporaries, size_bytes = sizes
            return self._new(size_bytes), sum(temporaries)
        if _BUFFER.match(name) and not (owner in self._bound and last in _SCALARS):
            raise UnreadableWrapper(f"{name} = {function}")
        return (), 0

    def _last_round(self, call: ast.Call) -> list[int] | None:
        """Bytes of each result of ``workspace[a:b].view(rows, columns).sum(dim=0).view(shape).to(dtype)``, the last step of a reduction
        that a kernel split over its programs (the second view since torch 2.13, the cast where it is needed); None for another call."""
        owner, chain = method_chain(call)
        names = [name for name, _ in chain]
        if not isinstance(owner, ast.Subscript) or len(names) < 2 or names[0] != "view" or names[1] not in _REDUCTIONS:
            return None
        if names[2:] not in ([], ["view"], ["to"], ["view", "to"]):
            return None
        view, dtypes = chain[0][1], [dtype_of(last.args[0]) for name, last in chain if name == "to"]
        workspace = self._layouts.of(owner.value)
        if workspace is None or len(view.args) != 2:
            return None
        columns = self._layouts.number(view.args[1])
        made = [torch.empty(columns, dtype=dtype, device="meta") for dtype in (workspace.dtype, *dtypes)]
        return [storage_bytes(tensor, self._device, on_device=True) for tensor in made]

    def _allocation(self, call: ast.Call) -> int:
        sizes, strides = (self._layouts.numbers(argument) for argument in call.args[:2])
        dtype = dtype_of(call.args[2])
        return storage_bytes(torch.empty_strided(sizes, strides, dtype=dtype, device="meta"), self._device, on_device=True)

    def _library_call(self, name: str, call: ast.Call) -> tuple[tuple[int, ...], int]:
        function = ast.unparse(call.func)
        node = self._take(call)
        if node is None:
            raise UnreadableWrapper(f"{function} is not in the graph")
        result = result_of(node)
        self._layouts.bind_result(name, result)
        tree = self._new(0) if function == _TO_HOST else self._allocate(result)
        if isinstance(tree, list):
            self._members[name] = tree
        return _leaves(tree), self._workspace_at(node, call, tree)

    def _workspace_at(self, node: fx.Node, call: ast.Call, tree: _Tree) -> int:
        operator, wrapped = target_name(ast.unparse(call.func)), wrapped_operator(node)
        results = tree[1] if wrapped and isinstance(tree, list) and len(tree) == 2 and isinstance(tree[1], list) else tree
        num_bytes = sum(self._size_of[storage] for storage in _leaves(results))
        state_bytes = CPU_RANDOM_STATE_BYTES if self._device.type == "cpu" and operator == "run_with_rng_state" else 0
        self._enlarge(node, operator, _leaves(results))
        exact = self._measured_here(node, call) if operator in _CONVOLUTIONS else None
        return exact if exact is not None else state_bytes + self._measured(node, op_name(wrapped) if wrapped else operator, num_bytes)

    def _measured_here(self, node: fx.Node, call: ast.Call) -> int | None:
        """Workspace of a call with the layouts that it really has; None where the code does not tell them all."""
        layouts = self._layouts.of_arguments(call)
        if self._measure is None or None in layouts or len(layouts) > len(node.args):
            return None
        without_bias = [None] * (sum(isinstance(arg, fx.Node) for arg in node.args) - len(layouts))
        rest = fx.node.map_arg(node.args[len(layouts) + len(without_bias) :], lambda one: one.meta.get("val"))
        return self._measure(node.target, (*layouts, *without_bias, *rest))

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
        nodes = (self._in_bodies if self._frames else self._unused).get(target_name(ast.unparse(call.func)), [])
        shapes = [layout.shape if layout is not None else None for layout in self._layouts.of_arguments(call)]
        place = next((place for place, node in enumerate(nodes) if takes(node, shapes)), 0)
        if not nodes:
            return None
        return nodes[place] if self._frames else nodes.pop(place)  # a body may run several times

    def _workspace_of(self, call: ast.Call) -> int:
        """Workspace of a library call that writes into ``out`` or is made for its effect."""
        function = ast.unparse(call.func)
        if not function.startswith(_LIBRARY):
            return 0
        node = self._take(call)
        out = next((keyword.value for keyword in call.keywords if keyword.arg == "out"), None)
        storages = self._evaluate("", out)[0] if out is not None else ()
        return self._measured(node, target_name(function), sum(self._size_of[storage] for storage in storages))


def _leaves(tree: _Tree) -> tuple[int, ...]:
    if isinstance(tree, list):
        return tuple(storage for item in tree for storage in _leaves(item))
    return tree
