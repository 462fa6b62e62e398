"""Values stored as bits, narrow integers, shapes and in lossy formats: gradients, peaks, which values are offered what, and refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from families import DEVICES, FAMILIES, family_on, repeatable
from measure import forward_backward, held_tensors, measured_peak
from torch import Tensor, nn
from torch.nn import functional as F

import dyngran
from dyngran.compiler import registry
from dyngran.compiler.plans.planfile import load_plan
from dyngran.compiler.strategy import Strategy
from dyngran.errors import BudgetTooSmall, InvalidOption, PlanMismatch
from dyngran.kernels.steps import step_tensor
from dyngran.passes.plan import Action, Plan

EAGER = {"codegen": "eager", "keep_below": 0}
SLACK_BYTES = 2**16
LOSS_BYTES = 64


def store_everything(monkeypatch: pytest.MonkeyPatch, *, formats: frozenset[str] | None = None) -> None:
    """Plans that keep what backward reads, each value in the first of its forms (of ``formats``) if it has one."""

    def choose(self: Strategy, _limit: int | None, *, tight: bool) -> Plan:
        stored: dict[int, int] = {}
        for form in self.problem.forms:
            if formats is None or form.format in formats:
                stored.setdefault(form.value, form.stored)
        saved = {stored.get(value, value) for value in self.free.saved}
        return self._plan_of(self.planner.add(saved, "everything"), "everything")

    monkeypatch.setattr(Strategy, "_choose", choose)


def compiled(module: nn.Module, **options: object) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(module, backend="dyngran", options={"budget": "20GiB", **EAGER, **options})


def gradients(step: Callable[..., Any], module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    module.zero_grad()
    torch.manual_seed(3)
    forward_backward(step, inputs)
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


def decisions(step: Callable[..., Any]) -> dict[str, tuple[str | None, int, int | None]]:
    """Per stored value by name: format, bytes before, bytes stored."""
    plan = dyngran.explain(step).plan
    return {one.name: (one.format, one.size_bytes, one.stored_bytes) for one in plan.decisions if one.format is not None}


@pytest.mark.parametrize(
    ("name", "device"), [pytest.param(name, device, marks=pytest.mark.xdist_group(name)) for device in DEVICES for name in FAMILIES]
)
def test_everything_lossless_trains_bit_by_bit_at_the_predicted_peak(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    module, inputs = family_on(name, device)
    with repeatable(device):
        want = gradients(compiled(module, pack=False), module, inputs)
        store_everything(monkeypatch)
        step = compiled(module)
        got = gradients(step, module, inputs)
    assert all(map(torch.equal, got, want))
    if device == "cpu":  # on a card libraries' workspaces appear between the two compilations
        module.zero_grad()
        peak_bytes = measured_peak(partial(forward_backward, step, inputs), held_tensors(module, inputs))
        assert abs(dyngran.explain(step).predicted_peak_bytes - peak_bytes) <= SLACK_BYTES + LOSS_BYTES


class Packable(nn.Module):
    """A rectifier into a max-pooling, dropout, and elements chosen by their order: masks, positions, signs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16 * 16 * 16, 64)

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(image)), 2)
        x = self.linear(F.dropout(x, 0.5).flatten(1))
        order = x.argsort(1)
        return (x.gather(1, order.flip(1)) * x.gather(1, ids.flip(1))).square().mean()


