"""Exact replay of one step, forward then backward, for a set of saved values: the judge of every planner.

Rules, shared with the rewriter (`passes/rewrite.py`) so that what is simulated is what runs:

* results of ops in the user's own checkpoint regions are never saved, pinned ones excepted;
* forward runs every FORWARD op, and the FREE ops that a saved value needs, in the joint graph's order;
* backward runs its ops in the joint graph's order; what an op reads and nobody saved is recomputed just before it, once, in the
  joint graph's order, and dies after its last reader in backward;
* a value dies after its last reader unless it crosses to backward or the caller holds it (forward outputs, gradients);
* a value of which a form is saved (`Problem.forms`) is loaded in backward instead of recomputed: ``Form.load`` stands for its producer.
  If nobody needs it before the op ``Form.fetch``, it is loaded just before that one. The first kernel that reads it takes longer by what
  ``Form.copy_us`` is more than the kernels in between take;
* an op that runs for a sibling of a saved result makes a second copy of that result, which dies at once; the saved one dies after its
  last reader all the same;
* an op that runs again holds its ``rerun_bytes`` beside its workspace;
* tangents are held by the autograd engine over the whole backward.

With ``problem.fused`` the schedule is first folded into kernels as Inductor does (`passes/fuse.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from dyngran.passes.forms import without_forms
from dyngran.passes.fuse import Kernel, fuse
from dyngran.passes.native.graph import NativeGraph, NativeOutcome, NativeSearch
from dyngran.passes.plan import Schedule
from dyngran.passes.problem import Form, Kind, Problem, Side
from dyngran.passes.regions import Crossings, find_crossings


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one saved set costs. ``peak_bytes`` includes static bytes; ``time_us`` is forward + backward.

    ``num_recomputed`` and ``recompute_us`` count ops that run in forward and again in backward, not those that only move to backward.
    ``schedule`` is None unless the order of ops was prescribed; it uses no forms, and numbers ops as in the problem without them.
    """

    saved: frozenset[int]
    peak_bytes: int
    time_us: float
    recompute_us: float
    saved_bytes: int
    num_recomputed: int
    schedule: Schedule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Bytes live while each kernel runs, static bytes excluded.

    ``names[p]`` is the op at position p, ``live_bytes[p]`` what is live while it runs (workspace included), ``num_forward`` the
    number of positions in forward. ``live_at_peak`` are ``(value, bytes)``, largest first; ``workspace_at_peak_bytes`` beside them.
    """

    names: tuple[str, ...]
    live_bytes: tuple[int, ...]
    by_kind: dict[Kind, tuple[int, ...]]
    num_forward: int
    peak_position: int
    live_at_peak: tuple[tuple[int, int], ...]
    workspace_at_peak_bytes: int
    time_us: float
    recompute_us: float


@dataclass(slots=True)
class Replay:
    """One schedule with the interval of every allocation: ``(value, first position, last position)``, last None if never freed."""

    forward: list[Kernel]
    backward: list[Kernel]
    intervals: list[tuple[int, int, int | None]]
    num_recomputed: int
    recompute_us: float


class Simulator:
    """Replays a problem for many saved sets. Building it is linear in the graph; `evaluate` is what planners call thousands of times.

    `evaluate` runs on the native side (`passes/native`), which replays only what differs from the plan before; `timeline` is the same in
    Python, readable, and `tests/test_simulate.py` holds both equal.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._sizes = [0 if value.kind.is_static else value.size_bytes for value in problem.values]
        self._reads = [op.reads for op in problem.ops]
        self._writes = [op.writes for op in problem.ops]
        self._producer = [-1 if value.producer is None else value.producer for value in problem.values]
        self._forward_ops = [op.index for op in problem.ops if op.side is Side.FORWARD]
        self._backward_ops = [op.index for op in problem.ops if op.side is Side.BACKWARD]
        from_tangents = {value.index for value in problem.values if value.kind is Kind.TANGENT}
        for op in problem.ops:
            if op.side is Side.BACKWARD:
                from_tangents.update(op.writes)
        self._ran = [op.side is Side.FORWARD for op in problem.ops]
        self._is_given = [value.producer is None for value in problem.values]
        self._pinned = [bool(op.pinned) for op in problem.ops]
        wanted = {read for index in self._backward_ops for read in self._reads[index]} | problem.gradients
        self._from_tangents = sorted(from_tangents)
        is_ready = [value.producer is None or value.index in from_tangents for value in problem.values]
        self._needs = [tuple(read for read in op.reads if not is_ready[read]) for op in problem.ops]
        self._wanted = sorted(value for value in wanted if value not in from_tangents and not self._is_given[value])
        self._late = sorted(value for value in problem.gradients if value not in from_tangents and not self._is_given[value])
        self._tangents = [value.index for value in problem.values if value.kind is Kind.TANGENT]
        self.candidates = self._find_candidates()
        self.native_graph = NativeGraph(problem)
        self.native = NativeSearch(self.native_graph)

    def _find_candidates(self) -> tuple[int, ...]:
        """Values that backward can read, and their stored forms: each is either saved (not if the user recomputes it) or not, and then
        loaded from a form that is, or recomputed (not if pinned)."""
        seen: set[int] = set()
        stored: dict[int, list[int]] = {}
        for form in self.problem.forms:
            stored.setdefault(form.value, []).append(form.stored)
        stack = list(self._wanted)
        while stack:
            value = stack.pop()
            if value in seen or self._is_given[value]:
                continue
            seen.add(value)
            seen.update(stored.get(value, ()))
            if not self._pinned[self._producer[value]]:
                stack.extend(self._reads[self._producer[value]])
        return tuple(sorted(seen))

    @cached_property
    def crossings(self) -> Crossings:
        """What crosses each boundary between forward ops."""
        return find_crossings(self.problem)

    @cached_property
    def bare(self) -> Simulator:
        """Of the problem without forms: for solvers that know none, and for schedules, which are in the numbers of its ops."""
        return Simulator(without_forms(self.problem)) if self.problem.forms else self

    @property
    def default_saved(self) -> frozenset[int]:
        """What the default partition saves: everything that backward reads directly."""
        return self.normalize(self._wanted)

    def normalize(self, saved: Iterable[int]) -> frozenset[int]:
        """The values that really cross: those of ``saved`` that backward reaches, and those reached that cannot be recomputed.

        What the user's own checkpoint regions make is never among them: it is recomputed, from what stands before the region.
        """
        return self.native.members(self.native.normalize(self.native.mask(saved)))

    def evaluate(self, saved: Iterable[int]) -> Outcome:
        """Peak and time of one saved set (normalized first)."""
        return self.outcome_of(*self.native.evaluate(self.native.mask(saved)))

    def outcome_of(self, crossing: bytes, found: NativeOutcome) -> Outcome:
        """An outcome from what the native side says of a mask of crossing values."""
        return Outcome(
            saved=self.native.members(crossing),
            peak_bytes=self.problem.total_static_bytes + found.peak_bytes,
            time_us=round(found.time_us, 6),  # so that sums in another order compare equal
            recompute_us=found.recompute_us,
            saved_bytes=found.saved_bytes,
            num_recomputed=found.num_recomputed,
        )

    def timeline(self, saved: Iterable[int]) -> Timeline:
        """The whole curve for one saved set; slower than `evaluate`, for people and for checks."""
        replay = self._replay(self.normalize(saved))
        live = self._live(replay)
        kernels = replay.forward + replay.backward
        peak = max(range(len(live)), key=live.__getitem__) if live else 0
        values = self.problem.values
        grids: dict[Kind, list[int]] = {}
        for value, first, last in replay.intervals:
            grid = grids.setdefault(values[value].kind, [0] * (len(kernels) + 1))
            grid[first] += self._sizes[value]
            if last is not None:
                grid[last + 1] -= self._sizes[value]
        at_peak = [(v, self._sizes[v]) for v, first, last in replay.intervals if first <= peak and (last is None or peak <= last)]
        return Timeline(
            names=tuple(self.problem.ops[kernel.op].name for kernel in kernels),
            live_bytes=tuple(live),
            by_kind={kind: tuple(accumulate(grid[:-1])) for kind, grid in grids.items()},
            num_forward=len(replay.forward),
            peak_position=peak,
            live_at_peak=tuple(sorted(((v, size) for v, size in at_peak if size), key=lambda item: (-item[1], item[0]))),
            workspace_at_peak_bytes=kernels[peak].workspace_bytes if kernels else 0,
            time_us=sum(kernel.cost_us for kernel in kernels),
            recompute_us=replay.recompute_us,
        )

    def replay(self, saved: Iterable[int]) -> Replay:
        """What `timeline` is drawn from: the kernels in order and the interval of every allocation."""
        return self._replay(self.normalize(saved))

    def schedule(self, saved: Iterable[int]) -> tuple[list[int], list[int]]:
        """Op indices in the order in which forward and backward run them, before any fusion."""
        forward, backward, _ = self._schedule(self.normalize(saved))
        return forward, backward

    def working_bytes(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Per kernel its op and the bytes live while it runs whatever a plan decides: in forward without what waits for backward, if as
        little as possible is saved; in backward without what forward saved and what is made again, if everything is saved."""
        outputs, candidates = self.problem.forward_outputs, set(self.candidates)
        bare = self._replay(self.normalize(()))
        last = {value: place for place, kernel in enumerate(bare.forward) for value in (*kernel.reads, *kernel.writes)}
        end = len(bare.forward)
        held = [(value, first, None if value in outputs else last[value]) for value, first, _ in bare.intervals if first < end]
        in_forward = self._live(replace(bare, backward=[], intervals=held))
        full = self._replay(self.default_saved)
        begin = len(full.forward)
        own = [one for one in full.intervals if one[0] in outputs or (one[1] >= begin and one[0] not in candidates)]
        in_backward = self._live(replace(full, intervals=own))[begin:]
        return (
            [(kernel.op, live) for kernel, live in zip(bare.forward, in_forward, strict=True)],
            [(kernel.op, live) for kernel, live in zip(full.backward, in_backward, strict=True)],
        )

    def _schedule(self, crossing: frozenset[int]) -> tuple[list[int], list[int], set[int]]:
        """Ops of forward, of backward, and those that run again."""
        reads, producer, writes = self._reads, self._producer, self._writes
        early: set[int] = set()
        ops = self.problem.ops
        stack = [producer[value] for value in crossing]
        while stack:
            index = stack.pop()
            if index in early or ops[index].side is Side.FORWARD:
                continue
            early.add(index)
            stack.extend(producer[read] for read in reads[index] if producer[read] >= 0)
        forward = sorted([*self._forward_ops, *early]) if early else self._forward_ops

        available = list(self._is_given)
        for value in crossing:
            available[value] = True
        ran = [op.side is Side.FORWARD or op.index in early for op in ops] if early else self._ran
        backward: list[int] = []
        recomputed: set[int] = set()
        loaded = self._loaded(crossing)
        loads = {load: (value,) for value, load in loaded.items()}
        fetches: dict[int, list[int]] = {}
        for form in self._forms(crossing):
            if form.fetch is not None:
                fetches.setdefault(form.fetch, []).append(form.value)

        def bring(wanted: Iterable[int]) -> None:
            missing: set[int] = set()
            stack = [value for value in wanted if not available[value]]
            while stack:
                value = stack.pop()
                index = loaded.get(value, producer[value])
                if index in missing:
                    continue
                missing.add(index)
                stack.extend(read for read in reads[index] if not available[read])
            for index in sorted(missing):
                backward.append(index)
                if ran[index]:
                    recomputed.add(index)
                for write in loads.get(index, writes[index]):
                    available[write] = available[write] or loaded.get(write, index) == index

        for value in self._from_tangents:
            available[value] = True
        needs = self._needs
        for index in self._backward_ops:
            for read in needs[index]:
                if not available[read]:
                    bring(needs[index])
                    break
            for value in fetches.get(index, ()):
                bring((value,))
            backward.append(index)
        bring(self._late)
        return forward, backward, recomputed

    def _loaded(self, crossing: frozenset[int]) -> dict[int, int]:
        """Values that backward loads from a form that crosses, each with the op that does it."""
        return {form.value: form.load for form in self._forms(crossing)}

    def _forms(self, crossing: frozenset[int]) -> list[Form]:
        """The forms that cross."""
        form_of = self.problem.form_of
        return [form_of[stored] for stored in sorted(crossing) if stored in form_of] if form_of else []

    def _replay(self, crossing: frozenset[int]) -> Replay:
        forward_ops, backward_ops, recomputed = self._schedule(crossing)
        problem = self.problem
        held = crossing | problem.forward_outputs
        forward = fuse(problem, forward_ops, held, available=frozenset())
        kernels = fuse(problem, backward_ops, problem.gradients, available=crossing, loaded=self._loaded(crossing))
        run = [self._again(kernel, recomputed) for kernel in kernels]
        backward = self._waiting(run, self._forms(crossing))
        return Replay(
            forward=forward,
            backward=backward,
            intervals=self._intervals(forward, backward, crossing),
            num_recomputed=len(recomputed),
            recompute_us=sum(kernel.cost_us for kernel in run if kernel.op in recomputed),
        )

    def _waiting(self, kernels: list[Kernel], forms: Iterable[Form]) -> list[Kernel]:
        """Kernels of backward, those that read what is still being copied with the time that they wait for it."""
        found = kernels.copy()
        place_of = {kernel.op: place for place, kernel in enumerate(kernels)}
        for form in forms:
            begin = place_of.get(form.load)
            if not form.copy_us or begin is None:
                continue
            left_us = form.copy_us
            for place in range(begin + 1, len(kernels)):
                if form.value in kernels[place].reads:
                    found[place] = replace(found[place], cost_us=found[place].cost_us + max(0.0, left_us))
                    break
                left_us -= kernels[place].cost_us
        return found

    def _again(self, kernel: Kernel, recomputed: set[int]) -> Kernel:
        rerun_bytes = self.problem.ops[kernel.op].rerun_bytes
        if not rerun_bytes or kernel.op not in recomputed:
            return kernel
        return replace(kernel, workspace_bytes=kernel.workspace_bytes + rerun_bytes)

    def _intervals(self, forward: list[Kernel], backward: list[Kernel], crossing: frozenset[int]) -> list[tuple[int, int, int | None]]:
        problem, num_forward = self.problem, len(forward)
        loaded = self._loaded(crossing)
        last_forward: dict[int, int] = {}
        for position, kernel in enumerate(forward):
            for value in kernel.writes:
                last_forward[value] = position
            for value in kernel.reads:
                last_forward[value] = position
        last_backward: dict[int, int] = {}
        for position, kernel in enumerate(backward, num_forward):
            for value in kernel.writes:
                if value not in crossing and loaded.get(value, kernel.op) == kernel.op:
                    last_backward[value] = position
            for value in kernel.reads:
                last_backward[value] = position

        intervals: list[tuple[int, int, int | None]] = [(value, num_forward, None) for value in self._tangents if backward]
        outputs, gradients = problem.forward_outputs, problem.gradients
        for position, kernel in enumerate(forward):
            for value in kernel.writes:
                if value in outputs or (value in crossing and value in gradients):
                    intervals.append((value, position, None))
                elif value in crossing:
                    intervals.append((value, position, last_backward.get(value, num_forward) if backward else None))
                else:
                    intervals.append((value, position, last_forward[value]))
        for position, kernel in enumerate(backward, num_forward):
            for value in kernel.writes:
                if value in crossing or loaded.get(value, kernel.op) != kernel.op:
                    # a sibling result of a recomputed op: the saved copy, or the loaded one, is the one that is read
                    intervals.append((value, position, position))
                else:
                    intervals.append((value, position, None if value in gradients else last_backward[value]))
        return intervals

    def _live(self, replay: Replay) -> list[int]:
        kernels = replay.forward + replay.backward
        change = [0] * (len(kernels) + 1)
        sizes = self._sizes
        dying: dict[int, list[int]] = {}
        for value, first, last in replay.intervals:
            change[first] += sizes[value]
            if last is not None:
                change[last + 1] -= sizes[value]
                if self.problem.fused and last > first:
                    dying.setdefault(last, []).append(value)
        live = list(accumulate(change[:-1]))
        for position, kernel in enumerate(kernels):
            if kernel.workspace_bytes:
                live[position] += kernel.workspace_bytes
            if kernel.in_place and position in dying:
                live[position] -= sum(sizes[value] for value in written_over(kernel, dying[position], sizes))
        return live


def written_over(kernel: Kernel, dying: Iterable[int], sizes: Sequence[int]) -> list[int]:
    """The operands that die in a fused kernel and over which it writes, instead of allocating: one of its size for each result."""
    free = [value for value in dying if value in kernel.reads]
    found = []
    for result in kernel.writes:
        operand = next((value for value in free if sizes[value] == sizes[result]), None)
        if operand is not None:
            free.remove(operand)
            found.append(operand)
    return found


def free_transient(simulator: Simulator) -> int:
    """Transient bytes of the plan that a person has without a budget: torch's own partition if it is known, else the default one."""
    stock = simulator.problem.stock
    saved = stock[min(stock)] if stock else simulator.default_saved
    return simulator.evaluate(saved).peak_bytes - simulator.problem.total_static_bytes
