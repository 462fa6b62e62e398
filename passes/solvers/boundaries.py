"""Where a person, or a paper about chains, would cut forward into regions, and what a checkpoint there keeps."""

from __future__ import annotations

from collections.abc import Iterable

from dyngran.passes.problem import Problem, Side
from dyngran.passes.regions import Crossings, find_separators, label_boundaries
from dyngran.passes.simulate import Simulator


def natural_boundaries(problem: Problem, crossings: Crossings) -> tuple[int, ...]:
    """Ends of modules by their labels; without those the valleys of the crossing bytes; in a plain chain every op is a region."""
    for found in (label_boundaries(problem, crossings), find_separators(crossings)):
        if len(found) > 1:
            return found
    return tuple(range(len(crossings.num_bytes)))


def narrow_boundaries(problem: Problem, crossings: Crossings) -> tuple[int, ...]:
    """The valleys of the crossing bytes, of which there are more than modules; `natural_boundaries` if there are none."""
    found = find_separators(crossings)
    return found if len(found) > 1 else natural_boundaries(problem, crossings)


def crossing_values(crossings: Crossings, boundaries: Iterable[int]) -> frozenset[int]:
    """What crosses any of the boundaries: a checkpoint at each of them keeps it."""
    following = [len(crossings.ops)] * (len(crossings.ops) + 1)  # per position the first of the boundaries from there on
    for boundary in boundaries:
        following[boundary] = boundary
    for position in range(len(crossings.ops) - 1, -1, -1):
        if following[position] != position:
            following[position] = following[position + 1]
    last = crossings.last
    return frozenset(value for value, first in crossings.first.items() if following[first] <= last[value])


def values_after(simulator: Simulator, crossings: Crossings, boundary: int) -> frozenset[int]:
    """What the code generator's own plan saves of what forward makes after the boundary, and of what only backward needs of that.

    Whoever checkpoints by hand leaves the last part out (as `torch.utils.checkpoint.checkpoint_sequential` does): backward begins there,
    so recompute would follow at once. The own plan is the default one, or with fusion the first that torch's partitioners have.
    """
    problem = simulator.problem
    late = {write for index in crossings.ops[boundary + 1 :] for write in problem.ops[index].writes}
    for op in problem.ops:
        if op.side is Side.FREE and not late.isdisjoint(op.reads):
            late.update(op.writes)
    return (problem.stock[min(problem.stock)] if problem.fused and problem.stock else simulator.default_saved) & late
