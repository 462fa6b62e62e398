"""Which values of a joint graph may be stored as slices, and what that costs.

Slices let a budget be met closely where whole values are coarse steps. So they are offered of values that are a large share of the
transient, in steps of a small one; a graph whose values are all small has none. Where every node is a kernel, gradients must not change by
a bit: a slice is offered if the device was seen to make the same bits (`SliceProbe`), and where there is no device to try it on, if it is
made of copies, or on a card of single numbers. Where kernels are generated, slices whose sums come in another order are offered as well, as
whatever else is made again there, but nothing that chooses by comparing runs again on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.capture import Captured
from dyngran.compiler.row_slices import Exactness, Rows, independent_dimensions
from dyngran.compiler.slice_probe import SliceProbe
from dyngran.compiler.slices import Cone, Slice, find_cone
from dyngran.compiler.storages import aliased_argument, storage_bytes, tensors_of
from dyngran.compiler.stored_forms import Finder, StoredForm
from dyngran.passes.forms import Offer, Transfer
from dyngran.passes.plan import Action
from dyngran.passes.problem import Op
from dyngran.passes.simulate import Simulator, free_transient

MIN_SLICED_BYTES = 4 * 2**20  # less is no step that a budget could miss
STEP_SHARE = 0.01  # of the free transient
MAX_STEPS = 8  # of one value
ROUNDING_BYTES = 512  # the caching allocator's unit
BY_ITSELF = "every number is made by itself"
REORDERED = "sums of what is made again may come in another order"


def find_slices(
    captured: Captured, probe: SliceProbe | None, *, min_bytes: int = MIN_SLICED_BYTES, step_bytes: int | None = None
) -> tuple[StoredForm, ...]:
    """Every slice that is worth an offer. ``probe``: tries them where every node is a kernel; None: there is no device to do so.
    ``step_bytes``: by how much two slices of a value differ at least, by default `STEP_SHARE` of the free transient."""
    if all(value.size_bytes < min_bytes for value in captured.problem.values):
        return ()
    finder = _SliceFinder(captured, probe, step_bytes)
    return tuple(finder.form(value, cone) for value in finder.worthwhile(min_bytes) for cone in finder.cones(value))


class _SliceFinder:
    def __init__(self, captured: Captured, probe: SliceProbe | None, step_bytes: int | None) -> None:
        self._captured = captured
        self._problem = captured.problem
        self._probe = probe
        self._forms = Finder(captured)
        self._op = {op.name: op for op in captured.problem.ops}
        simulator = Simulator(captured.problem)
        self._step_bytes = step_bytes or max(1, math.ceil(STEP_SHARE * free_transient(simulator)))
        self._there = simulator.default_saved

    def worthwhile(self, min_bytes: int) -> Iterator[int]:
        """Values of two steps at least, whose rows lie one after the other."""
        for value in self._forms.candidates():
            size_bytes = self._problem.values[value].size_bytes
            if size_bytes >= max(min_bytes, 2 * self._step_bytes) and self._node(value).meta["val"].is_contiguous():
                yield value

    def cones(self, value: int) -> Iterator[Cone]:
        """Of the first dimension along which slices are as exact as they must be, those of several sizes."""
        node = self._node(value)
        num_steps = min(MAX_STEPS, self._problem.values[value].size_bytes // self._step_bytes)
        for dimension in independent_dimensions(node):
            num_rows = node.meta["val"].shape[dimension]
            lengths = dict.fromkeys(num_rows * step // num_steps for step in range(1, num_steps))
            cones = [self._cone(value, Rows(dimension, length, num_rows)) for length in lengths if length]
            if exact := self._exact_ones([cone for cone in cones if cone is not None]):
                yield from exact
                return

    def _cone(self, value: int, rows: Rows) -> Cone | None:
        def is_leaf(node: fx.Node) -> bool:
            storages = self._captured.storages.of.get(node, ())
            return value not in storages and not self._there.isdisjoint(storages)

        def may_run(node: fx.Node) -> bool:
            op = self._op.get(node.name)
            return op is not None and not op.pinned and not op.never_saved

        cone = find_cone(self._node(value), rows, is_leaf=is_leaf, may_run=may_run)
        if cone is None or not all(_is_plain(leaf.meta.get("val")) for leaf in cone.leaves):
            return None
        return cone

    def _exact_ones(self, cones: Sequence[Cone]) -> Sequence[Cone]:
        """Those of one value that may be offered for their exactness, which depends on where they are cut."""
        if self._problem.fused or all(cone.exactness is Exactness.COPY for cone in cones):
            return cones
        if self._probe is not None:
            return self._probe.exact_ones(cones)
        is_certain = self._captured.device.type == "cuda"
        return [cone for cone in cones if is_certain and cone.exactness is Exactness.POINTWISE]

    def form(self, value: int, cone: Cone) -> StoredForm:
        codec, storages = Slice.of(cone), self._captured.storages.of
        again = [self._op[node.name] for node in cone.nodes if node.name in self._op]
        size_bytes = self._stored_bytes(cone)
        is_reordered = self._problem.fused and cone.exactness is Exactness.LIBRARY
        return StoredForm(
            offer=Offer(
                value=value,
                action=Action.SLICE,
                format=codec.format,
                size_bytes=size_bytes,
                store=self._copied(size_bytes),
                load=self._loaded(value, cone, again),
                barred=self._forms.choosing_below[value] if is_reordered else frozenset(),
                parts=tuple(sorted({storage for leaf in cone.leaves for storage in storages.get(leaf, ())})),
                again=frozenset(op.index for op in again),
                dimension=cone.rows.dimension,
                fraction=codec.fraction,
                evidence=self._evidence(cone),
            ),
            codec=codec,
        )

    def _stored_bytes(self, cone: Cone) -> int:
        like, rows = cone.value.meta["val"], cone.rows
        return storage_bytes(like.narrow(rows.dimension, 0, rows.begin).contiguous(), self._captured.device)

    def _copied(self, num_bytes: int) -> Transfer:
        return Transfer(cost_us=self._problem.launch_us + 2 * num_bytes / self._problem.bytes_per_us, target="slice")

    def _loaded(self, value: int, cone: Cone, again: Sequence[Op]) -> Transfer:
        """A share of what runs again, and a copy of the value: a kernel of its own even where loops fuse. The missing rows are there beside
        the value; before there is the value, everything that leads to them, and copies of leaves whose rows lie apart."""
        whole = self._problem.values[value]
        missing = 1 - Slice.of(cone).fraction
        copied = self._copied(whole.size_bytes)
        copied_bytes = 0 if all(call.is_block for call in cone.calls) else sum(_made_bytes(leaf, missing) for leaf in cone.leaves)
        return replace(
            copied,
            cost_us=copied.cost_us + missing * sum(op.cost_us for op in again),
            cost_source="a share of the whole",
            workspace_bytes=max(math.ceil(missing * whole.size_bytes), self._way_bytes(cone, missing) + copied_bytes - whole.size_bytes),
        )

    def _way_bytes(self, cone: Cone, share: float) -> int:
        """Most bytes at one time while a share of what leads to the value is made: results up to their last reader, and workspaces."""
        owner: dict[fx.Node, fx.Node] = {}  # whose memory a call's result lies in
        last: dict[fx.Node, int] = {}
        for place, node in enumerate(cone.nodes):
            alias = node.all_input_nodes[0] if torch_private.is_getitem(node) else aliased_argument(node)
            owner[node] = owner.get(alias, node) if alias is not None else node
            last[owner[node]] = place
            for operand in node.all_input_nodes:
                if operand in owner:
                    last[owner[operand]] = place
        live = most = 0
        for place, node in enumerate(cone.nodes):
            op = self._op.get(node.name)
            live += _made_bytes(node, share) if owner[node] is node and op is not None else 0
            most = max(most, live + (0 if op is None else op.workspace_bytes))
            live -= sum(_made_bytes(one, share) for one in owner if owner[one] is one and last[one] == place and one.name in self._op)
        return most

    def _evidence(self, cone: Cone) -> str:
        exactness = cone.exactness
        if exactness is Exactness.COPY:
            return ""
        if self._problem.fused or self._probe is None:
            return BY_ITSELF if exactness is Exactness.POINTWISE else REORDERED
        return self._probe.evidence

    def _node(self, value: int) -> fx.Node:
        node = self._captured.nodes[value]
        assert node is not None
        return node


def _is_plain(value: object) -> bool:
    """Whether a leaf's rows are what its fake tensor says: of known size, neither to be conjugated nor negated when they are read."""
    if not torch_private.is_plain_fake(value) or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return False
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _made_bytes(node: fx.Node, share: float) -> int:
    """Of a share of what a node makes, each result rounded up as the allocator might."""
    return sum(math.ceil(share * storage_bytes(tensor, tensor.device)) + ROUNDING_BYTES for tensor in tensors_of(node.meta.get("val")))
