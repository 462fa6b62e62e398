"""From a program to a module with inputs, and from one training step to everything that it may change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from grammar import Output, Program
from operations import DRAWING, OPERATIONS, REGIONS, WRITING, Run, spread
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dyngran.compiler import torch_private

State = Callable[[str, tuple[int, ...]], Tensor]
PlainStep = tuple[str, int, int, int]
Body = Callable[..., tuple[Tensor, ...]]
Checkpoint = Callable[[Body, Sequence[Tensor]], tuple[Tensor, ...]]


def users_checkpoint(body: Body, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = checkpoint(body, *values, use_reentrant=False)
    return made


def tagged_checkpoint(body: Body, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What Dynamo makes of a checkpoint: its ops run once in the trace, and carry the mark that backward is to run them again."""
    from torch.fx import traceback

    with traceback.preserve_node_meta():
        traceback.current_meta["recompute"] = torch_private.USER_RECOMPUTES[0]
        traceback.current_meta["ac_graph_id"] = 1
        try:
            return body(*values)
        finally:
            for key in ("recompute", "ac_graph_id"):
                del traceback.current_meta[key]


@dataclass(slots=True)
class Rendered:
    """What a program's forward is made of: plain tuples, which Dynamo takes for constants."""

    steps: tuple[PlainStep, ...]
    outputs: tuple[Output, ...]
    width: int
    flag: bool
    is_loss_inside: bool
    writable: tuple[bool, ...]

    @classmethod
    def of(cls, program: Program) -> Rendered:
        return cls(
            steps=tuple((step.op, step.a, step.b, step.k) for step in program.steps),
            outputs=program.outputs,
            width=program.width,
            flag=program.flag,
            is_loss_inside=program.is_loss_inside,
            writable=tuple(kind != "leaf" for kind in program.inputs),
        )


def execute(
    program: Rendered, state: State, tensors: Sequence[Tensor], *, has_cond: bool = False, checkpointed: Checkpoint = users_checkpoint
) -> tuple[Tensor, ...]:
    """Forward: ids, mask and floating-point inputs in, outputs out; the loss is the first if it is made inside.

    One more output depends on every random number: Dynamo drops draws that nothing needs, and the masks after them would be others.
    """
    ids, mask, *inputs = tensors
    run = Run([ids, mask, *inputs], inputs, state, width=program.width, flag=program.flag, writable=program.writable, has_cond=has_cond)
    run_steps(run, program.steps, checkpointed)
    outputs = tuple(returned(run, output, is_first=place == 0) for place, output in enumerate(program.outputs))
    drawn = [value.float().mean() for value in run.drawn if value.is_floating_point() and value.numel() > 0]
    if drawn:
        outputs = (*outputs, torch.stack(drawn).sum() * 0.01)
    return (loss_of(used_of(program.outputs, outputs), inputs[0]), *outputs) if program.is_loss_inside else outputs


def run_steps(run: Run, steps: tuple[PlainStep, ...], checkpointed: Checkpoint) -> None:
    position = 0
    while position < len(steps):
        name, a, b, k = steps[position]
        position += 1
        if name in REGIONS:
            end = position + 1 + k % 4
            run_region(run, name, steps[position:end], checkpointed)
            position = end
        elif not (run.is_pure and name in WRITING):
            made = OPERATIONS[name](run, a, b, k)
            run.values.extend([made] if isinstance(made, Tensor) else made or ())
            if name in DRAWING:
                run.drawn.append(run.values[-1])


def run_region(run: Run, name: str, steps: tuple[PlainStep, ...], checkpointed: Checkpoint) -> None:
    if name == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run_steps(run, steps, checkpointed)
    elif name == "no_grad":
        with torch.no_grad():
            run_steps(run, steps, checkpointed)
    elif name == "twice":
        run_steps(run, steps, checkpointed)
        run_steps(run, steps, checkpointed)
    else:

        def body(*values: Tensor) -> tuple[Tensor, ...]:
            inside = run.within(list(values))
            run_steps(inside, steps, checkpointed)
            return tuple(inside.values[len(values) :])

        made = checkpointed(body, run.values)
        run.values.extend(made)
        if any(name in DRAWING for name, *_ in steps):
            run.drawn.extend(made)


def returned(run: Run, output: Output, *, is_first: bool) -> Tensor:
    if is_first:  # the loss is made of it
        return run.real(output.ref)
    if output.form == "input":
        return run.inputs[output.ref % len(run.inputs)]
    value = run.real(output.ref) if output.is_used else run.values[-1 - output.ref % len(run.values)]
    if output.form == "view":
        return value.unsqueeze(0)
    if output.form == "detached":
        return value.detach()
    return value.view_as(value) if output.form == "again" else value


def used_of(specs: Sequence[Output], outputs: Sequence[Tensor]) -> list[Tensor]:
    """What the loss is made of: the first output at least, and what stands for random numbers after the last."""
    wanted = [output for place, (output, spec) in enumerate(zip(outputs, specs, strict=False)) if spec.is_used or place == 0]
    return [*wanted, *outputs[len(specs) :]]


def loss_of(outputs: Sequence[Tensor], first_input: Tensor) -> Tensor:
    """A number that depends on every output that is a floating-point tensor, and on the first input whatever they are."""
    loss = first_input.float().sin().mean()
    for place, output in enumerate(outputs):
        if output.is_floating_point() and output.numel() > 0:
            loss = loss + (place + 1) * (output.float() - 0.1).square().mean()
    return loss


