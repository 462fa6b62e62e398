"""Problems as flat arrays for the native library, and searches over their saved sets."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

from dyngran.passes.native import library
from dyngran.passes.problem import Kind, Problem, Side

SEGMENT_OPS = 16  # that are replayed together, more in large graphs
MAX_VISITS = 8  # op visits per op and evaluation that a walk expects at most: a graph that needs more (wide fan-out) gets fewer


class _GraphArrays(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_values", "num_ops", "num_spaces", "fused", "segment_ops")),
        *((name, ctypes.c_double) for name in ("launch_us", "bytes_per_us")),
        *((name, ctypes.c_void_p) for name in ("read_starts", "reads", "write_starts", "writes", "need_starts", "needs")),
        *((name, ctypes.c_void_p) for name in ("live", "full", "workspace", "rerun_workspace", "cost")),
        *((name, ctypes.c_void_p) for name in ("op_flags", "space", "producer", "value_flags")),
        *((name, ctypes.c_int32) for name in ("num_wanted", "num_late_wanted")),
        *((name, ctypes.c_void_p) for name in ("wanted", "late_wanted")),
        *((name, ctypes.c_void_p) for name in ("form_starts", "forms", "form_of", "loader", "barred_starts", "barred")),
        *((name, ctypes.c_void_p) for name in ("again_starts", "again", "fetch", "fetched_starts", "fetched", "copy_us")),
    )


class NativeOutcome(ctypes.Structure):
    """What one saved set costs: bytes without static ones, times in us."""

    peak_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    saved_bytes: int
    time_us: float
    recompute_us: float
    num_recomputed: int
    num_kernels: int
    num_forward: int
    peak_position: int
    work: int
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("peak_bytes", "forward_peak_bytes", "backward_peak_bytes", "saved_bytes")),
        *((name, ctypes.c_double) for name in ("time_us", "recompute_us")),
        *((name, ctypes.c_int32) for name in ("num_recomputed", "num_kernels", "num_forward", "peak_position")),
        ("work", ctypes.c_int64),
    )


class _Settings(ctypes.Structure):
    _fields_ = (
        ("budget_bytes", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("price_us_per_byte", "saved_us_per_byte", "peak_us_per_byte", "first_threshold_us")),
        ("num_evaluations", ctypes.c_int64),
        ("max_work", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Settings of one walk by threshold accepting.

    Attributes:
        budget_bytes: transient bytes; each byte of a peak above it costs ``price_us_per_byte``.
        saved_us_per_byte, peak_us_per_byte: price of every saved byte and of every byte of the peak. If either is above zero the walk
            collects options (no other is better in saved bytes, peak and time) instead of the frontier of peak and time.
        first_threshold_us: by how much a plan may be worse than the last one to be accepted at first; it falls to zero.
        num_evaluations: plans to evaluate at most; seed: of the moves.
        num_visits: op visits to spend at most; a plan near the last one costs a few of them. None: what so many plans cost if each is
            replayed whole.
    """

    budget_bytes: int
    price_us_per_byte: float
    first_threshold_us: float
    num_evaluations: int
    seed: int = 0
    saved_us_per_byte: float = 0.0
    peak_us_per_byte: float = 0.0
    num_visits: int | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """Per kernel of a schedule the op it is named after and the bytes live while it runs; the first ``num_forward`` run in forward."""

    ops: tuple[int, ...]
    live_bytes: tuple[int, ...]
    num_forward: int


class Places:
    """The region of each op in forward and in backward; -1 for ops that say nothing: those count with the kernel before them in forward,
    with the next one in backward."""

    def __init__(self, in_forward: Sequence[int], in_backward: Sequence[int]) -> None:
        self.arrays = tuple((ctypes.c_int32 * len(places))(*places) for places in (in_forward, in_backward))


class Stop:
    """A flag that native loops look at; set it to make them return what they have."""

    def __init__(self) -> None:
        self._flag = ctypes.c_int32(0)

    def set(self) -> None:
        self._flag.value = 1

    def clear(self) -> None:
        self._flag.value = 0

    def __bool__(self) -> bool:
        return bool(self._flag.value)

    @property
    def pointer(self) -> Any:
        return ctypes.byref(self._flag)


