"""Prescribed orders run: each op as often and in the order that the schedule says, with the gradients of the unplanned step and the
memory that the replay foresees.

Schedules start from the simulator's for a saved set; then ops run again just before readers of what they make, and independent
neighbours change places. No planner would write such orders, so nothing is right by habit.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import joint
import pytest
import torch
from joint import Cut, cut, save_all, save_every_third, save_nothing, traced
from measure import Snapshot, differences, forward_backward, held_tensors, measured_peak, snapshot
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dyngran
from dyngran.compiler import registry
from dyngran.compiler.capture import Captured
from dyngran.compiler.order_rules import order_rules
from dyngran.compiler.partition import check_runnable, partition
from dyngran.compiler.plans.planfile import GraphPlan, PlanDocument, load_plan, save_plan
from dyngran.compiler.unroll import nodes_of_ops
from dyngran.passes.errors import BudgetTooSmall, GraphBroken, InvalidOption, PlanMismatch
from dyngran.passes.order_rules import OrderRules, at_the_ends, check_order
from dyngran.passes.plan import Action, Decision, Plan, Schedule
from dyngran.passes.problem import Op, Problem, Side
from dyngran.passes.schedule import check_schedule, replay_schedule
from dyngran.passes.simulate import Simulator

CLOSE = 0.01  # of the peak: far below one value of these models


class Mlp(nn.Module):
    """Four layers with an activation each; large enough that a value more or less shows in the peak."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(torch.tanh(layer(x)))
        return x.square().mean()


class Dropped(nn.Module):
    """Dropout between layers: masks are drawn in forward, and again wherever the schedule says."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(F.silu(layer(x)), 0.3)
        return x.square().mean()


class ConvNet(nn.Module):
    """Batch norm updates its statistics once, whatever runs twice."""

    def __init__(self) -> None:
        super().__init__()
        parts = [(nn.Conv2d(c, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for c in (3, 16, 16)]
        self.body = nn.Sequential(*(module for part in parts for module in part), nn.MaxPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out.square().mean()


class Block(nn.Module):
    """One transformer block: views of one projection, attention with dropout, a residual stream, layer norms with three results."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.project(self.first(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        weights = F.dropout(torch.softmax(query @ key.transpose(-1, -2) / 4, -1), 0.1)
        x = x + F.dropout(self.out((weights @ value).transpose(1, 2).reshape(batch, length, width)), 0.1)
        return (x + self.down(F.gelu(self.up(self.second(x))))).square().mean()


