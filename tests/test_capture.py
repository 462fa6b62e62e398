"""The problem of a joint graph: what counts as one value, what as one op, where it may run, and what it is to the person who trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from brute_force import naive_replay
from joint import Choose, cut, save_all, save_every_third, save_nothing, traced
from measure import forward_backward, held_tensors, measured_peak
from torch import Tensor, fx, nn
from torch.nn import functional as F

from dyngran.compiler.capture import CPU_RANDOM_STATE_BYTES, TAKE_OVER, Captured
from dyngran.compiler.pricing import device_spec, price_nodes
from dyngran.compiler.registry import graphs_of
from dyngran.passes.problem import Kind, Op, Side, Value
from dyngran.passes.profile_cache import Measurement
from dyngran.passes.simulate import Simulator

ROWS, WIDTH = 256, 1024
ONE_MIB = ROWS * WIDTH * 4


def x_of(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


class Sines(nn.Module):
    """x → sin(sin(x · weight)) summed: every activation is exactly one MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(torch.sin(x * self.weight)).sum()


def ops_of(captured: Captured, target: str) -> list[Op]:
    return [op for op in captured.problem.ops if target in op.target]


def written(captured: Captured, target: str) -> list[Value]:
    return [captured.problem.values[write] for op in ops_of(captured, target) for write in op.writes]


def test_every_activation_of_a_chain_is_one_value_of_its_size() -> None:
    captured = traced(Sines(), (x_of(),))
    assert [value.size_bytes for value in written(captured, "aten.sin.")] == [ONE_MIB, ONE_MIB]
    kinds = [value.kind for value in captured.problem.values if value.producer is None]
    assert sorted(kind.value for kind in kinds) == ["input", "parameter", "tangent"]
    (loss,) = (value for value in captured.problem.values if value.kind is Kind.OUTPUT)
    assert loss.size_bytes == 4
    (gradient,) = (value for value in captured.problem.values if value.kind is Kind.GRADIENT)
    assert gradient.size_bytes == WIDTH * 4


def test_static_bytes_are_the_callers_tensors() -> None:
    captured = traced(Sines(), (x_of(),))
    assert captured.problem.static_bytes == {Kind.PARAMETER: WIDTH * 4, Kind.INPUT: ONE_MIB}


class Views(nn.Module):
    """Views, expands and a split of one product: reads of any of them are reads of the product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        product = x * self.weight
        left, right = product.view(2, -1).t().unsqueeze(0).unbind(-1)
        return (torch.sin(left) * torch.sin(right)).sum()


def test_views_share_the_storage_of_their_base_and_are_no_ops() -> None:
    captured = traced(Views(), (x_of(),))
    product = ops_of(captured, "aten.mul")[0].writes
    for op in ops_of(captured, "aten.sin."):
        assert op.reads == product
    assert [op.target for op in captured.problem.ops if op.side is not Side.BACKWARD] == [
        "aten.mul.Tensor",
        "aten.sin.default",
        "aten.sin.default",
        "aten.mul.Tensor",
        "aten.sum.default",
        "aten.cos.default",
        "aten.cos.default",
    ]


def test_members_of_an_op_with_several_results_are_values_of_their_own() -> None:
    class TopK(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            best, where = (x * self.weight).topk(16, dim=-1)
            return (best * where).sum()

    captured = traced(TopK(), (x_of(),))
    sizes = [value.size_bytes for value in written(captured, "topk")]
    assert sizes == [ROWS * 16 * 4, ROWS * 16 * 8]  # float32 values, int64 positions
    assert len(ops_of(captured, "topk")) == 1
    assert ops_of(captured, "getitem") == []


class ThreeSides(nn.Module):
    """``sin`` feeds the loss, the mask only matters to backward, and the rest depends on a tangent."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.weight).sum()


def test_the_side_of_an_op_is_where_the_graph_lets_it_run() -> None:
    captured = traced(ThreeSides(), (x_of(),))
    assert [op.side for op in ops_of(captured, "aten.sin.")] == [Side.FORWARD]
    assert [op.side for op in ops_of(captured, "aten.cos.")] == [Side.FREE]  # the derivative of sin: reads no tangent
    assert ops_of(captured, "aten.mul")[0].side is Side.FORWARD
    assert {op.side for op in ops_of(captured, "aten.mul")[1:]} == {Side.BACKWARD}
    kinds = {value.name: value.kind for value in written(captured, "aten.cos.")}
    assert set(kinds.values()) == {Kind.ACTIVATION}


def test_equal_subexpressions_are_one_op() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return (torch.sin(x * self.weight) + torch.sin(x * self.weight)).sum()

    captured = traced(Twice(), (x_of(),))
    assert len(ops_of(captured, "aten.sin.")) == 1


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(F.dropout(x * self.weight, 0.5)).sum()


