"""What people put around and into a model that trains, together with a budget that binds: checkpoints of their own, mixed precision with a
gradient scaler, transforms of functions, compiled autograd, attention with a score function, jagged batches."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
from families import DEVICES
from measure import differences, forward_backward, held_tensors, measured_peak, snapshot
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
    stepped,
    stock,
    train,
)
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dyngran

Around = Callable[[nn.Module, Tensor], Tensor]


def save_products(_ctx: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS = functools.partial(create_selective_checkpoint_contexts, save_products)


@pytest.mark.parametrize(
    "checkpointed",
    [
        pytest.param(lambda block, x: checkpoint(block, x, use_reentrant=False), id="non-reentrant"),
        pytest.param(lambda block, x: checkpoint(block, x, use_reentrant=True), id="reentrant"),
        pytest.param(lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=CONTEXTS), id="selective"),
    ],
)
def test_checkpoints_of_the_users_in_some_blocks(checkpointed: Around) -> None:
    """Dropout is inside: a mask that was drawn again would change the gradients."""

    def feature(compile_it: Compile) -> Training:
        module = Net()
        module.around = lambda block, x: checkpointed(block, x) if block is module.blocks[1] else block(x)
        return plain(compile_it, module, rows().requires_grad_())

    check(feature, fullgraph=True)


def autocast_inside(compile_it: Compile) -> Training:
    module = Net()
    compiled = compile_it(torch.autocast("cpu", torch.bfloat16)(module.forward))
    return stepped(module, (rows(),), lambda x: compiled(x))


def autocast_around(compile_it: Compile) -> Training:
    module = Net()
    compiled = compile_it(module)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = compiled(x)
        return out

    return stepped(module, (rows(),), loss)


@pytest.mark.parametrize("feature", [autocast_inside, autocast_around])
def test_autocast(feature: Callable[[Compile], Training]) -> None:
    check(feature, reference=stock)


def scaled_steps(training: Training, losses: Sequence[float]) -> list[tuple[float, float, Tensor]]:
    """One scaled step for each factor of the loss: (scale after it, the loss, a weight after it)."""
    module = training.module
    assert isinstance(module, Net)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    seen = []
    torch.manual_seed(7)
    for factor in losses:
        with torch.autocast("cpu", torch.bfloat16):
            loss = training.loss(*training.inputs) * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((scaler.get_scale(), loss.item(), module.blocks[0].up.weight.detach().clone()))  # type: ignore[union-attr, operator]
    return seen


def test_a_gradient_scaler_with_a_step_that_overflows() -> None:
    """The step whose gradients are infinite changes no weight and halves the scale; the others are those of torch's own graphs."""
    factors = (1.0, 1.0, float("inf"), 1.0)
    want = scaled_steps(fresh(autocast_around, stock), factors)
    budget_bytes = middle_budget(autocast_around)
    training = fresh(autocast_around, compiler({**EAGER, "budget": budget_bytes}))
    got = scaled_steps(training, factors)
    assert [scale for scale, _, _ in got] == [2.0**10, 2.0**11, 2.0**10, 2.0**10]
    assert torch.equal(got[1][2], got[2][2])
    assert not torch.equal(got[2][2], got[3][2])
    for position, ((scale, loss, weight), (other_scale, other_loss, other)) in enumerate(zip(want, got, strict=True)):
        assert (scale, loss) == (other_scale, other_loss), position
        assert torch.equal(weight, other), position
    assert dyngran.explain(training.module).plan.num_recomputed > 0


def gradient_inside(compile_it: Compile) -> Training:
    """A penalty on the gradient of the input: a second derivative, all of it inside of one graph."""
    module = Net(dropout=0.0)
    compiled = compile_it(lambda x: module(x) + torch.func.grad(module.forward)(x).square().sum())
    return stepped(module, (rows(),), compiled)


def vmap_inside(compile_it: Compile) -> Training:
    module = Net(dropout=0.0)
    compiled = compile_it(lambda x: torch.func.vmap(module.forward)(x).sum())
    return stepped(module, (rows().view(4, 32, 64),), compiled)


def jvp_inside(compile_it: Compile) -> Training:
    module = Net(dropout=0.0)

    def loss(x: Tensor) -> Tensor:
        out, tangent = torch.func.jvp(module.forward, (x,), (torch.ones_like(x),))
        total: Tensor = out + tangent
        return total

    return stepped(module, (rows(),), compile_it(loss))


def functional_call(compile_it: Compile) -> Training:
    module = Net()
    compiled = compile_it(lambda parameters, x: torch.func.functional_call(module, parameters, (x,)))
    return stepped(module, (rows(),), lambda x: compiled(dict(module.named_parameters()), x))


@pytest.mark.parametrize("feature", [gradient_inside, vmap_inside, jvp_inside, functional_call])
def test_transforms_of_functions_inside_of_what_is_compiled(feature: Callable[[Compile], Training]) -> None:
    check(feature)


