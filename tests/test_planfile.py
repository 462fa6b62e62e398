"""Plan files: what is written is read back, byte for byte; what is wrong is refused by the name of its field."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import problems
from torch import nn

import dyngran
from dyngran.compiler.options import Codegen
from dyngran.compiler.planfile import (
    PlanDocument,
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
from dyngran.passes.plan import Action, Decision, Plan, Schedule
from dyngran.passes.problem import Problem
from dyngran.passes.simulate import Simulator

COUNTS = st.integers(0, 2**50)
AMOUNTS = st.floats(0, 1e12, allow_nan=False)
TEXTS = st.text(max_size=20)
DECISIONS = st.builds(
    Decision,
    value=COUNTS,
    name=TEXTS,
    action=st.sampled_from(Action),
    reason=TEXTS,
    size_bytes=COUNTS,
    recompute_us=AMOUNTS,
    label=TEXTS,
    dimension=st.none() | st.integers(0, 8),
    fraction=st.none() | st.floats(0, 1),
    format=st.none() | TEXTS,
)
OPS = st.lists(st.integers(0, 10**5), max_size=6).map(tuple)
SCHEDULES = st.builds(Schedule, OPS, OPS, st.frozensets(COUNTS, max_size=4))
PLANS = st.builds(
    Plan,
    budget_bytes=st.none() | st.integers(1, 2**50),
    saved=st.just(frozenset()),
    decisions=st.lists(DECISIONS, max_size=6, unique_by=lambda decision: decision.value).map(tuple),
    peak_bytes=COUNTS,
    static_bytes=COUNTS,
    saved_bytes=COUNTS,
    time_us=AMOUNTS,
    overhead_us=AMOUNTS,
    recompute_us=AMOUNTS,
    num_recomputed=COUNTS,
    solver=TEXTS,
    order=TEXTS,
    truncated=st.booleans(),
    schedule=st.none() | SCHEDULES,
    bound_us=AMOUNTS,
    bound=TEXTS,
).map(
    lambda plan: replace(
        plan,
        bound_us=min(plan.bound_us, plan.time_us),
        saved=frozenset(one.value for one in plan.decisions if one.action is not Action.RECOMPUTE),
    )
)
CODEGENS = st.sampled_from([codegen.value for codegen in Codegen])
DOCUMENTS = st.builds(
    PlanDocument, plan=PLANS, fingerprint=TEXTS, codegen=CODEGENS, torch_version=TEXTS, device=TEXTS, dyngran_version=TEXTS
)

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
DOCUMENT = PlanDocument(plan=PLAN, fingerprint="ab12", codegen="eager", torch_version="2.13.0", device="cpu", dyngran_version="0.1.0")

GOLDEN = """{
 "bound": "",
 "bound_us": 0.0,
 "budget_bytes": 100,
 "codegen": "eager",
 "decisions": [
  {"action": "keep", "dimension": null, "format": null, "fraction": null, "label": "layer 0", "name": "mm", \
"reason": "dear to compute", "recompute_us": 0.0, "size_bytes": 32, "value": 1},
  {"action": "recompute", "dimension": null, "format": null, "fraction": null, "label": "", "name": "relu", \
"reason": "cheap", "recompute_us": 1.5, "size_bytes": 64, "value": 2},
  {"action": "keep", "dimension": null, "format": null, "fraction": null, "label": "", "name": "sum", \
"reason": "the caller holds it anyway", "recompute_us": 0.0, "size_bytes": 8, "value": 3}
 ],
 "device": "cpu",
 "dyngran": "0.1.0",
 "fingerprint": "ab12",
 "num_recomputed": 1,
 "order": "joint graph, recompute before first reader",
 "overhead_us": 1.5,
 "peak_bytes": 96,
 "recompute_us": 1.5,
 "saved": [1, 3],
 "saved_bytes": 40,
 "schedule": null,
 "schema": 1,
 "solver": "mutwo",
 "static_bytes": 16,
 "time_us": 12.25,
 "torch": "2.13.0",
 "truncated": false
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
    with pytest.raises(PlanFileError, match="'time_us' must be a number"):
        save_plan(path, replace(DOCUMENT, plan=replace(PLAN, time_us=time_us)))
    assert path.read_text() == GOLDEN
    assert os.listdir(tmp_path) == ["plan.json"]


ORDER = {"forward": [0, 1, 0], "backward": [2, 0], "saved": [1, 3]}
LATER = ("bound", "bound_us", "schedule")  # fields that older files do not have
WRONG: dict[str, list[Any]] = {
    "bound": [None, 3],
    "bound_us": [-1, None, math.nan, 12.3],
    "budget_bytes": ["8GiB", 0, True, 1.5],
    "codegen": [None, 1, "", "tvm", "Inductor"],
    "decisions": [{}, None, [1], [{}]],
    "device": [1],
    "dyngran": [None],
    "fingerprint": [[]],
    "num_recomputed": [-1, 1.0],
    "order": [3],
    "overhead_us": [-0.5, "1", math.nan, 10**400],
    "peak_bytes": [-1, None],
    "recompute_us": [math.inf, None],
    "saved": [[3, 1], [1, 1], [True], ["1"], [-1], None],
    "saved_bytes": [False],
    "schedule": [
        [],
        {},
        *({**ORDER, name: wrong} for name in ORDER for wrong in (None, [-1], ["0"], [True], [0.5], {})),
        {**ORDER, "saved": [3, 1]},
        {**ORDER, "saved": [1, 1]},
        {**ORDER, "more": []},
    ],
    "schema": [0, 2, "1", None, True],
    "solver": [None],
    "static_bytes": ["1"],
    "time_us": [None],
    "torch": [2.13],
    "truncated": [0, "no"],
}
WRONG_IN_DECISION: dict[str, list[Any]] = {
    "action": ["drop", 1, None, []],
    "dimension": [-1, 0.5],
    "format": [16],
    "fraction": [1.5, -0.1, "half"],
    "label": [None],
    "name": [7],
    "reason": [None],
    "recompute_us": ["fast"],
    "size_bytes": [-1],
    "value": ["mm", None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_each_wrong_field_is_named(name: str, value: object) -> None:
    fields = json.loads(GOLDEN)
    fields[name] = value
    with pytest.raises(PlanFileError, match=name):
        parse_plan(json.dumps(fields), source="plan.json")


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG_IN_DECISION.items() for value in values])
def test_each_wrong_field_of_a_decision_is_named(name: str, value: object) -> None:
    fields = json.loads(GOLDEN)
    fields["decisions"][1][name] = value
    with pytest.raises(PlanFileError, match=rf"decisions\[1\]: field '{name}'"):
        parse_plan(json.dumps(fields), source="plan.json")


def test_every_field_is_needed_and_no_other_is_known() -> None:
    document = json.loads(GOLDEN)
    assert set(WRONG) == set(document)
    assert set(WRONG_IN_DECISION) == set(document["decisions"][0])
    for fields, place in ((document, document), (document, document["decisions"][0])):
        for name in list(place):
            if place is document and name in LATER:
                continue
            value = place.pop(name)
            with pytest.raises(PlanFileError, match=f"'{name}' is missing"):
                parse_plan(json.dumps(fields), source="plan.json")
            place[name] = value
        place["limit"] = 1
        with pytest.raises(PlanFileError, match="'limit' is not known"):
            parse_plan(json.dumps(fields), source="plan.json")
        del place["limit"]


def test_a_file_of_before_schedules_and_bounds_is_read() -> None:
    fields = {name: value for name, value in json.loads(GOLDEN).items() if name not in LATER}
    assert parse_plan(json.dumps(fields), source="plan.json") == DOCUMENT


def test_a_schedule_and_a_bound_as_they_are_written() -> None:
    plan = replace(PLAN, schedule=Schedule((0, 1, 0), (2, 0), frozenset({3, 1})), bound_us=9.8, bound="relaxation: continuous program")
    text = dump_plan(replace(DOCUMENT, plan=plan))
    written = ' "schedule": {\n  "backward": [2, 0],\n  "forward": [0, 1, 0],\n  "saved": [1, 3]\n },\n'
    assert text == GOLDEN.replace(' "schedule": null,\n', written).replace(
        ' "bound": "",\n "bound_us": 0.0,\n', ' "bound": "relaxation: continuous program",\n "bound_us": 9.8,\n'
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
        (b"{}", "is missing"),
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
        (replace(PLAN, saved=frozenset({1, 3, 10**9, 7})), "value 7 is in field 'saved', and has no decision"),
        (replace(PLAN, decisions=PLAN.decisions[:2]), "value 3 is in field 'saved', and has no decision"),
        (replace(PLAN, decisions=changed(2, value=1)), 'value 1 ("sum") is decided twice'),
    ],
)
def test_a_file_whose_decisions_do_not_make_what_is_saved_is_refused(tmp_path: Path, plan: Plan, said: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(dump_plan(replace(DOCUMENT, plan=plan)))
    with pytest.raises(PlanFileError) as caught:
        load_plan(path)
    assert str(caught.value) == f"plan file {str(path)!r}: {said}."


@given(problem=problems(), data=st.data())
def test_whatever_is_decided_can_be_written_and_applied(problem: Problem, data: st.DataObject) -> None:
    """Small values, pinned ones, outputs, inputs and what the user checkpoints included; for both code generators."""
    simulator = Simulator(problem)
    saved = data.draw(st.sets(st.sampled_from(range(len(problem.values)))))
    plan = decide(simulator, simulator.evaluate(saved), budget_bytes=None, solver="test", fastest_us=0.0)
    document = replace(DOCUMENT, plan=plan, codegen="inductor" if problem.fused else "eager")
    again = parse_plan(dump_plan(document), source="test")
    assert again == document
    check_applicable(again, codegen=document.codegen, source="plan.json")


def test_a_plan_for_the_other_code_generator_is_not_applied() -> None:
    with pytest.raises(PlanMismatch, match=r"'plan\.json' was made for codegen 'eager', and this graph is compiled with 'inductor'"):
        check_applicable(DOCUMENT, codegen="inductor", source=Path("plan.json"))


def test_a_prescribed_order_is_not_applied_where_inductor_orders() -> None:
    document = replace(DOCUMENT, codegen="inductor", plan=replace(PLAN, schedule=Schedule((), ())))
    with pytest.raises(PlanMismatch, match=r"'plan\.json' prescribes the order of ops, and Inductor orders its kernels itself"):
        check_applicable(document, codegen="inductor", source="plan.json")
    check_applicable(replace(document, codegen="eager"), codegen="eager", source="plan.json")


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("action", [action for action in Action if action not in (Action.KEEP, Action.RECOMPUTE)])
def test_an_action_that_is_not_built_is_read_and_not_applied(action: Action, is_saved: bool) -> None:
    saved = PLAN.saved if is_saved else PLAN.saved - {1}
    document = replace(DOCUMENT, plan=replace(PLAN, saved=saved, decisions=changed(0, action=action)))
    assert parse_plan(dump_plan(document), source="test") == document
    with pytest.raises(PlanFileError, match=rf"'plan\.json': value 1 \(\"mm\"\) has action '{action.value}'.*only keep or recompute"):
        check_applicable(document, codegen="eager", source="plan.json")


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
