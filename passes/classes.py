"""Classes of like values: the same value of every layer is one class, so that a move costs one simulation for all layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

from dyngran.passes.problem import Problem, Side


def value_classes(problem: Problem, values: Iterable[int], *, num_rounds: int = 2) -> tuple[tuple[int, ...], ...]:
    """Group ``values`` by colour refinement over forward ops (Weisfeiler and Leman 1968): operator, bytes, and those of neighbours.

    Names and order do not count. Classes are sorted by their first value.
    """
    colour: list[Hashable] = [(value.kind.value, value.size_bytes) for value in problem.values]
    readers: dict[int, list[int]] = defaultdict(list)
    for op in problem.ops:
        for place, write in enumerate(op.writes):
            colour[write] = (op.target, place, problem.values[write].size_bytes, op.pinned, op.side.value)
        if op.side is not Side.BACKWARD:
            for read in op.reads:
                readers[read].append(op.index)
    numbers = _number(colour)
    for _ in range(num_rounds):
        colour = list(numbers)
        for op in problem.ops:
            if op.side is Side.BACKWARD:
                continue
            above = tuple(sorted(numbers[read] for read in op.reads))
            for write in op.writes:
                below = tuple(sorted({numbers[problem.ops[reader].writes[0]] for reader in readers[write] if problem.ops[reader].writes}))
                colour[write] = (numbers[write], above, below)
        numbers = _number(colour)
    groups: dict[int, list[int]] = defaultdict(list)
    for index in sorted(values):
        groups[numbers[index]].append(index)
    return tuple(sorted(tuple(group) for group in groups.values()))


def _number(colours: list[Hashable]) -> list[int]:
    seen: dict[Hashable, int] = {}
    return [seen.setdefault(colour, len(seen)) for colour in colours]