def per_sample_gradients(module: nn.Module) -> Callable[[Tensor], dict[str, Tensor]]:
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    gradient = torch.func.grad(lambda values, x: torch.func.functional_call(module, values, (x,)))
    return lambda x: torch.func.vmap(gradient, in_dims=(None, 0))(parameters, x)


@pytest.mark.parametrize("backend", ["aot_eager", "dyngran"])
def test_transforms_of_what_is_compiled_do_what_they_do_under_other_backends(backend: str) -> None:
    """A transform around compiled code runs it without its compiled form; one that is compiled as a whole has no backward to plan."""
    torch.manual_seed(0)
    module, x = Net(dropout=0.0), rows()
    how = {"backend": backend, "options": {**EAGER, "budget": 1}} if backend == "dyngran" else {"backend": backend}
    compiled = torch.compile(module, **how)  # type: ignore[call-overload]  # the arguments are right, mypy does not follow the dict
    assert torch.equal(torch.func.grad(compiled)(x), torch.func.grad(module)(x))
    assert torch.equal(torch.func.jvp(compiled, (x,), (x,))[1], torch.func.jvp(module, (x,), (x,))[1])
    batch = x.view(4, 32, 64)
    assert torch.equal(torch.func.vmap(compiled)(batch), torch.func.vmap(module)(batch))
    want = per_sample_gradients(module)(batch)
    got = torch.compile(per_sample_gradients(module), **how)(batch)  # type: ignore[call-overload]  # as above
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient)


def step_compiled(compile_it: Compile, make: Callable[[], nn.Module] = Net) -> Training:
    """Forward and backward are called inside of one compiled function."""
    module, x = make(), rows().requires_grad_()

    def whole(x: Tensor) -> Tensor:
        loss: Tensor = module(x)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    compiled = compile_it(whole)
    return Training(module, (x,), compiled, lambda: compiled(x))


def backward_compiled_apart(compile_it: Compile) -> Training:
    """The loop calls backward itself, in a context that compiles it."""
    training = plain(compile_it, Net(), rows())

    def step() -> Tensor:
        loss = training.loss(*training.inputs)
        with torch._dynamo.compiled_autograd._enable(compile_it) if compile_it is not as_it_is else nullcontext():
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return Training(training.module, training.inputs, training.loss, step)


def hooked() -> Net:
    """Hooks before and after backward of blocks, each of which changes what it sees."""
    module = Net()
    module.blocks[0].register_full_backward_hook(lambda _module, inputs, _outputs: tuple(None if g is None else g * 2 for g in inputs))
    module.blocks[1].register_full_backward_pre_hook(lambda _module, outputs: tuple(g + 1 for g in outputs))
    return module


@pytest.mark.parametrize(
    "feature",
    [step_compiled, backward_compiled_apart, functools.partial(step_compiled, make=hooked)],
    ids=["the step", "backward apart", "hooks on backward"],
)
def test_compiled_autograd(feature: Callable[[Compile], Training]) -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        check(feature)
        assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] > 0


@pytest.mark.parametrize("backend", ["aot_eager", "dyngran"])
def test_hooks_on_backward_in_one_graph_are_refused_without_it_as_torch_refuses_them(backend: str) -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match="require compiled autograd"):
        torch.compile(hooked(), backend=backend, fullgraph=True)(rows())


def test_hooks_on_backward_break_the_graph_and_that_is_said() -> None:
    """torch then compiles block by block, one code for both of them: `explain` says that the budget is checked for one run of it."""

    def feature(compile_it: Compile) -> Training:
        return plain(compile_it, hooked(), rows().requires_grad_())

    want = train(fresh(feature, as_it_is))
    training = fresh(feature, compiler({**EAGER, "budget": "2MiB"}))
    assert [differences(*pair) for pair in zip(want, train(training), strict=True)] == [[], []]
    training.step()
    assert any("the budget is checked for one run of it" in note for note in dyngran.explain(training.module).notes)


