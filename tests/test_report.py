"""The explanation of a plan: golden text, sums that add up, escaped HTML, and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from dyngran.compiler.budget import parse_bytes
from dyngran.compiler.report import Report, StepReport, build_report
from dyngran.compiler.report_rows import merge_alike, peak_rows
from dyngran.compiler.report_sheet import Table
from dyngran.passes.errors import format_bytes_up, format_us
from dyngran.passes.plan import Action, Decision, Plan
from dyngran.passes.problem import Kind, Op, Problem, Side, Value
from dyngran.passes.simulate import Simulator
from dyngran.runtime.observe import Observation

MIB = 2**20


def observed(*, peak_bytes: int = 9 * MIB, drift: tuple[str, ...] = ()) -> Observation:
    return Observation(num_steps=3, peak_bytes=peak_bytes, peak_is_exact=True, static_bytes=4 * MIB, step_us=12_300.0, drift=drift)


def chain() -> Problem:
    """x -> a -> b -> loss, and backward of it; every activation is 1 MiB and every op 10 us."""
    values = (
        Value(index=0, name="x", size_bytes=4 * MIB, kind=Kind.INPUT),
        Value(index=1, name="a", size_bytes=MIB, kind=Kind.ACTIVATION, producer=0, label="layers.0: model.py:7 relu(x)"),
        Value(index=2, name="b", size_bytes=MIB, kind=Kind.ACTIVATION, producer=1, label="layers.1: model.py:7 relu(x)"),
        Value(index=3, name="loss", size_bytes=4, kind=Kind.OUTPUT, producer=2),
        Value(index=4, name="tangent", size_bytes=4, kind=Kind.TANGENT),
        Value(index=5, name="grad_b", size_bytes=MIB, kind=Kind.TEMPORARY, producer=3),
        Value(index=6, name="grad_a", size_bytes=MIB, kind=Kind.GRADIENT, producer=4),
    )
    ops = (
        Op(index=0, name="relu", target="relu", side=Side.FORWARD, reads=(0,), writes=(1,), cost_us=10, region="layers.0"),
        Op(index=1, name="relu_1", target="relu", side=Side.FORWARD, reads=(1,), writes=(2,), cost_us=10, region="layers.1"),
        Op(index=2, name="sum", target="sum", side=Side.FORWARD, reads=(2,), writes=(3,), cost_us=10),
        Op(index=3, name="mul", target="mul", side=Side.BACKWARD, reads=(2, 4), writes=(5,), cost_us=10, workspace_bytes=MIB),
        Op(index=4, name="mul_1", target="mul", side=Side.BACKWARD, reads=(1, 5), writes=(6,), cost_us=10),
    )
    return Problem(values=values, ops=ops, forward_outputs=frozenset({3}), gradients=frozenset({6}), static_bytes={Kind.INPUT: 4 * MIB})


def plan_of(problem: Problem, saved: frozenset[int], budget_bytes: int | None) -> Plan:
    outcome = Simulator(problem).evaluate(saved)
    decisions = tuple(
        Decision(
            value=index,
            name=problem.values[index].name,
            action=Action.KEEP if index in saved else Action.RECOMPUTE,
            reason="dearest to make" if index in saved else "10 us for 1 MiB",
            size_bytes=problem.values[index].size_bytes,
            recompute_us=0 if index in saved else 10,
            label=problem.values[index].label,
        )
        for index in (1, 2)
    )
    return Plan(
        budget_bytes=budget_bytes,
        saved=saved,
        decisions=decisions,
        peak_bytes=outcome.peak_bytes,
        static_bytes=problem.total_static_bytes,
        saved_bytes=outcome.saved_bytes,
        time_us=outcome.time_us,
        overhead_us=outcome.recompute_us,
        recompute_us=outcome.recompute_us,
        num_recomputed=outcome.num_recomputed,
        solver="greedy",
    )


def report_of(observation: Observation | None = None, *, label: str = "", unplanned: tuple[tuple[str, int, str], ...] = ()) -> Report:
    problem = chain()
    if label:
        problem = replace(problem, values=tuple(replace(value, label=label) for value in problem.values))
    plan = plan_of(problem, frozenset({1}), 10 * MIB)
    return build_report(
        problem=problem,
        plan=plan,
        simulator=Simulator(problem),
        observation=observation,
        notes=("An example.",),
        device="cpu",
        torch_version="2.13.0",
        codegen="eager",
        unplanned=unplanned,
    )


GOLDEN = """\
dyngran: 1 graph on cpu, codegen eager, torch 2.13.0
Budget 10 MiB: the predicted peak is 8 MiB, 2 MiB to spare.
Plan by greedy: 1 op runs again in backward, 10 us; 10 us slower than torch's own partition.

Predicted beside measured
                                                    predicted  measured, 3 steps
  peak of the step                                      8 MiB              9 MiB
  held over the whole step                              4 MiB              4 MiB
  transient at the peak                                 4 MiB              5 MiB
  time of a step (predicted: forward and backward)      60 us            12.3 ms

Regions
  region    actions      saved  recomputed  time, op by op
  layers.0  keep 1       1 MiB         0 B            0 us
  layers.1  recompute 1    0 B       1 MiB           10 us

Largest values that backward needs
  value  action     bytes  time, op by op  reason           source
  a      keep       1 MiB            0 us  dearest to make  layers.0: model.py:7 relu(x)
  b      recompute  1 MiB           10 us  10 us for 1 MiB  layers.1: model.py:7 relu(x)

At the predicted peak, while mul runs in backward
  kind        bytes
  input       4 MiB
  tangent       4 B
  activation  2 MiB
  output        4 B
  temporary   1 MiB
  workspace   1 MiB
  together    8 MiB

