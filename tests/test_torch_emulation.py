"""A training step traced with FakeTensors of the CPU comes out as CUDA's: devices, autocast, attention.

What is expected of attention was read off an H200 with torch 2.11 (``torch._fused_sdp_choice`` on 15,584 combinations agreed); of other
cards, from the rules in torch's sources. Emulation patches its process for good: every case runs in one of two child processes.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

Answers = dict[str, Any]
Shape = tuple[int, ...]

MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3


class Emulated:
    """What a child process found out: one answer per question."""

    def __init__(self, capability: tuple[int, int]) -> None:
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        from dyngran.compiler.offline.torch_emulation import emulate_cuda

        emulate_cuda(capability)
        self.capability = capability
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def trace(self, step: Callable[..., Tensor], *inputs: Tensor, inductor: bool = False) -> dict[str, list[fx.Node]]:
        """Nodes of forward and of backward, as AOTAutograd hands them out below Dynamo."""
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        graphs: dict[str, list[fx.Node]] = {}

        def keep(side: str) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
            def compiler(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Any:
                graphs[side] = [node for node in graph.graph.nodes if node.op == "call_function"]
                return make_boxed_func(graph.forward)

            return compiler

        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=keep("forward"), bw_compiler=keep("backward"), decompositions=select_decomp_table() if inductor else {}
        )
        torch.compile(step, backend=backend)(*inputs).float().sum().backward()
        return graphs


def operators(nodes: Sequence[fx.Node]) -> list[str]:
    return [str(node.target).removeprefix("aten.").removesuffix(".default") for node in nodes]


def attention_of(nodes: Sequence[fx.Node]) -> list[str]:
    return [name for name in operators(nodes) if name.startswith("_scaled_dot_product")]


def shapes(node: fx.Node) -> list[list[Any]]:
    return [[str(value.dtype), [*value.shape]] for value in node.meta["val"] if isinstance(value, Tensor)]


# The child: questions ----------------------------------------------------------------------------------------------------------------


def devices(child: Emulated) -> Answers:
    answers: Answers = {}
    with child.mode:
        model = nn.Sequential(nn.Linear(4, 4, device="cuda"), nn.LayerNorm(4)).cuda().to(torch.device("cuda", 0), torch.bfloat16)
        x = torch.ones(2, 4, device="cuda", dtype=torch.bfloat16)
        answers["made"] = [str(one.device) for one in (*model.parameters(), x)]
        answers["dtypes"] = sorted({str(parameter.dtype) for parameter in model.parameters()})
        answers["is itself"] = [x.cuda() is x, x.to("cuda") is x, x.to(x) is x, x.to("cuda", torch.float32) is x]
        with torch.device("cuda"):
            answers["default device"] = str(torch.zeros(3).device)
        tied = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
        tied[1].weight = tied[0].weight
        tied.to("cuda", torch.float16)
        answers["tied"] = tied[1].weight is tied[0].weight and str(tied[0].weight.dtype)

        def forward(x: Tensor) -> Tensor:
            steps = torch.arange(x.shape[0], device=x.device).to("cuda")
            noise = torch.rand(x.shape, device="cuda") if x.is_cuda and x.device.type == "cuda" else x
            return model(x.to("cuda")) + steps[:, None] * noise.to(x.dtype)

        for inductor in (False, True):
            graph = child.trace(forward, x, inductor=inductor)
            answers[f"nodes {inductor}"] = operators(graph["forward"])
            answers[f"places {inductor}"] = sorted(
                {str(t) for node in graph["forward"] for t in [node.kwargs.get("device")] if t is not None}
            )
    return answers


def kinds_of_norm(child: Emulated) -> Answers:
    """Statistics of norms are float32 on CUDA, of the input's dtype on the CPU; a fused norm of CUDA is several operators on the CPU."""
    answers: Answers = {}
    with child.mode:
        images = torch.ones(2, 3, 8, 8, device="cuda", dtype=torch.bfloat16)
        batch = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).cuda().to(torch.bfloat16)
        rows = torch.ones(2, 8, device="cuda", dtype=torch.bfloat16)
        layer = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.RMSNorm(8)).cuda().to(torch.bfloat16)
        for name, model, x in (("batch", batch, images), ("layer", layer, rows)):
            nodes = child.trace(model, x)["forward"]
            answers[name] = {
                str(node.target): [dtype for dtype, _ in shapes(node)] for node in nodes if isinstance(node.meta["val"], tuple)
            }
    return answers


