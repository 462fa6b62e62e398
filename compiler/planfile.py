"""Plan files: one JSON document, versioned, in a stable order that a diff can show. Loading reads data and never runs code."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dyngran.compiler.options import Codegen
from dyngran.compiler.version import VERSION
from dyngran.passes.errors import PlanFileError, PlanMismatch
from dyngran.passes.plan import Action, Decision, Plan, Schedule
from dyngran.passes.problem import Kind, Problem

SCHEMA = 1
BOUND_TOLERANCE = 1e-6  # of the time: bound and time are sums of the same floats in another order
APPLICABLE = (Action.KEEP, Action.RECOMPUTE)  # what this version carries out; the schema holds every action


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDocument:
    """A plan with what it was made for.

    Attributes:
        plan: the decisions and their prediction; its schedule numbers the ops of the graph alone (`for_file`).
        fingerprint: of the problem (`passes.fingerprint`); codegen: "inductor" or "eager".
        torch_version, device: where it was made; dyngran_version: who made it.
    """

    plan: Plan
    fingerprint: str
    codegen: str
    torch_version: str
    device: str
    dyngran_version: str = VERSION


@dataclass(frozen=True, slots=True)
class _Form:
    """What a field must be: in words, and as a test."""

    expected: str
    accepts: Callable[[Any], bool]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_amount(value: Any) -> bool:
    try:
        return (_is_int(value) or isinstance(value, float)) and math.isfinite(value) and value >= 0
    except OverflowError:  # an int beyond the largest float
        return False


def _optional(form: _Form) -> _Form:
    return _Form(f"{form.expected}, or null", lambda value: value is None or form.accepts(value))


_TEXT = _Form("a string", lambda value: isinstance(value, str))
_BOOL = _Form("true or false", lambda value: isinstance(value, bool))
_COUNT = _Form("an integer of at least 0", _is_count)
_POSITIVE = _Form("an integer of at least 1", lambda value: _is_int(value) and value > 0)
_AMOUNT = _Form("a number of at least 0", _is_amount)
_FRACTION = _Form("a number from 0 to 1", lambda value: _is_amount(value) and value <= 1)
_ACTION = _Form("one of " + ", ".join(action.value for action in Action), lambda value: value in [action.value for action in Action])
_CODEGEN = _Form("one of " + ", ".join(codegen.value for codegen in Codegen), lambda value: value in [codegen.value for codegen in Codegen])
_LIST = _Form("a list", lambda value: isinstance(value, list))
_SAVED = _Form(
    "a list of integers of at least 0, ascending, none twice",
    lambda value: isinstance(value, list) and all(map(_is_count, value)) and value == sorted(set(value)),
)

_SCHEDULE = _Form(
    "an object of three lists of integers of at least 0, 'forward', 'backward' and 'saved', the last ascending and none twice",
    lambda value: (
        isinstance(value, dict)
        and value.keys() == {"forward", "backward", "saved"}
        and all(isinstance(part, list) and all(map(_is_count, part)) for part in value.values())
        and _SAVED.accepts(value["saved"])
    ),
)

_PLAN_FIELDS: Mapping[str, _Form] = {
    "bound": _TEXT,
    "bound_us": _AMOUNT,
    "budget_bytes": _optional(_POSITIVE),
    "num_recomputed": _COUNT,
    "order": _TEXT,
    "overhead_us": _AMOUNT,
    "peak_bytes": _COUNT,
    "recompute_us": _AMOUNT,
    "saved_bytes": _COUNT,
    "solver": _TEXT,
    "static_bytes": _COUNT,
    "time_us": _AMOUNT,
    "truncated": _BOOL,
}
_DOCUMENT_FIELDS: Mapping[str, _Form] = {
    **_PLAN_FIELDS,
    "codegen": _CODEGEN,
    "decisions": _LIST,
    "device": _TEXT,
    "dyngran": _TEXT,
    "fingerprint": _TEXT,
    "saved": _SAVED,
    "schedule": _optional(_SCHEDULE),
    "schema": _POSITIVE,
    "torch": _TEXT,
}
_LATER_FIELDS: Mapping[str, Any] = {"bound": "", "bound_us": 0.0, "schedule": None}  # what files of before these fields stand for
_DECISION_FIELDS: Mapping[str, _Form] = {
    "action": _ACTION,
    "dimension": _optional(_COUNT),
    "format": _optional(_TEXT),
    "fraction": _optional(_FRACTION),
    "label": _TEXT,
    "name": _TEXT,
    "reason": _TEXT,
    "recompute_us": _AMOUNT,
    "size_bytes": _COUNT,
    "value": _COUNT,
}


def save_plan(path: str | os.PathLike[str], document: PlanDocument) -> None:
    """Write ``document`` to ``path``: whole or not at all, whoever reads meanwhile.

    Raises:
        PlanFileError: the plan holds what a plan file cannot (a time that is no number, say), or the path cannot be written;
            what stands there stays.
    """
    text = dump_plan(document)
    parse_plan(text, source=str(path))
    try:
        _replace_file(Path(path), text)
    except (OSError, TypeError, ValueError) as error:  # TypeError, ValueError: no path, or one that no file can have
        raise PlanFileError(f"plan file {str(path)!r} cannot be written: {_cause(error)}.") from error


def _replace_file(target: Path, text: str) -> None:
    if not target.name:
        raise ValueError("the path names no file")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def load_plan(path: str | os.PathLike[str]) -> PlanDocument:
    """Read a plan file.

    Raises:
        PlanFileError: no such file, not JSON, another schema version, a field that is missing, unknown or wrong, or decisions that do
            not make what is saved.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path that no file can have
        raise PlanFileError(f"plan file {os.fspath(path)!r} cannot be read: {_cause(error)}.") from error
    return parse_plan(text, source=os.fspath(path))


