"""Two graphs out of one: what crosses is the plan's, what is missing runs again just before its first reader, numbers stay the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch._inductor.config
from joint import Choose, Cut, cut, save_all, save_every_third, save_nothing, traced
from measure import differences, forward_backward, snapshot
from torch import Tensor, fx, nn
from torch.nn import functional as F

from dyngran.compiler import torch_private
from dyngran.compiler.capture import Captured
from dyngran.compiler.partition import partition
from dyngran.passes.errors import GraphBroken
from dyngran.passes.problem import Problem
from dyngran.passes.rewrite import raise_shape_reads
from dyngran.passes.simulate import Simulator


class Chain(nn.Module):
    """Six links: scale, sine; each link's activation is read by its own derivative and by nothing else."""

    def __init__(self, num_links: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.linspace(0.5, 1.5, 64) for _ in range(num_links))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.dropout(torch.sin(x * weight), self.dropout)
        return x.sum()


class Statistics(nn.Module):
    """Batch norm twice: statistics are read, replaced and written back."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out.square().sum()


class Mixed(nn.Module):
    """Dropout, attention and views between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.first(F.dropout(x, 0.25)).view(4, -1, 3, 64).unbind(2)
        mixed = F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None], dropout_p=0.25)
        return self.second(F.dropout(mixed.flatten(0, 2), 0.5)).square().sum()


def x_of(seed: int = 0) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def first_call(make: Callable[[], nn.Module], choose: Choose) -> Cut:
    module = seeded(make)
    made = cut(module, choose)
    made.step(x_of())
    return made


def crossing_names(made: Cut) -> set[str]:
    """What forward returns for backward, parameters and inputs aside."""
    outputs = next(node for node in made.forward.graph.nodes if node.op == "output").args[0]
    num_outputs = made.captured.joint.num_fwd_outputs
    return {node.name for node in outputs[num_outputs:] if isinstance(node, fx.Node) and node.op != "placeholder"}


MODULES = {"chain": Chain, "dropout": lambda: Chain(4, 0.5), "batch norm": Statistics, "attention": Mixed}
every_cut = pytest.mark.parametrize("choose", [save_all, save_every_third, save_nothing])
every_module = pytest.mark.parametrize("name", MODULES)


@every_cut
@every_module
def test_what_crosses_is_exactly_what_the_plan_saves(name: str, choose: Choose) -> None:
    """A crossing node may be a view of the saved value; random states have no node of the joint graph and cross under their own names."""
    made = first_call(MODULES[name], choose)
    captured, saved = made.captured, made.saved[-1]
    nodes = {node.name: node for node in made.joints[-1].graph.nodes}
    crossing = crossing_names(made)
    values = captured.values_of([nodes[one] for one in crossing if one in nodes])
    states = {value for value in saved if captured.nodes[value] is None}
    assert values == saved - states
    assert len([one for one in crossing if one not in nodes]) == len(states)


@every_cut
@every_module
def test_each_recomputed_op_runs_just_before_its_first_reader(name: str, choose: Choose) -> None:
    """Between an op that reads no tangent and its first reader stand only other such ops."""
    made = first_call(MODULES[name], choose)
    calls = [node for node in made.backward.graph.nodes if node.op == "call_function"]
    tangents = [node for node in made.backward.graph.nodes if node.op == "placeholder" and torch_private.is_tangent(node)]
    late: set[fx.Node] = set(tangents)
    for node in calls:
        if any(arg in late for arg in node.all_input_nodes):
            late.add(node)
    position = {node: place for place, node in enumerate(calls)}
    for node in calls:
        if node in late or torch_private.is_getitem(node):
            continue
        first = min((position[user] for user in node.users if user in position), default=None)
        if first is not None:
            between = calls[position[node] + 1 : first]
            assert [other.name for other in between if other in late] == [], node.name


@every_cut
@every_module
def test_the_two_graphs_run_what_the_simulator_schedules(name: str, choose: Choose) -> None:
    """As multisets of ops; the orders are compared through peaks in test_capture."""
    made = first_call(MODULES[name], choose)
    problem = made.captured.problem
    schedules = Simulator(problem).schedule(made.saved[-1])
    ops = {op.name for op in problem.ops}
    for module, schedule in zip((made.forward, made.backward), schedules, strict=True):
        scheduled = Counter(problem.ops[index].name for index in schedule)
        plain = Counter(node.name for node in module.graph.nodes if node.name in ops and node.op == "call_function")
        wrapped = [node for node in module.graph.nodes if isinstance(node.target, torch_private.HIGHER_ORDER_TYPE)]
        extra = [one for one in scheduled - plain if _target(problem, one) not in ("random state", "copy_")]
        assert plain - scheduled == Counter()
        assert len(extra) == len(wrapped), extra  # random ops that run twice are wrapped and so have another name


def _target(problem: Problem, name: str) -> str:
    return next(op.target for op in problem.ops if op.name == name)


@every_cut
@every_module
def test_ops_that_must_run_once_run_once(name: str, choose: Choose) -> None:
    made = first_call(MODULES[name], choose)
    pinned = {op.name for op in made.captured.problem.ops if op.pinned}
    forward = {node.name for node in made.forward.graph.nodes if node.op == "call_function"}
    backward = {node.name for node in made.backward.graph.nodes if node.op == "call_function"}
    assert forward & backward & pinned == set()


