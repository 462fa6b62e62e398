"""Save everything that backward reads: no op runs twice."""

from __future__ import annotations

from collections.abc import Iterator

from dyngran.passes.simulate import Simulator


def propose(simulator: Simulator, *, budget_bytes: int | None = None) -> Iterator[frozenset[int]]:
    """One plan, the same for every budget."""
    yield simulator.default_saved
