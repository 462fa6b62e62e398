"""What other people's viewers read: the picture, the trace of Chrome and Perfetto, the memory snapshot of PyTorch."""

import builtins
import io
import json
import pickle
import pickletools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import problems
from shown_plans import MIB, document_of, graph_plan, layers
from torch.cuda import _memory_viz as untyped_viz

from dyngran.compiler.offline.largest_batch import BatchPoint
from dyngran.compiler.pictures.plan_picture import GraphPicture, pictures_of
from dyngran.compiler.pictures.plan_png import MAX_GRAPHS, png, write_batches, write_frontier
from dyngran.compiler.pictures.plan_snapshot import FirstFit, snapshot, snapshot_bytes
from dyngran.compiler.pictures.plan_trace import trace_text
from dyngran.compiler.plans.planfile import GraphPlan, PlanDocument
from dyngran.compiler.plans.unplanned import Unplanned
from dyngran.passes.errors import PlanFileError, ToolMissing
from dyngran.passes.problem import Problem

memory_viz: Any = untyped_viz

# What the viewer's own unpickler knows: torch/utils/viz/MemoryViz.js, `unpickle`.
VIEWER_OPCODES = """
APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT
BINUNICODE DICT EMPTY_DICT EMPTY_LIST EMPTY_TUPLE FRAME LIST LONG1
LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO
SETITEM SETITEMS SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3
"""


def pictured(*graphs: GraphPlan) -> tuple[GraphPicture, ...]:
    return pictures_of(document_of(*graphs), source="plan.json")


def events_of(document: PlanDocument) -> list[dict[str, Any]]:
    trace = json.loads(trace_text(document, pictures_of(document, source="plan.json"), "plan.json"))
    assert trace["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def replayed(events: Sequence[Mapping[str, Any]], segment: Mapping[str, Any]) -> tuple[int, dict[int, int]]:
    """The largest sum of live bytes, and the blocks that stay; checks that no two blocks overlap and that all lie in the segment."""
    live: dict[int, int] = {}
    highest = 0
    end = segment["address"] + segment["total_size"]
    for event in events:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert segment["address"] <= address and address + size <= end
            assert all(address + size <= other or other + held <= address for other, held in live.items())
            live[address] = size
            highest = max(highest, sum(live.values()))
        elif event["action"] == "free_completed":
            assert live.pop(address) == size
    return highest, live


@pytest.mark.parametrize("fused", [False, True])
def test_a_trace_has_what_its_viewers_need(fused: bool) -> None:
    document = document_of(graph_plan(layers(4, fused=fused)))
    (picture,) = pictures_of(document, source="plan.json")
    events = events_of(document)
    assert Counter(event["ph"] for event in events).keys() == {"M", "X", "C"}
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] != "C" or all(isinstance(size, int) and size >= 0 for size in event["args"].values())
    names = {(event["name"], event["pid"], event["tid"]): event["args"] for event in events if event["ph"] == "M"}
    assert names[("process_name", 1, 0)]["name"] == "with the plan" and names[("process_name", 2, 0)]["name"] == "without a budget"
    assert all(names[("thread_name", pid, tid)]["name"] == ("forward", "backward")[tid - 1] for pid in (1, 2) for tid in (1, 2))
    for pid, step in ((1, picture.after), (2, picture.before)):
        ops = [event for event in events if event["ph"] == "X" and event["pid"] == pid]
        assert [event["name"] for event in ops] == [picture.problem.ops[op].name for op in step.live.ops]
        assert sum(event["dur"] for event in ops) == pytest.approx(step.time_us, abs=0.01)
        assert [event["cat"] == "recompute" for event in ops] == list(step.live.is_again)
        assert [event["tid"] for event in ops] == [1 if p < step.live.num_forward else 2 for p in range(len(ops))]
        ends = [event["ts"] + event["dur"] for event in ops]
        assert all(end <= later["ts"] + 0.002 for end, later in zip(ends, ops[1:], strict=False)), "one after the other"
        counters = [sum(event["args"].values()) for event in events if event["ph"] == "C" and event["pid"] == pid]
        assert max(counters) == step.peak_bytes
    assert any(event.get("cat") == "recompute" for event in events)


def test_events_say_what_they_move() -> None:
    document = document_of(graph_plan(layers(1)))
    first = next(event for event in events_of(document) if event["ph"] == "X")
    assert first["args"]["reads_bytes"] == 3 * MIB and first["args"]["writes_bytes"] == MIB
    assert first["args"]["region"] == "layers.0" and first["args"]["target"] == "mm"
    assert first["args"]["live_bytes"] == document.plan.static_bytes + MIB + MIB // 2


def test_graphs_follow_each_other_as_a_step_runs_them() -> None:
    document = document_of(graph_plan(layers(1)), graph_plan(layers(2)))
    order = [(event["args"]["graph"], event["tid"]) for event in events_of(document) if event["ph"] == "X" and event["pid"] == 1]
    assert list(dict.fromkeys(order)) == [("graph 1 of 2", 1), ("graph 2 of 2", 1), ("graph 2 of 2", 2), ("graph 1 of 2", 2)]