class Attending(nn.Module):
    """Two layers of attention that prefers near tokens, each with a block: (batch, tokens, 64) → mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(64, 192) for _ in range(2))
        self.blocks = nn.ModuleList(Block(dropout=0.0) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for heads, block in zip(self.heads, self.blocks, strict=True):
            query, key, value = heads(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            mixed = flex_attention(query, key, value, score_mod=lambda score, _b, _h, here, there: score - (here - there).abs())
            x = block(x + mixed.transpose(1, 2).flatten(2))
        return x.square().mean()


def test_flex_attention_without_gradients() -> None:
    """Evaluation on the CPU, where torch has no backward for it."""
    torch.manual_seed(0)
    module, x = Attending(), rows(256).view(2, 128, 64)
    with torch.no_grad():
        want = module(x)
        torch.testing.assert_close(torch.compile(module, backend="dyngran", options={**EAGER, "budget": 1})(x), want)


@pytest.mark.parametrize("backend", ["aot_eager", "dyngran"])
def test_flex_attention_with_gradients_is_refused_on_the_cpu_as_torch_refuses_it(backend: str) -> None:
    step = torch.compile(Attending(), backend=backend)
    with pytest.raises(NotImplementedError, match="FlexAttention does not support backward on CPU"):
        step(rows(256).view(2, 128, 64))


@pytest.mark.skipif("cuda" not in DEVICES, reason="torch has no backward of flex attention on the CPU")
def test_flex_attention_on_a_card() -> None:
    """Under Inductor, which is the only one that has kernels for it: gradients near those of stock Inductor, the peak within the budget."""

    def feature(compile_it: Compile) -> Training:
        return plain(compile_it, Attending().cuda(), rows(2**16).view(-1, 2048, 64).cuda())

    (want,) = train(fresh(feature, torch.compile), num_steps=1)
    budget_bytes = middle_budget(feature, INDUCTOR)
    training = fresh(feature, compiler({**INDUCTOR, "budget": budget_bytes}))
    (got,) = train(training, num_steps=1)
    for name, gradient in want.gradients.items():
        torch.testing.assert_close(got.gradients[name], gradient, rtol=1e-3, atol=1e-5)
    assert dyngran.explain(training.module).plan.num_recomputed > 0
    assert peak_of(training) <= budget_bytes


def jagged(*lengths: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.nested.nested_tensor([torch.randn(length, 64, generator=generator) for length in lengths], layout=torch.jagged)


class Jagged(Net):
    """Blocks over sequences of different lengths: a nested tensor → mean square of the elements, or of the padded ones."""

    def __init__(self, *, is_padded: bool = False) -> None:
        super().__init__(dropout=0.0)
        self.is_padded = is_padded

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (torch.nested.to_padded_tensor(x, 0.0) if self.is_padded else x.values()).square().mean()


def on_jagged(compile_it: Compile, *lengths: int, is_padded: bool = False) -> Training:
    module, x = Jagged(is_padded=is_padded), jagged(*lengths)
    compiled = compile_it(module)
    return stepped(module, (x.values(), x.offsets()), lambda *_: compiled(x))


def test_nested_tensors() -> None:
    """Held as three tensors, of which the values are memory of the step; torch's graphs, unlike eager code, draw nothing for no dropout."""
    check(lambda compile_it: on_jagged(compile_it, 20, 50, 60), reference=stock)


@pytest.mark.parametrize("is_padded", [False, True])
def test_batches_of_nested_tensors_that_are_larger_get_a_plan(is_padded: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The same code serves other lengths. Batches of no more elements are covered, and of no longer sequence where that is padded to."""
    first, larger = (20, 50, 60), (20, 50, 90)
    budget_bytes = middle_budget(lambda compile_it: on_jagged(compile_it, *larger, is_padded=is_padded))
    caplog.set_level(logging.INFO, logger="dyngran")
    caplog.clear()
    training = fresh(lambda compile_it: on_jagged(compile_it, *first, is_padded=is_padded), compiler({**EAGER, "budget": budget_bytes}))
    module = training.module
    compiled = torch.compile(module, backend="dyngran", options={**EAGER, "budget": budget_bytes})
    num_plans = []
    for lengths in (first, (60, 20, 50), (30, 40, 50), larger, (90, 40, 30)):
        x = jagged(*lengths)
        want = snapshot(module, forward_backward(module, (x,)))
        module.zero_grad()
        got = snapshot(module, forward_backward(compiled, (x,)))
        assert [name for name, gradient in want.gradients.items() if not torch.equal(gradient, got.gradients[name])] == []  # type: ignore[arg-type]
        module.zero_grad()
        peak_bytes = measured_peak(functools.partial(forward_backward, compiled, (x,)), held_tensors(module, (x.values(), x.offsets())))
        module.zero_grad()
        assert peak_bytes <= budget_bytes, lengths
        num_plans.append(sum("planned" in record.getMessage() for record in caplog.records))
    assert num_plans[0] == num_plans[1] == num_plans[2] < num_plans[3] == num_plans[4]


def test_a_nested_tensor_that_is_returned() -> None:
    """Its gradient is a nested tensor too, made outside of the graph."""

    def feature(compile_it: Compile) -> Training:
        module, x = Block(dropout=0.0), jagged(20, 50, 60)
        compiled = compile_it(module)
        return stepped(module, (x.values(), x.offsets()), lambda *_: compiled(x).values().square().mean())

    budget_bytes = middle_budget(feature)
    (want,) = train(fresh(feature, stock), num_steps=1)
    training = fresh(feature, compiler({**EAGER, "budget": budget_bytes}))
    (got,) = train(training, num_steps=1)
    assert differences(want, got) == []
    assert peak_of(training) <= budget_bytes
