"""Plan files: what is written is read back, byte for byte; what is wrong is refused by the name of its field."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import Builder, problems
from torch import nn

import dyngran
from dyngran.compiler.options import Codegen, Outputs
from dyngran.compiler.plans import plan_schema
from dyngran.compiler.plans.planfile import (
    GraphBreak,
    GraphPlan,
    Origin,
    PlanDocument,
    Settings,
    check_applicable,
    dump_plan,
    for_file,
    for_problem,
    load_plan,
    parse_plan,
    save_plan,
)
from dyngran.passes.carry import with_carried
from dyngran.passes.decide import decide
from dyngran.passes.errors import PlanFileError, PlanMismatch
from dyngran.passes.fingerprint import fingerprint
from dyngran.passes.plan import Action, Decision, Plan, Schedule
from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.simulate import Simulator

COUNTS = st.integers(0, 2**50)
AMOUNTS = st.floats(0, 1e12, allow_nan=False)
TEXTS = st.text(max_size=20)


@st.composite
def graph_plans(draw: st.DrawFn) -> GraphPlan:
    """A plan of any problem, with figures that need not fit it: a file holds what it is given."""
    problem = draw(problems())
    values = draw(st.lists(st.sampled_from(problem.values), max_size=6, unique_by=lambda value: value.index))
    decisions = tuple(
        Decision(
            value=value.index,
            name=draw(TEXTS),
            action=draw(st.sampled_from([Action.KEEP, Action.RECOMPUTE])),
            reason=draw(TEXTS),
            size_bytes=value.size_bytes,
            recompute_us=draw(AMOUNTS),
            label=draw(TEXTS),
            dimension=draw(st.none() | st.integers(0, 8)),
            fraction=draw(st.none() | st.floats(0, 1)),
            format=draw(st.none() | TEXTS),
        )
        for value in values
    )
    orders = st.lists(st.integers(0, len(problem.ops) - 1), max_size=6).map(tuple) if problem.ops else st.just(())
    time_us = draw(AMOUNTS)
    plan = Plan(
        budget_bytes=draw(st.none() | st.integers(1, 2**50)),
        saved=frozenset(one.value for one in decisions if one.action is not Action.RECOMPUTE),
        decisions=decisions,
        **{name: draw(COUNTS) for name in ("peak_bytes", "static_bytes", "saved_bytes", "num_recomputed")},
        **{name: draw(AMOUNTS) for name in ("overhead_us", "recompute_us")},
        **{name: draw(TEXTS) for name in ("solver", "order", "bound")},
        time_us=time_us,
        truncated=draw(st.booleans()),
        schedule=draw(st.none() | st.builds(Schedule, orders, orders, st.frozensets(COUNTS, max_size=4))),
        bound_us=time_us * draw(st.floats(0, 1)),
    )
    return GraphPlan(
        problem=problem, plan=plan, fingerprint=draw(TEXTS), frontier=tuple(draw(st.lists(st.tuples(COUNTS, AMOUNTS), max_size=3)))
    )


SETTINGS = st.builds(
    Settings,
    batch=st.none() | st.integers(1, 2**20),
    budget=st.none() | TEXTS,
    dtype=st.none() | st.sampled_from(["bf16", "fp16", "fp32", "fp64"]),
    dynamic=st.booleans(),
    keep_below=st.none() | COUNTS,
    outputs=st.sampled_from(Outputs),
    profile=st.none() | TEXTS,
    solver=TEXTS,
)
DOCUMENTS = st.builds(
    PlanDocument,
    graphs=st.lists(graph_plans(), min_size=1, max_size=2).map(tuple),
    codegen=st.sampled_from([codegen.value for codegen in Codegen]),
    torch_version=TEXTS,
    device=TEXTS,
    origin=st.sampled_from(Origin),
    settings=SETTINGS,
    breaks=st.lists(st.builds(GraphBreak, TEXTS, TEXTS), max_size=2).map(tuple),
    dyngran_version=TEXTS,
    extra=st.dictionaries(TEXTS, st.none() | st.integers(-5, 5) | TEXTS, max_size=2),
)

BUILD = Builder()
WEIGHT = BUILD.given(16)
PRODUCT = BUILD.op([WEIGHT], 32, cost_us=4.0, region="layer")
CURVE = BUILD.op([PRODUCT], 64, cost_us=1.5, target="relu", fusible=True)
TOTAL = BUILD.op([CURVE], 8, cost_us=1.0, target="sum", kind=Kind.OUTPUT)
BUILD.outputs.add(TOTAL)
TANGENT = BUILD.given(8, Kind.TANGENT)
BUILD.gradients.add(BUILD.op([TANGENT, PRODUCT, CURVE], 16, cost_us=5.0, side=Side.BACKWARD, kind=Kind.GRADIENT))
PLAN = Plan(
    budget_bytes=100,
    saved=frozenset({3, 1}),
    decisions=(
        Decision(value=1, name="mm", action=Action.KEEP, reason="dear to compute", size_bytes=32, label="layer 0"),
        Decision(value=2, name="relu", action=Action.RECOMPUTE, reason="cheap", size_bytes=64, recompute_us=1.5),
        Decision(value=3, name="sum", action=Action.KEEP, reason="the caller holds it anyway", size_bytes=8),
    ),
    peak_bytes=96,
    static_bytes=16,
    saved_bytes=40,
    time_us=12.25,
    overhead_us=1.5,
    recompute_us=1.5,
    num_recomputed=1,
    solver="mutwo",
)
DOCUMENT = PlanDocument(
    graphs=(GraphPlan(problem=BUILD.build(), plan=PLAN, fingerprint="ab12", frontier=((96, 12.25),)),),
    codegen="eager",
    torch_version="2.13.0",
    device="cpu",
    settings=Settings(budget="100B", profile="cpu"),
    dyngran_version="0.1.0",
)


VALIDATOR = jsonschema.Draft202012Validator(json.loads(plan_schema.schema_text()))


def with_plan(plan: Plan) -> PlanDocument:
    """`DOCUMENT` with another plan for its graph."""
    return replace(DOCUMENT, graphs=(replace(DOCUMENT.graphs[0], plan=plan),))


GOLDEN = """{
 "breaks": [],
 "codegen": "eager",
 "device": "cpu",
 "dyngran": "0.1.0",
 "extra": {},
 "graphs": [
  {
   "fingerprint": "ab12",
   "frontier": [
    [96, 12.25]
   ],
   "plan": {
    "bound": "",
    "bound_us": 0.0,
    "budget_bytes": 100,
    "decisions": [
     {"action": "keep", "label": "layer 0", "name": "mm", "reason": "dear to compute", "size_bytes": 32, "value": 1},
     {"action": "recompute", "name": "relu", "reason": "cheap", "recompute_us": 1.5, "size_bytes": 64, "value": 2},
     {"action": "keep", "name": "sum", "reason": "the caller holds it anyway", "size_bytes": 8, "value": 3}
    ],
    "num_recomputed": 1,
    "order": "joint graph, recompute before first reader",
    "overhead_us": 1.5,
    "peak_bytes": 96,
    "recompute_us": 1.5,
    "saved": [1, 3],
    "saved_bytes": 40,
    "schedule": null,
    "solver": "mutwo",
    "static_bytes": 16,
    "time_us": 12.25,
    "truncated": false
   },
   "problem": {
    "bytes_per_us": 10000.0,
    "forward_outputs": [3],
    "fused": false,
    "gradients": [5],
    "keep_below_bytes": 0,
    "launch_us": 1.0,
    "ops": [
     {"cost_us": 4.0, "name": "mm_0", "num_elements": 32, "reads": [0], "region": "layer", "side": "forward", "target": "mm", \
"writes": [1]},
     {"cost_us": 1.5, "fusible": true, "name": "relu_1", "num_elements": 64, "reads": [1], "side": "forward", "target": "relu", \
"writes": [2]},
     {"cost_us": 1.0, "name": "sum_2", "num_elements": 8, "reads": [2], "side": "forward", "target": "sum", "writes": [3]},
     {"cost_us": 5.0, "name": "mm_3", "num_elements": 16, "reads": [4, 1, 2], "side": "backward", "target": "mm", "writes": [5]}
    ],
    "static_bytes": {"parameter": 16},
    "stock": {},
    "values": [
     {"kind": "parameter", "name": "given_0", "size_bytes": 16},
     {"kind": "activation", "label": "layer:mm", "name": "value_1", "size_bytes": 32},
     {"kind": "activation", "label": ":relu", "name": "value_2", "size_bytes": 64},
     {"kind": "output", "label": ":sum", "name": "value_3", "size_bytes": 8},
     {"kind": "tangent", "name": "given_4", "size_bytes": 8},
     {"kind": "gradient", "label": ":mm", "name": "value_5", "size_bytes": 16}
    ]
   },
   "runs": 1
  }
 ],
 "origin": "exact",
 "schema": 2,
 "settings": {"budget": "100B", "profile": "cpu"},
 "torch": "2.13.0"
}
"""


@given(document=DOCUMENTS)
def test_round_trip_is_exact_and_byte_stable(document: PlanDocument) -> None:
    text = dump_plan(document)
    again = parse_plan(text, source="test")
    assert again == document
    assert dump_plan(again) == text
    assert text.isascii()


def test_the_document_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(path, DOCUMENT)
    assert path.read_bytes() == GOLDEN.encode()
    assert load_plan(str(path)) == DOCUMENT


def test_saving_replaces_the_whole_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("x" * 100_000)
    save_plan(path, DOCUMENT)
    assert path.read_text() == GOLDEN
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("time_us", [math.nan, math.inf, -1.0])
def test_a_plan_that_no_file_can_hold_is_not_written(tmp_path: Path, time_us: float) -> None:
    path = tmp_path / "plan.json"
    save_plan(path, DOCUMENT)
    with pytest.raises(PlanFileError, match=r"plan\.time_us: Expected `float`"):
        save_plan(path, with_plan(replace(PLAN, time_us=time_us)))
    assert path.read_text() == GOLDEN
    assert os.listdir(tmp_path) == ["plan.json"]


ORDER = {"forward": [0, 1, 0], "backward": [2, 0], "saved": [1, 3]}
GRAPH, PLANNED, ASKED = ("graphs", 0), ("graphs", 0, "plan"), ("graphs", 0, "problem")
Place = tuple[str | int, ...]
WRONG: dict[Place, list[Any]] = {
    ("breaks",): [None, [{}], [{"reason": "x", "where": 1}]],
    ("codegen",): [None, 1, "", "tvm", "Inductor"],
    ("device",): [1],
    ("dyngran",): [None],
    ("extra",): [[], None],
    ("graphs",): [{}, [], None, [1], [{}]],
    ("origin",): ["approximate", None],
    ("schema",): [0, 1, 3, "2", None, True],
    ("settings",): [None, {"batch": 0}, {"outputs": "kept"}, {"more": 1}],
    ("torch",): [2.13],
    (*GRAPH, "fingerprint"): [[]],
    (*GRAPH, "frontier"): [[[1]], [[-1, 2.0]], [["1", 2.0]]],
    (*GRAPH, "runs"): [0, None],
    (*GRAPH, "plan"): [None, {}],
    (*GRAPH, "problem"): [None, {}],
    (*PLANNED, "bound"): [None, 3],
    (*PLANNED, "bound_us"): [-1, None, math.nan, 12.3],
    (*PLANNED, "budget_bytes"): ["8GiB", 0, True, 1.5],
    (*PLANNED, "decisions"): [{}, None, [1], [{}]],
    (*PLANNED, "num_recomputed"): [-1, 1.5],
    (*PLANNED, "order"): [3],
    (*PLANNED, "overhead_us"): [-0.5, "1", math.nan, 10**400],
    (*PLANNED, "peak_bytes"): [-1, None],
    (*PLANNED, "recompute_us"): [math.inf, None],
    (*PLANNED, "saved"): [[3, 1], [1, 1], [True], ["1"], [-1], None, [99]],
    (*PLANNED, "saved_bytes"): [False],
    (*PLANNED, "schedule"): [
        [],
        {},
        *({**ORDER, name: wrong} for name in ORDER for wrong in (None, [-1], ["0"], [True], [0.5], {})),
        {**ORDER, "saved": [3, 1]},
        {**ORDER, "saved": [1, 1]},
        {**ORDER, "forward": [9]},
        {**ORDER, "more": []},
    ],
    (*PLANNED, "solver"): [None],
    (*PLANNED, "static_bytes"): ["1"],
    (*PLANNED, "time_us"): [None],
    (*PLANNED, "truncated"): [0, "no"],
    (*ASKED, "bytes_per_us"): [0, -1.0, None],
    (*ASKED, "forward_outputs"): [[99], [3, 3], None],
    (*ASKED, "fused"): [1],
    (*ASKED, "gradients"): [[6], [-1]],
    (*ASKED, "keep_below_bytes"): [-1],
    (*ASKED, "launch_us"): [math.nan],
    (*ASKED, "ops"): [None, [{}]],
    (*ASKED, "static_bytes"): [{"weights": 1}, {"parameter": -1}],
    (*ASKED, "stock"): [{"min-cut": [99]}, {"min-cut": [3, 1]}, []],
    (*ASKED, "values"): [None, [], [{}]],
    (*PLANNED, "decisions", 1, "action"): ["drop", 1, None, []],
    (*PLANNED, "decisions", 1, "dimension"): [-1, 0.5],
    (*PLANNED, "decisions", 1, "format"): [16],
    (*PLANNED, "decisions", 1, "fraction"): [1.5, -0.1, "half"],
    (*PLANNED, "decisions", 1, "label"): [None],
    (*PLANNED, "decisions", 1, "name"): [7],
    (*PLANNED, "decisions", 1, "reason"): [None],
    (*PLANNED, "decisions", 1, "recompute_us"): ["fast"],
    (*PLANNED, "decisions", 1, "size_bytes"): [-1, 65],
    (*PLANNED, "decisions", 1, "value"): ["mm", None, 99],
    (*ASKED, "ops", 1, "reads"): [[99], [3], [-1], "0"],
    (*ASKED, "ops", 1, "writes"): [[99], [1], None],
    (*ASKED, "ops", 1, "side"): ["left"],
    (*ASKED, "ops", 1, "cost_us"): [-1.0, math.inf],
    (*ASKED, "values", 1, "kind"): ["weights"],
    (*ASKED, "values", 1, "size_bytes"): [-1, 33],
}
OPTIONAL = (
    "breaks",
    "extra",
    "frontier",
    "runs",
    "settings",
    "bound",
    "bound_us",
    "budget_bytes",
    "schedule",
    "truncated",
    "static_bytes",
    "stock",
)


def at(document: Any, place: Place) -> Any:
    for key in place:
        document = document[key]
    return document


@pytest.mark.parametrize(("place", "value"), [(place, value) for place, values in WRONG.items() for value in values])
def test_whatever_is_wrong_is_told_with_its_place(place: Place, value: object) -> None:
    document = json.loads(GOLDEN)
    at(document, place[:-1])[place[-1]] = value
    with pytest.raises(PlanFileError, match=r"^plan file 'plan\.json'.*\.$") as caught:
        parse_plan(json.dumps(document), source="plan.json")
    told = str(caught.value)
    assert "graphs[0]" in told if place[0] == "graphs" and len(place) > 1 else str(place[0]) in told


def test_a_wrong_field_is_named_with_the_way_to_it() -> None:
    document = json.loads(GOLDEN)
    document["graphs"][0]["plan"]["decisions"][1]["action"] = "drop"
    with pytest.raises(PlanFileError) as caught:
        parse_plan(json.dumps(document), source="plan.json")
    assert str(caught.value) == "plan file 'plan.json': graphs[0].plan.decisions[1].action: Invalid enum value 'drop'."


def test_every_field_is_needed_and_no_other_is_known() -> None:
    document = json.loads(GOLDEN)
    for place in ((), GRAPH, PLANNED, ASKED, (*ASKED, "ops", 1), (*ASKED, "values", 1), (*PLANNED, "decisions", 1)):
        fields = at(document, place)
        for name in list(fields):
            if name in OPTIONAL or (len(place) > 3 and name in ("label", "region", "fusible", "num_elements", "recompute_us")):
                continue
            value = fields.pop(name)
            with pytest.raises(PlanFileError, match=name if name == "schema" else f"missing required field `{name}`"):
                parse_plan(json.dumps(document), source="plan.json")
            fields[name] = value
        fields["limit"] = 1
        with pytest.raises(PlanFileError, match="unknown field `limit`"):
            parse_plan(json.dumps(document), source="plan.json")
        del fields["limit"]


def test_fields_with_a_default_may_be_missing() -> None:
    """The rule of compatibility: a file of before such a field is read as if it stood there with its default."""
    document = json.loads(GOLDEN)
    for name in ("breaks", "extra"):
        del document[name]
    del document["graphs"][0]["plan"]["bound"]
    assert parse_plan(json.dumps(document), source="plan.json") == DOCUMENT


def test_what_other_versions_add_is_kept() -> None:
    document = json.loads(GOLDEN)
    document["extra"] = {"guard": {"rungs": [1, 2]}}
    assert json.loads(dump_plan(parse_plan(json.dumps(document), source="plan.json"))) == document


def test_the_shipped_schema_is_that_of_the_reader() -> None:
    shipped = (Path(plan_schema.__file__).parent / "plan.schema.json").read_text()
    assert shipped == plan_schema.schema_text(), "write it anew: python -m dyngran.compiler.plans.plan_schema"
    jsonschema.validate(json.loads(GOLDEN), json.loads(shipped))


@given(document=DOCUMENTS)
def test_what_is_written_is_valid_by_the_shipped_schema(document: PlanDocument) -> None:
    VALIDATOR.validate(json.loads(dump_plan(document)))


def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with open(path, "wb") as file:
        file.truncate(200 * 2**20)
    with pytest.raises(PlanFileError, match=r"has 200 MiB, and a plan file has at most 64 MiB"):
        load_plan(path)


def test_a_file_of_another_schema_says_what_to_do() -> None:
    for schema, advice in ((99, "Install a newer dyngran"), (1, "Make the plan again")):
        with pytest.raises(PlanFileError, match=rf"has schema {schema}, and dyngran .* reads schema 2\. {advice}"):
            parse_plan(json.dumps({"schema": schema}), source="plan.json")


def test_a_schedule_and_a_bound_as_they_are_written() -> None:
    plan = replace(PLAN, schedule=Schedule((0, 1, 0), (2, 0), frozenset({3, 1})), bound_us=9.8, bound="relaxation: continuous program")
    text = dump_plan(with_plan(plan))
    written = '    "schedule": {\n     "backward": [2, 0],\n     "forward": [0, 1, 0],\n     "saved": [1, 3]\n    },\n'
    assert text == GOLDEN.replace('    "schedule": null,\n', written).replace(
        '    "bound": "",\n    "bound_us": 0.0,\n', '    "bound": "relaxation: continuous program",\n    "bound_us": 9.8,\n'
    )
    assert parse_plan(text, source="plan.json").plan == plan
    assert plan.gap == pytest.approx(0.2)


def test_the_gap_of_a_plan() -> None:
    assert replace(PLAN, bound_us=PLAN.time_us).gap == 0
    assert PLAN.gap == 1
    assert replace(PLAN, time_us=0.0).gap == 0


@given(problem=problems(), data=st.data())
def test_a_file_numbers_the_ops_of_the_graph_whatever_is_carried(problem: Problem, data: st.DataObject) -> None:
    """With something carried, the problem has an op before all others and one that ends forward; the file knows neither."""
    parts = [data.draw(st.lists(st.sampled_from(range(len(problem.ops)))).map(tuple)) for _ in range(2)]
    plan = replace(PLAN, schedule=Schedule(parts[0], parts[1], frozenset({2})))
    carrying = with_carried(problem, 64)
    assert for_file(plan, problem) == for_problem(plan, problem) == plan
    there = for_problem(plan, carrying)
    assert there.schedule is not None
    order = [carrying.ops[op].name for op in (*there.schedule.forward, *there.schedule.backward)]
    names = [[problem.ops[op].name for op in part] for part in parts]
    assert order == [carrying.ops[0].name, *names[0], carrying.ops[-1].name, *names[1]]
    assert for_file(there, carrying) == plan


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a JSON document"),
        (b"{", "not a JSON document"),
        (b"\x80\x04K\x01.", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[" * 100_000, "not a JSON document"),
        (b'{"schema": 1, "schema": 1}', "stands twice"),
        (b'{"schema": ' + b"9" * 5000 + b"}", "not a JSON document"),
        (b"[]", "one JSON object"),
        (b"3", "one JSON object"),
        (b'{"schema": 99}', "schema 99, and dyngran"),
        (b"{}", "schema null"),
    ],
)
def test_what_is_no_plan_file_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanFileError, match=said):
        load_plan(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, "a\0b"):
        with pytest.raises(PlanFileError, match="cannot be read"):
            load_plan(path)


def changed(position: int, **fields: Any) -> tuple[Decision, ...]:
    return tuple(replace(one, **fields) if index == position else one for index, one in enumerate(PLAN.decisions))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (replace(PLAN, saved=frozenset({3})), """value 1 ("mm") is kept by its decision, and is not in field 'saved'"""),
        (replace(PLAN, saved=frozenset({1, 2, 3})), """value 2 ("relu") is in field 'saved', and its decision is to recompute it"""),
        (replace(PLAN, saved=frozenset({1, 3, 4, 5})), "value 4 is in field 'saved', and has no decision"),
        (replace(PLAN, decisions=PLAN.decisions[:2]), "value 3 is in field 'saved', and has no decision"),
        (replace(PLAN, decisions=changed(2, value=1, size_bytes=32)), 'value 1 ("sum") is decided twice'),
    ],
)
def test_a_file_whose_decisions_do_not_make_what_is_saved_is_refused(tmp_path: Path, plan: Plan, said: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(dump_plan(with_plan(plan)))
    with pytest.raises(PlanFileError) as caught:
        load_plan(path)
    assert str(caught.value) == f"plan file {str(path)!r}, graphs[0]: {said}."


@given(problem=problems(), data=st.data())
def test_whatever_is_decided_can_be_written_and_applied(problem: Problem, data: st.DataObject) -> None:
    """Small values, pinned ones, outputs, inputs and what the user checkpoints included; for both code generators."""
    simulator = Simulator(problem)
    saved = data.draw(st.sets(st.sampled_from(range(len(problem.values)))))
    plan = decide(simulator, simulator.evaluate(saved), budget_bytes=None, solver="test", fastest_us=0.0)
    graph = GraphPlan(problem=problem, plan=plan, fingerprint=fingerprint(problem))
    document = replace(DOCUMENT, graphs=(graph,), codegen="inductor" if problem.fused else "eager")
    again = parse_plan(dump_plan(document), source="test")
    assert again == document
    check_applicable(again, codegen=document.codegen, source="plan.json")


def test_a_plan_for_the_other_code_generator_is_not_applied() -> None:
    with pytest.raises(PlanMismatch, match=r"'plan\.json' was made for codegen 'eager', and this graph is compiled with 'inductor'"):
        check_applicable(DOCUMENT, codegen="inductor", source=Path("plan.json"))


def test_a_prescribed_order_is_not_applied_where_inductor_orders() -> None:
    document = replace(with_plan(replace(PLAN, schedule=Schedule((), ()))), codegen="inductor")
    with pytest.raises(PlanMismatch, match=r"'plan\.json' prescribes the order of ops, and Inductor orders its kernels itself"):
        check_applicable(document, codegen="inductor", source="plan.json")
    check_applicable(replace(document, codegen="eager"), codegen="eager", source="plan.json")


BAD_PATHS = ["", ".", "/", "missing/plan.json", "a\0b", "x" * 300, b"plan.json", None, 3]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanFileError, match=r"^plan file .* cannot be written: .*[^.]\.$"):
        save_plan(path, DOCUMENT)
    assert os.listdir(tmp_path) == []


def test_the_face_saves_a_plan_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.GELU()), backend="dyngran", options={"codegen": "eager"})
    compiled(torch.ones(2, 4)).sum().backward()
    for path in ("", "missing/plan.json", str(tmp_path)):
        with pytest.raises(PlanFileError, match="cannot be written"):
            dyngran.save_plan(path, compiled)
    assert os.listdir(tmp_path) == []
    assert dyngran.save_plan("plan.json", compiled) == Path("plan.json")
    document = load_plan("plan.json")
    check_applicable(document, codegen="eager", source="plan.json")


@given(text=st.text(max_size=40) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_text_is_a_plan_or_refused(text: str) -> None:
    with pytest.raises(PlanFileError):
        parse_plan(text, source="plan.json")
