"""What every op of a joint graph costs: measured where it can be, the roofline elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from dyngran.compiler.loops import LoopKind, loop_kind
from dyngran.compiler.storages import storage_bytes, tensors_of
from dyngran.passes.costs import roofline_us
from dyngran.passes.devices import DeviceSpec, find_device, match_device
from dyngran.passes.host import measure_card_spec, measure_host_spec
from dyngran.passes.profile import OpProfiler, Request
from dyngran.passes.profile_cache import Measurement, ProfileCache
from dyngran.runtime.memory import device_memory


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
    measure: bool,
    progress: Callable[[str], None],
) -> list[Measurement]:
    """One measurement per op. Under a fusing code generator only ops that stay kernels of their own are run; loops are priced by bytes.

    ``limit_bytes``: what profiling itself may allocate. ``measure`` False prices everything by the roofline.
    """
    profiled = [node for node in nodes if not (fused and _is_generated(node))]
    if measure and profiled:
        progress(f"measuring {len(profiled)} operators")
    if limit_bytes is not None and any(_planned_bytes(node, device) > limit_bytes for node in profiled):
        limit_bytes = device_memory(device).free_bytes // 2  # no plan can fit: measure, so that the refusal names the true least peak
    profiler = OpProfiler(spec, device if measure else None, cache=ProfileCache.default(), limit_bytes=limit_bytes)
    prices = dict(zip(profiled, profiler.measure_all([_request(node) for node in profiled]), strict=True))
    return [prices[node] if node in prices else _by_bytes(node, spec) for node in nodes]


def _is_generated(node: fx.Node) -> bool:
    """Inductor writes this kernel itself: running the op alone would measure something else (for ``prims``, Python)."""
    if loop_kind(node) is not LoopKind.NONE:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("prims", "inductor")


def _planned_bytes(node: fx.Node, device: torch.device) -> int:
    """Results and operands that a plan has to hold while the op runs; inputs of the graph are held anyway."""
    touched = [node, *(operand for operand in node.all_input_nodes if operand.op == "call_function")]
    return sum(storage_bytes(tensor, device) for item in touched for tensor in tensors_of(item.meta.get("val")))


def _request(node: fx.Node) -> Request:
    return Request(node.target, _values(node.args), dict(_values(node.kwargs)), node.meta.get("val"))


def _by_bytes(node: fx.Node, spec: DeviceSpec) -> Measurement:
    """A kernel that Inductor will generate: its own price matters only where the simulator prices op by op."""
    cost_us = roofline_us(node.target, _values(node.args), node.meta.get("val"), spec, kwargs=dict(_values(node.kwargs)))
    return Measurement(cost_us=cost_us, workspace_bytes=0, source="roofline: generated code")


def _values(arguments: Any) -> Any:
    return fx.node.map_arg(arguments, lambda node: node.meta.get("val"))
