"""Synthetic problems with whole-number sizes and costs, and hypothesis strategies for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import strategies as st

from dyngran.passes.forms import Offer, Transfer, with_forms
from dyngran.passes.plan import Action
from dyngran.passes.problem import Kind, Op, Problem, Side, Value


@dataclass
class Builder:
    """Adds values and ops one by one; `forward` and `backward` return the index of the value they make."""

    fused: bool = False
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    outputs: set[int] = field(default_factory=set)
    gradients: set[int] = field(default_factory=set)

    def given(self, size_bytes: int, kind: Kind = Kind.PARAMETER) -> int:
        index = len(self.values)
        self.values.append(Value(index=index, name=f"given_{index}", size_bytes=size_bytes, kind=kind))
        return index

    def op(
        self,
        reads: list[int],
        size_bytes: int,
        *,
        cost_us: float = 1.0,
        side: Side = Side.FORWARD,
        target: str = "mm",
        fusible: bool = False,
        reduction: bool = False,
        pinned: str = "",
        never_saved: bool = False,
        workspace_bytes: int = 0,
        region: str = "",
        kind: Kind = Kind.ACTIVATION,
    ) -> int:
        index, op_index = len(self.values), len(self.ops)
        self.values.append(
            Value(index=index, name=f"value_{index}", size_bytes=size_bytes, kind=kind, producer=op_index, label=f"{region}:{target}")
        )
        op = Op(
            index=op_index,
            name=f"{target}_{op_index}",
            target=target,
            side=side,
            reads=tuple(dict.fromkeys(reads)),
            writes=(index,),
            cost_us=cost_us,
            fusible=fusible,
            reduction=reduction,
            pinned=pinned,
            never_saved=never_saved,
            workspace_bytes=workspace_bytes,
            region=region,
            num_elements=size_bytes,
        )
        self.ops.append(op)
        return index

    def build(self, *, keep_below_bytes: int = 0, bytes_per_us: float = 1e4, stock: dict[str, frozenset[int]] | None = None) -> Problem:
        static: dict[Kind, int] = {}
        for value in self.values:
            if value.kind.is_static:
                static[value.kind] = static.get(value.kind, 0) + value.size_bytes
        return Problem(
            values=tuple(self.values),
            ops=tuple(self.ops),
            forward_outputs=frozenset(self.outputs),
            gradients=frozenset(self.gradients),
            static_bytes=static,
            fused=self.fused,
            bytes_per_us=bytes_per_us,
            stock=stock or {},
            keep_below_bytes=keep_below_bytes,
        )


def chain(length: int) -> Problem:
    """``length`` unit ops in a row, each of 1 byte and 1 us; the backward of each reads its input and the gradient of its output."""
    build = Builder()
    current = build.given(0, Kind.INPUT)
    inputs = []
    for _ in range(length):
        inputs.append(current)
        current = build.op([current], 1)
    build.outputs.add(build.op([current], 0, target="loss"))
    gradient = build.given(0, Kind.TANGENT)
    for value in reversed(inputs):
        gradient = build.op([value, gradient], 0, side=Side.BACKWARD, target="grad", kind=Kind.TEMPORARY)
    build.gradients.add(gradient)
    return build.build()


def transformer(num_layers: int, *, width_bytes: int = 1 << 20, fused: bool = False) -> Problem:
    """A pre-norm transformer: about 63 ops a layer, forward and backward, with norms, attention, a gated MLP and weight gradients."""
    build = Builder(fused=fused)
    unit = width_bytes
    stream = build.given(unit, Kind.INPUT)
    tape: list[tuple[str, list[int], int, int, int, str]] = []  # target, reads, parameter, made, size, region

    def step(target: str, reads: list[int], size: int, region: str, *, weight: bool = False) -> int:
        parameter = build.given(unit // 4) if weight else -1
        heavy = target in ("mm", "attention")
        made = build.op(
            [*reads, parameter] if weight else reads,
            size,
            cost_us=40.0 if heavy else 2.0,
            target=target,
            fusible=not heavy,
            reduction=target == "rstd",
            region=region,
        )
        tape.append((target, reads, parameter, made, size, region))
        return made

    for layer in range(num_layers):
        region = f"layers.{layer}"
        for block in ("attention", "mlp"):
            square = step("square", [stream], unit, region)
            rstd = step("rstd", [square], unit // 1024, region)
            normed = step("mul", [step("scale", [stream, rstd], unit, region)], unit, region)
            if block == "attention":
                heads = [step("rotary", [step("mm", [normed], unit, region, weight=True)], unit, region) for _ in range(3)]
                mixed = step("mm", [step("attention", heads, unit, region)], unit, region, weight=True)
            else:
                gate = step("mm", [normed], 4 * unit, region, weight=True)
                up = step("mm", [normed], 4 * unit, region, weight=True)
                gated = step("mul", [step("silu", [gate], 4 * unit, region), up], 4 * unit, region)
                mixed = step("mm", [gated], unit, region, weight=True)
            stream = step("add", [stream, mixed], unit, region)
    logits = step("mm", [stream], 16 * unit, "head", weight=True)
    build.outputs.add(build.op([logits], 16, target="loss", reduction=True, fusible=True, region="head"))
    tangent = build.given(16, Kind.TANGENT)
    gradient = {logits: build.op([logits, tangent], 16 * unit, side=Side.BACKWARD, target="loss_backward", fusible=True, region="head")}
    for target, reads, parameter, made, _, region in reversed(tape):
        arrived = gradient.pop(made)
        heavy = target in ("mm", "attention")
        if parameter >= 0:
            grad = build.op([arrived, *reads], unit // 4, cost_us=40.0, side=Side.BACKWARD, kind=Kind.GRADIENT, region=region)
            build.gradients.add(grad)
        needs = [] if target in ("add", "rotary") else [*reads, made] if target in ("attention", "rstd") else reads
        for read in reads:
            if build.values[read].producer is None:
                continue
            operands = [arrived, parameter] if parameter >= 0 else [arrived, *needs]
            part = build.op(
                operands,
                build.values[read].size_bytes,
                cost_us=40.0 if heavy else 2.0,
                side=Side.BACKWARD,
                target=f"{target}_backward",
                fusible=not heavy,
                region=region,
                kind=Kind.TEMPORARY,
            )
            if read in gradient:
                part = build.op(
                    [gradient[read], part], build.values[read].size_bytes, cost_us=2.0, side=Side.BACKWARD, target="add", fusible=True
                )
            gradient[read] = part
    return build.build(bytes_per_us=unit / 2)


@st.composite
def problems(draw: st.DrawFn, *, max_forward: int = 7, fused: bool | None = None) -> Problem:
    """Small problems of any shape: branches, skips, free ops, pinned ops, user checkpoints, outputs, inputs as gradients, zero sizes."""
    build = Builder(fused=draw(st.booleans()) if fused is None else fused)
    size = st.integers(0, 6)
    made = [build.given(draw(size), Kind.PARAMETER), build.given(draw(size), Kind.INPUT)]
    num_forward = draw(st.integers(1, max_forward))
    for _ in range(num_forward):
        reads = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
        fusible = draw(st.booleans())
        made.append(
            build.op(
                reads,
                draw(size),
                cost_us=float(draw(st.integers(0, 4))),
                fusible=fusible,
                reduction=fusible and draw(st.booleans()),
                pinned=draw(st.sampled_from(["", "", "", "random"])),
                never_saved=draw(st.sampled_from([False, False, False, True])),
                workspace_bytes=draw(st.sampled_from([0, 0, 2])),
            )
        )
    build.outputs.add(made[-1])
    free_side = draw(st.booleans())
    if free_side:
        reads = draw(st.lists(st.sampled_from(made), min_size=1, max_size=2, unique=True))
        made.append(build.op(reads, draw(size), cost_us=1.0, side=Side.FREE, fusible=draw(st.booleans())))
    gradient = build.given(draw(size), Kind.TANGENT)
    late = [gradient]
    for _ in range(draw(st.integers(1, max_forward))):
        reads = [draw(st.sampled_from(late)), *draw(st.lists(st.sampled_from(made), max_size=2, unique=True))]
        late.append(
            build.op(
                reads,
                draw(size),
                cost_us=float(draw(st.integers(0, 3))),
                side=Side.BACKWARD,
                fusible=draw(st.booleans()),
                kind=Kind.TEMPORARY,
            )
        )
    build.gradients.add(late[-1])
    if draw(st.booleans()):
        build.gradients.add(draw(st.sampled_from(late)))
    if draw(st.booleans()):
        build.gradients.add(draw(st.sampled_from(made)))
    return build.build(keep_below_bytes=draw(st.sampled_from([0, 0, 1])), bytes_per_us=2.0)


def storable(problem: Problem) -> list[int]:
    """Values of which a form may be offered."""
    late = {write for op in problem.ops if op.side is Side.BACKWARD for write in op.writes}
    held = problem.forward_outputs | problem.gradients
    return [value.index for value in problem.values if value.producer is not None and value.index not in late | held]


def _is_there_before(problem: Problem, value: Value, op: int) -> bool:
    return value.kind is not Kind.TANGENT and (value.producer is None or value.producer < op)


@st.composite
def problems_with_forms(draw: st.DrawFn, *, max_forward: int = 7, fused: bool | None = None) -> Problem:
    """As `problems`, with up to four forms of whatever size and cost, two of one value among them, some stored late or fetched early, some
    loaded of other values as well."""
    problem = draw(problems(max_forward=max_forward, fused=fused))
    values = storable(problem)
    if not values:
        return problem

    def transfer(is_loop: bool) -> Transfer:
        return Transfer(
            cost_us=float(draw(st.integers(0, 3))),
            workspace_bytes=draw(st.sampled_from([0, 0, 2])),
            fusible=is_loop,
            num_elements=draw(st.integers(0, 6)),
        )

    offers = []
    in_backward = [op.index for op in problem.ops if op.side is Side.BACKWARD]
    for value in draw(st.lists(st.sampled_from(values), max_size=4)):
        made_by = problem.values[value].producer or 0
        later = [op.index for op in problem.ops if op.side is not Side.BACKWARD and op.index > made_by]
        before = [one.index for one in problem.values if _is_there_before(problem, one, made_by)]
        is_loop = draw(st.booleans())
        offer = Offer(
            value=value,
            action=Action.PACK,
            format=f"form{len(offers)}",
            size_bytes=draw(st.integers(0, 4)),
            store=transfer(is_loop),
            load=transfer(is_loop),
            barred=frozenset(op.index for op in problem.ops if value in op.reads and op.side is not Side.BACKWARD and draw(st.booleans())),
            stored_after=draw(st.sampled_from([None, *later])),
            fetch=draw(st.sampled_from([None, *in_backward])),
            copy_us=draw(st.sampled_from([0.0, 2.0, 7.0])),
            parts=tuple(draw(st.lists(st.sampled_from(before), max_size=2, unique=True))) if before else (),
            again=frozenset(draw(st.lists(st.sampled_from(range(made_by + 1)), max_size=2))),
        )
        offers.append(offer)
    return with_forms(problem, offers)


@dataclass
class Tape:
    """A forward graph that is differentiated when it is done: one BACKWARD op per operand, one per weight, sums where a value has readers.

    ``needs`` of `op` says what of the op its backward reads: "inputs", "output", "both" or "" (a sum, a copy).
    """

    build: Builder = field(default_factory=Builder)
    rows: list[tuple[str, list[int], int, int, float, str, str]] = field(default_factory=list)
    weight_gradients: dict[int, int] = field(default_factory=dict)

    def op(
        self,
        target: str,
        reads: list[int],
        size_bytes: int,
        *,
        cost_us: float = 2.0,
        needs: str = "inputs",
        weight: int = -1,
        region: str = "",
        pinned: str = "",
        reduction: bool = False,
    ) -> int:
        heavy = weight >= 0 or target in ("attention", "pool")
        made = self.build.op(
            [*reads, weight] if weight >= 0 else reads,
            size_bytes,
            cost_us=cost_us,
            target=target,
            fusible=not heavy,
            reduction=reduction,
            region=region,
            pinned=pinned,
        )
        self.rows.append((target, reads, weight, made, cost_us, needs, region))
        return made

    def finish(self, last: list[int], **options: int) -> Problem:
        """A loss of ``last``, and backward."""
        build = self.build
        build.outputs.add(build.op(last, 0, target="loss", fusible=True, reduction=True, region="head"))
        tangent = build.given(0, Kind.TANGENT)
        arrived: dict[int, int] = {}
        for value in last:
            self._arrive(
                arrived, value, build.op([value, tangent], build.values[value].size_bytes, side=Side.BACKWARD, kind=Kind.TEMPORARY)
            )
        for target, reads, weight, made, cost_us, needs, region in reversed(self.rows):
            if made not in arrived:
                continue
            gradient = arrived.pop(made)
            tensors = [read for read in dict.fromkeys(reads) if build.values[read].producer is not None]
            operands = [gradient, *(reads if needs in ("inputs", "both") else ()), *([made] if needs in ("output", "both") else ())]
            if weight >= 0:
                self._weight_gradient(weight, build.op(operands, 1, cost_us=cost_us, side=Side.BACKWARD, kind=Kind.GRADIENT, region=region))
                operands = [gradient, weight]
            for read in tensors:
                size = build.values[read].size_bytes
                part = build.op(
                    operands, size, cost_us=cost_us, side=Side.BACKWARD, target=f"{target}_backward", kind=Kind.TEMPORARY, region=region
                )
                self._arrive(arrived, read, part)
        return build.build(**options)

    def _arrive(self, arrived: dict[int, int], value: int, part: int) -> None:
        if value in arrived:
            size = self.build.values[value].size_bytes
            part = self.build.op([arrived[value], part], size, side=Side.BACKWARD, target="add", fusible=True, kind=Kind.TEMPORARY)
        arrived[value] = part

    def _weight_gradient(self, weight: int, part: int) -> None:
        if weight in self.weight_gradients:
            self.build.gradients.remove(self.weight_gradients[weight])
            part = self.build.op([self.weight_gradients[weight], part], 1, side=Side.BACKWARD, target="add", kind=Kind.GRADIENT)
        self.weight_gradients[weight] = part
        self.build.gradients.add(part)


def _convolve(tape: Tape, current: int, size: int, region: str, *, cost_us: float = 20.0) -> int:
    """Convolution, batch norm with statistics that the caller gets back, rectifier."""
    made = tape.op("conv", [current], size, cost_us=cost_us, weight=tape.build.given(1), region=region)
    mean = tape.op("mean", [made], 1, reduction=True, region=region)
    normed = tape.op("normalize", [made, mean], size, needs="inputs", region=region)
    return tape.op("relu", [normed], size, needs="output", region=region)


def conv_net(num_blocks: int, *, unit: int = 64) -> Problem:
    """A residual network with batch norms, whose running statistics are forward outputs made at the end of forward."""
    tape = Tape()
    current = _convolve(tape, tape.build.given(unit, Kind.INPUT), unit, "stem")
    for block in range(num_blocks):
        inner = _convolve(tape, current, unit, f"blocks.{block}")
        current = tape.op("add", [current, _convolve(tape, inner, unit, f"blocks.{block}")], unit, needs="", region=f"blocks.{block}")
    for _, _, _, made, _, _, _ in [row for row in tape.rows if row[0] == "mean"]:
        tape.build.outputs.add(tape.build.op([made, tape.build.given(1, Kind.BUFFER)], 1, target="running_mean", fusible=True))
    return tape.finish([current])


def unet(depth: int, *, num_convs: int = 2, unit: int = 1 << 10) -> Problem:
    """Down and up ``depth`` levels, each of half the bytes, with a skip on every level."""
    tape = Tape()
    current = tape.build.given(unit, Kind.INPUT)
    skips = []
    for level in range(depth):
        for _ in range(num_convs):
            made = tape.op("conv", [current], unit >> level, cost_us=20.0, weight=tape.build.given(1), region=f"down.{level}")
            current = tape.op("relu", [made], unit >> level, needs="output", region=f"down.{level}")
        skips.append(current)
        current = tape.op("pool", [current], unit >> (level + 1), needs="both", region=f"down.{level}")
    current = tape.op("conv", [current], unit >> depth, cost_us=20.0, weight=tape.build.given(1), region="middle")
    for level in reversed(range(depth)):
        region = f"up.{level}"
        raised = tape.op("upsample", [current], unit >> level, needs="", region=region)
        current = tape.op("concatenate", [raised, skips[level]], 2 * (unit >> level), needs="", region=region)
        for _ in range(num_convs):
            made = tape.op("conv", [current], unit >> level, cost_us=20.0, weight=tape.build.given(1), region=region)
            current = tape.op("relu", [made], unit >> level, needs="output", region=region)
    return tape.finish([current])


def _block(tape: Tape, stream: int, memory: int, unit: int, region: str, weights: dict[str, int] | None = None) -> int:
    """Attention (to ``memory`` if it is not the stream itself) and an MLP, each with a norm before and a sum after."""
    known = {} if weights is None else weights

    def weight(name: str) -> int:
        if name not in known:
            known[name] = tape.build.given(1)
        return known[name]

    normed = tape.op("norm", [stream], unit, region=region, reduction=True)
    source = normed if memory == stream else memory
    query = tape.op("mm", [normed], unit, cost_us=20.0, weight=weight("query"), region=region)
    pair = tape.op("mm", [source], 2 * unit, cost_us=40.0, weight=weight("pair"), region=region)
    mixed = tape.op("attention", [query, pair], unit, cost_us=30.0, needs="both", region=region)
    mixed = tape.op("mm", [mixed], unit, cost_us=20.0, weight=weight("out"), region=region)
    stream = tape.op("add", [stream, mixed], unit, needs="", region=region)
    normed = tape.op("norm", [stream], unit, region=region, reduction=True)
    inner = tape.op("mm", [normed], 4 * unit, cost_us=80.0, weight=weight("up"), region=region)
    inner = tape.op("gelu", [inner], 4 * unit, region=region)
    mixed = tape.op("mm", [inner], unit, cost_us=80.0, weight=weight("down"), region=region)
    return tape.op("add", [stream, mixed], unit, needs="", region=region)


def encoder_decoder(num_layers: int, *, unit: int = 64) -> Problem:
    """As many encoder as decoder layers; every decoder layer attends to what the encoder ends with."""
    tape = Tape()
    memory = tape.build.given(unit, Kind.INPUT)
    for layer in range(num_layers):
        memory = _block(tape, memory, memory, unit, f"encoder.{layer}")
    stream = tape.build.given(unit, Kind.INPUT)
    for layer in range(num_layers):
        stream = _block(tape, stream, stream, unit, f"decoder.{layer}.self")
        stream = _block(tape, stream, memory, unit, f"decoder.{layer}.cross")
    return tape.finish([stream])


def two_towers(num_layers: int, *, unit: int = 64) -> Problem:
    """Two inputs through the same blocks (weights shared), compared at the end."""
    tape = Tape()
    weights: list[dict[str, int]] = [{} for _ in range(num_layers)]
    ends = []
    for tower in range(2):
        stream = tape.build.given(unit, Kind.INPUT)
        for layer in range(num_layers):
            stream = _block(tape, stream, stream, unit, f"towers.{tower}.{layer}", weights[layer])
        ends.append(stream)
    return tape.finish([tape.op("mm", ends, unit, cost_us=20.0, region="head")])


def densenet(num_blocks: int, num_layers: int, *, unit: int = 64) -> Problem:
    """In each block every layer reads all that the layers before it made; a transition halves what goes to the next block."""
    tape = Tape()
    current = tape.op("conv", [tape.build.given(unit, Kind.INPUT)], unit, cost_us=20.0, weight=tape.build.given(1), region="stem")
    for block in range(num_blocks):
        made = [current]
        for layer in range(num_layers):
            region = f"blocks.{block}.{layer}"
            joined = tape.op("concatenate", made, sum(tape.build.values[value].size_bytes for value in made), needs="", region=region)
            active = tape.op("relu", [joined], tape.build.values[joined].size_bytes, needs="output", region=region)
            made.append(tape.op("conv", [active], unit // 4, cost_us=20.0, weight=tape.build.given(1), region=region))
        joined = tape.op("concatenate", made, sum(tape.build.values[value].size_bytes for value in made), needs="")
        current = tape.op("conv", [joined], unit, cost_us=20.0, weight=tape.build.given(1), region=f"transitions.{block}")
    return tape.finish([current])


def layered(seed: int, num_layers: int, *, width: int = 3, largest: int = 9, fused: bool = False) -> Problem:
    """Irregular: layers of one to ``width`` ops of random sizes and costs that read any of the last three layers, some of them pinned."""
    draw = Random(seed)
    tape = Tape(Builder(fused=fused))
    layers = [[tape.build.given(draw.randint(1, largest), Kind.INPUT)]]
    for _ in range(num_layers):
        near = [value for layer in layers[-3:] for value in layer]
        layers.append(
            [
                tape.op(
                    draw.choice(("mm", "mul", "add")),
                    draw.sample(near, min(len(near), draw.randint(1, 2))),
                    draw.randint(0, largest),
                    cost_us=float(draw.randint(1, 9)),
                    needs=draw.choice(("inputs", "inputs", "output", "both", "")),
                    weight=tape.build.given(1) if draw.random() < 0.3 else -1,
                    pinned="random" if draw.random() < 0.05 else "",
                )
                for _ in range(draw.randint(1, width))
            ]
        )
    read = {value for _, reads, *_ in tape.rows for value in reads}
    return tape.finish([row[3] for row in tape.rows if row[3] not in read] or layers[-1], bytes_per_us=4)
