"""Graphs to plan on without a card: joint graphs exported as JSON.

A joint graph (``{"graphs": [{"nodes", "outputs", "num_fwd_outputs", "static_inputs"}]}``, gzipped or not) becomes an FX graph with fake
tensors and takes the product's own road from there: common subexpressions out, storages, sides. Its ``us`` prices matmuls, attention and
convolutions; everything else is priced by the roofline of the card that it names.
"""

from __future__ import annotations

import ast
import gzip
import json
import operator
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.inductor_prims  # registers operators that exported graphs name
from torch import fx
from torch._subclasses import FakeTensorMode

from dyngran.compiler import torch_private
from dyngran.compiler.capture import JointGraph, capture
from dyngran.compiler.prepare import prepare
from dyngran.passes.costs import is_matmul, roofline_us
from dyngran.passes.devices import DeviceSpec, match_device
from dyngran.passes.problem import Kind, Problem
from dyngran.passes.profile_cache import Measurement

JsonObject = dict[str, Any]
TIMED = ("convolution", "attention")  # beside matmuls: names whose eager time per op is device time
_ORIGIN = "exported_value"  # what a node's missing keyword arguments made of it: else common subexpressions would merge unequal ones


def load_problems(path: Path, *, fused: bool = True) -> list[Problem]:
    """The planning problems in a file. Raises ValueError with what the file lacks."""
    content = path.read_bytes()
    document = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    graphs = document.get("graphs") if isinstance(document, dict) else None
    if not isinstance(graphs, list):
        raise ValueError("this is no export of joint graphs: there is no list 'graphs'")
    for graph in graphs:
        missing = [key for key in ("nodes", "outputs", "num_fwd_outputs", "static_inputs") if key not in graph]
        if missing:
            raise ValueError(f"this is no export of joint graphs: a graph has no {', '.join(missing)}")
    return [joint_problem(graph, card=str(document.get("gpu", "")), fused=fused) for graph in graphs]


def joint_problem(document: JsonObject, *, card: str, fused: bool) -> Problem:
    """The problem of one exported joint graph; static are its parameters, their two AdamW moments and the inputs."""
    spec = match_device(card)
    if spec is None:
        raise ValueError(f"no device of the table is called {card!r}")
    module, measured_us = _graph_module(document)
    num_outputs = int(document["num_fwd_outputs"])
    prepare(module, num_outputs, channels_last=False)
    for node in module.graph.nodes:
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != _ORIGIN}
    static = frozenset(document["static_inputs"])
    primals = [node for node in module.graph.nodes if node.op == "placeholder" and node.name.startswith("primals")]
    kinds = tuple(Kind.PARAMETER if place in static else Kind.INPUT for place in range(len(primals)))
    sizes: dict[Kind, int] = {}
    for node, kind in zip(primals, kinds, strict=True):
        value = node.meta["val"]
        sizes[kind] = sizes.get(kind, 0) + value.untyped_storage().nbytes()
    sizes[Kind.OPTIMIZER] = 2 * sizes.get(Kind.PARAMETER, 0)  # AdamW's two moments
    captured = capture(
        JointGraph(module=module, num_fwd_outputs=num_outputs, static_input_indices=tuple(sorted(static)), input_kinds=kinds),
        price=lambda nodes, device: _price(nodes, measured_us, spec),
        fused=fused,
        static_bytes=sizes,
        bytes_per_us=spec.bytes_per_us,
        launch_us=spec.launch_us,
    )
    stock = captured.values_of(torch_private.stock_saved_nodes(module, captured.node_info, 1.0))
    return replace(captured.problem, stock={"min-cut": stock})


def _graph_module(document: JsonObject) -> tuple[fx.GraphModule, dict[str, float]]:
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    measured: dict[str, float] = {}
    with FakeTensorMode():
        for row in document["nodes"]:
            if row["op"] == "output":
                graph.output(tuple(None if name is None else made[name] for name in document["outputs"]))
                continue
            if row["op"] == "placeholder":
                node = graph.placeholder(row["name"])
            else:
                arguments = tuple(_argument(text, made) for text in row["args"])
                node = graph.create_node("call_function", _target(row["target"]), arguments, {_ORIGIN: json.dumps(row["val"])}, row["name"])
            node.meta["val"] = _value(row["val"])
            if row.get("tag"):
                node.meta["partitioner_tag"] = row["tag"]
            made[row["name"]] = node
            if row.get("us") and (is_matmul(node.target) or any(name in row["target"] for name in TIMED)):
                measured[node.name] = float(row["us"])
    return fx.GraphModule(torch.nn.Module(), graph), measured


def _target(text: str) -> Any:
    if text == "<built-in function getitem>":
        return operator.getitem
    found: Any = torch.ops
    for part in text.split("."):
        found = getattr(found, part)
    return found


def _argument(text: str, made: dict[str, fx.Node]) -> Any:
    return _parsed(ast.parse(text.replace("%", ""), mode="eval").body, made)


def _parsed(tree: ast.expr, made: dict[str, fx.Node]) -> Any:
    if isinstance(tree, ast.Name):
        return made[tree.id]
    if isinstance(tree, (ast.List, ast.Tuple)):
        return [_parsed(part, made) for part in tree.elts]
    if isinstance(tree, ast.Attribute) and isinstance(tree.value, ast.Name) and tree.value.id == "torch":
        return getattr(torch, tree.attr)
    return ast.literal_eval(tree)


def _value(described: Any) -> Any:
    if not isinstance(described, (list, dict)):  # a scalar, which has no storage
        return described
    if isinstance(described, list):
        return [_value(part) for part in described]
    shape, stride = described["shape"], described["stride"]
    return torch.empty_strided(shape, stride, dtype=getattr(torch, described["dtype"]), device=described["device"])


def _price(nodes: Sequence[fx.Node], measured_us: dict[str, float], spec: DeviceSpec) -> list[Measurement]:
    found = []
    for node in nodes:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda arg: arg.meta["val"])
        cost_us, source = roofline_us(node.target, args, node.meta["val"], spec, kwargs=kwargs), "roofline"
        if node.name in measured_us:
            cost_us, source = measured_us[node.name], "exported"
        found.append(Measurement(cost_us=cost_us, workspace_bytes=0, source=source))
    return found
