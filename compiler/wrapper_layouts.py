"""How tensors lie in memory in generated code: what each name of a wrapper is bound to, as far as the code and its graph say it."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import torch

from dyngran.compiler.wrapper_code import UnreadableWrapper, dtype_of
from dyngran.passes.signature import TensorSpec

_REINTERPRETS = frozenset({"reinterpret_tensor", "_reinterpret_tensor", "as_strided"})


class Layouts:
    """Shapes, strides and dtypes by name, for one wrapper. ``symbols`` are the values of its symbolic sizes."""

    def __init__(self, device: torch.device) -> None:
        self.symbols: dict[str, int] = {}
        self._device = device
        self._of: dict[str, TensorSpec] = {}
        self._results: dict[str, Any] = {}  # of library calls, as the graph has them, nested as they are

    def bind(self, name: str, value: ast.expr) -> None:
        """``name = value``."""
        layout = self.of(value)
        if layout is not None:
            self._of[name] = layout

    def bind_tensor(self, name: str, tensor: torch.Tensor) -> None:
        self._of[name] = TensorSpec.of(tensor)

    def bind_result(self, name: str, result: Any) -> None:
        """``name`` is the result of a library call, a tensor or a nest of them, strided as in the graph until the code says otherwise."""
        self._results[name] = result
        self._of.pop(name, None)

    def of(self, value: ast.expr) -> TensorSpec | None:
        """Shape, strides and dtype of an expression, or None where the code does not say them."""
        if isinstance(value, ast.Name) and value.id in self._of:
            return self._of[value.id]
        if isinstance(value, (ast.Name, ast.Subscript)):
            result = self._result_at(value)
            return TensorSpec.of(result) if isinstance(result, torch.Tensor) else None
        if not isinstance(value, ast.Call) or len(value.args) < 3:
            return None
        last = ast.unparse(value.func).rsplit(".", 1)[-1]
        if last.startswith("empty_strided"):
            return self._laid_out(TensorSpec((), (), dtype_of(value.args[2]), str(self._device)), value.args[0], value.args[1])
        base = self.of(value.args[0]) if last in _REINTERPRETS else None
        return None if base is None else self._laid_out(base, value.args[1], value.args[2])

    def read_assertion(self, call: ast.Call) -> None:
        """``assert_size_stride(name, size, stride, ...)`` says how a result really lies in memory."""
        if ast.unparse(call.func) == "assert_size_stride" and isinstance(call.args[0], ast.Name):
            layout = self.of(call.args[0])
            layout = None if layout is None else self._laid_out(layout, call.args[1], call.args[2])
            if layout is not None:
                self._of[call.args[0].id] = layout

    def _laid_out(self, layout: TensorSpec, size: ast.expr, stride: ast.expr) -> TensorSpec | None:
        try:
            return replace(layout, shape=tuple(self.numbers(size)), stride=tuple(self.numbers(stride)))
        except UnreadableWrapper:
            return None

    def _result_at(self, value: ast.expr) -> Any:
        """What the graph says of the result of a library call, or of a member of one."""
        if isinstance(value, ast.Name):
            return self._results.get(value.id)
        if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant) and isinstance(value.slice.value, int):
            owner = self._result_at(value.value)
            return owner[value.slice.value] if isinstance(owner, (list, tuple)) and value.slice.value < len(owner) else None
        return None

    def numbers(self, expression: ast.expr) -> list[int]:
        """The values of a tuple of sizes. Raises UnreadableWrapper for a size that is no arithmetic of known symbols."""
        if not isinstance(expression, ast.Tuple):
            raise UnreadableWrapper(f"size {ast.unparse(expression)}")
        return [self.number(item) for item in expression.elts]

    def number(self, expression: ast.expr) -> int:
        """The value of a size. Raises UnreadableWrapper if it is no arithmetic of known symbols."""
        if isinstance(expression, ast.Constant) and isinstance(expression.value, int):
            return expression.value
        if isinstance(expression, ast.Name) and expression.id in self.symbols:
            return self.symbols[expression.id]
        if isinstance(expression, ast.BinOp):
            left, right = self.number(expression.left), self.number(expression.right)
            if isinstance(expression.op, ast.Mult):
                return left * right
            if isinstance(expression.op, ast.Add):
                return left + right
            if isinstance(expression.op, ast.Sub):
                return left - right
            if isinstance(expression.op, ast.FloorDiv):
                return left // right
        raise UnreadableWrapper(f"size {ast.unparse(expression)}")

    def of_arguments(self, call: ast.Call) -> list[TensorSpec | None]:
        """Of the tensors among a call's arguments, in order."""
        symbols = self.symbols
        tensors = [one for one in call.args if isinstance(one, ast.Call) or (isinstance(one, ast.Name) and one.id not in symbols)]
        return [self.of(one) for one in tensors]
