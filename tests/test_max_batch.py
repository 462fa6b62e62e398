"""The largest batch under a budget, and the frontier: the search against every peak that grows, and both commands on a real target."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import Builder
from shown_plans import document_of, graph_plan

from dyngran.compiler.cli import main
from dyngran.compiler.commands.max_batch import PRECISION, _planned
from dyngran.compiler.offline.largest_batch import FIRST_BATCHES, MAX_BATCH, BatchSearch
from dyngran.compiler.plans.planfile import PlanDocument, load_plan
from dyngran.passes.errors import BudgetTooSmall, PlanFileError
from dyngran.passes.problem import Kind, Side

NUM_LINEAR, NUM_STEPPED = 8, 60  # traces: where peaks are on a line, and where they are anything that grows


def document_with(peak_bytes: int) -> PlanDocument:
    """A step whose peak without a plan and least peak are both ``peak_bytes``: one value of that size."""
    build = Builder()
    given = build.given(peak_bytes, Kind.INPUT)
    build.outputs.add(build.op([given], 0, cost_us=1.0, kind=Kind.OUTPUT))
    tangent = build.given(0, Kind.TANGENT)
    build.gradients.add(build.op([tangent, given], 0, cost_us=1.0, kind=Kind.GRADIENT, side=Side.BACKWARD))
    return document_of(replace(graph_plan(build.build()), frontier=()))


class Traces:
    """Documents of batches, which notes what was asked for."""

    def __init__(self, peak_bytes: Callable[[int], int]) -> None:
        self.batches: list[int] = []
        self._peak_bytes = peak_bytes

    def __call__(self, batch: int) -> PlanDocument:
        self.batches.append(batch)
        return document_with(self._peak_bytes(batch))


def largest(traces: Traces, budget_bytes: int) -> int:
    return BatchSearch(traces).largest(lambda point: point.least_peak_bytes, budget_bytes)


def largest_by_halving(peak_bytes: Callable[[int], int], budget_bytes: int) -> int:
    good, bad = 0, MAX_BATCH + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if peak_bytes(middle) <= budget_bytes else (good, middle)
    return good


@given(static=st.integers(0, 10**9), each=st.integers(1, 10**7), budget=st.integers(0, 10**13))
def test_peaks_on_a_line_are_found_in_few_traces(static: int, each: int, budget: int) -> None:
    traces = Traces(lambda batch: static + each * batch)
    assert largest(traces, budget) == max(0, min(MAX_BATCH, (budget - static) // each))
    assert len(set(traces.batches)) == len(traces.batches) <= NUM_LINEAR


@given(
    step=st.integers(1, 5000), jump=st.integers(0, 10**6), each=st.integers(0, 100), bend=st.integers(0, 3), budget=st.integers(0, 10**9)
)
def test_stepped_and_curved_peaks_are_found_exactly(step: int, jump: int, each: int, bend: int, budget: int) -> None:
    """``bend`` 0 to 2: as its power; 3: as its root."""

    def peak_bytes(batch: int) -> int:
        curved = 1000 * int(batch**0.5) if bend == 3 else batch**bend
        return 7 + each * batch + jump * (batch // step) + curved

    traces = Traces(peak_bytes)
    assert largest(traces, budget) == largest_by_halving(peak_bytes, budget)
    assert len(set(traces.batches)) == len(traces.batches) <= NUM_STEPPED


def test_two_questions_share_their_traces() -> None:
    traces = Traces(lambda batch: 1000 * batch)
    search = BatchSearch(traces)
    assert search.largest(lambda point: 3 * point.least_peak_bytes, 10**6) == 333
    before = len(traces.batches)
    assert search.largest(lambda point: 3 * point.least_peak_bytes, 10**6) == 333
    assert len(traces.batches) == before
    assert search.largest(lambda point: point.least_peak_bytes, 10**6) == 1000
    assert len(set(traces.batches)) == len(traces.batches)
    assert [point.batch for point in search.points] == sorted(traces.batches)


@pytest.mark.parametrize(("budget", "found"), [(99, 0), (100, 1), (199, 1), (200, 2), (399, 3), (400, 4)])
def test_one_example_is_looked_at_only_where_two_do_not_fit(budget: int, found: int) -> None:
    traces = Traces(lambda batch: 100 * batch)
    assert largest(traces, budget) == found
    assert (1 in traces.batches) == (budget < 100 * FIRST_BATCHES[0])


def refusing(limit: int, room: int, tried: list[int]) -> Callable[[int], PlanDocument]:
    """Plans of batches up to ``limit``; a refusal says a least peak that is ``room`` above what the batch's share would be."""

    def plan(batch: int) -> PlanDocument:
        tried.append(batch)
        if batch > limit:
            raise BudgetTooSmall(budget_bytes=1000 * limit, least_peak_bytes=1000 * batch + room, pinned=())
        return document_with(batch)

    return plan