@every_cut
@every_module
def test_two_steps_are_bit_for_bit_what_the_default_partition_computes(name: str, choose: Choose) -> None:
    """Loss, gradients, buffers and the state of the random generator after each step."""
    one, other = seeded(MODULES[name]), seeded(MODULES[name])
    want = cut(one, save_all).step
    torch.manual_seed(5)
    expected = [snapshot(one, forward_backward(want, (x_of(step),))) for step in range(2)]
    got = cut(other, choose).step
    torch.manual_seed(5)
    found = [snapshot(other, forward_backward(got, (x_of(step),))) for step in range(2)]
    for left, right in zip(expected, found, strict=True):
        assert differences(left, right) == []


@pytest.mark.parametrize("choose", [save_every_third, save_nothing])
def test_a_dropped_mask_is_drawn_again_and_the_users_stream_does_not_notice(choose: Choose) -> None:
    """Against eager PyTorch: same loss and gradients, and the next number drawn after the step is the same."""
    module, other = Chain(4, 0.5), Chain(4, 0.5)
    made = cut(other, choose)
    torch.manual_seed(9)
    want, next_want = snapshot(module, forward_backward(module, (x_of(),))), torch.rand(3)
    torch.manual_seed(9)
    got, next_got = snapshot(other, forward_backward(made.step, (x_of(),))), torch.rand(3)
    torch.testing.assert_close(got.loss, want.loss)
    for name, gradient in want.gradients.items():
        torch.testing.assert_close(got.gradients[name], gradient, rtol=1e-5, atol=1e-6)
    assert torch.equal(next_want, next_got)
    assert any("rng" in str(node.target) for node in made.backward.graph.nodes)


def test_backward_does_not_move_the_stream_even_if_numbers_are_drawn_between() -> None:
    """The generator's state at the start of backward is its state at the end, wherever it is by then."""
    module = Chain(4, 0.5)
    made = cut(module, save_nothing)
    torch.manual_seed(9)
    loss = made.step(x_of())
    torch.manual_seed(1234)
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_pinned_value_that_is_not_saved_is_refused_by_name() -> None:
    """The simulator's `normalize` always saves it; a set from elsewhere that does not is a fault of dyngran's, never a wrong gradient."""

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(64)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = torch.sin(self.norm(x))
            return out.sum()

    captured = traced(Once(), (x_of(),))
    pinned = [v for v in save_nothing(captured) if captured.problem.ops[captured.problem.values[v].producer or 0].pinned]
    assert pinned
    with pytest.raises(GraphBroken, match="must run once"):
        partition(captured, frozenset())


def test_every_saved_set_of_a_small_graph_gives_the_same_gradients() -> None:
    """All subsets of the candidates of two links, not only those a planner would pick."""
    module = Chain(2)
    candidates = len(Simulator(first_call(lambda: Chain(2), save_nothing).captured.problem).candidates)
    want = None
    for subset in range(2**candidates):

        def choose(captured: Captured, subset: int = subset) -> frozenset[int]:
            simulator = Simulator(captured.problem)
            return simulator.normalize(v for place, v in enumerate(simulator.candidates) if subset >> place & 1)

        module.zero_grad()
        loss = forward_backward(cut(module, choose).step, (x_of(),))
        got = snapshot(module, loss)
        want = want or got
        assert differences(want, got) == [], subset


@pytest.mark.parametrize("choose", [save_all, save_every_third])
def test_what_only_an_unread_draw_reads_is_not_saved(choose: Choose) -> None:
    """Where draws count as effects, extraction keeps them all in backward, and with this one the noisy input. Forward writes to that
    afterwards, and autograd refuses a saved tensor that was written to."""
    weight = torch.linspace(0.5, 1.5, 64).requires_grad_()
    leaf = x_of().requires_grad_()

    def function(noisy: Tensor) -> Tensor:
        drawn = F.dropout(noisy, 0.5)
        gate = torch.sigmoid(noisy)
        noisy.mul_(0.5)
        return drawn.mean() + (gate * weight).sin().mean()

    def gradients(step: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(9)
        return torch.autograd.grad(step(leaf * 1), (leaf, weight))

    made = cut(function, choose)
    with torch._inductor.config.patch(fallback_random=True):
        assert all(torch.equal(want, got) for want, got in zip(gradients(function), gradients(made.step), strict=True))
    read = {node.name for node in made.backward.graph.nodes if node.op == "placeholder" and node.users}
    primals = {node.name for node in made.backward.graph.nodes if node.op == "placeholder" and torch_private.is_primal(node)}
    assert primals <= read


def test_sizes_are_read_next_to_what_makes_the_tensor() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    sin = graph.call_function(torch.ops.aten.sin.default, (x,))
    cos = graph.call_function(torch.ops.aten.cos.default, (sin,))
    rows = graph.call_function(torch.ops.aten.sym_size.int, (sin, 0))
    columns = graph.call_function(torch.ops.aten.sym_size.int, (x, 1))
    graph.output((cos, rows, columns))
    module = raise_shape_reads(fx.GraphModule({}, graph))
    assert [node.name for node in module.graph.nodes] == ["x", "sym_size_int_1", "sin_default", "sym_size_int", "cos_default", "output"]
    assert module(torch.zeros(2, 3))[1:] == (2, 3)
