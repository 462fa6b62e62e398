"""Plan files: one JSON document, versioned, in a stable order that a diff can show. Loading reads data and never runs code."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dyngran.compiler.options import Codegen, Outputs
from dyngran.compiler.plans.output_file import write_file
from dyngran.compiler.plans.plan_schema import (
    SCHEMA,
    BreakForm,
    DecisionForm,
    DocumentForm,
    GraphForm,
    OfferForm,
    OpForm,
    PlanForm,
    ProblemForm,
    ScheduleForm,
    SettingsForm,
    TransferForm,
    ValueForm,
)
from dyngran.compiler.version import VERSION
from dyngran.passes.errors import PlanFileError, PlanMismatch, format_bytes
from dyngran.passes.forms import Offer, Transfer, base_ops, offers_of, with_forms, without_forms
from dyngran.passes.plan import Action, Decision, Plan, Schedule
from dyngran.passes.problem import Form as StoredForm
from dyngran.passes.problem import Kind, Op, Problem, Value

MAX_FILE_BYTES = 64 * 2**20  # a graph of 10,000 ops takes 4 MB
BOUND_TOLERANCE = 1e-6  # of the time: bound and time are sums of the same floats in another order
SHOWN_CHARACTERS = 60

_ROWS = ("breaks", "decisions", "forms", "frontier", "ops", "values")  # lists with a line for each entry
_TERSE = {  # written without their defaults
    "decisions": DecisionForm,
    "forms": OfferForm,
    "load": TransferForm,
    "ops": OpForm,
    "settings": SettingsForm,
    "store": TransferForm,
    "values": ValueForm,
}

Form = TypeVar("Form", bound=msgspec.Struct)
_NO_DEFAULT = object()


class Origin(Enum):
    """How well the traced graph is known to be the one that will train."""

    EXACT = "exact"  # traced with the torch build and for the device that train: applied as it is, or refused
    PORTABLE = "portable"  # traced without the device: applied region by region, and repaired where regions differ


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """The plan of one graph, with the problem that it answers.

    Attributes:
        problem: of the graph alone (nothing carried from a step before), and without forms if the plan has a schedule, which numbers the
            ops of that problem.
        fingerprint: of the problem (`passes.fingerprint`).
        frontier: (peak_bytes, time_us) of the plans that were found for it, least peak first; peaks as ``plan.peak_bytes``.
        runs: how often the graph runs in a step (a graph break in a loop); the plan and its prediction are of one run.
    """

    problem: Problem
    plan: Plan
    fingerprint: str
    frontier: tuple[tuple[int, float], ...] = ()
    runs: int = 1


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Why a step is cut in two there, and the line of the user's program."""

    reason: str
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a plan was asked for.

    Attributes:
        budget: as people write it; None: no limit. profile: the device of the table whose costs were used; None: costs were measured.
        batch, dtype, dynamic: what overrode the target's own inputs; None and False: nothing.
        outputs, keep_below, offload, pack, slice, solver, storage: as the options of the backend.
    """

    batch: int | None = None
    budget: str | None = None
    dtype: str | None = None
    dynamic: bool = False
    keep_below: int | None = None
    offload: bool | int = False
    outputs: Outputs = Outputs.HELD
    pack: bool = True
    profile: str | None = None
    slice: bool = True
    solver: str = "auto"
    storage: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDocument:
    """The plans of one step with what they were made for.

    Attributes:
        graphs: in the order in which forward runs them; more than one where graph breaks cut the step.
        codegen: "inductor" or "eager"; torch_version, device: what it was made for; dyngran_version: who made it.
        settings: how it was asked for. breaks: where the step is cut.
        extra: what this version does not read, kept.
    """

    graphs: tuple[GraphPlan, ...]
    codegen: str
    torch_version: str
    device: str
    origin: Origin = Origin.EXACT
    settings: Settings = Settings()
    breaks: tuple[GraphBreak, ...] = ()
    dyngran_version: str = VERSION
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def largest(self) -> GraphPlan:
        """The graph that sets the peak of the step."""
        return max(self.graphs, key=lambda graph: graph.plan.peak_bytes)

    @property
    def plan(self) -> Plan:
        """The plan of the graph that sets the peak."""
        return self.largest.plan

    @property
    def peak_bytes(self) -> int:
        """Of the step: each graph's prediction holds what the others leave beside it."""
        return self.plan.peak_bytes

    @property
    def time_us(self) -> float:
        """Device time of forward and backward of all graphs."""
        return sum(graph.plan.time_us * graph.runs for graph in self.graphs)


