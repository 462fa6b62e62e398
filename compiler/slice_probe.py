"""Whether a slice gives back the very bits of a value, tried on the device.

Libraries choose kernels, and with them the order of sums, by shape: nearly every number of a result shows it. A CPU's loops take numbers
together, and those that are left over one by one, which gives other bits for many functions: few numbers show it, and it is tried apart.
Both are the same each time for the same shapes and number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.codecs import Writer
from dyngran.compiler.row_slices import Exactness, Rows
from dyngran.compiler.slices import CallOnRows, Cone, Slice
from dyngran.compiler.storages import storage_bytes, tensors_of
from dyngran.passes.measure_cpu import FAILURES
from dyngran.passes.profile import on_clean_thread
from dyngran.passes.profile_cache import device_settings
from dyngran.passes.signature import TensorSpec

SEED = 0
NUM_TRIED = 200_003  # about so many numbers of a value are compared, in
MAX_DRAWS = 40  # draws at most
GRAIN, VECTOR = 32768, 128  # numbers: the least share of a thread, and a multiple of what loops over vectors take at once
MIN_ROW = 32  # numbers of a row that is summed by itself: the last rows may be summed otherwise, and fewer might agree by chance
NUM_ALONE = 200_003  # numbers on which vectors and single numbers are compared: 15 MB for a moment
NUM_DRAWN = 1_000_003  # numbers, a prime, so that rows differ
SOFTMAXES = frozenset({"aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax"})
BY_ROWS = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "native_layer_norm", "native_group_norm", "_fused_rms_norm",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
)  # fmt: skip
_known: dict[object, bool] = {}  # of this process


class SliceProbe:
    """Tries slices on one device. ``limit_bytes``: what a trial may allocate; a slice that needs more is not known to be exact."""

    def __init__(self, device: torch.device, *, limit_bytes: int | None) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._settings = (device_settings(device), torch.get_float32_matmul_precision())

    @property
    def evidence(self) -> str:
        return f"the same bits as forward's, tried on this {self._device.type}"

    def exact_ones(self, cones: Sequence[Cone]) -> list[Cone]:
        """Of slices of one value, those whose loaded bits are those that were stored. Like slices of like values are tried once."""
        keys = {cone: (self._settings, _described(cone)) for cone in cones if self._is_free_of_ends(cone)}
        new = [cone for cone, key in keys.items() if key not in _known and self._has_room(cone)]
        if new:
            found = self._run(partial(_give_same_bits, new, self._device))
            _known.update((keys[cone], is_exact) for cone, is_exact in zip(new, found, strict=True))
        return [cone for cone, key in keys.items() if _known.get(key)]

    def _is_free_of_ends(self, cone: Cone) -> bool:
        """Whether every number goes through the same instructions in part as it does in the whole.

        On a CPU the last numbers of a thread's share, where they fill no vector, go through others, and of many functions these give other
        bits. They are few: a trial may not meet one that differs. Sums of what lies apart have such ends too.
        """
        return self._device.type != "cpu" or all(map(self._is_alike, cone.calls))

    def _is_alike(self, call: CallOnRows) -> bool:
        if call.exactness is Exactness.COPY or (call.is_block and _fills_vectors(call.node, call.rows)):
            return True
        if call.exactness is Exactness.POINTWISE:
            return self._is_same_everywhere(call.node)
        return call.is_block and _row_length(call.node, call.rows) >= MIN_ROW and _sums_row_by_row(call.node)

    def _is_same_everywhere(self, node: fx.Node) -> bool:
        """Whether an operator's vectors give the bits of its single numbers, tried on many of any size."""
        dtypes = tuple(tensor.dtype for one in node.all_input_nodes for tensor in tensors_of(one.meta["val"]))
        key = (self._settings, _written(node, {}), dtypes)
        if key not in _known:
            (_known[key],) = self._run(partial(_is_same_one_by_one, node))
        return _known[key]

    def _has_room(self, cone: Cone) -> bool:
        return self._limit_bytes is None or _needed_bytes(cone, self._device) <= self._limit_bytes

    def _run(self, work: Callable[[], list[bool]]) -> list[bool]:
        """A card's operators run on this thread: libraries keep memory for every thread that calls them, and this one does so in a step."""
        if self._device.type != "cuda":
            return on_clean_thread(work)
        with torch_private.plain_dispatch():
            return work()


