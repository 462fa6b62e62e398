"""Plans of others with what they save stored in other forms, the cheapest per byte first.

From each given plan, one class of like values after the other is stored in one of its forms: at each step the class and the form that
cost least time for each byte that no longer crosses. Method: the greedy rule of knapsacks (Dantzig 1957), with times as the simulator has
them when the form is taken alone. What it leaves open, walks over saved sets (`passes/solvers/polish.py`) settle: a stored form is a
value there like any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dyngran.passes.classes import value_classes
from dyngran.passes.plan import Action
from dyngran.passes.problem import Form
from dyngran.passes.simulate import Simulator


@dataclass(frozen=True, slots=True)
class _Change:
    """Like forms, each instead of its value: what the step gets slower by, and how many bytes less cross."""

    forms: tuple[Form, ...]
    slower_us: float
    saved_bytes: int


def propose(simulator: Simulator, starts: Sequence[frozenset[int]]) -> Iterator[frozenset[int]]:
    """For each saved set of ``starts`` the sets on the way to storing everything in some form."""
    kinds = _kinds(simulator)
    for start in starts:
        yield from _on_the_way(simulator, start, kinds)


def offloaded(simulator: Simulator, starts: Iterable[frozenset[int]]) -> Iterator[frozenset[int]]:
    """Each saved set of ``starts`` with everything in host memory that may be there: copies beside kernels cost next to nothing, so what
    has more bytes to spend on what it keeps is faster."""
    offers = [form for form in simulator.problem.forms if form.action is Action.OFFLOAD]
    for start in starts if offers else ():
        yield _changed(start, [form for form in offers if form.value in start])


def sliced(simulator: Simulator, starts: Iterable[frozenset[int]]) -> Iterator[frozenset[int]]:
    """Each saved set of ``starts`` with one slice more, of what it saves whole or not at all: what a budget leaves over is a part of one
    value's bytes (of a relaxed knapsack one item at most is taken in part: Dantzig 1957)."""
    slices = [form for form in simulator.problem.forms if form.action is Action.SLICE]
    for start in starts if slices else ():
        for form in slices:
            yield _changed(start, (form,))


def _kinds(simulator: Simulator) -> list[tuple[Form, ...]]:
    """Forms of one format of like values."""
    problem = simulator.problem
    by_value: dict[int, list[Form]] = defaultdict(list)
    for form in problem.forms:
        by_value[form.value].append(form)
    kinds: dict[tuple[int, str], list[Form]] = defaultdict(list)
    for number, like in enumerate(value_classes(problem, by_value)):
        for value in like:
            for form in by_value[value]:
                kinds[number, form.format].append(form)
    return [tuple(forms) for forms in kinds.values()]


def _on_the_way(simulator: Simulator, start: frozenset[int], kinds: Sequence[tuple[Form, ...]]) -> Iterator[frozenset[int]]:
    values = simulator.problem.values
    time_us = simulator.evaluate(start).time_us
    changes = []
    for forms in kinds:
        saved = tuple(form for form in forms if form.value in start)
        num_bytes = sum(values[form.value].size_bytes - values[form.stored].size_bytes for form in saved)
        if num_bytes > 0:
            changes.append(_Change(saved, simulator.evaluate(_changed(start, saved)).time_us - time_us, num_bytes))
    current = start
    for change in sorted(changes, key=lambda change: (max(0.0, change.slower_us) / change.saved_bytes, -change.saved_bytes)):
        current = _changed(current, change.forms)
        yield current


def _changed(saved: frozenset[int], forms: Sequence[Form]) -> frozenset[int]:
    """Each form instead of its value, and instead of what else stands for the value."""
    return saved.difference(form.value for form in forms).union(form.stored for form in forms)
