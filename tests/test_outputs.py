"""What a module returns is planned as held while backward runs, or as dropped by then if the user says so: both against real loops."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from measure import held_tensors, measured_peak
from torch import Tensor, nn
from torch.nn import functional as F

import dyngran
from dyngran.errors import BudgetTooSmall, InvalidOption, PlanMismatch
from dyngran.runtime.observe import StepObserver
from dyngran.runtime.returned import ReturnedOutputs

VOCABULARY, WIDTH, TOKENS = 2048, 64, 512
LOGITS_BYTES = TOKENS * VOCABULARY * 4
EAGER: dict[str, object] = {"codegen": "eager", "keep_below": 0}


class Labelled(nn.Module):
    """Returns its loss and the logits that it was made from, as language models of transformers do; ``detached``: without a gradient."""

    def __init__(self, *, detached: bool = False) -> None:
        super().__init__()
        self.detached = detached
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + F.gelu(block(F.layer_norm(x, (WIDTH,))))
        logits = self.head(x)
        return F.cross_entropy(logits, tokens), logits.detach() if self.detached else logits


@dataclass(frozen=True, slots=True)
class Trained:
    report: dyngran.Report
    peak_bytes: int
    gradients: dict[str, Tensor]


def train(*, holds: bool, num_steps: int = 4, detached: bool = False, keeps_alias: bool = False, **options: object) -> Trained:
    """Some steps of a loop that holds what the module returns while backward runs, or only a detached alias of it, or nothing."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module, tokens = Labelled(detached=detached), torch.randint(0, VOCABULARY, (TOKENS,))
    compiled = torch.compile(module, backend="dyngran", options={**EAGER, **options})

    def step() -> None:
        module.zero_grad()
        if holds:
            output = compiled(tokens)
            output[0].backward()
        elif keeps_alias:
            loss, alias = compiled(tokens)
            alias = alias.detach()
            loss.backward()
        else:
            compiled(tokens)[0].backward()

    for _ in range(num_steps - 1):
        step()
    module.zero_grad()
    peak_bytes = measured_peak(step, held_tensors(module, (tokens,)))
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return Trained(dyngran.explain(compiled), peak_bytes, gradients)


def floor(**options: object) -> BudgetTooSmall:
    with pytest.raises(BudgetTooSmall) as refusal:
        train(holds=True, budget=1, **options)
    return refusal.value


@pytest.mark.parametrize(("outputs", "holds"), [("held", True), ("dropped", False)])
@pytest.mark.parametrize("is_tight", [False, True])
def test_the_prediction_is_right_for_the_loop_that_was_named(outputs: str, holds: bool, is_tight: bool) -> None:
    budget_bytes = floor(outputs=outputs).least_peak_bytes if is_tight else 2**30
    trained = train(holds=holds, budget=budget_bytes, outputs=outputs)
    assert abs(trained.peak_bytes - trained.report.predicted_peak_bytes) <= 64
    assert trained.peak_bytes <= budget_bytes
    assert not any("planned again" in note or "outputs" in note for note in trained.report.notes)


def test_dropped_outputs_lower_the_least_peak_and_the_refusal_says_so() -> None:
    held, dropped = floor(), floor(outputs="dropped")
    assert held.least_peak_bytes - dropped.least_peak_bytes >= LOGITS_BYTES // 2
    assert "'outputs': 'dropped'" in str(held)
    assert "'outputs': 'dropped'" not in str(dropped)


def test_gradients_do_not_depend_on_it() -> None:
    free = train(holds=True, solver="default")
    tight = train(holds=False, budget=floor(outputs="dropped").least_peak_bytes, outputs="dropped")
    assert tight.report.plan.num_recomputed > 0
    for name, gradient in free.gradients.items():
        assert torch.equal(gradient, tight.gradients[name]), name


def test_a_loop_that_drops_outputs_is_told_of_the_option() -> None:
    trained = train(holds=False, budget=2**30)
    assert [note for note in trained.report.notes if "'outputs': 'dropped'" in note and "4 MiB" in note]
    assert trained.peak_bytes < trained.report.predicted_peak_bytes


