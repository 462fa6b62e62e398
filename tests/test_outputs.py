"""What a module returns is planned as held while backward runs, or as dropped by then if the user says so: both against real loops."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest
import torch
from measure import held_tensors, measured_peak
from torch import Tensor, nn
from torch.nn import functional as F

import dyngran
from dyngran.errors import BudgetTooSmall, InvalidOption
from dyngran.runtime.returned import ReturnedOutputs

VOCABULARY, WIDTH, TOKENS = 2048, 64, 512
LOGITS_BYTES = TOKENS * VOCABULARY * 4
EAGER: dict[str, object] = {"codegen": "eager", "keep_below": 0}


class Labelled(nn.Module):
    """Returns its loss and the logits that it was made from, as language models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + F.gelu(block(F.layer_norm(x, (WIDTH,))))
        logits = self.head(x)
        return F.cross_entropy(logits, tokens), logits


@dataclass(frozen=True, slots=True)
class Trained:
    report: dyngran.Report
    peak_bytes: int
    gradients: dict[str, Tensor]


def train(*, holds: bool, num_steps: int = 4, **options: object) -> Trained:
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module, tokens = Labelled(), torch.randint(0, VOCABULARY, (TOKENS,))
    compiled = torch.compile(module, backend="dyngran", options={**EAGER, **options})

    def step() -> None:
        module.zero_grad()
        if holds:
            output = compiled(tokens)
            output[0].backward()
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


def test_outputs_that_turn_out_to_be_held_are_planned_as_held() -> None:
    """The budget lies above the least peak with held outputs, and the plan for dropped ones would pass it."""
    free_bytes = train(holds=True).report.predicted_peak_bytes
    budget_bytes = free_bytes - LOGITS_BYTES // 4
    trained = train(holds=True, budget=budget_bytes, outputs="dropped")
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


def test_another_value_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InvalidOption, match="did you mean 'dropped'"):
        train(holds=True, outputs="droped")


def test_views_and_graphs_hold_and_what_was_never_dropped_is_not_counted() -> None:
    weight = torch.ones(4, requires_grad=True)
    returned = ReturnedOutputs()
    output, other = weight * 2, weight * 3
    view = output[:2]
    returned.watch([output, other, weight, None, 7])
    del output, other
    returned.begin_backward()
    assert (returned.held_bytes, returned.dropped_bytes) == (16, 16)
    again = weight * 2
    returned.watch([again])
    returned.begin_backward()
    assert (returned.held_bytes, returned.dropped_bytes) == (16, 0)
    assert view.shape == (2,)