def check_applicable(document: PlanDocument, *, codegen: str, source: str | os.PathLike[str]) -> None:
    """Refuse a plan that this version cannot carry out with ``codegen``; ``source`` names its file.

    Raises:
        PlanMismatch: the plan was made for another code generator, or prescribes an order where Inductor orders the kernels.
        PlanFileError: a decision has an action that is in the schema, and not built yet.
    """
    where = f"plan file {os.fspath(source)!r}"
    if document.codegen != codegen:
        raise PlanMismatch(
            f"{where} was made for codegen {document.codegen!r}, and this graph is compiled with {codegen!r}. "
            f"Make the plan again, or use codegen={document.codegen!r}."
        )
    if document.plan.schedule is not None and codegen != Codegen.EAGER.value:
        raise PlanMismatch(
            f"{where} prescribes the order of ops, and Inductor orders its kernels itself: such a plan needs "
            f"codegen={Codegen.EAGER.value!r}. Make the plan again, or use that code generator."
        )
    for decision in document.plan.decisions:
        if decision.action not in APPLICABLE:
            raise PlanFileError(
                f"{where}: {_named(decision)} has action {decision.action.value!r}, and dyngran {VERSION} can only "
                f"{' or '.join(action.value for action in APPLICABLE)}. Make the plan again, or remove the option."
            )


def for_file(plan: Plan, problem: Problem) -> Plan:
    """A plan of ``problem`` as a file holds it: its schedule numbers the ops of the graph, whatever the step before left to be held."""
    if plan.schedule is None or not _is_carrying(problem):
        return plan
    forward, backward = (
        [op - 1 for op in part if 0 < op < len(problem.ops) - 1] for part in (plan.schedule.forward, plan.schedule.backward)
    )
    return replace(plan, schedule=replace(plan.schedule, forward=tuple(forward), backward=tuple(backward)))


def for_problem(plan: Plan, problem: Problem) -> Plan:
    """The reverse of `for_file`: what is held of the step before is let go of when forward has ended, as `passes.carry` has it."""
    if plan.schedule is None or not _is_carrying(problem):
        return plan
    forward, backward = ([op + 1 for op in part] for part in (plan.schedule.forward, plan.schedule.backward))
    return replace(plan, schedule=replace(plan.schedule, forward=(0, *forward, len(problem.ops) - 1), backward=tuple(backward)))


def _is_carrying(problem: Problem) -> bool:
    return any(value.kind is Kind.CARRIED for value in problem.values)


def dump_plan(document: PlanDocument) -> str:
    """The text of a plan file: fields in alphabetical order, one to a line, and each decision on a line of its own."""
    plan = document.plan
    fields: dict[str, Any] = {name: getattr(plan, name) for name in _PLAN_FIELDS}
    fields |= {
        "codegen": document.codegen,
        "device": document.device,
        "dyngran": document.dyngran_version,
        "fingerprint": document.fingerprint,
        "saved": sorted(plan.saved),
        "schema": SCHEMA,
        "torch": document.torch_version,
    }
    lines = {name: json.dumps(value) for name, value in fields.items()}
    decisions = ",\n".join(f"  {json.dumps(_decision_fields(decision), sort_keys=True)}" for decision in plan.decisions)
    lines["decisions"] = f"[\n{decisions}\n ]" if decisions else "[]"
    lines["schedule"] = "null" if plan.schedule is None else _schedule_text(plan.schedule)
    return "{\n" + ",\n".join(f' "{name}": {lines[name]}' for name in sorted(lines)) + "\n}\n"


