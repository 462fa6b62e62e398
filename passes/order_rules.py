"""What an order of ops must respect beyond who reads what: random draws, memory that is overwritten, what the caller does at either end.

A `Problem` knows data flow only. These rules come from the graph (`compiler/unroll.py` reads them off it); a planner that moves ops obeys
them, and what applies a schedule refuses one that does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dyngran.passes.plan import Schedule
from dyngran.passes.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRules:
    """Rules about op indices of one problem.

    Attributes:
        first, last: ops that stand before, or after, all others of forward (what the caller holds until then, or writes back, or is given).
        draws: random ops; in forward, and in backward, their first runs stand in this order, so that each draws its own numbers. Later
            runs draw them again and may stand anywhere, any number of times.
        fences: ``(earlier, later)``: no run of ``earlier`` may follow a run of ``later``, because one of them overwrites what both touch.
        needs: ``(earlier, later)``: ``later`` takes a size or another scalar from ``earlier``, which no value of the problem stands for.
        once: ``(op, why)`` of ops that run once although they are not pinned.
    """

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    draws: tuple[int, ...] = ()
    fences: tuple[tuple[int, int], ...] = ()
    needs: tuple[tuple[int, int], ...] = ()
    once: tuple[tuple[int, str], ...] = ()


def check_order(problem: Problem, rules: OrderRules, schedule: Schedule) -> None:
    """Raises ValueError with the first rule that a schedule breaks."""
    names = [op.name for op in problem.ops]
    forward, order = schedule.forward, (*schedule.forward, *schedule.backward)
    num_first, num_last = len(rules.first), len(rules.last)
    if set(forward[:num_first]) != set(rules.first):
        raise ValueError(f"{names[rules.first[0]]} must come before all that runs in forward")
    if num_last and set(forward[-num_last:]) != set(rules.last):
        raise ValueError(f"{names[rules.last[-1]]} must come after all that runs in forward")
    place = {op: position for position, op in enumerate(rules.draws)}
    ran: set[int] = set()
    for part in (schedule.forward, schedule.backward):
        latest = -1
        for op in part:
            if op not in place or op in ran:
                continue
            ran.add(op)
            if place[op] < latest:
                raise ValueError(f"{names[op]} draws random numbers and must run before {names[rules.draws[latest]]}, which draws after it")
            latest = place[op]
    runs = Counter(order)
    for op, why in rules.once:
        if runs[op] > 1:
            raise ValueError(f"{names[op]} runs {runs[op]} times but must not run twice: {why}")
    first_run = {op: position for position, op in reversed(tuple(enumerate(order)))}
    last_run = {op: position for position, op in enumerate(order)}
    for earlier, later in rules.needs:
        if later in first_run and first_run.get(earlier, len(order)) > first_run[later]:
            raise ValueError(f"{names[later]} takes a number from {names[earlier]}, which has not run yet")
    for earlier, later in rules.fences:
        if earlier in last_run and later in first_run and last_run[earlier] > first_run[later]:
            raise ValueError(f"{names[earlier]} must not run after {names[later]}: one of them overwrites what the other touches")


def at_the_ends(rules: OrderRules, schedule: Schedule) -> Schedule:
    """The schedule with ``first`` and ``last`` where they belong: what they hold may live longer than it did, so replay it again."""
    moved = {*rules.first, *rules.last}
    between = (op for op in schedule.forward if op not in moved)
    return replace(schedule, forward=(*rules.first, *between, *rules.last))


def distinct_pairs(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Pairs without duplicates, in ascending order, none of an op with itself."""
    return tuple(sorted({(earlier, later) for earlier, later in pairs if earlier != later}))