@given(limit=st.integers(1, 10**5), more=st.integers(0, 10**5), room=st.integers(0, 10**8))
def test_the_batch_that_is_planned_is_nearly_the_largest_that_can_be(limit: int, more: int, room: int) -> None:
    tried: list[int] = []
    outcome = _planned(refusing(limit, room, tried), limit + more)
    assert not isinstance(outcome, BudgetTooSmall)
    document, batch = outcome
    assert document == document_with(batch)
    assert limit - max(1, limit // PRECISION) <= batch <= limit
    assert len(set(tried)) == len(tried)


def test_where_no_batch_can_be_planned_the_refusal_is_given_back() -> None:
    outcome = _planned(refusing(0, 5, []), 1)
    assert isinstance(outcome, BudgetTooSmall)
    assert outcome.least_peak_bytes == 1005


TARGET = """\
import torch
from torch import nn


def make(batch=8):
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU(), nn.BatchNorm1d(64))])
    return {"model": model, "inputs": torch.randn(batch, 64), "loss": lambda output: output.square().mean()}
"""
COMMON = ("target.py:make", "--device", "cpu", "--codegen", "eager")


@pytest.fixture
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target.py").write_text(TARGET)
    return tmp_path


@pytest.mark.usefixtures("_folder")
def test_max_batch_from_one_end_to_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    """The model has batch norm, which refuses a batch of one example."""
    assert main(["max-batch", *COMMON, "--budget", "4MiB", "-o", "plan.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    document = load_plan("plan.json")
    assert found["budget_bytes"] == 4 * 2**20 >= found["peak_bytes"] == document.peak_bytes > 3 * 2**20
    assert found["batch"] == document.settings.batch > found["batch_unplanned"] > 0
    by_batch = {point["batch"]: point for point in found["points"]}
    assert by_batch[found["batch_unplanned"]]["unplanned"]["peak_bytes"] <= found["budget_bytes"]
    assert by_batch[found["batch_unplanned"] + 1]["unplanned"]["peak_bytes"] > found["budget_bytes"]
    assert all(point["least_peak_bytes"] <= point["unplanned"]["peak_bytes"] for point in found["points"])
    assert len(found["points"]) <= 2 * NUM_LINEAR


@pytest.mark.usefixtures("_folder")
def test_frontier_from_one_end_to_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontier", *COMMON, "--batch", "512", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plans = [(plan["peak_bytes"], plan["time_us"]) for plan in found["graphs"][0]["plans"]]
    assert len(plans) > 2
    assert plans == sorted(plans)
    assert [time for _, time in plans] == sorted((time for _, time in plans), reverse=True)


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("words", [["frontier", "--png", "none/x.png"], ["max-batch", "--budget", "4MiB", "--png", "none/x.png"]])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_traced(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dyngran.compiler.offline.build.TraceProcess", _never)
    assert main([words[0], *COMMON, *words[1:]]) == 2
    assert "picture 'none/x.png' cannot be written: there is no folder" in capsys.readouterr().err


def _never(*arguments: object) -> object:
    raise PlanFileError("a process was started")
