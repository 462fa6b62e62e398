"""How far rounded storage moves gradients: sketches, sampled steps, formats that are taken away, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICES
from measure import forward_backward, held_tensors, measured_peak
from problems import storable
from test_copies import chain
from test_storage import EAGER, store_everything
from torch import Tensor, nn

import dyngran
from dyngran.compiler import planned_graph
from dyngran.compiler.error_check import FIRST, MAX_PARTS, RETRY, ErrorCheck, held_bytes, parts_of_sample
from dyngran.compiler.options import parse_options
from dyngran.compiler.registry import graphs_of
from dyngran.errors import InvalidOption
from dyngran.passes.forms import Offer, Transfer, with_forms
from dyngran.passes.plan import Action
from dyngran.runtime.gradient_error import SIZE, relative_error, sketch, sketches

on_devices = pytest.mark.parametrize("device", DEVICES)


@settings(max_examples=60, deadline=None)
@given(size=st.sampled_from([0, 1, 5, SIZE, 3 * SIZE + 7, (1 << 20) + 11, 3 << 20]), seed=st.integers(0, 10**6), small=st.floats(1e-6, 1.0))
def test_a_sketch_measures_a_difference(size: int, seed: int, small: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    exact, noise = (torch.randn(size, generator=generator) for _ in range(2))
    found = exact + small * noise
    error = relative_error(sketches([found]), sketches([exact]))
    if size == 0:
        assert error == 0
    else:
        want = float((found - exact).double().norm() / exact.double().norm())
        assert error == pytest.approx(want, rel=0.15)  # three standard deviations of the square are 13 %


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
@on_devices
def test_sketches_take_any_layout_and_type(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(6, 40, 50, device=device).to(dtype).transpose(0, 2)
    one, other = sketch(x), sketch(x.contiguous())
    assert torch.allclose(one.sums, other.sums) and torch.allclose(one.norm_squared, other.norm_squared)
    norm = torch.view_as_real(x) if x.is_complex() else x
    assert float(one.norm_squared) == pytest.approx(float(norm.double().square().sum()), rel=1e-5)


def test_equal_gradients_differ_by_nothing_and_infinite_ones_tell_nothing() -> None:
    x = torch.randn(1000)
    assert relative_error(sketches([x, None, 3]), sketches([x.clone()])) == 0
    assert math.isnan(relative_error(sketches([x]), sketches([x / 0])))
    assert relative_error(sketches([torch.zeros(4)]), sketches([torch.zeros(4)])) == 0
    assert relative_error([], []) == 0


class Net(nn.Module):
    """Whose weights' gradients rounding moves: products of values that are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)) * torch.sigmoid(x)
        return (x * x.roll(1, 1)).mean()


