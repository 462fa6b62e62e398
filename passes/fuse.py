"""How a fusing code generator folds a schedule of ops into kernels: which values get memory, and when their operands die.

Inductor inlines a pointwise result into its readers and gives it memory only if it leaves the graph, if a reader is an external
kernel (matmul, convolution, attention), or if another loop reads it and it takes many reads to repeat. A result that is read only
inside the loop nest that makes it never reaches memory. Loop nests are approximated by (number of external kernels on the way,
iteration space): ops that agree in both are fused horizontally and share reads that no other loop nest makes in between, unless they are
far apart: of values that backward makes again nothing external stands on the way, but Inductor does not fuse across the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dyngran.passes.problem import Problem

MAX_INLINE_READS = 4  # Inductor's realize_reads_threshold: a result of more reads with several readers is written once
MAX_ACCUMULATED_READS = 8  # Inductor's realize_acc_reads_threshold: a result of more reads is written however few read it
MAX_NODES_APART = 64  # Inductor's scheduler does not fuse buffers that are further apart in the order in which they were lowered


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch: the op it is named after, the values in memory it reads and writes, and what it costs."""

    op: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    cost_us: float
    workspace_bytes: int
    in_place: bool


def fuse(
    problem: Problem,
    schedule: Sequence[int],
    held: frozenset[int],
    *,
    available: frozenset[int],
    loaded: Mapping[int, int] = {},
) -> list[Kernel]:
    """Fold ``schedule`` into kernels. ``held`` values leave the graph; ``available`` ones are in memory from the start; of ``loaded`` ones
    it says which op makes them instead of their producer."""
    if not problem.fused:
        ops, made_by = problem.ops, {load: (value,) for value, load in loaded.items()}
        return [Kernel(i, ops[i].reads, made_by.get(i, ops[i].writes), ops[i].cost_us, ops[i].workspace_bytes, False) for i in schedule]
    return _Fuser(problem, schedule, held, available, loaded).run()


def node_counts(problem: Problem) -> list[int]:
    """Per op, the buffers that Inductor's scheduler orders: every result of an external kernel and of a reduction, and a pointwise
    result that leaves the graph or that an external kernel or another iteration space reads."""
    ops = problem.ops
    loads = {form.load: form.value for form in problem.forms}
    leaves = problem.forward_outputs | problem.gradients
    is_ordered = [value.index in leaves for value in problem.values]
    for op in ops:
        for read in op.reads:
            producer = problem.values[read].producer
            if producer is not None and (not op.fusible or ops[producer].num_elements != op.num_elements):
                is_ordered[read] = True
    writes = [(loads[op.index],) if op.index in loads else op.writes for op in ops]
    return [
        max(1, len(made)) if not op.fusible or op.reduction else int(any(is_ordered[write] for write in made))
        for op, made in zip(ops, writes, strict=True)
    ]


class _Fuser:
    def __init__(
        self,
        problem: Problem,
        schedule: Sequence[int],
        held: frozenset[int],
        available: frozenset[int],
        loaded: Mapping[int, int],
    ) -> None:
        self._problem = problem
        self._loaded_by = loaded
        self._loads = {load: value for value, load in loaded.items()}
        self._schedule = schedule
        self._held = held
        self._available = available
        self._readers: dict[int, list[int]] = {}
        self._depth: dict[int, int] = {}
        self._sources: dict[int, tuple[int, ...]] = {}
        self._loaded: dict[int, int] = {}
        self._launched: set[int] = set()
        self._loop_nest: dict[int, int] = {}

    def run(self) -> list[Kernel]:
        ops, counts = self._problem.ops, node_counts(self._problem)
        newest: dict[tuple[int, int], tuple[int, int]] = {}  # of each kind of loop nest: its number, and where it began
        num_nodes = 0
        for index in self._schedule:
            depth = max((self._depth.get(read, 0) for read in ops[index].reads), default=0)
            kind = (depth, ops[index].num_elements)
            if kind not in newest or num_nodes - newest[kind][1] > MAX_NODES_APART:
                newest[kind] = (index, num_nodes)
            self._loop_nest[index] = newest[kind][0]
            num_nodes += counts[index]
            for read in ops[index].reads:
                self._readers.setdefault(read, []).append(index)
            for write in self._writes(index):
                self._depth[write] = depth if ops[index].fusible else depth + 1
        kernels = []
        for index in self._schedule:
            op = ops[index]
            sources = self._operands(op.reads)
            written = tuple(w for w in self._writes(index) if not self._inlined(index, w, sources))
            for write in self._writes(index):
                self._sources[write] = (write,) if write in written else sources
            if written or not op.fusible:
                cost = self._loop_cost(index, sources, written) if op.fusible else op.cost_us
                kernels.append(Kernel(index, sources, written, cost, op.workspace_bytes, op.fusible and not op.reduction))
        return kernels

    def _writes(self, index: int) -> tuple[int, ...]:
        """What an op makes that is not there already, or made by another."""
        if index in self._loads:
            return (self._loads[index],)
        return tuple(w for w in self._problem.ops[index].writes if w not in self._available and w not in self._loaded_by)

    def _operands(self, reads: tuple[int, ...]) -> tuple[int, ...]:
        if len(reads) == 1:
            return self._sources.get(reads[0], reads)
        return tuple(dict.fromkeys(source for read in reads for source in self._sources.get(read, (read,))))

    def _inlined(self, index: int, value: int, sources: tuple[int, ...]) -> bool:
        ops = self._problem.ops
        if not ops[index].fusible or value in self._held:
            return False
        readers = self._readers.get(value, [])
        if any(not ops[reader].fusible for reader in readers):
            return False
        if all(self._loop_nest[reader] == self._loop_nest[index] for reader in readers):
            return True
        if ops[index].reduction:
            return False
        return len(sources) <= (MAX_INLINE_READS if len(readers) > 1 else MAX_ACCUMULATED_READS)

    def _loop_cost(self, index: int, sources: tuple[int, ...], written: tuple[int, ...]) -> float:
        problem = self._problem
        nest = self._loop_nest[index]
        num_bytes = sum(problem.values[value].size_bytes for value in written)
        for source in sources:
            if self._loaded.get(source) != nest:
                self._loaded[source] = nest
                num_bytes += problem.values[source].size_bytes
        for value in written:
            self._loaded[value] = nest
        launch_us = 0.0 if nest in self._launched else problem.launch_us
        self._launched.add(nest)
        return launch_us + num_bytes / problem.bytes_per_us
