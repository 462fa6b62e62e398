"""How a model may be compiled, together with a budget that binds: whole graphs, dynamic sizes, modes, stances, hooks and holes in what is
compiled, other backends and exports beside it, copies and files of the model, a process group."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import DEVICES
from measure import differences, forward_backward, held_tensors, measured_peak
from midway import (
    EAGER,
    INDUCTOR,
    Block,
    Compile,
    Net,
    Training,
    as_it_is,
    check,
    compiler,
    fresh,
    middle_budget,
    peak_of,
    plain,
    rows,
    stock,
    train,
)
from torch import Tensor, nn

import dyngran
from dyngran.errors import BudgetTooSmall, InvalidOption


def net(compile_it: Compile) -> Training:
    return plain(compile_it, Net(), rows())


def marked(compile_it: Compile) -> Training:
    x = rows()
    torch._dynamo.mark_dynamic(x, 0)
    return plain(compile_it, Net(), x)


@pytest.mark.parametrize(
    ("feature", "how"),
    [(net, {"fullgraph": True}), (net, {"dynamic": True}), (net, {"dynamic": False}), (marked, {}), (marked, {"fullgraph": True})],
    ids=["fullgraph", "dynamic", "static", "marked", "marked, fullgraph"],
)
def test_whole_graphs_and_dynamic_sizes(feature: Callable[[Compile], Training], how: dict[str, bool]) -> None:
    check(feature, **how)


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_dynamic_size_is_traced_once_and_planned_for_what_comes(is_marked: bool) -> None:
    """Batches up to the one that the budget was taken at train within it, each as torch's own graphs train it; a larger one is refused."""
    largest = 192
    budget_bytes = middle_budget(lambda compile_it: plain(compile_it, Net(dropout=0.0), rows(largest)), dynamic=True)
    module = fresh(net, compiler()).module
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(module, backend="dyngran", options={**EAGER, "budget": budget_bytes}, dynamic=None if is_marked else True)
    for num_rows in (128, 64, largest, 96):
        x = rows(num_rows)
        if is_marked:
            torch._dynamo.mark_dynamic(x, 0)
        forward_backward(step, (x,))
        module.zero_grad()
        assert measured_peak(lambda x=x: forward_backward(step, (x,)), held_tensors(module, (x,))) <= budget_bytes, num_rows
        module.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    with pytest.raises(BudgetTooSmall):
        forward_backward(step, (rows(8 * largest),))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_a_mode_is_for_inductor_and_says_so(mode: str) -> None:
    with pytest.raises(InvalidOption, match="'mode' is for Inductor"):
        torch.compile(Net(), backend="dyngran", options={**EAGER, "mode": mode})(rows())


@pytest.mark.parametrize(
    ("mode", "device"),
    [("max-autotune-no-cudagraphs", device) for device in DEVICES] + [("reduce-overhead", device) for device in DEVICES if device != "cpu"],
)
def test_modes_under_a_budget(mode: str, device: str) -> None:
    """As ``mode=`` with the budget as a default: gradients near eager's in every step, the peak of later steps within the budget.

    On a card reduce-overhead replays the step from a pool of its own, which is within the budget as well.
    """
    num_rows = 128 if device == "cpu" else 2**16

    def feature(compile_it: Compile) -> Training:
        return plain(compile_it, Net(dropout=0.0).to(device), rows(num_rows).to(device))

    want = train(fresh(feature, as_it_is), num_steps=4)
    budget_bytes = middle_budget(feature, {**INDUCTOR, "mode": mode})
    dyngran.set_defaults(budget=budget_bytes, **INDUCTOR)
    training = fresh(feature, lambda function: torch.compile(function, backend="dyngran", mode=mode))
    got = train(training, num_steps=4)
    for expected, seen in zip(want, got, strict=True):
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(seen.gradients[name], gradient, rtol=1e-3, atol=1e-5)
    report = dyngran.explain(training.module)
    assert report.plan.budget_bytes == budget_bytes
    assert report.plan.num_recomputed > 0
    assert peak_of(training) <= budget_bytes


