"""Rows of a node's result from rows of its operands: which rows those are, and the call that makes them (`row_rules` has a rule for each
operator). Of an operator with several results, rows are those of the first."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dyngran.compiler.row_rules import Call, Exactness, Need, Needs, Rows, Rule, rule_of, sizes_of

__all__ = ["Exactness", "Part", "Rows", "SlicedCall", "independent_dimensions", "sliced_call"]


@dataclass(frozen=True, slots=True)
class Part:
    """An operand of a call on rows: those rows of it, or all of it (None)."""

    node: fx.Node
    rows: Rows | None


@dataclass(frozen=True, slots=True)
class SlicedCall:
    """A call that makes some rows of a node's result. ``args`` and ``kwargs`` have a `Part` wherever the node has an operand.

    ``target`` is mostly the node's own; a view that only gives other sizes is a ``reshape``, which copies where rows lie so that it must.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    exactness: Exactness


def sliced_call(node: fx.Node, rows: Rows) -> SlicedCall | None:
    """The call that makes ``rows`` of what ``node`` makes from rows of its operands; None where rows depend on other rows, or nothing is
    known of the operator. Raises ValueError for rows that the result does not have."""
    sizes = _result_sizes(node)
    if sizes is None:
        return None
    if not _has_rows(sizes, rows):
        raise ValueError(f"{node.name} of sizes {sizes} has no rows {rows.begin}:{rows.end} along dimension {rows.dimension}")
    target = node.target
    if target is operator.getitem:
        return _first_result(node, rows)
    if not isinstance(target, torch._ops.OpOverload):
        return None
    rule = rule_of(target)
    if rule is None or any(sizes_of(operand.meta.get("val")) is None for operand in node.all_input_nodes):
        return None
    call = Call(_arguments(node, target), sizes)
    needs = rule.needs(call, rows)
    if needs is None or not _all_there(call, needs):
        return None
    if rule.target is not None:
        return _call_replaced(rule.target, rule, call, needs)
    return _call_itself(node, target, rule, call, needs)


def independent_dimensions(node: fx.Node) -> tuple[int, ...]:
    """Dimensions of a node's result along which its rows can be made apart: those of more than one row, of which the second half can."""
    return tuple(
        dimension
        for dimension, size in enumerate(_result_sizes(node) or ())
        if size > 1 and sliced_call(node, Rows(dimension, size // 2, size)) is not None
    )


def _result_sizes(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val") if node.op == "call_function" else None
    return sizes_of(value[0] if isinstance(value, (tuple, list)) and value else value)


def _first_result(node: fx.Node, rows: Rows) -> SlicedCall | None:
    """Of a getitem: the same rows of the operator, if that can make them."""
    owner, member = node.args
    if not isinstance(owner, fx.Node) or not isinstance(owner.meta.get("val"), (tuple, list)) or member != 0:
        return None
    return None if sliced_call(owner, rows) is None else SlicedCall(operator.getitem, (Part(owner, rows), 0), {}, Exactness.COPY)


def _arguments(node: fx.Node, target: torch._ops.OpOverload) -> dict[str, Any]:
    """By name, defaults included."""
    arguments = target._schema.arguments
    given = {**dict(zip((one.name for one in arguments), node.args, strict=False)), **node.kwargs}
    return {one.name: given.get(one.name, one.default_value) for one in arguments}


def _all_there(call: Call, needs: Needs) -> bool:
    """Whether a rule names every operand of the call, and rows that those have."""
    for name, value in call.arguments.items():
        every = value if isinstance(value, (tuple, list)) else (value,)
        if not any(isinstance(one, fx.Node) for one in every):
            continue
        if name not in needs:
            return False
        need = needs[name]
        for one, rows in zip(every, need if isinstance(need, list) else [need], strict=True):
            if isinstance(one, fx.Node) and isinstance(rows, Rows) and not _has_rows(tuple(one.meta["val"].shape), rows):
                return False
    return True


def _has_rows(sizes: tuple[int, ...], rows: Rows) -> bool:
    return rows.dimension < len(sizes) and rows.end <= sizes[rows.dimension]


def _call_itself(node: fx.Node, target: torch._ops.OpOverload, rule: Rule, call: Call, needs: Needs) -> SlicedCall:
    """The operator itself: arguments by place up to the last that is given or changed, and those that have only a name."""
    arguments = target._schema.arguments
    changed = {name for name, need in needs.items() if call[name] is not None or not (need is None or isinstance(need, Rows))}
    named = {*(one.name for one in arguments[: len(node.args)]), *node.kwargs, *changed}
    values = {name: _argument(value, needs.get(name), name in changed) for name, value in call.arguments.items()}
    num_by_place = max((place + 1 for place, one in enumerate(arguments) if one.name in named and not one.kwarg_only), default=0)
    kwargs = {one.name: values[one.name] for one in arguments if one.kwarg_only and one.name in named}
    return SlicedCall(target, tuple(values[one.name] for one in arguments[:num_by_place]), kwargs, rule.exactness)


def _call_replaced(target: torch._ops.OpOverload, rule: Rule, call: Call, needs: Needs) -> SlicedCall:
    """What a rule calls instead, on what it names."""
    args = tuple(_argument(call.arguments.get(name), need, True) for name, need in needs.items())
    return SlicedCall(target, args, {}, rule.exactness)


def _argument(value: Any, need: Need, is_changed: bool) -> Any:
    if isinstance(value, fx.Node):
        assert need is None or isinstance(need, Rows)
        return Part(value, need)
    if isinstance(value, (tuple, list)) and any(isinstance(one, fx.Node) for one in value):
        assert isinstance(need, list)
        return [_argument(one, rows, False) for one, rows in zip(value, need, strict=True)]
    return need if is_changed else value
