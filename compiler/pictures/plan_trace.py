"""The predicted step as a trace for ui.perfetto.dev and chrome://tracing (the Trace Event format, JSON).

Two processes, with the plan and without a budget, each with a track of forward and one of backward: an event for each op with its predicted
duration, and a counter of the bytes live by kind. Several graphs follow each other as a step runs them: forward in their order, backward
in reverse.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from dyngran.compiler.pictures.plan_picture import GraphPicture, StepPicture
from dyngran.compiler.pictures.plan_terminal import plain
from dyngran.compiler.plans.planfile import PlanDocument

FORWARD_TRACK, BACKWARD_TRACK = 1, 2
COUNTER = "bytes live"

Event = dict[str, Any]


def trace_text(document: PlanDocument, pictures: Sequence[GraphPicture], name: str) -> str:
    """The trace as JSON; ``name`` is that of the plan file."""
    events: list[Event] = []
    for pid, is_after in ((1, True), (2, False)):
        steps = [(picture, picture.after if is_after else picture.before) for picture in pictures]
        events += _named(pid, steps[0][1].title)
        events += _step_events(pid, steps)
    about = {"plan": plain(name), "device": plain(document.device), "torch": plain(document.torch_version), "codegen": document.codegen}
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, separators=(",", ":"))
    return text + "\n"


def _named(pid: int, title: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": title}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, track in ((FORWARD_TRACK, "forward"), (BACKWARD_TRACK, "backward")):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _step_events(pid: int, steps: Sequence[tuple[GraphPicture, StepPicture]]) -> Iterator[Event]:
    start_us = 0.0
    bands = list(dict.fromkeys(band for _, step in steps for band, _ in step.bands))
    counted: dict[str, int] = {}
    for (picture, step), positions in _parts(steps):
        sizes = dict(step.bands)
        for position in positions:
            live = {band: sizes[band][position] if band in sizes else 0 for band in bands}
            if live != counted:
                counted = live
                yield {"ph": "C", "name": COUNTER, "pid": pid, "tid": 0, "ts": round(start_us, 3), "args": live}
            yield _op_event(pid, picture, step, position, start_us)
            start_us += step.live.costs_us[position]
    if counted:  # a counter keeps its last value as long as the trace goes on
        yield {"ph": "C", "name": COUNTER, "pid": pid, "tid": 0, "ts": round(start_us, 3), "args": counted}


def _parts(steps: Sequence[tuple[GraphPicture, StepPicture]]) -> Iterator[tuple[tuple[GraphPicture, StepPicture], range]]:
    """Forward of every graph, then backward of every graph in reverse."""
    for pair in steps:
        yield pair, range(pair[1].live.num_forward)
    for pair in reversed(steps):
        yield pair, range(pair[1].live.num_forward, len(pair[1].live.ops))


def _op_event(pid: int, picture: GraphPicture, step: StepPicture, position: int, start_us: float) -> Event:
    live, values = step.live, picture.problem.values
    op = picture.problem.ops[live.ops[position]]
    is_forward = position < live.num_forward
    reads_bytes, writes_bytes = (sum(values[value].size_bytes for value in moved[position]) for moved in (live.reads, live.writes))
    about = {
        "target": plain(op.target),
        "region": plain(op.region),
        "source": plain(values[op.writes[0]].label) if op.writes else "",
        "graph": picture.title,
        "cost": plain(op.cost_source),
        "reads_bytes": reads_bytes,
        "writes_bytes": writes_bytes,
        "live_bytes": step.total_bytes[position],
        "position": position,
    }
    return {
        "ph": "X",
        "name": plain(op.name),
        "cat": "recompute" if live.is_again[position] else "forward" if is_forward else "backward",
        "ts": round(start_us, 3),
        "dur": round(live.costs_us[position], 3),
        "pid": pid,
        "tid": FORWARD_TRACK if is_forward else BACKWARD_TRACK,
        "args": {key: value for key, value in about.items() if value != ""},
    }
