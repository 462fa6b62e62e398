"""What the walks over saved sets move, values worth a decision in classes of like ones; and walks side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from typing import TypeVar

from dyngran.passes.classes import value_classes
from dyngran.passes.native.graph import Stop
from dyngran.passes.problem import Problem

LARGE = 8000  # ops: above it planning looks at less, to stay short

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def choosable(problem: Problem, candidates: Iterable[int]) -> list[int]:
    """Of the candidates those that a plan may save or not: not pinned, not made in the user's checkpoint regions, not always kept."""
    chosen = []
    for value in candidates:
        producer = problem.values[value].producer
        is_settled = problem.keeps_as_small(value) or problem.drops_as_small(value)
        if producer is None or not problem.values[value].size_bytes or is_settled:
            continue
        op = problem.ops[producer]
        if not op.pinned and not op.never_saved:
            chosen.append(value)
    return chosen


def move_classes(problem: Problem, candidates: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Classes of like values among the choosable candidates, each in the graph's order."""
    return value_classes(problem, choosable(problem, candidates), num_rounds=2)


def num_threads() -> int:
    """Walks that run side by side; how many has no influence on what they find."""
    return max(1, min(4, cpu_count() or 1))


def side_by_side(function: Callable[[_Item], _Result], items: Iterable[_Item], stop: Stop, take: Callable[[_Result], None]) -> None:
    """Call ``function`` for the items on several threads and ``take`` its results in order.

    An error or Ctrl-C, in ``take`` as well, stops the walks that are under way before it goes on.
    """
    with ThreadPoolExecutor(num_threads()) as pool:
        is_done = False
        try:
            for result in pool.map(function, items):
                take(result)
            is_done = True
        finally:
            if not is_done:
                stop.set()