def packable() -> tuple[Packable, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Packable(), (torch.randn(32, 3, 32, 32), torch.randint(0, 64, (32, 64)))


def test_the_lossless_packer_saves_what_arithmetic_says(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = packable()
    store_everything(monkeypatch)
    step = compiled(module)
    gradients(step, module, inputs)
    image, pooled, chosen = 32 * 16 * 32 * 32, 32 * 16 * 16 * 16, 32 * 64
    found = decisions(step)
    assert found["relu"] == ("sign", 4 * image, image // 8)  # backward asks whether it is above zero, and its shape
    assert ("int16", 8 * pooled, 2 * pooled) in found.values()  # the pooling's positions, below 32 x 32
    assert ("bits", pooled, pooled // 8) in found.values()  # dropout's mask
    assert list(found.values()).count(("uint8", 8 * chosen, chosen)) == 2  # positions that flip chose from, below 64
    saved = {before - (after or 0) for _, before, after in found.values()}
    assert saved == {4 * image - image // 8, 6 * pooled, pooled - pooled // 8, 7 * chosen}
    report = str(dyngran.explain(step))
    assert "bits" in report and "sign" in report


class Masked(nn.Module):
    """Its own random masks, each of which takes longer to draw again than to pack."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x), 0.5)
        return x.square().mean()


def test_a_budget_is_met_by_packing_before_anything_runs_again() -> None:
    torch.manual_seed(0)
    module, inputs = Masked(), (torch.randn(4096, 256),)
    step = compiled(module, budget=None)
    want = gradients(step, module, inputs)
    free_bytes = dyngran.explain(step).predicted_peak_bytes
    budget = free_bytes - 3 * 4096 * 256  # of six masks, of which packing saves seven eighths
    step = compiled(module, budget=budget)
    got = gradients(step, module, inputs)
    assert all(map(torch.equal, got, want))
    assert {stored for stored, _, _ in decisions(step).values()} == {"bits"}
    assert dyngran.explain(step).plan.num_recomputed == 0
    module.zero_grad()
    assert measured_peak(partial(forward_backward, step, inputs), held_tensors(module, inputs)) <= budget


class NotPackable(nn.Module):
    """Masks and integers that somebody else has, or of which too little is known."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor, mask: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        returned = y > 0.5  # an output
        unknown = ids * 3  # of any size
        picked = y[torch.arange(y.shape[0]), unknown.remainder(64)[:, 0]]
        return (y * mask * returned).sum() + picked.sum() + y[:, :1].gather(1, unknown[:, :1] * 0).sum(), returned, unknown


def test_inputs_and_outputs_are_never_packed() -> None:
    torch.manual_seed(0)
    module = NotPackable()
    inputs = (torch.randn(4096, 64), torch.rand(4096, 64) > 0.5, torch.randint(0, 2**40, (4096, 64)))
    step = compiled(module, storage=["bf16", "int8"])
    step(*inputs)[0].backward()
    graph = registry.graphs_of(step)[-1]
    assert graph.strategy is not None
    problem = graph.strategy.problem
    held = problem.forward_outputs | problem.gradients | {value.index for value in problem.values if value.kind.is_static}
    assert held
    assert not held & {form.value for form in problem.forms}


class RangesOfPositions(nn.Module):
    """Integers whose range is known, one operator for each call; backward gathers by them."""

    def __init__(self, positions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 300)
        self._positions = positions

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.gather(1, self._positions(y.detach())).square().mean()


@pytest.mark.parametrize(
    ("positions", "format"),
    [
        (lambda y: y.argsort(1), "int16"),
        (lambda y: y.topk(128, dim=1).indices, "int16"),
        (lambda y: y[:, :200].sort(1).indices, "uint8"),
        (lambda y: y[:, :80].max(1, keepdim=True).indices.repeat(1, 8), "uint8"),
        (lambda y: y.argmax(1, keepdim=True).repeat(1, 8), "int16"),
        (lambda y: (y > 0).to(torch.int64), "uint8"),
        (lambda y: y.to(torch.int32).clamp(0, 299).to(torch.int64), "int16"),  # gather says so: its like were refused otherwise
    ],
)
def test_integers_are_stored_in_the_narrowest_type_of_their_range(
    positions: Callable[[Tensor], Tensor], format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module, x = RangesOfPositions(positions), torch.randn(64, 64)
    want = gradients(compiled(module, pack=False), module, (x,))
    store_everything(monkeypatch)
    step = compiled(module)
    assert all(map(torch.equal, gradients(step, module, (x,)), want))
    assert format in {stored for stored, _, _ in decisions(step).values()}


def test_a_cast_that_wraps_has_the_range_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions below 250 become -128 to 127 in int8: they do not fit into uint8, whatever made them."""

    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 250)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return (y * y.detach().argsort(1).to(torch.int8).to(torch.int64)).square().mean()

    torch.manual_seed(0)
    module, x = Wraps(), torch.randn(64, 64)
    want = gradients(compiled(module, pack=False), module, (x,))
    store_everything(monkeypatch)
    step = compiled(module)
    assert all(map(torch.equal, gradients(step, module, (x,)), want))
    assert "uint8" not in {stored for stored, _, _ in decisions(step).values()}


@pytest.mark.parametrize(("threshold", "dtype"), [(0.1, torch.bfloat16), (0.1, torch.float32), (0.5, torch.bfloat16)])
def test_a_threshold_is_asked_in_the_type_of_the_values(threshold: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(64, 64, dtype=dtype), torch.randn(512, 64, dtype=dtype)

    def run(step: Callable[..., Any]) -> list[Tensor]:
        return gradients(lambda batch: step(batch).float().square().mean(), module, (x,))

    def model(batch: Tensor) -> Tensor:
        return F.threshold(module(batch), threshold, 0.0).exp()

    torch._dynamo.reset()
    want = run(torch.compile(model, backend="dyngran", options={**EAGER, "pack": False}))
    store_everything(monkeypatch)
    torch._dynamo.reset()
    step = torch.compile(model, backend="dyngran", options={"budget": "20GiB", **EAGER})
    assert all(map(torch.equal, run(step), want))
    assert ("sign" in {stored for stored, _, _ in decisions(step).values()}) == (threshold == 0.5)


def test_a_pooling_keeps_the_shape_of_what_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else of it is read in backward: not a byte is stored."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3))
    x = torch.randn(16, 3, 34, 34)

    def run(step: Callable[..., Any]) -> list[Tensor]:
        return gradients(lambda image: step(image).square().mean(), module, (x,))

    want = run(compiled(module, pack=False))
    store_everything(monkeypatch)
    step = compiled(module)
    assert all(map(torch.equal, run(step), want))
    assert ("shape", 4 * 16 * 8 * 32 * 32, 0) in decisions(step).values()


@pytest.mark.parametrize("formats", [["bf16"], ["fp16"], ["fp8"], ["fp8_e5m2"], ["int8"], ["int4"], ["bf16", "int8"]])
def test_lossy_formats_change_gradients_within_reason(formats: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
    module, x = nn.Sequential(*layers, nn.Linear(64, 8)), torch.randn(512, 64)

    def run(step: Callable[..., Any], number: int = 0) -> Tensor:
        step_tensor(torch.device("cpu")).fill_(number)
        return torch.cat([one.flatten() for one in gradients(lambda batch: step(batch).square().mean(), module, (x,))])

    want = run(compiled(module))
    store_everything(monkeypatch, formats=frozenset(formats))
    step = compiled(module, storage=formats)
    got = run(step)
    assert {stored for stored, _, _ in decisions(step).values()} == {formats[0]}
    error = ((got - want).norm() / want.norm()).item()
    bound = {"bf16": 5e-3, "fp16": 1e-3, "fp8": 6e-2, "fp8_e5m2": 1.2e-1, "int8": 3e-2, "int4": 4e-1}[formats[0]]
    assert 0 < error < bound
    assert torch.equal(run(compiled(module, storage=formats)), got)  # the same numbers are drawn again
    if formats == ["int4"]:  # and others in another step
        assert not torch.equal(run(step, 5), got)


def test_four_bits_are_for_linear_readers_alone() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 8)), torch.randn(512, 64)
    step = compiled(module, storage=["int4"])
    step(x).sum().backward()
    graph = registry.graphs_of(step)[-1]
    assert graph.strategy is not None
    problem = graph.strategy.problem
    offered = {problem.ops[problem.values[form.value].producer or 0].target for form in problem.forms if form.format == "int4"}
    assert offered == {"aten.gelu.default"}  # the softmax's result is read by its own backward
    for form in problem.forms:
        readers = [op.index for op in problem.ops if form.value in op.reads and op.index != form.store]
        early = {index for index in readers if problem.ops[index].side.value != "backward"}
        assert form.format != "int4" or form.barred == early


def test_a_router_never_chooses_again_from_rounded_numbers() -> None:
    """Whatever is saved: where its top-k runs again, what it is made of is exact."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.score = nn.Linear(64, 64), nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x).tanh()
            weight, chosen = self.score(x).softmax(-1).topk(4)
            return (x[:, :16].gather(1, chosen) * weight).square().mean()

    torch.manual_seed(0)
    step = compiled(Router(), storage=["bf16"])
    step(torch.randn(512, 64)).backward()
    strategy = registry.graphs_of(step)[-1].strategy
    assert strategy is not None
    problem, simulator = strategy.problem, strategy.simulator
    choosing = next(op for op in problem.ops if op.target.startswith("aten.topk"))
    above = {read for op in problem.ops for read in op.reads if op.index <= choosing.index}
    num_met = 0
    for saved in itertools.chain.from_iterable(itertools.combinations(simulator.candidates, count) for count in range(4)):
        crossing = simulator.normalize(saved)
        _, backward = simulator.schedule(crossing)
        if choosing.index in backward:
            num_met += 1
            rounded = {problem.form_of[value].value for value in crossing if value in problem.form_of and problem.form_of[value].error}
            reads, todo = set(), list(choosing.reads)
            while todo:  # what the top-k is made of in backward
                value = todo.pop()
                if value in reads or value in crossing or value not in above:
                    continue
                reads.add(value)
                producer = problem.values[value].producer
                if producer is not None and value not in rounded:
                    todo += problem.ops[producer].reads
            assert not reads & rounded
    assert num_met


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["bf17"], "did you mean 'bf16'"),
        ("bf16", "must be a list"),
        ([3], "is no format"),
        (["bits"], "needs no name"),
    ],
)
def test_formats_that_are_none_are_refused(value: object, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        compiled(nn.Linear(2, 2), storage=value)(torch.ones(2, 2)).sum().backward()


def test_a_plan_file_holds_its_forms_and_says_which_are_allowed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 8)), torch.randn(512, 64)
    with monkeypatch.context() as patch:
        store_everything(patch)
        step = compiled(module, storage=["bf16"])
        want = gradients(lambda batch: step(batch).square().mean(), module, (x,))
        path = dyngran.save_plan(tmp_path / "plan.json", step)
        found = decisions(step)
    assert {"bits", "bf16"} == {stored for stored, _, _ in found.values()}
    plan = load_plan(path).plan
    stored = {one.name: one for one in plan.decisions if one.action in (Action.PACK, Action.NARROW)}
    assert {name: (one.format, one.size_bytes, one.stored_bytes) for name, one in stored.items()} == found
    assert all(bool(one.error) == (one.action is Action.NARROW) for one in stored.values())
    again = compiled(module, storage=["bf16"], plan=str(path), budget=None)
    assert all(map(torch.equal, gradients(lambda batch: again(batch).square().mean(), module, (x,)), want))
    assert decisions(again) == found
    with pytest.raises(PlanMismatch, match=r"storage.*bf16"):
        compiled(module, plan=str(path), budget=None)(x).sum().backward()


def test_a_smaller_peak_is_within_reach_where_formats_are_named() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(*(nn.Linear(128, 128) for _ in range(2)), nn.Softmax(-1), nn.Linear(128, 128)), torch.randn(2048, 128)
    least = []
    for formats in ([], ["bf16"], ["bf16", "fp8"]):
        step = compiled(module, storage=formats, budget=1)
        with pytest.raises(BudgetTooSmall) as refusal:
            step(x).square().mean().backward()
        least.append(refusal.value.least_peak_bytes)
    assert least == sorted(least, reverse=True)
    with pytest.raises(BudgetTooSmall, match=r"stored rounded, options=\{'storage': \['bf16', 'fp8'\]\} may need less"):
        compiled(module, budget=least[0] - 1)(x).square().mean().backward()
    with pytest.raises(BudgetTooSmall) as refusal:
        compiled(module, storage=["bf16"], budget=least[1] - 1)(x).square().mean().backward()
    assert "stored rounded" not in str(refusal.value)