def test_reduce_overhead_on_the_cpu() -> None:
    """Inductor groups operators of the CPU for graphs of a card there, which undoes most of what a plan gains; the least peak is kept."""

    def feature(compile_it: Compile) -> Training:
        return plain(compile_it, Net(dropout=0.0), rows())

    options = {**INDUCTOR, "mode": "reduce-overhead"}
    with pytest.raises(BudgetTooSmall) as refusal:
        fresh(feature, compiler({**options, "budget": 1})).step()
    budget_bytes = refusal.value.least_peak_bytes
    want = train(fresh(feature, as_it_is))
    training = fresh(feature, compiler({**options, "budget": budget_bytes}))
    for expected, seen in zip(want, train(training), strict=True):
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(seen.gradients[name], gradient, rtol=1e-3, atol=1e-5)
    assert peak_of(training) <= budget_bytes


def hooked(compile_it: Compile) -> Training:
    """Hooks before and after forward and on a gradient, each of which changes what it sees."""
    module = Net()
    first, second = module.blocks
    first.register_forward_hook(lambda _module, _inputs, out: out * 2)
    second.register_forward_pre_hook(lambda _module, inputs: (inputs[0] + 1,))
    first.get_parameter("up.weight").register_hook(lambda gradient: gradient * 3)
    return plain(compile_it, module, rows())


def test_hooks_of_modules() -> None:
    check(hooked, fullgraph=True)


