"""Kinds of graphs on which partitioners have gone wrong, each as a small model of our own: trained free and at the least budget, it must
give eager's loss, gradients, buffers, inputs and random state, and run each operator with an effect once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dyngran.compiler.planned_graph import PlannedGraph
from dyngran.compiler.registry import graphs_of
from dyngran.errors import BudgetTooSmall
from dyngran.passes.problem import Kind

Made = tuple[nn.Module, tuple[Tensor, ...]]
RUNS: list[str] = []  # what the operators below did, in order

MODELS: dict[str, Callable[[], Made]] = {}


def model(make: Callable[[], Made]) -> Callable[[], Made]:
    MODELS[make.__name__] = make
    return make


class Net(nn.Module):
    """Two linear layers around ``middle``, a function of the net and what follows the first input; the loss is a mean square."""

    def __init__(self, middle: Callable[..., Tensor], *, width: int = 64, **parts: object) -> None:
        super().__init__()
        self.middle = middle
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, 4)
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self, torch.sin(self.first(x)), *others))).square().mean()


def batch(num_rows: int = 32) -> Tensor:
    return torch.randn(num_rows, 16).requires_grad_()


@torch.library.custom_op("dyngran_faults::journal", mutates_args=())
def journal(x: Tensor) -> Tensor:
    RUNS.append("journal")
    return x * 2


@torch.library.custom_op("dyngran_faults::tally", mutates_args=("total",))
def tally(x: Tensor, total: Tensor) -> None:
    RUNS.append("tally")
    total.add_(x.detach().abs().sum())


journal.register_fake(torch.empty_like)
journal.register_autograd(lambda _ctx, gradient: gradient * 2)


class RectifiedInPlace(torch.autograd.Function):
    """Overwrites its own temporary in forward and saves it."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        y = x * 3
        y.mul_(2)
        ctx.save_for_backward(y)
        return y.clamp(min=0)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors  # type: ignore[attr-defined]  # FunctionCtx gets it from the C++ side
        return gradients[0] * 6 * (y > 0)


