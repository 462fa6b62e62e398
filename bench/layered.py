"""A training step of a Llama of any depth as a planning problem, without torch: for how planning time grows with the graph.

The ops are those of the joint graph that a 24-layer Llama exports under bf16 autocast over fp32 parameters (8 x 1024 tokens, hidden 1024,
MLP 2816, vocabulary 32000), in its order: casts of parameters, RMS norms, rotary embedding, a mask that all layers share, attention with
its log-sum-exp, a gated MLP whose silu is spelt out, and the backward of all of it with what backward computes from forward alone.
Matmuls and attention are priced by an H200's rates, the rest by the bytes they move. What torch's own partition saves is written down as it
was found for that model: results of matmuls and attention, casts of parameters, residual sums and what reductions make.
"""

from __future__ import annotations

from dataclasses import dataclass

from dyngran.passes.problem import Kind, Op, Problem, Side, Value

BATCH, SEQUENCE, WIDTH, INNER, VOCABULARY = 8, 1024, 1024, 2816, 32000
TOKENS = BATCH * SEQUENCE
BYTES_PER_US, LAUNCH_US, FLOPS_PER_US, ATTENTION_FLOPS_PER_US = 3.84e6, 2.0, 6.5e8, 2.3e8
FP32, BF16, INT64, BOOL = 4, 2, 8, 1  # bytes of an element
MAX_SMALL_BYTES = 2**16  # always kept where it breaks a chain, as the backend does
Shape = tuple[int, int]
STOCK = ("embedding", "residual", "rsqrt", "amax", "log")  # fused ops whose results torch saves
FORWARD, FREE, BACKWARD = Side.FORWARD, Side.FREE, Side.BACKWARD


def layered_problem(num_layers: int, *, fused: bool = True) -> Problem:
    """The problem of one step: 147 ops a layer and 54 around them."""
    if num_layers < 1:
        raise ValueError(f"a model has at least one layer, got {num_layers}")
    step = _Step()
    step.forward(num_layers)
    step.backward()
    static: dict[Kind, int] = {}
    for value in step.values:
        if value.kind.is_static:
            static[value.kind] = static.get(value.kind, 0) + value.size_bytes
    static[Kind.OPTIMIZER] = 2 * static[Kind.PARAMETER]  # AdamW's two moments
    return Problem(
        values=tuple(step.values),
        ops=tuple(step.ops),
        forward_outputs=frozenset({step.loss}),
        gradients=frozenset(step.gradients),
        static_bytes=static,
        fused=fused,
        bytes_per_us=BYTES_PER_US,
        launch_us=LAUNCH_US,
        stock={"min-cut": step.stock()},
        keep_below_bytes=MAX_SMALL_BYTES,
    )


def layers_for(num_ops: int) -> int:
    """The depth at which a problem has about ``num_ops`` ops."""
    one, two = (len(layered_problem(depth).ops) for depth in (1, 2))
    return max(1, round((num_ops - one) / (two - one)) + 1)


@dataclass(frozen=True, slots=True)
class _Norm:
    entering: int
    scale: int
    rsqrt: int
    normed: int
    out: int


@dataclass(frozen=True, slots=True)
class _Linear:
    entering: int
    weight: int
    num_weights: int
    out: int


@dataclass(frozen=True, slots=True)
class _Attention:
    norm: _Norm
    projections: tuple[_Linear, ...]  # query, key, value
    operands: tuple[int, ...]
    results: tuple[int, ...]
    out: _Linear


@dataclass(frozen=True, slots=True)
class _Mlp:
    norm: _Norm
    gate: _Linear
    up: _Linear
    wide: int
    plus_one: int
    silu: int
    down: _Linear


