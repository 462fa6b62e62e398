"""Schedules are chosen: below the least peak of every saved set a model trains under codegen="eager" in an order that makes values again as
often as it takes, with the gradients of the unplanned step and within the budget; solvers by name; what a refusal promises."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import Snapshot, differences, forward_backward, held_tensors, measured_peak, snapshot
from problems import Builder, chain
from test_schedules_run import Block, Mlp, Model
from torch import Tensor, nn
from torch.nn import functional as F

import dyngran
from dyngran.compiler import registry
from dyngran.compiler.plans.planfile import load_plan
from dyngran.compiler.room import LOSS_BYTES
from dyngran.compiler.store import recall_saved, recall_schedule, remember_saved, remember_schedule
from dyngran.compiler.strategy import Strategy
from dyngran.errors import BudgetTooSmall
from dyngran.passes.plan import Action, Plan, Schedule
from dyngran.passes.problem import Kind, Side
from dyngran.passes.schedule import makings, replay_schedule, schedule_timeline, with_sources
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.anneal import schedule_of


class Pictures(nn.Module):
    """Convolutions, batch norms that update statistics, dropout."""

    def __init__(self) -> None:
        super().__init__()
        parts = [(nn.Conv2d(c, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2)) for c in (3, 16, 16)]
        self.body = nn.Sequential(*(module for part in parts for module in part))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out.square().mean()


class Attending(nn.Module):
    """Two transformer blocks' worth of attention and projections, nothing random."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(width), "project": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)})
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            query, key, value = layer["project"](layer["norm"](x)).chunk(3, -1)
            x = x + F.gelu(layer["out"](torch.softmax(query @ key.transpose(-1, -2) / 8, -1) @ value))
        return x.square().mean()


MODELS = {
    "mlp": Model(Mlp, (1024, 256)),
    "attending": Model(Attending, (8, 64, 64)),
    "block": Model(Block, (8, 64, 64)),
    "pictures": Model(Pictures, (8, 3, 32, 32)),
}
every_model = pytest.mark.parametrize("name", MODELS)


def trained(name: str, **options: Any) -> tuple[list[Snapshot], Any, int]:
    """Two steps, then the measured peak of a third; the compiled step lives as long as what is returned."""
    torch._dynamo.reset()
    module, inputs = MODELS[name].made()
    step = torch.compile(module, backend="dyngran", options={"codegen": "eager", "keep_below": 0, **options})
    torch.manual_seed(5)
    steps = []
    for _ in range(2):
        module.zero_grad()
        steps.append(snapshot(module, forward_backward(step, inputs)))
    module.zero_grad()
    return steps, step, measured_peak(partial(forward_backward, step, inputs), held_tensors(module, inputs))


def strategy_of(step: Any) -> Strategy:
    strategy = registry.graphs_of(step)[-1].strategy
    assert strategy is not None
    return strategy


def plan_of(step: Any) -> Plan:
    plan: Plan = dyngran.explain(step).plan
    return plan


@cache
def unplanned(name: str) -> tuple[list[Snapshot], int, int]:
    """Steps and peak without a budget, and the least peak of all saved sets that the search for them finds."""
    steps, step, peak_bytes = trained(name)
    found = strategy_of(step).planner.frontier()
    assert all(outcome.schedule is None for outcome in found)
    return steps, peak_bytes, found[0].peak_bytes


def assert_equal(want: list[Snapshot], got: list[Snapshot]) -> None:
    assert [differences(*pair) for pair in zip(want, got, strict=True)] == [[], []]


@pytest.fixture(autouse=True)
def _store_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNGRAN_CACHE_DIR", str(tmp_path / "cache"))


@every_model
def test_below_every_saved_set_a_schedule_trains(name: str) -> None:
    steps, _, least_bytes = unplanned(name)
    got, step, measured = trained(name, budget=least_bytes - 1)
    assert_equal(steps, got)
    report = dyngran.explain(step)
    plan = report.plan
    assert plan.schedule is not None and measured <= plan.peak_bytes <= least_bytes - 1 - LOSS_BYTES
    assert "the order of ops is prescribed" in str(report)
    problem = strategy_of(step).captured.problem
    assert sum(size for _, size in report.at_peak.by_kind) == plan.peak_bytes
    assert report.at_peak.op in {problem.ops[op].name for op in plan.schedule.forward + plan.schedule.backward}
    assert_decided(plan, strategy_of(step))
    assert plan.peak_bytes in [outcome.peak_bytes for outcome in dyngran.frontier(step)]


