"""From what a solver proposes to the plan for a budget: the one signature that every solver has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dyngran.passes.archive import Archive, Judge, Proposal
from dyngran.passes.bounds import Bound, bound_of
from dyngran.passes.decide import decide
from dyngran.passes.errors import BudgetTooSmall, format_bytes
from dyngran.passes.plan import Plan
from dyngran.passes.problem import Kind, Problem
from dyngran.passes.simulate import Outcome, Simulator

Propose = Callable[..., Iterator[Proposal]]
CUT_SHORT = "The search was cut short: a longer one may find a smaller plan. "  # what a refusal after such a search begins its hint with


def solve_with(propose: Propose, name: str, problem: Problem, budget_bytes: int | None) -> Plan:
    """The fastest plan that one solver proposes for a budget (bytes, static bytes included; None: no limit).

    Raises BudgetTooSmall if none fits, with the least peak among its proposals.
    """
    judge = Judge(Simulator(problem))
    for proposal in propose(judge.simulator, budget_bytes=budget_bytes):
        judge.judge_any(proposal, name)
    if judge.archive.least() is None:  # too small a graph to checkpoint anything in
        judge(judge.simulator.default_saved, name)
    return plan_from(judge, judge.archive, budget_bytes, solver=name)


def plan_from(
    judge: Judge, archive: Archive, budget_bytes: int | None, *, solver: str, truncated: bool = False, proof: str = "", hint: str = ""
) -> Plan:
    """The archive's answer to a budget. ``proof``: why no plan of the archive's kind is faster, if that is known.

    Raises BudgetTooSmall with ``hint``, or with what the least peak consists of.
    """
    entry = archive.best(budget_bytes)
    if entry is None:
        assert budget_bytes is not None
        raise too_small(judge, archive, budget_bytes, hint=hint, truncated=truncated)
    fastest = judge.archive.best(None)
    assert fastest is not None
    outcome = entry.outcome
    is_proven = bool(proof) and outcome.schedule is None
    bound = Bound(outcome.time_us, proof) if is_proven else bound_of(judge.simulator.problem, outcome.time_us, budget_bytes)
    return decide(
        judge.simulator,
        outcome,
        budget_bytes=budget_bytes,
        solver=entry.solver,
        fastest_us=fastest.outcome.time_us,
        truncated=truncated,
        bound=bound,
    )


def too_small(judge: Judge, archive: Archive, budget_bytes: int, *, hint: str = "", truncated: bool = False) -> BudgetTooSmall:
    """The refusal: the least peak of the archive, and what is live there; ``truncated``: of a search that was cut short."""
    least = archive.least() or judge.archive.least()
    assert least is not None
    values = judge.simulator.problem.values
    pinned = [(values[v].label or values[v].name, size) for v, size in judge.timeline(least.outcome).live_at_peak]
    return BudgetTooSmall(
        budget_bytes=budget_bytes,
        least_peak_bytes=least.outcome.peak_bytes,
        pinned=tuple(pinned[:8]),
        hint=(CUT_SHORT if truncated else "") + (hint or hint_of(judge, budget_bytes, least.outcome)),
    )


def hint_of(judge: Judge, budget_bytes: int, least: Outcome) -> str:
    """What the least reachable peak consists of, and what would help."""
    problem = judge.simulator.problem
    static = problem.total_static_bytes
    if budget_bytes <= static:
        held = sorted(((size, kind.value) for kind, size in problem.static_bytes.items() if size), reverse=True)
        named = ", ".join(f"{name} {format_bytes(size)}" for size, name in held)
        return (
            f"What is held over the whole step takes {format_bytes(static)} ({named}): raise the budget, lower the batch size"
            f"{', use a smaller optimizer state' if problem.static_bytes.get(Kind.OPTIMIZER) else ''} or freeze parameters."
        )
    timeline = judge.timeline(least)
    kinds: dict[Kind, int] = {}
    for value, size in timeline.live_at_peak:
        kind = problem.values[value].kind
        kinds[kind] = kinds.get(kind, 0) + size
    parts = sorted(((size, kind.value) for kind, size in kinds.items()), reverse=True)
    parts.append((timeline.workspace_at_peak_bytes, "workspace"))
    shares = ", ".join(f"{name} {format_bytes(size)}" for size, name in [(static, "static"), *parts] if size)
    return f"Of that peak: {shares}. Raise the budget to the least peak or lower the batch size."