def autocast(child: Emulated) -> Answers:
    """Result dtypes under autocast of float32 tensors ``x``, and of ``x`` with ``h``, a bfloat16 one."""
    with child.mode:
        x, h = torch.ones(4, 4, device="cuda"), torch.ones(4, 4, device="cuda", dtype=torch.bfloat16)
        wide = x.double()
        cases: dict[str, Callable[[], Tensor]] = {
            "matmul": lambda: x @ x,
            "linear": lambda: F.linear(x, h, x[0]),
            "einsum": lambda: torch.einsum("ij,jk", x, x),
            "double": lambda: wide @ wide,
            "softmax": lambda: F.softmax(h, -1),
            "softmax to half": lambda: F.softmax(h, -1, dtype=torch.float16),
            "layer_norm": lambda: F.layer_norm(h, (4,)),
            "sum": lambda: h.sum(),
            "sum of ints": lambda: torch.ones(3, device="cuda", dtype=torch.int32).sum(),
            "pow": lambda: h.pow(2),
            "exp": lambda: h.exp(),
            "norm": lambda: torch.ops.aten.norm.Scalar(h, 2),
            "norm of rows": lambda: torch.ops.aten.norm.ScalarOpt_dim(h, 2, [1]),
            "mse": lambda: F.mse_loss(h, h),
            "atan2": lambda: torch.atan2(h, x),
            "atan2 low": lambda: torch.atan2(h, h),
            "cat": lambda: torch.cat([h, x]),
            "cat low": lambda: torch.cat([h, h]),
            "add": lambda: h + h,
            "relu": lambda: F.relu(h),
            "mean": lambda: h.mean(),
            "avg_pool3d": lambda: F.avg_pool3d(h.view(1, 1, 1, 4, 4), 1),
            "reflect": lambda: F.pad(h[None], (1, 1), mode="reflect"),
        }
        answers: Answers = {}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            answers |= {name: str(case().dtype) for name, case in cases.items()}
            answers["state"] = [torch.is_autocast_enabled("cuda"), str(torch.get_autocast_dtype("cuda"))]
            with torch.autocast("cuda", enabled=False):
                answers["nested off"] = str((x @ x).dtype)
            try:
                F.binary_cross_entropy(x, x)
            except RuntimeError as error:
                answers["bce"] = str(error)
        answers["after"] = [torch.is_autocast_enabled("cuda"), str((x @ x).dtype)]
        with torch.autocast("cuda"):
            answers["default"] = str((x @ x).dtype)
        with torch.amp.autocast("cuda", torch.bfloat16):
            answers["torch.amp"] = str((x @ x).dtype)
        with pytest.warns(FutureWarning), torch.cuda.amp.autocast():
            answers["torch.cuda.amp"] = str((x @ x).dtype)
    return answers | autocast_in_dynamo(child)


def autocast_in_dynamo(child: Emulated) -> Answers:
    from torch._dynamo.decorators import skip

    with child.mode:
        x, model = torch.ones(4, 4, device="cuda"), nn.Linear(4, 4, device="cuda")

        def inside(x: Tensor) -> Tensor:
            with torch.autocast(device_type=x.device.type, dtype=torch.bfloat16):
                return torch.cat([model(x).softmax(-1), model(x).float()])

        nodes = child.trace(inside, x)["forward"]
        with torch.autocast("cuda", dtype=torch.float16):
            around = child.trace(model, x)["forward"]

        @skip
        def eager(x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.float16):
                return Model()(x)

        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return model(x).sin()

        left = child.trace(eager, x)["forward"]
    dtypes = {str(node.target): str(node.meta["val"].dtype) for node in (*nodes, *around) if isinstance(node.meta["val"], Tensor)}
    return {
        "inside": [str(node.meta["val"].dtype) for node in nodes if "addmm" in str(node.target) or "softmax" in str(node.target)],
        "around": dtypes["aten.addmm.default"],
        "left to eager": str(left[-1].meta["val"].dtype),
    }


