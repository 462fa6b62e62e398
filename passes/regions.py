"""Separators and regions: where few bytes cross from one part of the forward graph to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

from dyngran.passes.problem import Problem, Side

RISE = 1.5  # a valley counts as a separator if the bytes crossing rise by this factor on both of its sides


@dataclass(frozen=True, slots=True)
class Crossings:
    """What crosses each boundary of the forward ops: boundary b lies between forward ops b and b + 1.

    Attributes:
        ops: op indices that run in forward, in order.
        num_bytes: bytes that cross each boundary (read by a later forward op).
        first, last: per value, the first and the last boundary it crosses; absent if it crosses none.
    """

    ops: tuple[int, ...]
    num_bytes: tuple[int, ...]
    first: dict[int, int]
    last: dict[int, int]

    def at(self, boundary: int) -> frozenset[int]:
        """Values that cross the boundary."""
        return frozenset(value for value, first in self.first.items() if first <= boundary <= self.last[value])


def find_crossings(problem: Problem, *, without: frozenset[int] = frozenset()) -> Crossings:
    """Walk the forward ops once and note from where to where each value is needed; values in ``without`` cross nothing."""
    ops = tuple(op.index for op in problem.ops if op.side is Side.FORWARD)
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, index in enumerate(ops):
        for read in problem.ops[index].reads:
            if read in made and made[read] < position and read not in without:
                last[read] = position - 1
        for write in problem.ops[index].writes:
            made[write] = position
    change = [0] * (len(ops) + 1)
    for value, end in last.items():
        change[made[value]] += problem.values[value].size_bytes
        change[end + 1] -= problem.values[value].size_bytes
    curve, running = [], 0
    for delta in change[:-1]:
        running += delta
        curve.append(running)
    return Crossings(ops=ops, num_bytes=tuple(curve[:-1]), first={value: made[value] for value in last}, last=last)


def find_separators(crossings: Crossings, *, rise: float = RISE) -> tuple[int, ...]:
    """Boundaries in the valleys of the crossing bytes (hysteresis: the curve must rise by ``rise`` before and after)."""
    curve = crossings.num_bytes
    found: list[int] = []
    falling, best, top = False, 0, 0
    for boundary, level in enumerate(curve):
        if falling:
            if level < curve[best]:
                best = boundary
            elif level > rise * curve[best]:
                found.append(best)
                falling, top = False, level
        else:
            top = max(top, level)
            if level * rise < top:
                falling, best = True, boundary
    if falling and len(curve) and best < len(curve) - 1:
        found.append(best)
    return tuple(found)


def separating_values(problem: Problem) -> frozenset[int]:
    """What crosses the boundaries of `find_separators`."""
    crossings = find_crossings(problem)
    return frozenset(value for boundary in find_separators(crossings) for value in crossings.at(boundary))


def label_boundaries(problem: Problem, crossings: Crossings) -> tuple[int, ...]:
    """Boundaries where the ops' region label changes for good: what a person's module structure says."""
    labels = [problem.ops[index].region for index in crossings.ops]
    seen_last = {label: position for position, label in enumerate(labels)}
    return tuple(b for b in range(len(labels) - 1) if labels[b] and labels[b] != labels[b + 1] and seen_last[labels[b]] == b)


def even_boundaries(problem: Problem, crossings: Crossings, num_regions: int) -> tuple[int, ...]:
    """Split forward into parts that produce about equal bytes, each split moved to the narrowest place nearby."""
    curve = crossings.num_bytes
    if not curve or num_regions < 2:
        return ()
    produced, total = [], 0
    for index in crossings.ops:
        total += sum(problem.values[write].size_bytes for write in problem.ops[index].writes)
        produced.append(total)
    found: list[int] = []
    share = total / num_regions
    position = 0
    for part in range(1, num_regions):
        window: list[int] = []
        while position < len(curve) and produced[position] <= (part + 0.45) * share:
            if produced[position] >= (part - 0.45) * share:
                window.append(position)
            position += 1
        if window:
            found.append(min(window, key=lambda b: (curve[b], abs(produced[b] - part * share), b)))
    return tuple(found)


def ending_ops(problem: Problem) -> frozenset[int]:
    """Forward ops from which nothing leads to backward: they make outputs or update buffers."""
    read_on = {read for op in problem.ops if op.side is not Side.FORWARD for read in op.reads} | problem.gradients
    ending = set()
    for op in reversed(problem.ops):
        if op.side is not Side.FORWARD:
            continue
        if read_on.isdisjoint(op.writes):
            ending.add(op.index)
        else:
            read_on.update(op.reads)
    return frozenset(ending)


def region_numbers(problem: Problem, boundaries: Sequence[int], crossings: Crossings) -> tuple[int, ...]:
    """Per op, the number of the region it belongs to; ops outside forward belong where what they read was made.

    What forward reads beyond the region after the one that makes it (masks, position tables, long skips) says nothing about where a
    reader belongs, unless it reads nothing else; nor do states of the random generator, which belong to their readers. What stores or
    loads a form of a value belongs where the value is made. Forward ops
    that lead to nothing but outputs (running statistics, which graphs update at their end) belong where what they read was made.
    """
    number: dict[int, int] = {}
    ends = iter(sorted(boundaries))
    end = next(ends, None)
    current = 0
    for position, index in enumerate(crossings.ops):
        number[index] = current
        while end is not None and position >= end:
            current += 1
            end = next(ends, None)
    for index in sorted(ending_ops(problem)):
        producers = [problem.values[read].producer for read in problem.ops[index].reads]
        made_in = [number[producer] for producer in producers if producer in number]
        if made_in:
            number[index] = max(made_in)
    reaches: dict[int, int] = {}
    for index in crossings.ops:
        for read in problem.ops[index].reads:
            reaches[read] = number[index]
    stored = {index: form.value for form in problem.forms for index in (form.store, form.load)}
    for op in problem.ops:
        if op.index in number or op.index in stored:
            continue
        near: list[int] = []
        far: list[int] = []
        later: list[int] = []
        for read in op.reads:
            producer = problem.values[read].producer
            if producer is None or not problem.ops[producer].reads:  # given, or a constant
                continue
            if problem.ops[producer].side is Side.BACKWARD:
                later.append(number[producer])
            else:
                (near if reaches.get(read, 0) <= number[producer] + 1 else far).append(number[producer])
        number[op.index] = max(near) if near else (min(later) if later else max(far, default=current))
    for index, value in stored.items():
        producer = problem.values[value].producer
        assert producer is not None
        number[index] = number[producer]
    return tuple(number[op.index] for op in problem.ops)


def far_values(problem: Problem, numbers: Sequence[int]) -> frozenset[int]:
    """Values of forward that are read beyond the region after the one that makes them (``numbers``: the region of each op): masks,
    position tables, casts of shared weights, long skips."""
    far = set()
    for op in problem.ops:
        for read in op.reads:
            producer = problem.values[read].producer
            if producer is None or problem.ops[producer].side is Side.BACKWARD:
                continue
            if numbers[op.index] not in (numbers[producer], numbers[producer] + 1):
                far.add(read)
    return frozenset(far)


def nested_boundaries(problem: Problem, crossings: Crossings, separators: Sequence[int], max_ops: int) -> tuple[int, ...]:
    """Separators, and within regions of more than ``max_ops`` forward ops the valleys of what crosses besides values from far away.

    Skips pass a U-Net's levels, and features a dense block's layers: what lies between two separators is no chain then, but is one
    besides them. A graph without separators is cut into parts of about equal bytes to see what comes from far, and if that has no
    valleys either.
    """
    even = even_boundaries(problem, crossings, isqrt(len(crossings.ops))) if len(separators) < 2 else ()
    far = far_values(problem, region_numbers(problem, even or separators, crossings))
    inside = find_separators(find_crossings(problem, without=far))
    ends = [-1, *separators, len(crossings.ops) - 1]
    wide = [(first, last) for first, last in pairwise(ends) if last - first > max_ops]
    found = {*separators, *(boundary for boundary in inside if any(first < boundary < last for first, last in wide))}
    return tuple(sorted(found)) if len(found) > 1 else even


def region_of(problem: Problem) -> tuple[str, ...]:
    """Per op, the name of its region: its own label if it has one, else ``region i`` between separators."""
    crossings = find_crossings(problem)
    numbers = region_numbers(problem, find_separators(crossings), crossings)
    return tuple(op.region or f"region {numbers[op.index]}" for op in problem.ops)