class Net(nn.Module):
    """A program as a module. Its parameters and buffers are those that a first run on these inputs asks for."""

    def __init__(self, program: Program, *, has_cond: bool = False) -> None:
        super().__init__()
        self.rendered = Rendered.of(program)
        self.has_cond = has_cond
        self.dtype = getattr(torch, program.dtype)
        self.weights = nn.ParameterDict()
        self.names: list[str] = []
        self.frozen = program.frozen

    def state(self, name: str, _shape: tuple[int, ...]) -> Tensor:
        found: Tensor = self.weights[name] if name[0] == "w" else getattr(self, name)
        return found

    def make_state(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.names:
            self.names.append(name)
            value = torch.randn(shape, dtype=self.dtype) * spread(shape)
            if name[0] == "w":
                is_frozen = self.frozen >> int(name[1]) & 1
                self.weights[name] = nn.Parameter(value, requires_grad=not is_frozen)
            else:
                self.register_buffer(name, value.abs() + 0.5)
        return self.state(name, shape)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return execute(self.rendered, self.state, tensors, has_cond=self.has_cond)


@dataclass(slots=True)
class Given:
    """What the training loop holds for one step: ``leaves`` are what gradients of inputs arrive at, ``tensors`` what forward is given."""

    leaves: list[Tensor]
    tensors: list[Tensor]


def make_net(program: Program, *, has_cond: bool = False) -> Net:
    """The module with its weights. Raises what a first run of forward in eager mode raises."""
    net = Net(program, has_cond=False)
    with fresh_random_state(program.data_seed):
        execute(net.rendered, net.make_state, make_inputs(program, program.rows).tensors)
    net.has_cond = has_cond
    return net


def make_inputs(program: Program, rows: int) -> Given:
    """The same numbers whenever it is called. Inputs that are computed need a gradient and are no leaves, as within a larger model."""
    draw = torch.Generator().manual_seed(program.data_seed)
    dtype, width = getattr(torch, program.dtype), program.width
    whole = torch.randn(rows + 2, width, generator=draw, dtype=dtype)
    leaves: list[Tensor] = []
    tensors = [torch.randint(0, 50, (rows,), generator=draw), torch.rand(rows, width, generator=draw) > 0.3]
    for place, kind in enumerate(program.inputs):
        plain = torch.randn(rows, width, generator=draw, dtype=dtype)
        if kind == "overlapping":
            tensors.append(whole[place % 3 : place % 3 + rows])
        elif kind == "permuted":
            tensors.append(torch.randn(width, rows, generator=draw, dtype=dtype).t())
        else:
            if kind != "plain":
                leaves.append(plain.requires_grad_())
            tensors.append(plain * 1 if kind == "computed" else plain)
    return Given(leaves, tensors)


@contextlib.contextmanager
def fresh_random_state(seed: int) -> Iterator[None]:
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


Seen = dict[str, "Tensor | None"]


def train_step(program: Program, net: Net, forward: Callable[..., Sequence[Tensor]], given: Given) -> Seen:
    """Forward and backward from the random state that is: loss, outputs, gradients, buffers, inputs and the random state after it."""
    outputs = forward(*given.tensors)
    seen: Seen = {}
    if program.is_loss_inside:
        loss, *rest = outputs
    else:
        rest = list(outputs)
        loss = loss_of(used_of(program.outputs, rest), given.tensors[2])
    seen |= {f"output {place}": copied(output) for place, output in enumerate(rest)}
    loss.backward()  # type: ignore[no-untyped-call]
    seen["loss"] = copied(loss)
    seen |= {f"output {place} after backward": copied(output) for place, output in enumerate(rest)}
    seen |= {f"gradient of {name}": copied(weight.grad) for name, weight in net.named_parameters()}
    seen |= {f"buffer {name}": copied(buffer) for name, buffer in net.named_buffers()}
    seen |= {f"gradient of leaf {place}": copied(leaf.grad) for place, leaf in enumerate(given.leaves)}
    seen |= {f"input {place} after the step": copied(tensor) for place, tensor in enumerate(given.tensors)}
    seen["random state"] = torch.get_rng_state()
    return seen


def copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Same dtype, shape and numbers; a number that is none equals another."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def differences(want: Seen, got: Seen) -> list[str]:
    """Names of what is not the same bit for bit."""
    return [name for name in want if not same_bits(want[name], got[name])]


def relative_error(want: Tensor | None, got: Tensor | None) -> float:
    """Largest deviation over the largest magnitude; infinite where the two cannot be compared. AOTAutograd gives zeros for some gradients
    that eager mode does not make."""
    if want is None and got is not None:
        return float("inf") if got.any() else 0.0
    if want is None or got is None or want.dtype != got.dtype or want.shape != got.shape:
        return 0.0 if want is got else float("inf")
    if not want.is_floating_point():
        return 0.0 if torch.equal(want, got) else float("inf")
    if want.numel() == 0:
        return 0.0
    left, right = want.double(), got.double()
    if not torch.equal(left.isfinite(), right.isfinite()):
        return float("inf")
    left, right = left.nan_to_num(), right.nan_to_num()
    scale = float(left.abs().max())
    error = float((left - right).abs().max())
    return error if scale == 0 else error / scale
