"""The operators as torch sees them: opcheck, fake tensors with symbolic sizes, make_fx, Inductor, CUDA graphs, and importing them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import DEVICES, values
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dyngran.kernels import launch, tuning
from dyngran.kernels.groups import FORMATS, stored_bytes
from dyngran.kernels.operators import OPERATORS, register
from dyngran.kernels.steps import advance_step, step_tensor

ops = register()
on_devices = pytest.mark.parametrize("device", DEVICES)
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
CHANNELS_LAST = (105, 1, 35, 5)  # of (2, 5, 3, 7)
Round = Callable[[Tensor], Tensor]


def example(device: str) -> Tensor:
    return torch.randn(2, 5, 3, 7, generator=torch.Generator().manual_seed(0)).to(device, memory_format=torch.channels_last)


def arguments(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """For each operator some calls: a tensor in its layout, one that has to be copied, none of its dimensions, and no element."""
    x, line = example(device), torch.arange(9.0, device=device)
    size, index = (2, 5, 3, 7), torch.tensor([3, 0], device=device)
    bits, stored = ops.pack_bits(x > 0, CHANNELS_LAST), ops.quantize(x, CHANNELS_LAST, "int4", 64, False, 0)
    on_host = ops.offload(x, CHANNELS_LAST)
    ops.offload_wait(on_host, x)
    scalar, empty = torch.tensor(1.5, device=device), torch.zeros(3, 0, device=device)
    return {
        "pack_bits": [(x > 0, CHANNELS_LAST), (x > 0, (105, 21, 7, 1)), (scalar > 0, ()), (empty > 0, (0, 1))],
        "unpack_bits": [(bits, size, CHANNELS_LAST)],
        "pack_sign": [(x, CHANNELS_LAST, 0.0), (x[:, :, ::2], (70, 1, 35, 5), 0.5), (scalar, (), 0.0), (empty, (0, 1), 0.0)],
        "unpack_sign": [(bits, size, CHANNELS_LAST, 0.0, torch.bfloat16)],
        "quantize": [
            *((x, CHANNELS_LAST, format, 64, False, 0) for format in FORMATS),
            (x.bfloat16(), (105, 21, 7, 1), "int8", 128, True, 5),
            (scalar, (), "int8", 128, False, 0),
            (empty, (0, 1), "int4", 64, False, 0),
        ],
        "dequantize": [(stored, size, CHANNELS_LAST, torch.bfloat16, "int4", 64)],
        "cast": [
            (x, CHANNELS_LAST, torch.float16),
            (x, (105, 21, 7, 1), torch.bfloat16),
            (x.long(), CHANNELS_LAST, torch.int8),
            (scalar, (), scalar.dtype),
        ],
        "pack_slice": [(x, 0, 0, 1), (x, 1, 1, 3), (x, -1, 2, 0), (line[::2], 0, 1, 2)],
        "gather_maps": [(x, index, 1), (line[::2], index, 0)],
        "scatter_maps": [(x, x[:, :2], index, 1), (line, line[:2], index, 0)],
        "offload": [(x, CHANNELS_LAST), (x, (105, 21, 7, 1)), (scalar, ()), (empty, (0, 1))],
        "offload_wait": [(on_host, x)],
        "fetch": [(on_host, size, CHANNELS_LAST, x.device)],
        "fetch_wait": [(x,)],
    }


@on_devices
@pytest.mark.parametrize("name", [operator.name for operator in OPERATORS])
def test_torch_accepts_every_operator(device: str, name: str) -> None:
    for call in arguments(device)[name]:
        torch.library.opcheck(getattr(ops, name).default, call)


@on_devices
@pytest.mark.parametrize("name", [operator.name for operator in OPERATORS])
def test_results_are_new_and_as_the_fake_ones(device: str, name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for call in arguments(device)[name]:
        result = getattr(ops, name)(*call)
        with FakeTensorMode() as mode:
            fake = getattr(ops, name)(*(mode.from_tensor(value) if isinstance(value, Tensor) else value for value in call))
        if result is None and fake is None:
            continue  # called for its effect
        assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (result.shape, result.stride(), result.dtype, result.device)
        given = {value.untyped_storage().data_ptr() for value in call if isinstance(value, Tensor) and value.numel()}
        assert result.untyped_storage().data_ptr() not in given


def quantized(format: str) -> Round:
    def run(x: Tensor) -> Tensor:
        return ops.dequantize(ops.quantize(x, x.stride(), format, 64, False, 0), x.shape, x.stride(), x.dtype, format, 64)

    return run


def through_host(x: Tensor) -> Tensor:
    host = ops.offload(x, x.stride())
    ops.offload_wait(host, x)
    back: Tensor = ops.fetch(host, x.shape, x.stride(), x.device)
    ops.fetch_wait(back)
    return back


ROUND_TRIPS: dict[str, Round] = {
    "host": through_host,
    "bits": lambda x: ops.unpack_bits(ops.pack_bits(x > 0, x.stride()), x.shape, x.stride()).to(x.dtype),
    "sign": lambda x: ops.unpack_sign(ops.pack_sign(x, x.stride(), 0.0), x.shape, x.stride(), 0.0, x.dtype),
    **{format: quantized(format) for format in FORMATS},
    "cast": lambda x: ops.cast(ops.cast(x, x.stride(), torch.bfloat16), x.stride(), x.dtype),
    "slice": lambda x: ops.pack_slice(x, 1, 1, x.shape[1] - 1),
    "maps": lambda x: ops.scatter_maps(
        x, ops.gather_maps(x, torch.arange(1, 3, device=x.device), 1) * 2, torch.arange(1, 3, device=x.device), 1
    ),
}


@on_devices
@pytest.mark.parametrize("name", ROUND_TRIPS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_computes_the_same(device: str, name: str, dynamic: bool) -> None:
    """Between pointwise operations, whose buffers Inductor may lay out as it likes."""

    def function(x: Tensor) -> Tensor:
        return ROUND_TRIPS[name](x * 2 - 0.25) + 1

    compiled = torch.compile(function, backend="inductor", dynamic=dynamic, fullgraph=True)
    for width in (7, 12):
        x = torch.randn(2, 5, 3, width, device=device).contiguous(memory_format=torch.channels_last)
        expected, result = function(x), compiled(x)
        assert torch.equal(result, expected) and result.stride() == expected.stride()


@on_devices
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_make_fx_traces_one_node_for_each_operator(device: str, name: str) -> None:
    x = example(device)
    graph = make_fx(ROUND_TRIPS[name], tracing_mode="symbolic")(x)
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function" and "dyngran." in str(node.target)]
    assert len(targets) == {"slice": 1, "host": 4}.get(name, 2)
    wider = torch.cat((x, x), dim=3).contiguous(memory_format=torch.channels_last)
    assert torch.equal(graph(wider), ROUND_TRIPS[name](wider))


def test_symbolic_sizes_stay_symbolic() -> None:
    graph = make_fx(lambda x: ops.quantize(x, x.stride(), "int4", 64, False, 0), tracing_mode="symbolic", _allow_non_fake_inputs=False)(
        torch.randn(300, 5)
    )
    [stored] = [node for node in graph.graph.nodes if "quantize" in str(node.target)]
    symbolic = stored.meta["val"].shape[0]
    assert isinstance(symbolic, torch.SymInt) and int(symbolic) == stored_bytes("int4", 1500, 64)


def test_there_is_no_derivative_and_torch_says_so() -> None:
    x = torch.randn(4, requires_grad=True)
    result = ops.cast(x, (1,), torch.float64)
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        result.sum().backward()
    assert not ops.quantize(x, (1,), "int8", 64, False, 0).requires_grad


def test_registering_again_changes_nothing() -> None:
    assert register() is ops and register().pack_bits is ops.pack_bits


def test_importing_registers_nothing_and_needs_no_triton() -> None:
    script = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
import dyngran.kernels
from dyngran.kernels import operators, tuning
def names(): return [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("dyngran::")]
assert not names(), names()
ops = operators.register()
assert len(names()) == len(operators.OPERATORS)
x = torch.randn(100)
assert torch.equal(ops.unpack_bits(ops.pack_bits(x > 0, (1,)), (100,), (1,)), x > 0)
from dyngran.kernels.bits import pack_kernel
try:
    pack_kernel[(1,)]()
except RuntimeError as error:
    assert "pip install triton" in str(error)
else:
    raise AssertionError("no error")
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# ------------------------------------------------------------------------------------------------------------------------------ on a card


@needs_card
def test_a_captured_graph_draws_anew_when_the_step_advances() -> None:
    x = values(1 << 16, torch.bfloat16, "normal", 0, "cuda")
    step = step_tensor(torch.device("cuda")).zero_()
    run = torch.cuda.CUDAGraph()
    quantized = ops.quantize(x, x.stride(), "int4", 64, True, 3)  # compiles
    torch.cuda.synchronize()
    with torch.cuda.graph(run):
        stored = ops.quantize(x, x.stride(), "int4", 64, True, 3)
        advance_step()
    step.zero_()
    draws = []
    for _ in range(3):
        run.replay()
        draws.append(stored.clone())
    assert torch.equal(draws[0], quantized) and not torch.equal(draws[0], draws[1]) and not torch.equal(draws[1], draws[2])
    assert int(step) == 3
    step.zero_()
    run.replay()
    assert torch.equal(stored, draws[0])
    step.fill_(2)
    assert torch.equal(ops.quantize(x, x.stride(), "int4", 64, True, 3), draws[2])


@needs_card
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_round_trips_can_be_captured(name: str) -> None:
    x = example("cuda")
    expected = ROUND_TRIPS[name](x)
    torch.cuda.synchronize()
    run = torch.cuda.CUDAGraph()
    with torch.cuda.graph(run):
        result = ROUND_TRIPS[name](x)
    run.replay()
    assert torch.equal(result, expected)


@needs_card
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_nothing_waits_for_the_card(name: str) -> None:
    x = example("cuda")
    ROUND_TRIPS[name](x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ROUND_TRIPS[name](x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_card
def test_more_than_2_to_the_31_elements() -> None:
    num = 2**31 + 4111
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB")
    x = torch.zeros(num, dtype=torch.bfloat16, device="cuda")
    places = torch.tensor([0, 2**31 - 1, 2**31, 2**31 + 4000, num - 1], device="cuda")
    x[places] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=x.dtype, device="cuda")
    alone = x[places].float()  # in their groups, so that they are the largest: a scale is at most that / top * (1 + 2^-7)
    half_steps = {"int8": alone * (1 + 2.0**-7) / 127 / 2, "int4": alone * (1 + 2.0**-7) / 7 / 2, "fp8_e4m3": alone * 2.0**-4}
    for name, half_step in half_steps.items():
        result = ROUND_TRIPS[name](x)
        error = (result[places].float() - alone).abs()
        assert (error <= half_step * (1 + 2.0**-15) + alone * 2.0**-8).all()  # the last: what comes back is rounded to a bfloat16
        assert int(result.count_nonzero()) == 5
        del result
    result = ROUND_TRIPS["cast"](x)
    assert torch.equal(result[places], x[places]) and int(result.count_nonzero()) == 5
    del result
    for name in ("bits", "sign"):
        result = ROUND_TRIPS[name](x)
        assert result[places].tolist() == [1.0] * 5 and int(result.count_nonzero()) == 5
        del result
    rows = x[: 2**31].view(2, -1)
    assert torch.equal(ops.pack_slice(rows, 1, 2**30 - 5, 5), rows[:, 2**30 - 5 :])


@needs_card
def test_what_was_tuned_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNGRAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "tuned", {})
    launch._read_tuned.cache_clear()
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.zeros(1 << 20, dtype=torch.bool, device=device)
    trials = tuning.tune(lambda: ops.pack_bits(x, (1,)), device)
    assert {trial.key for trial in trials} == {"pack_bits"} and len(trials) == len({trial.configuration for trial in trials})
    slow = launch.Configuration(4096, 8)
    launch.tuned[device, "pack_bits"] = slow
    tuning.save(device)
    launch.tuned.clear()
    launch._read_tuned.cache_clear()
    assert launch.configuration("pack_bits", device) == slow
    launch._read_tuned.cache_clear()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"pack_bits": 5}', '{"pack_bits": [3, 4]}', '{"other": [4, 4]}'])
def test_a_file_that_is_not_one_is_as_good_as_none(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tuned.json").write_text(content)
    monkeypatch.setattr(launch, "tuning_file", lambda _: tmp_path / "tuned.json")
    monkeypatch.setattr(launch, "tuned", {})
    launch._read_tuned.cache_clear()
    assert launch.configuration("pack_bits", torch.device("cuda", 0)) == launch.DEFAULTS["pack_bits"]
    launch._read_tuned.cache_clear()
