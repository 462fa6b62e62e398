"""What a person runs into in the first hour: bad input, ordinary surprises, and habits of notebooks. Each has an answer by name."""

from __future__ import annotations

import copy
import gc
import logging
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from measure import held_tensors, measured_peak, storage_bytes
from torch import Tensor, nn
from torch.nn import functional as F

import dyngran
from dyngran.errors import BudgetTooSmall, InvalidBudget, InvalidOption, NothingCompiled, ToolMissing
from dyngran.passes.plan import Action

EAGER: dict[str, object] = {"codegen": "eager", "keep_below": 0}
WIDTH, BATCH = 64, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Four blocks; returns its features.

    ``broken`` puts a graph break in the middle, ``shattered`` one inside of the loop (Dynamo then gives the frame up and compiles each
    block by itself), ``extra`` adds an output that nobody uses.
    """

    def __init__(self, *, broken: bool = False, shattered: bool = False, extra: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.ModuleList(Block() for _ in range(2)), nn.ModuleList(Block() for _ in range(2))
        self.broken, self.shattered, self.extra = broken, shattered, extra

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        for block in self.first:
            x = block(x)
            if self.shattered:
                torch._dynamo.graph_break()
        if self.broken:
            torch._dynamo.graph_break()
        for block in self.second:
            x = block(x)
        return (x, x.repeat(1, 8)) if self.extra else x


def make(**kwargs: bool) -> Net:
    torch.manual_seed(0)
    return Net(**kwargs)


def batch(num_rows: int = BATCH, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(num_rows)).to(dtype)


def backward(step: Callable[..., object], x: Tensor) -> None:
    out = step(x)
    out = out[0] if isinstance(out, tuple) else out
    assert isinstance(out, Tensor)
    (out * out).mean().backward()  # type: ignore[no-untyped-call]


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def compiled(module: nn.Module, **options: object) -> Callable[..., object]:
    return torch.compile(module, backend="dyngran", options={**EAGER, **options})


def peak_of(step: Callable[..., object], module: nn.Module, x: Tensor) -> int:
    """Measured peak of one steady step: gradients do not exist yet when it starts."""
    module.zero_grad()
    return measured_peak(lambda: backward(step, x), held_tensors(module, (x,)))


def tight_budget(module: nn.Module, x: Tensor, share: float = 0.7) -> int:
    """Between the floor of this step and its peak with the default partition."""
    torch._dynamo.reset()
    reference = compiled(module, solver="default")
    backward(reference, x)
    free_bytes = peak_of(reference, module, x)
    module.zero_grad()
    torch._dynamo.reset()
    with pytest.raises(BudgetTooSmall) as refusal:
        compiled(module, budget=1)(x)
    torch._dynamo.reset()
    least_bytes = refusal.value.least_peak_bytes
    return int(least_bytes + share * max(0, free_bytes - least_bytes))


def check_trains_exactly(module: nn.Module, x: Tensor, *, share: float = 0.7) -> dyngran.Plan:
    """Under a budget that binds, gradients are the reference's and the measured peak is within the budget. Returns the plan."""
    other = copy.deepcopy(module)
    budget_bytes = tight_budget(copy.deepcopy(module), x, share)
    reference = compiled(other, solver="default")
    backward(reference, x)
    step = compiled(module, budget=budget_bytes)
    backward(step, x)
    want, got = gradients(other), gradients(module)
    assert [name for name, tensor in want.items() if (tensor is None) is not (got[name] is None)] == []
    for name, tensor in want.items():
        if tensor is not None:
            assert torch.equal(tensor, got[name]), name  # type: ignore[arg-type]
    assert peak_of(step, module, x) <= budget_bytes
    plan: dyngran.Plan = dyngran.explain(step).plan
    return plan


@pytest.fixture(params=[False, True], ids=["errors raised", "errors suppressed"])
def suppress_errors(request: pytest.FixtureRequest) -> Iterator[bool]:
    with torch._dynamo.config.patch(suppress_errors=request.param):
        yield request.param


@pytest.mark.parametrize("budget", [0, -1, "12 parsecs", "", "0 GiB", "-8GiB", "101%", 2.5, True, [1]], ids=repr)
@pytest.mark.usefixtures("suppress_errors")
def test_a_budget_that_is_no_amount_of_memory_is_refused_at_the_first_call(budget: object) -> None:
    step = compiled(make(), budget=budget)
    with pytest.raises(InvalidBudget, match="8GiB"):  # the message shows the valid forms
        step(batch())


