"""Regions as problems of their own: the ops of a few neighbouring regions with what enters and leaves them.

A local problem is simulated like a whole one, in a time that depends on the region alone. Regions that are built alike (same operators,
sizes and wiring; names do not count, and costs do not either, since measurements of like ops differ a little) give one local problem.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dyngran.passes.native.graph import NativeGraph
from dyngran.passes.problem import Form, Kind, Op, Problem, Side, Value
from dyngran.passes.regions import ending_ops, far_values


@dataclass(frozen=True, slots=True)
class LocalProblem:
    """The problem of a group of neighbouring regions.

    Attributes:
        problem, graph: what is simulated. What enters from the region before is made by a pinned op, so that it counts as saved if backward
            needs it; what comes from elsewhere is given and costs no bytes.
        num_values: local values that stand for values of the whole problem, in the order of `RegionGraph.values_in_order`.
        entering: local values that the region before made, and their forms; leaving: local values that the next region reads.
        elsewhere: local values that regions further away made, or that many read.
    """

    problem: Problem
    graph: NativeGraph
    num_values: int
    entering: frozenset[int]
    leaving: frozenset[int]
    elsewhere: frozenset[int]


class RegionGraph:
    """The regions of a problem, by the number of each op's region."""

    def __init__(self, problem: Problem, numbers: Sequence[int]) -> None:
        self.problem = problem
        self.numbers = numbers
        self.num_regions = max(numbers, default=-1) + 1
        self.ops: list[list[int]] = [[] for _ in range(self.num_regions)]
        ending = ending_ops(problem)
        self.forms: dict[int, list[Form]] = defaultdict(list)
        for form in problem.forms:
            self.forms[form.value].append(form)
        self._loads = {form.load: form.value for form in problem.forms}
        transfers = self._loads.keys() | {form.store for form in problem.forms}
        for op in problem.ops:
            if op.index in transfers:
                continue
            if op.index not in ending or any(problem.values[read].producer is not None for read in op.reads):
                here = self.ops[numbers[op.index]]
                here.append(op.index)  # the rest counts how often batch norms ran, and the like
                for write in op.writes if self.forms else ():  # wherever copies arrive, so that regions are alike
                    here.extend(index for form in self.forms.get(write, ()) for index in (form.store, form.load))
        self.readers: dict[int, list[int]] = defaultdict(list)
        for op in problem.ops:
            for read in op.reads:
                self.readers[read].append(op.index)
        self._orders: dict[tuple[int, int], tuple[int, ...]] = {}
        self.far = far_values(problem, numbers)
        self.kinds = [self._signature(number) for number in range(self.num_regions)]

    def _signature(self, number: int) -> Hashable:
        """What a region is built of, the same for regions that are built alike."""
        problem = self.problem
        place: dict[int, int] = {}
        outside: dict[int, int] = {}
        for index in self.ops[number]:
            for write in problem.ops[index].writes:
                place[write] = len(place)
        rows: list[Hashable] = []
        for index in self.ops[number]:
            op = problem.ops[index]
            reads: list[Hashable] = []
            for read in op.reads:
                if read in place:
                    reads.append(place[read])
                    continue
                value = problem.values[read]
                forms = tuple((form.format, problem.values[form.stored].size_bytes) for form in self.forms.get(read, ()))
                distance = None if value.producer is None else number - self.numbers[value.producer]
                where = None if distance is None or abs(distance) > 1 or read in self.far else distance
                reads.append(("out", outside.setdefault(read, len(outside)), value.size_bytes, value.kind.is_static, where, forms))
            writes: tuple[Hashable, ...] = tuple((problem.values[write].size_bytes, *self._uses(write, number)) for write in op.writes)
            if index in self._loads:
                writes = (place[self._loads[index]],)
            rows.append((op.target, op.side, bool(op.pinned), op.never_saved, op.num_elements, op.workspace_bytes, tuple(reads), writes))
        return tuple(rows)

    def _uses(self, value: int, number: int) -> tuple[bool, bool, bool, bool]:
        ops = self.problem.ops
        outside = [reader for reader in self.readers.get(value, ()) if self.numbers[reader] != number]
        return (
            value in self.problem.forward_outputs,
            value in self.problem.gradients,
            any(ops[reader].side is not Side.BACKWARD for reader in outside),
            any(ops[reader].side is Side.BACKWARD for reader in outside),
        )

    def group_ops(self, first: int, end: int) -> list[int]:
        """Ops of regions ``first .. end - 1`` in the problem's order."""
        return sorted(index for number in range(first, end) for index in self.ops[number])

    def values_in_order(self, first: int, end: int) -> tuple[int, ...]:
        """What a group makes, then what it reads from outside, in an order that is the same for groups that are built alike."""
        known = self._orders.get((first, end))
        if known is None:
            ops = [self.problem.ops[index] for number in range(first, end) for index in self.ops[number]]
            found = dict.fromkeys(write for op in ops for write in op.writes)
            found.update(dict.fromkeys(read for op in ops for read in op.reads))
            if self.forms:
                found.update(dict.fromkeys(form.stored for value in tuple(found) for form in self.forms_in(value, found)))
            known = self._orders[first, end] = tuple(found)
        return known

    def forms_in(self, value: int, values: Container[int]) -> Iterator[Form]:
        """The forms of a value of a group that are loaded of nothing but ``values``, those of the group."""
        return (form for form in self.forms.get(value, ()) if all(part in values for part in self.problem.parts_of(form)))

    def local_problem(self, first: int, end: int) -> LocalProblem:
        return _LocalBuilder(self, first, end).build()


