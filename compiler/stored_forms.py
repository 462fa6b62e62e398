"""Which values of a joint graph may be stored in which formats, found by what makes and what reads them; and what storing costs.

Lossless formats are offered wherever they save bytes: boolean values as bits; integers in the narrowest type that holds the range that
their producer, or a reader in forward, implies; values of which backward asks only a comparison (a rectifier's), as bits; values of which
it asks only the shape (what a max-pooling read), as nothing. Lossy formats are offered where the user named them, under the rules of
`Finder.lossy`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from dyngran.compiler.capture import Captured, Pricer
from dyngran.compiler.codecs import Bits, Codec, Groups, Offload, Shape, Sign, Writer, integer_codec, is_storable, lossy_codec
from dyngran.compiler.loops import LoopKind, loop_kind
from dyngran.compiler.slices import Slice
from dyngran.compiler.storages import aliased_argument, num_elements, storage_bytes
from dyngran.compiler.value_ranges import value_range
from dyngran.kernels.host_copies import host_bytes
from dyngran.passes.copies import HostLink, plan_copies
from dyngran.passes.forms import Offer, Transfer
from dyngran.passes.plan import Action
from dyngran.passes.problem import Op, Side
from dyngran.passes.profile_cache import Measurement
from dyngran.passes.signature import TensorSpec
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.mincut import worth_keeping

aten = torch.ops.aten

MIN_SAVED_BYTES = 512  # the caching allocator's unit
MIN_COPIED_BYTES = 4 * 2**20  # a smaller copy saves little, and waits behind larger ones
SAME_TIME = 1.05  # times that differ by less are measurements of the same
LINEAR = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::convolution_backward"})
# Operators that choose by comparing: what they choose from a value that differs a little may be something else altogether.
CHOOSING = frozenset(
    f"aten::{name}"
    for name in (
        "topk", "sort", "argsort", "argmax", "argmin", "max", "min", "median", "nanmedian", "mode", "kthvalue", "cummax", "cummin",
        "multinomial", "nonzero", "bucketize", "searchsorted", "_unique2", "unique_consecutive", "bincount", "histc", "masked_select",
        "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d", "fractional_max_pool2d",
        "fractional_max_pool3d", "round", "floor", "ceil", "trunc", "sign", "lt", "le", "gt", "ge", "eq", "ne",
    )
)  # fmt: skip
# Their backward asks their results which elements were cut off, where that is no operator of its own.
RECTIFIERS = frozenset({"aten::relu", "aten::threshold", "aten::hardtanh", "aten::leaky_relu"})
RECTIFIERS_BACKWARD = frozenset({"aten::threshold_backward", "aten::hardtanh_backward", "aten::leaky_relu_backward"})
_SHAPE_ONLY = {  # operand of which only sizes and strides are read
    aten.max_pool2d_with_indices_backward.default: 1,
    aten.max_pool3d_with_indices_backward.default: 1,
    aten.adaptive_max_pool2d_backward.default: 1,
    aten.adaptive_max_pool3d_backward.default: 1,
    aten.avg_pool2d_backward.default: 1,
    aten.avg_pool3d_backward.default: 1,
    aten._adaptive_avg_pool2d_backward.default: 1,
    aten._adaptive_avg_pool3d_backward.default: 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredForm:
    """An offer with the codec that carries it out."""

    offer: Offer
    codec: Codec | Slice

    def moved(self, num_ops: int) -> StoredForm:
        """For a problem with so many more ops before the others."""
        offer = self.offer
        barred, again = (frozenset(op + num_ops for op in ops) for ops in (offer.barred, offer.again))
        stored_after, fetch = (None if op is None else op + num_ops for op in (offer.stored_after, offer.fetch))
        codec = self.codec.moved(num_ops) if isinstance(self.codec, Offload) else self.codec
        return replace(self, offer=replace(offer, barred=barred, again=again, stored_after=stored_after, fetch=fetch), codec=codec)


@dataclass(frozen=True, slots=True)
class _Found:
    value: int
    node: fx.Node
    codec: Codec
    barred: frozenset[int] = frozenset()


def find_forms(
    captured: Captured, formats: Sequence[str], price: Pricer, *, pack: bool = True, min_saved_bytes: int = MIN_SAVED_BYTES
) -> tuple[StoredForm, ...]:
    """Every form that is worth an offer, priced; ``formats`` are the lossy ones that the user named, lossless ones come with ``pack``.

    The first of a value's forms is the one that a plan with several takes, so the lossless ones come first.
    """
    finder = Finder(captured)
    found: list[_Found] = []
    for value in finder.candidates():
        found += finder.lossless(value) if pack else ()
        found += finder.lossy(value, formats)
    return _priced(captured, found, price, min_saved_bytes)


def find_copies(
    captured: Captured, link: HostLink, *, first: Sequence[int] = (), min_bytes: int = MIN_COPIED_BYTES, limit_bytes: int
) -> tuple[StoredForm, ...]:
    """Values that may wait for backward in host memory, as far as the link has time and ``limit_bytes`` of page-locked memory last: whole
    blocks of memory of ``min_bytes`` at least, those of ``first`` before others, which follow as they are worth keeping."""
    problem, simulator = captured.problem, Simulator(captured.problem)
    movable = {value for value in Finder(captured).candidates() if problem.values[value].size_bytes >= min_bytes}
    values = [value for value in dict.fromkeys((*first, *worth_keeping(simulator))) if value in movable]
    forms = []
    on_host = {value: host_bytes(problem.values[value].size_bytes) for value in values}
    for copy in plan_copies(simulator, values, link, host_bytes=on_host, limit_bytes=limit_bytes):
        transfer = Transfer(cost_us=problem.launch_us, cost_source=link.source)  # nothing slows down beside a copy that could be measured
        offer = Offer(
            value=copy.value,
            action=Action.OFFLOAD,
            format="host",
            size_bytes=0,
            store=transfer,
            load=transfer,
            stored_after=copy.done,
            fetch=copy.fetch,
            copy_us=copy.copy_us,
        )
        forms.append(StoredForm(offer=offer, codec=Offload(copy.start, copy.done, copy.fetch)))
    return tuple(forms)


class Finder:
    """What makes and what reads each value of a graph, and in which formats it may be stored for that."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._problem = captured.problem
        self._op = {op.name: op for op in captured.problem.ops}
        self._readers: dict[int, list[fx.Node]] = defaultdict(list)
        for node in captured.storages.ops:
            for value in captured.storages.reads[node]:
                self._readers[value].append(node)
        self.choosing_below = self._find_choosing_below() if self._problem.ops else []

    def candidates(self) -> Iterator[int]:
        """Values that backward may read, whose memory is dyngran's to say."""
        problem = self._problem
        needed = _needed_in_backward(problem.ops) - problem.forward_outputs - problem.gradients
        for value in problem.values:
            if value.index not in needed or value.producer is None:
                continue
            op, node = problem.ops[value.producer], self._captured.nodes[value.index]
            is_ours = op.side is not Side.BACKWARD and not op.never_saved and value.size_bytes > problem.keep_below_bytes
            if is_ours and node is not None and is_storable(node.meta.get("val")) and not self._is_written(value.index):
                yield value.index

    def _is_written(self, value: int) -> bool:
        """Whether an op writes into a value: then what it was when it was stored is not what backward reads."""
        return any(isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable for node in self._readers[value])

    def lossless(self, value: int) -> Iterator[_Found]:
        node = self._node(value)
        dtype = node.meta["val"].dtype
        if dtype is torch.bool:
            yield _Found(value, node, Bits())
        elif not dtype.is_floating_point and not dtype.is_complex:
            found = value_range(node, [reader for reader in self._readers[value] if self._op[reader.name].side is Side.FORWARD])
            codec = None if found is None else integer_codec(*found, dtype)
            if codec is not None:
                yield _Found(value, node, codec)
        elif dtype.is_floating_point and not self._problem.fused:
            yield from self._by_what_is_asked(value, node)

    def _by_what_is_asked(self, value: int, node: fx.Node) -> Iterator[_Found]:
        """Where operators run as they are: values of which backward asks a comparison with one number, or the shape alone."""
        late = [reader for reader in self._readers[value] if self._op[reader.name].side is Side.BACKWARD]
        asked = {self._question(reader, value) for reader in late}
        thresholds = {one for one in asked if isinstance(one, float)}
        dtype = node.meta["val"].dtype
        if None in asked or len(thresholds) > 1 or not late or any(torch.tensor(one, dtype=dtype).item() != one for one in thresholds):
            return  # a number that the type has not is rounded before it is compared, not everywhere alike
        codec = Sign(thresholds.pop()) if thresholds else Shape()
        yield _Found(value, node, codec, self._early_readers(value))

    def _question(self, reader: fx.Node, value: int) -> float | str | None:
        """What a reader asks of a value: whether it is above a number, its "shape", or None: everything."""
        positions = [place for place, arg in enumerate(reader.args) if isinstance(arg, fx.Node) and value in self._storages(arg)]
        if reader.kwargs or any(isinstance(arg, (list, tuple)) and any(isinstance(one, fx.Node) for one in arg) for arg in reader.args):
            return None
        if reader.target is aten.threshold_backward.default and positions == [1] and isinstance(reader.args[2], (int, float)):
            return float(reader.args[2])
        return "shape" if positions == [_SHAPE_ONLY.get(reader.target, -1)] else None  # type: ignore[call-overload]  # targets are of any type

    def _storages(self, node: fx.Node) -> tuple[int, ...]:
        return self._captured.storages.of.get(node, ())

    def lossy(self, value: int, formats: Sequence[str]) -> Iterator[_Found]:
        """Floating point values in the formats that were named.

        Nothing that chooses by comparing (a router's top-k, a rectifier's mask) runs again on numbers that differ from forward's: it might
        choose otherwise than forward did, and of a small MLP with rectifiers int8 made the gradient's error 17 times as large. Steps
        between codes that are as wide for small numbers do so at once, where backward asks the value itself. 4 bits are for linear readers
        alone, where rounding at random leaves the gradient right on average: in a GELU or a softmax it does not.
        """
        node = self._node(value)
        dtype = node.meta["val"].dtype
        if not dtype.is_floating_point or dtype.itemsize < 2:
            return
        for name in formats:
            codec = lossy_codec(name, dtype, value)
            if codec is None:
                continue
            if isinstance(codec, Groups) and (dtype is torch.float64 or self._is_asked_by_a_rectifier(value)):
                continue
            if name == "int4":
                if self._has_linear_readers_only(value):
                    yield _Found(value, node, codec, self._early_readers(value))
            else:
                yield _Found(value, node, codec, self.choosing_below[value])

    def _is_asked_by_a_rectifier(self, value: int) -> bool:
        return any(_schema_name(reader) in RECTIFIERS_BACKWARD for reader in self._readers[value])

    def _has_linear_readers_only(self, value: int) -> bool:
        late = [reader for reader in self._readers[value] if self._op[reader.name].side is Side.BACKWARD]
        return bool(late) and all(_schema_name(reader) in LINEAR for reader in late)

    def _early_readers(self, value: int) -> frozenset[int]:
        return frozenset(self._op[reader.name].index for reader in self._readers[value] if self._op[reader.name].side is not Side.BACKWARD)

    def _find_choosing_below(self) -> list[frozenset[int]]:
        """Per value the ops that choose by comparing, to which forward leads from it."""
        names = CHOOSING if self._problem.fused else CHOOSING | RECTIFIERS
        choosing = [self._op[node.name].index for node in self._captured.storages.ops if _schema_name(node) in names]
        bit = {index: 1 << place for place, index in enumerate(choosing)}
        below = [0] * len(self._problem.values)
        for op in reversed(self._problem.ops) if choosing else ():
            if op.side is not Side.BACKWARD:
                led_to = bit.get(op.index, 0)
                for write in op.writes:
                    led_to |= below[write]
                for read in op.reads:
                    below[read] |= led_to
        sets = {mask: frozenset(index for place, index in enumerate(choosing) if mask >> place & 1) for mask in set(below)}
        return [sets[mask] for mask in below]

    def _node(self, value: int) -> fx.Node:
        node = self._captured.nodes[value]
        assert node is not None
        return node


