"""Values of which a part is stored: gradients, peaks, what is chosen, what is known to be exact, files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DEVICES, FAMILIES, family_on, repeatable
from measure import forward_backward, held_tensors, measured_peak
from test_storage import LOSS_BYTES, SLACK_BYTES, compiled, decisions, gradients, store_everything
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import dyngran
from dyngran.compiler import planned_graph, registry, slice_forms, slice_probe, strategy, torch_private
from dyngran.compiler.partition import partition
from dyngran.compiler.row_slices import Exactness, Rows
from dyngran.compiler.slice_probe import SliceProbe
from dyngran.compiler.slices import Cone, Slice, find_cone
from dyngran.compiler.stored_forms import StoredForm
from dyngran.passes.forms import Offer, Transfer
from dyngran.passes.plan import Action
from dyngran.passes.problem import Problem
from dyngran.passes.signature import TensorSpec

aten = torch.ops.aten


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of small values as well, in small steps."""
    monkeypatch.setattr(strategy, "find_slices", partial(slice_forms.find_slices, min_bytes=256, step_bytes=64))


def problem_of(step: Callable[..., Any]) -> Problem:
    planned = registry.graphs_of(step)[-1].strategy
    assert planned is not None
    return planned.problem


@pytest.mark.parametrize(
    ("name", "device"), [pytest.param(name, device, marks=pytest.mark.xdist_group(name)) for device in DEVICES for name in FAMILIES]
)
@pytest.mark.usefixtures("fine")
def test_slices_of_everything_train_bit_by_bit_at_the_predicted_peak(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    module, inputs = family_on(name, device)
    with repeatable(device):
        want = gradients(compiled(module, pack=False, slice=False), module, inputs)
        store_everything(monkeypatch)
        step = compiled(module, pack=False)
        got = gradients(step, module, inputs)
    assert all(map(torch.equal, got, want))
    actions = {one.action for one in dyngran.explain(step).plan.decisions if one.format is not None}
    assert actions == {Action.SLICE} or name == "resnet_channels_last"  # whose rows lie apart
    if device == "cpu":  # on a card libraries' workspaces appear between the two compilations
        module.zero_grad()
        peak_bytes = measured_peak(partial(forward_backward, step, inputs), held_tensors(module, inputs))
        assert peak_bytes <= dyngran.explain(step).predicted_peak_bytes + SLACK_BYTES + LOSS_BYTES


class Wide(nn.Module):
    """Few values, and each a large part of the step's memory."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.up, self.down = (nn.ModuleList(nn.Linear(*sizes) for _ in range(2)) for sizes in ((width, 4 * width), (4 * width, width)))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return x.square().mean()


def wide(device: str = "cpu") -> tuple[Wide, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Wide().to(device), (torch.randn(4096, 128, device=device),)


@pytest.mark.parametrize("device", DEVICES)
def test_a_budget_between_two_plans_is_met_closely(device: str) -> None:
    """The default offers: every value here has more than 4 MiB, and is far more than one step of the transient."""
    module, inputs = wide(device)
    step = compiled(module, budget=None, pack=False)
    want = gradients(step, module, inputs)
    free = dyngran.explain(step)
    budget = free.predicted_peak_bytes - 2**22
    plans = {}
    for allowed in (False, True):
        step = compiled(module, budget=budget, pack=False, slice=allowed)
        assert all(map(torch.equal, gradients(step, module, inputs), want))
        plans[allowed] = dyngran.explain(step).plan
        if device == "cpu":
            module.zero_grad()
            assert measured_peak(partial(forward_backward, step, inputs), held_tensors(module, inputs)) <= budget
    assert plans[True].time_us <= plans[False].time_us


@pytest.mark.usefixtures("fine")
def test_one_row_is_not_cut_and_other_dimensions_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return (self.second(torch.relu(self.first(x))) * 2).square().mean()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, x = Channels(), torch.randn(1, 3, 32, 32)
    want = gradients(compiled(module, pack=False, slice=False), module, (x,))
    store_everything(monkeypatch)
    step = compiled(module, pack=False)
    assert all(map(torch.equal, gradients(step, module, (x,)), want))
    cut = [one for one in dyngran.explain(step).plan.decisions if one.action is Action.SLICE]
    assert cut
    assert all(one.dimension != 0 for one in cut)


@pytest.mark.usefixtures("fine")
def test_what_was_drawn_is_never_drawn_again_for_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    x = torch.randn(256, 64)

    def run(step: Callable[..., Any]) -> list[Tensor]:
        return gradients(lambda batch: step(batch).square().mean(), module, (x,))

    want = run(compiled(module, pack=False, slice=False))
    store_everything(monkeypatch)
    step = compiled(module, pack=False)
    assert all(map(torch.equal, run(step), want))
    problem = problem_of(step)
    pinned = {op.index for op in problem.ops if op.pinned or "rand" in op.target or "bernoulli" in op.target}
    forms = [form for form in problem.forms if form.action is Action.SLICE]
    assert forms and pinned
    assert not any(form.again & pinned for form in forms)


def test_a_library_that_sums_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product whose bits depend on how many rows it has is not offered in part; what is made of it alone is."""
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(512, 64)
    monkeypatch.setattr(strategy, "find_slices", partial(slice_forms.find_slices, min_bytes=256, step_bytes=64))
    honest = compiled(module, pack=False)
    honest(x).square().mean().backward()
    targets = {problem_of(honest).ops[op].target for form in problem_of(honest).forms for op in form.again}
    assert "aten.relu.default" in targets

    make = slice_probe._round_trip

    def rounds(cone: Any) -> Callable[..., Tensor]:
        run = make(cone)
        if any("addmm" in str(node.target) for node in cone.nodes):
            return lambda *given: torch.nextafter(run(*given), torch.tensor(0.0))
        return run

    monkeypatch.setattr(slice_probe, "_round_trip", rounds)
    monkeypatch.setattr(slice_probe, "_known", {})
    wary = compiled(module, pack=False)
    wary(x).square().mean().backward()
    targets = {problem_of(wary).ops[op].target for form in problem_of(wary).forms for op in form.again}
    assert "aten.relu.default" in targets
    assert not any("addmm" in target for target in targets)


@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize("function", [torch.relu, torch.sigmoid, torch.tanh, F.gelu, F.silu])
@pytest.mark.parametrize("width", [100, 128])
def test_ends_of_vectors_that_give_other_bits_are_found_out(function: Callable[[Tensor], Tensor], width: int) -> None:
    """On a CPU functions may give other bits for the last numbers of a thread's share, which fill no vector: they are offered in part where
    nothing is left over, and everywhere if they give the same bits."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    numbers = torch.randn(200_000)
    is_same_everywhere = torch.equal(function(numbers), function(torch.stack((numbers, numbers), dim=1)[:, 0]))
    module, x = nn.Linear(width, width), torch.randn(64, width)

    def model(batch: Tensor) -> Tensor:
        return function(module(batch)).square()

    step = compiled(model, pack=False)
    step(x).mean().backward()
    forms = [form for form in problem_of(step).forms if form.action is Action.SLICE]
    again = {problem_of(step).ops[op].target for form in forms for op in form.again}
    assert (f"aten.{function.__name__}.default" in again) == (is_same_everywhere or width == 128)


@pytest.mark.usefixtures("fine")
def test_inductor_trains_with_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, x = (
        nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64), nn.Softmax(dim=-1)),
        torch.randn(512, 64),
    )
    exact = copy.deepcopy(module).double()
    exact(x.double()).square().sum().backward()
    store_everything(monkeypatch)
    torch._dynamo.reset()
    step = torch.compile(module, backend="dyngran", options={"budget": "20GiB", "keep_below": 0, "pack": False})
    for _ in range(2):
        module.zero_grad()
        step(x).square().sum().backward()
    for one, other in zip(module.parameters(), exact.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert (one.grad.double() - other.grad).norm() <= 1e-5 * other.grad.norm()
    assert {one.action for one in dyngran.explain(step).plan.decisions if one.format is not None} == {Action.SLICE}


def test_a_plan_file_holds_slices_and_is_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = wide()
    want = gradients(compiled(module, pack=False, slice=False), module, inputs)
    with monkeypatch.context() as patch:
        store_everything(patch)
        step = compiled(module, pack=False)
        gradients(step, module, inputs)
    path = tmp_path / "plan.json"
    dyngran.save_plan(path, step)
    cut = [one for one in dyngran.explain(step).plan.decisions if one.action is Action.SLICE]
    assert {one.name for one in cut} >= {"addmm", "gelu"}
    for one in cut:
        assert one.dimension == 0
        assert one.fraction is not None and one.stored_bytes is not None
        assert one.stored_bytes == pytest.approx(one.fraction * one.size_bytes, abs=1024)
        assert not one.error
        assert "the same bits as forward's" in one.reason
    again = compiled(module, plan=path, pack=False)
    assert all(map(torch.equal, gradients(again, module, inputs), want))
    assert decisions(again) == decisions(step)
    with pytest.raises(Exception, match="not all of them can be stored so here"):
        gradients(compiled(module, plan=path, pack=False, slice=False), module, inputs)


@pytest.mark.usefixtures("fine")
def test_the_missing_rows_alone_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In backward the cheap operator above a value runs on as many rows as are missing."""
    cut: list[tuple[fx.GraphModule, fx.GraphModule]] = []

    def recorded(*args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        cut.append(partition(*args, **kwargs))
        return cut[-1]

    monkeypatch.setattr(planned_graph, "partition", recorded)
    store_everything(monkeypatch, formats=frozenset({"rows0_448_of_512"}))
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(512, 64)
    step = compiled(module, pack=False)
    step(x).square().mean().backward()
    assert decisions(step)["relu"][0] == "rows0_448_of_512"
    rows = [[node.meta["val"].shape[0] for node in side.graph.find_nodes(op="call_function", target=aten.relu.default)] for side in cut[-1]]
    assert rows == [[512], [64]]


def test_attention_is_cut_along_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.out(mixed).square().mean()

    monkeypatch.setattr(strategy, "find_slices", partial(slice_forms.find_slices, min_bytes=256, step_bytes=64))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, x = Attention(), torch.randn(8, 32, 64)
    want = gradients(compiled(module, pack=False, slice=False), module, (x,))
    store_everything(monkeypatch)
    step = compiled(module, pack=False)
    assert all(map(torch.equal, gradients(step, module, (x,)), want))


def traced(function: Callable[..., Tensor], *inputs: Tensor) -> fx.Node:
    """The last operator of a function."""
    return [node for node in make_fx(function, tracing_mode="fake")(*inputs).graph.nodes if node.op == "call_function"][-1]


def cone_of(function: Callable[..., Tensor], *inputs: Tensor, rows: Rows, leaves: frozenset[str] = frozenset()) -> Cone | None:
    """Of the last operator of a traced function; ``leaves``: names of operators that are read as they are."""
    return find_cone(
        traced(function, *inputs), rows, is_leaf=lambda node: node.name in leaves, may_run=lambda node: not torch_private.is_random(node)
    )


def test_cheap_operators_run_on_rows_up_to_what_is_there() -> None:
    rows = Rows(0, 2, 8)
    cone = cone_of(lambda x, w: ((x @ w).relu() * 2).sigmoid(), torch.ones(8, 4), torch.ones(4, 4), rows=rows)
    assert cone is not None
    assert [node.name for node in cone.nodes] == ["relu", "mul", "sigmoid"]
    assert [node.name for node in cone.leaves] == ["mm"]  # no second product for a cheap operator
    assert {call.rows for call in cone.calls} == {rows}
    assert cone.exactness is Exactness.POINTWISE
    cone = cone_of(lambda x, w: ((x @ w).relu() * 2).sigmoid(), torch.ones(8, 4), torch.ones(4, 4), rows=rows, leaves=frozenset({"relu"}))
    assert cone is not None
    assert [node.name for node in cone.leaves] == ["relu"]
    cone = cone_of(lambda x, w: x.relu() @ w, torch.ones(8, 4), torch.ones(4, 4), rows=rows)
    assert cone is not None
    assert [node.name for node in cone.nodes] == ["relu", "mm"]
    assert cone.exactness is Exactness.LIBRARY


def test_what_is_read_whole_or_in_two_ways_is_a_leaf() -> None:
    def whole(x: Tensor) -> Tensor:
        once = x.relu()
        return once * once.sum(0)

    def turned(x: Tensor) -> Tensor:
        once = x.relu()
        return once + once.t()

    def shared(x: Tensor) -> Tensor:
        once = x.relu()
        return once[:4] + once[4:]

    for function, rows, leaf in ((whole, Rows(0, 2, 8), "sum_1"), (turned, Rows(0, 2, 8), "relu"), (shared, Rows(0, 1, 4), "relu")):
        cone = cone_of(function, torch.ones(8, 8), rows=rows)
        assert cone is not None
        assert leaf in [node.name for node in cone.leaves]
        assert leaf not in [node.name for node in cone.nodes]


@pytest.mark.parametrize(
    ("function", "dimension"),
    [(lambda x: x.softmax(0), 0), (lambda x: x.cumsum(1), 1), (torch.rand_like, 0), (lambda x: x.sort(0).values, 0)],
)
def test_rows_that_depend_on_others_have_no_cone(function: Callable[..., Tensor], dimension: int) -> None:
    assert cone_of(function, torch.ones(8, 8), rows=Rows(dimension, 2, 8)) is None


def test_a_trial_that_has_no_room_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_probe, "_known", {})
    cone = cone_of(lambda x, y: x + y, torch.ones(64, 64), torch.ones(64, 64), rows=Rows(0, 8, 64))
    assert cone is not None
    num_bytes = 64 * 64 * 4
    assert SliceProbe(torch.device("cpu"), limit_bytes=5 * num_bytes - 1).exact_ones([cone]) == []
    assert SliceProbe(torch.device("cpu"), limit_bytes=5 * num_bytes).exact_ones([cone]) == [cone]


def test_a_first_compilation_under_a_tight_budget_has_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process, where nothing was tried without a budget before."""
    module, inputs = wide()
    step = compiled(module, budget=None, pack=False)
    gradients(step, module, inputs)
    budget = dyngran.explain(step).predicted_peak_bytes - 2**22
    monkeypatch.setattr(slice_probe, "_known", {})
    step = compiled(module, budget=budget, pack=False)
    gradients(step, module, inputs)
    cut = {problem_of(step).values[form.value].name for form in problem_of(step).forms}
    assert cut == {"addmm", "gelu", "addmm_2", "gelu_1"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_numbers_that_are_tried_have_all_the_digits_of_their_type(dtype: torch.dtype) -> None:
    """Products of float32 numbers are exact in float64: a sum in another order would pass for the same."""
    sample = slice_probe._sample(TensorSpec((4096,), (1,), dtype, "cpu"), torch.device("cpu"), torch.Generator().manual_seed(0))
    narrower = {torch.float64: torch.float32, torch.float32: torch.bfloat16}.get(dtype)
    assert sample.dtype is dtype and (sample < 0).any() and (sample > 0).any()
    if narrower is not None:
        assert (sample.to(narrower).to(dtype) != sample).float().mean() > 0.99


def test_functions_are_tried_on_numbers_of_every_size() -> None:
    """In bfloat16 this gelu's vectors differ from its single numbers above 2 only: what is drawn around 0 would not show it."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = patterns[patterns.abs() < 256]
    one, other = F.gelu(numbers, approximate="tanh"), F.gelu(torch.stack((numbers, numbers), dim=1)[:, 0], approximate="tanh")
    node = traced(lambda x: F.gelu(x, approximate="tanh"), torch.ones(8, dtype=torch.bfloat16))
    assert slice_probe._is_same_one_by_one(node) == [torch.equal(one, other)]


def test_functions_with_other_numbers_are_tried_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(slice_probe, "_known", {})
    monkeypatch.setattr(slice_probe, "_is_same_one_by_one", lambda node: tried.append(node) or [True])
    probe, x = SliceProbe(torch.device("cpu"), limit_bytes=None), torch.ones(8)
    scaled: list[Callable[..., Tensor]] = [torch.add, lambda a, b: torch.add(a, b, alpha=0.3), lambda a, b: torch.add(a, b, alpha=0.3)]
    for function in scaled:
        assert probe._is_same_everywhere(traced(function, x, x))
    assert len(tried) == 2


@pytest.mark.parametrize(
    ("function", "shape", "rows", "is_offered"),
    [
        (lambda x: x.softmax(0), (3, 40_003), Rows(1, 20_000, 40_003), False),  # columns of a sum over rows: the last fill no vector
        (lambda x: x.softmax(1), (40, 3, 101), Rows(0, 20, 40), False),  # threads share out what lies inside
        (lambda x: x.softmax(1), (40, 3, 128), Rows(0, 20, 40), True),
        (lambda x: x.softmax(-1), (40, 101), Rows(0, 20, 40), True),
        (lambda x: x.sum(0), (40, 101), Rows(0, 20, 101), False),
        (lambda x: x @ x[:1].t(), (1000, 64), Rows(0, 500, 1000), False),  # of one column the last rows are summed otherwise
    ],
)
def test_sums_are_cut_where_each_row_is_summed_by_itself(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], rows: Rows, is_offered: bool
) -> None:
    torch.set_num_threads(1)
    cone = cone_of(function, torch.ones(shape), rows=rows)
    assert cone is not None
    assert SliceProbe(torch.device("cpu"), limit_bytes=None).exact_ones([cone]) == ([cone] if is_offered else [])


def test_slices_move_with_the_ops_that_they_name() -> None:
    """A step that holds what the step before returned has one op more, before all others."""
    cost = Transfer(cost_us=1.0)
    offer = Offer(
        value=3, action=Action.SLICE, format="rows0_1_of_2", size_bytes=1, store=cost, load=cost, parts=(2,),
        again=frozenset({4, 5}), barred=frozenset({6}),
    )  # fmt: skip
    moved = StoredForm(offer=offer, codec=Slice(Rows(0, 1, 2), frozenset({"mm"}))).moved(1).offer
    assert (moved.again, moved.barred, moved.parts, moved.value) == ({5, 6}, {7}, (2,), 3)