class Interrupted(nn.Module):
    """Two blocks with eager code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch ships no types for it
    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self.first(x))).square().mean()
        return out


def test_a_part_that_is_not_compiled() -> None:
    """Two graphs in a step that is eager's; at the least peak that the second one names, below the free one, both train."""

    def feature(compile_it: Compile) -> Training:
        return plain(compile_it, Interrupted(), rows())

    want = train(fresh(feature, as_it_is))
    free_bytes = peak_of(steady(fresh(feature, compiler({**EAGER, "solver": "default"}))))
    budget_bytes = free_bytes - 2**16
    with pytest.raises(BudgetTooSmall) as refusal:
        steady(fresh(feature, compiler({**EAGER, "budget": budget_bytes // 2})))
    training = fresh(feature, compiler({**EAGER, "budget": max(budget_bytes, refusal.value.least_peak_bytes)}))
    assert [differences(*pair) for pair in zip(want, train(training), strict=True)] == [[], []]
    plans = dyngran.explain(training.module).plans
    assert len(plans) == 2
    assert any(plan.num_recomputed for plan in plans)
    assert peak_of(training) <= max(budget_bytes, refusal.value.least_peak_bytes) < free_bytes


def steady(training: Training) -> Training:
    """After a step, whose gradients are thrown away."""
    training.step()
    training.module.zero_grad()
    return training


def test_stances() -> None:
    """Eager code and compiled code by turns; a call that would compile is refused by torch itself."""
    budget_bytes = middle_budget(net)
    training = fresh(net, compiler({**EAGER, "budget": budget_bytes}))
    want = train(fresh(net, stock), num_steps=1)
    training = fresh(net, compiler({**EAGER, "budget": budget_bytes}))
    with torch.compiler.set_stance("force_eager"):
        training.step()
        training.module.zero_grad()
        with pytest.raises(dyngran.errors.NothingCompiled):
            dyngran.explain(training.module)
    assert differences(want[0], train(training, num_steps=1)[0]) == []
    fresh_state = copy.deepcopy(training.module.state_dict())
    with torch.compiler.set_stance("fail_on_recompile"):
        assert peak_of(training) <= budget_bytes
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            training.loss(rows(100))
    with torch.compiler.set_stance("eager_on_recompile"):
        training.loss(rows(100)).backward()
        training.module.zero_grad()
        assert peak_of(training) <= budget_bytes
    assert all(torch.equal(value, fresh_state[name]) for name, value in training.module.state_dict().items())


def test_evaluation_without_gradients_does_not_disturb_a_plan() -> None:
    budget_bytes = middle_budget(net)
    want = train(fresh(net, stock))
    training = fresh(net, compiler({**EAGER, "budget": budget_bytes}))
    module, optimizer = training.module, torch.optim.SGD(training.module.parameters(), lr=0.01)
    torch.manual_seed(7)
    for expected in want:
        module.train()
        state = torch.get_rng_state()
        with torch.no_grad():
            training.loss(rows(77))
        module.eval()
        with torch.inference_mode():
            torch.testing.assert_close(training.loss(rows(77)), module(rows(77)))
        module.train()
        torch.set_rng_state(state)
        assert torch.equal(training.step(), expected.loss)
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.grad, expected.gradients[name])  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    assert peak_of(training) <= budget_bytes


def test_a_compiled_optimizer_beside_it() -> None:
    """The optimizer's step is compiled by another backend; its state is seen and planned for."""

    def steps(training: Training) -> list[Tensor]:
        optimizer = torch.optim.AdamW(training.module.parameters(), lr=0.01)
        update = torch.compile(optimizer.step, backend="aot_eager")
        torch.manual_seed(7)
        losses = []
        for _ in range(3):
            losses.append(training.step())
            update()
            optimizer.zero_grad()
        return losses

    want = steps(fresh(net, stock))
    static_bytes = 3 * sum(parameter.numel() * 4 for parameter in Net().parameters())
    with pytest.raises(BudgetTooSmall) as refusal:
        fresh(net, compiler({**EAGER, "budget": 1})).step()
    budget_bytes = refusal.value.least_peak_bytes + static_bytes
    training = fresh(net, compiler({**EAGER, "budget": budget_bytes}))
    got = steps(training)
    assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True))
    assert dyngran.explain(training.module).plan.static_bytes >= static_bytes


def test_several_backends_in_one_process() -> None:
    """Models of four backends trained in turns, two of them under budgets of their own; a reset between steps changes nothing."""
    budget_bytes = middle_budget(net)
    backends: list[Compile] = [
        as_it_is,
        stock,
        compiler({**EAGER, "budget": budget_bytes}),
        compiler({**EAGER, "budget": 2 * budget_bytes}),
    ]
    torch.compiler.reset()
    trainings = []
    for compile_it in backends:
        torch.manual_seed(0)
        trainings.append(net(compile_it))
    for round_ in range(3):
        seen = [train(training, num_steps=1)[0] for training in trainings]
        assert [differences(seen[0], other) for other in seen[1:]] == [[], [], []], round_
        if round_ == 1:
            torch._dynamo.reset()
    plans = [dyngran.explain(training.module).plan for training in trainings[2:]]
    assert plans[0].num_recomputed > 0 == plans[1].num_recomputed
    assert peak_of(trainings[2]) <= budget_bytes


def test_an_export_of_the_model_is_unaffected() -> None:
    """Of the module, before and after training: the same graph. Of its compiled form: what it is of one under another backend."""

    def exported(module: nn.Module) -> torch.export.ExportedProgram:
        return torch.export.export(module, (rows(),))

    training = fresh(lambda compile_it: plain(compile_it, Net(dropout=0.0), rows()), compiler({**EAGER, "budget": "1GiB"}))
    module = training.module
    before = exported(module)
    train(training)
    program = exported(module)
    assert str(program.graph) == str(before.graph)
    assert torch.equal(program.module()(rows()), module(rows()))
    compiled: Any = training.loss
    assert str(exported(compiled).graph) == str(exported(stock(module)).graph)


def copied_by_pickle(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def saved_and_loaded(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Plain(Net):
    """Without a function of its own as an attribute: pickle can write it."""

    def __init__(self) -> None:
        super().__init__()
        del self.around

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copied_by_pickle, saved_and_loaded])
def test_copies_of_a_compiled_model_train_under_its_budget(duplicate: Callable[[Any], Any]) -> None:
    """A copy of what torch.compile returned is compiled in the same way; each copy has its own parameters, and both keep the budget."""

    def feature(compile_it: Compile) -> Training:
        return plain(compile_it, Plain(), rows())

    budget_bytes = middle_budget(feature)
    training = fresh(feature, compiler({**EAGER, "budget": budget_bytes}))
    compiled: Any = training.loss
    forward_backward(compiled, training.inputs)
    training.module.zero_grad()
    other: Any = duplicate(compiled)
    assert type(other) is type(compiled)
    module = other._orig_mod
    assert module is not training.module
    for one, step in ((training.module, compiled), (module, other)):
        torch.manual_seed(3)
        forward_backward(step, training.inputs)
        one.zero_grad()
        assert measured_peak(lambda step=step: forward_backward(step, training.inputs), held_tensors(one, training.inputs)) <= budget_bytes
        assert dyngran.explain(one).plan.budget_bytes == budget_bytes
    for name, parameter in training.module.named_parameters():
        copied = module.get_parameter(name)
        assert torch.equal(parameter, copied)
        assert parameter.data_ptr() != copied.data_ptr()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copied_by_pickle])