@pytest.mark.parametrize("how", [{"holds": True}, {"holds": True, "detached": True}, {"holds": False, "keeps_alias": True}])
def test_outputs_that_turn_out_to_be_held_are_planned_as_held(how: dict[str, bool]) -> None:
    """The budget lies above the least peak with held outputs, and the plan for dropped ones would pass it."""
    free_bytes = train(**how).report.predicted_peak_bytes
    budget_bytes = free_bytes - LOGITS_BYTES // 4
    trained = train(**how, budget=budget_bytes, outputs="dropped")
    assert any("planned again" in note and "outputs='dropped'" in note for note in trained.report.notes)
    assert abs(trained.peak_bytes - trained.report.predicted_peak_bytes) <= 64
    assert trained.peak_bytes <= budget_bytes


def test_outputs_that_turn_out_to_be_held_within_the_budget_are_remarked() -> None:
    trained = train(holds=True, budget=2**30, outputs="dropped")
    assert any("may be higher than predicted" in note for note in trained.report.notes)
    assert not any("planned again" in note for note in trained.report.notes)


def test_inductor_plans_for_dropped_outputs_too() -> None:
    budget_bytes = train(holds=True, codegen="inductor").report.predicted_peak_bytes
    trained = train(holds=False, budget=budget_bytes, outputs="dropped", codegen="inductor")
    transient_bytes = trained.report.predicted_peak_bytes - trained.report.plan.static_bytes
    assert abs(trained.peak_bytes - trained.report.predicted_peak_bytes) <= 0.02 * transient_bytes
    assert trained.peak_bytes <= budget_bytes


def test_a_detached_alias_is_no_dropped_output() -> None:
    trained = train(holds=False, keeps_alias=True, budget=2**30)
    assert not any("outputs" in note for note in trained.report.notes)
    assert abs(trained.peak_bytes - trained.report.predicted_peak_bytes) <= 64


def test_a_plan_file_trains_at_the_least_peak_that_its_refusal_names(tmp_path: Path) -> None:
    """The loss is an output that every loop holds: it takes no plan back."""
    torch._dynamo.reset()
    module, tokens, path = Labelled(), torch.randint(0, VOCABULARY, (TOKENS,)), tmp_path / "plan.json"
    least = floor(outputs="dropped").least_peak_bytes
    compiled = torch.compile(module, backend="dyngran", options={**EAGER, "budget": least, "outputs": "dropped"})
    compiled(tokens)[0].backward()
    dyngran.save_plan(path, compiled)
    trained = train(holds=False, budget=least, outputs="dropped", plan=path)
    assert trained.peak_bytes <= least
    with pytest.raises(PlanMismatch, match="outputs"):
        train(holds=False, plan=path)


class TwoHeads(nn.Module):
    """Two independent lines, in one order or the other."""

    def __init__(self, *, second_first: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.second_first = second_first

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.second_first:
            right = self.b(x).sin()
            return self.a(x).sin(), right
        left = self.a(x).sin()
        return left, self.b(x).sin()


@pytest.mark.parametrize("outputs", ["held", "dropped"])
def test_the_fingerprint_does_not_see_the_order_of_independent_lines(outputs: str, tmp_path: Path) -> None:
    found = set()
    for second_first in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(TwoHeads(second_first=second_first), backend="dyngran", options={**EAGER, "outputs": outputs})
        left, right = compiled(torch.randn(8, WIDTH))
        (left.sum() + right.sum()).backward()
        found.add(json.loads(dyngran.save_plan(tmp_path / "plan.json", compiled).read_text())["graphs"][0]["fingerprint"])
    assert len(found) == 1


def test_what_the_step_peaked_at_before_is_forgotten_with_the_plan() -> None:
    """A measured overshoot belongs to the plan for dropped outputs: it must not tighten the one for held outputs."""
    budget_bytes = train(holds=True).report.predicted_peak_bytes - LOGITS_BYTES // 4
    forget, forgotten = StepObserver.forget, list[StepObserver]()

    def peaked_above(self: StepObserver, _: int) -> int:
        return LOGITS_BYTES if self._has_run_backward and self not in forgotten else 0

    def noted(self: StepObserver) -> None:
        if "_num_steps" in vars(self):  # not the first time, in its constructor
            forgotten.append(self)
        forget(self)

    with mock.patch.object(StepObserver, "overshoot_bytes", peaked_above), mock.patch.object(StepObserver, "forget", noted):
        trained = train(holds=True, budget=budget_bytes, outputs="dropped")
    assert [note for note in trained.report.notes if "outputs='dropped'" in note]
    assert [note for note in trained.report.notes if "above the budget" in note] == []


def test_another_value_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InvalidOption, match="did you mean 'dropped'"):
        train(holds=True, outputs="droped")


