"""Which value of one graph is which of another: a checked isomorphism, where there is one.

Colours (`passes.fingerprint`) say which ops may stand for each other; from the last ops back each is tried with what it reads, and an
attempt that runs into a contradiction is taken back. What is found is checked as a whole: every op of one graph stands for exactly one of
the other, reads and writes in the same places.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from dyngran.passes.fingerprint import Colors, find_colors, role_of
from dyngran.passes.problem import Problem


@dataclass(slots=True)
class _Pairs:
    """Ops and values that were paired, in both directions."""

    ops: dict[int, int] = field(default_factory=dict)
    values: dict[int, int] = field(default_factory=dict)
    taken_ops: set[int] = field(default_factory=set)
    taken_values: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Isomorphism:
    """For each value, and for each op, of one graph the one of another that it is."""

    values: tuple[int, ...]
    ops: tuple[int, ...]

    @property
    def is_identity(self) -> bool:
        return all(mine == yours for part in (self.values, self.ops) for mine, yours in enumerate(part))


def isomorphism(first: Problem, second: Problem) -> Isomorphism | None:
    """``first`` onto ``second``; None if the graphs differ, or no pairing was found.

    Among equals (two projections of one shape, read alike) any pairing that holds is given; graphs in the same order are paired in it.
    """
    if len(first.ops) != len(second.ops) or len(first.values) != len(second.values):
        return None
    in_order = tuple(range(len(first.values)))
    colors = (find_colors(first), find_colors(second))
    if colors[0] == colors[1] and (found := _checked(first, second, in_order)) is not None:
        return found
    paired = _pair_all(first, second, *colors)
    return None if paired is None else _checked(first, second, paired)


def _pair_all(first: Problem, second: Problem, one: Colors, two: Colors) -> tuple[int, ...] | None:
    alike: dict[str, list[int]] = defaultdict(list)
    readers: dict[tuple[str, int, int], list[int]] = defaultdict(list)  # of those that are alike, at which place they read a value
    for op in second.ops:
        alike[two.ops[op.index]].append(op.index)
        for position, read in enumerate(op.reads):
            readers[two.ops[op.index], position, read].append(op.index)
    pairs = _Pairs()
    for op in reversed(first.ops):
        if op.index in pairs.ops:
            continue
        color = one.ops[op.index]
        known = [(position, pairs.values[read]) for position, read in enumerate(op.reads) if read in pairs.values]
        fewest = min((readers[color, position, yours] for position, yours in known), key=len, default=alike[color])
        candidates = [other for other in reversed(fewest) if other not in pairs.taken_ops]
        if not any(_pair(first, second, one, two, pairs, op.index, other) for other in candidates):
            return None
    unread: dict[str, list[int]] = defaultdict(list)  # inputs that nobody reads
    for value in second.values:
        if value.index not in pairs.taken_values:
            unread[two.values[value.index]].append(value.index)
    for value in first.values:
        if value.index not in pairs.values:
            if not unread[one.values[value.index]]:
                return None
            pairs.values[value.index] = unread[one.values[value.index]].pop(0)
    return tuple(pairs.values[index] for index in range(len(first.values)))


def _pair(first: Problem, second: Problem, one: Colors, two: Colors, pairs: _Pairs, op: int, other: int) -> bool:
    """Pair two ops and everything before them; all or, after a contradiction, nothing."""
    ops: list[int] = []
    values: list[int] = []
    stack = [(op, other)]
    is_good = True
    while stack and is_good:
        here, there = stack.pop()
        if here in pairs.ops or there in pairs.taken_ops:
            is_good = pairs.ops.get(here) == there
            continue
        left, right = first.ops[here], second.ops[there]
        is_good = one.ops[here] == two.ops[there] and len(left.reads) == len(right.reads) and len(left.writes) == len(right.writes)
        pairs.ops[here] = there
        pairs.taken_ops.add(there)
        ops.append(here)
        for mine, yours in zip((*left.writes, *left.reads), (*right.writes, *right.reads), strict=False):
            if mine in pairs.values or yours in pairs.taken_values:
                is_good = is_good and pairs.values.get(mine) == yours
                continue
            is_good = is_good and one.values[mine] == two.values[yours]
            pairs.values[mine] = yours
            pairs.taken_values.add(yours)
            values.append(mine)
            makers = first.values[mine].producer, second.values[yours].producer
            if makers[0] is not None and makers[1] is not None:
                stack.append((makers[0], makers[1]))
    if not is_good:
        pairs.taken_ops.difference_update(pairs.ops.pop(one_op) for one_op in ops)
        pairs.taken_values.difference_update(pairs.values.pop(value) for value in values)
    return is_good


def _checked(first: Problem, second: Problem, paired: tuple[int, ...]) -> Isomorphism | None:
    """The isomorphism that maps values so, if it is one: each op's reads and writes onto those of an op that is alike."""
    if len(set(paired)) != len(second.values) or first.fused != second.fused:
        return None
    if any(not _are_alike(first, second, mine, yours) for mine, yours in enumerate(paired)):
        return None
    there: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for op in reversed(second.ops):
        there[(op.target, op.side, bool(op.pinned), op.num_elements, op.reads, op.writes)].append(op.index)
    ops = []
    for op in first.ops:
        reads, writes = (tuple(paired[value] for value in part) for part in (op.reads, op.writes))
        alike = there[(op.target, op.side, bool(op.pinned), op.num_elements, reads, writes)]
        if not alike:
            return None
        ops.append(alike.pop())
    return Isomorphism(paired, tuple(ops))


def _are_alike(first: Problem, second: Problem, mine: int, yours: int) -> bool:
    left, right = first.values[mine], second.values[yours]
    return (left.size_bytes, role_of(left), mine in first.forward_outputs, mine in first.gradients) == (
        right.size_bytes,
        role_of(right),
        yours in second.forward_outputs,
        yours in second.gradients,
    )