class TalliedBothWays(torch.autograd.Function):
    """Adds to one buffer in forward and to another in backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, ahead: Tensor, back: Tensor) -> Tensor:
        ahead.add_(x.detach().abs().mean())
        ctx.back = back  # type: ignore[attr-defined]  # a buffer to write to, not a tensor to save
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.back.add_(gradients[0].abs().amax())  # type: ignore[attr-defined]  # set above
        return gradients[0], None, None


@model
def batch_norm() -> Made:
    return Net(lambda net, h: net.norm(F.relu(net.norm(h))), norm=nn.BatchNorm1d(64)), (batch(),)


@model
def input_read_then_overwritten() -> Made:
    def middle(_: Net, h: Tensor, state: Tensor) -> Tensor:
        gated = h * torch.sigmoid(state)
        state.mul_(0.5).add_(h.detach().mean(0))
        return gated * torch.sin(state)

    return Net(middle), (batch(), torch.linspace(-1, 1, 64))


@model
def view_of_an_input_overwritten() -> Made:
    def middle(_: Net, h: Tensor, state: Tensor) -> Tensor:
        before = torch.sigmoid(h * state.sum())
        state[8:16].add_(before.detach().mean(0)[:8])
        return before * state.sum()

    return Net(middle), (batch(), torch.linspace(-1, 1, 64))


@model
def window_beyond_an_overwritten_input() -> Made:
    def middle(_: Net, h: Tensor, state: Tensor) -> Tensor:
        gated = h * torch.sin(state.as_strided((64,), (1,), 8))
        state.mul_(0.5)
        return gated + state.sum()

    return Net(middle), (batch(), torch.linspace(-1, 1, 80)[4:20])


@model
def overlapping_inputs() -> Made:
    def middle(_: Net, h: Tensor, left: Tensor, right: Tensor) -> Tensor:
        gate = torch.sigmoid(h * left.sum())
        right.mul_(0.5)
        return gate * left.mean() + right.mean()

    whole = torch.linspace(-1, 1, 16)
    return Net(middle), (batch(), whole[:10], whole[6:])


@model
def buffers_of_forward_and_backward() -> Made:
    return Net(lambda net, h: TalliedBothWays.apply(h, net.ahead, net.back), ahead=torch.zeros(1), back=torch.zeros(1)), (batch(),)


@model
def in_place_activations() -> Made:
    return Net(lambda _, h: F.leaky_relu_(F.dropout(F.relu_(h * 2) * h, 0.3), 0.1)), (batch(),)


@model
def in_place_inside_a_custom_function() -> Made:
    return Net(lambda _, h: RectifiedInPlace.apply(h)), (batch(),)


@model
def random_operators() -> Made:
    def middle(_: Net, h: Tensor) -> Tensor:
        h = F.rrelu(h, training=True) * torch.bernoulli(torch.full_like(h, 0.5))
        h = torch.where(torch.rand_like(h) < 0.3, torch.randn_like(h), h)
        picked = torch.multinomial(h.detach().softmax(-1), 64)
        return F.gumbel_softmax(F.dropout(h.gather(1, picked), 0.2))

    return Net(middle), (batch(),)


@model
def attention_dropout() -> Made:
    def middle(_: Net, h: Tensor) -> Tensor:
        query, key, value = h.view(4, 8, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.3).transpose(1, 2).reshape(32, 32).repeat(1, 3)

    return Net(middle, width=96), (batch(),)


@model
def users_checkpoints_with_dropout() -> Made:
    def block(net: Net, h: Tensor) -> Tensor:
        return h + F.dropout(F.gelu(net.inner(h)), 0.25)

    def middle(net: Net, h: Tensor) -> Tensor:
        for _ in range(2):
            h = checkpoint(block, net, h, use_reentrant=False)
        return block(net, h)

    return Net(middle, inner=nn.Linear(64, 64)), (batch(),)


def save_products(_ctx: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@model
def users_selective_policy() -> Made:
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)

    def middle(net: Net, h: Tensor) -> Tensor:
        body = lambda t: F.gelu(net.inner(torch.sigmoid(t))) * 2  # noqa: E731 - checkpoint wants a function of tensors
        return checkpoint(body, h, use_reentrant=False, context_fn=contexts)

    return Net(middle, inner=nn.Linear(64, 64)), (batch(),)


@model
def operator_with_an_effect() -> Made:
    return Net(lambda _, h: torch.sigmoid(journal(F.relu(h)))), (batch(),)


@model
def operator_that_writes_a_buffer() -> Made:
    def middle(net: Net, h: Tensor) -> Tensor:
        tally(h, net.total)
        return torch.sigmoid(h) * (1 + 0.01 * net.total.mean())

    return Net(middle, total=torch.zeros(4)), (batch(),)


@model
def lists_of_views() -> Made:
    def middle(_: Net, h: Tensor) -> Tensor:
        left, right = h.chunk(2, -1)
        parts = torch.sigmoid(left * right).split([8, 24], -1)
        rows = torch.stack(torch.cat([*parts, left], -1).sin().unbind(0))
        return rows.cos()

    return Net(middle), (batch(),)


@model
def rows_chosen_by_the_data() -> Made:
    def middle(net: Net, h: Tensor, keep: Tensor) -> Tensor:
        rows = torch.nonzero(keep).squeeze(1)
        return torch.zeros_like(h).index_add(0, rows, F.gelu(net.inner(h[rows]))) + h.mean()

    return Net(middle, inner=nn.Linear(64, 64)), (batch(), torch.arange(32) % 3 != 0)


@model
def size_read_from_a_tensor() -> Made:
    def middle(_: Net, h: Tensor, length: Tensor) -> Tensor:
        num_rows = length.item()
        torch._check(num_rows >= 1)
        torch._check(num_rows <= 32)
        return torch.sigmoid(h[:num_rows]) * h[:num_rows]

    return Net(middle), (batch(), torch.tensor(20))


@model
def branch_chosen_by_the_data() -> Made:
    return Net(lambda _, h: torch.cond(h.sum() > 0, lambda t: torch.sin(t) * 2, lambda t: torch.cos(t), (h,))), (batch(),)


@model
def complex_numbers() -> Made:
    def middle(net: Net, h: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(h) * torch.view_as_complex(net.filter)
        return torch.fft.irfft(torch.sigmoid(spectrum.abs()) * spectrum, n=64)

    return Net(middle, filter=nn.Parameter(torch.randn(33, 2))), (batch(),)


@model
def sparse_gradient() -> Made:
    def middle(net: Net, h: Tensor, ids: Tensor) -> Tensor:
        return h * torch.tanh(net.table(ids)).mean(1)

    return Net(middle, table=nn.Embedding(50, 64, sparse=True)), (batch(8), torch.randint(0, 50, (8, 5)))


@model
def parametrized_weight() -> Made:
    inner = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
    return Net(lambda net, h: net.inner(torch.sigmoid(net.inner(h))), inner=inner), (batch(),)


@model
def tied_weights_under_autocast() -> Made:
    def middle(net: Net, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (F.gelu(h @ net.shared) @ net.shared.t()).float()

    return Net(middle, shared=nn.Parameter(torch.randn(64, 64) / 8)), (batch(),)


@model
def empty_tensors() -> Made:
    def middle(_: Net, h: Tensor) -> Tensor:
        return torch.cat([torch.sigmoid(h[:0]), torch.cat([h, torch.exp(h[:, :0])], 1).sin()])

    return Net(middle), (batch(),)


@torch.compiler.nested_compile_region  # type: ignore[untyped-decorator]  # torch ships no types for it
def region(net: Net, h: Tensor) -> Tensor:
    return h + F.dropout(F.gelu(net.inner(h)), 0.2)


@model
def nested_compile_regions() -> Made:
    return Net(lambda net, h: region(net, region(net, h)), inner=nn.Linear(64, 64)), (batch(),)


@dataclass(frozen=True, slots=True)
class Seen:
    tensors: dict[str, Tensor | None]
    runs: tuple[str, ...]


def fresh(name: str) -> Made:
    torch.manual_seed(0)
    return MODELS[name]()


def train_step(step: Callable[..., Tensor], module: nn.Module, inputs: tuple[Tensor, ...]) -> Seen:
    """One seeded forward and backward: everything that it may change."""
    RUNS.clear()
    torch.manual_seed(7)
    loss = step(*inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    seen: dict[str, Tensor | None] = {"loss": loss.detach(), "random state": torch.get_rng_state()}
    seen |= {f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}
    seen |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    for position, value in enumerate(inputs):
        seen[f"input {position}"] = value.detach()
        seen[f"gradient of input {position}"] = value.grad
    return Seen(seen, tuple(RUNS))


def wrong(want: Seen, got: Seen) -> list[str]:
    """Names of what differs by more than the rounding of another order of sums."""
    bad = [f"ran {got.runs} instead of {want.runs}"] if want.runs != got.runs else []
    for name, expected in want.tensors.items():
        actual = got.tensors[name]
        if expected is None or actual is None:
            bad += [name] * (expected is not actual)
        elif expected.layout is not actual.layout:
            bad.append(f"layout of {name}")
        elif not torch.allclose(dense(expected), dense(actual), rtol=1e-4, atol=1e-6):
            bad.append(name)
    return bad


def dense(tensor: Tensor) -> Tensor:
    return (tensor.to_dense() if tensor.is_sparse else tensor).to(torch.complex128 if tensor.is_complex() else torch.float64)


@pytest.fixture(autouse=True)
def _sizes_from_data_are_traced() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def refusal(name: str) -> BudgetTooSmall:
    """The error of a budget of one byte."""
    module, inputs = fresh(name)
    with pytest.raises(BudgetTooSmall) as caught:
        torch.compile(module, backend="dyngran", options={"codegen": "eager", "budget": 1, "keep_below": 0}, fullgraph=True)(*inputs)
    torch.compiler.reset()
    return caught.value


@pytest.mark.parametrize("name", MODELS)
def test_trains_as_eager_does_without_a_budget_and_at_the_least_one(name: str) -> None:
    module, inputs = fresh(name)
    want = train_step(module, module, inputs)
    module, inputs = fresh(name)
    free = torch.compile(module, backend="dyngran", options={"codegen": "eager"}, fullgraph=True)
    assert not wrong(want, train_step(free, module, inputs))
    least_bytes = refusal(name).least_peak_bytes
    module, inputs = fresh(name)
    tight = torch.compile(module, backend="dyngran", options={"codegen": "eager", "budget": least_bytes, "keep_below": 0}, fullgraph=True)
    assert not wrong(want, train_step(tight, module, inputs))


def planned(name: str) -> PlannedGraph:
    module, inputs = fresh(name)
    torch.compile(module, backend="dyngran", options={"codegen": "eager"}, fullgraph=True)(*inputs)
    (graph,) = graphs_of(module)
    return graph


def test_copies_of_overwritten_inputs_are_made_once_and_only_where_backward_may_need_them() -> None:
    graph = planned("batch_norm")
    assert graph.strategy is not None
    pinned = [op for op in graph.strategy.problem.ops if op.pinned == "copy of an input that forward overwrites"]
    assert len(pinned) == 2  # mean and variance; the counter of batches feeds nothing that backward reads


def test_a_window_may_begin_where_a_view_of_an_overwritten_input_of_any_size_does() -> None:
    def middle(_: Net, h: Tensor, state: Tensor) -> Tensor:
        gated = h * torch.sin(state[1:].as_strided((64,), (1,)))
        state.mul_(0.5)
        return gated + state.sum()

    def made() -> Made:
        torch.manual_seed(0)
        return Net(middle), (batch(), torch.linspace(-1, 1, 160).reshape(16, 10)[2:6, 1:9])

    module, inputs = made()
    want = train_step(module, module, inputs)
    for budget in (None, "100KiB"):
        torch.compiler.reset()
        module, inputs = made()
        step = torch.compile(module, backend="dyngran", options={"codegen": "eager", "budget": budget}, fullgraph=True, dynamic=True)
        assert not wrong(want, train_step(step, module, inputs))
        (graph,) = graphs_of(module)
        assert graph.strategy is not None
        assert (
            sum(op.pinned == "copy of an input that forward overwrites" for op in graph.strategy.problem.ops) == 2
        )  # of it, of the window


def test_what_the_users_checkpoints_make_is_never_saved() -> None:
    graph = planned("users_checkpoints_with_dropout")
    assert graph.strategy is not None and graph.plan is not None
    ops, values = graph.strategy.problem.ops, graph.strategy.problem.values
    theirs = {write for op in ops if op.never_saved and not op.pinned for write in op.writes}
    assert theirs
    assert not graph.plan.saved & theirs
    assert not any(values[value].kind is Kind.TANGENT for value in graph.plan.saved)


@pytest.mark.parametrize(("name", "upper"), [("rows_chosen_by_the_data", 32), ("size_read_from_a_tensor", 32)])
def test_sizes_that_depend_on_data_are_planned_at_their_bound_and_said(name: str, upper: int) -> None:
    graph = planned(name)
    assert graph.strategy is not None
    assert any(f"upper bound, {upper}" in sentence for sentence in graph.strategy.captured.guesses)


def test_an_unread_second_derivative_is_refused_as_torch_refuses_it() -> None:
    module, inputs = fresh("lists_of_views")
    loss = torch.compile(module, backend="dyngran", options={"codegen": "eager"})(*inputs)
    (gradient,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.square().sum().backward()  # type: ignore[no-untyped-call]


def test_a_graph_that_is_retained_gives_its_gradients_twice() -> None:
    name = "users_checkpoints_with_dropout"
    module, inputs = fresh(name)
    least_bytes = refusal(name).least_peak_bytes
    step = torch.compile(module, backend="dyngran", options={"codegen": "eager", "budget": least_bytes, "keep_below": 0})
    loss = step(*inputs)
    weights = list(module.parameters())
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    second = torch.autograd.grad(loss, weights)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
