"""Synthetic problems with whole-number sizes and costs, and hypothesis strategies for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

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