class NativeGraph:
    """The arrays of one problem on the native side.

    ``live_bytes`` replaces what each value counts in the timeline (else its size, static values nothing). ``segment_ops`` changes how
    much is replayed again for a small change, never what comes out.
    """

    def __init__(self, problem: Problem, *, live_bytes: Sequence[int] | None = None, segment_ops: int = SEGMENT_OPS) -> None:
        if segment_ops < 1:
            raise ValueError(f"segment_ops must be at least 1, got {segment_ops}")
        values, ops = problem.values, problem.ops
        late = {value.index for value in values if value.kind is Kind.TANGENT}
        for op in ops:
            if op.side is Side.BACKWARD:
                late.update(op.writes)
        given = [value.producer is None for value in values]
        read_late = {read for op in ops if op.side is Side.BACKWARD for read in op.reads} | problem.gradients
        self.wanted = sorted(value for value in read_late if value not in late and not given[value])
        late_wanted = sorted(value for value in problem.gradients if value not in late and not given[value])
        spaces = {count: place for place, count in enumerate(sorted({op.num_elements for op in ops}))}
        if live_bytes is None:
            live_bytes = [0 if value.kind.is_static else value.size_bytes for value in values]
        self._kept: list[array[Any]] = []
        loads = {form.load: (form.value,) for form in problem.forms}
        forms: list[list[int]] = [[] for _ in values]
        for form in problem.forms:
            forms[form.value].append(form.stored)
        fetch = {form.load: form.fetch for form in problem.forms if form.fetch is not None}
        fetched: list[list[int]] = [[] for _ in ops]
        for form in problem.forms:
            if form.fetch is not None:
                fetched[form.fetch].append(form.stored)
        reads = self._rows([op.reads for op in ops])
        writes = self._rows([loads.get(op.index, op.writes) for op in ops])
        needs = self._rows([[read for read in op.reads if not given[read] and read not in late] for op in ops])
        self.num_values, self.num_ops = len(values), len(ops)
        self.numbers = tuple(range(len(values)))  # the same objects in every set of values
        arrays = _GraphArrays(
            len(values),
            len(ops),
            (len(spaces) + 1) | 1,  # odd: the native side spreads (depth times this, plus space) over a table of a power of two
            problem.fused,
            segment_ops,
            problem.launch_us,
            problem.bytes_per_us,
            *reads,
            *writes,
            *needs,
            self._array("q", live_bytes),
            self._array("q", [value.size_bytes for value in values]),
            self._array("q", [op.workspace_bytes for op in ops]),
            self._array("q", [op.workspace_bytes + op.rerun_bytes for op in ops]),
            self._array("d", [op.cost_us for op in ops]),
            self._array("B", [_flags_of_op(op) for op in ops]),
            self._array("i", [spaces[op.num_elements] for op in ops]),
            self._array("i", [-1 if value.producer is None else value.producer for value in values]),
            self._array("B", [_flags_of_value(problem, value.index, value.index in late) for value in values]),
            len(self.wanted),
            len(late_wanted),
            self._array("i", self.wanted),
            self._array("i", late_wanted),
            *self._rows(forms),
            self._array("i", [problem.form_of[value].value if value in problem.form_of else -1 for value in range(len(values))]),
            self._array("i", [problem.form_of[value].load if value in problem.form_of else -1 for value in range(len(values))]),
            *self._rows([sorted(problem.form_of[value].barred) if value in problem.form_of else () for value in range(len(values))]),
            *self._rows([sorted(problem.form_of[value].again) if value in problem.form_of else () for value in range(len(values))]),
            self._array("i", [fetch.get(op.index, -1) for op in ops]),
            *self._rows(fetched),
            self._array("d", [problem.form_of[value].copy_us if value in problem.form_of else 0.0 for value in range(len(values))]),
        )
        native = library()
        native.dyngran_graph_new.restype = ctypes.c_void_p
        self.handle = ctypes.c_void_p(native.dyngran_graph_new(ctypes.byref(arrays)))
        self._kept.clear()  # the native side has copies

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            library().dyngran_graph_free(self.handle)

    def _array(self, code: str, items: Iterable[Any]) -> int:
        kept = array(code, items)
        self._kept.append(kept)
        return kept.buffer_info()[0]

    def _rows(self, rows: Sequence[Sequence[int]]) -> tuple[int, int]:
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + len(row))
        return self._array("i", starts), self._array("i", chain.from_iterable(rows))


def _flags_of_op(op: Any) -> int:
    flags: int = op.fusible | op.reduction << 1 | bool(op.pinned) << 2 | (op.never_saved and not op.pinned) << 3
    return flags | (op.side is Side.FORWARD) << 4 | (op.side is Side.BACKWARD) << 5


def _flags_of_value(problem: Problem, value: int, is_late: bool) -> int:
    flags = problem.keeps_as_small(value) | (value in problem.forward_outputs) << 1 | (value in problem.gradients) << 2
    return flags | (problem.values[value].kind is Kind.TANGENT) << 3 | is_late << 4 | problem.drops_as_small(value) << 5


