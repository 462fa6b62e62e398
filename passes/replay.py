"""The simulator's inner loop: peak and time of one schedule, without building kernels or intervals.

Same rules as `Simulator.timeline` with `passes/fuse.py`, which are the readable truth; `tests/test_simulate.py` holds both equal.
Written for speed: flat lists indexed by value, reads of caller-held values dropped where they cannot matter, one pass per side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from dyngran.passes.fuse import MAX_ACCUMULATED_READS, MAX_INLINE_READS
from dyngran.passes.problem import Kind, Problem, Side

_OUTSIDE, _ELSEWHERE, _READER = 1, 2, 4  # read by an external kernel, read by another loop nest, one unit per reader


def _merged(operands: tuple[int, ...], sources_of: list[tuple[int, ...]]) -> tuple[int, ...]:
    """What an op reads from memory once its operands are inlined, without repetition."""
    if len(operands) == 2:
        left, right = sources_of[operands[0]], sources_of[operands[1]]
        return left + right if len(left) == 1 == len(right) and left != right else tuple(dict.fromkeys(left + right))
    return tuple(dict.fromkeys([source for read in operands for source in sources_of[read]]))


def _is_inlined(flags: int, is_reduction: bool, num_sources: int) -> bool:
    """Whether a fusible result that stays in its side never reaches memory (as `_Fuser._inlined`)."""
    if flags & _OUTSIDE:
        return False
    if not flags & _ELSEWHERE:
        return True
    return not is_reduction and num_sources <= (MAX_INLINE_READS if flags >= 2 * _READER else MAX_ACCUMULATED_READS)


@dataclass(slots=True)
class _Folded:
    """Kernels of a schedule as running lists: bytes born at each, last position of each value, and who may write in place."""

    last: list[int]
    births: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    in_place: list[tuple[int, tuple[int, ...], int]] = field(default_factory=list)
    workspaces: list[tuple[int, int]] = field(default_factory=list)


class FastReplay:
    """Replays schedules of one problem; building it is linear in the graph."""

    def __init__(self, problem: Problem) -> None:
        values, ops = problem.values, problem.ops
        self._problem = problem
        self._live_size = [0 if value.kind.is_static else value.size_bytes for value in values]
        self._full_size = [value.size_bytes for value in values]
        self._reads = [op.reads for op in ops]
        self._writes = [op.writes for op in ops]
        self._counted_reads = [tuple(read for read in op.reads if self._live_size[read]) for op in ops]
        self._counted_writes = [tuple(write for write in op.writes if self._live_size[write]) for op in ops]
        self._birth = [sum(self._live_size[write] for write in op.writes) for op in ops]
        self._workspace = [op.workspace_bytes for op in ops]
        self._rerun_workspace = [op.workspace_bytes + op.rerun_bytes for op in ops]
        self._any_workspace = any(self._rerun_workspace)
        self._cost = [op.cost_us for op in ops]
        self._fusible = [op.fusible for op in ops]
        self._reduction = [op.reduction for op in ops]
        spaces = {count: place for place, count in enumerate(sorted({op.num_elements for op in ops}))}
        self._space = [spaces[op.num_elements] for op in ops]
        self._num_spaces = len(spaces) + 1
        self._alone: list[tuple[int, ...]] = [(value.index,) for value in values]
        self._tangents = frozenset(value.index for value in values if value.kind is Kind.TANGENT)
        self._tangent_bytes = sum(self._live_size[value] for value in self._tangents)
        self._forward_cost = sum(op.cost_us for op in ops if op.side is Side.FORWARD)
        self._forward_schedule: list[int] = []
        self._forward_groups: tuple[list[int], list[int]] = ([], [])
        self._base: tuple[list[int], list[int]] | None = None

    def eager(
        self, forward: list[int], backward: list[int], crossing: frozenset[int], recomputed: set[int], *, plain: bool
    ) -> tuple[int, float, float]:
        """Peak of live bytes, time (us) and recomputed time (us) if every op is a kernel; ``plain``: forward is the FORWARD ops only."""
        cost, size = self._cost, self._live_size
        curve, last = self._forward_base(forward) if self._base is None or not plain else self._base
        if plain:
            self._base = (curve, last)
        outputs, gradients = self._problem.forward_outputs, self._problem.gradients
        change = curve[:]
        for value in crossing:
            if value not in outputs:
                change[last[value] + 1] += size[value]
        num_forward = len(forward)
        live = list(accumulate(change[:num_forward]))
        if self._any_workspace:
            workspace = self._workspace
            live = [held + workspace[index] for held, index in zip(live, forward, strict=True)]
        peak = max(live, default=0)

        dies = [-1] * len(size)
        counted_reads, counted_writes, birth = self._counted_reads, self._counted_writes, self._birth
        for position, index in enumerate(backward):
            for read in counted_reads[index]:
                dies[read] = position
        change = [birth[index] for index in backward]
        change.append(0)
        for position, index in enumerate(backward):
            for write in counted_writes[index]:
                if write in crossing:  # a sibling result: the saved copy is the one that is read
                    change[position + 1] -= size[write]
                elif write not in gradients:
                    change[max(dies[write], position) + 1] -= size[write]
        start = 0 if not backward else self._tangent_bytes
        for value in outputs:
            start += size[value] if self._made_in_forward(value, forward, last) else 0
        for value in crossing:
            if value not in outputs:
                start += size[value]
                if value not in gradients and backward:
                    change[max(dies[value], 0) + 1] -= size[value]
        if backward:
            change[0] += start
            live = list(accumulate(change[:-1]))
            if self._any_workspace:
                first, rerun = self._workspace, self._rerun_workspace
                live = [held + (rerun if index in recomputed else first)[index] for held, index in zip(live, backward, strict=True)]
            peak = max(peak, max(live))
        again = sum(cost[index] for index in backward if index in recomputed)
        forward_cost = self._forward_cost if plain else sum([cost[index] for index in forward])
        return peak, forward_cost + sum([cost[index] for index in backward]), again

    def _made_in_forward(self, value: int, forward: Sequence[int], last: list[int]) -> bool:
        return last[value] >= 0 and self._problem.values[value].producer is not None

    def _forward_base(self, forward: list[int]) -> tuple[list[int], list[int]]:
        """Changes of live bytes per forward position if nothing crosses, and the last forward position of each value (-1: none)."""
        size = self._live_size
        last = [-1] * len(size)
        for position, index in enumerate(forward):
            for write in self._writes[index]:
                last[write] = position
            for read in self._counted_reads[index]:
                last[read] = position
        change = [0] * (len(forward) + 2)
        outputs = self._problem.forward_outputs
        for position, index in enumerate(forward):
            change[position] += self._birth[index]
            for write in self._counted_writes[index]:
                if write not in outputs:
                    change[last[write] + 1] -= size[write]
        return change, last

    def fused(
        self, forward: list[int], backward: list[int], crossing: frozenset[int], recomputed: set[int], *, plain: bool
    ) -> tuple[int, float, float]:
        """As `eager`, with each side folded into kernels first."""
        outputs, gradients = self._problem.forward_outputs, self._problem.gradients
        size = self._live_size
        if plain and forward is not self._forward_schedule:
            self._forward_schedule, self._forward_groups = forward, self._groups(forward)
        side = _Folded(last=[-1] * len(size))
        time_us, _ = self._fold(forward, crossing | outputs, frozenset(), frozenset(), side)
        num_forward = len(side.births)
        staying = crossing | outputs
        deaths = [(side.last[value], size[value]) for value in side.written if value not in staying]
        reused = self._written_over(side, staying)

        side.in_place.clear()
        side.written.clear()
        for value in crossing:
            side.last[value] = num_forward
        backward_us, again_us = self._fold(backward, gradients, crossing, recomputed, side)
        deaths += [(side.last[value], size[value]) for value in side.written if value not in gradients]
        if len(side.births) > num_forward:
            side.births[num_forward] += self._tangent_bytes
            deaths += [(side.last[value], size[value]) for value in crossing if value not in outputs and value not in gradients]
        reused += self._written_over(side, gradients | (crossing & outputs) | self._tangents)

        change = side.births
        change.append(0)
        for end, num_bytes in deaths:
            change[end + 1] -= num_bytes
        live = list(accumulate(change[:-1]))
        for position, num_bytes in side.workspaces:
            live[position] += num_bytes
        for position, num_bytes in reused:
            live[position] -= num_bytes
        return max(live, default=0), time_us + backward_us, again_us

    def _written_over(self, side: _Folded, staying: frozenset[int]) -> list[tuple[int, int]]:
        """``(position, bytes)`` that a loop nest writes over an operand that dies in it instead of allocating."""
        size, last = self._live_size, side.last
        taken: set[int] = set()
        found = []
        for position, sources, value in side.in_place:
            num_bytes = size[value]
            for source in sources:
                if last[source] == position and size[source] == num_bytes and source not in staying and source not in taken:
                    taken.add(source)
                    found.append((position, num_bytes))
                    break
        return found

    def _fold(
        self,
        schedule: list[int],
        held: frozenset[int],
        available: frozenset[int],
        recomputed: set[int] | frozenset[int],
        side: _Folded,
    ) -> tuple[float, float]:
        """Append one side's kernels to ``side``; returns time and recomputed time (us)."""
        problem = self._problem
        reads, writes, fusible, reduction = self._reads, self._writes, self._fusible, self._reduction
        size, full, op_cost = self._live_size, self._full_size, self._cost
        first, rerun = self._workspace, self._rerun_workspace
        last, births, written, in_place = side.last, side.births, side.written, side.in_place
        if schedule is not self._forward_schedule:
            state, keys = self._groups(schedule)
        else:
            state, keys = self._forward_groups
        sources_of = self._alone[:]
        launch_us, time_us, again_us = problem.launch_us, 0.0, 0.0
        us_per_byte = 1.0 / problem.bytes_per_us
        loaded = [-1] * len(size)
        launched: set[int] = set()
        position = len(births)
        for index in schedule:
            operands = reads[index]
            if not fusible[index]:  # all its operands are in memory, for it reads them
                born = 0
                for write in writes[index]:
                    if write not in available:
                        born += size[write]
                        written.append(write)
                        last[write] = position
                for source in operands:
                    last[source] = position
                workspace = (rerun if index in recomputed else first)[index]
                if workspace:
                    side.workspaces.append((position, workspace))
                births.append(born)
                time_us += op_cost[index]
                if index in recomputed:
                    again_us += op_cost[index]
                position += 1
                continue
            sources = sources_of[operands[0]] if len(operands) == 1 else _merged(operands, sources_of)
            born = num_bytes = 0
            is_kernel = False
            for write in writes[index]:
                if write in available:
                    continue
                if write not in held and _is_inlined(state[write], reduction[index], len(sources)):
                    sources_of[write] = sources
                    continue
                is_kernel = True
                born += size[write]
                num_bytes += full[write]
                written.append(write)
                last[write] = position
                if size[write] and not reduction[index]:
                    in_place.append((position, sources, write))
            if not is_kernel:
                continue
            key = keys[index]
            for source in sources:
                last[source] = position
                if loaded[source] != key:
                    loaded[source] = key
                    num_bytes += full[source]
            for write in writes[index]:
                if last[write] == position:
                    loaded[write] = key
            workspace = (rerun if index in recomputed else first)[index]
            if workspace:
                side.workspaces.append((position, workspace))
            cost = num_bytes * us_per_byte
            if key not in launched:
                launched.add(key)
                cost += launch_us
            births.append(born)
            time_us += cost
            if index in recomputed:
                again_us += cost
            position += 1
        return time_us, again_us

    def _groups(self, schedule: list[int]) -> tuple[list[int], list[int]]:
        """Per value who reads it (flags and a count), per op its loop nest: (external kernels on the way, iteration space)."""
        reads, writes, fusible, space, num_spaces = self._reads, self._writes, self._fusible, self._space, self._num_spaces
        num_values = len(self._full_size)
        state, made_in, base = [0] * num_values, [-1] * num_values, [0] * num_values
        keys = [0] * len(reads)
        for index in schedule:
            operands = reads[index]
            if len(operands) == 1:
                depth = base[operands[0]]
            else:
                depth = 0
                for read in operands:
                    if base[read] > depth:
                        depth = base[read]
            key = keys[index] = depth + space[index]
            if fusible[index]:
                for read in operands:
                    state[read] += _READER
                    if made_in[read] != key:
                        state[read] |= _ELSEWHERE
                for write in writes[index]:
                    made_in[write] = key
                    base[write] = depth
            else:
                for read in operands:
                    state[read] |= _OUTSIDE
                for write in writes[index]:
                    made_in[write] = key
                    base[write] = depth + num_spaces
        return state, keys
