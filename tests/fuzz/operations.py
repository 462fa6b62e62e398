"""The operations of random programs: each takes values of the run, in whatever shape they are, and appends what it makes.

An operation brings its operands into shape itself, so that every program is valid whatever steps surround it. Shapes are compared as
Python numbers: under dynamic sizes that guards, as a user's code would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_ELEMENTS = 2048
REGIONS = ("autocast", "no_grad", "checkpoint", "twice")


class Run:
    """One pass over a program's steps: the values so far, which of them are drawn, and what the operations may use besides.

    ``state(name, shape)`` gives parameters and buffers ("w..." and "b..."); ``writable``: which inputs autograd lets forward write to;
    ``is_pure``: no operation may write into what was there before,
    as in a region that runs twice.
    """

    def __init__(
        self,
        values: list[Tensor],
        inputs: Sequence[Tensor],
        state: Callable[[str, tuple[int, ...]], Tensor],
        *,
        width: int,
        flag: bool,
        writable: Sequence[bool],
        is_pure: bool = False,
        has_cond: bool = False,
    ) -> None:
        self.values = values
        self.drawn: list[Tensor] = []
        self.inputs = inputs
        self.state = state
        self.width = width
        self.flag = flag
        self.writable = writable
        self.is_pure = is_pure
        self.has_cond = has_cond

    def within(self, values: list[Tensor]) -> Run:
        """For the steps of a region that runs again in backward."""
        return Run(
            values,
            self.inputs,
            self.state,
            width=self.width,
            flag=self.flag,
            writable=self.writable,
            is_pure=True,
            has_cond=self.has_cond,
        )

    def real(self, ref: int) -> Tensor:
        """The floating-point value ``ref`` before the latest."""
        found = [value for value in self.values if value.is_floating_point()]
        return found[-1 - ref % len(found)]

    def whole(self, ref: int) -> Tensor:
        """An integer value with values of any size."""
        found = [value for value in self.values if value.dtype == torch.int64]
        return found[-1 - ref % len(found)]

    def mask(self, ref: int) -> Tensor:
        found = [value for value in self.values if value.dtype == torch.bool]
        return found[-1 - ref % len(found)]

    def weight(self, slot: int, *shape: int) -> Tensor:
        """A parameter; those of one slot and shape are shared."""
        return self.state(f"w{slot % 4}_" + "x".join(map(str, shape)), shape)

    def buffer(self, slot: int, *shape: int) -> Tensor:
        return self.state(f"b{slot % 2}_" + "x".join(map(str, shape)), shape)


Operation = Callable[[Run, int, int, int], "Tensor | Sequence[Tensor] | None"]
OPERATIONS: dict[str, Operation] = {}
WEIGHTS: dict[str, int] = dict.fromkeys(REGIONS, 3)
WRITING: set[str] = set()  # those that write into a value that was there before
DRAWING: set[str] = set()  # those that draw random numbers; nothing may take their results for dead, or the masks after them change


def operation(weight: int = 3, *, writes: bool = False, draws: bool = False) -> Callable[[Operation], Operation]:
    def add(function: Operation) -> Operation:
        name = function.__name__.rstrip("_")
        OPERATIONS[name], WEIGHTS[name] = function, weight
        if writes:
            WRITING.add(name)
        if draws:
            DRAWING.add(name)
        return function

    return add


# Operands in shape


def fit(x: Tensor, size: int) -> Tensor:
    """The last dimension cut or padded to ``size``."""
    if x.dim() == 0:
        x = x.reshape(1)
    if x.shape[-1] > size:
        return x[..., :size]
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def matrix(x: Tensor, width: int) -> Tensor:
    """(rows, width)."""
    x = fit(x, width)
    return x.reshape(-1, width) if x.dim() != 2 else x


def at_least_2d(x: Tensor) -> Tensor:
    return x.reshape(1, -1) if x.dim() < 2 else x


def beside(x: Tensor, y: Tensor) -> Tensor:
    """``y`` so that it broadcasts to the shape of ``x``, by its mean if it does not as it is."""
    if y.dim() <= x.dim() and all(have in (1, want) for have, want in zip(y.shape[::-1], x.shape[::-1], strict=False)):
        return y
    return y.mean() if y.is_floating_point() else y.reshape(-1)[:1]


def images(x: Tensor, width: int) -> Tensor:
    """(n, 2, width, 4): few channels, small planes."""
    flat = matrix(x, width * 8)
    return flat.reshape(-1, 2, width, 4)


def indices(run: Run, ref: int, size: int) -> Tensor:
    """Integers of one dimension below ``size``, four at most."""
    return run.whole(ref).reshape(-1)[:4].abs() % size


def is_large(x: Tensor) -> bool:
    return x.numel() > MAX_ELEMENTS


def own(run: Run, ref: int, k: int) -> Tensor:
    """A value to write to: an earlier one if k is odd and autograd allows it, else a copy, which later steps see too."""
    x = run.real(ref)
    is_expanded = any(stride == 0 for stride in x.stride())
    if k % 2 == 0 or run.is_pure or is_expanded or any(x is one for one in run.inputs):
        x = x.clone()
        run.values.append(x)
    return x


# Pointwise

UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.sin,
    torch.tanh,
    torch.sigmoid,
    F.gelu,
    F.silu,
    F.relu,
    F.softplus,
    lambda x: torch.exp(-x.abs()),
    lambda x: (x.abs() + 0.1).sqrt(),
    lambda x: F.leaky_relu(x, 0.1),
    F.elu,
    lambda x: x.clamp(-0.5, 0.5),
    torch.erf,
    lambda x: torch.log1p(x.abs()),
    lambda x: x.clamp(-2, 2).square() * 0.5,
    lambda x: (x.square() + 1).rsqrt(),
)
BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.mul,
    torch.add,
    torch.sub,
    torch.maximum,
    lambda x, y: x / (y.abs() + 1),
    lambda x, y: torch.where(x > y, x, y * 0.5),
    torch.logaddexp,
    lambda x, y: torch.atan2(x, y.abs() + 1),
    lambda x, y: torch.lerp(x, y.to(x.dtype), 0.3),
    torch.hypot,
)


@operation(14)
def unary(run: Run, a: int, b: int, k: int) -> Tensor:
    return UNARY[k % len(UNARY)](run.real(a))


@operation(12)
def binary(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.real(a)
    y = beside(x, run.real(b))
    return BINARY[k % len(BINARY)](x, y.to(x.dtype))


@operation()
def scaled(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.real(a)
    return (x * 0.5, 1 - x, x + 0.25, -x)[k % 4]


@operation()
def where(run: Run, a: int, b: int, k: int) -> Tensor:
    x, mask = run.real(a), run.mask(b)
    return torch.where(beside(x, mask), x, x.sin() if k % 2 else torch.zeros_like(x))


@operation()
def masked_fill(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.real(a)
    return x.masked_fill(beside(x, run.mask(b)), 0.5)


@operation()
def addcmul(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.real(a)
    y = beside(x, run.real(b)).to(x.dtype)
    return torch.addcmul(x, y, y, value=0.5)


@operation(2)
def glu(run: Run, a: int, b: int, k: int) -> Tensor:
    return F.glu(fit(run.real(a), run.width))


@operation(2)
def prelu(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width)
    return F.prelu(x, run.weight(b, run.width).to(x.dtype))


@operation(2)
def polynomial(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.real(a).tanh()
    return x * x * x + (x * x if k % 2 else x.pow(2))


# Views


@operation(5)
def transpose(run: Run, a: int, b: int, k: int) -> Tensor:
    return at_least_2d(run.real(a)).transpose(-1, -2)


@operation(5)
def slice_(run: Run, a: int, b: int, k: int) -> Tensor:
    x = at_least_2d(run.real(a))
    if x.shape[-1] < 2:
        return x[..., :1]
    return (x[..., 1:], x[..., ::2], x[..., :-1], x[:1])[k % 4]


@operation()
def select(run: Run, a: int, b: int, k: int) -> Tensor:
    x = at_least_2d(run.real(a))
    return x.select(k % x.dim(), 0)


@operation()
def expand(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.real(a)
    if is_large(x) or x.dim() > 3:
        return x.unsqueeze(0)
    return x.unsqueeze(0).expand(2, *x.shape)


@operation(4)
def chunk(run: Run, a: int, b: int, k: int) -> Sequence[Tensor]:
    return fit(run.real(a), run.width).chunk(2, -1)


@operation(4)
def split(run: Run, a: int, b: int, k: int) -> Sequence[Tensor]:
    part = 1 + k % 3
    return fit(run.real(a), run.width).split([part, run.width - part], -1)


@operation()
def unbind(run: Run, a: int, b: int, k: int) -> Sequence[Tensor]:
    return fit(run.real(a), 3).unbind(-1)


@operation()
def flatten(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.real(a)
    return x.reshape(-1) if k % 2 else at_least_2d(x).flatten(0, 1)


@operation()
def unflatten(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width)
    return x.unflatten(-1, (2, run.width // 2))


@operation(2)
def permute(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width).unflatten(-1, (2, run.width // 2))
    return x.permute(*((2, 0, 1), (1, 2, 0), (0, 2, 1))[k % 3])


@operation(2)
def as_strided(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width)
    x = x.clone(memory_format=torch.contiguous_format) if k % 2 else x.contiguous()
    return x.as_strided((x.shape[0], run.width - 1), (run.width, 1), x.storage_offset() + 1)


@operation(2)
def diagonal(run: Run, a: int, b: int, k: int) -> Tensor:
    return at_least_2d(run.real(a)).diagonal(dim1=-2, dim2=-1)


@operation(2)
def unfold(run: Run, a: int, b: int, k: int) -> Tensor:
    x = fit(run.real(a), run.width)
    return x if is_large(x) else x.unfold(-1, 3, 1 + k % 2)


@operation(2)
def unsqueeze(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.real(a)
    return x.squeeze() if x.dim() > 2 else x.unsqueeze(k % (x.dim() + 1))


@operation(2)
def detach(run: Run, a: int, b: int, k: int) -> Tensor:
    return run.real(a).detach()


@operation(1)
def contiguous(run: Run, a: int, b: int, k: int) -> Tensor:
    return run.real(a).contiguous()


# Several values


@operation(4)
def cat(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width)
    y = matrix(run.real(b), run.width).to(x.dtype)
    if is_large(x) or is_large(y):
        return x
    return torch.cat([x, y, x[:0]] if k % 2 else [x, y])


@operation()
def stack(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.real(a)
    if is_large(x) or x.dim() > 3:
        return x.sin()
    y = x.cos() if k % 2 else x
    return torch.stack([x, y], dim=k % (x.dim() + 1))


@operation(2)
def repeat(run: Run, a: int, b: int, k: int) -> Tensor:
    x = at_least_2d(run.real(a))
    return x if is_large(x) else torch.repeat_interleave(x, 2, dim=-1) if k % 2 else x.repeat(*[1] * (x.dim() - 1), 2)


@operation(2)
def roll(run: Run, a: int, b: int, k: int) -> Tensor:
    x = at_least_2d(run.real(a))
    return (x.roll(1, -1), x.flip(0), x.tril(), x.triu(1))[k % 4]


@operation()
def gather(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width)
    places = indices(run, b, run.width)
    if k % 2:
        return x.index_select(1, places)
    return x.gather(1, places.unsqueeze(0).expand(x.shape[0], places.shape[0]))


@operation()
def index(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width)
    return x[:, indices(run, b, run.width)]


@operation()
def scatter(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width)
    places = indices(run, b, run.width)
    if k % 3 == 0:
        return x.index_add(1, places, x[:, : places.shape[0]] * 0.5)
    if k % 3 == 1:
        return x.scatter_add(1, places.unsqueeze(0).expand(x.shape[0], places.shape[0]), x[:, : places.shape[0]].sin())
    return x.index_put((torch.zeros_like(places), places), x[0, : places.shape[0]].cos(), accumulate=True)


# Products


@operation(10)
def linear(run: Run, a: int, b: int, k: int) -> Tensor:
    x = fit(run.real(a), run.width)
    weight = run.weight(b, run.width, run.width).to(x.dtype)
    bias = run.weight(b, run.width).to(x.dtype) if k % 2 else None
    return F.linear(x, weight.t() if k % 4 == 3 else weight, bias)


@operation()
def addmm(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width)
    return torch.addmm(run.weight(b, run.width).to(x.dtype), x, run.weight(b, run.width, run.width).to(x.dtype), beta=0.5)


@operation()
def matmul(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width)
    y = matrix(run.real(b), run.width).to(x.dtype)
    if k % 3 == 0:
        return (x @ x.t()) * 0.1 if x.shape[0] <= 32 else x
    if k % 3 == 1:
        return x @ (y.t() @ y) * 0.1
    return torch.einsum("ij,kj->ik", x, y[:4]) * 0.3


@operation()
def bmm(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width).unflatten(-1, (2, run.width // 2))
    y = run.weight(b, run.width // 2, run.width // 2).to(x.dtype)
    return torch.bmm(x, y.expand(x.shape[0], *y.shape)) if k % 2 else torch.matmul(x, y)


@operation(2)
def inner(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width)
    w = run.weight(b, run.width).to(x.dtype)
    return torch.mv(x, w) if k % 2 else torch.outer(x[:, 0], w)


@operation(4, draws=True)
def attention(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width).unflatten(-1, (2, run.width // 2)).transpose(0, 1).unsqueeze(0)
    if x.shape[2] > 64:
        x = x[:, :, :64]
    w = run.weight(b, run.width // 2, run.width // 2).to(x.dtype)
    return F.scaled_dot_product_attention(x @ w, x, x.sin(), dropout_p=0.25 if k % 2 else 0.0, is_causal=k % 4 > 1)


@operation(2)
def lstm_cell(run: Run, a: int, b: int, k: int) -> Sequence[Tensor]:
    x = matrix(run.real(a), run.width)
    gates = x @ run.weight(b, run.width, 4 * run.width).to(x.dtype)
    i, f, g, o = gates.chunk(4, 1)
    cell = torch.sigmoid(f) * x + torch.sigmoid(i) * torch.tanh(g)
    return cell, torch.sigmoid(o) * torch.tanh(cell)


# Convolutions, pooling


@operation(2)
def conv1d(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width).unflatten(-1, (2, run.width // 2))
    return F.conv1d(x, run.weight(b, 2, 2, 3).to(x.dtype), run.weight(b, 2).to(x.dtype) if k % 2 else None, padding=1)


@operation(2)
def conv2d(run: Run, a: int, b: int, k: int) -> Tensor:
    x = images(run.real(a), run.width)
    return F.conv2d(x, run.weight(b, 4, 2, 3, 3).to(x.dtype), stride=1 + k % 2, padding=1)


@operation(2)
def pool(run: Run, a: int, b: int, k: int) -> Tensor | Sequence[Tensor]:
    x = images(run.real(a), run.width)
    if k % 4 == 0:
        return F.max_pool2d(x, 2)
    if k % 4 == 1:
        return F.max_pool2d(x, 2, return_indices=True)
    return F.avg_pool2d(x, 2) if k % 4 == 2 else F.adaptive_avg_pool2d(x, 1)


@operation(1)
def resize(run: Run, a: int, b: int, k: int) -> Tensor:
    x = images(run.real(a), run.width)
    return F.interpolate(x, scale_factor=0.5, mode="nearest") if k % 2 else F.pad(x, (1, 1, 1, 1), mode="reflect")


# Norms


@operation(4)
def layer_norm(run: Run, a: int, b: int, k: int) -> Tensor:
    x = fit(run.real(a), run.width)
    weight = run.weight(b, run.width).to(x.dtype) if k % 2 else None
    return F.layer_norm(x, (run.width,), weight, weight if k % 4 == 3 else None)


@operation(2)
def group_norm(run: Run, a: int, b: int, k: int) -> Tensor:
    x = images(run.real(a), run.width)
    return F.group_norm(x, 1 + k % 2, run.weight(b, 2).to(x.dtype))


@operation(4)
def batch_norm(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width)
    x = torch.cat([x, x * 2])  # one row has no variance
    if run.is_pure:
        return F.batch_norm(x, None, None, training=True)
    mean, variance = (run.buffer(slot, run.width) for slot in (0, 1))
    weight = run.weight(b, run.width) if k % 2 else None
    return F.batch_norm(x.to(mean.dtype), mean, variance, weight, training=k % 8 < 6, momentum=0.3)


@operation(2)
def normalize(run: Run, a: int, b: int, k: int) -> Tensor:
    x = at_least_2d(run.real(a))
    return F.normalize(x, dim=-1) if k % 2 else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)


# Reductions


@operation(4)
def reduce(run: Run, a: int, b: int, k: int) -> Tensor:
    x = at_least_2d(run.real(a))
    dim = -1 if b % 2 else 0
    if k % 8 == 6:
        return x.sum() * 0.1
    if k % 8 == 7:
        return x.var(unbiased=False)
    return (
        x.sum(dim, keepdim=True) if k % 8 == 0
        else x.mean(dim) if k % 8 == 1
        else x.amax(dim, keepdim=True) if k % 8 == 2
        else x.logsumexp(dim) if k % 8 == 3
        else torch.linalg.vector_norm(x + 1, dim=dim) if k % 8 == 4
        else x.tanh().prod(dim)
    )  # fmt: skip


@operation(4)
def softmax(run: Run, a: int, b: int, k: int) -> Tensor:
    x = at_least_2d(run.real(a))
    return F.softmax(x, -1) if k % 2 else F.log_softmax(x, 0 if k % 4 else -1)


@operation()
def cumulative(run: Run, a: int, b: int, k: int) -> Tensor | Sequence[Tensor]:
    x = at_least_2d(run.real(a))
    if k % 4 == 3:
        return torch.cummax(x, -1)
    return (x.cumsum(-1) * 0.3, x.tanh().cumprod(-1), x.logcumsumexp(0))[k % 3]


@operation(2)
def cross_entropy(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width)
    target = (torch.arange(x.shape[0]) + b) % run.width
    return F.cross_entropy(x, target, reduction="none" if k % 2 else "mean")


@operation()
def moments(run: Run, a: int, b: int, k: int) -> Sequence[Tensor]:
    x = at_least_2d(run.real(a))
    return torch.var_mean(x, -1, unbiased=False) if k % 2 else torch.std_mean(x + torch.arange(x.shape[-1]), 0, unbiased=False)


@operation(4)
def ranked(run: Run, a: int, b: int, k: int) -> Sequence[Tensor]:
    x = fit(run.real(a), run.width)
    if k % 5 == 0:
        return torch.topk(x, 2, -1)
    if k % 5 == 1:
        return torch.sort(x, dim=-1, stable=True)
    if k % 5 == 2:
        return x.max(-1)
    return x.min(-1) if k % 5 == 3 else torch.kthvalue(x, 2, -1)


# Integers, truth values, complex numbers, dtypes


@operation()
def compare(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.real(a)
    return x > beside(x, run.real(b)).to(x.dtype) if k % 2 else x > 0


@operation(2)
def combine_masks(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.mask(a)
    y = run.mask(b)
    return x & beside(x, y) if k % 2 else ~x


@operation(2)
def count(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.whole(a)
    return x + 1 if k % 3 == 0 else x * 3 - 1 if k % 3 == 1 else at_least_2d(run.real(b)).argmax(-1)


@operation(2)
def mask_times(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.real(a)
    return x * beside(x, run.mask(b)).to(x.dtype)


@operation()
def spectrum(run: Run, a: int, b: int, k: int) -> Tensor:
    x = fit(run.real(a), run.width)
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    bins = torch.fft.rfft(x)
    bins = bins * bins.abs().sigmoid() if k % 2 else bins * (1 + 2j)
    return torch.fft.irfft(bins, n=run.width) if k % 4 < 2 else torch.view_as_real(bins) * 0.3


@operation(2)
def complex_view(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width).unflatten(-1, (run.width // 2, 2))
    x = x.contiguous() if x.dtype in (torch.float32, torch.float64) else x.float()
    z = torch.view_as_complex(x)
    return (z * z.conj()).real if k % 2 else torch.view_as_real(z * torch.polar(x[..., 0].abs(), x[..., 1]))


@operation(4)
def cast(run: Run, a: int, b: int, k: int) -> Tensor:
    return run.real(a).to((torch.bfloat16, torch.float64, torch.float32, torch.float16)[k % 4])


# Lookups


@operation()
def embedding(run: Run, a: int, b: int, k: int) -> Tensor:
    places = run.whole(b).reshape(-1)[:8].abs() % 6
    table = run.weight(a, 6, run.width)
    return F.embedding_bag(places.reshape(1, -1), table, mode="mean") if k % 3 == 2 else F.embedding(places, table)


@operation(2)
def one_hot(run: Run, a: int, b: int, k: int) -> Tensor:
    places = run.whole(b).reshape(-1)[:8].abs() % run.width
    x = run.real(a)
    return F.one_hot(places, run.width).to(x.dtype) * x.mean()


@operation(2)
def parameter(run: Run, a: int, b: int, k: int) -> Tensor:
    w = run.weight(a, run.width, run.width)
    return w * 0.5 if k % 2 else w.t() + 1


@operation(2)
def read_buffer(run: Run, a: int, b: int, k: int) -> Tensor:
    x = fit(run.real(a), run.width)
    return x * run.buffer(b, run.width).to(x.dtype)


@operation(3)
def read_input(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.inputs[a % len(run.inputs)]
    y = run.real(b)
    return x * beside(x, y).to(x.dtype) if k % 2 else torch.sin(x)


# Random numbers


@operation(8, draws=True)
def dropout(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.real(a)
    if k % 4 == 3:
        return F.feature_alpha_dropout(images(x, run.width), 0.3) if b % 2 else F.alpha_dropout(x, 0.3)
    return F.dropout2d(images(x, run.width), 0.4) if k % 4 == 2 else F.dropout(x, 0.3)


@operation(4, draws=True)
def noise(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.real(a)
    if k % 5 == 0:
        return x * torch.bernoulli(torch.full_like(x, 0.5))
    if k % 5 == 1:
        return torch.where(torch.rand_like(x) < 0.4, x, -x)
    if k % 5 == 2:
        return x + 0.1 * torch.randn_like(x)
    return F.rrelu(x, training=True) if k % 5 == 3 else torch.bernoulli(torch.sigmoid(x)) * x


@operation(2, draws=True)
def gumbel(run: Run, a: int, b: int, k: int) -> Tensor:
    return F.gumbel_softmax(at_least_2d(run.real(a)), hard=k % 2 == 1)


@operation(2, draws=True)
def sampled(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width)
    if k % 3 == 0:
        return x[:, torch.randperm(run.width)]
    if k % 3 == 1:
        return x.gather(1, torch.multinomial(x.detach().float().softmax(-1), 2))
    return F.embedding(torch.randint(0, 6, (3,)), run.weight(b, 6, run.width))


@operation(2, draws=True)
def drawn_in_place(run: Run, a: int, b: int, k: int) -> Tensor:
    """Into memory without gaps: in other memory stock draws in another order than eager mode, before any plan is made."""
    x = run.real(a)
    drawn = torch.empty_like(x, memory_format=torch.contiguous_format)
    drawn = (
        drawn.uniform_() if k % 4 == 0 else drawn.normal_() if k % 4 == 1 else drawn.bernoulli_(0.3) if k % 4 == 2 else drawn.exponential_()
    )
    return x * drawn


# Writes


@operation(6, writes=True, draws=True)
def write(run: Run, a: int, b: int, k: int) -> Tensor:
    x = own(run, a, k)
    y = beside(x, run.real(b)).to(x.dtype)
    match k // 2 % 7:
        case 0:
            return x.mul_(0.5)
        case 1:
            return x.add_(y)
        case 2:
            return x.mul_(y.detach())
        case 3:
            return F.relu_(x)
        case 4:
            return x.clamp_(-1, 1)
        case 5:
            return x.copy_(y)
    return F.dropout(x, 0.3, inplace=True)


@operation(5, writes=True)
def write_view(run: Run, a: int, b: int, k: int) -> Tensor:
    """Writes into a part of a value; the value itself is what follows."""
    x = own(run, a, k)
    if x.dim() == 0:
        return x.mul_(2)
    part = (
        x[..., :1]
        if k // 2 % 4 == 0
        else x.select(0, 0)
        if k // 2 % 4 == 1
        else x[..., ::2]
        if k // 2 % 4 == 2
        else at_least_2d(x).transpose(-1, -2)
    )
    y = beside(part, run.real(b)).to(x.dtype)
    if b % 3 == 0:
        part.add_(y)
    elif b % 3 == 1:
        part.mul_(-0.5)
    else:
        part.copy_(y)
    return x.sin() if k % 4 > 1 else x


@operation(2, writes=True)
def write_through_views(run: Run, a: int, b: int, k: int) -> Sequence[Tensor]:
    """A view taken before a write to its base, and a write to a view of a view."""
    x = own(run, a, k)
    flat = x.view(-1) if x.is_contiguous() else x
    early = flat[:2] if flat.dim() else flat
    x.add_(0.25)
    flat.mul_(0.9)
    return early * 2, x


@operation(3, writes=True)
def write_places(run: Run, a: int, b: int, k: int) -> Tensor:
    x = matrix(run.real(a), run.width).clone()
    places = indices(run, b, run.width)
    match k % 4:
        case 0:
            x[:, places] = 0.5
        case 1:
            x.index_add_(1, places, x.detach()[:, : places.shape[0]] * 0.5)  # not what it writes to: that would depend on the order
        case 2:
            x.scatter_(1, places.unsqueeze(0).expand(x.shape[0], places.shape[0]), 0.25)
        case _:
            x.masked_fill_(x.detach() > 0.5, 0.0)
    return x


@operation(4, writes=True)
def write_buffer(run: Run, a: int, b: int, k: int) -> Tensor:
    """Reads a buffer, writes it, and reads it again."""
    x = fit(run.real(a), run.width)
    buffer = run.buffer(b, run.width)
    before = x * torch.sigmoid(buffer).to(x.dtype)
    new = x.detach().reshape(-1, run.width).mean(0).to(buffer.dtype)
    if k % 3 == 0:
        buffer.mul_(0.7).add_(new)
    elif k % 3 == 1:
        buffer[:2].add_(new[:2])
    else:
        buffer.copy_(new)
    return before * torch.sin(buffer).to(x.dtype) if k % 2 else before


@operation(4, writes=True)
def write_input(run: Run, a: int, b: int, k: int) -> Tensor:
    """The same with one of the caller's tensors."""
    place = a % len(run.inputs)
    x = run.inputs[place]
    before = torch.sigmoid(x)
    if not run.writable[place]:
        return before
    y = beside(x, run.real(b)).to(x.dtype)
    if k % 3 == 0:
        x.mul_(0.5)
    elif k % 3 == 1:
        x[..., :1].add_(y.detach().mean())
    else:
        x.add_(y if x.requires_grad else y.detach())
    return before * torch.sin(x) if k % 2 else before


