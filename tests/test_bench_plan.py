"""Exported joint graphs: the problem read back is the one that was captured, and the script plans it and every other graph."""

from __future__ import annotations

import gzip
import json
import re
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
from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.portfolio import SOLVERS

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import plan  # noqa: E402 - bench is a folder of scripts
from graphs import load_problems  # noqa: E402
from layered import layered_problem, layers_for  # noqa: E402
from plan_table import StageClock  # noqa: E402
from rows import BestKnown, Notes  # noqa: E402


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


def planned(*arguments: object) -> int:
    """The script in this process."""
    return plan.main([str(argument) for argument in arguments])


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_script_writes_a_row_for_every_solver_and_budget(made: tuple[Path, Problem], tmp_path: Path) -> None:
    path, captured = made
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(BENCH / "plan.py"), str(path), "--solver", "auto", "--solver", "region", "--fractions", "0.9", "0.01"]
    command += ["--best", str(tmp_path / "best.json")]
    done = subprocess.run([*command, "--eager", "--json", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = written(out)
    assert [(row["graph"], row["solver"], row["fraction"]) for row in rows] == [
        ("net", solver, fraction) for solver in ("auto", "region") for fraction in (0.9, 0.01)
    ]
    assert all(row["nodes"] == len(captured.ops) and not row["fused"] and not row["truncated"] for row in rows)
    assert rows[0]["peak_bytes"] <= rows[0]["budget_bytes"] < rows[0]["free_peak_bytes"]
    assert rows[0]["bound_us"] <= rows[0]["cost_us"] and rows[0]["bound"] and rows[0]["gap"] >= 0
    assert rows[0]["cost_us"] >= rows[0]["free_cost_us"] == rows[0]["cost_without_budget_us"]
    assert rows[1]["peak_bytes"] is None and rows[1]["least_peak_bytes"] > rows[1]["budget_bytes"]
    assert [row["first_budget"] for row in rows] == [True, False, True, False]
    assert all(row["over_best"] is None for row in rows) and not (tmp_path / "best.json").exists()
    assert done.stdout.count("no plan fits") == 3  # two rows and the legend of the table


def test_the_best_known_is_lowered_and_never_raised(made: tuple[Path, Problem], tmp_path: Path) -> None:
    path, _ = made
    best, out = tmp_path / "best.json", tmp_path / "rows.jsonl"
    command = [path, "--eager", "--fractions", 0.8, "--best", best, "--json", out, "--solver"]
    for solver in ("region", "auto", "region"):
        assert planned(*command, solver, "--update-best") == 0
    first, second, third = written(out)
    (entry,) = json.loads(best.read_text()).values()
    assert entry["cost_us"] == min(first["cost_us"], second["cost_us"])
    assert first["over_best"] is None and second["over_best"] == second["cost_us"] / first["cost_us"] - 1
    assert third["over_best"] == first["cost_us"] / entry["cost_us"] - 1


ROW = {
    "graph": "g",
    "fused": True,
    "fraction": 0.5,
    "budget_bytes": 50,
    "peak_bytes": 40,
    "cost_us": 9.0,
    "free_cost_us": 8.0,
    "found_by": "x",
}


@pytest.mark.parametrize("other", [{"free_cost_us": 7.0}, {"budget_bytes": 39}])
def test_a_best_of_other_prices_or_of_a_larger_peak_says_nothing_and_stays(other: dict[str, Any], tmp_path: Path) -> None:
    best = BestKnown(tmp_path / "best.json")
    assert best.lower(ROW) and not best.lower(ROW)
    cheaper = {**ROW, "cost_us": 1.0, **other}
    assert best.over(cheaper) is None and not best.lower(cheaper)
    best.write()
    assert BestKnown(best.path).over(ROW) == 0.0


def test_a_frontier_is_one_row_whose_costs_fall_with_the_budget(made: tuple[Path, Problem], tmp_path: Path) -> None:
    path, _ = made
    out = tmp_path / "rows.jsonl"
    assert planned(path, "--eager", "--solver", "region", "--frontier", 5, "--json", out) == 0
    (row,) = written(out)
    budgets, peaks, costs = zip(*row["points"], strict=True)
    assert len(budgets) == 5 and budgets[-1] == row["free_peak_bytes"]
    assert all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True))
    assert list(costs) == sorted(costs, reverse=True)


