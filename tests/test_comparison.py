"""Comparing two plans: on small whole numbers, what is the same, what is worse, and what is to blame."""

import json
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from problems import Builder, problems

from dyngran.compiler.checks.check_output import blamed
from dyngran.compiler.checks.comparison import Comparison, Metric, Verdict, compare
from dyngran.compiler.checks.culprits import Topic
from dyngran.compiler.checks.limits import Limit, Limits, Unit
from dyngran.compiler.checks.sites import Site
from dyngran.compiler.commands import diff
from dyngran.compiler.plans.planfile import GraphBreak, GraphPlan, PlanDocument, save_plan
from dyngran.passes.decide import decide
from dyngran.passes.errors import BudgetTooSmall, InvalidOption, PlanMismatch
from dyngran.passes.fingerprint import fingerprint
from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.simulate import Simulator

LIMITS = Limits.parse()
MIB = 2**20


def net(widths: tuple[int, ...] = (1, 1, 1), *, mask_mib: int = 0, cost_us: float = 1.0, line: int = 10, prefix: str = "blocks") -> Problem:
    """Blocks that each make a value of so many MiB, which backward reads; the middle one also a mask. Every op takes ``cost_us``."""
    build = Builder()
    current = build.given(MIB, Kind.INPUT)
    saved = []
    for position, width in enumerate(widths):
        region = f"{prefix}.{position}"
        current = build.op([current], width * MIB, region=region, cost_us=cost_us)
        saved.append((current, region))
        if mask_mib and position == 1:
            mask = build.op([current], mask_mib * MIB, region=region, target="dropout", cost_us=cost_us)
            saved.append((mask, region))
            current = build.op([current, mask], width * MIB, region=region, target="mul", cost_us=cost_us)
    build.outputs.add(build.op([current], 4, target="loss", cost_us=cost_us))
    gradient = build.given(4, Kind.TANGENT)
    for value, region in reversed(saved):
        gradient = build.op([value, gradient], MIB, side=Side.BACKWARD, target="grad", region=region, kind=Kind.TEMPORARY, cost_us=cost_us)
    build.gradients.add(gradient)
    problem = build.build()
    ops = {write: op for op in problem.ops for write in op.writes}
    values = tuple(
        replace(value, label=f"{ops[value.index].region}: {ops[value.index].target} (net.py:{line + ops[value.index].index})")
        if value.index in ops
        else value
        for value in problem.values
    )
    return replace(problem, values=values)


def document(*graphs: Problem, budget_mib: int | None = None, drop: int = 0, breaks: tuple[GraphBreak, ...] = ()) -> PlanDocument:
    """Plans that save what the unplanned step saves, but for the ``drop`` first values."""
    return PlanDocument(
        graphs=tuple(_graph(problem, budget_mib, drop) for problem in graphs),
        codegen="eager",
        torch_version="2.13.0",
        device="h100",
        breaks=breaks,
    )


def _graph(problem: Problem, budget_mib: int | None, drop: int) -> GraphPlan:
    simulator = Simulator(problem)
    outcome = simulator.evaluate(sorted(simulator.default_saved)[drop:])
    budget_bytes = None if budget_mib is None else budget_mib * MIB
    plan = decide(simulator, outcome, budget_bytes=budget_bytes, fastest_us=outcome.time_us, solver="test")
    return GraphPlan(problem=problem, plan=plan, fingerprint=fingerprint(problem), frontier=((outcome.peak_bytes, outcome.time_us),))


def metric(comparison: Comparison, key: str) -> Metric:
    return next(one for one in comparison.metrics if one.key == key)


@given(problem=problems())
def test_a_plan_is_the_same_as_itself(problem: Problem) -> None:
    same = document(problem)
    comparison = compare(same, same, LIMITS)
    assert comparison.is_same
    assert not comparison.culprits
    assert not comparison.differences


def test_other_names_lines_and_measured_costs_are_the_same() -> None:
    comparison = compare(document(net()), document(net(prefix="layers", line=70, cost_us=1.3)), LIMITS)
    assert comparison.is_same
    assert not comparison.culprits


def test_what_a_solver_chose_on_an_equal_graph_is_not_compared() -> None:
    assert compare(document(net(), drop=0), document(net(), drop=1), LIMITS).is_same


