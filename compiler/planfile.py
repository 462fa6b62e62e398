"""Plan files: one JSON document, versioned, in a stable order that a diff can show. Loading reads data and never runs code."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyngran.compiler.version import VERSION
from dyngran.passes.errors import PlanFileError
from dyngran.passes.plan import Action, Decision, Plan

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDocument:
    """A plan with what it was made for.

    Attributes:
        plan: the decisions and their prediction.
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
_LIST = _Form("a list", lambda value: isinstance(value, list))
_SAVED = _Form(
    "a list of integers of at least 0, ascending, none twice",
    lambda value: isinstance(value, list) and all(map(_is_count, value)) and value == sorted(set(value)),
)

_PLAN_FIELDS: Mapping[str, _Form] = {
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
    "codegen": _TEXT,
    "decisions": _LIST,
    "device": _TEXT,
    "dyngran": _TEXT,
    "fingerprint": _TEXT,
    "saved": _SAVED,
    "schema": _POSITIVE,
    "torch": _TEXT,
}
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
        PlanFileError: the plan holds what a plan file cannot (a time that is no number, say); nothing is written.
        OSError: the folder cannot be written.
    """
    target = Path(path)
    text = dump_plan(document)
    parse_plan(text, source=str(target))
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
        PlanFileError: no such file, not JSON, another schema version, or a field that is missing, unknown or wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise PlanFileError(f"plan file {os.fspath(path)!r} cannot be read: {reason}.") from error
    return parse_plan(text, source=os.fspath(path))


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
    return "{\n" + ",\n".join(f' "{name}": {lines[name]}' for name in sorted(lines)) + "\n}\n"


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
    _check(fields, _DOCUMENT_FIELDS, where)
    for position, decision in enumerate(fields["decisions"]):
        place = f"{where}, decisions[{position}]"
        if not isinstance(decision, dict):
            raise PlanFileError(f"{place} must be a JSON object, found {_shown(decision)}.")
        _check(decision, _DECISION_FIELDS, place)
    return PlanDocument(
        plan=Plan(
            saved=frozenset(fields["saved"]),
            decisions=tuple(Decision(**{**decision, "action": Action(decision["action"])}) for decision in fields["decisions"]),
            **{name: fields[name] for name in _PLAN_FIELDS},
        ),
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


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except ValueError:  # an int of more digits than Python writes
        return "a number that is too long to show"
    return text if len(text) <= 60 else text[:57] + "..."