NODE_LINK = {  # a chain of three whose first result the last op reads again: running "a" twice frees it meanwhile
    "graph": {},
    "nodes": [
        {"id": name, "cost_cpu": cost, "cost_ram": size}
        for name, cost, size in (("a", 1, 4), ("b", 10, 1), ("c", 10, 6), ("d", 10, 1), ("e", 10, 1))
    ],
    "links": [{"source": source, "target": target} for source, target in ("ab", "bc", "cd", "de", "ae")],
}


@pytest.mark.parametrize("packed", [False, True])
def test_a_node_link_graph_is_told_apart_and_compared_with_its_own_order(
    packed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("small.v1.json.gz" if packed else "small.v1.json")
    content = json.dumps(NODE_LINK).encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    out = tmp_path / "rows.jsonl"
    assert planned(path, "--solver", "auto", "--fractions", 0.9, 0.5, "--json", out) == 0
    fits, refused = written(out)
    assert (fits["graph"], fits["free_peak_bytes"], fits["budget_bytes"], refused["budget_bytes"]) == ("small.v1", 11, 10, 6)
    assert (fits["peak_bytes"], fits["cost_us"], fits["increase_percent"]) == (7, 42.0, round(100 / 41, 3))
    assert refused["cost_us"] is None and refused["floor_bytes"] == 7
    assert "no order can: one op needs" in capsys.readouterr().out


def test_published_figures_stand_beside_the_graphs_they_are_of() -> None:
    notes = Notes(BestKnown(Path("none.json")))
    assert notes.published("fcn_8_vgg_32_-416-608-3_train_nx", 0.9)["moccasin"] == [0.0, 88.4, 3.1]
    assert notes.published("random_layered_n500_w0.36_nlv0.75_ed0.2_scd0.14", 0.7) == {}  # the only result missed the budget
    assert notes.published("llama", 0.9) == {}


def test_a_synthetic_model_has_a_gradient_for_every_parameter_and_grows_by_layers() -> None:
    one, two, three = (layered_problem(depth) for depth in (1, 2, 3))
    assert len(three.ops) - len(two.ops) == len(two.ops) - len(one.ops) > 100
    for problem in (one, three):
        parameters = [value.size_bytes for value in problem.values if value.kind is Kind.PARAMETER]
        assert sorted(problem.values[value].size_bytes for value in problem.gradients) == sorted(parameters)
        assert {op.side for op in problem.ops} == set(Side)
        read = {value for op in problem.ops for value in op.reads} | problem.gradients | problem.forward_outputs
        assert read.issuperset(
            value.index for value in problem.values if value.producer is not None and not value.name.startswith("attention")
        )
    assert abs(len(layered_problem(layers_for(2000)).ops) - 2000) <= 75


def test_a_synthetic_model_costs_what_the_exported_one_costs() -> None:
    """24 layers: llama350m as exported has 3574 ops, and its free plan takes 13.2 GiB and 51.5 ms in the same simulator."""
    problem = layered_problem(24)
    free = Simulator(problem).evaluate(problem.stock["min-cut"])
    assert abs(len(problem.ops) - 3574) < 40 and abs(free.time_us / 51_500 - 1) < 0.05 and abs(free.peak_bytes / 13.2 / 2**30 - 1) < 0.25


def test_deeper_models_are_compared_with_the_first_and_stages_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned("--layers", 1, 2, "--solver", "region", "--fractions", 0.5, "--profile", "--best", tmp_path / "b.json") == 0
    out = capsys.readouterr().out
    assert "region: layered-2 takes" in out and "x the seconds of layered-1" in out
    assert re.search(r"layered-2: the next plan is simulated in 0\.\d+ ms if one value differs, in \d+\.\d+ ms if half of them do", out)
    assert "layered-2, region: seconds per stage" in out and "Threads are not profiled" in out and "portfolio.py" in out


def test_the_clock_gives_each_stage_the_time_until_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    monkeypatch.setattr("plan_table.time.perf_counter", lambda: next(ticks))
    clock = StageClock()
    clock.start("first plans")
    for line in (
        "planning: mincut for 7 bytes",
        "planning: mincut for 7 bytes (3 plans simulated)",
        "planning: mincut for 9 bytes",
        "planning: x",
    ):
        clock(line)
    clock.start("")
    assert clock.seconds == {"first plans": 1.0, "mincut for each budget": 5.0, "x": 4.0}


def test_annealing_on_is_never_worse_than_auto(made: tuple[Path, Problem], tmp_path: Path) -> None:
    path, _ = made
    out = tmp_path / "rows.jsonl"
    assert planned(path, "--eager", "--solver", "auto", "--fractions", 0.8, "--anneal", 500, "--json", out) == 0
    auto, longer = written(out)
    assert longer["solver"] == "long-anneal" and longer["cost_us"] <= auto["cost_us"] and longer["peak_bytes"] <= longer["budget_bytes"]


def test_a_saved_set_from_elsewhere_stands_beside_what_auto_has_at_its_peak(
    made: tuple[Path, Problem], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = made
    (problem,) = load_problems(path, fused=False)
    simulator = Simulator(problem)
    by_hand = sorted(simulator.default_saved)[::2]
    hand, out = tmp_path / "net-by-hand.json", tmp_path / "rows.jsonl"
    hand.write_text(json.dumps({"saved": [problem.values[value].name for value in by_hand]}))
    assert planned(path, "--eager", "--solver", "default", "--fractions", 1.0, "--saved", hand, "--json", out) == 0
    row = written(out)[-1]
    assert row["solver"] == "net-by-hand" and row["peak_bytes"] == simulator.evaluate(by_hand).peak_bytes
    assert row["auto_peak_bytes"] <= row["peak_bytes"] and row["auto_cost_us"] <= row["cost_us"]
    assert "net-by-hand" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("net-x.json", '{"saved": ["no_such_value"]}', "1 of 1 names are no values of net, the first is 'no_such_value'"),
        ("net-x.json", '{"kept": []}', "no list 'saved' of names"),
        ("net-x.json", "no JSON", "Expecting value"),
        ("other.json", '{"saved": ["x"]}', "its name begins with that of no graph of this run"),
    ],
)
def test_a_saved_set_that_is_none_is_refused_by_name(
    name: str, content: str, wrong: str, made: tuple[Path, Problem], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert planned(made[0], "--eager", "--saved", path) == 2
    seen = capsys.readouterr()
    assert f"{name}: " in seen.err and wrong in seen.err and not seen.out


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ('{"nodes": []}', "this is neither an export of joint graphs (no list 'graphs') nor a node-link graph"),
        ('{"gpu": "NVIDIA H200", "graphs": [{}]}', "a graph has no nodes, outputs"),
        ('{"graphs": []}', "is empty"),
        ("[]", "no list 'graphs'"),
        ("no JSON", "Expecting value"),
        ('{"nodes": [{"id": 0, "cost_cpu": 1, "cost_ram": 1}], "links": [{"source": 0, "target": 5}]}', "node 5, which does not exist"),
    ],
)
def test_a_file_of_something_else_is_refused_by_name(content: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    assert planned(path) == 2
    error = capsys.readouterr().err
    assert "other.json: " in error and wrong in error


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ([], "nothing to plan"),
        (["absent.json"], "absent.json"),
        (["--layers", "1", "--fractions", "50"], "50 is no share above 0 and up to 1"),
        (["--layers", "1", "--fractions", "0"], "0 is no share above 0 and up to 1"),
        (["--layers", "0"], "0 is below 1"),
        (["--layers", "1", "--limit-s", "0"], "no number of seconds above 0"),
        (["--layers", "1", "--solver", "mutow"], "invalid choice: 'mutow'"),
        (["--layers", "1", "--json", "absent/rows.jsonl"], "absent/rows.jsonl"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_planned(
    arguments: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = planned(*arguments)
    except SystemExit as left:  # argparse's own way out
        status = int(str(left.code))
    seen = capsys.readouterr()
    assert status == 2 and wrong in seen.err and not seen.out


def test_two_graphs_of_one_name_are_refused(made: tuple[Path, Problem], capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(made[0], made[0]) == 2
    assert "a graph called 'net' was there already" in capsys.readouterr().err


def test_the_readme_names_every_solver() -> None:
    (row,) = [line for line in (BENCH.parent / "README.md").read_text().splitlines() if line.startswith("| `solver`")]
    assert set(re.findall(r'"(\w+)"', row)) == set(SOLVERS)
