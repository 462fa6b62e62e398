"""A plan document as one self-contained page: no network, no library, and nothing from the file that a browser could run.

The page carries its data as JSON (allocations as intervals, texts once each) and a script that draws it; its content security policy
names that script by its hash, so that no other runs, and allows no request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from dyngran.compiler.pictures.plan_picture import BANDS, WORKSPACE, GraphPicture, StepPicture
from dyngran.compiler.pictures.plan_terminal import action_of, graph_rows, largest_first, made_rows, plain
from dyngran.compiler.plans.planfile import PlanDocument
from dyngran.compiler.report_rows import merge_alike, region_rows
from dyngran.passes.errors import format_bytes, format_us

# The style sheet's name of each band's colour.
COLOURS = (
    "parameter",
    "buffer",
    "input",
    "optimizer",
    "other",
    "held-gradient",
    "outside",
    "carried",
    "output",
    "tangent",
    "gradient",
    "activation",
    "again",
    "temporary",
    "workspace",
)
_BAND = {band: place for place, band in enumerate(BANDS)}


class _Strings:
    """Texts, each once; ``number`` gives the place of one."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.places.setdefault(plain(text), len(self.places))


def page(document: PlanDocument, pictures: Sequence[GraphPicture], name: str) -> str:
    """The page; ``name`` is that of the plan file."""
    script = _resource("plan_report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "HASH": f"sha256-{digest}",
        "TITLE": escape(f"{plain(name)}: dyngran plan"),
        "STYLE": _resource("plan_report.css"),
        "DATA": _embedded(_content(document, pictures, name)),
        "SCRIPT": script,
    }
    return re.sub(r"@(HASH|TITLE|STYLE|DATA|SCRIPT)@", lambda found: parts[found[1]], _resource("plan_report.html"))


def palette() -> dict[str, str]:
    """The colour of each band on a light page, as ``#rrggbb``: the style sheet's."""
    colours = dict(reversed(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", _resource("plan_report.css"))))  # the light ones stand first
    return {band: colours[name] for band, name in zip(BANDS, COLOURS, strict=True)}


def _resource(name: str) -> str:
    return files("dyngran.compiler.pictures").joinpath(name).read_text(encoding="utf-8")


def _embedded(content: object) -> str:
    """JSON that no character of ends the element that holds it, or begins a comment in it."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _content(document: PlanDocument, pictures: Sequence[GraphPicture], name: str) -> dict[str, Any]:
    strings = _Strings()
    made = made_rows(document)
    is_one = len(pictures) == 1
    step = {} if is_one else {"predicted peak": format_bytes(document.peak_bytes), "predicted time": format_us(document.time_us), **made}
    return {
        "file": plain(name),
        "heading": made["made for"],
        "step": list(step.items()),
        "bands": list(zip(BANDS, COLOURS, strict=True)),
        "workspace": _BAND[WORKSPACE],
        "graphs": [_graph(picture, made if is_one else {}, strings) for picture in pictures],
        "strings": list(strings.places),
    }


def _graph(picture: GraphPicture, made: dict[str, str], strings: _Strings) -> dict[str, Any]:
    plan, problem = picture.plan, picture.problem
    labels = {decision.value: decision.label for decision in plan.decisions}
    rows = {name: text for name, text in graph_rows(picture).items() if name != "note"}
    return {
        "title": picture.title,
        "unit": "kernels" if problem.fused else "ops",
        "tiles": _tiles(picture),
        "note": picture.note,
        "rows": list({**rows, **made}.items()),
        "budget": plan.budget_bytes,
        "values": {
            "name": [plain(value.name) for value in problem.values],
            "label": [strings.number(value.label or labels.get(value.index, "")) for value in problem.values],
            "bytes": [value.size_bytes for value in problem.values],
        },
        "ops": {
            "name": [plain(op.name) for op in problem.ops],
            "target": [strings.number(op.target) for op in problem.ops],
            "region": [strings.number(op.region) for op in problem.ops],
        },
        "before": _step(picture.before),
        "after": _step(picture.after),
        "frontier": picture.frontier,
        "chosen": (plan.peak_bytes, plan.time_us),
        "free": (picture.before.peak_bytes, picture.before.time_us),
        "regions": [
            (
                plain(row.name),
                ", ".join(f"{action.value} {count}" for action, count in row.actions),
                row.saved_bytes,
                row.recomputed_bytes,
                round(row.recompute_us, 3),
            )
            for row in merge_alike(region_rows(problem, plan))
        ],
        "decisions": [
            (one.value, plain(action_of(one)), round(one.recompute_us, 3), strings.number(one.reason))
            for one in largest_first(plan.decisions)
        ],
    }


def _tiles(picture: GraphPicture) -> list[tuple[str, str]]:
    plan, before = picture.plan, picture.before
    slower = f"{plan.time_us / before.time_us - 1:+.1%}" if before.time_us else "same"
    return [
        ("budget", "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)),
        ("predicted peak", format_bytes(plan.peak_bytes)),
        ("peak without a budget", format_bytes(before.peak_bytes)),
        ("least peak known", format_bytes(picture.least_peak_bytes)),
        ("predicted time", format_us(plan.time_us)),
        ("time, against no budget", slower),
    ]


def _step(step: StepPicture) -> dict[str, Any]:
    """Allocations as flat (value, first, last, band), workspaces as (position, bytes) where there are any."""
    live = step.live
    ranges = zip(live.ranges, step.range_bands, strict=True)
    return {
        "title": step.title,
        "forward": live.num_forward,
        "ops": live.ops,
        "us": [round(cost_us, 3) for cost_us in live.costs_us],
        "again": [position for position, is_again in enumerate(live.is_again) if is_again],
        "beside": [(position, size) for position, size in enumerate(live.beside_bytes) if size],
        "held": [(_BAND[band], size) for band, size in step.held],
        "ranges": [number for one, band in ranges for number in (one.value, one.first, one.last, _BAND[band])],
    }