@pytest.mark.parametrize("fused", [False, True])
def test_a_snapshot_holds_the_predicted_peak(fused: bool) -> None:
    graph = graph_plan(layers(5, fused=fused))
    found = snapshot(pictured(graph))
    (segment,), (events,) = found["segments"], found["device_traces"]
    highest, live = replayed(events, segment)
    assert highest == graph.plan.peak_bytes
    held = [event for event in events if event["action"] == "alloc" and event["frames"][0]["name"].startswith("held")]
    assert sum(event["size"] for event in held) == graph.plan.static_bytes
    assert held == [event for event in events if event["action"] == "alloc"][: len(held)], "what is held is there first"
    problem = graph.problem
    stays = problem.gradients | problem.forward_outputs
    assert sum(live.values()) == graph.plan.static_bytes + sum(problem.values[value].size_bytes for value in stays)
    blocks = {block["address"]: block["size"] for block in segment["blocks"] if block["state"] == "active_allocated"}
    assert blocks == live
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    assert events[0]["action"] == "segment_alloc" and events[0]["size"] == segment["total_size"]
    assert [event["time_us"] for event in events] == sorted(event["time_us"] for event in events)


@given(problem=problems(), data=st.data())
def test_a_snapshot_of_any_problem_holds_the_simulated_peak(problem: Problem, data: st.DataObject) -> None:
    saved = data.draw(st.sets(st.sampled_from(range(len(problem.values)))))
    (picture,) = pictured(graph_plan(problem, sorted(saved)))
    found = snapshot((picture,))
    highest, _ = replayed(found["device_traces"][0], found["segments"][0])
    assert highest == picture.after.peak_bytes == picture.plan.peak_bytes


def test_frames_name_module_and_line() -> None:
    graph = graph_plan(layers(1))
    values = tuple(replace(value, label="layers.0.up: mm (model.py:12)") for value in graph.problem.values)
    found = snapshot(pictured(replace(graph, problem=replace(graph.problem, values=values))))
    events = found["device_traces"][0]
    frames = next(event["frames"] for event in events if event["frames"] and "(activation)" in event["frames"][0]["name"])
    assert frames[1] == {"name": "mm", "filename": "model.py", "line": 12}
    assert [frame["name"] for frame in frames[2:]] == ["layers.0.up", "forward"]


def test_pytorchs_own_tools_take_the_snapshot(tmp_path: Path) -> None:
    content = snapshot_bytes(pictured(graph_plan(layers(3)), graph_plan(layers(2))))
    found = pickle.loads(content)
    assert json.loads(json.dumps(found)) == found, "dicts, lists, numbers and texts"
    assert "Device 1" in memory_viz.trace(found)
    assert "segments: 2" in memory_viz.segsum(found)
    for view in (memory_viz.trace_plot(found), memory_viz.segment_plot(found), memory_viz.trace_plot(found, plot_segments=True)):
        assert "add_local_files" in view
    lines: list[str] = []
    memory_viz.memory(found, format_flamegraph=lambda text: lines.append(text))
    assert "held over the whole step: parameter" in lines[0]


def test_the_viewer_can_unpickle_it() -> None:
    content = snapshot_bytes(pictured(graph_plan(layers(40))))
    opcodes = list(pickletools.genops(content))
    assert {opcode.name for opcode, _, _ in opcodes} <= set(VIEWER_OPCODES.split())
    assert opcodes[0][1] == 4


def test_first_fit_takes_the_lowest_gap() -> None:
    memory = FirstFit(0)
    places = [memory.take(size) for size in (512, 1024, 512)]
    assert places == [0, 512, 1536]
    memory.give_back(512, 1024)
    assert [memory.take(size) for size in (2048, 512, 512, 1)] == [2048, 512, 1024, 4096]
    assert memory.end == 4097


def test_a_picture_is_a_png_that_is_not_blank() -> None:
    image = pytest.importorskip("matplotlib.image", reason="the picture needs matplotlib")
    pixels = image.imread(
        io.BytesIO(png(pictured(graph_plan(layers(4)), graph_plan(layers(3, fused=True))), "a $\\frac{name$ of mathtext"))
    )
    colours = Counter(map(tuple, (pixels[::3, ::3, :3] * 255).round().astype(int).reshape(-1, 3).tolist()))
    assert colours[(0x3B, 0x76, 0xC4)] > 1000, "activations in their colour"
    assert len(colours) > 20 and max(colours.values()) < 0.9 * sum(colours.values())


def test_a_step_of_many_graphs_makes_a_picture() -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    (picture,) = pictured(graph_plan(layers(1)))
    assert png((picture,) * (MAX_GRAPHS + 1), "plan.json").startswith(b"\x89PNG")


def test_frontiers_and_batches_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    write_frontier(document_of(graph_plan(layers(2)), graph_plan(layers(3))), tmp_path / "frontier.png")
    points = [
        BatchPoint(batch=batch, unplanned=Unplanned(peak_bytes=batch * 3 * MIB, time_us=1.0, saved_bytes=0), least_peak_bytes=batch * MIB)
        for batch in (1, 2, 4)
    ]
    write_batches(points, tmp_path / "batches.png", budget_bytes=6 * MIB, batch=4, without=2)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("frontier.png", "batches.png"))
    with pytest.raises(PlanFileError, match=r"picture .* cannot be written"):
        write_frontier(document_of(graph_plan(layers(1))), tmp_path / "missing" / "frontier.png")


def test_without_matplotlib_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    really_import = builtins.__import__

    def without(name: str, *more: Any, **named: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return really_import(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ToolMissing, match=r"pip install matplotlib"):
        png(pictured(graph_plan(layers(1))), "plan.json")