def calls() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Tensors (query shape, key shape, dtype, mask) and arguments of the attention calls asked about."""
    head64 = {"query": (2, 4, 64, 64), "dtype": torch.bfloat16}
    return {
        "plain": (head64, {}),
        "causal": (head64, {"is_causal": True}),
        "fp16": (head64 | {"dtype": torch.float16}, {}),
        "fp32": (head64 | {"dtype": torch.float32}, {}),
        "fp64": (head64 | {"dtype": torch.float64}, {}),
        "bool mask": (head64 | {"mask": (torch.bool, (2, 1, 64, 64))}, {}),
        "fp32 odd mask": (head64 | {"query": (2, 4, 60, 64), "dtype": torch.float32, "mask": (torch.bool, (2, 1, 60, 60))}, {}),
        "3d mask": (head64 | {"mask": (torch.bfloat16, (4, 64, 64))}, {}),
        "dropout": (head64, {"dropout_p": 0.1}),
        "head 80": (head64 | {"query": (2, 4, 64, 80)}, {}),
        "head 20": (head64 | {"query": (2, 4, 64, 20)}, {}),
        "head 18 fp32": (head64 | {"query": (2, 4, 64, 18), "dtype": torch.float32}, {}),
        "head 208": (head64 | {"query": (2, 4, 64, 208)}, {}),
        "head 320": (head64 | {"query": (2, 4, 64, 320)}, {}),
        "gqa": (head64 | {"key": (2, 2, 64, 64)}, {"enable_gqa": True}),
        "gqa fp32": (head64 | {"key": (2, 2, 64, 64), "dtype": torch.float32}, {"enable_gqa": True}),
        "cross causal": (head64 | {"key": (2, 4, 33, 64)}, {"is_causal": True}),
        "one key": (head64 | {"key": (2, 4, 1, 64)}, {}),
        "three dimensions": (head64 | {"query": (4, 64, 64)}, {}),
    }


def attention(child: Emulated) -> Answers:
    """Attention operators in forward and in backward, with what the forward one returns, per call."""
    answers: Answers = {}
    with child.mode:
        for name, (tensors, arguments) in calls().items():
            answers[name] = attention_call(child, tensors, arguments)
    return answers


def attention_call(child: Emulated, tensors: dict[str, Any], arguments: dict[str, Any], *, inductor: bool = False) -> Answers:
    made = functools.partial(torch.ones, device="cuda", dtype=tensors["dtype"], requires_grad=True)
    query, key, value = made(tensors["query"]), *(made(tensors.get("key", tensors["query"])) for _ in range(2))
    mask = [torch.ones(shape, device="cuda", dtype=dtype) for dtype, shape in [tensors["mask"]]] if "mask" in tensors else []

    def step(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask[0] if mask else None, **arguments)

    graphs = child.trace(step, query, key, value, *mask, inductor=inductor)
    first = [node for node in graphs["forward"] if attention_of([node])]
    return {
        "forward": attention_of(graphs["forward"]),
        "backward": attention_of(graphs["backward"]),
        "values": shapes(first[0]) if first else [],
        "operators": operators(graphs["forward"]),
    }


def switches(child: Emulated) -> Answers:
    """What torch's own switches make of the plain bfloat16 call, and what Inductor's decompositions leave of it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    plain = calls()["plain"]
    answers: Answers = {}
    with child.mode:
        for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel(backend):
                answers[backend.name] = attention_call(child, *plain)["forward"]
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            answers["priority"] = attention_call(child, *plain)["forward"]
        torch.backends.cuda.enable_cudnn_sdp(False)
        answers["no cudnn"] = attention_call(child, *plain, inductor=True)
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.use_deterministic_algorithms(True)
        answers["deterministic"] = attention_call(child, *plain)["forward"]
        torch.use_deterministic_algorithms(False)
        try:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                attention_call(child, *calls()["fp32"])
        except Exception as error:  # noqa: BLE001 (Dynamo wraps it)
            answers["none"] = str(error)
    return answers


