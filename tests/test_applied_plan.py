"""Plan files in training: found by a checked map, applied as they are, or refused with what differs; portable ones repaired.

Gradients are compared bit for bit with the unplanned graph under the same runner, peaks with what `measure` counts.
"""

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measure import forward_backward, held_tensors, measured_peak
from problems import problems
from test_schedules_run import plain, write_plan
from torch import Tensor, nn
from torch.nn import functional as F

import dyngran
from dyngran.compiler import registry
from dyngran.compiler.planned_graph import PlannedGraph
from dyngran.compiler.plans.planfile import GraphPlan, Origin, PlanDocument, dump_plan, load_plan, parse_plan, save_plan
from dyngran.errors import BudgetTooSmall, PlanMismatch
from dyngran.passes.decide import decide
from dyngran.passes.fingerprint import fingerprint
from dyngran.passes.plan import Plan
from dyngran.passes.problem import Problem
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.portfolio import Planner
from dyngran.passes.solvers.repair import repair

EAGER: dict[str, Any] = {"codegen": "eager", "keep_below": 0, "device_profile": "cpu"}
INDUCTOR: dict[str, Any] = {"keep_below": 0, "device_profile": "cpu"}
WIDTH, TOKENS, BATCH = 32, 64, 8
SHARE = 0.5  # of the transient of the unplanned step, that plans here are made for


class Layer(nn.Module):
    """Attention written out and an MLP; ``names`` of its projections."""

    def __init__(self, width: int = WIDTH, names: Sequence[str] = ("query", "key", "value")) -> None:
        super().__init__()
        self.names = tuple(names)
        for name in names:
            self.add_module(name, nn.Linear(width, width))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (getattr(self, name)(x) for name in self.names)
        x = x + torch.softmax(query @ key.transpose(-1, -2) / 4, -1) @ value
        out: Tensor = x + self.down(F.gelu(self.up(x)))
        return out


