"""What every op of a joint graph costs: measured where it can be, the roofline elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.bodies import body_workspace_bytes
from dyngran.compiler.layouts import Layouts, real_layouts, values_of
from dyngran.compiler.loops import LoopKind, loop_kind
from dyngran.compiler.storages import storage_bytes, tensors_of
from dyngran.passes.costs import is_matmul, roofline_us
from dyngran.passes.devices import DeviceSpec, find_device, match_device
from dyngran.passes.host import measure_card_spec, measure_host_spec
from dyngran.passes.profile import OpProfiler, Request
from dyngran.passes.profile_cache import Measurement, ProfileCache
from dyngran.passes.signature import TensorSpec

MAX_PASSES = 8  # through a graph whose kernels lay results out otherwise than traced: each pass finds what such results lead to

_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


def device_spec(device: torch.device, name: str | None) -> DeviceSpec:
    """The device to price for: the named one, else the one the graph is on. Raises InvalidOption for an unknown name."""
    if name is not None:
        return find_device(name)
    if device.type == "cuda":
        return match_device(torch.cuda.get_device_name(device)) or measure_card_spec(device)
    return measure_host_spec()


def price_nodes(
    nodes: Sequence[fx.Node],
    device: torch.device,
    *,
    spec: DeviceSpec,
    limit_bytes: int | None,
    fused: bool,
    channels_last: bool,
    measure: bool,
    progress: Callable[[str], None],
) -> list[Measurement]:
    """One measurement per op. Under a fusing code generator only ops that stay kernels of their own are run; loops are priced by bytes.

    ``limit_bytes``: what profiling itself may allocate; it is raised to what the largest single op touches. Every op is run whatever the
    budget is: an op left out has no known workspace, and then neither a plan's peak nor a refusal's least peak would be true. A step runs
    that op too, so profiling exceeds the limit by copies of one op's inputs at most. ``measure`` False prices everything by the roofline.
    ``channels_last``: the code generator lays out images so for convolutions, whatever the graph's strides say.
    """
    profiled = [node for node in nodes if not (fused and _is_generated(node))]
    if measure and profiled:
        progress(f"measuring {len(profiled)} operators")
    if limit_bytes is not None:
        limit_bytes = max([limit_bytes, *(_touched_bytes(node, device) for node in profiled)])
    profiler = OpProfiler(
        spec,
        device if measure and device.type != "meta" else None,
        cache=ProfileCache.default(),
        limit_bytes=limit_bytes,
        plain_dispatch=torch_private.plain_dispatch,
        beside_profiler=torch_private.cpu_memory_events,
    )
    prices = _measured(profiled, profiler, channels_last=channels_last, fused=fused)
    if measure and device.type == "cuda" and any(is_matmul(node.target) for node in nodes):
        _keep_matmul_workspace(device)
    return [_with_bodies(node, prices[node] if node in prices else _by_bytes(node, spec), device, fused=fused) for node in nodes]


def _measured(profiled: Sequence[fx.Node], profiler: OpProfiler, *, channels_last: bool, fused: bool) -> dict[fx.Node, Measurement]:
    """A price for each node, of operands that lie as they do in a step. Generated code keeps to the strides of the graph."""
    layouts: Layouts = {}
    prices: dict[fx.Node, Measurement] = {}
    for _ in range(MAX_PASSES):
        requests = [_request(node, layouts, channels_last=channels_last) for node in profiled]
        prices = dict(zip(profiled, profiler.measure_all(requests), strict=True))
        found = {} if fused or not profiled else real_layouts(profiled[0].graph, prices)
        if found == layouts:
            break
        layouts = found
    return prices


def _with_bodies(node: fx.Node, price: Measurement, device: torch.device, *, fused: bool) -> Measurement:
    in_bodies = body_workspace_bytes(node, device, fused=fused)
    return replace(price, workspace_bytes=price.workspace_bytes + in_bodies) if in_bodies else price


def _keep_matmul_workspace(device: torch.device) -> None:
    """Let cuBLAS allocate now what it keeps for this thread (33 MiB on Hopper): remembered costs run nothing, and it is held in a step."""
    with torch_private.plain_dispatch(), torch.no_grad():
        one = torch.ones(8, 8, device=device)
        torch.mm(one, one)


def workspace_meter(device: torch.device, spec: DeviceSpec) -> Callable[[object, tuple[object, ...]], int | None]:
    """A function of ``(target, arguments)`` that gives the workspace in bytes of one call, or None if the call cannot be run.

    Tensors among the arguments may be `TensorSpec`. Every distinct call is run once and remembered on disk.
    """
    profiler = OpProfiler(
        spec,
        device,
        cache=ProfileCache.default(),
        plain_dispatch=torch_private.plain_dispatch,
        beside_profiler=torch_private.cpu_memory_events,
    )

    def measure(target: object, args: tuple[object, ...]) -> int | None:
        found = profiler.measure(target, args, {})
        return found.workspace_bytes if found.is_measured else None

    return measure


def _is_generated(node: fx.Node) -> bool:
    """Inductor writes this kernel itself: running the op alone would measure something else (for ``prims``, Python)."""
    if loop_kind(node) is not LoopKind.NONE:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("prims", "inductor")


def _touched_bytes(node: fx.Node, device: torch.device) -> int:
    """Operands, each as often as the op takes it, and results: what one measured call allocates besides its workspace."""
    touched = (values_of(node.args, {}), values_of(node.kwargs, {}), node.meta.get("val"))
    return sum(storage_bytes(tensor, device, on_device=True) for item in touched for tensor in tensors_of(item))


def _request(node: fx.Node, layouts: Layouts, *, channels_last: bool) -> Request:
    args = values_of(node.args, layouts)
    if channels_last and node.target in _CONVOLUTIONS:
        args = tuple(in_channels_last(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
    return Request(node.target, args, dict(values_of(node.kwargs, layouts)), node.meta.get("val"))


def in_channels_last(tensor: torch.Tensor) -> torch.Tensor | TensorSpec:
    """A four-dimensional tensor's metadata with channels innermost, a slice of channels still a slice; any other tensor as it is."""
    spec = TensorSpec.of(tensor)
    if len(spec.shape) != 4 or 0 in spec.shape:
        return tensor
    _, channels, height, width = spec.shape
    is_slice = spec.stride[1:] == (height * width, width, 1) and spec.stride[0] % (height * width) == 0
    stored = max(channels, spec.stride[0] // (height * width)) if is_slice else channels
    return replace(spec, stride=(stored * height * width, 1, stored * width, stored))


def _by_bytes(node: fx.Node, spec: DeviceSpec) -> Measurement:
    """A kernel that Inductor will generate: its own price matters only where the simulator prices op by op."""
    cost_us = roofline_us(node.target, values_of(node.args, {}), node.meta.get("val"), spec, kwargs=dict(values_of(node.kwargs, {})))
    return Measurement(cost_us=cost_us, workspace_bytes=0, source="roofline: generated code")
