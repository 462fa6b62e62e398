"""Lower bounds on the time of any plan that keeps a budget, and how each was proven.

Two relaxations add up. Every op that forward, or backward, cannot do without runs once; where the code generator fuses, pointwise work
is priced by the bytes that no fusion can spare: what an external kernel or the caller reads of it is written once, and what others made
is loaded once per side. Then, at the end of forward everything saved is live at once, beside the outputs that the caller holds and the
tangents: what does not fit into the budget there is made again, at least by the op that makes it; which that is, is a fractional
knapsack (Dantzig 1957), the cheapest per byte first. Chains of recompute, transients and times of the peaks are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from dyngran.passes.problem import Kind, Problem, Side

RELAXATION = "relaxation: every op once, saved bytes within the budget at the end of forward (fractional)"
EQUAL = "exact: equal to the relaxation's bound"


@dataclass(frozen=True, slots=True)
class Bound:
    """No plan is faster than ``time_us`` (us, forward + backward); ``proof`` is "exact" or "relaxation: ..."."""

    time_us: float
    proof: str


def lower_bound(problem: Problem, budget_bytes: int | None) -> Bound:
    """The relaxation for a budget (bytes, static bytes included; None: no limit). Linear in the graph but for a sort."""
    time_us = _once_us(problem)
    if budget_bytes is not None:
        time_us += _again_us(problem, budget_bytes)
    return Bound(time_us, RELAXATION)


def bound_of(problem: Problem, time_us: float, budget_bytes: int | None) -> Bound:
    """`lower_bound`, or that a plan of this time is proven to be the fastest because it equals it."""
    bound = lower_bound(problem, budget_bytes)
    return Bound(time_us, EQUAL) if bound.time_us >= time_us * (1 - 1e-9) else bound


def _once_us(problem: Problem) -> float:
    """Time of running once what must run."""
    needed = _needed_by_backward(problem)
    runs = [op for op in problem.ops if op.side is not Side.FREE or not needed.isdisjoint(op.writes)]
    if not problem.fused:
        return sum(op.cost_us for op in runs)
    external_us = sum(op.cost_us for op in runs if not op.fusible)
    num_bytes = 0
    for side in (Side.FORWARD, Side.BACKWARD):
        sizes = _least_bytes(problem) if side is Side.BACKWARD else {}
        num_bytes += sum(sizes.get(value, problem.values[value].size_bytes) for value in _moved(problem, side))
    return external_us + num_bytes / problem.bytes_per_us


def _least_bytes(problem: Problem) -> dict[int, int]:
    """Per value that has forms the least bytes in which it can cross, and be read."""
    least: dict[int, int] = {}
    for form in problem.forms:
        size = min(problem.values[form.value].size_bytes, problem.values[form.stored].size_bytes)
        least[form.value] = min(size, least.get(form.value, size))
    return least


def _needed_by_backward(problem: Problem) -> set[int]:
    """Values that backward reads, and what they are made of."""
    needed = set(problem.gradients)
    for op in reversed(problem.ops):
        if op.side is Side.BACKWARD or not needed.isdisjoint(op.writes):
            needed.update(op.reads)
    return needed


def _moved(problem: Problem, side: Side) -> set[int]:
    """Values that loops of one side load or store at least once: what others made and they need, what others or the caller need of them."""
    left = set(problem.forward_outputs if side is Side.FORWARD else problem.gradients)  # needed outside the loops
    inside: set[int] = set()  # needed by loops that something outside needs
    moved: set[int] = set()
    for op in reversed(problem.ops):
        if op.side is not side:
            continue
        if not op.fusible:
            left.update(op.reads)
            continue
        stored = left.intersection(op.writes)
        if stored or not inside.isdisjoint(op.writes):
            moved |= stored
            inside.update(op.reads)
    made_in_loops = {write for op in problem.ops if op.fusible for write in op.writes}
    return moved | (inside - made_in_loops)


def _again_us(problem: Problem, budget_bytes: int) -> float:
    """Least time of what must run again because not everything fits at the end of forward."""
    values = problem.values
    late = {write for op in problem.ops if op.side is Side.BACKWARD for write in op.writes}
    tangents = {value.index for value in values if value.kind is Kind.TANGENT}
    held = {value for value in problem.forward_outputs if values[value].producer is not None and not values[value].kind.is_static}
    room = budget_bytes - problem.total_static_bytes - sum(values[value].size_bytes for value in tangents | held)
    wanted = {read for op in problem.ops if op.side is Side.BACKWARD for read in op.reads} | problem.gradients
    least = _least_bytes(problem)
    cost_us = 0.0
    bytes_of: dict[int, int] = {}  # per op: what of its results is to be saved so that it need not run again
    for value in sorted(wanted - late - tangents):
        producer = values[value].producer
        if producer is None:
            continue
        op, size_bytes = problem.ops[producer], least.get(value, values[value].size_bytes)
        is_dear = op.side is Side.FORWARD and not (problem.fused and op.fusible)
        if problem.fused:
            is_kept = bool(op.pinned) or (problem.keeps_as_small(value) and not op.never_saved)
        else:  # a schedule may make a small value again, and run a FREE op in backward alone
            is_kept = bool(op.pinned) and op.side is Side.FORWARD
        if is_kept:
            room -= 0 if value in held else size_bytes
        elif is_dear:
            bytes_of[producer] = bytes_of.get(producer, 0) + (0 if value in held else size_bytes)
    for producer in [producer for producer in bytes_of if problem.ops[producer].never_saved]:
        cost_us += problem.ops[producer].cost_us
        del bytes_of[producer]
    missing = sum(bytes_of.values()) - max(room, 0)
    for producer in sorted(bytes_of, key=lambda producer: (problem.ops[producer].cost_us / max(bytes_of[producer], 1), producer)):
        if missing <= 0 or not bytes_of[producer]:
            break
        cost_us += min(1.0, missing / bytes_of[producer]) * problem.ops[producer].cost_us
        missing -= bytes_of[producer]
    return cost_us