@dataclass(frozen=True, slots=True)
class Model:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def made(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        return self.make(), (torch.randn(self.shape, generator=torch.Generator().manual_seed(1)),)


MODELS = {
    "mlp": Model(Mlp, (1024, 256)),
    "dropout": Model(Dropped, (1024, 256)),
    "convnet": Model(ConvNet, (8, 3, 32, 32)),
    "block": Model(Block, (8, 64, 64)),
}
CHOICES = {"all": save_all, "third": save_every_third, "nothing": save_nothing}


def written_out(problem: Problem, saved: frozenset[int]) -> tuple[list[int], list[int]]:
    """The simulator's order for a saved set. It runs what makes a random state only where that is saved; a schedule, before each draw."""
    forward, backward = Simulator(problem).schedule(saved)
    states = {op.index for op in problem.ops if op.target == "random state"}
    full = [one for index in forward if index not in states for one in ((index - 1, index) if index - 1 in states else (index,))]
    return full, backward


def plain(problem: Problem, saved: frozenset[int]) -> Schedule:
    forward, backward = written_out(problem, saved)
    return Schedule(tuple(forward), tuple(backward), saved)


class Writer:
    """Draws schedules of one graph that nobody would plan, and keeps to those that can run."""

    def __init__(self, captured: Captured, seed: int) -> None:
        self.captured, self.problem = captured, captured.problem
        self.rules = order_rules(captured)
        self.draw = random.Random(seed)
        once = {op for op, _ in self.rules.once}
        self.repeatable = {op.index for op in self.problem.ops if op.side is not Side.BACKWARD and not op.pinned and op.index not in once}

    def schedule(self, saved: frozenset[int], *, num_again: int = 12, num_swaps: int = 60) -> Schedule:
        forward, backward = written_out(self.problem, saved)
        for part in (forward, backward, backward):
            for _ in range(num_again // 3):
                self._run_again(forward, backward, part)
        for _ in range(num_swaps):
            self._swap(forward, backward, self.draw.choice((forward, backward)))
        return without_dead_runs(self.problem, Schedule(tuple(forward), tuple(backward)))

    def _run_again(self, forward: list[int], backward: list[int], part: list[int]) -> None:
        """Some of what an op reads is made anew just before it, and some of what that needs, and so on."""
        position = self.draw.randrange(len(part))
        chain: set[int] = set()
        stack = [part[position]]
        while stack:
            wanted = self._makers(stack.pop())
            found = [op for op in wanted if self.draw.random() < 0.7]
            chain.update(found)
            stack += found
        before = list(part)
        part[position:position] = sorted(chain)
        if not self._runs(forward, backward):
            part[:] = before

    def _makers(self, index: int) -> list[int]:
        producers = (self.problem.values[value].producer for value in self.problem.ops[index].reads)
        return [op for op in producers if op is not None and op in self.repeatable]

    def _swap(self, forward: list[int], backward: list[int], part: list[int]) -> None:
        position = self.draw.randrange(len(part) - 1)
        part[position : position + 2] = reversed(part[position : position + 2])
        if not self._runs(forward, backward):
            part[position : position + 2] = reversed(part[position : position + 2])

    def _runs(self, forward: list[int], backward: list[int]) -> bool:
        schedule = Schedule(tuple(forward), tuple(backward))
        try:
            check_schedule(self.problem, schedule)
            check_order(self.problem, self.rules, schedule)
        except ValueError:
            return False
        return True


def without_dead_runs(problem: Problem, schedule: Schedule) -> Schedule:
    """Runs again whose results nobody reads are left out by the partition, and so here."""
    order, num_forward = [*schedule.forward, *schedule.backward], len(schedule.forward)
    while True:
        read = set()
        newest: dict[int, int] = {}
        for position, index in enumerate(order):
            if position == num_forward:
                read.update(newest[value] for value in problem.forward_outputs)
            read.update(newest[value] for value in problem.ops[index].reads if value in newest)
            newest.update((value, position) for value in problem.ops[index].writes)
        read.update(newest[value] for value in problem.gradients if value in newest)
        dead = [
            position
            for position, index in enumerate(order)
            if order.count(index) > 1 and position not in read and problem.ops[index].target != "random state"
        ]
        if not dead:
            return Schedule(tuple(order[:num_forward]), tuple(order[num_forward:]))
        del order[dead[-1]]
        num_forward -= dead[-1] < num_forward


def cut_with(monkeypatch: pytest.MonkeyPatch, module: nn.Module, write: Callable[[Captured], Schedule]) -> tuple[Cut, list[Schedule]]:
    """`joint.cut`, with a schedule for each graph."""
    schedules: list[Schedule] = []

    def choose(captured: Captured) -> frozenset[int]:
        schedules.append(write(captured))
        return replay_schedule(captured.problem, schedules[-1]).saved

    monkeypatch.setattr(joint, "partition", lambda captured, saved: partition(captured, saved, schedules[-1]))
    return cut(module, choose), schedules


def call_order(module: fx.GraphModule, captured: Captured) -> list[str]:
    """Names of the ops that a graph runs, without what tells their runs apart."""
    ops = {node.name for node in captured.storages.ops}
    names = [re.sub(r"_run\d+$", "", node.name) for node in module.graph.nodes if node.op == "call_function"]
    return [name for name in names if name in ops]


every_model = pytest.mark.parametrize("name", MODELS)
every_choice = pytest.mark.parametrize("choice", CHOICES)


@every_model
@every_choice
def test_a_drawn_schedule_runs_op_by_op_and_bit_for_bit(monkeypatch: pytest.MonkeyPatch, name: str, choice: str) -> None:
    """Call order of both graphs; loss, gradients, buffers and the state of the random generator after each of two steps."""
    found: list[list[Snapshot]] = []
    for write in (None, lambda captured: Writer(captured, 7).schedule(CHOICES[choice](captured))):
        module, inputs = MODELS[name].made()
        made, schedules = (cut(module, save_all), []) if write is None else cut_with(monkeypatch, module, write)
        torch.manual_seed(5)
        found.append([snapshot(module, forward_backward(made.step, inputs)) for _ in range(2)])
    for want, got in zip(*found, strict=True):
        assert differences(want, got) == []
    assert max(Counter((*schedules[0].forward, *schedules[0].backward)).values()) > 2
    assert_runs(made, schedules[0])


def assert_runs(made: Cut, schedule: Schedule) -> None:
    nodes = nodes_of_ops(made.captured)
    for part, graph in ((schedule.forward, made.forward), (schedule.backward, made.backward)):
        assert call_order(graph, made.captured) == [node.name for index in part if (node := nodes[index]) is not None]


@pytest.mark.parametrize("name", ["mlp", "convnet"])
@every_choice
def test_the_simulators_schedule_is_what_its_saved_set_runs(monkeypatch: pytest.MonkeyPatch, name: str, choice: str) -> None:
    """The same ops in the same order, whether the order is prescribed or not (where nothing random runs twice under another name)."""
    module, inputs = MODELS[name].made()
    free = cut(module, CHOICES[choice])
    free.step(*inputs)
    made, schedules = cut_with(monkeypatch, module, lambda captured: plain(captured.problem, CHOICES[choice](captured)))
    made.step(*inputs)
    assert_runs(made, schedules[0])
    for prescribed, other in ((made.forward, free.forward), (made.backward, free.backward)):
        assert call_order(prescribed, made.captured) == call_order(other, free.captured)


def op_named(problem: Problem, name: str) -> int:
    return next(op.index for op in problem.ops if op.name == name)


def test_a_saved_copy_is_read_although_a_sibling_was_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer norm's statistics are saved and its output is not: it runs again for the output, and backward reads the saved statistics."""

    def write(captured: Captured) -> Schedule:
        problem = captured.problem
        norm = problem.ops[op_named(problem, "native_layer_norm")]
        return plain(problem, Simulator(problem).normalize({*save_all(captured)} - {norm.writes[0]}))

    module, inputs = MODELS["block"].made()
    made, schedules = cut_with(monkeypatch, module, write)
    made.step(*inputs)
    norm = made.captured.problem.ops[op_named(made.captured.problem, "native_layer_norm")]
    assert norm.index in schedules[0].backward and set(norm.writes[1:]) <= schedules[0].saved
    again = next(node for node in made.backward.graph.nodes if node.name.startswith("native_layer_norm_run"))
    members = [user.args[1] for user in again.users]
    assert members == [0]


def test_a_random_op_may_run_any_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again before each reader of its mask, on both sides: one mask, and the stream moves as if it had run once."""

    def write(captured: Captured) -> Schedule:
        problem = captured.problem
        mask = problem.ops[order_rules(captured).draws[0]]
        forward, backward = written_out(problem, save_all(captured))
        for part in (forward, backward):
            for place in reversed(range(len(part))):
                if set(mask.writes) & set(problem.ops[part[place]].reads):
                    part[place:place] = [mask.index]
        return Schedule(tuple(forward), tuple(backward))

    found = []
    for is_planned in (False, True):
        module, inputs = MODELS["dropout"].made()
        made = cut_with(monkeypatch, module, write)[0] if is_planned else cut(module, save_all)
        torch.manual_seed(5)
        found.append(snapshot(module, forward_backward(made.step, inputs)))
    assert differences(*found) == []
    name = made.captured.problem.ops[order_rules(made.captured).draws[0]].name
    runs = [call_order(graph, made.captured).count(name) for graph in (made.forward, made.backward)]
    assert runs[0] == 2 and runs[1] >= 2


class Picked(nn.Module):
    """How many rows go on is in the data, and asserted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nonzero(x.detach().sum(1) > 0).squeeze(1)
        return self.second(torch.tanh(F.gelu(self.first(x[rows])))).square().sum()


def test_what_asserts_a_size_may_run_again_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison that it reads can be no saved value, and is made again from the size."""

    def write(captured: Captured) -> Schedule:
        problem = captured.problem
        forward, backward = written_out(problem, save_all(captured))
        asserts = [op.index for op in problem.ops if op.name.startswith("_assert_scalar")]
        assert asserts
        return Schedule(tuple(forward), (*asserts, *backward))

    torch.manual_seed(0)
    module, x = Picked(), torch.randn(40, 16)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        want = snapshot(module, forward_backward(cut(module, save_all).step, (x,)))
        module.zero_grad()
        made = cut_with(monkeypatch, module, write)[0]
        assert differences(want, snapshot(module, forward_backward(made.step, (x,)))) == []
    assert any("_assert_scalar" in node.name for node in made.backward.graph.nodes)


class Sized(nn.Module):
    """Sizes are symbols, and one is read off a tensor's data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[0]
        out = torch.tanh(self.first(x)).view(size // 2, 2, 16) * (size * 2)
        out = F.dropout(torch.sin(out), 0.2).reshape(size, 16)
        few = torch.sin(out)[torch.nonzero(out.detach().sum(1) > 0).squeeze(1)]
        return self.second(few).exp().sum() / out.detach().abs().sum().item() / x.shape[0]


class Returning(nn.Module):
    """Views and members of tuples among the outputs, one of them a batch norm's; nothing of them is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out = torch.tanh(self.norm(self.first(x)))
        left, right = torch.sin(out).chunk(2, -1)
        return out.t(), left * 2, self.second(out), torch.cat([right, right.exp()], 1), torch.topk(out, 3).values, out.detach()


class AddsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.state = state
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.state.add_(gradient.detach().mean())
        return gradient * torch.cos(x), None


class Writing(nn.Module):
    """Buffers are read and overwritten: a mean in forward, a sum in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.register_buffer("mean", torch.ones(16))
        self.register_buffer("sum", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.first(x)) * self.mean.clone()
        self.mean.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return (AddsInBackward.apply(torch.exp(out), self.sum) * self.mean.clone()).square().sum()


class Checkpointed(nn.Module):
    """The user recomputes regions with dropout in them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda one: F.dropout(torch.tanh(self.first(one)), 0.3), torch.sin(x), use_reentrant=False)
        return self.second(x).square().sum()


class Branching(nn.Module):
    """A higher-order operator, run once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.first(x))
        out = torch.cond(out.sum() > 0, lambda one: torch.sin(one) * 2, lambda one: torch.cos(one), (out,))
        return self.second(torch.exp(out)).square().sum()


ODD = {module.__name__: module for module in (Sized, Returning, Writing, Checkpointed, Branching)}


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ODD)
def test_what_is_no_plain_op_is_placed_with_what_it_belongs_to(monkeypatch: pytest.MonkeyPatch, name: str, seed: int) -> None:
    """Symbols, views, members, overwritten buffers, checkpoint regions, bodies: as the unplanned graph, in two steps."""
    found: list[list[list[Tensor]]] = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        module, x = ODD[name](), torch.randn(12, 16)
        if name == "Sized":
            torch._dynamo.mark_dynamic(x, 0)

        def write(captured: Captured) -> Schedule:
            return Writer(captured, seed).schedule((save_nothing, save_every_third)[seed](captured))

        made = cut_with(monkeypatch, module, write)[0] if is_planned else cut(module, save_all)
        torch.manual_seed(5)
        steps = []
        for _ in range(2):
            out = made.step(x)
            loss = sum(one.square().sum() for one in out if one.requires_grad) if isinstance(out, tuple) else out
            loss.backward()
            held = [loss.detach(), *(p.grad for p in module.parameters()), *module.buffers(), torch.get_rng_state()]
            steps.append([one.clone() for one in held])
        found.append(steps)
    for want, got in zip(*found, strict=True):
        assert all(map(torch.equal, want, got))


def captured_with(name: str) -> Captured:
    module, inputs = MODELS[name].made()
    return traced(module, inputs)


def test_draws_out_of_order_are_refused() -> None:
    """The second mask would be drawn from the numbers of the first."""
    captured = captured_with("dropout")
    schedule = plain(captured.problem, save_all(captured))
    first, second = order_rules(captured).draws[:2]
    swapped = {first: second, second: first, first - 1: second - 1, second - 1: first - 1}
    with pytest.raises(ValueError, match=r"must run before|nothing has made"):
        check_runnable(captured, replace(schedule, forward=tuple(swapped.get(op, op) for op in schedule.forward)))
    check_runnable(captured, schedule)


def test_a_schedule_that_cannot_run_is_a_fault_of_the_planner() -> None:
    captured = captured_with("convnet")
    problem = captured.problem
    saved = save_all(captured)
    schedule = plain(problem, saved)
    pinned = next(op.index for op in problem.ops if op.pinned and op.index in schedule.forward)
    with pytest.raises(GraphBroken, match="must not run twice"):
        partition(captured, saved, replace(schedule, backward=(pinned, *schedule.backward)))
    with pytest.raises(GraphBroken, match="must run in backward"):
        partition(captured, saved, replace(schedule, backward=schedule.backward[:-1]))
    with pytest.raises(GraphBroken, match="the plan does not save it"):
        partition(captured, frozenset(sorted(saved)[1:]), schedule)
    fused = replace(captured, problem=replace(problem, fused=True))
    with pytest.raises(InvalidOption, match="Inductor orders its kernels itself"):
        partition(fused, saved, schedule)


def test_what_the_caller_does_is_moved_to_the_ends_of_forward() -> None:
    """Statistics that are written back when forward has ended are held until then, wherever a planner put that."""
    captured = captured_with("convnet")
    rules = order_rules(captured)
    schedule = plain(captured.problem, save_all(captured))
    early = replace(schedule, forward=(*schedule.forward[:-2], schedule.forward[-1], schedule.forward[-2]))
    assert rules.last == schedule.forward[-1:]
    with pytest.raises(ValueError, match="write back mutated inputs must come after all"):
        check_runnable(captured, early)
    assert at_the_ends(rules, early) == schedule


RULES = {
    "first": (OrderRules(first=(1,)), "op1 must come before all"),
    "last": (OrderRules(last=(0,)), "op0 must come after all"),
    "draws": (OrderRules(draws=(1, 0)), "op1 draws random numbers and must run before op0|op0 draws"),
    "fences": (OrderRules(fences=((0, 2),)), "op0 must not run after op2"),
    "needs": (OrderRules(needs=((2, 1),)), "op1 takes a number from op2"),
    "once": (OrderRules(once=((0, "it is so"),)), "op0 runs 2 times but must not run twice: it is so"),
}


@pytest.mark.parametrize("name", RULES)
def test_each_rule_of_order_refuses_by_name(name: str) -> None:
    ops = tuple(
        Op(index=i, name=f"op{i}", target="op", side=Side.FORWARD if i < 2 else Side.BACKWARD, reads=(), writes=(), cost_us=1.0)
        for i in range(3)
    )
    problem = Problem(values=(), ops=ops, forward_outputs=frozenset(), gradients=frozenset())
    rules, message = RULES[name]
    check_order(
        problem, OrderRules(first=(0,), last=(1,), draws=(0, 1, 2), fences=((0, 1), (1, 2)), needs=((0, 2),)), Schedule((0, 1), (2,))
    )
    with pytest.raises(ValueError, match=message):
        check_order(problem, rules, Schedule((0, 1), (2, 0)))


def compiled(module: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> Any:
    """After one step, so that it is planned."""
    torch._dynamo.reset()
    module.zero_grad()
    step = torch.compile(module, backend="dyngran", options={"codegen": "eager", **options})
    forward_backward(step, inputs)
    module.zero_grad()
    return step


def plan_of(captured: Captured, schedule: Schedule) -> Plan:
    """A plan that prescribes a schedule, with a decision for what it saves."""
    outcome = replay_schedule(captured.problem, schedule)
    values = captured.problem.values
    return Plan(
        budget_bytes=None,
        saved=outcome.saved,
        decisions=tuple(
            Decision(value=v, name=values[v].name, action=Action.KEEP, reason="drawn", size_bytes=values[v].size_bytes)
            for v in sorted(outcome.saved)
        ),
        peak_bytes=outcome.peak_bytes,
        static_bytes=captured.problem.total_static_bytes,
        saved_bytes=outcome.saved_bytes,
        time_us=outcome.time_us,
        overhead_us=0.0,
        recompute_us=outcome.recompute_us,
        num_recomputed=outcome.num_recomputed,
        solver="drawn",
        order="drawn",
        schedule=schedule,
    )


def write_plan(path: Path, step: Any, write: Callable[[Captured], Schedule]) -> Plan:
    """Write a plan file for the graph behind a compiled step, as nothing was held yet of the step before."""
    graph = registry.graphs_of(step)[-1]
    assert graph.strategy is not None
    captured = graph.strategy.captured
    plan = plan_of(captured, write(captured))
    save_plan(
        path,
        PlanDocument(
            graphs=(GraphPlan(problem=graph.strategy.graph_problem, plan=plan, fingerprint=graph.strategy.fingerprint),),
            codegen="eager",
            torch_version=str(torch.__version__),
            device="cpu",
        ),
    )
    return plan


@every_model
def test_the_measured_peak_is_the_replayed_one(tmp_path: Path, name: str) -> None:
    """Through a plan file, in the order of its schedule, with what the caller holds of the step before."""
    module, inputs = MODELS[name].made()
    path = tmp_path / "plan.json"
    first = compiled(module, inputs)
    for seed, choice in enumerate(CHOICES.values()):
        written = write_plan(path, first, partial(drawn, seed=seed, choice=choice))
        step = compiled(module, inputs, plan=str(path))
        measured = measured_peak(partial(forward_backward, step, inputs), held_tensors(module, inputs))
        plan = dyngran.explain(step).plan
        assert plan.schedule is not None and plan.num_recomputed == written.num_recomputed > 0
        assert abs(plan.peak_bytes - measured) <= CLOSE * measured


def drawn(captured: Captured, seed: int, choice: Callable[[Captured], frozenset[int]]) -> Schedule:
    return Writer(captured, seed).schedule(choice(captured))


def test_a_plan_that_was_applied_is_written_as_it_was_read(tmp_path: Path) -> None:
    """Although the loss of the step before is held by then, and is an op more at either end of forward."""
    module, inputs = MODELS["dropout"].made()
    path, again = tmp_path / "plan.json", tmp_path / "again.json"
    written = write_plan(path, compiled(module, inputs), partial(drawn, seed=3, choice=save_every_third))
    step = torch.compile(module, backend="dyngran", options={"codegen": "eager", "plan": str(path)})
    for _ in range(3):
        loss = forward_backward(step, inputs)
    assert loss.requires_grad is False
    strategy = registry.graphs_of(step)[-1].strategy
    assert strategy is not None and strategy.carried_bytes > 0
    dyngran.save_plan(again, step)
    assert load_plan(again).plan.schedule == load_plan(path).plan.schedule == written.schedule


def test_a_plan_file_whose_schedule_does_not_fit_is_refused(tmp_path: Path) -> None:
    """At the first call, under the error's own class."""
    module, inputs = MODELS["mlp"].made()
    path = tmp_path / "plan.json"
    first = compiled(module, inputs)
    plan = write_plan(path, first, partial(drawn, seed=3, choice=save_all))
    document = load_plan(path)
    assert plan.schedule is not None
    with pytest.raises(BudgetTooSmall, match=r"is below what the plan of .* needs here"):
        compiled(module, inputs, plan=str(path), budget=plan.peak_bytes - 1000)
    for change, message in (
        ({"schedule": replace(plan.schedule, backward=plan.schedule.backward[1:])}, "its schedule cannot run on this graph"),
        ({"saved": plan.saved - {min(plan.saved)}, "decisions": plan.decisions[1:]}, "its schedule saves .* values, and not"),
    ):
        save_plan(path, replace(document, graphs=(replace(document.graphs[0], plan=replace(plan, **change)),)))
        with pytest.raises(PlanMismatch, match=message):
            compiled(module, inputs, plan=str(path))
