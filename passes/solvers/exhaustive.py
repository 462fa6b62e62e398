"""Every saved set of a small problem: the frontier that no other plan of this kind beats."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from dyngran.passes.simulate import Simulator

MAX_CANDIDATES = 10
PROOF = "exact: every saved set was tried"


def applies(simulator: Simulator) -> bool:
    return len(simulator.candidates) <= MAX_CANDIDATES


def propose(simulator: Simulator, *, budget_bytes: int | None = None) -> Iterator[frozenset[int]]:
    """All subsets of the candidates if they are few, else nothing."""
    if applies(simulator):
        for count in range(len(simulator.candidates) + 1):
            yield from map(frozenset, combinations(simulator.candidates, count))
