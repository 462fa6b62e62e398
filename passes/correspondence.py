"""Which values of a stored graph are which of the graph at hand, where the two differ: region by region.

Regions are the repeated blocks of the model (`Op.region`). Two regions of one name, or else the first two that look alike, are paired;
where their fingerprints are equal the values are paired by a checked isomorphism, where not, by aligning what their ops make in order.
A pairing that is not perfect can do no harm: any set of values can be saved, and the simulator says what it costs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from dyngran.passes.fingerprint import fingerprint
from dyngran.passes.isomorphism import isomorphism
from dyngran.passes.problem import Problem

MAX_NAMED_OPS = 3
MAX_SENTENCES = 8
NO_REGION = "(no region)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Correspondence:
    """Attributes:
    values: stored value to value at hand.
    mismatches: a sentence for each set of regions that differ.
    share: of the bytes of the values that matter (at hand and stored, the lesser) those that have a partner.
    """

    values: Mapping[int, int]
    mismatches: tuple[str, ...]
    share: float


@dataclass(frozen=True, slots=True)
class _Region:
    """A part of a graph as a problem of its own: ``values[i]`` is the index in the whole graph of its value i."""

    name: str
    problem: Problem
    values: tuple[int, ...]
    mark: str


def correspondence(stored: Problem, here: Problem, *, matter_there: Collection[int], matter_here: Collection[int]) -> Correspondence:
    """Pair the values of two graphs; ``matter_*`` are those that a plan decides about, by which the share is counted."""
    theirs, ours = _regions(stored), _regions(here)
    found: dict[int, int] = {}
    differing: dict[str, list[str]] = defaultdict(list)
    for mine, yours in _paired(theirs, ours):
        if mine is None or yours is None:
            one = mine or yours
            assert one is not None
            differing[f"only in the {'plan' if yours is None else 'graph at hand'}, {len(one.problem.ops)} ops"].append(one.name)
            continue
        mapping = isomorphism(mine.problem, yours.problem) if mine.mark == yours.mark else None
        if mapping is None:
            found.update(_aligned(mine, yours))
            differing[_difference(mine.problem, yours.problem)].append(yours.name)
        else:
            made = {
                mine.values[left]: yours.values[right]
                for left, right in enumerate(mapping.values)
                if mine.problem.values[left].producer is not None
            }
            found.update(made)
    sentences = [f"{_some(names)}: {difference}" for difference, names in differing.items()]
    if len(sentences) > MAX_SENTENCES:
        sentences[MAX_SENTENCES - 1 :] = [f"and {len(sentences) - MAX_SENTENCES + 1} more kinds of difference"]
    share_there = _share(stored, matter_there, found.keys())
    return Correspondence(values=found, mismatches=tuple(sentences), share=min(share_there, _share(here, matter_here, set(found.values()))))


def _share(problem: Problem, matter: Collection[int], paired: Collection[int]) -> float:
    total = sum(problem.values[value].size_bytes for value in matter)
    return sum(problem.values[value].size_bytes for value in matter if value in paired) / total if total else 1.0


def _regions(problem: Problem) -> list[_Region]:
    ops: dict[str, list[int]] = defaultdict(list)
    for op in problem.ops:
        ops[op.region or NO_REGION].append(op.index)
    return [_region(problem, name, members) for name, members in ops.items()]


def _region(problem: Problem, name: str, members: Sequence[int]) -> _Region:
    """The ops of a region with what they read from elsewhere as inputs."""
    touched = sorted({value for index in members for value in (*problem.ops[index].reads, *problem.ops[index].writes)})
    place = {value: position for position, value in enumerate(touched)}
    made = {value: position for position, index in enumerate(members) for value in problem.ops[index].writes}
    part = Problem(
        values=tuple(replace(problem.values[value], index=place[value], producer=made.get(value)) for value in touched),
        ops=tuple(
            replace(
                problem.ops[index],
                index=position,
                reads=tuple(place[value] for value in problem.ops[index].reads),
                writes=tuple(place[value] for value in problem.ops[index].writes),
            )
            for position, index in enumerate(members)
        ),
        forward_outputs=frozenset(place[value] for value in problem.forward_outputs if value in place),
        gradients=frozenset(place[value] for value in problem.gradients if value in place),
        fused=problem.fused,
    )
    return _Region(name, part, tuple(touched), fingerprint(part))


def _paired(theirs: Sequence[_Region], ours: Sequence[_Region]) -> list[tuple[_Region | None, _Region | None]]:
    """By name; what is left by fingerprint, in order (modules that were renamed); then what only one side has."""
    by_name = {region.name: region for region in theirs}
    pairs: list[tuple[_Region | None, _Region | None]] = [(by_name.pop(one.name, None), one) for one in ours]
    renamed: dict[str, list[_Region]] = defaultdict(list)
    for region in by_name.values():
        renamed[region.mark].append(region)
    for position, (mine, yours) in enumerate(pairs):
        if mine is None and yours is not None and renamed[yours.mark]:
            pairs[position] = (renamed[yours.mark].pop(0), yours)
    return [*pairs, *((region, None) for regions in renamed.values() for region in regions)]


def _aligned(mine: _Region, yours: _Region) -> dict[int, int]:
    """Values that ops of one kind make in one order, with the same size."""
    left, right = _makings(mine), _makings(yours)
    matcher = SequenceMatcher(a=[key for key, _ in left], b=[key for key, _ in right], autojunk=False)
    return {left[block.a + step][1]: right[block.b + step][1] for block in matcher.get_matching_blocks() for step in range(block.size)}


def _makings(region: _Region) -> list[tuple[tuple[str, int, int], int]]:
    return [
        ((op.target, position, region.problem.values[write].size_bytes), region.values[write])
        for op in region.problem.ops
        for position, write in enumerate(op.writes)
    ]


def _difference(mine: Problem, yours: Problem) -> str:
    """What ops only one side has; if they are the same, that sizes or connections differ."""
    there, here = (Counter(op.target for op in problem.ops) for problem in (mine, yours))
    sides = [(there - here, "only in the plan"), (here - there, "only in the graph at hand")]
    parts = [f"{_some([f'{count} {target}' for target, count in only.most_common()])} {where}" for only, where in sides if only]
    return "; ".join(parts) or "the same ops with other sizes or connections"


def _some(names: Sequence[str]) -> str:
    """``a, b, c and 21 more``."""
    shown = names[:MAX_NAMED_OPS]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