# The user's own derivatives


class ScaledSine(torch.autograd.Function):
    """Saves its input and a number."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale  # type: ignore[attr-defined]  # what the user keeps on a context
        return torch.sin(x * scale)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]  # FunctionCtx gets it from the C++ side
        return gradients[0] * torch.cos(x * ctx.scale) * ctx.scale, None  # type: ignore[attr-defined]  # set above


class OverwrittenThenSaved(torch.autograd.Function):
    """Writes over its own temporary and saves it, and its result."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        y = x * 3
        y.tanh_()
        z = y + 1
        ctx.save_for_backward(y, z)
        return z

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        y, z = ctx.saved_tensors  # type: ignore[attr-defined]  # FunctionCtx gets it from the C++ side
        return gradients[0] * (1 - y * y) * 3 + 0 * z


class TwoResults(torch.autograd.Function):
    """One differentiable result and one that is not; straight-through derivative."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> tuple[Tensor, Tensor]:
        rounded, signs = torch.round(x * 4) / 4, x > 0
        ctx.mark_non_differentiable(signs)  # type: ignore[arg-type]  # torch's stub wants a tuple of them in one argument
        ctx.save_for_backward(signs)
        return rounded, signs

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        (signs,) = ctx.saved_tensors  # type: ignore[attr-defined]  # FunctionCtx gets it from the C++ side
        return torch.where(signs, gradients[0], gradients[0] * 0.5)


@operation(4)
def custom(run: Run, a: int, b: int, k: int) -> Tensor | Sequence[Tensor]:
    x = run.real(a)
    made: Tensor | Sequence[Tensor]
    if k % 3 == 0:
        made = ScaledSine.apply(x, 0.7)
    elif k % 3 == 1:
        made = OverwrittenThenSaved.apply(x)
    else:
        made = TwoResults.apply(x)
    return made


# Branches


@operation(draws=True)
def branch(run: Run, a: int, b: int, k: int) -> Tensor:
    x = run.real(a)
    return torch.sin(x) * 2 if run.flag == (k % 2 == 0) else F.dropout(torch.cos(x), 0.2)


@operation(2)
def branch_on_data(run: Run, a: int, b: int, k: int) -> Tensor:
    """`torch.cond` where the level of the test can trace it, the same by `torch.where` elsewhere."""
    x = run.real(a)
    is_positive = x.detach().sum() > 0
    if run.has_cond and not run.is_pure:
        chosen: Tensor = torch.cond(is_positive, lambda t: torch.sin(t) * 2, lambda t: torch.cos(t), (x,))
        return chosen
    return torch.where(is_positive, torch.sin(x) * 2, torch.cos(x))


def spread(shape: Sequence[int]) -> float:
    """Standard deviation of a weight, so that products keep the size of their inputs."""
    return 1 / math.sqrt(shape[-1]) if len(shape) > 1 else 1.0
