"""An isomorphism-stable hash of a problem: equal for renamed nodes and for another order of independent ops.

Colour refinement (Weisfeiler and Leman, 1968) on the graph of values and ops. Colours flow down the graph, where an op hashes its
reads in their positions, then up, where a value hashes the multiset of its readers with the position at which each reads it. Values
that still look alike (two projections of one shape) are then marked one by one, and what follows is coloured again near each: this
tells ``silu(a) * a, silu(b) * b`` from ``silu(a) * b, silu(b) * a``, which plain refinement cannot. Twins that differ only in how
they meet farther away than `MAX_NEIGHBOURS` ops keep one fingerprint: it is a hash, not a mapping, and a plan is applied only through
a checked isomorphism.

Costs, workspaces, static bytes and thresholds are not part of it: they are measured or chosen, not structure.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

from dyngran.passes.problem import Problem, Value

ALGORITHM = "dyngran fingerprint 2"  # part of every hash; raise it when anything below changes
MAX_NEIGHBOURS = 64  # ops that are coloured again for one marked value: a transformer block; 10,000 twins then take about 2 s
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Colors:
    """Of each value and each op, by index: equal where two look alike in all that is around them."""

    values: tuple[str, ...]
    ops: tuple[str, ...]


def fingerprint(problem: Problem) -> str:
    """32 hexadecimal digits over ops (target, side, reads), sizes, kinds, outputs, gradients and whether the code generator fuses."""
    colors = find_colors(problem)
    return _hash(ALGORITHM, problem.fused, sorted(colors.values), sorted(colors.ops))


def role_of(value: Value) -> str:
    """The kind, as far as it is structure: what the caller holds is one thing, whether or not it is known to be a buffer."""
    return "held" if value.kind.is_static else value.kind.value


def find_colors(problem: Problem) -> Colors:
    """The colours of which the fingerprint is the hash."""
    values, ops = problem.values, problem.ops
    own_value = [
        _hash("value", value.size_bytes, role_of(value), value.index in problem.forward_outputs, value.index in problem.gradients)
        for value in values
    ]
    own_op = [_hash("op", op.target, op.side.value, bool(op.pinned), op.fusible, op.reduction, op.num_elements) for op in ops]
    own_value, own_op = _up(problem, *_down(problem, own_value, own_op))
    own_value = _tell_twins_apart(problem, own_value, own_op)
    own_value, own_op = _up(problem, *_down(problem, own_value, own_op))
    return Colors(tuple(own_value), tuple(own_op))


def _down(problem: Problem, value_colors: list[str], op_colors: list[str]) -> tuple[list[str], list[str]]:
    """From the inputs on: each op takes in its reads, each value its producer and its place among the op's results."""
    values = list(value_colors)
    ops = list(op_colors)
    for op in problem.ops:
        ops[op.index] = _hash(op_colors[op.index], [values[read] for read in op.reads])
        for position, write in enumerate(op.writes):
            values[write] = _hash(value_colors[write], ops[op.index], position)
    return values, ops


def _up(problem: Problem, value_colors: list[str], op_colors: list[str]) -> tuple[list[str], list[str]]:
    """From the last op back: each value takes in its readers, each op its results."""
    values = list(value_colors)
    ops = list(op_colors)
    readers: list[list[str]] = [[] for _ in values]
    for op in reversed(problem.ops):
        for write in op.writes:
            values[write] = _hash(value_colors[write], sorted(readers[write]))
        ops[op.index] = _hash(op_colors[op.index], [values[write] for write in op.writes])
        for position, read in enumerate(op.reads):
            readers[read].append(f"{position} {ops[op.index]}")
    for value in problem.values:
        if value.producer is None:
            values[value.index] = _hash(value_colors[value.index], sorted(readers[value.index]))
    return values, ops


def _tell_twins_apart(problem: Problem, value_colors: list[str], op_colors: list[str]) -> list[str]:
    """Values of one colour, each coloured by what becomes of the ops after it if it alone is marked."""
    readers: list[list[int]] = [[] for _ in problem.values]
    for op in problem.ops:
        for read in op.reads:
            readers[read].append(op.index)
    counts = Counter(value_colors)
    colors = list(value_colors)
    for value in problem.values:
        if counts[value_colors[value.index]] == 1:
            continue
        marked = {value.index: "marked"}
        seen = []
        for index in sorted(_after(problem, value.index, readers)):
            op = problem.ops[index]
            seen.append(_hash(op_colors[index], [marked.get(read, value_colors[read]) for read in op.reads]))
            marked |= {write: f"{position} {seen[-1]}" for position, write in enumerate(op.writes)}
        colors[value.index] = _hash(value_colors[value.index], sorted(seen))
    return colors


def _after(problem: Problem, value: int, readers: list[list[int]]) -> set[int]:
    """The ops after ``value``, nearest first, in whole steps until another step would exceed `MAX_NEIGHBOURS`."""
    found: set[int] = set()
    edge = {value}
    while edge:
        step = {reader for one in edge for reader in readers[one]} - found
        if len(found) + len(step) > MAX_NEIGHBOURS:
            break
        found |= step
        edge = {write for index in step for write in problem.ops[index].writes}
    return found


def _hash(*parts: str | int | list[str]) -> str:
    """A digest of the parts as Python writes them, so that no two lists of parts look alike."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=DIGEST_BYTES).hexdigest()
