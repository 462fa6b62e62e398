"""dyngran's own store: a second process finds its plan, two budgets keep apart, and nothing on disk can break a compilation."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Mlp
from torch import nn

import dyngran
from dyngran.compiler.options import parse_options
from dyngran.compiler.store import (
    MAX_ENTRIES,
    options_key,
    recall_saved,
    recall_transients,
    remember_saved,
    remember_transient,
    store_key,
)
from dyngran.errors import BudgetTooSmall
from dyngran.passes.problem import Kind, Op, Problem, Side, Value
from dyngran.passes.solvers.portfolio import Planner

KEY = "0" * 40


@pytest.fixture(name="cache", autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DYNGRAN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compiled(budget: int, module: nn.Module | None = None) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return torch.compile(module or Mlp(), backend="dyngran", options={"budget": budget, "codegen": "eager", "keep_below": 0})


def least_and_free() -> tuple[int, int]:
    with pytest.raises(BudgetTooSmall) as refusal:
        compiled(1)(torch.ones(256, 64))
    step = compiled(2**30)
    step(torch.ones(256, 64))
    return refusal.value.least_peak_bytes, dyngran.explain(step).predicted_peak_bytes


def plan_under(budget: int) -> dyngran.Plan:
    step = compiled(budget)
    step(torch.ones(256, 64)).backward()
    plan: dyngran.Plan = dyngran.explain(step).plan
    return plan


SCRIPT = """
    import json, sys, torch, dyngran
    from dyngran.passes.solvers.portfolio import Planner

    budget, codegen = int(sys.argv[1]), sys.argv[2]
    searches = []
    frontier = Planner.frontier
    Planner.frontier = lambda self: (searches.append(1), frontier(self))[1]

    class Mlp(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.Sequential(*(
                torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(3)))
        def forward(self, x):
            return self.blocks(x).square().mean()

    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(256, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(model, backend="dyngran", options={"budget": budget, "codegen": codegen, "keep_below": 0})
    losses = []
    for _ in range(4):
        loss = step(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    report = dyngran.explain(step)
    print(json.dumps({
        "saved": sorted(report.plan.saved), "solver": report.plan.solver, "recomputed": report.plan.num_recomputed,
        "searches": len(searches), "predicted": report.predicted_peak_bytes, "measured": report.measured_peak_bytes,
        "steps": report.measured_step_us, "losses": losses, "text": str(report)}))
"""


def in_a_process(budget: int, codegen: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(budget), codegen], capture_output=True, text=True, timeout=500, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.xdist_group("mlp"))])
def test_a_second_process_recalls_the_plan_and_still_explains_and_measures(codegen: str) -> None:
    """Inductor's caches are warm then too, and on a hit they would skip the partitioner: the plan must be in force all the same."""
    least, free = least_and_free()
    budget = (least + 2 * free) // 3
    cold, warm = in_a_process(budget, codegen), in_a_process(budget, codegen)
    assert cold["recomputed"] > 0
    assert cold["searches"] > 0
    assert warm["searches"] == 0
    assert warm["solver"] == "stored plan"
    for name in ("saved", "recomputed", "predicted", "losses"):
        assert warm[name] == cold[name], name
    for run in (cold, warm):
        assert run["measured"] is not None
        assert run["measured"] <= budget
        assert run["steps"] is not None
        assert "measured" in run["text"]


def test_two_budgets_do_not_mix() -> None:
    least, free = least_and_free()
    budgets = (least, (least + free) // 2)
    first = [plan_under(budget) for budget in budgets]
    second = [plan_under(budget) for budget in reversed(budgets)][::-1]
    assert [plan.saved for plan in first] == [plan.saved for plan in second]
    assert first[0].saved != first[1].saved
    assert [plan.budget_bytes for plan in second] == list(budgets)


BROKEN = {
    "empty": b"",
    "cut off": b'{"saved": {"1',
    "not text": b"\xff\xfe\x00\x80",
    "another type": b"[1, 2]",
    "nested too deeply": b"[" * 200_000,
    "nested too deeply inside": b'{"saved": {"5": ' + b"[" * 200_000,
    "no entries": b"{}",
    "entries of another type": b'{"saved": [], "transients": {}}',
    "sets of names": b'{"saved": {"5": ["a"]}, "transients": []}',
    "transients without a number": b'{"saved": {}, "transients": [[[1, 2], "many"]]}',
    "transients that are no pairs": b'{"saved": {}, "transients": [[1]]}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_file_that_is_not_a_store_reads_as_empty_and_is_replaced(cache: Path, content: bytes) -> None:
    remember_saved(KEY, 5, frozenset({1, 2}))
    (path,) = (cache / "plans").iterdir()
    path.write_bytes(content)
    assert recall_saved(KEY, 5) is None
    assert recall_transients(KEY) == {}
    remember_saved(KEY, 6, frozenset({3}))
    assert recall_saved(KEY, 6) == {3}


def test_a_model_compiles_the_same_over_broken_store_files(cache: Path) -> None:
    least, free = least_and_free()
    want = plan_under((least + free) // 2)
    for path in (cache / "plans").iterdir():
        path.write_bytes(b'{"saved": {"1')
    assert plan_under((least + free) // 2).saved == want.saved


def test_values_that_the_graph_does_not_have_change_nothing(cache: Path) -> None:
    least, free = least_and_free()
    budget = (least + free) // 2
    want = plan_under(budget)
    for path in (cache / "plans").iterdir():
        content = json.loads(path.read_text())
        content["saved"] = {limit: [*saved, 10**6, -4] for limit, saved in content["saved"].items()}
        path.write_text(json.dumps(content))
    got = plan_under(budget)
    assert got.saved == want.saved
    assert got.peak_bytes <= budget


def test_a_stored_plan_that_no_longer_fits_is_searched_again(cache: Path) -> None:
    least, free = least_and_free()
    budget = (least + free) // 2
    want = plan_under(budget)
    for path in (cache / "plans").iterdir():
        content = json.loads(path.read_text())
        content["saved"] = {limit: list(range(10**3)) for limit in content["saved"]}  # everything: peaks above the budget
        path.write_text(json.dumps(content))
    assert plan_under(budget).saved == want.saved


def test_a_directory_that_cannot_be_written_costs_a_search_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least, free = least_and_free()
    budget = (least + free) // 2
    want = plan_under(budget)
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("DYNGRAN_CACHE_DIR", str(tmp_path / "file" / "below"))
    searches: list[Planner] = []
    frontier = Planner.frontier

    def spy(self: Planner) -> Any:
        searches.append(self)
        return frontier(self)

    monkeypatch.setattr(Planner, "frontier", spy)
    for _ in range(2):
        assert plan_under(budget).peak_bytes <= max(budget, want.peak_bytes)
    assert len(searches) >= 2
    remember_transient(KEY, frozenset({1}), 5)
    assert recall_transients(KEY) == {}


def test_entries_are_found_again_and_the_oldest_go_first() -> None:
    for limit in range(MAX_ENTRIES + 3):
        remember_saved(KEY, limit, frozenset({limit}))
        remember_transient(KEY, frozenset({limit, limit + 1}), 10 * limit)
    assert [recall_saved(KEY, limit) for limit in (0, 1, 2, 3)] == [None, None, None, {3}]
    transients = recall_transients(KEY)
    assert len(transients) == MAX_ENTRIES
    assert transients[frozenset({MAX_ENTRIES, MAX_ENTRIES + 1})] == 10 * MAX_ENTRIES
    remember_transient(KEY, frozenset({10, 11}), 7)
    assert recall_transients(KEY)[frozenset({10, 11})] == 7
    assert recall_saved("1" * 40, 3) is None


def problem(size_bytes: int = 8, target: str = "aten.sin.default", keep_below_bytes: int = 0, rerun_bytes: int = 0) -> Problem:
    value = Value(index=0, name="sin", size_bytes=size_bytes, kind=Kind.ACTIVATION, producer=0)
    op = Op(index=0, name="sin", target=target, side=Side.FORWARD, reads=(), writes=(0,), cost_us=1.0, rerun_bytes=rerun_bytes)
    return Problem(values=(value,), ops=(op,), forward_outputs=frozenset(), gradients=frozenset(), keep_below_bytes=keep_below_bytes)


def test_whatever_changes_a_plan_changes_its_key_and_nothing_else_does() -> None:
    plain = parse_options({"budget": 10, "codegen": "eager"}, environ={})
    base = store_key("mark", problem(), plain)
    assert (
        store_key("mark", problem(), parse_options({"budget": 20, "codegen": "eager"}, environ={})) == base
    )  # the limit is looked up inside
    others = [
        store_key("other", problem(), plain),
        store_key("mark", problem(size_bytes=16), plain),
        store_key("mark", problem(target="aten.cos.default"), plain),
        store_key("mark", problem(keep_below_bytes=1), plain),
        store_key("mark", problem(rerun_bytes=1), plain),
        store_key("mark", problem(), parse_options({"budget": 10}, environ={})),
        store_key("mark", problem(), parse_options({"budget": 10, "fallback_random": True}, environ={})),
    ]
    assert len({base, *others}) == len(others) + 1


def test_the_uuid_in_inductors_cache_key_tells_every_option_apart() -> None:
    given: list[dict[str, object]] = [
        {"budget": 10},
        {"budget": 20},
        {"budget": 10, "codegen": "eager"},
        {"budget": 10, "solver": "ilp"},
        {"budget": 10, "keep_below": 0},
        {"budget": 10, "fallback_random": True},
        {"budget": 10, "mode": "reduce-overhead"},
    ]
    keys = [options_key(parse_options(options, environ={})) for options in given]
    assert len(set(keys)) == len(keys)
    assert keys == [options_key(parse_options(options, environ={})) for options in given]