def assert_decided(plan: Plan, strategy: Strategy) -> None:
    """Every value that is made again says how often, and what crosses is kept."""
    assert plan.schedule is not None
    runs = Counter((*plan.schedule.forward, *plan.schedule.backward))
    assert {one.value for one in plan.decisions if one.action is Action.KEEP} == plan.saved
    made = makings(strategy.captured.problem, plan.schedule)
    for one in plan.decisions:
        producer = strategy.captured.problem.values[one.value].producer
        num_again = made[one.value].num_again
        assert producer is not None and num_again < runs[producer]
        if num_again > 1:
            assert f"{num_again} times" in one.reason
    decided = {one.value for one in plan.decisions}
    assert all(value in decided for value, making in made.items() if making.num_again)


@every_model
def test_a_refusal_names_a_peak_that_trains(name: str) -> None:
    """The least that any order reaches, whatever budget was refused; in this process, and in a new one that finds the store."""
    steps, _, saved_bytes = unplanned(name)
    with pytest.raises(BudgetTooSmall) as refusal:
        trained(name, budget=1)
    least = refusal.value.least_peak_bytes
    assert least < saved_bytes
    held = strategy_static(name)
    assert sum(size for _, size in refusal.value.pinned) <= least - held
    got, step, measured = trained(name, budget=least)
    assert_equal(steps, got)
    assert measured <= plan_of(step).peak_bytes == least - LOSS_BYTES
    assert plan_of(step).schedule is not None


def strategy_static(name: str) -> int:
    module, inputs = MODELS[name].made()
    return sum(t.untyped_storage().nbytes() for t in held_tensors(module, inputs))


every_solver = pytest.mark.parametrize("solver", ["anneal", "revolve", "dtr"])


@every_solver
@every_model
def test_a_named_solver_trains_at_a_middle_budget(name: str, solver: str) -> None:
    steps, free_bytes, least_bytes = unplanned(name)
    budget = (free_bytes + least_bytes) // 2
    got, step, measured = trained(name, solver=solver, budget=budget)
    assert_equal(steps, got)
    assert measured <= plan_of(step).peak_bytes <= budget
    assert plan_of(step).solver == solver


@every_solver
def test_a_named_solver_trains_at_the_peak_that_it_names(solver: str) -> None:
    steps, _, _ = unplanned("mlp")
    with pytest.raises(BudgetTooSmall, match=f"solver='{solver}' alone reaches") as refusal:
        trained("mlp", solver=solver, budget=strategy_static("mlp") + 2**20)
    least = refusal.value.least_peak_bytes
    got, step, measured = trained("mlp", solver=solver, budget=least)
    assert_equal(steps, got)
    assert measured <= plan_of(step).peak_bytes <= least