Largest values live at the predicted peak
  value    kind        bytes  source
  a        activation  1 MiB  layers.0: model.py:7 relu(x)
  b        activation  1 MiB  layers.1: model.py:7 relu(x)
  grad_b   temporary   1 MiB
  loss     output        4 B
  tangent  tangent       4 B

- 2 MiB at the peak is not planned by dyngran: an eager loss on [batch, vocabulary] logits; compute the loss inside the model
- An example."""


def test_text_is_golden() -> None:
    report = report_of(
        observed(), unplanned=(("an eager loss on [batch, vocabulary] logits", 2 * MIB, "compute the loss inside the model"),)
    )
    assert str(report) == GOLDEN


def test_before_the_first_step_nothing_is_claimed_as_measured() -> None:
    report = report_of()
    assert report.measured_peak_bytes is None
    assert report.measured_step_us is None
    assert "No step has been measured yet." in str(report)


def test_what_is_live_at_the_peak_adds_up_to_the_predicted_peak() -> None:
    report = report_of()
    assert sum(size for _, size in report.at_peak.by_kind) == report.predicted_peak_bytes


def test_bytes_that_a_plan_holds_beyond_its_problem_are_named() -> None:
    problem = chain()
    plan = plan_of(problem, frozenset({1}), None)
    more = replace(plan, static_bytes=plan.static_bytes + 3, peak_bytes=plan.peak_bytes + 10)
    rows = dict(peak_rows(problem, more, Simulator(problem).timeline(more.saved), num_rows=3).by_kind)
    assert rows["held outside of this graph"] == 3
    assert rows["correction from generated code or measurement"] == 7
    assert sum(rows.values()) == more.peak_bytes


def test_regions_account_for_every_decision() -> None:
    report = report_of()
    assert sum(count for row in report.regions for _, count in row.actions) == len(report.plan.decisions)
    assert sum(row.saved_bytes + row.recomputed_bytes for row in report.regions) == 2 * MIB
    assert [row.name for row in report.regions] == ["layers.0", "layers.1"]


def test_alike_regions_merge_and_keep_their_sums() -> None:
    row = report_of().regions[0]
    rows = tuple(replace(row, name=f"layers.{number}", recompute_us=float(number)) for number in range(4))
    (merged,) = merge_alike(rows)
    assert merged.name == "layers.0 … layers.3 (4 alike)"
    assert merged.saved_bytes == sum(each.saved_bytes for each in rows)
    assert merged.recompute_us == 6
    assert merge_alike((row, replace(row, name="layers.1", saved_bytes=5))) == (row, replace(row, name="layers.1", saved_bytes=5))


def test_an_overrun_is_said() -> None:
    text = str(report_of(observed(peak_bytes=11 * MIB)))
    assert "The measured peak is above the budget by 1 MiB." in text


def test_drift_is_said() -> None:
    assert "- the optimizer took 3 MiB more" in str(report_of(observed(drift=("the optimizer took 3 MiB more",))))


def test_html_is_escaped_and_self_contained() -> None:
    html = report_of(label="<script>alert('1')</script> a & b")._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "a &amp; b" in html
    assert "http" not in html


def test_rich_takes_brackets_literally() -> None:
    console = Console(file=StringIO(), width=250, color_system=None)
    report = report_of(label="x[red]y[/red]")
    console.print(report)
    assert isinstance(console.file, StringIO)
    assert "x[red]y[/red]" in console.file.getvalue()


def test_dict_is_json_and_complete() -> None:
    report = report_of(observed(), unplanned=(("the optimizer", 5, "use a fused one"),))
    loaded = json.loads(json.dumps(report.to_dict()))
    assert loaded["predicted_peak_bytes"] == report.predicted_peak_bytes
    assert loaded["measured_peak_bytes"] == 9 * MIB
    assert loaded["budget_bytes"] == 10 * MIB
    assert loaded["unplanned"] == [{"what": "the optimizer", "size_bytes": 5, "advice": "use a fused one"}]
    assert loaded["regions"][0]["actions"] == {"keep": 1}


def test_a_step_of_two_graphs() -> None:
    first = report_of(observed())
    second = replace(first, plan=replace(first.plan, peak_bytes=20 * MIB, time_us=7.0), notes=("Another.", "An example."))
    step = StepReport(parts=(first, second))
    assert step.predicted_peak_bytes == 20 * MIB
    assert step.predicted_step_us == first.predicted_step_us + 7
    assert step.measured_step_us == first.measured_step_us
    assert step.plan is second.plan
    assert len(step.regions) == 4
    assert step.notes.count("An example.") == 1
    assert "graph 1: Regions" in str(step)
    assert len(step.to_dict()["parts"]) == 2  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        StepReport(parts=())


def test_a_table_with_a_ragged_row_is_refused() -> None:
    with pytest.raises(ValueError, match="2 columns"):
        Table(title="t", columns=("a", "b"), align="lr", rows=(("1",),))


@pytest.mark.parametrize("num_bytes", [0, 1, 1023, 1024, 49_769_116, 2**30 - 1, 2**30, 12_345_678_901, 2**40 + 1, 3 * 2**50])
def test_bytes_that_are_rounded_up_are_enough(num_bytes: int) -> None:
    shown_bytes = parse_bytes(format_bytes_up(num_bytes))
    assert shown_bytes is not None
    assert num_bytes <= shown_bytes <= num_bytes * 1.001 + 1


@pytest.mark.parametrize(
    ("time_us", "text"),
    [(0, "0 us"), (12.34, "12.3 us"), (999.7, "1 ms"), (12_345, "12.3 ms"), (-999_700, "-0.9997 s"), (2_345_678, "2.346 s")],
)
def test_durations(time_us: float, text: str) -> None:
    assert format_us(time_us) == text