def _sums_row_by_row(node: fx.Node) -> bool:
    """Whether an operator goes through every row, or block of rows, from its first number to its last, wherever it lies."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # takes a result
    name = node.target._schema.name
    if name in SOFTMAXES:
        return node.args[1] in (-1, node.meta["val"].dim() - 1)
    return name in BY_ROWS


def _fills_vectors(node: fx.Node, rows: Rows) -> bool:
    """Whether nothing is left over of any vector where a CPU's threads share out the rows of ``node``, all of them or those of ``rows``.

    Source: at::parallel_for as TensorIterator calls it: equal shares of at least `GRAIN` numbers.
    """
    tensor, row = next(tensors_of(node.meta["val"])), _row_length(node, rows)
    return row % VECTOR == 0 and all(_share(count * row) % VECTOR == 0 for count in (tensor.shape[rows.dimension], rows.count))


def _row_length(node: fx.Node, rows: Rows) -> int:
    """Numbers in a row; of several results rows are those of the first."""
    return math.prod(next(tensors_of(node.meta["val"])).shape[rows.dimension + 1 :])


def _share(count: int) -> int:
    """How many of so many numbers each thread gets."""
    return -(-count // min(torch.get_num_threads(), -(-count // GRAIN)))


def _is_same_one_by_one(node: fx.Node) -> list[bool]:
    generator = torch.Generator().manual_seed(SEED)

    def sample(operand: fx.Node) -> torch.Tensor:
        dtype = operand.meta["val"].dtype
        numbers = _sample(TensorSpec((NUM_ALONE,), (1,), dtype, "cpu"), torch.device("cpu"), generator)
        if dtype.is_floating_point:
            numbers = (numbers.double() * torch.exp2(24 * torch.rand(NUM_ALONE, generator=generator).double() - 16)).to(dtype)
        return numbers

    def apart(packed: torch.Tensor) -> torch.Tensor:
        """The same numbers, between others: no vector can load them."""
        return torch.stack((packed, packed), dim=1)[:, 0]

    packed = {operand: sample(operand) for operand in node.all_input_nodes}
    try:
        with torch.no_grad():
            whole, single = (_called(node, {one: how(tensor) for one, tensor in packed.items()}) for how in (lambda one: one, apart))
        return [torch.equal(*(made.contiguous().view(torch.uint8) for made in (whole, single)))]
    except FAILURES:
        return [False]


def _called(node: fx.Node, operands: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), operands.__getitem__)
    made: torch.Tensor = node.target(*args, **kwargs)  # type: ignore[operator]  # a call's target can be called
    return made


def _needed_bytes(cone: Cone, device: torch.device) -> int:
    """Leaves, and every result, in whole or in part; beside the value what is stored and the missing rows, as large as it, and it again."""
    nodes = (*cone.leaves, *cone.nodes, cone.value, cone.value)
    return sum(storage_bytes(tensor, device) for node in nodes for tensor in tensors_of(node.meta.get("val")))


def _described(cone: Cone) -> object:
    """The operators of a cone with their arguments, shapes and strides in place of operands."""
    number = {node: f"<{place}>" for place, node in enumerate((*cone.leaves, *cone.nodes))}
    leaves = [tuple(TensorSpec.of(tensor) for tensor in tensors_of(leaf.meta["val"])) for leaf in cone.leaves]
    return (*leaves, *(_written(node, number) for node in cone.nodes), cone.rows)


def _written(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """A call with its arguments, and names in place of operands."""
    return str((node.target, fx.node.map_arg((node.args, node.kwargs), lambda one: names.get(one, "<>"))))


def _give_same_bits(cones: Sequence[Cone], device: torch.device) -> list[bool]:
    """Slices of one value. Of few numbers some might agree by chance: those are drawn more than once."""
    exact = list(cones)
    generator = torch.Generator(device=device).manual_seed(SEED)
    for _ in range(max(1, min(MAX_DRAWS, NUM_TRIED // cones[0].value.meta["val"].numel()))):
        exact = _same_once(exact, device, generator)
    return [cone in exact for cone in cones]


def _same_once(cones: Sequence[Cone], device: torch.device, generator: torch.Generator) -> list[Cone]:
    """Those that give the same bits for numbers drawn now; of cones of the same leaves and calls the whole value is made once."""
    found: list[Cone] = []
    whole: torch.Tensor | None = None
    made_of: Cone | None = None
    samples: list[torch.Tensor] = []
    for cone in cones:
        with suppress(*FAILURES), torch.no_grad():  # an operator that does not run on these numbers, or not on rows of them
            if whole is None or made_of is None or (made_of.leaves, made_of.nodes) != (cone.leaves, cone.nodes):
                samples = [_sample(TensorSpec.of(leaf.meta["val"]), device, generator) for leaf in cone.leaves]
                whole, made_of = _maker(cone)(*samples), cone
            if _same_bits(whole, _round_trip(cone)(whole, *samples)):
                found.append(cone)
    return found


def _maker(cone: Cone) -> Callable[..., torch.Tensor]:
    """A function of the leaves that makes the value."""
    graph, copies = _graph_of((*cone.leaves,))
    for node in cone.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[cone.value])
    return _function(graph)


def _round_trip(cone: Cone) -> Callable[..., torch.Tensor]:
    """A function of the value and the leaves that stores the value and loads it."""
    codec = Slice.of(cone)
    graph, copies = _graph_of((cone.value, *cone.leaves))
    writer = Writer(graph, cone.value.meta["val"], fused=False)
    stored = codec.store(writer, copies[cone.value])
    graph.output(codec.load(writer, stored, cone.value, copies))
    return _function(graph)


def _graph_of(inputs: Sequence[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A graph with inputs that stand for nodes of another."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["val"] = node.meta["val"]
    return graph, copies


def _function(graph: fx.Graph) -> Callable[..., torch.Tensor]:
    return fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run


def _sample(spec: TensorSpec, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Numbers at random with all the digits that their type has, of either sign; 0 and 1 where they are whole, which are indices of
    everything. Repeated in large tensors, where drawing takes longer than what is tried."""
    dtype = spec.dtype if spec.dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32
    drawn = torch.empty(min(max(1, spec.num_stored), NUM_DRAWN), dtype=dtype, device=device)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        drawn.normal_(generator=generator)
    else:
        drawn.random_(0, 2, generator=generator)
    memory = torch.empty(max(1, spec.num_stored), dtype=spec.dtype, device=device)
    for begin in range(0, len(memory), len(drawn)):
        memory[begin : begin + len(drawn)] = drawn[: len(memory) - begin]
    return memory.as_strided(spec.shape, spec.stride)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.stride() != other.stride() or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))
