"""Annealing over the order of ops, in which an op may run more than once: an improver of any schedule, a planner for irregular graphs.

The idea is FastSA's (Imanishi et al., "A fast heuristic to optimize time-space tradeoff for large models", NeurIPS 2023): a step is a
row of slots, most of them empty; a move runs an op elsewhere, once more or once less; live bytes stand in a segment tree with addition
to a range and maximum, so that a move costs O(degree * log slots). Random moves alone need tens of millions of trials, so most moves
here look at the peak: a value idle there is made again before its next reader, with what that needs; the last reader of one is run
before the peak; a run too many is taken away and the peak that this leaves is repaired at least cost. Order is free, so that a peak is
first lowered without running anything twice.

The inner loop is passes/native/sequence.cpp. Its limit is a number of moves; the same problem, start, budget and seed give the same
schedule on every machine unless the clock cut it short.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from time import monotonic
from typing import Any

from dyngran.passes.native import library
from dyngran.passes.plan import Schedule
from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.schedule import ScheduleOutcome, check_schedule, replay_schedule

NAME = "anneal"
MOVES = 120_000
CHUNK = 2_000  # moves between two looks at the clock and at should_stop: some tens of milliseconds
ORDER_SHARE = 0.25  # of the moves: lowering the peak by order alone
ORDER_MIX = (5.0, 3.0, 0.0, 0.0, 0.0)  # how often each move is tried: relocate, advance, drop, erase, insert at random
FULL_MIX = (4.0, 2.0, 5.0, 3.0, 0.5)
ORDER_HOT, ORDER_COLD = 3.0, 0.1  # heat at first and at last, in costs of a mean op
HOT, COLD = 2.0, 0.01
EXTRA_ROUNDS = 4  # as long as nothing fits: with twice the weight, and twice that
ROUNDS, REHEAT = 2, 0.5  # each round starts from the best so far, less hot than the one before
WEIGHT = 10.0  # of a byte over the budget, in whole costs per initial peak
STEP = 0.93  # of the present peak: how far below it a chunk aims in the first round, where the budget is further away


class _Arrays(ctypes.Structure):
    _fields_ = (
        ("num_values", ctypes.c_int32),
        ("num_ops", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("read_starts", "reads", "write_starts", "writes", "producer")),
        *((name, ctypes.c_void_p) for name in ("size", "workspace", "rerun", "cost", "op_flags", "value_flags")),
        ("tangent_bytes", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
    )


def anneal_order(
    problem: Problem,
    budget_bytes: int,
    start: Schedule,
    *,
    num_moves: int = MOVES,
    max_seconds: float = 30.0,
    seed: int = 0,
    should_stop: Callable[[], bool] | None = None,
) -> tuple[Schedule, bool]:
    """The cheapest schedule found whose peak, static bytes included, is at most ``budget_bytes``, and whether the search was cut short.

    If nothing that fits is found it is the schedule of least peak. It is never worse than ``start``. ``num_moves`` limits the work,
    ``max_seconds`` is a safety stop, ``should_stop`` is asked every few ten milliseconds; KeyboardInterrupt also returns the best so far.

    Raises ValueError if the problem's code generator fuses ops, or if ``start`` cannot run.
    """
    check_schedule(problem, start)
    search = _Search(problem, budget_bytes, start, seed=seed, deadline=monotonic() + max_seconds, should_stop=should_stop)
    try:
        search.run(num_moves)
    except KeyboardInterrupt:
        search.truncated = True
    found = search.best()
    check_schedule(problem, found)

    def rank(schedule: Schedule) -> tuple[int, float, int]:
        outcome: ScheduleOutcome = replay_schedule(problem, schedule)
        return max(outcome.peak_bytes, budget_bytes), outcome.time_us, outcome.peak_bytes

    return min((start, found), key=rank), search.truncated


def held_outputs(problem: Problem) -> frozenset[int]:
    """Forward outputs that backward may read: the caller holds them anyway, so no newer copy of them is worth its bytes."""
    makers = {value: problem.values[value].producer for value in problem.forward_outputs}
    return frozenset(v for v, op in makers.items() if op is not None and not (problem.ops[op].never_saved and not problem.ops[op].pinned))


class _Search:
    """One run of the native annealer."""

    def __init__(
        self, problem: Problem, budget_bytes: int, start: Schedule, *, seed: int, deadline: float, should_stop: Callable[[], bool] | None
    ) -> None:
        self.truncated = False
        self._deadline = deadline
        self._should_stop = should_stop
        self._budget_bytes = max(0, budget_bytes - problem.total_static_bytes)
        self._least_us = sum(op.cost_us for op in problem.ops if op.side is not Side.FREE)
        self._num_ops = len(problem.ops)
        self._held = held_outputs(problem)
        self._native = _native()
        arrays, self._keep = _arrays(problem, seed)
        self._handle = ctypes.c_void_p(self._native.dyngran_sequence_new(ctypes.byref(arrays)))
        order = (*start.forward, *start.backward)
        self._native.dyngran_sequence_load(
            self._handle, _array(ctypes.c_int32, order), len(start.forward), len(order), ctypes.c_int64(self._budget_bytes)
        )

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._native.dyngran_sequence_free(handle)

    def best(self) -> Schedule:
        num_forward = ctypes.c_int32()
        length = self._native.dyngran_sequence_best(self._handle, None, 0, ctypes.byref(num_forward))
        ops = (ctypes.c_int32 * length)()
        self._native.dyngran_sequence_best(self._handle, ops, length, ctypes.byref(num_forward))
        return Schedule(tuple(ops[: num_forward.value]), tuple(ops[num_forward.value :]), self._held)

    def run(self, num_moves: int) -> None:
        """Order alone first, then whatever lowers the cost."""
        if not self._num_ops or self._is_done():
            return
        budget = self._budget_bytes
        unit = 1 / max(1, self._num_ops)
        self._anneal(int(ORDER_SHARE * num_moves), ORDER_HOT * unit, ORDER_COLD * unit, 1.0, ORDER_MIX, until_fits=True)
        if self._is_done():
            return
        num_left = num_moves - int(ORDER_SHARE * num_moves)
        for place in range(ROUNDS + EXTRA_ROUNDS):
            if self.truncated or (place >= ROUNDS and self._fits):
                return
            self._native.dyngran_sequence_restart(self._handle)
            self._native.dyngran_sequence_reach(self._handle, budget, 10 * self._num_ops)
            hot = HOT * unit * REHEAT ** (place % ROUNDS)
            weight = WEIGHT * 2 ** (place // ROUNDS)
            self._anneal(num_left // ROUNDS, hot, COLD * unit, weight, FULL_MIX, step=STEP if place % 2 == 0 else 0.0)

    @property
    def _fits(self) -> bool:
        return bool(self._native.dyngran_sequence_best_peak(self._handle) <= self._budget_bytes)

    def _is_done(self) -> bool:
        """True if it fits and nothing runs that need not: no schedule is cheaper."""
        return self._fits and self._native.dyngran_sequence_best_cost(self._handle) <= self._least_us * (1 + 1e-12)

    def _anneal(
        self,
        num_moves: int,
        hot: float,
        cold: float,
        bytes_weight: float,
        mix: tuple[float, ...],
        *,
        until_fits: bool = False,
        step: float = 0.0,
    ) -> None:
        num_chunks = max(1, num_moves // CHUNK)
        weights = _array(ctypes.c_double, mix)
        ratio = (cold / hot) ** (1 / num_chunks)
        heat = hot
        for _ in range(num_chunks):
            if monotonic() > self._deadline or (self._should_stop is not None and self._should_stop()):
                self.truncated = True
                return
            peak_bytes = self._native.dyngran_sequence_peak(self._handle)
            target_bytes = max(self._budget_bytes, int(step * peak_bytes))
            self._native.dyngran_sequence_run(self._handle, target_bytes, min(CHUNK, num_moves), heat, heat * ratio, bytes_weight, weights)
            heat *= ratio
            if self._is_done() or (until_fits and self._fits):
                return


def _arrays(problem: Problem, seed: int) -> tuple[_Arrays, list[object]]:
    """The problem as the native code reads it, and the arrays that must outlive it."""
    made = {value.index for value in problem.values if value.producer is not None}
    for op in problem.ops:
        for value in op.writes:
            if problem.values[value].producer != op.index:
                raise ValueError(f"{op.name} writes {problem.values[value].name}, which is another op's: its order cannot be changed")
    wanted = {problem.values[value].producer for value in problem.gradients | problem.forward_outputs}
    read_starts, reads = _rows([v for v in dict.fromkeys(op.reads) if v in made] for op in problem.ops)
    write_starts, writes = _rows(dict.fromkeys(op.writes) for op in problem.ops)
    op_flags = [
        (op.side is Side.FORWARD) | (op.side is Side.BACKWARD) << 1 | bool(op.pinned) << 2 | (op.index in wanted) << 3 for op in problem.ops
    ]
    never = {value for op in problem.ops if op.never_saved and not op.pinned for value in op.writes}
    value_flags = [
        (value.index in problem.forward_outputs) | (value.index in problem.gradients) << 1 | (value.index in never) << 2
        for value in problem.values
    ]
    columns: list[Any] = []
    for numbers in (read_starts, reads, write_starts, writes, [-1 if v.producer is None else v.producer for v in problem.values]):
        columns.append(_array(ctypes.c_int32, numbers))
    int64s = [
        _array(ctypes.c_int64, [0 if value.kind.is_static else value.size_bytes for value in problem.values]),
        _array(ctypes.c_int64, [op.workspace_bytes for op in problem.ops]),
        _array(ctypes.c_int64, [op.rerun_bytes for op in problem.ops]),
    ]
    costs = _array(ctypes.c_double, [op.cost_us for op in problem.ops])
    flags = [_array(ctypes.c_uint8, op_flags), _array(ctypes.c_uint8, value_flags)]
    pointers = [ctypes.addressof(column) for column in (*columns, *int64s, costs, *flags)]
    tangent_bytes = sum(value.size_bytes for value in problem.values if value.kind is Kind.TANGENT)
    arrays = _Arrays(len(problem.values), len(problem.ops), *pointers, tangent_bytes, seed)
    return arrays, [*columns, *int64s, costs, *flags]


def _rows(rows: Iterable[Iterable[int]]) -> tuple[list[int], list[int]]:
    starts = [0]
    items: list[int] = []
    for row in rows:
        items.extend(row)
        starts.append(len(items))
    return starts, items


def _array(kind: Any, numbers: Sequence[float]) -> Any:
    """A ctypes array of ``kind``, never empty: it has an address whatever the problem."""
    return (kind * max(1, len(numbers)))(*numbers)


@cache
def _native() -> ctypes.CDLL:
    native = library()
    native.dyngran_sequence_new.restype = ctypes.c_void_p
    native.dyngran_sequence_best_peak.restype = ctypes.c_int64
    native.dyngran_sequence_peak.restype = ctypes.c_int64
    native.dyngran_sequence_best_cost.restype = ctypes.c_double
    native.dyngran_sequence_run.restype = ctypes.c_int64
    native.dyngran_sequence_run.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.c_double,
        ctypes.c_double,
        ctypes.c_double,
        ctypes.c_void_p,
    )
    return native