class NativeSearch:
    """Evaluates saved sets of one graph, and walks over them. During a walk no other thread may use it; several searches share a graph.

    Sets of values are masks: bytes with a 1 for every value that is in.
    """

    def __init__(self, graph: NativeGraph) -> None:
        self._graph = graph
        self._native = library(holds_gil=True)
        self._native.dyngran_search_new.restype = ctypes.c_void_p
        self._search = ctypes.c_void_p(self._native.dyngran_search_new(graph.handle))
        self._num_values = graph.num_values

    def __del__(self) -> None:
        if getattr(self, "_search", None):
            self._native.dyngran_search_free(self._search)

    def mask(self, values: Iterable[int]) -> bytes:
        """The mask of a set of values; numbers that no value has are left out."""
        mask = bytearray(self._num_values)
        for value in values:
            if 0 <= value < self._num_values:
                mask[value] = 1
        return bytes(mask)

    def members(self, mask: bytes) -> frozenset[int]:
        return frozenset(compress(self._graph.numbers, mask))

    def differing(self, one: bytes, other: bytes) -> list[int]:
        """Values that are in one of two sets only."""
        difference = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
        return list(compress(self._graph.numbers, difference.to_bytes(self._num_values, "little")))

    def normalize(self, wished: bytes) -> bytes:
        """What really crosses of a wished mask."""
        crossing = ctypes.create_string_buffer(self._num_values)
        self._native.dyngran_normalize(self._search, wished, crossing)
        return crossing.raw

    def evaluate(self, wished: bytes) -> tuple[bytes, NativeOutcome]:
        """What really crosses of a wished mask, and what it costs."""
        crossing, outcome = ctypes.create_string_buffer(self._num_values), NativeOutcome()
        self._native.dyngran_evaluate(self._search, wished, crossing, ctypes.byref(outcome))
        return crossing.raw, outcome

    def curve(self, wished: bytes) -> Curve:
        """Bytes live along the schedule of a mask."""
        _, outcome = self.evaluate(wished)
        ops, live = (ctypes.c_int32 * outcome.num_kernels)(), (ctypes.c_int64 * outcome.num_kernels)()
        self._native.dyngran_curve(self._search, ops, live)
        return Curve(tuple(ops), tuple(live), outcome.num_forward)

    def region_peaks(self, wished: bytes, places: Places, num_regions: int) -> tuple[list[int], list[int], NativeOutcome]:
        """Most bytes live in each region in forward and in backward, and the outcome, of a mask."""
        _, outcome = self.evaluate(wished)
        peaks = [(ctypes.c_int64 * num_regions)() for _ in range(2)]
        self._native.dyngran_region_peaks(self._search, outcome.num_forward, *places.arrays, *peaks)
        return list(peaks[0]), list(peaks[1]), outcome

    def walk(self, start: bytes, classes: Sequence[Sequence[int]], settings: Walk, stop: Stop) -> int:
        """Threshold accepting from ``start`` by moves over classes of like values; returns how many plans were evaluated."""
        starts = array("i", [0])
        for row in classes:
            starts.append(starts[-1] + len(row))
        items = array("i", chain.from_iterable(classes))
        given = {field[0]: getattr(settings, field[0]) for field in _Settings._fields_ if field[0] != "max_work"}
        num_visits = settings.num_visits or MAX_VISITS * settings.num_evaluations * max(1, self._graph.num_ops)
        native_settings = _Settings(**given, max_work=num_visits)
        start_at, items_at = starts.buffer_info()[0], items.buffer_info()[0]
        native = library()
        native.dyngran_walk.restype = ctypes.c_int64
        done: int = native.dyngran_walk(
            self._search,
            start,
            len(classes),
            ctypes.c_void_p(start_at),
            ctypes.c_void_p(items_at),
            ctypes.byref(native_settings),
            stop.pointer,
        )
        return done

    def take(self, *, options: bool = False) -> list[tuple[bytes, NativeOutcome]]:
        """The plans that walks have collected since the last call: the frontier of peak and time, or the options."""
        count = self._native.dyngran_num_entries(self._search, options)
        outcomes = (NativeOutcome * count)()
        crossings = ctypes.create_string_buffer(max(1, count * self._num_values))
        self._native.dyngran_entries(self._search, options, outcomes, crossings)
        self._native.dyngran_clear(self._search)
        raw, width = crossings.raw, self._num_values
        return [(raw[place * width : (place + 1) * width], outcomes[place]) for place in range(count)]


class PathOption(ctypes.Structure):
    """One way to run regions ``first .. end - 1``: see passes/native/choose.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("first", "end", "saves_output", "unused")),
        *((name, ctypes.c_int64) for name in ("input_bytes", "saved_bytes", "forward_peak_bytes", "backward_peak_bytes")),
        ("time_us", ctypes.c_double),
    )


def choose_path(
    options: ctypes.Array[PathOption], forward_extra: Sequence[int], backward_extra: Sequence[int], budget_bytes: int, *, num_bins: int
) -> list[int] | None:
    """Numbers of the options along the fastest path whose regions all stay within the budget (bytes); None if there is none.

    ``forward_extra`` and ``backward_extra``: per region, bytes live beside its own and what earlier ones saved.
    """
    native = library()
    native.dyngran_choose.restype = ctypes.c_double
    num_regions = len(forward_extra)
    extras = [(ctypes.c_int64 * num_regions)(*extra) for extra in (forward_extra, backward_extra)]
    chosen = (ctypes.c_int32 * (num_regions + 1))(*[-1] * (num_regions + 1))
    time_us = native.dyngran_choose(num_regions, len(options), options, *extras, ctypes.c_int64(budget_bytes), num_bins, chosen)
    if time_us < 0:
        return None
    numbers = list(chosen)
    return numbers[: numbers.index(-1)]
