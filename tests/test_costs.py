"""The roofline: arithmetic against hand counts, bytes against shapes, and nothing that moves bytes is free."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from measure import event_peak_bytes
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dyngran.passes.costs import (
    ATTENTION_SLOWDOWN,
    COLLECTIVE_FLOOR_US,
    CONVOLUTION_SLOWDOWN,
    estimated_workspace_bytes,
    is_heavy,
    is_view,
    node_us,
    roofline_us,
)
from dyngran.passes.devices import DEVICES, DeviceSpec, find_device, match_device
from dyngran.passes.errors import InvalidOption
from dyngran.passes.signature import OpSignature, TensorSpec

aten = torch.ops.aten
# 1 TFLOP/s is 1e6 flops per microsecond and 1 GB/s is 1e3 bytes per microsecond: expectations are small numbers.
UNIT = DeviceSpec(
    name="unit",
    matmul_tflops={"fp32": 1.0, "bf16": 2.0},
    bandwidth_bytes_per_s=1e12,
    launch_us=1.0,
    memory_bytes=2**30,
    matmul_share=1.0,
    bandwidth_share=1.0,
)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_a_matmul_costs_its_flops_at_the_rate_of_its_dtype() -> None:
    for dtype, rate in ((torch.float32, 1e6), (torch.bfloat16, 2e6)):
        left, right = meta(1000, 2000, dtype=dtype), meta(2000, 500, dtype=dtype)
        price = roofline_us(aten.mm.default, (left, right), meta(1000, 500, dtype=dtype), UNIT)
        assert price == pytest.approx(1 + 2 * 1000 * 2000 * 500 / rate)


def test_a_matrix_vector_product_costs_its_bytes() -> None:
    price = roofline_us(aten.mm.default, (meta(4096, 4096), meta(4096, 1)), meta(4096, 1), UNIT)
    assert price == pytest.approx(1 + 4 * (4096 * 4096 + 2 * 4096) / 1e6)


def test_pointwise_costs_bytes_in_and_out_and_expanded_inputs_are_read_once() -> None:
    column = meta(1000, 1).expand(1000, 1000)
    price = roofline_us(aten.add.Tensor, (meta(1000, 1000), column), meta(1000, 1000), UNIT)
    assert price == pytest.approx(1 + 4 * (1000 * 1000 * 2 + 1000) / 1e6)


def test_convolution_forward_and_backward() -> None:
    image, weight, output = meta(2, 64, 32, 32), meta(128, 64, 3, 3), meta(2, 128, 32, 32)
    plan = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    flops = 2 * output.numel() * 64 * 9
    forward = roofline_us(aten.convolution.default, (image, weight, None, *plan), output, UNIT)
    assert forward == pytest.approx(1 + flops * CONVOLUTION_SLOWDOWN / UNIT.flops_per_us(torch.float32))
    both = aten.convolution_backward.default
    for mask, share in (([True, True, False], 2), ([False, True, False], 1)):
        outputs = (image if mask[0] else None, weight, None)
        backward = roofline_us(both, (output, image, weight, [0], *plan, mask), outputs, UNIT)
        assert backward == pytest.approx(1 + share * flops * CONVOLUTION_SLOWDOWN / UNIT.flops_per_us(torch.float32))


@pytest.mark.parametrize("name", ["_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"])
def test_attention_costs_two_matmuls_slowed_down(name: str) -> None:
    block = meta(2, 4, 1024, 64)
    price = roofline_us(getattr(aten, name).default, (block, block, block), (block, meta(2, 4, 1024)), UNIT)
    assert price == pytest.approx(1 + 2 * (2 * 2 * 4 * 1024 * 1024 * 64) * ATTENTION_SLOWDOWN / 1e6)


def test_views_and_bare_allocations_are_free_and_nothing_else_is() -> None:
    tensor = meta(64, 64)
    for target, args in (
        (aten.t.default, (tensor,)),
        (aten.view.default, (tensor, [4096])),
        (aten._unsafe_view.default, (tensor, [4096])),
        (aten.split.Tensor, (tensor, 8)),
        (aten.empty_like.default, (tensor,)),
    ):
        assert roofline_us(target, args, tensor, UNIT) == 0, target
    moving = (
        aten.clone.default,
        aten.sort.default,
        aten.zeros_like.default,
        aten.bernoulli.default,
        aten.cumsum.default,
        aten.relu.default,
    )
    for operator in moving:
        assert roofline_us(operator, (tensor,), tensor, UNIT) >= 1, operator
    assert is_view(aten.t.default)
    assert not is_view(aten.relu_.default)
    assert is_heavy(aten.bmm.default)
    assert not is_heavy(aten.add.Tensor)


def test_collectives_and_custom_operators_are_never_free() -> None:
    make_library: Any = torch.library.Library  # not annotated
    library = make_library("dyngran_test_costs", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    tiny = meta(1)
    assert roofline_us(torch.ops.dyngran_test_costs.opaque.default, (tiny,), tiny, UNIT) >= 5
    assert roofline_us(torch.ops._c10d_functional.all_reduce.default, (tiny, "sum", "0"), tiny, UNIT) == COLLECTIVE_FLOOR_US
    large = meta(10_000_000)
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    assert roofline_us(gather, (large, 8, "0"), large, UNIT) > 40 * COLLECTIVE_FLOOR_US / 2


def test_symbolic_sizes_are_priced_by_their_hints_without_a_guard() -> None:
    traced = make_fx(lambda x: x.sin() @ x.t(), tracing_mode="symbolic")(torch.ones(64, 32))
    environment = traced.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env
    num_guards = len(environment.guards)
    prices = [node_us(node, UNIT) for node in traced.graph.nodes if node.target in (aten.sin.default, aten.mm.default)]
    assert prices == [pytest.approx(1 + 2 * 64 * 32 * 4 / 1e6), pytest.approx(1 + 2 * 64 * 64 * 32 / 1e6)]
    assert len(environment.guards) == num_guards


def test_a_size_that_depends_on_data_is_priced_at_its_upper_bound() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        found = torch.nonzero(torch.ones(8))
    most = torch.empty(8, 1, dtype=torch.int64, device="meta")
    assert roofline_us(aten.relu.default, (found,), found, UNIT) == roofline_us(aten.relu.default, (most,), most, UNIT)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.masked_select.default, (torch.ones(64, 32), torch.ones(64, 32, dtype=torch.bool))),
        (aten.masked_select.default, (torch.ones(64, 32), torch.ones(32, dtype=torch.bool))),
        (aten.index.Tensor, (torch.ones(64, 32), [torch.ones(64, 32, dtype=torch.bool)])),
        (aten.index.Tensor, (torch.ones(64, 32), [torch.ones(64, dtype=torch.bool)])),
        (aten.index_put.default, (torch.ones(64, 32), [torch.ones(64, 32, dtype=torch.bool)], torch.ones(2048))),
    ],
)
def test_what_chooses_by_a_mask_needs_no_more_than_is_estimated(target: Any, args: tuple[Any, ...]) -> None:
    result = target(*args)  # all is chosen: its upper bound
    need_bytes = event_peak_bytes(lambda: target(*args)) - result.numel() * result.element_size()
    assert 0 < need_bytes <= estimated_workspace_bytes(target, args, result) <= need_bytes + 64 * 32 * 8


def test_signatures_are_equal_exactly_when_the_call_is() -> None:
    base = OpSignature.of(aten.add.Tensor, (meta(4, 8), meta(4, 8)), {"alpha": 1})
    assert base.key == OpSignature.of(aten.add.Tensor, (meta(4, 8), meta(4, 8)), {"alpha": 1}).key
    others = [
        OpSignature.of(aten.add.Tensor, (meta(4, 8), meta(8, 4).t()), {"alpha": 1}),
        OpSignature.of(aten.add.Tensor, (meta(4, 8), meta(4, 8, dtype=torch.bfloat16)), {"alpha": 1}),
        OpSignature.of(aten.add.Tensor, (meta(4, 8), meta(4, 8)), {"alpha": 2}),
        OpSignature.of(aten.sub.Tensor, (meta(4, 8), meta(4, 8)), {"alpha": 1}),
    ]
    assert len({base.key, *(other.key for other in others)}) == 5
    assert TensorSpec.of(torch.empty(4, 1, device="meta").expand(4, 8)).size_bytes == 16


def test_devices_are_found_by_name_and_by_what_the_driver_says() -> None:
    assert find_device("A100_80").name == "a100-80"
    with pytest.raises(InvalidOption, match="did you mean 'rtx4090'"):
        find_device("rtx490")
    said = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA A100-SXM4-40GB": "a100-40", "NVIDIA L4": "l4"}
    said |= {"NVIDIA L40S": "l40s", "NVIDIA A100 80GB PCIe": "a100-80", "Tesla V100-SXM2-16GB": "v100", "AMD Instinct MI300X": "mi300x"}
    for words, name in said.items():
        spec = match_device(words)
        assert spec is not None, words
        assert spec.name == name
    assert match_device("Voodoo 2") is None


def test_every_device_runs_narrow_dtypes_at_least_as_fast_as_float32() -> None:
    for spec in DEVICES.values():
        if spec.name != "cpu":
            rates = [spec.flops_per_us(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)]
            assert rates == sorted(rates), spec.name
            assert spec.flops_per_us(torch.float32, tf32=True) >= rates[0]