def test_a_chosen_schedule_is_stored_shown_and_read_from_its_file(tmp_path: Path) -> None:
    steps, free_bytes, least_bytes = unplanned("mlp")
    first, step, _ = trained("mlp", budget=least_bytes - 1)
    plan = plan_of(step)
    path = tmp_path / "plan.json"
    dyngran.save_plan(path, step)
    assert load_plan(path).plan.schedule == plan.schedule
    again, step, measured = trained("mlp", budget=least_bytes - 1)
    assert plan_of(step).schedule == plan.schedule and measured <= plan.peak_bytes
    wide, step, _ = trained("mlp", budget=free_bytes * 2)
    assert plan_of(step).schedule is None
    read, step, measured = trained("mlp", plan=str(path))
    assert plan_of(step).schedule == plan.schedule and measured <= plan.peak_bytes
    for got in (first, again, wide, read):
        assert_equal(steps, got)
    shown = subprocess.run(
        [sys.executable, "-c", "import sys; from dyngran.compiler.cli import main; sys.exit(main(sys.argv[1:]))", "show", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "prescribed for every op" in shown.stdout


def test_a_loop_with_an_optimizer_stays_within_a_budget_that_only_a_schedule_fits() -> None:
    """Optimizer state appears and the loss of the step before is held: it is planned again, in an order again."""
    _, _, least_bytes = unplanned("mlp")
    budget = least_bytes + 2 * strategy_static("mlp") // 3
    losses = []
    for backend in ("eager", "dyngran"):
        torch._dynamo.reset()
        module, inputs = MODELS["mlp"].made()
        optimizer = torch.optim.Adam(module.parameters())
        options = {"codegen": "eager", "keep_below": 0, "budget": budget} if backend == "dyngran" else None
        step = torch.compile(module, backend=backend if options else "aot_eager", options=options)
        found = []
        for _ in range(4):
            loss = step(*inputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1]
    assert plan_of(step).peak_bytes <= budget


def test_no_schedule_that_cannot_run_is_archived() -> None:
    """Nonsense from a planner is dropped, and not raised."""
    _, step, _ = trained("mlp", budget=2**30)
    planner = strategy_of(step).planner
    forward, backward = planner.simulator.schedule(planner.simulator.default_saved)
    before = planner.frontier()
    for nonsense in (Schedule((), ()), Schedule(tuple(forward[1:]), tuple(backward)), Schedule((10**6,), ())):
        assert planner.add_schedule(nonsense, "nonsense") is None
    assert planner.frontier() == before
    good = planner.add_schedule(Schedule(tuple(forward), tuple(backward)), "good")
    assert good is not None and good.peak_bytes <= strategy_of(step).free.peak_bytes


def test_a_stored_schedule_is_not_taken_for_a_saved_set() -> None:
    key, schedule = "0" * 40, Schedule((0, 1), (2,), frozenset({1}))
    remember_schedule(key, 7, schedule, "auto")
    assert recall_saved(key, 7) is None and recall_schedule(key, 7, "auto") == schedule
    assert recall_schedule(key, 7, "anneal") is None and recall_schedule(key, 8, "auto") is None
    remember_saved(key, 7, frozenset({3}))
    assert recall_saved(key, 7) == {3} and recall_schedule(key, 7, "auto") == schedule


def test_a_broken_stored_schedule_changes_nothing() -> None:
    steps, _, least_bytes = unplanned("mlp")
    _, step, _ = trained("mlp", budget=least_bytes - 1)
    key = strategy_of(step).store_key
    for limit in (least_bytes - 1, least_bytes - 2):
        remember_schedule(key, limit, Schedule((5, 10**6), (-3,)), "auto")
        got, step, measured = trained("mlp", budget=limit)
        assert_equal(steps, got)
        assert measured <= limit and plan_of(step).schedule is not None


def test_the_timeline_of_a_saved_sets_order_is_the_simulators() -> None:
    _, step, _ = trained("attending", budget=2**30)
    simulator: Simulator = strategy_of(step).simulator
    for saved in (simulator.default_saved, simulator.normalize(()), simulator.normalize(simulator.candidates[::3])):
        want, got = simulator.timeline(saved), schedule_timeline(simulator.problem, schedule_of(simulator, saved))
        assert got == want


def test_the_timeline_of_a_schedule_has_its_peak() -> None:
    problem = chain(3)
    schedule = Schedule((0, 1, 2, 3), (0, 1, 4, 0, 5, 6))
    timeline = schedule_timeline(problem, schedule)
    assert max(timeline.live_bytes) + problem.total_static_bytes == replay_schedule(problem, schedule).peak_bytes
    assert timeline.names[4:6] == (problem.ops[0].name, problem.ops[1].name)
    assert timeline.live_bytes == tuple(map(sum, zip(*timeline.by_kind.values(), strict=True)))  # no workspace in a chain
    assert makings(problem, schedule)[0 if problem.values[0].producer == 0 else 1].num_again == 2


def test_what_sets_a_state_aside_runs_once_and_before_its_reader() -> None:
    build = Builder()
    data = build.given(0, Kind.INPUT)
    state = build.op([], 2, side=Side.FREE, target="random state", pinned="drawn again from it")
    mask = build.op([data, state], 3)
    build.outputs.add(build.op([mask], 1))
    problem = build.build()
    for given in (Schedule((1, 2), ()), Schedule((1, 2), (0, 1)), Schedule((0, 1, 2), (0,))):
        placed = with_sources(problem, given)
        assert placed.forward == (0, 1, 2) and 0 not in placed.backward
