"""Plans made without training: what they hold, that they fit the training they are for, and that they never change by themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stable_targets
import torch
from stable_targets import HUGE_WIDTH, NUM_HUGE, STABLE, Planner

import dyngran
from dyngran.compiler.plans.planfile import Origin, PlanDocument, dump_plan, save_plan
from dyngran.compiler.registry import graphs_of
from dyngran.passes.devices import CUDA_BLOCK_BYTES
from dyngran.passes.errors import BudgetTooSmall
from dyngran.passes.problem import Kind

CARD = "h100"
GIB = 2**30
MIB = 2**20
NUM_REPEATED, NUM_REPEATED_SLOW = 3, 10
SLACK_BYTES = 64  # between two predictions of one peak: a loss and its tangent
WORKSPACE_BYTES = 2 * 32 * MIB  # of cuBLAS on Hopper, in the threads of forward and of backward


@contextlib.contextmanager
def planning(folder: Path, profile: str, hash_seed: str) -> Iterator[Planner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", hash_seed)
        planner = Planner(folder, profile)
        planner.process.__enter__()
    try:
        yield planner
    finally:
        planner.process.__exit__(None, None, None)


@pytest.fixture(scope="module")
def on_card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planner]:
    with planning(tmp_path_factory.mktemp("card"), CARD, "1") as planner:
        yield planner


@pytest.fixture(scope="module")
def on_card_again(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planner]:
    with planning(tmp_path_factory.mktemp("card-again"), CARD, "2") as planner:
        yield planner


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planner]:
    with planning(tmp_path_factory.mktemp("host"), "cpu", "3") as planner:
        yield planner


def held(document: PlanDocument, kind: Kind) -> int:
    return sum(value.size_bytes for value in document.graphs[0].problem.values if value.kind is kind)


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES


@pytest.mark.xdist_group("build on a card")
@pytest.mark.parametrize("name", STABLE)
def test_a_plan_is_the_same_in_every_process_and_whatever_was_planned_before(on_card: Planner, on_card_again: Planner, name: str) -> None:
    first = dump_plan(on_card.plan(name, codegen="inductor"))
    assert [dump_plan(on_card.plan(name, codegen="inductor")) for _ in range(NUM_REPEATED - 1)] == [first] * (NUM_REPEATED - 1)
    assert dump_plan(on_card_again.plan(name, codegen="inductor")) == first


@pytest.mark.slow
@pytest.mark.xdist_group("build on a card")
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("name", STABLE)
def test_a_plan_is_the_same_over_ten_runs(on_card: Planner, on_card_again: Planner, name: str, codegen: str) -> None:
    texts = {dump_plan(planner.plan(name, codegen=codegen)) for planner in (on_card, on_card_again) for _ in range(NUM_REPEATED_SLOW)}
    assert len(texts) == 1


@pytest.mark.xdist_group("build on a card")
def test_no_parameter_is_allocated(on_card: Planner) -> None:
    """Of everything this process has traced the largest has 82 GB of parameters, and as much of gradients twice over for AdamW."""
    document = on_card.plan("huge")
    parameter_bytes = 4 * NUM_HUGE * HUGE_WIDTH**2
    assert held(document, Kind.PARAMETER) == parameter_bytes > 70 * GIB
    assert document.plan.static_bytes > 3 * parameter_bytes
    assert peak_resident_bytes(on_card.process._process.pid) < 1.5 * GIB


def peak_resident_bytes(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


@pytest.mark.xdist_group("build on a card")
def test_what_a_card_holds_over_the_whole_step(on_card: Planner) -> None:
    document = on_card.plan("dropout")
    parameters = [*stable_targets.dropout()["model"].parameters()]
    parameter_bytes = sum(rounded(4 * parameter.numel()) for parameter in parameters)
    adamw_bytes = 2 * parameter_bytes  # two moments; its step counters are on the host
    assert document.origin is (Origin.PORTABLE if torch.version.cuda is None else Origin.EXACT)
    assert document.device == CARD
    assert held(document, Kind.PARAMETER) == parameter_bytes
    assert document.plan.static_bytes == parameter_bytes + held(document, Kind.INPUT) + adamw_bytes + WORKSPACE_BYTES
    assert all(value.size_bytes % CUDA_BLOCK_BYTES == 0 for value in document.graphs[0].problem.values)
    assert document.peak_bytes % CUDA_BLOCK_BYTES == 0


@pytest.mark.xdist_group("build on a card")
def test_a_model_that_has_data_counts_as_any_and_however_often_it_is_planned(on_card: Planner) -> None:
    documents = [on_card.plan("made_once") for _ in range(2)]
    parameter_bytes = sum(rounded(4 * parameter.numel()) for parameter in stable_targets.made_once()["model"].parameters())
    assert documents[0] == documents[1]
    assert held(documents[0], Kind.PARAMETER) == parameter_bytes
    assert documents[0].plan.static_bytes >= 3 * parameter_bytes + WORKSPACE_BYTES


def targets_of(document: PlanDocument) -> set[str]:
    return {op.target for graph in document.graphs for op in graph.problem.ops}


@pytest.mark.xdist_group("build on a card")
def test_attention_is_the_cards_own(on_card: Planner, on_host: Planner) -> None:
    assert any("flash_attention" in target or "cudnn_attention" in target for target in targets_of(on_card.plan("attention")))
    assert not any("for_cpu" in target for target in targets_of(on_card.plan("attention")))
    assert any("flash_attention_for_cpu" in target for target in targets_of(on_host.plan("attention")))


@pytest.mark.xdist_group("build on a card")
def test_autocast_of_the_card_inside_a_model_acts_on_the_card_alone(on_card: Planner, on_host: Planner) -> None:
    def casts(document: PlanDocument) -> int:
        return sum("_to_copy" in op.target or "convert_element_type" in op.target for op in document.graphs[0].problem.ops)

    assert casts(on_card.plan("own_autocast")) > 0
    assert casts(on_host.plan("own_autocast")) == 0


@pytest.mark.xdist_group("build on a card")
def test_a_test_between_graphs_is_false_and_said_to_be(on_card: Planner) -> None:
    """As in training torch leaves the test to Python; there is no number to be tested."""
    document = on_card.plan("layer_drop")
    assert len(document.graphs) == 2
    assert [one.where.split(":")[0] for one in document.breaks] == ["stable_targets.py"]
    assert document.breaks[0].reason.endswith("a test on a tensor's numbers, which are not there, is taken as false")


@pytest.mark.xdist_group("build on a card")
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_a_plan_for_this_machine_is_taken_as_it_is(on_host: Planner, tmp_path: Path, codegen: str) -> None:
    """Training compiles the loss with the model, in a function of its own."""
    document = on_host.plan("dropout", codegen=codegen)
    save_plan(tmp_path / "plan.json", document)
    made = stable_targets.dropout()
    model, optimizer = made["model"], made["optimizer"]

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return stable_targets.squared(model(x))

    options: dict[str, Any] = {"plan": str(tmp_path / "plan.json"), "codegen": codegen, "device_profile": "cpu"}
    compiled = torch.compile(loss_of, backend="dyngran", options=options)
    loss: torch.Tensor = compiled(made["inputs"])
    torch.autograd.backward(loss)
    optimizer.step()
    graph = graphs_of(model)[-1]
    assert graph.strategy is not None
    assert graph.strategy.applied is not None
    assert graph.strategy.applied.is_unchanged
    assert document.origin is Origin.EXACT


@pytest.mark.xdist_group("build on a card")
@pytest.mark.parametrize("name", ["convolutions", "graph_break", "around_break", "tied"])
def test_training_plans_the_peak_that_was_planned_without_it(on_host: Planner, tmp_path: Path, name: str) -> None:
    free = on_host.plan(name)
    budget_bytes = free.plan.static_bytes + (free.peak_bytes - free.plan.static_bytes) * 9 // 10
    try:
        document = on_host.plan(name, budget=f"{budget_bytes}B")
    except BudgetTooSmall as error:
        budget_bytes = error.least_peak_bytes
        document = on_host.plan(name, budget=f"{budget_bytes}B")
    model, x = STABLE[name]()
    options: dict[str, Any] = {"budget": budget_bytes, "codegen": "eager", "device_profile": "cpu"}
    compiled: Any = torch.compile(model, backend="dyngran", options=options)
    compiled(x).sum().backward()
    assert dyngran.explain(model).predicted_peak_bytes <= budget_bytes
    assert abs(dyngran.explain(model).predicted_peak_bytes - document.peak_bytes) <= SLACK_BYTES


@pytest.mark.xdist_group("build on a card")
def test_a_budget_below_the_floor_names_a_least_peak_that_can_be_kept_and_always_in_the_same_way(
    on_card: Planner, on_card_again: Planner
) -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        on_card.plan("dropout", codegen="inductor", budget="1MiB")
    least_bytes = caught.value.least_peak_bytes
    assert caught.value.budget_bytes == MIB
    assert caught.value.pinned
    document = on_card.plan("dropout", codegen="inductor", budget=f"{least_bytes}B")
    assert document.peak_bytes <= least_bytes
    assert dump_plan(on_card_again.plan("dropout", codegen="inductor", budget=f"{least_bytes}B")) == dump_plan(document)
