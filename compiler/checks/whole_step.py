"""The graphs of a step taken together, as graph breaks cut one graph in two: whose values are whose, and what an op costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean

from dyngran.passes.correspondence import correspondence
from dyngran.passes.forms import without_forms
from dyngran.passes.isomorphism import Isomorphism
from dyngran.passes.problem import Op, Problem


@dataclass(frozen=True, slots=True)
class Pairing:
    """Values of all committed graphs to those of all fresh ones, as (graph, value); with a sentence for each part that differs."""

    partner: Mapping[tuple[int, int], tuple[int, int]]
    mismatches: tuple[str, ...]


def pair_whole_steps(
    committed: Sequence[Problem], their_saved: Sequence[Collection[int]], fresh: Sequence[Problem], our_saved: Sequence[Collection[int]]
) -> Pairing:
    """Region by region, whichever graph a region stands in; ``*_saved`` are the values that matter. Forms of storage are left out: what may
    be stored, and when, says nothing about what a graph computes."""
    theirs, ours = (_union([without_forms(problem) for problem in problems]) for problems in (committed, fresh))
    there, here = (
        [one.place[at, value] for at, saved in enumerate(each) for value in saved]
        for one, each in ((theirs, their_saved), (ours, our_saved))
    )
    found = correspondence(theirs.problem, ours.problem, matter_there=there, matter_here=here)
    partner = {theirs.origin[left]: ours.origin[right] for left, right in found.values.items()}
    return Pairing(partner, found.mismatches)


@dataclass(frozen=True, slots=True)
class _Union:
    """The graphs of a step as one problem; ``origin`` and ``place`` lead from its values to (graph, value) and back."""

    problem: Problem
    origin: tuple[tuple[int, int], ...]
    place: Mapping[tuple[int, int], int]


def _union(problems: Sequence[Problem]) -> _Union:
    before = list(accumulate((len(problem.ops) for problem in problems), initial=0))
    origin = tuple((at, value.index) for at, problem in enumerate(problems) for value in problem.values)
    place = {one: index for index, one in enumerate(origin)}
    values = tuple(
        replace(
            problems[at].values[value],
            index=index,
            producer=None if (producer := problems[at].values[value].producer) is None else producer + before[at],
        )
        for index, (at, value) in enumerate(origin)
    )
    ops: list[Op] = []
    for at, problem in enumerate(problems):
        for op in problem.ops:
            reads, writes = (tuple(place[at, value] for value in part) for part in (op.reads, op.writes))
            ops.append(replace(op, index=len(ops), reads=reads, writes=writes))
    outputs, gradients = (
        frozenset(place[at, value] for at, problem in enumerate(problems) for value in getattr(problem, name))
        for name in ("forward_outputs", "gradients")
    )
    whole = Problem(values=values, ops=tuple(ops), forward_outputs=outputs, gradients=gradients, fused=problems[0].fused)
    return _Union(whole, origin, place)


class Prices:
    """What the ops of the committed graphs cost."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        costs: dict[tuple[object, ...], list[float]] = defaultdict(list)
        for problem in problems:
            for op in problem.ops:
                costs[_kind(problem, op)].append(op.cost_us)
        self._problems = tuple(problems)
        self._mean = {kind: fmean(found) for kind, found in costs.items()}

    def put_on(self, problem: Problem, at: int, mapping: Isomorphism | None) -> Problem:
        """``problem``, graph ``at`` of the fresh step, at these costs: op by op where it is the committed graph, else by kind of op."""
        first = self._problems[0]
        if mapping is None:
            costs = {op.index: self._mean.get(_kind(problem, op), op.cost_us) for op in problem.ops}
        else:
            costs = {yours: self._problems[at].ops[mine].cost_us for mine, yours in enumerate(mapping.ops)}
        ops = tuple(replace(op, cost_us=costs[op.index]) for op in problem.ops)
        return replace(problem, ops=ops, bytes_per_us=first.bytes_per_us, launch_us=first.launch_us)


def _kind(problem: Problem, op: Op) -> tuple[object, ...]:
    sizes = (tuple(problem.values[value].size_bytes for value in part) for part in (op.reads, op.writes))
    return (op.target, op.num_elements, *sizes)
