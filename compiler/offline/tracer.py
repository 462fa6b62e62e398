"""Plan a training step without running it: no parameter is allocated and no card is needed. Runs in a process of its own.

The step is called under fake tensors, through Dynamo and AOTAutograd as in training. Where the card is not here, its choices are emulated
on the CPU (`torch_emulation`), and the tensors are taken to be on the card while the graph is planned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.offline.offline_graph import OfflineGraph
from dyngran.compiler.offline.overrides import with_batch, with_dtype
from dyngran.compiler.offline.target import (
    DTYPES,
    Target,
    call_target,
    described,
    hint_of,
    load_callable,
    reads_numbers,
    without_data,
)
from dyngran.compiler.offline.torch_emulation import emulate_cuda, let_fake_modules_move
from dyngran.compiler.offline.torch_fakes import tests_denied, to_fake
from dyngran.compiler.options import Options, parse_options
from dyngran.compiler.plans.planfile import GraphBreak, Origin, PlanDocument, Settings
from dyngran.compiler.plans.planned_document import document_of
from dyngran.passes.devices import DeviceSpec, find_device, rounded_bytes
from dyngran.passes.errors import TargetError
from dyngran.runtime.memory import imagined_device

CPU = "cpu"
DENIED = "a test on a tensor's numbers, which are not there, is taken as false"
CAPTURES = "torch._dynamo.config.capture_scalar_outputs and capture_dynamic_output_shape_ops"
ROCM_LIKE = (8, 0)  # attention kernels are chosen as on an A100 where a device has no compute capability


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a step is traced and what it is planned for.

    Attributes:
        spec: the device of the table whose costs count; None: operators are measured on the device that is here.
        traced_on: device of the fake tensors; planned_on: device they are taken to be on. name: for people and plan files.
    """

    spec: DeviceSpec | None
    traced_on: torch.device
    planned_on: torch.device
    name: str

    @property
    def is_emulated(self) -> bool:
        return self.traced_on.type != self.planned_on.type

    @property
    def origin(self) -> Origin:
        """Exact if this build of torch could train there."""
        has_build = self.planned_on.type == CPU or torch.version.cuda is not None or torch.version.hip is not None
        return Origin.EXACT if has_build else Origin.PORTABLE


def find_place(profile: str | None) -> Place:
    """Where to trace for a device of the table, or for the one that is here (None). Raises InvalidOption for an unknown name."""
    here = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device(CPU)
    if profile is None:
        return Place(spec=None, traced_on=here, planned_on=here, name=torch.cuda.get_device_name(here) if here.type == "cuda" else CPU)
    spec = find_device(profile)
    if spec.name == CPU:
        return Place(spec=spec, traced_on=torch.device(CPU), planned_on=torch.device(CPU), name=CPU)
    is_like_it = here.type == "cuda" and torch.cuda.get_device_capability(here) == spec.capability
    return Place(spec=spec, traced_on=here if is_like_it else torch.device(CPU), planned_on=torch.device("cuda", 0), name=spec.name)


