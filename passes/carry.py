"""What the caller still holds of the step before while forward runs: ``output = model(batch)`` binds the new one only when it is there."""

from __future__ import annotations

from dataclasses import replace

from dyngran.passes.problem import Kind, Op, Problem, Side, Value

NAME = "outputs of the step before"


def with_carried(problem: Problem, carried_bytes: int) -> Problem:
    """The problem with a value of ``carried_bytes`` that is live from the start of forward to its end, after all other values."""
    if not carried_bytes:
        return problem
    value = Value(index=len(problem.values), name=NAME, size_bytes=carried_bytes, kind=Kind.CARRIED, producer=0, label=NAME)
    first = _op(0, "hold", reads=(), writes=(value.index,))
    later = [replace(op, index=op.index + 1) for op in problem.ops]
    last = _op(len(later) + 1, "let go of", reads=(value.index,), writes=())
    moved = [replace(one, producer=None if one.producer is None else one.producer + 1) for one in problem.values]
    forms = tuple(
        replace(
            form,
            store=form.store + 1,
            load=form.load + 1,
            barred=frozenset(op + 1 for op in form.barred),
            again=frozenset(op + 1 for op in form.again),
            fetch=None if form.fetch is None else form.fetch + 1,
        )
        for form in problem.forms
    )
    return replace(problem, values=(*moved, value), ops=(first, *later, last), forms=forms)


def _op(index: int, verb: str, *, reads: tuple[int, ...], writes: tuple[int, ...]) -> Op:
    return Op(
        index=index,
        name=f"{verb} {NAME}",
        target=verb,
        side=Side.FORWARD,
        reads=reads,
        writes=writes,
        cost_us=0.0,
        cost_source="free",
        pinned="the caller's",
    )
