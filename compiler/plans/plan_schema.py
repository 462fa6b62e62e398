"""What a plan file may hold: the forms of its JSON, from which the shipped schema (`plan.schema.json`) is made and by which files are read.

Rule of compatibility: a reader takes its own schema number and refuses others. Within one number fields may be added only with a default,
so that older files stay readable; what older readers may pass over stands in ``extra``, which they keep and do not read. Anything else
raises the number.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from dyngran.compiler.options import Codegen, Outputs
from dyngran.passes.plan import Action
from dyngran.passes.problem import Kind, Side

SCHEMA = 2
MAX_COUNT = 2**63 - 1
MAX_AMOUNT = 1e300  # keeps infinity out

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Amount = Annotated[float, Meta(ge=0.0, le=MAX_AMOUNT)]
Rate = Annotated[float, Meta(gt=0.0, le=MAX_AMOUNT)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]


class DecisionForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """One value's action; ``value`` numbers the values of the graph."""

    action: Action
    name: str
    reason: str
    size_bytes: Count
    value: Count
    dimension: Count | None = None
    error: str = ""
    format: str | None = None
    fraction: Fraction | None = None
    label: str = ""
    recompute_us: Amount = 0.0
    stored_bytes: Count | None = None


class ScheduleForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """The order of ops, where a plan prescribes it."""

    backward: list[Count]
    forward: list[Count]
    saved: list[Count]


class PlanForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """Decisions and prediction; the fields are those of `dyngran.Plan`."""

    decisions: list[DecisionForm]
    order: str
    overhead_us: Amount
    num_recomputed: Count
    peak_bytes: Count
    recompute_us: Amount
    saved: list[Count]
    saved_bytes: Count
    solver: str
    static_bytes: Count
    time_us: Amount
    bound: str = ""
    bound_us: Amount = 0.0
    budget_bytes: Positive | None = None
    schedule: ScheduleForm | None = None
    truncated: bool = False


class ValueForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """One storage of the joint graph, in order; who produces it is said by the ops."""

    kind: Kind
    name: str
    size_bytes: Count
    label: str = ""


class OpForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """One op of the joint graph, in order; ``reads`` and ``writes`` number values."""

    cost_us: Amount
    name: str
    reads: list[Count]
    side: Side
    target: str
    writes: list[Count]
    cost_source: str = "roofline"
    fusible: bool = False
    never_saved: bool = False
    num_elements: Count = 0
    pinned: str = ""
    reduction: bool = False
    region: str = ""
    rerun_bytes: Count = 0
    workspace_bytes: Count = 0


class TransferForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """What storing or loading a value costs."""

    cost_us: Amount
    cost_source: str = "roofline"
    fusible: bool = False
    num_elements: Count = 0
    reduction: bool = False
    target: str = ""
    workspace_bytes: Count = 0


class OfferForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """One way to store a value other than as it is. What is stored is a value of its own, numbered after those of the graph."""

    action: Action
    format: str
    load: TransferForm
    size_bytes: Count
    store: TransferForm
    value: Count
    again: list[Count] = []
    barred: list[Count] = []
    dimension: Count | None = None
    error: str = ""
    evidence: str = ""
    fetch: Count | None = None
    fraction: Fraction | None = None
    copy_us: Amount = 0.0
    parts: list[Count] = []
    stored_after: Count | None = None


class ProblemForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """The graph that the plan is for, with sizes and costs: what the simulator needs to draw the step again."""

    bytes_per_us: Rate
    forward_outputs: list[Count]
    fused: bool
    gradients: list[Count]
    keep_below_bytes: Count
    launch_us: Amount
    ops: list[OpForm]
    values: list[ValueForm]
    forms: list[OfferForm] = []
    static_bytes: dict[Kind, Count] = {}
    stock: dict[str, list[Count]] = {}


class GraphForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """One graph of the step; ``frontier`` are (peak_bytes, time_us) of other plans for it, least peak first; ``runs``: how often it runs in
    a step."""

    fingerprint: str
    plan: PlanForm
    problem: ProblemForm
    frontier: list[tuple[Count, Amount]] = []
    runs: Positive = 1


class BreakForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """A graph break: why, and the line of the user's program."""

    reason: str
    where: str


class SettingsForm(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How the plan was asked for, so that `dyngran-plan check` can ask again."""

    batch: Positive | None = None
    budget: str | None = None
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] | None = None
    dynamic: bool = False
    keep_below: Count | None = None
    offload: bool | Positive = False
    outputs: Outputs = Outputs.HELD
    pack: bool = True
    profile: str | None = None
    slice: bool = True
    solver: str = "auto"
    storage: tuple[str, ...] = ()


class DocumentForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """A plan file: one step, its graphs in the order in which forward runs them."""

    codegen: Codegen
    device: str
    dyngran: str
    graphs: Annotated[list[GraphForm], Meta(min_length=1)]
    origin: Annotated[str, Meta(pattern="^(exact|portable)$")]
    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)]
    torch: str
    settings: SettingsForm = SettingsForm()
    breaks: list[BreakForm] = []
    extra: dict[str, Any] = {}


def schema_text() -> str:
    """The JSON Schema (draft 2020-12) of plan files, as `plan.schema.json` ships it."""
    schema = msgspec.json.schema(DocumentForm)
    return (
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "dyngran plan", **schema}, indent=1, sort_keys=True)
        + "\n"
    )


if __name__ == "__main__":
    (Path(__file__).parent / "plan.schema.json").write_text(schema_text())