def choices(child: Emulated) -> Answers:
    """The backend of every call on other cards than the child's, with gradients."""
    from dyngran.compiler.offline import torch_attention

    answers: Answers = {}
    with child.mode:
        for capability in ((7, 0), (7, 5), (8, 0), (8, 9), (10, 0), (12, 0)):
            torch._C._set_sdp_priority_order([CUDNN, FLASH, EFFICIENT, MATH] if capability == (10, 0) else [FLASH, EFFICIENT, MATH, CUDNN])
            for name, (tensors, arguments) in calls().items():
                made = functools.partial(torch.ones, dtype=tensors["dtype"], requires_grad=True)
                call = torch_attention.Call(
                    query=made(tensors["query"]),
                    key=made(tensors.get("key", tensors["query"])),
                    value=made(tensors.get("key", tensors["query"])),
                    mask=torch.ones(tensors["mask"][1], dtype=tensors["mask"][0]) if "mask" in tensors else None,
                    dropout=arguments.get("dropout_p", 0.0),
                    causal=arguments.get("is_causal", False),
                    grouped=arguments.get("enable_gqa", False),
                    capability=capability,
                )
                answers[f"{capability} {name}"] = torch_attention.choose(call)
    return answers


def main() -> None:
    capability = (int(sys.argv[1]), int(sys.argv[2]))
    child = Emulated(capability)
    parts: dict[str, Callable[[Emulated], Answers]] = {"attention": attention}
    if capability == (9, 0):
        parts |= {"devices": devices, "norms": kinds_of_norm, "autocast": autocast, "switches": switches, "choices": choices}
    print(json.dumps({name: part(child) for name, part in parts.items()}))


@functools.cache
def ran(major: int, minor: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, __file__, str(major), str(minor)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def answers(major: int, minor: int) -> dict[str, Answers]:
    done = ran(major, minor)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Answers] = json.loads(done.stdout.splitlines()[-1])
    return found


# The tests ---------------------------------------------------------------------------------------------------------------------------


def test_a_model_made_for_cuda_lies_on_the_cpu_and_moves_nowhere() -> None:
    found = answers(9, 0)["devices"]
    assert {*found["made"], found["default device"]} == {"cpu"}
    assert found["dtypes"] == ["torch.bfloat16"]
    assert found["is itself"] == [True, True, True, False]
    assert found["tied"] == "torch.float16"


@pytest.mark.parametrize("inductor", [False, True])
def test_code_that_dynamo_traces_sees_cuda_and_records_the_cpu(inductor: bool) -> None:
    found = answers(9, 0)["devices"]
    assert found[f"places {inductor}"] == ["cpu"]
    assert ("rand" in " ".join(found[f"nodes {inductor}"])) and "prims.device_put" not in found[f"nodes {inductor}"]
    assert inductor or found["nodes False"].count("_to_copy") == 1  # of rand, to bfloat16


def test_norms_keep_the_statistics_of_cuda() -> None:
    found = answers(9, 0)["norms"]
    batch = found["batch"]["aten._native_batch_norm_legit_functional.default"]
    assert batch[:3] == ["torch.bfloat16", "torch.float32", "torch.float32"]
    assert found["layer"]["aten.native_layer_norm.default"] == ["torch.bfloat16", "torch.float32", "torch.float32"]
    assert found["layer"]["aten._fused_rms_norm.default"] == ["torch.bfloat16", "torch.float32"]


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        ("bfloat16", ["matmul", "linear", "einsum", "atan2 low", "cat low", "add", "relu", "mean", "avg_pool3d", "reflect", "torch.amp"]),
        ("float32", ["softmax", "layer_norm", "sum", "pow", "exp", "norm", "norm of rows", "mse", "atan2", "cat", "nested off"]),
        ("float16", ["softmax to half", "default", "torch.cuda.amp", "around", "left to eager"]),
        ("float64", ["double"]),
        ("int64", ["sum of ints"]),
    ],
)
def test_autocast_computes_in_the_dtypes_of_cuda(dtype: str, names: list[str]) -> None:
    found = answers(9, 0)["autocast"]
    assert {name: found[name] for name in names} == dict.fromkeys(names, f"torch.{dtype}")


def test_autocast_is_seen_and_left_as_on_cuda() -> None:
    found = answers(9, 0)["autocast"]
    assert found["state"] == [True, "torch.bfloat16"]
    assert found["after"] == [False, "torch.float32"]
    assert found["inside"] == ["torch.bfloat16", "torch.float32", "torch.bfloat16"]
    assert "binary_cross_entropy_with_logits" in found["bce"]


def test_a_torch_without_headers_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dyngran.compiler.offline import torch_autocast

    registered: list[str] = []
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileNotFoundError, match=r"autocast_mode\.h is missing"):
        torch_autocast.install(lambda name, _kernel, _key: registered.append(name))
    assert registered == []


