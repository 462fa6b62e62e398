"""A graph that is planned and never generated: `dyngran-plan` traces with tensors that have no data, on a device that need not be here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.accounting import WrapperAccount
from dyngran.compiler.offline.torch_emulation import seen_on_card
from dyngran.compiler.options import Codegen, Options
from dyngran.compiler.planned_graph import Around, PlannedGraph


class OfflineGraph(PlannedGraph):
    """Planned as `PlannedGraph`, from fake tensors that while it is planned say that they are on ``planned_on``.

    What runs are the planned graphs, op by op, so that the graphs after a break are reached.
    """

    is_offline = True

    def __init__(
        self, module: fx.GraphModule, inputs: Sequence[Any], options: Options, *, planned_on: torch.device, is_followed: bool = False
    ) -> None:
        self._planned_on = planned_on
        self._more_follow = is_followed
        super().__init__(module, inputs, options)

    def _kinds_of_tensor(self) -> tuple[type, ...]:
        return (*super()._kinds_of_tensor(), torch_private.fake_tensor_type())

    def _is_followed(self, module: fx.GraphModule) -> bool:
        return self._more_follow or super()._is_followed(module)

    def compile(self, inputs: Sequence[Any]) -> None:
        """Trace and plan. Raises what the plan refuses with."""
        self._run = self._build(inputs, inputs)
        self.num_runs = 0

    def __call__(self, *args: Any) -> Any:
        self.num_runs += 1
        outputs = self._run(*args)
        self._returned.watch(outputs, args)
        return outputs

    def _generate(
        self, module: fx.GraphModule, inputs: Sequence[Any], cut: torch_private.Partitioner, account: WrapperAccount, *, around: Around
    ) -> Callable[..., Any]:
        if self.options.codegen is Codegen.EAGER:
            return torch_private.compile_eager(module, inputs, partition=cut, around=lambda run, is_backward: run)
        options = {**torch_private.mode_options(self.options.mode or "default"), **self.options.inductor}
        is_emulated = self._planned_on.type not in {tensor.device.type for tensor in torch_private.tensors_in(list(inputs))}
        if is_emulated:
            options = {"shape_padding": False, **options}  # it times kernels on the card
        return torch_private.trace_inductor(
            module, inputs, options=options, partition=cut, around_passes=seen_on_card if is_emulated else nullcontext
        )

    def _plan_graph(self, joint: fx.GraphModule, num_fwd_outputs: int, static_indices: tuple[int, ...], held: Sequence[Any]) -> None:
        traced = [tensor for node in joint.graph.nodes for tensor in torch_private.tensors_in(node.meta.get("val"))]
        gradients = [tensor.grad for tensor in held if isinstance(tensor, torch.Tensor) and tensor.is_leaf]
        with torch_private.seen_on(self._planned_on, [*traced, *held, *gradients]):
            super()._plan_graph(joint, num_fwd_outputs, static_indices, held)

    def _fits(self, account: WrapperAccount) -> bool:
        return True  # there is no code that could need more than the simulation