class _Step:
    """Adds ops in the joint graph's order; a shape is (elements, bytes of one)."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.counts: list[int] = []  # elements of each value
        self.ops: list[Op] = []
        self.gradients: list[int] = []
        self.layers: list[tuple[_Attention, _Mlp]] = []
        self.region = "embedding"

    def forward(self, num_layers: int) -> None:
        self.tokens, self.labels = (self.given((TOKENS, INT64), Kind.INPUT) for _ in range(2))
        stream = self.op("embedding", [self.given((VOCABULARY * WIDTH, FP32)), self.tokens], (TOKENS * WIDTH, FP32))
        place = self.op("iota", [], (SEQUENCE, INT64), constant=True)
        self.mask = self.op("where", [self.op("le", [place], (SEQUENCE * SEQUENCE, BOOL))], (BATCH * SEQUENCE * SEQUENCE, BF16))
        angles = self.op("mm", [place], (SEQUENCE * 32, FP32), cost_us=10.0)
        self.turns = tuple(self.op(name, [angles], (SEQUENCE * 64, FP32)) for name in ("cos", "sin"))
        for layer in range(num_layers):
            self.region = f"layers.{layer}"
            attention, stream = self.attention(stream)
            mlp, stream = self.mlp(stream)
            self.layers.append((attention, mlp))
        self.region = "head"
        self.norm = self.rms_norm(stream)
        self.head = self.linear(self.norm.out, WIDTH, VOCABULARY)
        size = (TOKENS * VOCABULARY, FP32)
        logits = self.op("convert", [self.head.out], size)
        shifted = self.op("sub", [logits, self.op("amax", [logits], (TOKENS, FP32), reduces=True)], size)
        total = self.op("sum", [self.op("exp", [shifted], size)], (TOKENS, FP32), reduces=True)
        self.log_probabilities = self.op("sub", [shifted, self.op("log", [total], (TOKENS, FP32))], size)
        picked = self.op("gather", [self.log_probabilities, self.labels], (TOKENS, FP32))
        self.loss = self.op("mean", [picked], (1, FP32), reduces=True, kind=Kind.OUTPUT)

    def backward(self) -> None:
        size = TOKENS * VOCABULARY
        tangent = self.given((1, FP32), Kind.TANGENT)
        one_hot = self.op("eq", [self.labels, self.op("iota", [], (VOCABULARY, INT64), side=FREE, constant=True)], (size, BOOL), side=FREE)
        one_hot = self.op("where", [one_hot], (size, FP32), side=FREE)
        picked = self.late("mul", [one_hot, tangent], (size, FP32))
        softmax = self.op("exp", [self.log_probabilities], (size, FP32), side=FREE)
        spread = self.late("mul", [softmax, self.late("sum", [picked], (TOKENS, FP32), reduces=True)], (size, FP32))
        logits = self.late("convert", [self.late("sub", [picked, spread], (size, FP32))], (size, BF16))
        stream = self.rms_norm_back(self.norm, self.linear_back(self.head, logits), None)
        for place, (attention, mlp) in reversed(tuple(enumerate(self.layers))):
            self.region = f"layers.{place}"
            stream = self.attention_back(attention, self.mlp_back(mlp, stream))
        self.region = "embedding"
        zeros = self.op("full", [], (VOCABULARY * WIDTH, FP32), side=FREE, constant=True)
        cost_us = 3 * VOCABULARY * WIDTH * FP32 / BYTES_PER_US
        self.gradient("index_put", [zeros, self.tokens, stream], (VOCABULARY * WIDTH, FP32), cost_us=cost_us)

    def stock(self) -> frozenset[int]:
        kept: set[int] = set()
        for op in self.ops:
            is_cast = op.target == "convert" and self.values[op.reads[0]].kind is Kind.PARAMETER
            if op.side is FORWARD and (is_cast or not op.fusible or op.target in STOCK):
                kept.update(op.writes)
        return frozenset(kept)

    def attention(self, stream: int) -> tuple[_Attention, int]:
        norm = self.rms_norm(stream)
        query, key, value = (self.linear(norm.out, WIDTH, WIDTH) for _ in range(3))
        operands = (self.rotary(query.out), self.rotary(key.out), value.out)
        cost_us = 4 * TOKENS * SEQUENCE * WIDTH / ATTENTION_FLOPS_PER_US
        results = self.many(
            "attention", [*operands, self.mask], [(TOKENS * WIDTH, BF16), (TOKENS * 16, FP32), (1, INT64), (1, INT64)], cost_us
        )
        out = self.linear(results[0], WIDTH, WIDTH)
        found = _Attention(norm, (query, key, value), operands, results, out)
        return found, self.op("residual", [stream, out.out], (TOKENS * WIDTH, FP32))

    def attention_back(self, done: _Attention, stream: int) -> int:
        arrived = self.late("convert", [stream], (TOKENS * WIDTH, BF16))
        mixed = self.linear_back(done.out, arrived, widen=False)
        reads = [mixed, *done.operands, *done.results, self.mask]
        cost_us = 10 * TOKENS * SEQUENCE * WIDTH / ATTENTION_FLOPS_PER_US
        query, key, value = self.many("attention_backward", reads, [(TOKENS * WIDTH, BF16)] * 3, cost_us, side=BACKWARD)
        parts = [self.linear_back(done.projections[2], value)]
        for projection, part in ((done.projections[1], key), (done.projections[0], query)):
            parts.append(self.linear_back(projection, self.rotary_back(part)))
            parts[:] = [self.late("add", parts, (TOKENS * WIDTH, FP32))]
        return self.rms_norm_back(done.norm, parts[0], stream)

    def mlp(self, stream: int) -> tuple[_Mlp, int]:
        norm = self.rms_norm(stream)
        size = TOKENS * INNER
        gate = self.linear(norm.out, WIDTH, INNER)
        wide = self.op("convert", [gate.out], (size, FP32))
        plus_one = self.op("add", [self.op("exp", [self.op("neg", [wide], (size, FP32))], (size, FP32))], (size, FP32))
        silu = self.op("convert", [self.op("div", [wide, plus_one], (size, FP32))], (size, BF16))
        up = self.linear(norm.out, WIDTH, INNER)
        down = self.linear(self.op("mul", [silu, up.out], (size, BF16)), INNER, WIDTH)
        return _Mlp(norm, gate, up, wide, plus_one, silu, down), self.op("residual", [stream, down.out], (TOKENS * WIDTH, FP32))

    def mlp_back(self, done: _Mlp, stream: int) -> int:
        size = TOKENS * INNER
        inner = self.linear_back(done.down, self.late("convert", [stream], (TOKENS * WIDTH, BF16)), widen=False)
        to_up, to_silu = (self.late("mul", [inner, other], (size, BF16)) for other in (done.silu, done.up.out))
        first = self.linear_back(done.up, to_up)
        wide = self.late("convert", [to_silu], (size, FP32))
        sigmoid = self.op("mul", [self.op("reciprocal", [done.plus_one], (size, FP32), side=FREE)], (size, FP32), side=FREE)
        scaled = self.late("mul", [wide, sigmoid], (size, FP32))
        rest = self.op("mul", [done.wide, self.op("sub", [sigmoid], (size, FP32), side=FREE)], (size, FP32), side=FREE)
        slope = self.op("add", [rest], (size, FP32), side=FREE)
        narrow = self.late("convert", [self.late("mul", [scaled, slope], (size, FP32))], (size, BF16))
        both = self.late("add", [first, self.linear_back(done.gate, narrow)], (TOKENS * WIDTH, FP32))
        return self.rms_norm_back(done.norm, both, stream)

    def rms_norm(self, stream: int) -> _Norm:
        size = (TOKENS * WIDTH, FP32)
        scale = self.given((WIDTH, FP32))
        mean = self.op("mean", [self.op("pow", [stream], size)], (TOKENS, FP32), reduces=True)
        rsqrt = self.op("rsqrt", [self.op("add", [mean], (TOKENS, FP32))], (TOKENS, FP32))
        normed = self.op("mul", [stream, rsqrt], size)
        return _Norm(stream, scale, rsqrt, normed, self.op("convert", [self.op("mul", [scale, normed], size)], (TOKENS * WIDTH, BF16)))

    def rms_norm_back(self, done: _Norm, arrived: int, stream: int | None) -> int:
        size = (TOKENS * WIDTH, FP32)
        scaled = self.late("mul", [arrived, done.scale], size)
        self.gradient("sum", [self.late("mul", [arrived, done.normed], size)], (WIDTH, FP32), reduces=True)
        total = self.late("sum", [self.late("mul", [scaled, done.entering], size)], (TOKENS, FP32), reduces=True)
        direct = self.late("mul", [scaled, done.rsqrt], size)
        direct = direct if stream is None else self.late("add", [stream, direct], size)
        cubed = self.op("pow", [done.rsqrt], (TOKENS, FP32), side=FREE)
        spread = self.late("div", [self.late("mul", [self.late("mul", [total], (TOKENS, FP32)), cubed], (TOKENS, FP32))], size)
        twice = self.op("mul", [self.op("pow", [done.entering], size, side=FREE)], size, side=FREE)
        return self.late("add", [direct, self.late("mul", [spread, twice], size)], size)

    def rotary(self, heads: int) -> int:
        size = TOKENS * WIDTH
        turned = self.op("cat", [self.op("neg", [heads], (size // 2, BF16)), heads], (size, BF16))
        parts = [self.op("mul", [part, turn], (size, FP32)) for part, turn in zip((heads, turned), self.turns, strict=True)]
        return self.op("convert", [self.op("add", parts, (size, FP32))], (size, BF16))

    def rotary_back(self, arrived: int) -> int:
        size = TOKENS * WIDTH
        wide = self.late("convert", [arrived], (size, FP32))
        turned = self.late("convert", [self.late("mul", [wide, self.turns[1]], (size, FP32))], (size, BF16))
        zeros = self.op("full", [], (size, BF16), side=FREE, constant=True)
        halves = [self.late("neg", [turned], (size // 2, BF16)), turned]
        both = self.late("add", [self.late("slice_scatter", [zeros, half], (size, BF16)) for half in halves], (size, BF16))
        straight = self.late("convert", [self.late("mul", [wide, self.turns[0]], (size, FP32))], (size, BF16))
        return self.late("clone", [self.late("add", [both, straight], (size, BF16))], (size, BF16))

    def linear(self, entering: int, num_in: int, num_out: int) -> _Linear:
        weight = self.op("convert", [self.given((num_in * num_out, FP32))], (num_in * num_out, BF16))
        out = self.op("mm", [entering, weight], (TOKENS * num_out, BF16), cost_us=_matmul_us(num_in * num_out))
        return _Linear(entering, weight, num_in * num_out, out)

    def linear_back(self, done: _Linear, arrived: int, *, widen: bool = True) -> int:
        """Adds the gradient of the weight; returns that of what entered, in fp32 or as the matmul made it."""
        cost_us = _matmul_us(done.num_weights)
        weight = self.late("mm", [arrived, done.entering], (done.num_weights, BF16), cost_us=cost_us)
        entering = self.late("mm", [arrived, done.weight], (self.counts[done.entering], BF16), cost_us=cost_us)
        self.gradient("convert", [weight], (done.num_weights, FP32))
        return self.late("convert", [entering], (self.counts[entering], FP32)) if widen else entering

    def given(self, shape: Shape, kind: Kind = Kind.PARAMETER) -> int:
        return self._value("given", shape, kind, None)

    def late(self, target: str, reads: list[int], shape: Shape, *, reduces: bool = False, cost_us: float | None = None) -> int:
        return self.op(target, reads, shape, side=BACKWARD, reduces=reduces, cost_us=cost_us, kind=Kind.TEMPORARY)

    def gradient(self, target: str, reads: list[int], shape: Shape, *, reduces: bool = False, cost_us: float | None = None) -> None:
        made = self.op(target, reads, shape, side=BACKWARD, reduces=reduces, cost_us=cost_us, kind=Kind.GRADIENT)
        self.gradients.append(made)

    def op(
        self,
        target: str,
        reads: list[int],
        shape: Shape,
        *,
        side: Side = FORWARD,
        cost_us: float | None = None,
        reduces: bool = False,
        constant: bool = False,
        kind: Kind = Kind.ACTIVATION,
    ) -> int:
        """One op with one result. Without ``cost_us`` it is a loop, which fuses and costs the bytes that it moves."""
        (made,) = self._add(target, reads, [shape], side, cost_us, reduces=reduces, constant=constant, kind=kind)
        return made

    def many(self, target: str, reads: list[int], shapes: list[Shape], cost_us: float, *, side: Side = FORWARD) -> tuple[int, ...]:
        kind = Kind.TEMPORARY if side is BACKWARD else Kind.ACTIVATION
        return self._add(target, reads, shapes, side, cost_us, reduces=False, constant=False, kind=kind)

    def _add(
        self,
        target: str,
        reads: list[int],
        shapes: list[Shape],
        side: Side,
        cost_us: float | None,
        *,
        reduces: bool,
        constant: bool,
        kind: Kind,
    ) -> tuple[int, ...]:
        index = len(self.ops)
        operands = tuple(dict.fromkeys(reads))
        results = tuple(self._value(target, shape, kind, index) for shape in shapes)
        moved_bytes = sum(self.values[value].size_bytes for value in (*operands, *results))
        self.ops.append(
            Op(
                index=index,
                name=f"{target}_{index}",
                target=target,
                side=side,
                reads=operands,
                writes=results,
                cost_us=LAUNCH_US + (moved_bytes / BYTES_PER_US if cost_us is None else cost_us),
                never_saved=constant,
                region=self.region,
                fusible=cost_us is None,
                reduction=reduces,
                num_elements=max(self.counts[value] for value in (operands if reduces else results)),
            )
        )
        return results

    def _value(self, target: str, shape: Shape, kind: Kind, producer: int | None) -> int:
        index, (count, item_bytes) = len(self.values), shape
        label = f"{self.region}:{target}"
        value = Value(index=index, name=f"{target}_{index}", size_bytes=count * item_bytes, kind=kind, producer=producer, label=label)
        self.values.append(value)
        self.counts.append(count)
        return index


def _matmul_us(num_weights: int) -> float:
    return 2 * TOKENS * num_weights / FLOPS_PER_US