def test_a_random_op_reads_the_state_that_a_value_of_the_generators_size_holds() -> None:
    captured = traced(Dropout(), (x_of(),))
    (draw,) = (op for op in captured.problem.ops if any(captured.problem.values[read].name.endswith("_state") for read in op.reads))
    state = captured.problem.values[draw.reads[-1]]
    assert state.size_bytes == CPU_RANDOM_STATE_BYTES == torch.get_rng_state().nbytes
    assert captured.nodes[state.index] is None
    maker = captured.problem.ops[state.producer or 0]
    assert maker.pinned and maker.cost_us == 0 and maker.index == draw.index - 1
    assert draw.rerun_bytes == CPU_RANDOM_STATE_BYTES


def test_a_random_op_that_runs_once_sets_no_state_aside() -> None:
    captured = traced(Dropout(), (x_of(),))
    plain = replace(captured.problem, ops=tuple(replace(op, rerun_bytes=0) for op in captured.problem.ops))
    for saved in (save_all(captured), save_nothing(captured)):
        is_again = any(captured.problem.ops[index].rerun_bytes for index in Simulator(captured.problem).schedule(saved)[1])
        timeline, less = Simulator(captured.problem).timeline(saved), Simulator(plain).timeline(saved)
        added = [a - b for a, b in zip(timeline.live_bytes, less.live_bytes, strict=True)]
        assert sorted(added)[-2:] == [0, CPU_RANDOM_STATE_BYTES if is_again else 0]
        assert is_again is (saved == save_nothing(captured))


@pytest.mark.parametrize("choose", [save_all, save_every_third, save_nothing])
@pytest.mark.parametrize("name", ["dropout", "images"])
def test_the_simulated_peak_is_that_of_a_naive_replay(name: str, choose: Choose) -> None:
    """With states that are set aside, and with saved results whose siblings are recomputed."""
    make, shape = MODELS[name]
    captured = traced(make(), (torch.randn(*shape),))
    saved = choose(captured)
    simulator = Simulator(captured.problem)
    peak = simulator.evaluate(saved).peak_bytes
    assert peak == naive_replay(captured.problem, saved).peak_bytes
    assert peak == captured.problem.total_static_bytes + max(simulator.timeline(saved).live_bytes)


def test_batch_norm_statistics_are_written_back_once_and_pinned() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    captured = traced(module, (torch.randn(4, 3, 16, 16),))
    write_back = captured.problem.ops[-1]
    assert write_back.name == "write back mutated inputs"
    assert write_back.pinned and write_back.side is Side.FORWARD
    held = {captured.problem.values[read].size_bytes for read in write_back.reads}
    assert held == {8 * 4, 8}  # running mean and variance of 8 channels, the counter
    kinds = [value.kind for value in captured.problem.values]
    assert kinds.count(Kind.BUFFER) in (0, 3)  # torch.compile hands buffers over as such, or as plain inputs
    assert not set(write_back.reads) & captured.problem.forward_outputs


def test_a_checkpointed_region_of_the_users_is_marked() -> None:
    class Checkpointed(Sines):
        def forward(self, x: Tensor) -> Tensor:
            inner = torch.utils.checkpoint.checkpoint(lambda y: torch.sin(torch.sin(y * self.weight)), x, use_reentrant=False)
            assert isinstance(inner, Tensor)
            return inner.sum()

    captured = traced(Checkpointed(), (x_of(),))
    assert any(op.never_saved for op in ops_of(captured, "aten.sin."))


def test_regions_are_the_paths_that_the_user_gave_to_modules() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    captured = traced(module, (torch.randn(4, 8),))
    assert {op.region for op in ops_of(captured, "addmm")} == {"0", "2"}


def measured_price(nodes: Sequence[fx.Node], device: torch.device) -> list[Measurement]:
    return price_nodes(
        nodes,
        device,
        spec=device_spec(device, None),
        limit_bytes=None,
        fused=False,
        channels_last=False,
        measure=True,
        progress=lambda _text: None,
    )


def test_workspaces_do_not_depend_on_what_profiling_may_allocate() -> None:
    """Else a plan's peak, and the least peak that a refusal names, would change with the budget."""
    module = nn.Sequential(nn.Conv2d(3, 2, 3, stride=2), nn.Conv2d(2, 8, 3), nn.Flatten(), nn.Linear(8 * 29 * 29, 2))
    found = set()
    for limit_bytes in (0, *(2**power for power in range(10, 22)), None):

        def price(nodes: Sequence[fx.Node], device: torch.device, limit_bytes: int | None = limit_bytes) -> list[Measurement]:
            spec = device_spec(device, None)
            return price_nodes(
                nodes,
                device,
                spec=spec,
                limit_bytes=limit_bytes,
                fused=False,
                channels_last=False,
                measure=True,
                progress=lambda _text: None,
            )

        made = cut(module, save_nothing, price=price)
        made.step(torch.ones(4, 3, 64, 64))
        found.add(tuple(op.workspace_bytes for op in made.captured.problem.ops))
    (workspaces,) = found
    assert any(workspaces)