def test_copies_of_a_model_that_was_compiled_in_place_are_plain_as_torch_makes_them(duplicate: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    module = Plain()
    module.compile(backend="dyngran", options={**EAGER, "budget": "1GiB"})
    forward_backward(module, (rows(),))
    other = duplicate(module)
    assert module._compiled_call_impl is not None
    assert other._compiled_call_impl is None
    forward_backward(other, (rows(),))
    with pytest.raises(dyngran.errors.NothingCompiled):
        dyngran.explain(other)


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_state_dict_goes_round(is_in_place: bool, tmp_path: Path) -> None:
    """Saved after a step and loaded into a model compiled afresh: training goes on as if nothing had happened, under the budget."""

    def feature(compile_it: Compile) -> Training:
        module = Net()
        if not is_in_place:
            return plain(compile_it, module, rows())
        if compile_it is not stock:
            module.compile(backend="dyngran", options={**EAGER, "budget": budget_bytes})
        return plain(lambda function: function, module, rows())

    budget_bytes = middle_budget(net)
    build = compiler({**EAGER, "budget": budget_bytes})
    training = fresh(feature, build)
    train(training)
    model: Any = training.module if is_in_place else training.loss
    torch.save(model.state_dict(), tmp_path / "state.pt")
    want = train(training)
    again = fresh(feature, build)
    loaded: Any = again.module if is_in_place else again.loss
    assert not loaded.load_state_dict(torch.load(tmp_path / "state.pt")).missing_keys
    assert [differences(*pair) for pair in zip(want, train(again), strict=True)] == [[], []]
    assert peak_of(again) <= budget_bytes


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no process groups")
@pytest.mark.parametrize("is_outside", [False, True])
@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel(is_outside: bool) -> None:
    """DDP around the compiled module, or compiled with it: as the module alone. No plan knows of its buckets of gradients."""

    def feature(compile_it: Compile) -> Training:
        module, x = Net(), rows()
        ddp = nn.parallel.DistributedDataParallel
        step = ddp(compile_it(module)) if is_outside else compile_it(ddp(module))
        return Training(module, (x,), step, lambda: forward_backward(step, (x,)))

    want = train(fresh(net, as_it_is))
    budget_bytes = middle_budget(net)
    training = fresh(feature, compiler({**EAGER, "budget": budget_bytes}))
    assert [differences(*pair) for pair in zip(want, train(training), strict=True)] == [[], []]
    assert dyngran.explain(training.module).plan.num_recomputed > 0
    assert peak_of(training) <= budget_bytes