def _schedule_text(schedule: Schedule) -> str:
    parts = {"backward": schedule.backward, "forward": schedule.forward, "saved": sorted(schedule.saved)}
    return "{\n" + ",\n".join(f'  "{name}": {json.dumps(list(part))}' for name, part in parts.items()) + "\n }"


def _decision_fields(decision: Decision) -> dict[str, object]:
    return {name: getattr(decision, name) for name in _DECISION_FIELDS} | {"action": decision.action.value}


def parse_plan(text: str, *, source: str) -> PlanDocument:
    """The document in ``text``; ``source`` names it in errors. Raises as `load_plan`."""
    try:
        fields = json.loads(text, object_pairs_hook=_unique_fields)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"plan file {source!r} is not a JSON document that can be read: {error}.") from error
    where = f"plan file {source!r}"
    if not isinstance(fields, dict):
        raise PlanFileError(f"{where} must hold one JSON object, found {_shown(fields)}.")
    if (schema := fields.get("schema", SCHEMA)) != SCHEMA or isinstance(schema, bool):
        raise PlanFileError(
            f"{where} has schema {_shown(schema)}, and dyngran {VERSION} reads schema {SCHEMA}. "
            "Make the plan again, or use the dyngran that made it."
        )
    fields = {**_LATER_FIELDS, **fields}
    _check(fields, _DOCUMENT_FIELDS, where)
    for position, decision in enumerate(fields["decisions"]):
        place = f"{where}, decisions[{position}]"
        if not isinstance(decision, dict):
            raise PlanFileError(f"{place} must be a JSON object, found {_shown(decision)}.")
        _check(decision, _DECISION_FIELDS, place)
    plan = Plan(
        saved=frozenset(fields["saved"]),
        decisions=tuple(Decision(**{**decision, "action": Action(decision["action"])}) for decision in fields["decisions"]),
        schedule=_schedule_of(fields["schedule"]),
        **{name: fields[name] for name in _PLAN_FIELDS},
    )
    _check_saved(plan, where)
    _check_bound(plan, where)
    return PlanDocument(
        plan=plan,
        fingerprint=fields["fingerprint"],
        codegen=fields["codegen"],
        torch_version=fields["torch"],
        device=fields["device"],
        dyngran_version=fields["dyngran"],
    )


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {next(name for name in names if names.count(name) > 1)!r} stands twice in one object")
    return fields


def _check(fields: dict[str, Any], forms: Mapping[str, _Form], where: str) -> None:
    for name, form in forms.items():
        if name not in fields:
            raise PlanFileError(f"{where}: field {name!r} is missing; it must be {form.expected}.")
        if not form.accepts(fields[name]):
            raise PlanFileError(f"{where}: field {name!r} must be {form.expected}, found {_shown(fields[name])}.")
    for name in fields:
        if name not in forms:
            raise PlanFileError(f"{where}: field {name!r} is not known in schema {SCHEMA}.")


def _check_saved(plan: Plan, where: str) -> None:
    """One decision for a value; what is kept is saved, what is recomputed is not, and nothing is saved without a decision."""
    decided: set[int] = set()
    for decision in plan.decisions:
        is_saved = decision.value in plan.saved
        if decision.value in decided:
            raise PlanFileError(f"{where}: {_named(decision)} is decided twice.")
        if decision.action is Action.KEEP and not is_saved:
            raise PlanFileError(f"{where}: {_named(decision)} is kept by its decision, and is not in field 'saved'.")
        if decision.action is Action.RECOMPUTE and is_saved:
            raise PlanFileError(f"{where}: {_named(decision)} is in field 'saved', and its decision is to recompute it.")
        decided.add(decision.value)
    if undecided := plan.saved - decided:
        raise PlanFileError(f"{where}: value {_shown(min(undecided))} is in field 'saved', and has no decision.")


def _check_bound(plan: Plan, where: str) -> None:
    if plan.bound_us > plan.time_us * (1 + BOUND_TOLERANCE):
        raise PlanFileError(f"{where}: field 'bound_us' is {_shown(plan.bound_us)}, and the plan itself takes {_shown(plan.time_us)}.")


def _schedule_of(parts: dict[str, list[int]] | None) -> Schedule | None:
    return None if parts is None else Schedule(tuple(parts["forward"]), tuple(parts["backward"]), frozenset(parts["saved"]))


def _named(decision: Decision) -> str:
    return f"value {_shown(decision.value)} ({_shown(decision.name)})"


def _cause(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except ValueError:  # an int of more digits than Python writes
        return "a number that is too long to show"
    return text if len(text) <= 60 else text[:57] + "..."