def mlp() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(3)))


class MeanSquare(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: Tensor) -> Tensor:
        out: Tensor = self.body(*inputs)
        return out.square().mean()


class Wide(nn.Module):
    """Branches of different sizes that join again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(128, 512), nn.Linear(128, 64), nn.Linear(576, 128)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([torch.tanh(self.first(x)), F.softplus(self.second(x))], dim=-1)
        return x + torch.sigmoid(self.third(joined))


class Head(nn.Module):
    """Logits far larger than anything else, from a matmul without a bias over three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 2048, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).softmax(dim=-1)


class Columns(nn.Module):
    """Writes late columns of a tensor one by one: copies of all the memory behind them, and not of the columns alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for column in (-3, -2, -1):
            out[:, column] = torch.tanh(self.linear(x[:, column]))
        return out


class Speech(nn.Module):
    """Convolutions over time with layer norms over channels: their gradients come laid out otherwise than the graph's strides say."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(1, 32, 10, 5), nn.Conv1d(32, 32, 3, 2), nn.Conv1d(32, 32, 3, 2)])
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in self.convs])

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.gelu(norm(conv(x).transpose(1, 2)).transpose(1, 2))
        return x


class Conjugated(nn.Module):
    """Operands that are to be conjugated or negated when they are read: kernels copy them for that."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(64, 64, dtype=torch.complex64) / 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, x)
        for weight in self.weights:
            z = (z @ weight.mH).conj().tanh()
        return torch.tanh(z.conj().imag)


MODELS = {
    "head": (lambda: MeanSquare(Head()), (4, 64, 32)),
    "sines": (Sines, (ROWS, WIDTH)),
    "mlp": (lambda: MeanSquare(mlp()), (512, 128)),
    "wide": (lambda: MeanSquare(Wide()), (512, 128)),
    "dropout": (Dropout, (ROWS, WIDTH)),
    "columns": (lambda: MeanSquare(Columns()), (2, 128, 64)),
    "speech": (lambda: MeanSquare(Speech()), (4, 1, 8000)),
    "conjugated": (lambda: MeanSquare(Conjugated()), (512, 64)),
    "norms": (lambda: MeanSquare(nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.SiLU(), nn.LayerNorm(512))), (512, 128)),
    "images": (lambda: MeanSquare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))), (4, 3, 32, 32)),
}


CASES = [(name, choose) for name in MODELS for choose in (save_all, save_every_third, save_nothing)]


@pytest.mark.parametrize(("name", "choose"), CASES)
def test_the_simulated_peak_is_what_eager_code_allocates(name: str, choose: Choose) -> None:
    """Within 4 KiB of peaks of 0.5 to 6 MiB: scalars that the engine makes itself are not in the graph."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    module, x = make(), torch.randn(*shape)
    made = cut(module, choose, price=measured_price)
    forward_backward(made.step, (x,))
    module.zero_grad()
    measured = measured_peak(lambda: forward_backward(made.step, (x,)), held_tensors(module, (x,)))
    predicted = Simulator(made.captured.problem).evaluate(made.saved[-1]).peak_bytes
    assert abs(predicted - measured) <= 4096, (predicted, measured)


class Pair(nn.Module):
    """Two convolutions whose gradients come in channels-last layout where the input does; the weights stay row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.Conv2d(16, 512, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(torch.tanh(self.small(x))).mean()


def test_gradients_in_another_layout_are_copied_one_after_the_other() -> None:
    """Autograd keeps a gradient as it comes only if it lies as its parameter does; small images make that the peak of the step."""
    module, x = Pair(), torch.randn(2, 8, 2, 2).to(memory_format=torch.channels_last)
    step = torch.compile(module, backend="dyngran", options={"codegen": "eager", "keep_below": 0})
    forward_backward(step, (x,))
    (graph,) = graphs_of(module)
    assert graph.strategy is not None and graph.plan is not None
    (end,) = (op for op in graph.strategy.problem.ops if op.name == TAKE_OVER)
    assert end.side is Side.BACKWARD and end.workspace_bytes == module.large.weight.nbytes
    module.zero_grad()
    assert measured_peak(lambda: forward_backward(step, (x,)), held_tensors(module, (x,))) == graph.plan.peak_bytes