class _LocalBuilder:
    """Collects the values and ops of one local problem; helper ops stand for what the rest of the graph does."""

    def __init__(self, regions: RegionGraph, first: int, end: int) -> None:
        self._regions, self._whole = regions, regions.problem
        self._first = first
        self._group = regions.group_ops(first, end)
        self._order = regions.values_in_order(first, end)
        self._local = {value: place for place, value in enumerate(self._order)}
        self._made = {write for index in self._group for write in self._whole.ops[index].writes}
        self._inside = set(self._group)
        self._read_early = self._find_read_early()
        self._ops: list[Op] = []
        self._forms: list[Form] = []
        self._place: dict[int, int] = {}  # of the group's ops
        self._transfers = {index for forms in regions.forms.values() for form in forms for index in (form.store, form.load)}
        self._tangent = len(self._order)  # the last local value: what helpers of backward read

    def build(self) -> LocalProblem:
        whole = self._whole
        outside = [value for value in self._order if value not in self._made and whole.values[value].producer is not None]
        incoming = [value for value in outside if self._side_of(value) is Side.BACKWARD]
        entering = [value for value in outside if value not in incoming and self._is_entering(value)]
        leaving = [value for value in self._order if value in self._made and self._is_read_outside(value, Side.FORWARD, Side.FREE)]
        late = [value for value in self._order if value in self._made and self._is_read_outside(value, Side.BACKWARD)]
        if entering:
            self._help("enter", Side.FORWARD, (), entering, pinned="made by the region before")
            for value in entering:
                self._copy_forms(value)
        if incoming:
            self._help("receive", Side.BACKWARD, (self._tangent,), incoming)
        self._copy(Side.FORWARD)
        forward_leaving = [value for value in leaving if self._side_of(value) is Side.FORWARD]
        if forward_leaving:
            self._help("leave", Side.FORWARD, [self._local[value] for value in forward_leaving], [])
        self._copy(Side.FREE)
        for value in late:
            if self._side_of(value) is not Side.BACKWARD:
                self._help("read elsewhere", Side.BACKWARD, (self._local[value], self._tangent), [])
        self._copy(Side.BACKWARD)
        gradients = [value for value in self._made if value in whole.gradients]
        gradients += [value for value in late if self._side_of(value) is Side.BACKWARD]
        return self._finish(
            entering, forward_leaving, [value for value in outside if value not in incoming and value not in entering], gradients
        )

    def _side_of(self, value: int) -> Side:
        producer = self._whole.values[value].producer
        assert producer is not None
        return self._whole.ops[producer].side

    def _is_entering(self, value: int) -> bool:
        producer = self._whole.values[value].producer
        assert producer is not None
        return self._regions.numbers[producer] == self._first - 1 and value not in self._regions.far

    def _is_read_outside(self, value: int, *sides: Side) -> bool:
        readers = self._regions.readers.get(value, ())
        return any(reader not in self._inside and self._whole.ops[reader].side in sides for reader in readers)

    def _help(self, target: str, side: Side, reads: Sequence[int], writes: Sequence[int], *, pinned: str = "") -> None:
        index = len(self._ops)
        made = tuple(self._local[value] for value in writes)
        self._ops.append(
            Op(index=index, name=target, target=target, side=side, reads=tuple(reads), writes=made, cost_us=0.0, pinned=pinned)
        )

    def _copy(self, side: Side) -> None:
        for index in self._group:
            op = self._whole.ops[index]
            if index not in self._transfers and (Side.FORWARD if index in self._read_early else op.side) is side:
                self._append(op)
                for value in op.writes:
                    self._copy_forms(value)

    def _copy_forms(self, value: int) -> None:
        """The ops that store and load a value, right after what makes it."""
        for form in self._regions.forms_in(value, self._local):
            store, load = (self._append(self._whole.ops[index]) for index in (form.store, form.load))
            stored = self._local[form.stored]
            local = replace(form, value=self._local[value], stored=stored, store=store, load=load, fetch=None, copy_us=0.0)
            self._forms.append(local)

    def _append(self, op: Op) -> int:
        reads, writes = (tuple(self._local[value] for value in values) for values in (op.reads, op.writes))
        self._place[op.index] = len(self._ops)
        self._ops.append(_op_like(op, len(self._ops), reads, writes))
        return len(self._ops) - 1

    def _places_of(self, ops: Iterable[int]) -> frozenset[int]:
        return frozenset(self._place[op] for op in ops if op in self._place)

    def _find_read_early(self) -> set[int]:
        """FREE ops whose results forward ops read: random states, which only a second draw needs."""
        early = {read for index in self._group if self._whole.ops[index].side is Side.FORWARD for read in self._whole.ops[index].reads}
        return {
            index
            for index in self._group
            if self._whole.ops[index].side is Side.FREE and not early.isdisjoint(self._whole.ops[index].writes)
        }

    def _finish(self, entering: list[int], leaving: list[int], elsewhere: list[int], gradients: list[int]) -> LocalProblem:
        whole = self._whole
        producers = {write: op.index for op in self._ops for write in op.writes}
        values, live = [], []
        for place, index in enumerate(self._order):
            value, producer = whole.values[index], producers.get(place)
            is_given = producer is None
            kind = Kind.INPUT if is_given and value.kind is not Kind.TANGENT else value.kind
            values.append(Value(index=place, name=value.name, size_bytes=value.size_bytes, kind=kind, producer=producer, label=value.label))
            live.append(0 if is_given or value.kind.is_static else value.size_bytes)
        values.append(Value(index=self._tangent, name="tangent", size_bytes=0, kind=Kind.TANGENT))
        forms_of_entering = [form.stored for value in entering for form in self._regions.forms_in(value, self._local)]
        problem = Problem(
            values=tuple(values),
            ops=tuple(self._ops),
            forward_outputs=frozenset(self._local[value] for value in self._made if value in whole.forward_outputs),
            gradients=frozenset(self._local[value] for value in gradients),
            fused=whole.fused,
            bytes_per_us=whole.bytes_per_us,
            launch_us=whole.launch_us,
            keep_below_bytes=whole.keep_below_bytes,
            stock={name: frozenset(self._local[value] for value in saved if value in self._made) for name, saved in whole.stock.items()},
            forms=tuple(replace(form, barred=self._places_of(form.barred), again=self._places_of(form.again)) for form in self._forms),
        )
        return LocalProblem(
            problem=problem,
            graph=NativeGraph(problem, live_bytes=[*live, 0]),
            num_values=len(self._order),
            entering=frozenset(self._local[value] for value in entering) | frozenset(self._local[value] for value in forms_of_entering),
            leaving=frozenset(self._local[value] for value in leaving),
            elsewhere=frozenset(self._local[value] for value in elsewhere),
        )


def _op_like(op: Op, index: int, reads: tuple[int, ...], writes: tuple[int, ...]) -> Op:
    """An op with other operands, and what planning looks at (`dataclasses.replace` took a fifth of planning a DenseNet's kinds)."""
    return Op(
        index=index,
        name=op.name,
        target=op.target,
        side=op.side,
        reads=reads,
        writes=writes,
        cost_us=op.cost_us,
        workspace_bytes=op.workspace_bytes,
        rerun_bytes=op.rerun_bytes,
        pinned=op.pinned,
        never_saved=op.never_saved,
        fusible=op.fusible,
        reduction=op.reduction,
        num_elements=op.num_elements,
    )