HOPPER = {
    "cudnn": ["plain", "causal", "fp16", "bool mask", "dropout", "head 80", "head 208", "gqa", "cross causal"],
    "flash": ["head 20", "one key"],
    "efficient": ["fp32", "fp32 odd mask", "head 320", "3d mask"],
    "math": ["fp64", "head 18 fp32", "gqa fp32", "three dimensions"],
}
OLD = {"efficient": ["fp16", "fp32", "fp32 odd mask"], "math": ["plain", "causal", "dropout", "gqa", "head 20", "three dimensions"]}


@pytest.mark.parametrize(
    ("card", "backend", "name"),
    [(card, backend, name) for card, found in (((9, 0), HOPPER), ((7, 0), OLD)) for backend, names in found.items() for name in names],
)
def test_forward_and_backward_of_attention_are_the_cards(card: tuple[int, int], backend: str, name: str) -> None:
    found = answers(*card)["attention"][name]
    operator = [] if backend == "math" else [f"_scaled_dot_product_{backend}_attention"]
    assert found["forward"] == operator
    assert found["backward"] == [f"{one}_backward" for one in operator]


def test_what_attention_saves_has_the_shapes_of_cuda() -> None:
    found = answers(9, 0)["attention"]
    assert found["fp32 odd mask"]["values"] == [
        ["torch.float32", [2, 4, 60, 64]],
        ["torch.float32", [2, 4, 64]],  # log-sum-exp, of lengths in multiples of 32
        ["torch.int64", []],
        ["torch.int64", []],
    ]
    assert {"constant_pad_nd", "expand"} <= {*found["fp32 odd mask"]["operators"]}
    assert found["head 20"]["values"][0] == ["torch.bfloat16", [2, 4, 64, 24]]
    assert found["plain"]["values"][1] == ["torch.float32", [2, 4, 64, 1]]


def test_switches_of_attention_are_respected() -> None:
    found = answers(9, 0)["switches"]
    assert found["MATH"] == []
    assert found["FLASH_ATTENTION"] == found["no cudnn"]["forward"] == found["deterministic"] == ["_scaled_dot_product_flash_attention"]
    assert found["EFFICIENT_ATTENTION"] == found["priority"] == ["_scaled_dot_product_efficient_attention"]
    assert found["CUDNN_ATTENTION"] == ["_scaled_dot_product_cudnn_attention"]
    assert found["no cudnn"]["backward"] == ["_scaled_dot_product_flash_attention_backward"]
    assert "no enabled backend" in found["none"]


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ((7, 0), {"plain": MATH, "fp16": EFFICIENT, "fp32": EFFICIENT, "bool mask": MATH, "gqa": MATH}),
        ((7, 5), {"causal": MATH, "fp16": EFFICIENT, "head 18 fp32": EFFICIENT}),
        ((8, 0), {"plain": FLASH, "fp32": EFFICIENT, "bool mask": EFFICIENT, "gqa": FLASH, "head 208": FLASH, "cross causal": EFFICIENT}),
        ((8, 9), {"plain": FLASH, "dropout": FLASH, "head 208": EFFICIENT, "head 18 fp32": MATH}),
        ((10, 0), {"plain": CUDNN, "head 208": FLASH, "fp32": EFFICIENT, "one key": FLASH}),
        ((12, 0), {"plain": FLASH, "bool mask": EFFICIENT, "head 208": EFFICIENT}),
    ],
)
def test_other_cards_choose_by_what_they_support(card: tuple[int, int], expected: dict[str, int]) -> None:
    found = answers(9, 0)["choices"]
    assert {name: found[f"{card} {name}"] for name in expected} == expected


if __name__ == "__main__":
    main()


MOVED = """\
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from dyngran.compiler.offline.torch_emulation import let_fake_modules_move

let_fake_modules_move()
with FakeTensorMode():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to("cuda")
    with torch.no_grad():  # with gradients a build without CUDA would abort
        found = [*model.parameters(), *model.buffers(), *optimizer.param_groups[0]["params"], model(torch.ones(2, 3, device="cuda"))]
print({str(tensor.device) for tensor in found}, all(map(lambda a, b: a is b, model.parameters(), optimizer.param_groups[0]["params"])))
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a build with CUDA, with or without a card")
def test_a_fake_module_moves_to_another_device_and_its_optimizer_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", MOVED], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "{'cuda:0'} True", done.stderr