def _schema_name(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _needed_in_backward(ops: Sequence[Op]) -> set[int]:
    """Values that backward reads, or that something that it reads can be made of again."""
    needed: set[int] = set()
    for op in reversed(ops):
        if op.side is Side.BACKWARD or (not op.pinned and not needed.isdisjoint(op.writes)):
            needed.update(op.reads)
    return needed


@dataclass(frozen=True, slots=True)
class _Written:
    """A codec's nodes for values of one kind, in a graph where they are priced."""

    stored: fx.Node
    storing: list[fx.Node]
    loading: list[fx.Node]


def _priced(captured: Captured, found: Sequence[_Found], price: Pricer, min_saved_bytes: int) -> tuple[StoredForm, ...]:
    """Offers with what storing and loading cost: each codec is written once for values of one kind, and priced as the step's nodes are."""
    fused, graph = captured.problem.fused, fx.Graph()
    written: dict[object, _Written] = {}
    keys = [(type(one.codec), one.codec.format, TensorSpec.of(one.node.meta["val"])) for one in found]
    for key, one in zip(keys, found, strict=True):
        if key not in written:
            like = one.node.meta["val"]
            value = graph.placeholder(one.node.name)
            value.meta["val"] = like
            first, second = (Writer(graph, like, fused=fused) for _ in range(2))
            stored = one.codec.store(first, value)
            one.codec.load(second, stored, like)
            written[key] = _Written(stored, first.nodes, second.nodes)
    nodes = [node for each in written.values() for node in (*each.storing, *each.loading)]
    prices = dict(zip(nodes, price(nodes, captured.device), strict=True)) if nodes else {}
    sizes = {key: storage_bytes(each.stored.meta["val"], captured.device) for key, each in written.items()}
    costs = {key: [_transfer(part, prices, fused=fused) for part in (each.storing, each.loading)] for key, each in written.items()}
    forms = [
        StoredForm(
            offer=Offer(
                value=one.value,
                action=one.codec.action,
                format=one.codec.format,
                size_bytes=sizes[key],
                store=costs[key][0],
                load=costs[key][1],
                error=one.codec.error,
                barred=one.barred,
            ),
            codec=one.codec,
        )
        for key, one in zip(keys, found, strict=True)
        if captured.problem.values[one.value].size_bytes - sizes[key] >= min_saved_bytes
    ]
    return tuple(_worth_having(forms))


def _worth_having(forms: Sequence[StoredForm]) -> Iterator[StoredForm]:
    """Without those that an earlier, more exact form of their value replaces: it takes no more bytes and no more time."""
    kept: dict[int, list[Offer]] = defaultdict(list)
    for form in forms:
        offer = form.offer
        if not any(_replaces(other, offer) for other in kept[offer.value]):
            kept[offer.value].append(offer)
            yield form


def _replaces(one: Offer, other: Offer) -> bool:
    is_as_free = one.barred <= other.barred and one.store.fusible >= other.store.fusible and one.load.fusible >= other.load.fusible
    is_as_fast = one.store.fusible or one.store.cost_us + one.load.cost_us <= SAME_TIME * (other.store.cost_us + other.load.cost_us)
    return is_as_free and is_as_fast and one.size_bytes <= other.size_bytes


def _transfer(nodes: Sequence[fx.Node], prices: dict[fx.Node, Measurement], *, fused: bool) -> Transfer:
    """The costs of nodes that run one after the other; what they hand on is workspace where each is a kernel."""
    calls = [node for node in nodes if aliased_argument(node) is None]
    kinds = [loop_kind(node) for node in calls]
    is_loop = fused and LoopKind.NONE not in kinds
    inside = [_made_bytes(node) for node in calls[:-1]]
    workspace = max((prices[node].workspace_bytes for node in calls), default=0) + (0 if is_loop else sum(inside))
    return Transfer(
        cost_us=prices[calls[-1]].cost_us if is_loop else sum(prices[node].cost_us for node in calls),
        cost_source=prices[calls[-1]].source,
        workspace_bytes=workspace,
        fusible=is_loop,
        reduction=is_loop and LoopKind.REDUCTION in kinds,
        num_elements=max(num_elements(node) for node in calls),
        target=str(calls[-1].target),
    )


def _made_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return storage_bytes(value, value.device)