@pytest.mark.usefixtures("suppress_errors")
def test_a_budget_below_the_floor_is_refused_and_the_floor_it_names_trains() -> None:
    step = compiled(make(), budget="100KiB")
    for _ in range(2):  # and not silently run without a budget the second time
        with pytest.raises(BudgetTooSmall) as refusal:
            step(batch())
    error = refusal.value
    assert error.budget_bytes == 100 * 1024
    assert error.least_peak_bytes > error.budget_bytes
    assert error.pinned[0][1] == max(size for _, size in error.pinned)
    assert str(error.least_peak_bytes) in str(error)
    torch._dynamo.reset()
    module = make()
    again = compiled(module, budget=error.least_peak_bytes)
    backward(again, batch())
    assert peak_of(again, module, batch()) <= error.least_peak_bytes


@pytest.mark.parametrize(
    ("options", "nearest"),
    [({"budgets": "8GiB"}, "budget"), ({"codgen": "eager"}, "codegen"), ({"solver": "ipl"}, "ilp"), ({"codegen": "eeger"}, "eager")],
    ids=["budgets", "codgen", "solver", "codegen"],
)
@pytest.mark.usefixtures("suppress_errors")
def test_an_unknown_option_is_refused_with_the_nearest_name(options: dict[str, object], nearest: str) -> None:
    step = torch.compile(make(), backend="dyngran", options=options)
    with pytest.raises(InvalidOption, match=f"did you mean '{nearest}'"):
        step(batch())


def test_a_model_that_does_not_require_grad_is_left_alone() -> None:
    module = make().requires_grad_(False)
    x = batch()
    step = compiled(module, budget=1)  # nothing to plan: no budget could be missed by a backward
    torch.testing.assert_close(step(x), module(x))
    with pytest.raises(NothingCompiled, match="gradients"):
        dyngran.explain(step)


def test_no_grad_is_left_alone() -> None:
    module, x = make(), batch()
    step = compiled(module, budget=1)
    with torch.no_grad():
        torch.testing.assert_close(step(x), module(x))
    with torch.inference_mode():
        torch.testing.assert_close(step(x), module(x))


def test_a_graph_break_in_the_middle() -> None:
    """Two graphs, one step: the budget is the step's, honoured or refused by what the second graph finds left; a cut is possible."""
    module, other, x = make(broken=True), make(broken=True), batch()
    reference = compiled(other, solver="default")
    backward(reference, x)
    free_bytes = peak_of(reference, other, x)
    other.zero_grad()
    backward(reference, x)
    held_bytes = storage_bytes(held_tensors(module, (x,)))
    budget_bytes = int(held_bytes + 0.85 * (free_bytes - held_bytes))
    torch._dynamo.reset()
    step = compiled(module, budget=budget_bytes)
    try:
        backward(step, x)
    except BudgetTooSmall as refusal:
        budget_bytes = refusal.least_peak_bytes
        torch._dynamo.reset()
        step = compiled(module, budget=budget_bytes)
        backward(step, x)
    for name, tensor in gradients(other).items():
        assert torch.equal(tensor, module.get_parameter(name).grad), name  # type: ignore[arg-type]
    assert len(dyngran.explain(step).parts) == 2
    assert peak_of(step, module, x) <= budget_bytes < free_bytes


def test_a_refusal_before_a_graph_break_says_that_it_speaks_of_a_part() -> None:
    with pytest.raises(BudgetTooSmall, match="a part of the step") as refusal:
        compiled(make(broken=True), budget=1)(batch())
    assert "'outputs': 'dropped'" not in str(refusal.value), "what is handed over a break is nothing that the model returns"


def test_a_graph_break_inside_of_a_loop_is_no_silent_overrun() -> None:
    """Dynamo compiles the loop's body as a graph of its own, and one step calls it several times: no plan knows how often."""
    module, other, x = make(shattered=True), make(shattered=True), batch()
    budget_bytes = tight_budget(make(), x, share=0.3)
    reference = compiled(other, solver="default")
    backward(reference, x)
    step = compiled(module, budget=budget_bytes)
    backward(step, x)
    for name, tensor in gradients(other).items():
        assert torch.equal(tensor, module.get_parameter(name).grad), name  # type: ignore[arg-type]
    for _ in range(3):
        peak_bytes = peak_of(step, module, x)
    report = dyngran.explain(step)
    assert peak_bytes <= budget_bytes or report.drift or any("graph break" in note for note in report.notes), str(report)


