"""A budget that binds, and other processes: torch's caches of code and graphs, two compilations at once, workers that load data, the end of
the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from midway import Net, middle_budget, plain, rows

TESTS = Path(__file__).parent
TORCH_SAYS = (
    "Memory block of unknown size was allocated before the profiling started",  # see README: one step is measured by its profiler
    "No CUDA runtime is found",  # a build for CUDA on a machine without a card, under Inductor
)

TRAIN = """
    import json, os, sys, torch, dyngran
    from torch._dynamo.utils import counters
    from midway import Net, rows

    torch._inductor.config.fx_graph_cache = True
    torch._functorch.config.enable_autograd_cache = True
    budget, codegen = int(sys.argv[1]), sys.argv[2]
    torch.manual_seed(0)
    model, x = Net(dropout=0.0), rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(model, backend="dyngran", options={"budget": budget, "codegen": codegen, "keep_below": 0})
    losses = []
    for _ in range(3):
        loss = step(x)
        loss.backward()
        losses.append(loss.detach().item())
        optimizer.step()
        optimizer.zero_grad()
    report = dyngran.explain(model)
    print(json.dumps({
        "losses": losses, "weights": [float(p.detach().double().sum()) for p in model.parameters()], "saved": sorted(report.plan.saved),
        "budget": report.plan.budget_bytes, "recomputed": report.plan.num_recomputed, "predicted": report.predicted_peak_bytes,
        "measured": report.measured_peak_bytes, "solver": report.plan.solver, "counters": counters["inductor"],
        "config": [torch._inductor.config.fx_graph_cache, torch._functorch.config.enable_autograd_cache]}))
"""


def environment(tmp_path: Path) -> dict[str, str]:
    """Caches of torch's and of dyngran's in folders of this test's own."""
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "DYNGRAN_CACHE_DIR": str(tmp_path / "dyngran")}
    return {**os.environ, **folders, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}


def start(script: str, environ: Mapping[str, str], *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(environ))


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the process printed last; it must end well and write nothing to stderr."""
    out, err = process.communicate(timeout=500)
    assert (process.returncode, noise(err)) == (0, [])
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def noise(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if not any(said in line for said in TORCH_SAYS)]


@pytest.fixture(scope="module", name="budget_bytes")
def _budget_bytes() -> int:
    """In the middle for eager code generation, and a budget that binds under Inductor as well, which needs a little less."""
    return middle_budget(lambda compile_it: plain(compile_it, Net(dropout=0.0), rows()))


@pytest.mark.xdist_group("stock processes")
def test_a_warm_start_has_the_same_plan_and_the_same_results(budget_bytes: int, tmp_path: Path) -> None:
    """Both of torch's caches are on. The second process takes its code from the first; another budget has its own plan and code."""
    environ = environment(tmp_path)
    budgets = (budget_bytes, budget_bytes, 2 * budget_bytes)
    cold, warm, free = (finish(start(TRAIN, environ, budget, "inductor")) for budget in budgets)
    for run, budget in zip((cold, warm, free), budgets, strict=True):
        assert run["budget"] == budget
        assert run["measured"] <= budget
        assert run["config"] == [True, True], "global configuration was changed"
    for name in ("losses", "weights", "saved", "recomputed", "predicted"):
        assert warm[name] == cold[name], name
    assert cold["counters"]["fxgraph_cache_miss"] > 0
    assert warm["counters"]["fxgraph_cache_hit"] == 2, "forward and backward"
    assert "fxgraph_cache_miss" not in warm["counters"]
    assert free["predicted"] > budget_bytes, "the budget did not bind"
    assert free["saved"] != cold["saved"]
    assert free["counters"]["fxgraph_cache_miss"] > 0


@pytest.mark.xdist_group("stock processes")
def test_two_processes_that_compile_at_once_share_caches(budget_bytes: int, tmp_path: Path) -> None:
    """Empty folders, the same model, one start: neither waits for ever, breaks the other's files or gets another result."""
    environ = environment(tmp_path)
    processes = [start(TRAIN, environ, budget_bytes, "eager") for _ in range(2)]
    first, second = (finish(process) for process in processes)
    assert first["recomputed"] > 0
    assert first["losses"] == second["losses"]
    assert first["weights"] == second["weights"]
    assert max(first["measured"], second["measured"]) <= budget_bytes
    assert list((tmp_path / "dyngran").rglob("*.tmp")) == []


LOADERS = """
    import sys, torch, dyngran
    from torch.utils.data import DataLoader, Dataset
    from midway import Net, rows

    class Rows(Dataset):
        def __len__(self):
            return 512

        def __getitem__(self, index):
            return torch.full((64,), float(index % 7)) / 7

    def main():
        how, budget = sys.argv[1], int(sys.argv[2])
        torch.manual_seed(0)
        model, other = Net(dropout=0.0), Net(dropout=0.0)
        other.load_state_dict(model.state_dict())
        step = torch.compile(model, backend="dyngran", options={"budget": budget, "codegen": "eager", "keep_below": 0})
        for epoch in range(2):  # the second one starts its workers when code has been compiled
            for batch in DataLoader(Rows(), batch_size=128, num_workers=2, multiprocessing_context=how):
                for one, function in ((model, step), (other, other)):
                    one.zero_grad()
                    function(batch).backward()
                assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters()))
        assert dyngran.explain(model).plan.num_recomputed > 0
        print("trained")

    if __name__ == "__main__":
        main()
"""


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers_that_load_data(how: str, budget_bytes: int, tmp_path: Path) -> None:
    script = tmp_path / "loads.py"  # spawned workers import the script again
    script.write_text(textwrap.dedent(LOADERS))
    command = [sys.executable, str(script), how, str(budget_bytes)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(tmp_path), check=False)
    assert (ran.returncode, ran.stdout) == (0, "trained\n"), ran.stderr[-2000:]


ENDS = """
    import sys, torch
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(model, backend="dyngran", options={"codegen": "eager", "budget": "1GiB"})
    for _ in range(3):
        step(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if sys.argv[1] == "exit":
        sys.exit(3)
    if sys.argv[1] == "error":
        raise ValueError("a mistake of the user's")
"""


@pytest.mark.parametrize(
    ("end", "code", "last_lines"), [("normal", 0, []), ("exit", 3, []), ("error", 1, ["ValueError: a mistake of the user's"])]
)
def test_the_interpreter_ends_without_noise(end: str, code: int, last_lines: list[str], tmp_path: Path) -> None:
    """Nothing is written to stderr but the user's own error, of which the traceback is one frame."""
    process = start(ENDS, environment(tmp_path), end)
    _, err = process.communicate(timeout=300)
    assert process.returncode == code
    lines = noise(err)
    assert lines[-1:] == last_lines
    assert sum(line.startswith("  File ") for line in lines) == len(last_lines)
    assert all(line.startswith(("Traceback", "  File", *last_lines)) for line in lines)