def net(device: str = "cpu") -> tuple[Net, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Net().to(device), (torch.randn(2048, 128, device=device),)


def compiled(module: nn.Module, **options: object) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(module, backend="dyngran", options={"budget": "20GiB", "keep_below": 0, "pack": False, **options})


def steps(step: Callable[..., Any], module: nn.Module, inputs: tuple[Tensor, ...], count: int) -> list[list[Tensor]]:
    """The gradients of some steps with the same batch."""
    found = []
    for _ in range(count):
        module.zero_grad()
        forward_backward(step, inputs)
        found.append([parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None])
    return found


def difference(found: list[Tensor], exact: list[Tensor]) -> float:
    squares = [(one.double() - other.double()).square().sum() for one, other in zip(found, exact, strict=True)]
    return math.sqrt(float(sum(squares) / sum(other.double().square().sum() for other in exact)))


def sample_of(gradients: list[list[Tensor]], exact: list[Tensor]) -> int:
    """The first step whose gradients are exact."""
    return next(number for number, found in enumerate(gradients) if all(map(torch.equal, found, exact)))


@on_devices
@pytest.mark.parametrize("format", ["bf16", "int8", "fp8"])
def test_a_sampled_step_measures_what_rounding_does_and_is_exact_itself(device: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = net(device)
    (exact,) = steps(compiled(module, **EAGER), module, inputs, 1)
    store_everything(monkeypatch)
    step = compiled(module, **EAGER, storage=[format], max_grad_error=0.9)
    found = steps(step, module, inputs, FIRST + 2)
    number = sample_of(found, exact)
    error = difference(found[number - 1], exact)
    assert error > 1e-4 and torch.equal(found[number + 1][0], found[number - 1][0])  # rounded again
    graph = graphs_of(step)[-1]
    assert graph._errors is not None and graph._errors.latest is not None
    latest = graph._errors.latest
    assert latest.relative == pytest.approx(error, rel=0.1) and not latest.is_estimate and latest.formats == (format,)
    assert any(f"with {format} (measured), at most 0.9 allowed" in note for note in dyngran.explain(step).notes)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_formats_that_move_gradients_too_far_are_taken_away_the_coarsest_first(codegen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = net()
    options = {"codegen": codegen}
    (exact,) = steps(compiled(module, **options), module, inputs, 1)
    store_everything(monkeypatch, formats=frozenset({"int8"}))
    step = compiled(module, **options, storage=["bf16", "int8"], max_grad_error=1e-6)
    found = steps(step, module, inputs, 2 * FIRST + 4)
    assert difference(found[0], exact) > 1e-4
    if codegen == "eager":
        assert all(map(torch.equal, found[-1], exact))
    else:
        assert difference(found[-1], exact) < 1e-5
    notes = [note for note in dyngran.explain(step).notes if "nothing is stored as" in note]
    assert len(notes) == 1 and "the gradient error is" in notes[0] and "as int8 any more" in notes[0]
    assert not [one for one in dyngran.explain(step).plan.decisions if one.error]


def test_where_the_budget_has_no_room_for_all_parts_are_measured_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = net()
    (exact,) = steps(compiled(module, **EAGER), module, inputs, 1)
    store_everything(monkeypatch)
    plain = compiled(module, **EAGER, storage=["int8"])
    steps(plain, module, inputs, 1)
    strategy, plan = graphs_of(plain)[-1].strategy, graphs_of(plain)[-1].plan
    assert strategy is not None and plan is not None
    budget = plan.peak_bytes + held_bytes(strategy.simulator, plan.saved) + 3 * inputs[0].nbytes + 2048  # three values at a time
    step = compiled(module, **EAGER, budget=budget, storage=["int8"], max_grad_error=0.5)
    (rounded,) = steps(step, module, inputs, 1)
    peaks = []
    for _ in range(FIRST + MAX_PARTS):
        module.zero_grad()
        peaks.append(measured_peak(partial(forward_backward, step, inputs), held_tensors(module, inputs)))
    graph = graphs_of(step)[-1]
    assert graph._errors is not None and graph._errors.latest is not None
    latest = graph._errors.latest
    error = difference(rounded, exact)
    assert not latest.is_estimate and error / 1.5 < latest.relative < 1.5 * error  # of parts, as if they were independent
    assert max(peaks) > min(peaks) and max(peaks) <= budget


def test_without_room_for_any_the_format_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = net()
    (exact,) = steps(compiled(module, **EAGER), module, inputs, 1)
    store_everything(monkeypatch)
    monkeypatch.setattr(planned_graph, "sample_bytes", lambda *_: 0)
    step = compiled(module, **EAGER, storage=["int8"], max_grad_error=0.5)
    steps(step, module, inputs, 1)
    graph = graphs_of(step)[-1]
    assert graph.plan is not None
    graph.budget_bytes = graph.plan.peak_bytes  # as if the plan took all of it
    found = steps(step, module, inputs, FIRST + 2)
    assert all(map(torch.equal, found[-1], exact))
    assert any("cannot be measured within the budget: nothing is stored as int8" in note for note in dyngran.explain(step).notes)


def test_parts_of_a_sample_cover_each_kind_first_and_stop_at_what_is_too_much() -> None:
    problem = with_forms(chain(12), [rounded_offer(value) for value in storable(chain(12))])
    everything = list(problem.forms)
    assert parts_of_sample(problem, everything, None) == [sorted(everything, key=parts_of_sample(problem, everything, None)[0].index)]
    parts = parts_of_sample(problem, everything, 16)
    assert len(parts) == min(MAX_PARTS, -(-len(everything) // 2)) and all(len(part) <= 2 for part in parts)
    assert parts_of_sample(problem, everything, 7) == []
    check = ErrorCheck(0.01)
    due = [check.due_part(lambda: parts_of_sample(problem, everything, 16)) for _ in range(FIRST)]
    assert due[:-1] == [None] * (FIRST - 1) and due[-1] == parts[0]
    assert check.note(math.nan, parts[0], problem, everything) is None and check.latest is None  # not finite: another sample soon
    assert [check.due_part(lambda: list(parts)) for _ in range(RETRY)] == [None] * (RETRY - 1) + [parts[0]]
    assert check.note(0.006, parts[0], problem, everything) is None
    assert check.due_part(list) == parts[1]
    error = check.note(0.009, parts[1], problem, everything)
    assert error is not None and error.relative == pytest.approx(math.hypot(0.006, 0.009)) and error.num_values == 4
    assert check.due_part(list) is None


def rounded_offer(value: int) -> Offer:
    nothing = Transfer(cost_us=0.0)
    return Offer(value=value, action=Action.NARROW, format="int8", size_bytes=2, store=nothing, load=nothing, error="a little")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_error": 0.01}, "storage names no format"),
        ({"max_grad_error": 0, "storage": ["bf16"]}, "must be a relative error above 0"),
        ({"max_grad_error": "1%", "storage": ["bf16"]}, "must be a relative error above 0"),
        ({"max_grad_error": 0.01, "storage": ["bf16"], "plan": "step.json"}, "plan names a file"),
        ({"max_grad_error": 0.01, "storage": ["bf16"], "mode": "reduce-overhead"}, "CUDA graphs cannot"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        parse_options(options, environ={})
