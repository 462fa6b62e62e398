"""Real joint graphs for unit tests: a module is traced by AOTAutograd, captured, cut as a test says, and run op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from dyngran.compiler import torch_private
from dyngran.compiler.capture import Captured, JointGraph, Pricer, capture
from dyngran.compiler.partition import partition
from dyngran.compiler.prepare import prepare
from dyngran.compiler.static_memory import input_kinds, measure_static
from dyngran.passes.profile_cache import Measurement
from dyngran.passes.simulate import Simulator

Choose = Callable[[Captured], frozenset[int]]


def unit_price(nodes: Sequence[fx.Node], _device: torch.device) -> list[Measurement]:
    """Every op costs one microsecond and needs no workspace."""
    return [Measurement(cost_us=1.0, workspace_bytes=0, source="roofline: one unit") for _ in nodes]


@dataclass(slots=True)
class Cut:
    """What one compilation went through; ``step`` runs it. ``forward`` and ``backward`` are the graphs after partition."""

    step: Callable[..., Any]
    joints: list[fx.GraphModule] = field(default_factory=list)
    captures: list[Captured] = field(default_factory=list)
    forwards: list[fx.GraphModule] = field(default_factory=list)
    backwards: list[fx.GraphModule] = field(default_factory=list)
    saved: list[frozenset[int]] = field(default_factory=list)

    @property
    def captured(self) -> Captured:
        return self.captures[-1]

    @property
    def forward(self) -> fx.GraphModule:
        return self.forwards[-1]

    @property
    def backward(self) -> fx.GraphModule:
        return self.backwards[-1]


def save_nothing(captured: Captured) -> frozenset[int]:
    """Only what must not run twice crosses."""
    return Simulator(captured.problem).normalize(())


def save_all(captured: Captured) -> frozenset[int]:
    """Everything that backward reads crosses, as with the default partition."""
    return Simulator(captured.problem).default_saved


def save_every_third(captured: Captured) -> frozenset[int]:
    simulator = Simulator(captured.problem)
    return simulator.normalize(simulator.candidates[::3])


def cut(module: Callable[..., Any], choose: Choose, *, price: Pricer = unit_price) -> Cut:
    """``module`` under torch.compile with the saved set that ``choose`` names; graphs run as FX orders them."""
    made: Cut

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        kinds, static = input_kinds(inputs), measure_static(inputs, torch.device("cpu"))

        def cut_joint(
            joint: fx.GraphModule, _inputs: Sequence[Any], *, num_fwd_outputs: int, static_lifetime_input_indices: Any = None, **_: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            prepare(joint, num_fwd_outputs, channels_last=False)
            captured = capture(
                JointGraph(
                    module=joint,
                    num_fwd_outputs=num_fwd_outputs,
                    static_input_indices=tuple(static_lifetime_input_indices or ()),
                    input_kinds=kinds,
                ),
                price=price,
                fused=False,
                static_bytes=static.bytes_by_kind,
                bytes_per_us=1e3,
                launch_us=1.0,
                keep_below_bytes=0,
            )
            saved = choose(captured)
            forward, backward = partition(captured, saved)
            made.joints.append(joint)
            made.captures.append(captured)
            made.saved.append(saved)
            made.forwards.append(forward)
            made.backwards.append(backward)
            return forward, backward

        return torch_private.compile_eager(graph, inputs, partition=cut_joint, around=lambda run, _is_backward: run)

    torch._dynamo.reset()
    made = Cut(torch.compile(module, backend=backend, fullgraph=True))
    return made


def traced(module: nn.Module, inputs: tuple[Tensor, ...]) -> Captured:
    """The problem of one module, from a first call."""
    made = cut(module, save_nothing)
    made.step(*inputs)
    return made.captured
