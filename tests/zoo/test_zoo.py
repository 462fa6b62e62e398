"""A part of the zoo in CI, and what a row that breaks a promise looks like."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import OUT_OF_TIME, run_jobs
from torch import Tensor

from dyngran.compiler.planned_graph import PlannedGraph
from dyngran.compiler.torch_private import Boxed
from zoo.entries import FAST, make_of
from zoo.hub_details import FIELDS, INPUTS, merged
from zoo.rows import encode, read_rows, write_rows
from zoo.table import section
from zoo.trial import Row, Trial, Way, said_not_planned
from zoo.verdict import BUDGETS, cut_share, faults, is_irreducible, is_whole

FOLDER = Path(__file__).resolve().parent
VISION = FOLDER.parents[1] / ".venv" / "vision"  # timm and torchvision, by `make vision`: beside a CPU build transformers must not see them


def good() -> Row:
    row = Row("timm/one", "cpu", "eager", {"torch": "2.13"}, num_parameters=10, static_bytes=100, eager=Way("equal"), stock=Way("equal"))
    row.ways["free"] = Way("equal", peak_bytes=500, num_recomputed=0)
    row.ways["middle"] = Way("equal", budget_bytes=400, peak_bytes=390, num_recomputed=2)
    row.ways["floor"] = Way("equal", budget_bytes=300, peak_bytes=300, num_recomputed=5)
    return row


def test_a_good_row_breaks_no_promise_and_survives_its_file(tmp_path: Path) -> None:
    row = good()
    assert faults(row) == []
    assert cut_share(row) == 0.5 and not is_irreducible(row)
    path = tmp_path / "rows.jsonl"
    write_rows(path, [row])
    with path.open("a") as file:
        file.write(encode(replace(row, name="timm/two"))[:-20])  # a run that was cut off
    assert read_rows(path) == [row]
    assert "| timm/one | 10 | equal | equal | equal | equal | equal | 5 | 50% | 97.50%, 100.00% |" in section(read_rows(path))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("status", ["differs", "refused", "fails"])
def test_a_model_that_stock_trains_must_train(budget: str, status: str) -> None:
    row = good()
    row.ways[budget].status = status
    assert len(faults(row)) == 1 and budget in faults(row)[0]
    row.stock = Way("fails")
    assert faults(row) == []


def test_what_is_said_of_a_single_model_type_is_of_one_that_there_is() -> None:
    pytest.importorskip("transformers")
    from zoo.hub_models import model_types

    assert {*FIELDS, *INPUTS} <= set(model_types())


def test_more_fields_win_inside_of_nested_configurations_and_leave_the_others() -> None:
    fields = {"layers": 2, "vision": {"size": 64, "depth": 2}}
    assert merged(fields, {"vision": {"size": 128}, "heads": 4}) == {"layers": 2, "heads": 4, "vision": {"size": 128, "depth": 2}}
    assert fields["vision"] == {"size": 64, "depth": 2}


def test_a_peak_above_its_budget_and_a_budget_that_was_not_tried_are_faults() -> None:
    row = good()
    row.ways["floor"].peak_bytes = 301
    assert faults(row) == ["floor: measured 301 of 300 bytes"]
    row = good()
    del row.ways["middle"]
    assert faults(row) == ["no budget was tried"]


def test_a_peak_above_its_budget_that_was_foretold_is_a_fault_with_its_reason() -> None:
    row = good()
    row.ways["floor"].peak_bytes = 301
    row.ways["floor"].not_planned = ["forward (model.py:3)"]
    assert faults(row) == ["floor: measured 301 of 300 bytes (said not to be planned: forward (model.py:3))"]
    assert "- **timm/one**: floor: measured 301" in section([row])


def test_what_is_said_not_to_be_planned_is_heard() -> None:
    def step(x: Tensor) -> Tensor:
        for _ in range(2):
            x = x.sin()
            torch._dynamo.graph_break()
        return x.sum()

    torch._dynamo.reset()
    for function in (torch.sin, step):  # the first makes dyngran listen
        torch.compile(function, backend="dyngran", options={"budget": "1GiB"})(torch.ones(2, requires_grad=True)).sum().backward()
    assert any(one.startswith("step (test_zoo.py:") for one in said_not_planned())


def test_a_model_of_which_nothing_is_recomputed_at_the_floor_is_named() -> None:
    row = good()
    row.ways["floor"].num_recomputed = 0
    assert is_irreducible(row)
    assert "irreducible" in section([row])


def test_a_job_that_dies_hangs_or_answers_is_told_apart() -> None:
    jobs = [("dies", lambda: os.kill(os.getpid(), 9)), ("hangs", lambda: str(signal.pause())), ("answers", lambda: "x" * 100_000)]
    found = {name: (answer, why) for name, answer, why in run_jobs(jobs, num_processes=3, timeout_s=5)}
    assert found == {"dies": (None, "killed by SIGKILL"), "hangs": (None, "not done after 5 s"), "answers": ("x" * 100_000, "")}


STOPPED = """
import os, signal, sys