def test_a_second_call_with_another_batch_size() -> None:
    module, other = make(), make()
    budget_bytes = tight_budget(make(), batch(2 * BATCH))
    step, reference = compiled(module, budget=budget_bytes), compiled(other, solver="default")
    for num_rows in (BATCH, 2 * BATCH, BATCH + 32, 2 * BATCH):
        backward(step, batch(num_rows))
        backward(reference, batch(num_rows))
        for name, tensor in gradients(other).items():
            assert tensor is not None
            assert torch.equal(tensor, module.get_parameter(name).grad), (num_rows, name)  # type: ignore[arg-type]
        module.zero_grad()
        other.zero_grad()
        assert peak_of(step, module, batch(num_rows)) <= budget_bytes
        module.zero_grad()
    with pytest.raises(BudgetTooSmall):
        backward(step, batch(8 * BATCH))


def test_a_frozen_backbone() -> None:
    module = make()
    module.first.requires_grad_(False)
    check_trains_exactly(module, batch())
    assert all(p.grad is None for p in module.first.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_precisions(dtype: torch.dtype) -> None:
    plan = check_trains_exactly(make().to(dtype), batch(dtype=dtype))
    assert plan.num_recomputed > 0


def test_an_output_that_nobody_uses() -> None:
    check_trains_exactly(make(extra=True), batch())


def test_a_batch_of_one() -> None:
    check_trains_exactly(make(), batch(1), share=1.0)


def test_a_loss_outside_of_the_compiled_model() -> None:
    plan = check_trains_exactly(make(), batch())
    assert plan.num_recomputed > 0


def test_a_model_that_is_under_its_budget_already_is_not_changed() -> None:
    step = compiled(make(), budget="8GiB")
    backward(step, batch())
    report = dyngran.explain(step)
    assert report.plan.num_recomputed == 0
    assert {decision.action for decision in report.plan.decisions} <= {Action.KEEP}
    assert report.plan.overhead_us == 0
    assert "nothing" in str(report).lower()


def test_running_a_notebook_cell_again() -> None:
    """The same cell, three times over, without a reset between: a new model, compiled again, with another budget."""
    x = batch()
    tight = tight_budget(make(), x)
    found = []
    for budget_bytes in (tight, 2**30, tight):
        module = make()
        step = compiled(module, budget=budget_bytes)
        backward(step, x)
        assert peak_of(step, module, x) <= budget_bytes
        found.append((dyngran.explain(step).plan.num_recomputed, gradients(module)))
    assert found[0][0] == found[2][0] > found[1][0] == 0
    for name, tensor in found[0][1].items():
        assert tensor is not None
        for _, other in found[1:]:
            assert torch.equal(tensor, other[name])  # type: ignore[arg-type]


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_refusal_that_was_caught_keeps_neither_model_nor_inputs(is_reset: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Else a second try with a larger budget would start with the first one's memory gone. Handlers that keep records change nothing."""
    caplog.set_level(logging.INFO, logger="dyngran")

    def refused() -> list[weakref.ref[object]]:
        module, x = make(), batch()
        with pytest.raises(BudgetTooSmall):
            compiled(module, budget=1)(x)
        return [weakref.ref(module), weakref.ref(x)]

    watched = refused()
    if is_reset:
        torch.compiler.reset()
    gc.collect()
    assert any("refused" in record.getMessage() for record in caplog.records)
    assert [gone() for gone in watched] == [None, None]


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_batches_are_gone_after_their_step(codegen: str) -> None:
    """Also the one that was there when a plan was made and its code generated, as for gradients that exist already."""
    module = make()
    step = torch.compile(module, backend="dyngran", options={"budget": 2**30, "codegen": codegen})

    def train() -> weakref.ref[object]:
        x = batch()
        backward(step, x)
        return weakref.ref(x)

    watched = [train(), train(), train()]
    gc.collect()
    assert [gone() for gone in watched] == [None, None, None]


def test_compiling_one_model_twice_with_two_budgets() -> None:
    module, x = make(), batch()
    tight = tight_budget(make(), x)
    first, second = compiled(module, budget=2**30), compiled(module, budget=tight)
    backward(first, x)
    module.zero_grad()
    backward(second, x)
    assert dyngran.explain(second).plan.budget_bytes == tight
    assert peak_of(second, module, x) <= tight


def test_evaluation_and_generation_between_steps() -> None:
    module, other, x = make(), make(), batch()
    budget_bytes = tight_budget(make(), x)
    step, reference = compiled(module, budget=budget_bytes), compiled(other, solver="default")
    for _ in range(3):
        for one, function in ((module, step), (other, reference)):
            one.train()
            backward(function, x)
            with torch.no_grad():
                for p in one.parameters():
                    p -= 0.01 * p.grad  # type: ignore[operator]
            one.zero_grad()
            one.eval()
            with torch.no_grad():
                token = x[:1]
                for _ in range(3):  # the next input is the last output, as in generation
                    token = function(token)  # type: ignore[assignment]
        assert torch.equal(module.first[0].up.weight, other.first[0].up.weight)  # type: ignore[union-attr, arg-type]
        module.train()
        assert peak_of(step, module, x) <= budget_bytes
        module.zero_grad()


def test_compile_in_place() -> None:
    module, x = make(), batch()
    budget_bytes = tight_budget(make(), x)
    module.compile(backend="dyngran", options={**EAGER, "budget": budget_bytes})
    backward(module, x)
    assert peak_of(module, module, x) <= budget_bytes
    assert dyngran.explain(module).plan.num_recomputed > 0


def test_a_mode_with_the_budget_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNGRAN_BUDGET", "100KiB")
    dyngran.set_defaults(codegen="eager")
    with pytest.raises(BudgetTooSmall) as refusal:
        torch.compile(make(), mode="default", backend="dyngran")(batch())
    assert refusal.value.budget_bytes == 100 * 1024


def test_a_mode_with_the_budget_from_set_defaults() -> None:
    x = batch()
    budget_bytes = tight_budget(make(), x)
    dyngran.set_defaults(budget=budget_bytes, **EAGER)
    module = make()
    step = torch.compile(module, mode="default", backend="dyngran")
    backward(step, x)
    assert dyngran.explain(step).plan.budget_bytes == budget_bytes
    assert peak_of(step, module, x) <= budget_bytes


def test_global_configuration_and_peak_statistics_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._functorch.config
    import torch._inductor.config

    def configuration() -> list[object]:
        modules = (torch._dynamo.config, torch._functorch.config, torch._inductor.config)
        return [
            *(module.get_config_copy() for module in modules),  # type: ignore[attr-defined]
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
            torch.backends.cuda.matmul.allow_tf32,
        ]

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("the user's peak statistics were reset")

    for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    before, module = configuration(), make()
    step = compiled(module, budget="8GiB")
    for _ in range(3):
        backward(step, batch())
    str(dyngran.explain(step))
    with pytest.raises(BudgetTooSmall):
        compiled(make(), budget=1)(batch())
    assert configuration() == before


def test_it_works_without_importing_dyngran() -> None:
    """In a fresh process the entry point alone brings the backend in."""
    script = """
        import sys, torch
        model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)))
        assert not any(name.split(".")[0] == "dyngran" for name in sys.modules)
        step = torch.compile(model, backend="dyngran", options={"budget": "1GiB", "codegen": "eager"})
        step(torch.randn(32, 64)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        torch._dynamo.reset()
        try:
            torch.compile(model, backend="dyngran", options={"budget": "1KiB", "codegen": "eager"})(torch.randn(32, 64))
        except Exception as error:
            print(type(error).__module__, type(error).__name__, error.least_peak_bytes)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    module, name, least = ran.stdout.split()
    assert (module.split(".")[0], name) == ("dyngran", "BudgetTooSmall")
    assert int(least) > 1024


def test_a_missing_compiler_is_named_at_the_first_call() -> None:
    from torch._inductor import config

    module, x = make(), batch()
    step = torch.compile(module, backend="dyngran", options={"budget": "1GiB"})
    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ToolMissing, match="C\\+\\+ compiler"):
        step(x)