def test_a_mask_that_is_saved_now() -> None:
    comparison = compare(document(net()), document(net(mask_mib=1, line=20)), LIMITS)
    saved = metric(comparison, "unplanned_saved")
    assert (saved.committed, saved.now, saved.verdict) == (3 * MIB, 4 * MIB, Verdict.WORSE)
    first = blamed(comparison)[0]
    assert first.text == "new saved value: dropout (net.py:22) in blocks.1, 1 MiB"
    assert (first.topic, first.file, first.line, first.change) == (Topic.SAVED, "net.py", 22, MIB)
    assert any(one.startswith("blocks.1: 1 dropout") and one.endswith("only in the graph at hand") for one in comparison.differences)


def test_the_way_back_is_better() -> None:
    comparison = compare(document(net(mask_mib=1)), document(net()), LIMITS)
    assert not comparison.is_regression
    assert metric(comparison, "unplanned_saved").verdict is Verdict.BETTER
    assert not blamed(comparison)
    assert any(one.text.startswith("no longer saved: dropout") for one in comparison.culprits)


def test_a_wider_block_has_grown_and_is_not_new() -> None:
    comparison = compare(document(net((1, 1, 1))), document(net((1, 3, 1))), LIMITS)
    texts = [one.text for one in blamed(comparison)]
    assert "saved: mm (net.py:11) in blocks.1, 5 MiB in 3 where 3 MiB in 3 was" in texts or any(
        "3 MiB where 1 MiB was" in one for one in texts
    )


def test_a_peak_within_the_budget_is_what_the_planner_was_allowed() -> None:
    before, after = document(net(), budget_mib=40), document(net((1, 4, 1)), budget_mib=40)
    planned = metric(compare(before, after, LIMITS), "planned_peak")
    assert planned.now > planned.committed * 1.01
    assert (planned.verdict, planned.rule, planned.limit) == (Verdict.WITHIN, "budget", 40 * MIB)
    absolute = Limits.parse(max_peak="5MiB")
    assert metric(compare(before, after, absolute), "planned_peak").verdict is Verdict.WORSE


def test_a_refusal_is_a_regression_that_names_what_is_pinned() -> None:
    refusal = BudgetTooSmall(budget_bytes=4 * MIB, least_peak_bytes=6 * MIB, pinned=(("blocks.1: mm (net.py:11)", 3 * MIB),))
    comparison = compare(document(net(), budget_mib=4), document(net((1, 3, 1))), LIMITS, refusal=refusal)
    planned = metric(comparison, "planned_peak")
    assert (planned.now, planned.limit, planned.verdict) == (6 * MIB, 4 * MIB, Verdict.WORSE)
    assert comparison.culprits[-1].text == "cannot be freed at the least peak: blocks.1: mm (net.py:11), 3 MiB"
    assert (comparison.culprits[-1].file, comparison.culprits[-1].line) == ("net.py", 11)


def test_a_new_graph_break() -> None:
    there = GraphBreak("call to print", "net.py:31")
    moved, new = replace(there, where="net.py:35"), GraphBreak("data-dependent branch", "/home/me/net.py:40")
    before, after = document(net(), breaks=(there,)), document(net(), breaks=(moved, new))
    comparison = compare(before, after, LIMITS)
    assert [one.key for one in comparison.worse] == ["graph_breaks"]
    assert [one.text for one in comparison.culprits] == ["new graph break at /home/me/net.py:40: data-dependent branch"]
    assert (comparison.culprits[0].file, comparison.culprits[0].line) == ("/home/me/net.py", 40)
    assert not compare(before, after, Limits.parse(max_graph_breaks=2)).is_regression
    assert not compare(after, before, LIMITS).is_regression


def test_a_step_in_more_graphs_without_a_reason_is_a_new_graph_break() -> None:
    comparison = compare(document(net()), document(net(), net()), LIMITS)
    assert metric(comparison, "graph_breaks").verdict is Verdict.WORSE
    assert "2 graphs where it had 1" in comparison.culprits[0].text


@pytest.mark.parametrize("changed", [{"codegen": "inductor"}, {"device": "a100"}])
def test_what_cannot_be_compared_is_refused(changed: dict[str, str]) -> None:
    committed = document(net())
    with pytest.raises(PlanMismatch, match=next(iter(changed.values()))):
        compare(committed, replace(committed, **changed), LIMITS)


