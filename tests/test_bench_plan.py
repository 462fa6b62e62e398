"""Exported joint graphs: the problem read back is the one that was captured, and the script plans it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from joint import cut, save_all
from torch import Tensor, fx, nn

from dyngran.compiler import torch_private
from dyngran.passes.problem import Problem

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

from graphs import load_problems  # noqa: E402 - bench is a folder of scripts


class Net(nn.Module):
    """Casts, a constant, a list among the arguments, a result with two members: what an export writes in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        both = torch.cat([x, x.to(torch.float64).to(torch.float32)], 1)
        variance, mean = torch.var_mean(both, dim=1)
        return (variance + mean + torch.full((8,), 2.0)).sum()


def exported(module: nn.Module, x: Tensor) -> dict[str, Any]:
    documents: list[dict[str, Any]] = []

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        num_outputs = kwargs["num_fwd_outputs"]
        documents.append({"nodes": [row(node) for node in joint.graph.nodes], "num_fwd_outputs": num_outputs})
        documents[-1]["outputs"] = [None if out is None else out.name for out in joint.graph.find_nodes(op="output")[0].args[0]]
        documents[-1]["static_inputs"] = list(kwargs.get("static_lifetime_input_indices") or ())
        return torch_private.stock_partition(
            joint,
            inputs,
            num_fwd_outputs=num_outputs,
            static_lifetime_input_indices=kwargs.get("static_lifetime_input_indices"),
            fused=False,
        )

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return torch_private.compile_eager(graph, inputs, partition=partition, around=lambda run, _is_backward: run)

    torch._dynamo.reset()
    torch.compile(module, backend=backend)(x)
    return {"model": "net", "gpu": "NVIDIA H200", "torch": torch.__version__, "graphs": documents}


def row(node: fx.Node) -> dict[str, Any]:
    args = [] if node.op == "output" else [f"%{arg.name}" if isinstance(arg, fx.Node) else str(arg) for arg in node.args]
    return {
        "name": node.name,
        "op": node.op,
        "target": str(node.target),
        "args": args,
        "val": described(node.meta.get("val")),
        "tag": node.meta.get("partitioner_tag"),
        "us": 1.0 if "mm" in str(node.target) else None,
    }


def described(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [described(part) for part in value]
    if not isinstance(value, Tensor):
        return None
    dtype = str(value.dtype).removeprefix("torch.")
    return {"shape": list(value.shape), "stride": list(value.stride()), "dtype": dtype, "device": value.device.type}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Problem]:
    """A file and the problem that the product captures from the same model."""
    torch.manual_seed(0)
    module, x = Net(), torch.randn(8, 16)
    path = tmp_path_factory.mktemp("graphs") / "net.json"
    path.write_text(json.dumps(exported(module, x)))
    torch._dynamo.reset()
    compiled = cut(module, save_all)
    compiled.step(x)
    return path, compiled.captured.problem


def test_the_problem_read_is_the_problem_captured(made: tuple[Path, Problem]) -> None:
    path, captured = made
    (read,) = load_problems(path, fused=False)
    for kind in ("target", "side", "reads", "writes", "fusible"):
        assert [getattr(op, kind) for op in read.ops] == [getattr(op, kind) for op in captured.ops], kind
    for kind in ("size_bytes", "producer"):
        assert [getattr(value, kind) for value in read.values] == [getattr(value, kind) for value in captured.values], kind
    assert {op.cost_source for op in read.ops if ".mm" in op.target or "addmm" in op.target} == {"exported"}
    assert all(op.cost_us > 0 for op in read.ops if op.cost_source == "exported")
    assert read.stock["min-cut"]


def test_the_script_writes_a_row_for_every_solver_and_budget(made: tuple[Path, Problem], tmp_path: Path) -> None:
    path, captured = made
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(BENCH / "plan.py"), str(path), "--solver", "auto", "--solver", "region", "--fractions", "0.9", "0.01"]
    done = subprocess.run([*command, "--eager", "--json", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["graph"], row["solver"], row["fraction"]) for row in rows] == [
        ("net", solver, fraction) for solver in ("auto", "region") for fraction in (0.9, 0.01)
    ]
    assert all(row["nodes"] == len(captured.ops) for row in rows)
    assert rows[0]["peak_bytes"] <= rows[0]["budget_bytes"] < rows[0]["free_peak_bytes"]
    assert rows[0]["cost_us"] >= rows[0]["free_cost_us"]
    assert rows[1]["peak_bytes"] is None and rows[1]["least_peak_bytes"] > rows[1]["budget_bytes"]
    assert done.stdout.count("no plan fits") == 2


@pytest.mark.parametrize(
    ("content", "missing"),
    [
        ('{"nodes": []}', "no list 'graphs'"),
        ('{"gpu": "NVIDIA H200", "graphs": [{}]}', "a graph has no nodes, outputs"),
        ("[]", "no list 'graphs'"),
    ],
)
def test_a_file_of_something_else_is_refused_by_name(content: str, missing: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    done = subprocess.run([sys.executable, str(BENCH / "plan.py"), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "other.json: this is no export of joint graphs" in done.stderr and missing in done.stderr
    assert "Traceback" not in done.stderr