sys.path.insert(0, os.getcwd())
from forks import end_on_sigterm, run_jobs

fork = os.fork

def fork_and_be_stopped() -> int:
    process = fork()
    if process:
        print(process, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
    return process

def job() -> str:
    if sys.argv[1] == "running":
        print(os.getpid(), flush=True)
    signal.pause()
    return ""

if sys.argv[1] == "forking":
    os.fork = fork_and_be_stopped
end_on_sigterm()
list(run_jobs([("sleeps", job)], num_processes=1, timeout_s=600))
"""


@pytest.mark.parametrize("when", ["forking", "running"])
def test_a_run_that_is_stopped_leaves_no_process(when: str) -> None:
    run = subprocess.Popen([sys.executable, "-c", STOPPED, when], stdout=subprocess.PIPE, text=True, cwd=FOLDER.parent)
    assert run.stdout is not None
    job = int(run.stdout.readline())
    if when == "running":
        run.terminate()
    assert run.wait(timeout=60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(job, 0)


@pytest.mark.parametrize(
    ("arguments", "told"), [(["--shard", "5/4"], "2/4 is the second of four"), (["--only", "transformers/brt"], "bert")]
)
def test_a_part_of_the_zoo_that_does_not_exist_is_refused(arguments: list[str], told: str) -> None:
    done = subprocess.run([sys.executable, str(FOLDER / "run.py"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert told in done.stderr


def test_what_was_stopped_for_its_time_is_trained_again() -> None:
    row = good()
    assert is_whole(row)
    row.eager = Way("fails", f"{OUT_OF_TIME} 5 s")
    assert not is_whole(row)


def test_a_wrong_gradient_is_seen_by_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zoo can fail: a backward that scales gradients, planted where dyngran's graphs are run."""
    around = PlannedGraph._around

    def planted(self: PlannedGraph, run: Boxed, is_backward: bool) -> Boxed:
        def scaled(args: list[Any]) -> Any:
            return [out * 1.5 if isinstance(out, Tensor) and out.ndim == 2 else out for out in run(args)]

        return around(self, scaled if is_backward else run, is_backward)

    monkeypatch.setattr(PlannedGraph, "_around", planted)
    row = Trial(make_of("transformers/llama"), "cpu", "eager", Row("transformers/llama", "cpu", "eager", {})).run()
    assert row.stock is not None and row.stock.status == "equal"
    assert [row.ways[budget].status for budget in ("free", "floor")] == ["differs", "differs"]
    assert sum("differs" in fault for fault in faults(row)) == 2


@pytest.mark.parametrize("shard", ["1/2", "2/2"])
def test_the_fast_part_of_the_zoo_keeps_every_promise(shard: str, tmp_path: Path) -> None:
    assert VISION.exists() or "CI" not in os.environ, "make vision installs timm and torchvision for this test"
    path = tmp_path / "rows.jsonl"
    command = [sys.executable, str(FOLDER / "run.py"), "--fast", "--shard", shard, "-j", "1", "--rows", str(path)]
    paths = [str(VISION), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    rows = read_rows(path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(rows) >= sum(VISION.exists() or name.startswith("transformers/") for name in FAST) // 2
    for row in rows:
        assert row.eager is not None and row.eager.trains, row.name
        assert row.stock is not None and row.stock.trains, row.name
        assert set(row.ways) == set(BUDGETS) and not faults(row), row.name
    assert sum(not is_irreducible(row) for row in rows) > len(rows) // 2