def test_another_torch_may_trace_another_graph() -> None:
    committed = document(net())
    newer = replace(committed, torch_version="2.14.1+cu130")
    assert "torch 2.13.0, and this is torch 2.14.1" in compare(committed, newer, LIMITS).notes[0]
    assert not compare(committed, replace(committed, torch_version="2.13.7+cpu"), LIMITS).notes
    with pytest.raises(PlanMismatch, match="traces another graph"):
        compare(committed, replace(document(net((1, 2, 1))), torch_version="2.14.1+cu130"), LIMITS)


@pytest.mark.parametrize(
    ("text", "unit", "allowed"),
    [
        ("+1%", Unit.BYTES, 1010.0),
        (" + 0.5 % ", Unit.BYTES, 1005.0),
        ("+1KiB", Unit.BYTES, 2024.0),
        ("20GiB", Unit.BYTES, 20 * 2**30),
        ("+3ms", Unit.TIME, 4000.0),
        ("120ms", Unit.TIME, 120_000.0),
        ("+0%", Unit.TIME, 1000.0),
    ],
)
def test_limits_as_people_write_them(text: str, unit: Unit, allowed: float) -> None:
    assert Limit.parse(text, unit, source="max_peak").allowed(1000) == pytest.approx(allowed)


@pytest.mark.parametrize(
    ("text", "unit"), [("1%", Unit.BYTES), ("+1ms", Unit.BYTES), ("+1MiB", Unit.TIME), ("", Unit.TIME), ("-2%", Unit.TIME)]
)
def test_what_is_no_limit_is_refused_by_name(text: str, unit: Unit) -> None:
    with pytest.raises(InvalidOption, match="max_step"):
        Limit.parse(text, unit, source="max_step")


@pytest.mark.parametrize(
    ("label", "site"),
    [
        ("blocks.0.up: addmm (net.py:13)", Site("blocks.0.up", "addmm", "net.py", 13)),
        ("add.Tensor (net.py:16)", Site("", "add.Tensor", "net.py", 16)),
        ("head: mm", Site("head", "mm", "", None)),
        ("primals_1", Site("", "primals_1", "", None)),
        ("odd (label) (a b.py:1)", Site("", "odd (label) (a b.py:1)", "", None)),
        ("", Site("", "", "", None)),
    ],
)
def test_a_label_is_read_back(label: str, site: Site) -> None:
    assert Site.of(label) == site


def printed(first: PlanDocument, second: PlanDocument, folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    for name, one in (("a.json", first), ("b.json", second)):
        save_plan(folder / name, one)
    parser = ArgumentParser()
    diff.add(parser.add_subparsers())
    options = parser.parse_args(["diff", str(folder / "a.json"), str(folder / "b.json"), *words])
    assert options.run(options) == 0
    return capsys.readouterr().out


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_diff_of_equal_graphs_names_the_decisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(document(net()), document(net(prefix="layers"), drop=1), tmp_path, capsys)
    rows = [cells(line) for line in text.splitlines()]
    assert ["saved", "3 MiB", "2 MiB", "-1 MiB"] in rows
    assert ["ops recomputed", "0", "1", "+1"] in rows
    assert ["values: keep", "3", "2", "-1"] in rows
    assert ["static", "1 MiB", "1 MiB", "same"] in rows
    assert ["value_1", "blocks.0: mm (net.py:10)", "keep", "recompute", "1 MiB"] in rows
    assert "decisions that differ, largest first (1 of 1)" in text
    assert "equal" not in text


def test_diff_of_other_graphs_names_what_only_one_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = replace(document(net(mask_mib=1), breaks=(GraphBreak("print", "net.py:3"),)), device="a100")
    text = printed(document(net()), other, tmp_path, capsys)
    for words in ("new saved value: dropout (net.py:12) in blocks.1, 1 MiB", "new graph break at net.py:3: print", "1 dropout"):
        assert words in text
    assert "device differs: h100 and a100" in text


def test_diff_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = json.loads(printed(document(net()), document(net()), tmp_path, capsys, "--json"))
    assert same["equal"] and same["same_graphs"] and not same["decisions"] and not same["changes"] and not same["differences"]
    other = json.loads(printed(document(net()), document(net(mask_mib=1)), tmp_path, capsys, "--json"))
    saved = next(row for row in other["numbers"] if row["name"] == "unplanned saved")
    assert saved == {"name": "unplanned saved", "unit": "bytes", "first": 3 * MIB, "second": 4 * MIB}
    assert not other["same_graphs"]


def test_diff_of_a_file_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "The plans are equal." in printed(document(net()), document(net()), tmp_path, capsys)
