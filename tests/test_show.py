"""`dyngran-plan show` in a terminal: what it says of a known plan, how it looks at 60 and 80 columns, and that it writes whole files."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from problems import chain
from shown_plans import MIB, document_of, graph_plan, layers, shown, with_peak

from dyngran.compiler.pictures.plan_picture import OUTSIDE, pictures_of
from dyngran.compiler.pictures.plan_sketch import ASCII, NUM_ROWS, sketch
from dyngran.compiler.plans.output_file import write_file
from dyngran.compiler.plans.planfile import GraphBreak, Origin, PlanDocument, Settings, dump_plan, load_plan, save_plan
from dyngran.passes.errors import PlanFileError, format_bytes, format_us
from dyngran.passes.plan import Action, Schedule
from dyngran.passes.problem import Kind, Problem
from dyngran.passes.schedule import timeline_of
from dyngran.passes.simulate import Simulator, free_transient

EXPORTS = ("html", "png", "trace", "snapshot")


def saved_file(folder: Path, document: PlanDocument) -> str:
    save_plan(folder / "plan.json", document)
    return str(folder / "plan.json")


def words_of(text: str) -> str:
    return " ".join(text.split())


def without_backward() -> Problem:
    return replace(chain(1), ops=(), values=(), gradients=frozenset(), forward_outputs=frozenset())


def test_the_head_says_what_the_plan_promises(tmp_path: Path) -> None:
    graph = graph_plan(layers(6))
    plan, problem = graph.plan, graph.problem
    plan = replace(plan, bound="relaxation: of a test", bound_us=plan.time_us * 0.9)
    breaks = (GraphBreak("print was called", "train.py:12"),)
    document = replace(document_of(replace(graph, plan=plan)), breaks=breaks, settings=Settings(budget="30MiB", batch=8))
    printed = words_of(shown([saved_file(tmp_path, document)]))
    free_bytes = free_transient(Simulator(problem)) + problem.total_static_bytes
    for words in (
        f"budget {format_bytes(plan.budget_bytes or 0)}",
        f"predicted peak {format_bytes(plan.peak_bytes)}, of which static {format_bytes(problem.total_static_bytes)}",
        f"free peak {format_bytes(free_bytes)} without a budget",
        f"least peak known {format_bytes(graph.frontier[0][0])}",
        f"saved for backward {format_bytes(plan.saved_bytes)} in {len(plan.saved)} values",
        f"predicted time {format_us(plan.time_us)}, of which {format_us(plan.overhead_us)} beyond the step",
        f"recompute {format_us(plan.recompute_us)} in {plan.num_recomputed} ops",
        "solver by hand",
        "bound no plan within the budget can be more than 10.0% faster (relaxation: of a test)",
        "made for NVIDIA H100, torch 2.13.0, codegen eager, dyngran 0.1.0",
        "origin exact",
        "asked for budget 30MiB, batch 8",
        "graph breaks 1 break 1 train.py:12: print was called",
        graph.fingerprint,
    ):
        assert words in printed


def test_tables_hold_regions_folded_and_the_largest_values(tmp_path: Path) -> None:
    graph = graph_plan(layers(12))
    path = saved_file(tmp_path, document_of(graph))
    printed = shown([path])
    assert "layers.0 … layers.10 (6 alike)" in printed or "alike)" in printed
    kept = [one for one in graph.plan.decisions if one.action is Action.KEEP]
    again = [one for one in graph.plan.decisions if one.action is Action.RECOMPUTE]
    totals = words_of(printed[printed.index("by action") :])
    assert f"keep {len(kept)} {format_bytes(sum(one.size_bytes for one in kept))}" in totals
    assert f"recompute {len(again)} {format_bytes(sum(one.size_bytes for one in again))}" in totals
    assert f"(20 of {len(graph.plan.decisions)}; --all shows every one)" in printed
    everything = words_of(shown([path, "--all"]))
    assert all(f"{one.name} {one.action.value}" in everything for one in graph.plan.decisions)
    assert all(one.reason in everything for one in graph.plan.decisions)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("fused", [False, True])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, width: int, fused: bool) -> None:
    graph = graph_plan(layers(9, fused=fused))
    long = replace(graph, plan=replace(graph.plan, solver="a solver " * 30))
    printed = shown([saved_file(tmp_path, document_of(long, graph))], width=width)
    assert max(map(len, printed.splitlines())) <= width
    assert "█" in printed and "░" in printed and "forward" in printed and "backward" in printed


def test_text_of_the_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    graph = graph_plan(layers(2))
    bad = "\x1b[2J[bold]x[/oops]\r\n\x9b1m"
    decisions = tuple(replace(one, name=bad, reason=bad, label=bad) for one in graph.plan.decisions)
    problem = replace(graph.problem, ops=tuple(replace(op, region=bad, name=bad, target=bad) for op in graph.problem.ops))
    forged = replace(
        graph, problem=problem, fingerprint=bad, plan=replace(graph.plan, decisions=decisions, solver=bad, order=bad, bound=bad)
    )
    document = replace(
        document_of(forged, forged), device=bad, torch_version=bad, breaks=(GraphBreak(bad, bad),), settings=Settings(budget=bad)
    )
    for width in (80, 200):
        printed = shown([saved_file(tmp_path, document), "--all"], width=width)
        assert not set(printed) & {"\x1b", "\r", "\x9b"}
        assert "[bold]x[/oops]" in printed


def test_a_terminal_without_unicode_is_enough(tmp_path: Path) -> None:
    path = saved_file(tmp_path, document_of(graph_plan(layers(12))))
    script = "import sys; from dyngran.compiler.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    command = [sys.executable, "-c", script, "show", path]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "# with the plan" in done.stdout and "layers.0 ? layers." in done.stdout


def test_json_is_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = document_of(graph_plan(layers(2)))
    path = saved_file(tmp_path, document)
    assert shown([path, "--json", "--trace", str(tmp_path / "t.json")]) == ""
    assert capsys.readouterr().out == dump_plan(document)
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_each_graph_has_its_section(tmp_path: Path) -> None:
    graphs = graph_plan(layers(2)), graph_plan(layers(4)), graph_plan(layers(3))
    document = replace(document_of(*graphs), origin=Origin.PORTABLE)
    printed = words_of(shown([saved_file(tmp_path, document)]))
    for words in ("graph 1 of 3", "graph 2 of 3", "graph 3 of 3", "origin portable", f"predicted peak {format_bytes(document.peak_bytes)}"):
        assert words in printed


def test_without_a_budget_later_graphs_run_beside_what_earlier_ones_save() -> None:
    graphs = graph_plan(layers(4)), graph_plan(layers(2))
    first, second = pictures_of(document_of(*graphs), source="plan.json")
    simulator = Simulator(graphs[0].problem)
    more_bytes = simulator.evaluate(simulator.default_saved).saved_bytes - graphs[0].plan.saved_bytes
    assert more_bytes > 0
    assert second.before.held_bytes == second.after.held_bytes + more_bytes
    assert first.before.held_bytes == first.after.held_bytes == graphs[0].problem.total_static_bytes


@pytest.mark.parametrize("fused", [False, True])
def test_curves_are_those_of_the_simulator(fused: bool) -> None:
    graph = graph_plan(layers(5, fused=fused))
    held_bytes = graph.problem.total_static_bytes + 3 * MIB
    graph = replace(graph, plan=replace(graph.plan, static_bytes=held_bytes, peak_bytes=graph.plan.peak_bytes + 3 * MIB))
    (picture,) = pictures_of(document_of(graph), source="plan.json")
    simulator = Simulator(graph.problem)
    free = simulator.timeline(graph.problem.stock["min-cut"] if fused else simulator.default_saved)
    for step, timeline in ((picture.after, timeline_of(simulator, graph.plan)), (picture.before, free)):
        assert [size - held_bytes for size in step.total_bytes] == list(timeline.live_bytes)
        assert [sum(sizes) for sizes in zip(*(sizes for _, sizes in step.bands), strict=True)] == list(step.total_bytes)
        assert dict(step.held)[OUTSIDE] == 3 * MIB
    assert picture.after.peak_bytes == graph.plan.peak_bytes
    assert picture.note == ""


def test_a_prediction_beyond_the_curve_is_said(tmp_path: Path) -> None:
    graph = graph_plan(layers(5))
    corrected = with_peak(graph, graph.plan.peak_bytes * 3 // 2)
    assert "note" not in shown([saved_file(tmp_path, document_of(graph))])
    printed = words_of(shown([saved_file(tmp_path, document_of(corrected))]))
    assert f"peaks at {format_bytes(graph.plan.peak_bytes)}; the predicted peak, {format_bytes(corrected.plan.peak_bytes)}" in printed


def test_the_sketch_marks_peak_budget_and_the_end_of_forward() -> None:
    (picture,) = pictures_of(document_of(graph_plan(layers(20))), source="plan.json")
    lines = sketch(picture, width=80, marks=ASCII).plain.splitlines()
    legend, *rows, ruler, sides = lines
    assert "budget" in legend and len(rows) == NUM_ROWS
    assert "." in rows[0], "without a budget it is highest"
    highest = next(place for place, row in enumerate(rows) if "#" in row)
    assert highest > 0 and all("-" not in row for row in rows[highest + 1 :]), "the budget line is above the plan"
    assert ruler.index("+", ruler.index("+") + 1) == sides.index("backward")


def test_a_budget_far_above_is_named_and_not_drawn(tmp_path: Path) -> None:
    graph = graph_plan(layers(4))
    document = document_of(replace(graph, plan=replace(graph.plan, budget_bytes=2**40)))
    assert "budget 1 TiB, above this picture" in shown([saved_file(tmp_path, document)])


def test_a_graph_of_no_op_is_shown(tmp_path: Path) -> None:
    document = document_of(graph_plan(without_backward()))
    outputs = [word for option in EXPORTS for word in (f"--{option}", str(tmp_path / option))]
    assert "predicted peak" in shown([saved_file(tmp_path, document)])
    shown([saved_file(tmp_path, document), *outputs])


def test_an_order_that_cannot_run_is_one_sentence(tmp_path: Path) -> None:
    graph = graph_plan(chain(3))
    schedule = Schedule(tuple(range(len(graph.problem.ops)))[::-1], ())
    document = document_of(replace(graph, plan=replace(graph.plan, schedule=schedule)))
    with pytest.raises(PlanFileError, match=r"plan.json.*graphs\[0\]: its order of ops cannot run: .* Make the plan again\.$"):
        shown([saved_file(tmp_path, document)])


def test_a_prescribed_order_is_drawn_as_it_runs() -> None:
    problem = chain(4)
    simulator = Simulator(problem)
    forward, backward = simulator.schedule(simulator.default_saved)
    schedule = Schedule((*forward, forward[-1]), tuple(backward))  # the loss a second time
    (picture,) = pictures_of(document_of(graph_plan(problem, schedule=schedule)), source="plan.json")
    assert picture.after.live.is_again.count(True) == 1
    assert len(picture.after.total_bytes) == len(picture.before.total_bytes) + 1
    assert picture.after.peak_bytes == picture.plan.peak_bytes


@pytest.mark.parametrize("option", EXPORTS)
def test_an_output_is_written_and_named(tmp_path: Path, option: str) -> None:
    path = saved_file(tmp_path, document_of(graph_plan(layers(2)), graph_plan(layers(1, fused=True))))
    out = tmp_path / "out"
    out.write_text("what was there")
    printed = shown([path, f"--{option}", str(out)])
    assert f"written to {out} ({format_bytes(out.stat().st_size)})" in printed
    assert out.stat().st_size > 1000
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "plan.json"], "no temporary file stays"


@pytest.mark.parametrize("option", EXPORTS)
@pytest.mark.parametrize("place", ["", "missing/out", "folder", "plan.json", "plan.json/out", "a\0b"])
def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path: Path, option: str, place: str) -> None:
    document = document_of(graph_plan(layers(1)))
    path = saved_file(tmp_path, document)
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlanFileError) as raised:
        shown([path, f"--{option}", str(tmp_path / place) if place else ""])
    assert "cannot be written" in str(raised.value) and "\n" not in str(raised.value)
    assert load_plan(path) == document
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder", "plan.json"]


def test_two_outputs_need_two_files(tmp_path: Path) -> None:
    path = saved_file(tmp_path, document_of(graph_plan(layers(1))))
    with pytest.raises(PlanFileError, match=r"where the report goes\. Name another file\."):
        shown([path, "--html", str(tmp_path / "out"), "--trace", str(tmp_path / "folder" / ".." / "out")])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_one_sentence(tmp_path: Path) -> None:
    path = saved_file(tmp_path, document_of(graph_plan(layers(1))))
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(PlanFileError, match=r"Permission denied"):
        shown([path, "--html", str(tmp_path / "locked" / "out")])


def test_a_link_stays_and_a_pipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    write_file(str(tmp_path / "link"), b"new", what="report")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == b"new"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PlanFileError, match="is no file"):
        write_file(str(tmp_path / "pipe"), b"new", what="report")


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").write_bytes(b"old")

    def fail(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(PlanFileError, match=r"report .* cannot be written: No space left on device\.$"):
        write_file(str(tmp_path / "out"), b"new", what="report")
    assert [one.name for one in tmp_path.iterdir()] == ["out"] and (tmp_path / "out").read_bytes() == b"old"


def test_held_kinds_have_their_own_bands() -> None:
    problem = replace(layers(2), static_bytes={Kind.PARAMETER: 4 * MIB, Kind.OPTIMIZER: 8 * MIB, Kind.GRADIENT: 4 * MIB})
    (picture,) = pictures_of(document_of(graph_plan(problem)), source="plan.json")
    assert picture.after.held == (("parameter", 4 * MIB), ("optimizer state", 8 * MIB), ("gradient (held)", 4 * MIB))
    lean = replace(graph_plan(problem).plan, static_bytes=MIB, peak_bytes=2 * MIB)
    (picture,) = pictures_of(document_of(replace(graph_plan(problem), plan=lean)), source="plan.json")
    assert picture.after.held == ((OUTSIDE, MIB),), "a plan that holds less than its problem says"