class Tracer:
    """Traces one target for one place, as often as it is asked to: with other batches, budgets or options.

    Emulation changes this process for good.
    """

    def __init__(self, spec: str, place: Place) -> None:
        self._spec = spec
        self.place = place
        if place.is_emulated:
            assert place.spec is not None
            emulate_cuda(place.spec.capability if place.spec.capability != (0, 0) else ROCM_LIKE)
        else:
            let_fake_modules_move()
        self._make = load_callable(spec)

    def plan(self, settings: Settings, *, codegen: str) -> PlanDocument:
        """The plan of the step under ``settings``. Raises TargetError, and what planning refuses with."""
        options = self._options(settings, codegen)
        denied: list[str] = []
        graphs = self._trace(settings, options, denied)
        planned = [graph for graph in graphs if graph.plan is not None]
        if not planned:
            raise self._nothing_to_plan(settings, options)
        for graph in planned:
            assert graph.strategy is not None
            graph.strategy.planner.frontier()
        return document_of(planned, device=self.place.name, origin=self.place.origin, settings=settings, breaks=_breaks_of(graphs, denied))

    def _nothing_to_plan(self, settings: Settings, options: Options) -> TargetError:
        """Because of a graph break, which tracing the step as one graph names or avoids, or because nothing needs a gradient."""
        left = f"target {self._spec!r}: torch.compile leaves its step to Python, so there is nothing to plan"
        try:
            graphs = self._trace(settings, options, [], is_whole=True)
        except TargetError as error:
            return TargetError(
                f"{left}: {described(error.__cause__ or error)}. A graph break in a loop, or in torch's own modules, does that: take it "
                "out, or return the part of the model that is compiled."
            )
        if any(graph.plan is not None for graph in graphs):
            return TargetError(
                f"{left}, because of sizes that depend on numbers: set {CAPTURES} to True in the target and in training, as fullgraph=True "
                "does."
            )
        return TargetError(
            f"target {self._spec!r}: nothing needs a gradient, so there is nothing to plan. Return a model in training mode whose "
            "parameters require gradients, and a step that returns something computed from them."
        )

    def _options(self, settings: Settings, codegen: str) -> Options:
        return parse_options(
            {
                "budget": settings.budget,
                "codegen": codegen,
                "device_profile": settings.profile,
                "keep_below": settings.keep_below,
                "offload": settings.offload,
                "outputs": settings.outputs,
                "pack": settings.pack,
                "slice": settings.slice,
                "solver": settings.solver,
                "storage": settings.storage,
            }
        )

    def _trace(
        self, settings: Settings, options: Options, denied: list[str], *, is_whole: bool = False, num_graphs: int = 0
    ) -> list[OfflineGraph]:
        """The graphs of the step; ``denied`` gets the places of tests that were taken as false. ``is_whole``: refuse graph breaks.

        ``num_graphs``: how many there are, once that is known: where a function that breaks is called by another, the last graph of the
        inner one does not end in a break, and yet the step goes on.
        """
        graphs: list[OfflineGraph] = []
        failures: list[Exception] = []

        def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            is_followed = len(graphs) + 1 < num_graphs
            graph = OfflineGraph(module, inputs, options, planned_on=self.place.planned_on, is_followed=is_followed)
            try:
                graph.compile(inputs)
            except Exception as error:
                if type(error).__module__ != "torch._dynamo.exc":  # by which Dynamo is told to trace once more
                    failures.append(error)
                raise
            graphs.append(graph)
            return graph

        torch_private.forget_compiled()
        mode = torch_private.fake_tensor_mode()
        with mode, contextlib.ExitStack() as stack:
            target, step, optimizer = self._prepared(settings, mode)
            stack.enter_context(self._imagined(self._held_bytes(target, optimizer)))
            compiled = torch.compile(step, backend=backend, dynamic=True if settings.dynamic else None, fullgraph=is_whole)
            try:
                with _autocast(target, self.place.traced_on), tests_denied(denied):
                    compiled(*target.inputs, **target.keywords)
            except (Exception, SystemExit) as error:
                cause = failures[-1] if failures else error
                if failures and not reads_numbers(cause):
                    raise cause from None
                hint = hint_of(cause, advice=f"leave what reads them out of the step, or set {CAPTURES} to True, in training too.")
                raise TargetError(f"target {self._spec!r}: its step cannot be traced: {described(cause)}.{hint}") from error
            finally:
                del optimizer  # alive until here: its state is found through it
        if not num_graphs and any(graph.graph_break is None for graph in graphs[:-1]):
            denied.clear()
            return self._trace(settings, options, denied, is_whole=is_whole, num_graphs=len(graphs))
        return graphs

    def _held_bytes(self, target: Target, optimizer: object) -> int:
        """What the target holds on the device, read by the step or not: a frozen copy of the model, say."""
        modules = [*target.module.parameters(), *target.module.buffers()] if target.module is not None else []
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
        tensors = [*modules, *_parameters_of(groups), *torch_private.tensors_in((target.inputs, dict(target.keywords), target.targets))]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        return sum(rounded_bytes(int(storage.nbytes()), self.place.planned_on) for storage in storages.values())

    def _imagined(self, held_bytes: int) -> contextlib.AbstractContextManager[None]:
        """No allocator counts fake tensors: the device is as the table has it, or as it is, with what the target holds there."""
        place = self.place
        if place.planned_on.type == CPU:
            return contextlib.nullcontext()
        if place.spec is not None:
            return imagined_device(place.spec.memory_bytes, library_bytes=place.spec.library_bytes, held_bytes=held_bytes)
        return contextlib.nullcontext()

    def _prepared(self, settings: Settings, mode: Any) -> tuple[Target, Callable[..., Any], object]:
        """The target on its device with the overrides, its step, and its optimizer."""
        with self.place.traced_on:  # what a target makes without naming a device
            target, taken = call_target(self._make, self._spec, batch=settings.batch, dtype=settings.dtype)
        target = without_data(target, lambda tensor: to_fake(tensor, mode))
        if settings.batch is not None and "batch" not in taken:
            target = with_batch(target, settings.batch)
        if settings.dtype is not None and "dtype" not in taken:
            target = with_dtype(target, DTYPES[settings.dtype])
        target = self._on_device(target)
        for module in target.module.modules() if target.module is not None else ():
            module._compiled_call_impl = None  # by Module.compile: here the step is compiled as a whole, and by dyngran
        return target, _step_of(target), self._optimizer_of(target)

    def _optimizer_of(self, target: Target) -> object:
        if not callable(target.optimizer):
            return target.optimizer
        if target.module is None:
            raise TargetError(
                f"target {self._spec!r}: its optimizer is a function of the parameters, and its model is no module that has them. "
                "Return the optimizer itself."
            )
        try:
            return target.optimizer(target.module.parameters())
        except Exception as error:
            raise TargetError(f"target {self._spec!r}: its optimizer cannot be made: {described(error)}.") from error

    def _on_device(self, target: Target) -> Target:
        device = self.place.traced_on
        tensors = [*(target.module.parameters() if target.module is not None else ()), *torch_private.tensors_in(target.inputs)]
        away = next((tensor.device for tensor in tensors if tensor.device.type not in (device.type, CPU)), None)
        if away is not None:
            raise TargetError(
                f"target {self._spec!r}: its tensors are on {away}, which is not here. Name the device to plan for: --device h100, say "
                "(`dyngran-plan build --help` lists them)."
            )
        if device.type == CPU:
            return target
        if target.module is not None and any(parameter.device.type == CPU for parameter in target.module.parameters()):
            target.module.to(device)
        return target.mapped(lambda tensor: tensor.to(device))


def _parameters_of(groups: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    """The parameters of an optimizer's groups."""
    return [parameter for group in groups for parameter in group["params"]]


def _step_of(target: Target) -> Callable[..., Any]:
    model, loss, targets = target.model, target.loss, target.targets
    if loss is None:
        return model

    def step(*inputs: Any, **keywords: Any) -> Any:
        return loss(model(*inputs, **keywords), *targets)

    return step


def _breaks_of(graphs: Sequence[OfflineGraph], denied: Sequence[str]) -> list[GraphBreak]:
    breaks = [GraphBreak(*graph.graph_break) for graph in graphs if graph.graph_break is not None]
    known = {one.where for one in breaks}
    said = [GraphBreak(f"{one.reason}; {DENIED}", one.where) if one.where in denied else one for one in breaks]
    return said + [GraphBreak(DENIED, place) for place in dict.fromkeys(denied) if place not in known]


@contextlib.contextmanager
def _autocast(target: Target, device: torch.device) -> Iterator[None]:
    if target.autocast is None:
        yield
        return
    with torch.autocast(device.type, dtype=target.autocast):
        yield