def save_plan(path: str | os.PathLike[str], document: PlanDocument) -> None:
    """Write ``document`` to ``path``: whole or not at all, whoever reads meanwhile.

    Raises:
        PlanFileError: the plan holds what a plan file cannot (a time that is no number, say), or the path cannot be written;
            what stands there stays.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        shown = " ".join(reprlib.repr(path).split())
        raise PlanFileError(f"plan file {shown} cannot be written: {type(path).__name__} is no path, which comes first in save_plan.")
    text = dump_plan(document)
    parse_plan(text, source=str(path))
    write_file(os.fspath(path), text.encode(), what="plan file")


def load_plan(path: str | os.PathLike[str]) -> PlanDocument:
    """Read a plan file.

    Raises:
        PlanFileError: no such file, not JSON, too large, another schema version, a field that is missing, unknown or wrong, or decisions
            that do not make what is saved.
    """
    try:
        size = os.stat(path).st_size
        if size > MAX_FILE_BYTES:
            raise PlanFileError(
                f"plan file {os.fspath(path)!r} has {format_bytes(size)}, and a plan file has at most {format_bytes(MAX_FILE_BYTES)}: "
                "it is something else, or damaged. Make it again with `dyngran-plan build`."
            )
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise PlanFileError(
            f"plan file {os.fspath(path)!r} cannot be read: there is no such file in {os.getcwd()!r}. Make it with `dyngran-plan build`."
        ) from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path that no file can have
        raise PlanFileError(f"plan file {os.fspath(path)!r} cannot be read: {_cause(error)}.") from error
    return parse_plan(text, source=os.fspath(path))


def check_applicable(document: PlanDocument, *, codegen: str, source: str | os.PathLike[str], storage: Collection[str] = ()) -> None:
    """Refuse a plan that this version cannot carry out with ``codegen``; ``source`` names its file, ``storage`` the lossy formats allowed.

    Raises:
        PlanMismatch: the plan was made for another code generator, or prescribes an order where Inductor orders the kernels, or stores
            values in a format that rounds and was not allowed by name.
    """
    where = f"plan file {os.fspath(source)!r}"
    if document.codegen != codegen:
        raise PlanMismatch(
            f"{where} was made for codegen {document.codegen!r}, and this graph is compiled with {codegen!r}. "
            f"Make the plan again, or use codegen={document.codegen!r}."
        )
    for graph in document.graphs:
        if graph.plan.schedule is not None and codegen != Codegen.EAGER.value:
            raise PlanMismatch(
                f"{where} prescribes the order of ops, and Inductor orders its kernels itself: such a plan needs "
                f"codegen={Codegen.EAGER.value!r}. Make the plan again, or use that code generator."
            )
        for decision in graph.plan.decisions:
            if decision.error and decision.format not in storage:
                raise PlanMismatch(
                    f"{where}: {_named(decision)} is stored as {decision.format}, which changes it by {decision.error}. Allow it with "
                    f"options={{'storage': [{decision.format!r}]}}, or make the plan again without."
                )


def for_file(plan: Plan, problem: Problem) -> Plan:
    """A plan of ``problem`` as a file holds it: its schedule numbers the ops of the graph, and stored forms come right after the values of
    the graph, whatever the step before left to be held."""
    if not _is_carrying(problem):
        return plan
    first_form = len(problem.values) - len(problem.forms)
    plan = replace(plan, saved=frozenset(value - (value >= first_form) for value in plan.saved))
    if plan.schedule is None:
        return plan
    last = len(base_ops(problem)) - 1
    forward, backward = ([op - 1 for op in part if 0 < op < last] for part in (plan.schedule.forward, plan.schedule.backward))
    return replace(plan, schedule=replace(plan.schedule, forward=tuple(forward), backward=tuple(backward)))


def saved_for_problem(saved: frozenset[int], problem: Problem) -> frozenset[int]:
    """A saved set of the graph alone in the numbers of its problem."""
    if not _is_carrying(problem):
        return saved
    first_form = len(problem.values) - len(problem.forms) - 1  # in the graph alone, which has no value that is carried
    return frozenset(value + (value >= first_form) for value in saved)


def for_problem(plan: Plan, problem: Problem) -> Plan:
    """The reverse of `for_file`: what is held of the step before is let go of when forward has ended, as `passes.carry` has it."""
    if not _is_carrying(problem):
        return plan
    plan = replace(plan, saved=saved_for_problem(plan.saved, problem))
    if plan.schedule is None:
        return plan
    forward, backward = ([op + 1 for op in part] for part in (plan.schedule.forward, plan.schedule.backward))
    last = len(base_ops(problem)) - 1
    return replace(plan, schedule=replace(plan.schedule, forward=(0, *forward, last), backward=tuple(backward)))


def _is_carrying(problem: Problem) -> bool:
    return any(value.kind is Kind.CARRIED for value in problem.values)


def dump_plan(document: PlanDocument) -> str:
    """The text of a plan file: fields in alphabetical order, one to a line; decisions, ops and values on a line each."""
    form = DocumentForm(
        breaks=[BreakForm(reason=one.reason, where=one.where) for one in document.breaks],
        codegen=Codegen(document.codegen),
        device=document.device,
        dyngran=document.dyngran_version,
        extra=dict(document.extra),
        graphs=[_graph_form(graph) for graph in document.graphs],
        origin=document.origin.value,
        schema=SCHEMA,
        settings=_filled(SettingsForm, document.settings),
        torch=document.torch_version,
    )
    return _text(msgspec.to_builtins(form), 1) + "\n"


def _graph_form(graph: GraphPlan) -> GraphForm:
    plan, problem = graph.plan, without_forms(graph.problem)
    schedule = plan.schedule
    parts = None if schedule is None else {"forward": schedule.forward, "backward": schedule.backward, "saved": sorted(schedule.saved)}
    return GraphForm(
        fingerprint=graph.fingerprint,
        frontier=[(peak_bytes, time_us) for peak_bytes, time_us in graph.frontier],
        runs=graph.runs,
        plan=_filled(
            PlanForm,
            plan,
            decisions=[_filled(DecisionForm, one) for one in plan.decisions],
            saved=sorted(plan.saved),
            schedule=None if parts is None else ScheduleForm(**{name: list(part) for name, part in parts.items()}),
        ),
        problem=_filled(
            ProblemForm,
            problem,
            forward_outputs=sorted(problem.forward_outputs),
            gradients=sorted(problem.gradients),
            ops=[_filled(OpForm, op, reads=list(op.reads), writes=list(op.writes)) for op in problem.ops],
            values=[_filled(ValueForm, value) for value in problem.values],
            forms=[
                _filled(
                    OfferForm,
                    offer,
                    again=sorted(offer.again),
                    barred=sorted(offer.barred),
                    parts=list(offer.parts),
                    load=_filled(TransferForm, offer.load),
                    store=_filled(TransferForm, offer.store),
                )
                for offer in offers_of(graph.problem)
            ],
            stock={name: sorted(saved) for name, saved in problem.stock.items()},
        ),
    )


def _filled(form: type[Form], source: object, **changed: object) -> Form:
    """A form whose fields are those of ``source``, but for those that are named."""
    names = [name for name in form.__struct_fields__ if name not in changed]
    return form(**{name: getattr(source, name) for name in names}, **changed)


def _text(node: Mapping[str, Any], depth: int) -> str:
    """An object with a field to a line; the graphs, and the parts of each, are such objects again."""
    indent = " " * depth
    lines = []
    for name in sorted(node):
        value = node[name]
        if name == "forms" and not value:
            continue
        if name == "graphs":
            shown = _lines([_text(graph, depth + 2) for graph in value], depth)
        elif name in ("plan", "problem", "schedule") and value is not None:
            shown = _text(value, depth + 1)
        elif name in _ROWS:
            shown = _lines([json.dumps(_terse(name, row), sort_keys=True) for row in value], depth)
        else:
            shown = json.dumps(_terse(name, value), sort_keys=True)
        lines.append(f'{indent}"{name}": {shown}')
    return "{\n" + ",\n".join(lines) + "\n" + indent[:-1] + "}"


def _terse(name: str, row: Any) -> Any:
    if name not in _TERSE:
        return row
    kept = {field: value for field, value in row.items() if value != _defaults(_TERSE[name]).get(field, _NO_DEFAULT)}
    return {field: _terse(field, value) for field, value in kept.items()} if name == "forms" else kept


@cache
def _defaults(form: type[msgspec.Struct]) -> Mapping[str, Any]:
    """What its fields are where nothing is written, as JSON has it."""
    known = {one.name: one.default for one in msgspec.structs.fields(form) if one.default is not msgspec.NODEFAULT}
    return {name: msgspec.to_builtins(default) for name, default in known.items()}


def _lines(rows: Sequence[str], depth: int) -> str:
    indent = " " * depth
    return "[\n" + ",\n".join(f"{indent} {row}" for row in rows) + f"\n{indent}]" if rows else "[]"


def parse_plan(text: str, *, source: str) -> PlanDocument:
    """The document in ``text``; ``source`` names it in errors. Raises as `load_plan`."""
    where = f"plan file {source!r}"
    try:
        content = json.loads(text, object_pairs_hook=_unique_fields)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(
            f"{where} is not a JSON document that can be read: {error}. Take it from version control, or make it again with "
            "`dyngran-plan build`."
        ) from error
    if not isinstance(content, dict):
        raise PlanFileError(f"{where} must hold one JSON object, found {_shown(content)}.")
    if (schema := content.get("schema")) != SCHEMA or isinstance(schema, bool):
        is_newer = isinstance(schema, int) and schema > SCHEMA
        advice = "Install a newer dyngran, or make the plan again with this one." if is_newer else "Make the plan again."
        raise PlanFileError(f"{where} has schema {_shown(schema)}, and dyngran {VERSION} reads schema {SCHEMA}. {advice}")
    try:
        form = msgspec.convert(content, DocumentForm)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise PlanFileError(f"{where}: {_place_first(str(error))}.") from error
    graphs = tuple(_graph_of(graph, f"{where}, graphs[{position}]") for position, graph in enumerate(form.graphs))
    return PlanDocument(
        graphs=graphs,
        codegen=form.codegen.value,
        torch_version=form.torch,
        device=form.device,
        origin=Origin(form.origin),
        settings=_taken(Settings, form.settings),
        breaks=tuple(GraphBreak(one.reason, one.where) for one in form.breaks),
        dyngran_version=form.dyngran,
        extra=form.extra,
    )


def _place_first(message: str) -> str:
    """msgspec ends its sentence with the place, `$.graphs[0].plan`; people look for the place first."""
    sentence, found, place = message.partition(" - at `$")
    return f"{place.rstrip('`').lstrip('.')}: {sentence}" if found else sentence


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {next(name for name in names if names.count(name) > 1)!r} stands twice in one object")
    return fields


def _graph_of(form: GraphForm, where: str) -> GraphPlan:
    sets = {"saved": form.plan.saved, "forward_outputs": form.problem.forward_outputs, "gradients": form.problem.gradients}
    sets |= {"schedule": form.plan.schedule.saved} if form.plan.schedule is not None else {}
    for name, members in (sets | form.problem.stock).items():
        if members != sorted(set(members)):
            raise PlanFileError(f"{where}: the values of {name!r} must be ascending, and none may stand twice.")
    problem = _problem_of(form.problem, where)
    plan = _plan_of(form.plan)
    _check_decisions(plan, problem, where)
    if plan.bound_us > plan.time_us * (1 + BOUND_TOLERANCE):
        raise PlanFileError(f"{where}: field 'bound_us' is {_shown(plan.bound_us)}, and the plan itself takes {_shown(plan.time_us)}.")
    return GraphPlan(problem=problem, plan=plan, fingerprint=form.fingerprint, frontier=tuple(form.frontier), runs=form.runs)


def _plan_of(form: PlanForm) -> Plan:
    decisions = tuple(_taken(Decision, one) for one in form.decisions)
    parts = form.schedule
    schedule = None if parts is None else Schedule(tuple(parts.forward), tuple(parts.backward), frozenset(parts.saved))
    return _taken(Plan, form, decisions=decisions, saved=frozenset(form.saved), schedule=schedule)


Taken = TypeVar("Taken", Decision, Plan, Value, Op, Offer, Problem, Settings, Transfer)


def _taken(kind: type[Taken], form: msgspec.Struct, **changed: object) -> Taken:
    names = [one.name for one in fields(kind) if one.name not in changed and one.init]
    return kind(**{name: getattr(form, name) for name in names}, **changed)  # type: ignore[arg-type]  # the forms have the fields' types


def _problem_of(form: ProblemForm, where: str) -> Problem:
    """Raises PlanFileError where the graph is none: a value that does not exist or is made twice, or is read before it is made."""
    num_values, num_ops = len(form.values), len(form.ops)
    producer: dict[int, int] = {}
    for position, op in enumerate(form.ops):
        if beyond := [index for index in (*op.reads, *op.writes) if index >= num_values]:
            raise PlanFileError(f"{where}: ops[{position}] names value {beyond[0]}, and there are {num_values}.")
        for write in op.writes:
            if write in producer:
                raise PlanFileError(f"{where}: value {write} is made by ops[{producer[write]}] and ops[{position}].")
            producer[write] = position
    named = {"forward_outputs": form.forward_outputs, "gradients": form.gradients, **form.stock}
    for name, indices in named.items():
        if beyond := [index for index in indices if index >= num_values]:
            raise PlanFileError(f"{where}: {name!r} names value {beyond[0]}, and there are {num_values}.")
    try:
        problem = _taken(
            Problem,
            form,
            values=tuple(_taken(Value, one, index=i, producer=producer.get(i)) for i, one in enumerate(form.values)),
            ops=tuple(
                _taken(Op, form.ops[i], index=i, reads=tuple(form.ops[i].reads), writes=tuple(form.ops[i].writes)) for i in range(num_ops)
            ),
            forward_outputs=frozenset(form.forward_outputs),
            gradients=frozenset(form.gradients),
            stock={name: frozenset(saved) for name, saved in form.stock.items()},
            forms=(),
        )
        return with_forms(problem, [_offer_of(offer, num_values, num_ops) for offer in form.forms])
    except ValueError as error:
        raise PlanFileError(f"{where}: its graph is none: {error}.") from error


def _offer_of(form: OfferForm, num_values: int, num_ops: int) -> Offer:
    """Raises ValueError for a value or an op that does not exist."""
    if any(value >= num_values for value in (form.value, *form.parts)) or any(op >= num_ops for op in (*form.barred, *form.again)):
        raise ValueError(f"a form in {_shown(form.format)} of value {form.value} names what there is not")
    store, load = (_taken(Transfer, part) for part in (form.store, form.load))
    sets = {"again": frozenset(form.again), "barred": frozenset(form.barred)}
    return _taken(Offer, form, **sets, parts=tuple(form.parts), store=store, load=load)


def _check_decisions(plan: Plan, problem: Problem, where: str) -> None:
    """One decision for a value of the graph; what is kept is saved, what is recomputed is not, and nothing is saved without a decision."""
    decided: set[int] = set()
    forms: dict[int, list[StoredForm]] = {}
    for value in sorted(plan.saved & problem.form_of.keys()):
        forms.setdefault(problem.form_of[value].value, []).append(problem.form_of[value])
    for decision in plan.decisions:
        is_saved, stored = decision.value in plan.saved, forms.get(decision.value, [])
        if decision.value >= len(problem.values) or problem.values[decision.value].size_bytes != decision.size_bytes:
            raise PlanFileError(f"{where}: {_named(decision)} with {decision.size_bytes} bytes is no value of the graph.")
        if decision.value in decided:
            raise PlanFileError(f"{where}: {_named(decision)} is decided twice.")
        if decision.action is Action.KEEP and not is_saved:
            raise PlanFileError(f"{where}: {_named(decision)} is kept by its decision, and is not in field 'saved'.")
        if decision.action is Action.RECOMPUTE and (is_saved or stored):
            raise PlanFileError(f"{where}: {_named(decision)} is in field 'saved', and its decision is to recompute it.")
        if decision.action not in (Action.KEEP, Action.RECOMPUTE):
            if [(form.action, form.format) for form in stored] != [(decision.action, decision.format)]:
                raise PlanFileError(
                    f"{where}: {_named(decision)} is decided to be stored as {_shown(decision.format)}, and 'saved' has no such form."
                )
            decided.add(stored[0].stored)
        decided.add(decision.value)
    if undecided := plan.saved - decided:
        raise PlanFileError(f"{where}: value {_shown(min(undecided))} is in field 'saved', and has no decision.")
    _check_ops(plan.schedule, len(base_ops(problem)), where)


def _check_ops(schedule: Schedule | None, num_ops: int, where: str) -> None:
    ops: Iterable[int] = () if schedule is None else (*schedule.forward, *schedule.backward)
    if beyond := [op for op in ops if op >= num_ops]:
        raise PlanFileError(f"{where}: field 'schedule' names op {beyond[0]}, and there are {num_ops}.")


def _named(decision: Decision) -> str:
    return f"value {_shown(decision.value)} ({_shown(decision.name)})"


def _cause(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except ValueError:  # an int of more digits than Python writes
        return "a number that is too long to show"
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