class Net(nn.Module):
    """Layers in a list of some name; returns its loss."""

    def __init__(
        self, depth: int = 3, *, width: int = WIDTH, names: Sequence[str] = ("query", "key", "value"), stack: str = "layers"
    ) -> None:
        super().__init__()
        self.stack = stack
        self.add_module(stack, nn.ModuleList(Layer(width, names) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in getattr(self, self.stack):
            x = layer(x)
        loss: Tensor = x.square().mean()
        return loss


class Towers(nn.Module):
    """Two lines that meet at the end; ``order`` says which one is written first."""

    def __init__(self, *order: str) -> None:
        super().__init__()
        self.order = order
        self.left, self.right = (nn.Sequential(*(Layer() for _ in range(2))) for _ in range(2))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        given, ends = {"left": left, "right": right}, {}
        for name in self.order:
            ends[name] = getattr(self, name)(given[name])
        loss: Tensor = (ends["left"] - ends["right"]).square().mean()
        return loss


class Broken(nn.Module):
    """A layer or more to a graph, and breaks between."""

    def __init__(self, *depths: int, has_head: bool = True) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(*(Layer() for _ in range(depth))) for depth in depths)
        self.first, self.second, self.third = (self.parts[min(part, len(depths) - 1)] for part in range(3))
        self.num_parts = len(depths)
        self.head = nn.Linear(WIDTH, WIDTH) if has_head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.second(x)
        torch._dynamo.graph_break()
        if self.num_parts == 3:
            x = self.third(x)
            torch._dynamo.graph_break()
        loss: Tensor = self.head(x).square().mean()
        return loss


def made(kind: type[nn.Module], *args: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(*args, **options)


def batch(seed: int = 1, rows: int = BATCH, width: int = WIDTH) -> Tensor:
    return torch.randn(rows, TOKENS, width, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, slots=True)
class Step:
    """A compiled module after one step, with its graphs and the gradients of that step."""

    run: Any
    module: nn.Module
    inputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    graphs: list[PlannedGraph]

    @property
    def plans(self) -> list[Plan]:
        return [graph.plan for graph in self.graphs if graph.plan is not None]

    @property
    def plan(self) -> Plan:
        (plan,) = self.plans
        return plan

    @property
    def notes(self) -> list[str]:
        (graph,) = self.graphs
        return list(graph.notes)

    def measured(self) -> int:
        return measured_peak(partial(forward_backward, self.run, self.inputs), held_tensors(self.module, self.inputs))

    def equals(self, other: "Step") -> bool:
        return all(torch.equal(mine, yours) for mine, yours in zip(self.gradients, other.gradients, strict=True))


def stepped(module: nn.Module, *inputs: Tensor, **options: Any) -> Step:
    torch._dynamo.reset()
    module.zero_grad()
    run = torch.compile(module, backend="dyngran", options=options)
    forward_backward(run, inputs)
    gradients = tuple(p.grad.clone() for p in module.parameters() if p.grad is not None)
    module.zero_grad()
    graphs = registry.graphs_of(run)  # of this module, an earlier compilation included
    return Step(run, module, inputs, gradients, [graph for graph in graphs if graph.chain is graphs[-1].chain])


def part_of(step: Step, share: float = SHARE) -> int:
    """A budget: what is static and a share of the transient."""
    plan = max(step.plans, key=lambda plan: plan.peak_bytes)
    static = min(plan.static_bytes for plan in step.plans)
    return static + int(share * (plan.peak_bytes - static))


@cache
def unplanned(*kind: Any) -> Step:
    return stepped(made(*kind), *inputs_of(*kind), **EAGER)


def inputs_of(*kind: Any) -> tuple[Tensor, ...]:
    return tuple(batch(seed) for seed in range(1, 3 if kind[0] is Towers else 2))


@cache
def text_of(*kind: Any, share: float = SHARE, **options: Any) -> str:
    """The plan file of a module at a share of its transient, under eager code."""
    budget = part_of(unplanned(*kind), share)
    step = stepped(made(*kind), *inputs_of(*kind), **EAGER, budget=budget, solver="mincut", **options)
    assert step.plan.schedule is None and step.plan.num_recomputed
    return dump_plan(written(step))


def written(step: Step) -> PlanDocument:
    """What `save_plan` writes."""
    with tempfile.TemporaryDirectory() as folder:
        return load_plan(dyngran.save_plan(Path(folder) / "plan.json", step.run))


def document(*kind: Any, **options: Any) -> PlanDocument:
    return parse_plan(text_of(*kind, **options), source="of this test")


def saved_labels(plan: Plan) -> list[str]:
    return sorted(decision.label for decision in plan.decisions if decision.value in plan.saved)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


@pytest.fixture
def forbid_search(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, planning may simulate and walk from a plan that there is, and not search."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a plan was searched for")

    def forbid() -> None:
        for name in ("frontier", "solve", "search_schedules", "search_orders", "_search", "_run"):
            monkeypatch.setattr(Planner, name, fail)

    return forbid


def test_a_search_is_seen(forbid_search: Callable[[], None]) -> None:
    forbid_search()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="a plan was searched for"):
        stepped(made(Net, 1), batch(), **EAGER, budget=10**6)


def test_a_plan_of_training_is_applied_without_a_search(path: Path, forbid_search: Callable[[], None]) -> None:
    module, free = made(Net), unplanned(Net)
    first = stepped(module, batch(), **EAGER, budget=part_of(free), solver="mincut")
    dyngran.save_plan(path, first.run)
    forbid_search()
    for budget in (None, first.plan.peak_bytes):
        again = stepped(module, batch(), **EAGER, plan=str(path), budget=budget)
        assert (again.plan.saved, again.plan.peak_bytes) == (first.plan.saved, first.plan.peak_bytes)
        assert again.plan.num_recomputed == first.plan.num_recomputed > 0
        assert again.plan.solver == "file, mincut" and again.equals(free)
        assert again.measured() == again.plan.peak_bytes < free.plan.peak_bytes
    assert written(again).graphs[0].problem == written(first).graphs[0].problem


def test_other_names_are_the_same_model(path: Path, forbid_search: Callable[[], None]) -> None:
    stored = document(Net)
    save_plan(path, stored)
    forbid_search()
    step = stepped(made(Net, names=("to_q", "to_k", "to_v"), stack="blocks"), batch(), **EAGER, plan=str(path))
    renamed = [label.replace("layers", "blocks") for label in saved_labels(stored.plan)]
    for old, new in (("query", "to_q"), ("key", "to_k"), ("value", "to_v")):
        renamed = [label.replace(f".{old}", f".{new}") for label in renamed]
    assert saved_labels(step.plan) == sorted(renamed)
    assert step.measured() == step.plan.peak_bytes == stored.peak_bytes
    assert not any("differs" in note or "order" in note for note in step.notes)


@pytest.mark.parametrize("share", [0.8, 0.5])
def test_lines_in_another_order_save_the_same(path: Path, forbid_search: Callable[[], None], share: float) -> None:
    """Where independent lines change places, and a plan treats them differently, its peak may change: then `explain` says so."""
    stored = document(Towers, "left", "right", share=share)
    save_plan(path, stored)
    forbid_search()
    module = made(Towers, "right", "left")
    step = stepped(module, batch(1), batch(2), **EAGER, plan=str(path))
    assert saved_labels(step.plan) == saved_labels(stored.plan)
    assert step.measured() == step.plan.peak_bytes
    said = [note for note in step.notes if "stand in another order here" in note]
    assert len(said) == (step.plan.peak_bytes != stored.peak_bytes)
    assert step.equals(unplanned(Towers, "right", "left"))


def of_a_schedule(path: Path) -> PlanDocument:
    """For the towers, written as a schedule that saves most of one and nothing of the other."""
    step = unplanned(Towers, "left", "right")
    write_plan(path, step.run, lambda captured: plain(captured.problem, made_by(captured.problem, "left.1")))
    return load_plan(path)


def made_by(problem: Problem, region: str) -> frozenset[int]:
    """What backward can read of a region."""
    makers = ((value, problem.values[value].producer) for value in Simulator(problem).candidates)
    return frozenset(value for value, maker in makers if maker is not None and problem.ops[maker].region == region)


def test_a_schedule_is_carried_over(path: Path) -> None:
    """It prescribes the order, so that the peak stays what it was."""
    stored = of_a_schedule(path)
    module = made(Towers, "right", "left")
    step = stepped(module, batch(1), batch(2), **EAGER, plan=str(path))
    assert stored.plan.schedule is not None and step.plan.schedule is not None
    assert step.plan.schedule != stored.plan.schedule
    assert step.plan.peak_bytes == stored.peak_bytes
    assert abs(step.measured() - step.plan.peak_bytes) <= 0.01 * step.plan.peak_bytes
    assert step.equals(unplanned(Towers, "right", "left"))


def test_a_schedule_that_was_carried_over_decides_about_the_values_here(path: Path) -> None:
    stored = of_a_schedule(path)
    step = stepped(made(Towers, "right", "left"), batch(1), batch(2), **EAGER, plan=str(path))
    assert {decision.value for decision in step.plan.decisions} >= step.plan.saved
    dyngran.save_plan(path, step.run)
    assert load_plan(path).peak_bytes == stored.peak_bytes


OTHERS: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "deeper": (partial(Net, 5), batch(), "layers.3, layers.4: only in the graph at hand"),
    "wider": (partial(Net, width=64), batch(width=64), "layers.0, layers.1, layers.2 and 1 more: the same ops with other sizes"),
    "a smaller batch": (Net, batch(rows=4), "layers.0, layers.1, layers.2 and 1 more: the same ops with other sizes"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_is_refused_before_it_trains(path: Path, name: str) -> None:
    save_plan(path, document(Net))
    make, x, said = OTHERS[name]
    module = make()
    with pytest.raises(PlanMismatch, match=f"'{re.escape(str(path))}' was made for another graph.* What differs: .*{said}") as caught:
        torch.compile(module, backend="dyngran", options={**EAGER, "plan": str(path)})(x)
    assert "dyngran-plan build" in str(caught.value) and "'plan_mismatch': 'resolve'" in str(caught.value)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_another_model_is_planned_afresh_where_that_is_allowed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_plan(path, document(Net))
    module, free = made(Net, 2), unplanned(Net, 2)
    budget = part_of(free)
    step = stepped(module, batch(), **EAGER, plan=str(path), plan_mismatch="resolve", budget=budget, solver="mincut")
    alone = stepped(module, batch(), **EAGER, budget=budget, solver="mincut")
    assert step.plan == alone.plan and step.measured() <= budget and step.equals(free)
    for said in (caplog.text, str(dyngran.explain(step.run))):
        assert "planned afresh, and not by" in said or "planning afresh, and not by" in said
        assert "layers.2: only in the plan" in said


def changed_op(stored: PlanDocument, target: str, *, region: str = "layers.1", **changes: Any) -> PlanDocument:
    """As if tracing had met another op there: the first of ``target`` in a region under another name."""
    (graph,) = stored.graphs
    problem = graph.problem
    first = next(op.index for op in problem.ops if op.region == region and op.target == target)
    ops = tuple(replace(op, target="another.op") if op.index == first else op for op in problem.ops)
    problem = replace(problem, ops=ops)
    return replace(stored, graphs=(replace(graph, problem=problem, fingerprint=fingerprint(problem)),), origin=Origin.PORTABLE, **changes)


def test_a_portable_plan_is_applied_where_most_of_it_is_found(path: Path, forbid_search: Callable[[], None]) -> None:
    """What is not found is decided as torch's own partition decides, which saves what a softmax makes."""
    stored = document(Net)
    save_plan(path, changed_op(stored, "aten._softmax.default"))
    forbid_search()
    step = stepped(made(Net), batch(), **EAGER, plan=str(path), budget=2 * stored.peak_bytes)
    (graph,) = stored.graphs
    (unknown,) = (op.writes[0] for op in graph.problem.ops if op.target == "aten._softmax.default" and op.region == "layers.1")
    assert step.plan.saved == stored.plan.saved | {unknown} and step.plan.solver == "file, mincut"
    assert step.measured() == step.plan.peak_bytes
    said = str(dyngran.explain(step.run))
    assert re.search(r"was made without the device: 9\d\.\d% of the bytes .* were found here", said)
    assert "layers.1: 1 another.op only in the plan; 1 aten._softmax.default only in the graph at hand" in said


def test_a_portable_plan_is_repaired_and_not_searched_for(path: Path, forbid_search: Callable[[], None]) -> None:
    stored = document(Net)
    save_plan(path, changed_op(stored, "aten._softmax.default"))
    module, free = made(Net), unplanned(Net)
    forbid_search()
    static = stored.plan.static_bytes
    for share in (0.98, 0.9):
        budget = static + int(share * stored.plan.transient_bytes)
        step = stepped(module, batch(), **EAGER, plan=str(path), budget=budget)
        assert step.measured() == step.plan.peak_bytes <= budget
        assert step.plan.solver == "file, mincut, repaired" and step.equals(free)
        assert any("layers.1" in note for note in step.notes)


def test_the_budget_of_a_portable_plan_counts_where_none_is_given(path: Path, forbid_search: Callable[[], None]) -> None:
    stored = changed_op(document(Net), "aten._softmax.default")
    (graph,) = stored.graphs
    budget = graph.plan.static_bytes + int(0.9 * graph.plan.transient_bytes)
    save_plan(path, replace(stored, graphs=(replace(graph, plan=replace(graph.plan, budget_bytes=budget)),)))
    forbid_search()
    step = stepped(made(Net), batch(), **EAGER, plan=str(path))
    assert step.plan.peak_bytes <= budget and step.plan.solver.endswith("repaired")


def test_the_budget_of_an_exact_plan_is_kept_or_refused_where_none_is_given(path: Path) -> None:
    stored = document(Net)
    (graph,) = stored.graphs
    budget = stored.peak_bytes - 1
    save_plan(path, replace(stored, graphs=(replace(graph, plan=replace(graph.plan, budget_bytes=budget)),)))
    with pytest.raises(BudgetTooSmall, match=r"is below what the plan of .*plan\.json needs here") as caught:
        stepped(made(Net), batch(), **EAGER, plan=str(path))
    assert (caught.value.budget_bytes, caught.value.least_peak_bytes) == (budget, stored.peak_bytes)
    for other in (None, stored.peak_bytes):  # no limit, and one that is named, come before the file's
        assert stepped(made(Net), batch(), **EAGER, plan=str(path), budget=other).plan.saved == graph.plan.saved
    afresh = stepped(made(Net), batch(), **EAGER, plan=str(path), plan_mismatch="resolve", solver="mincut")
    assert afresh.plan.budget_bytes == budget and afresh.measured() <= budget


def test_a_portable_plan_of_which_too_little_is_found_is_refused_with_the_share(path: Path) -> None:
    save_plan(path, changed_op(document(Net), "aten.gelu.default"))
    with pytest.raises(PlanMismatch, match=r"; 9[0-4]\.\d% of the bytes .*, and at least 95% are needed"):
        stepped(made(Net), batch(), **EAGER, plan=str(path))
    save_plan(path, replace(changed_op(document(Net), "aten._softmax.default"), origin=Origin.EXACT))
    with pytest.raises(PlanMismatch) as caught:
        stepped(made(Net), batch(), **EAGER, plan=str(path))
    assert "% of the bytes" not in str(caught.value), "an exact plan has no share"


def test_a_portable_schedule_is_only_for_an_equal_graph(path: Path) -> None:
    stored = of_a_schedule(path)
    save_plan(path, replace(stored, origin=Origin.PORTABLE))
    assert stepped(made(Towers, "left", "right"), batch(1), batch(2), **EAGER, plan=str(path)).plan.schedule == stored.plan.schedule
    save_plan(path, changed_op(stored, "aten.add.Tensor", region="right.1"))
    with pytest.raises(PlanMismatch, match="prescribes the order of ops, which only an equal graph can follow"):
        stepped(made(Towers, "left", "right"), batch(1), batch(2), **EAGER, plan=str(path))


def test_a_budget_that_the_plan_exceeds_is_refused_with_the_one_that_does(path: Path) -> None:
    stored = document(Net)
    save_plan(path, stored)
    module = made(Net)
    budget = stored.peak_bytes - 1
    with pytest.raises(BudgetTooSmall, match=r"is below what the plan of .*plan\.json needs here.*'plan_mismatch': 'resolve'") as caught:
        stepped(module, batch(), **EAGER, plan=str(path), budget=budget)
    assert caught.value.least_peak_bytes == stored.peak_bytes
    step = stepped(module, batch(), **EAGER, plan=str(path), budget=caught.value.least_peak_bytes)
    assert step.plan.saved == stored.plan.saved
    other = stepped(module, batch(), **EAGER, plan=str(path), budget=budget, plan_mismatch="resolve", solver="mincut")
    assert other.plan.saved != stored.plan.saved and other.measured() <= budget
    assert any(note.startswith(f"planned afresh, and not by {path}: its plan needs ") for note in other.notes)


def test_a_budget_that_no_repair_keeps_is_refused_with_one_that_does(path: Path) -> None:
    stored = document(Net)
    save_plan(path, changed_op(stored, "aten._softmax.default"))
    module = made(Net)
    with pytest.raises(BudgetTooSmall) as caught:
        stepped(module, batch(), **EAGER, plan=str(path), budget=stored.plan.static_bytes + 1)
    step = stepped(module, batch(), **EAGER, plan=str(path), budget=caught.value.least_peak_bytes)
    assert step.measured() <= caught.value.least_peak_bytes


@pytest.mark.parametrize(("depths", "share"), [((2, 1), 0.9), ((1, 1, 1), None)], ids=["two graphs and a head", "equal graphs"])
def test_each_graph_of_a_step_finds_its_plan(
    path: Path, depths: tuple[int, ...], share: float | None, forbid_search: Callable[[], None]
) -> None:
    module = made(Broken, *depths)
    free = stepped(module, batch(), **EAGER)
    assert len(free.plans) == len(depths) + 1
    first = free if share is None else stepped(module, batch(), **EAGER, budget=part_of(free, share))
    plans, measured = first.plans, first.measured()
    dyngran.save_plan(path, first.run)
    stored = load_plan(path)
    assert [graph.plan.saved for graph in stored.graphs] == [plan.saved for plan in plans]
    assert len({graph.fingerprint for graph in stored.graphs}) == 3
    forbid_search()
    again = stepped(module, batch(), **EAGER, plan=str(path), budget=None if share is None else part_of(free, share))
    assert [plan.saved for plan in again.plans] == [plan.saved for plan in plans]
    assert all(plan.solver.startswith("file, ") for plan in again.plans)
    assert again.equals(free) and again.measured() == measured


def test_equal_graphs_have_the_plans_of_their_places(path: Path) -> None:
    """Of two equal graphs the second may be planned otherwise: what the first one holds is live then."""
    module = made(Broken, 1, 1, 1)
    free = stepped(module, batch(), **EAGER)
    dyngran.save_plan(path, free.run)
    stored = load_plan(path)
    first, second, third, last = stored.graphs
    assert second.fingerprint == third.fingerprint
    other = with_saved(second, frozenset())
    save_plan(path, replace(stored, graphs=(first, second, other, last)))
    step = stepped(module, batch(), **EAGER, plan=str(path))
    assert [plan.saved for plan in step.plans] == [graph.plan.saved for graph in (first, second, other, last)]


def with_saved(graph: GraphPlan, saved: frozenset[int]) -> GraphPlan:
    simulator = Simulator(graph.problem)
    return replace(graph, plan=decide(simulator, simulator.evaluate(saved), budget_bytes=None, solver="test", fastest_us=0.0))


def test_a_graph_without_parameters_is_in_the_file_as_well(path: Path) -> None:
    module = made(Broken, 1, 1, has_head=False)
    free = stepped(module, batch(), **EAGER)
    dyngran.save_plan(path, free.run)
    again = stepped(module, batch(), **EAGER, plan=str(path))
    assert again.equals(free)


def test_a_plan_of_another_torch_says_who_checked_it(path: Path) -> None:
    stored = replace(document(Net), torch_version="1.99.0")
    save_plan(path, stored)
    step = stepped(made(Net), batch(), **EAGER, plan=str(path))
    assert step.plan.saved == stored.plan.saved
    assert "the plan was made with torch 1.99.0, and checked here by the simulator" in str(dyngran.explain(step.run))
    with pytest.raises(PlanMismatch, match=re.escape(f", with torch 1.99.0 (here: {torch.__version__}). What differs: ")):
        stepped(made(Net, 2), batch(), **EAGER, plan=str(path))
    save_plan(path, document(Net))
    assert not any("torch" in note for note in stepped(made(Net), batch(), **EAGER, plan=str(path)).notes)


class Outside(nn.Module):
    """Returns more than a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layer(x)
        return out.square().mean(), torch.tanh(out)


def test_outputs_that_are_held_otherwise_are_named(path: Path) -> None:
    def run(outputs: str, **options: Any) -> Any:
        torch.compiler.reset()
        compiled: Any = torch.compile(made(Outside), backend="dyngran", options={**EAGER, "outputs": outputs, **options})
        forward_backward(lambda x: compiled(x)[0], (batch(),))
        return compiled

    dyngran.save_plan(path, run("held"))
    run("held", plan=str(path))
    with pytest.raises(PlanMismatch, match=r"it was made with outputs='held', and the option here is 'dropped'"):
        run("dropped", plan=str(path))


def test_under_inductor_the_code_decides(path: Path) -> None:
    """The plan's own peak is a budget that works, one byte less is refused, and with that allowed planned afresh."""
    module = made(Net, 2)
    first = stepped(module, batch(), **INDUCTOR, budget=part_of(unplanned(Net, 2), 0.7), solver="region")
    stored = written(first)
    peak = stored.peak_bytes
    save_plan(path, stored)
    again = stepped(module, batch(), **INDUCTOR, plan=str(path), budget=peak)
    assert again.plan.saved == first.plan.saved and again.plan.peak_bytes == peak and again.equals(first)
    with pytest.raises(BudgetTooSmall, match=r"plan\.json needs here") as caught:
        stepped(module, batch(), **INDUCTOR, plan=str(path), budget=peak - 1)
    assert caught.value.least_peak_bytes == peak
    other = stepped(module, batch(), **INDUCTOR, plan=str(path), budget=peak - 1, plan_mismatch="resolve", solver="region")
    assert other.plan.peak_bytes < peak and any("planned afresh" in note for note in other.notes)


def test_under_inductor_a_simulation_does_not_refuse_what_the_code_does_with_less(path: Path) -> None:
    module = made(Net, 2)
    first = stepped(module, batch(), **INDUCTOR)
    (graph,) = first.graphs
    assert graph.strategy is not None
    assert first.plan.peak_bytes < graph.strategy.simulator.evaluate(first.plan.saved).peak_bytes, "or this tests nothing"
    dyngran.save_plan(path, first.run)
    again = stepped(module, batch(), **INDUCTOR, plan=str(path), budget=first.plan.peak_bytes)
    assert again.plan.saved == first.plan.saved and again.plan.peak_bytes == first.plan.peak_bytes


@given(problem=problems(), data=st.data())
def test_a_repair_never_loses_what_fits(problem: Problem, data: st.DataObject) -> None:
    simulator = Simulator(problem)
    saved = data.draw(st.frozensets(st.sampled_from(range(len(problem.values)))))
    start = simulator.evaluate(saved)
    budget = problem.total_static_bytes + data.draw(st.integers(0, 2 * (start.peak_bytes - problem.total_static_bytes) + 1))
    found = repair(simulator, saved, budget)
    assert found == simulator.evaluate(found.saved)
    if start.peak_bytes <= budget:
        assert found.peak_bytes <= budget and found.time_us <= start.time_us
    else:
        assert found.peak_bytes <= start.peak_bytes