def test_storages_are_counted_once_and_inputs_never() -> None:
    weight = torch.ones(64, requires_grad=True)
    returned = ReturnedOutputs()
    product, other = weight * 2, weight * 3
    outputs = [*product.chunk(2), other, weight[:10], None, 7]
    view = outputs[0]
    returned.watch(outputs, [weight])
    del product, other, outputs
    returned.end_backward()
    assert (returned.held_bytes, returned.dropped_bytes) == (256, 256)
    assert view.shape == (32,)
    del view
    outputs = [*(weight * 2).chunk(2), weight * 3, weight[:10], None, 7]
    returned.watch(outputs, [weight])
    returned.end_backward()
    assert (returned.held_bytes, returned.dropped_bytes) == (512, 0)


def test_several_forwards_before_a_backward_say_nothing() -> None:
    weight = torch.ones(64, requires_grad=True)
    returned = ReturnedOutputs()
    for _ in range(3):
        returned.watch([weight * 2], [weight])
    returned.end_backward()
    assert (returned.held_bytes, returned.dropped_bytes) == (0, 0)


class PeaksInForward(nn.Module):
    """Large values that backward does not need, and an output that is worth counting."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.narrow(x)
        z = torch.cat([h] * 16, 1).detach()
        y = (z.sin().cos() + z.exp()).view(-1, 16, WIDTH).mean(1)
        return self.wide(h) * y.sigmoid().mean()


def start(module: nn.Module, **options: object) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(module, backend="dyngran", options={**EAGER, **options})


def loop(step: nn.Module, batch: Tensor, num_steps: int) -> None:
    """What was returned stays until the next call has returned."""
    for _ in range(num_steps):
        output = step(batch)
        (output[0] if isinstance(output, tuple) else output.mean()).backward()
        step.zero_grad()


def test_what_a_loop_holds_until_the_next_call_has_returned_may_lead_to_a_refusal_that_says_so() -> None:
    x, output_bytes, module = torch.randn(256, WIDTH), 256 * 8 * WIDTH * 4, PeaksInForward()
    with pytest.raises(BudgetTooSmall, match=r"until the next call has returned may need .* more") as first:
        loop(start(module, budget=1), x, 1)
    least_bytes = first.value.least_peak_bytes
    with pytest.raises(BudgetTooSmall, match="delete it before the model is called again") as second:
        loop(start(module, budget=least_bytes), x, 2)
    budget_bytes = second.value.least_peak_bytes
    assert least_bytes < budget_bytes <= least_bytes + output_bytes
    step = start(module, budget=budget_bytes)
    loop(step, x, 3)
    assert least_bytes < measured_peak(lambda: loop(step, x, 3), held_tensors(module, (x,))) <= budget_bytes
    assert any("is still held while forward runs" in note for note in dyngran.explain(step).notes)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_what_a_loop_holds_until_the_next_call_has_returned_is_planned(codegen: str) -> None:
    """A budget that torch's own partition keeps alone, and not beside the logits of the step before."""
    module, tokens = Labelled(), torch.randint(0, VOCABULARY, (TOKENS,))
    step = start(module, codegen=codegen)
    loop(step, tokens, 1)
    budget_bytes = dyngran.explain(step).predicted_peak_bytes + LOGITS_BYTES // 16
    step = start(module, codegen=codegen, budget=budget_bytes)
    loop(step, tokens, 3)
    assert measured_peak(lambda: loop(step, tokens, 3), held_tensors(module, (tokens,))) <= budget_bytes
    report = dyngran.explain(step)
    assert any("planned again" in note and "is still held while forward runs" in note for note in report.notes)


def test_what_is_carried_is_what_is_left_after_the_backward() -> None:
    weight = torch.ones(64, requires_grad=True)
    returned = ReturnedOutputs()
    output = weight * 2
    returned.watch([output, weight], [weight])
    assert returned.carried_bytes() == 0, "its backward is still to come"
    returned.end_backward()
    assert returned.carried_bytes() == 256
    del output
    assert returned.carried_bytes() == 0
