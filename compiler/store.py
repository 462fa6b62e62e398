"""dyngran's own store: what was planned, and what generated code turned out to need, survives the process.

One small JSON file per problem: the saved set or the schedule chosen for each limit, and the transient peak of each saved set whose code
was generated.
A warm start finds its plan without searching, and a refusal's least peak can be relied on. Loading reads data and never runs code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from dyngran.compiler.options import Options
from dyngran.compiler.version import VERSION
from dyngran.passes.plan import Schedule
from dyngran.passes.problem import Problem
from dyngran.passes.profile_cache import default_cache_dir

log = logging.getLogger("dyngran.store")

MAX_ENTRIES = 64  # of each kind per problem; the oldest go first
MAX_SCHEDULES = 16  # they name every op
NOT_KEPT = ""  # a key under which nothing is found and nothing kept


def options_key(options: Options) -> str:
    """A hash of every option and of dyngran's version; generated code that two different keys share is equal anyway."""
    parts = [VERSION, *(f"{field.name}={getattr(options, field.name)!s}" for field in fields(options) if field.name != "inductor")]
    parts += [f"{name}={value!r}" for name, value in sorted(options.inductor.items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]


def store_key(mark: str, problem: Problem, options: Options) -> str:
    """Everything that decides a plan but the limit: versions, the graph in its own order, thresholds, code generator and its options.

    Costs are left out: they are measured, and a plan that was good for last week's measurement is good for today's.
    """
    graph = [
        [op.target, op.side.value, op.reads, op.writes, op.workspace_bytes, op.rerun_bytes, op.pinned, op.fusible] for op in problem.ops
    ]
    sizes = [[value.size_bytes, value.kind.value] for value in problem.values]
    how = [options.codegen.value, options.mode, sorted((name, repr(value)) for name, value in options.inductor.items())]
    forms = [[form.value, form.format, sorted(form.barred), form.store, form.fetch] for form in problem.forms]
    text = json.dumps([VERSION, torch.__version__, mark, graph, sizes, forms, problem.keep_below_bytes, how])
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def recall_saved(key: str, limit_bytes: int) -> frozenset[int] | None:
    """The saved set that was chosen for this limit before."""
    found = _read(key)["saved"].get(str(limit_bytes))
    return None if found is None else frozenset(found)


def remember_saved(key: str, limit_bytes: int, saved: frozenset[int]) -> None:
    content = _read(key)
    content["saved"][str(limit_bytes)] = sorted(saved)
    _write(key, content)


def recall_schedule(key: str, limit_bytes: int, solver: str) -> Schedule | None:
    """The schedule that a solver (or "auto") chose for this limit before, or named as the least in a refusal."""
    return _schedule_of(_read(key)["schedules"].get(f"{solver} {limit_bytes}"))


def recall_schedules(key: str) -> list[Schedule]:
    """Every schedule that was chosen for this problem, for whatever limit."""
    return [found for parts in _read(key)["schedules"].values() if (found := _schedule_of(parts)) is not None]


def remember_schedule(key: str, limit_bytes: int, schedule: Schedule, solver: str) -> None:
    content = _read(key)
    parts = {"forward": schedule.forward, "backward": schedule.backward, "saved": sorted(schedule.saved)}
    name = f"{solver} {limit_bytes}"
    content["schedules"].pop(name, None)  # the newest stand last
    content["schedules"][name] = {part: list(ops) for part, ops in parts.items()}
    _write(key, content)


def _schedule_of(parts: dict[str, list[int]] | None) -> Schedule | None:
    return None if parts is None else Schedule(tuple(parts["forward"]), tuple(parts["backward"]), frozenset(parts["saved"]))


def recall_transients(key: str) -> dict[frozenset[int], int]:
    """Transient peak in bytes by generated code, per saved set."""
    return {frozenset(saved): transient for saved, transient in _read(key)["transients"]}


def remember_transient(key: str, saved: frozenset[int], transient_bytes: int) -> None:
    content = _read(key)
    others = [entry for entry in content["transients"] if frozenset(entry[0]) != saved]
    content["transients"] = [*others, [sorted(saved), transient_bytes]]
    _write(key, content)


def _path(key: str) -> Path:
    return default_cache_dir() / "plans" / f"{key}.json"


def _read(key: str) -> dict[str, Any]:
    empty: dict[str, Any] = {"saved": {}, "schedules": {}, "transients": []}
    if key == NOT_KEPT:
        return empty
    try:
        content = json.loads(_path(key).read_text())
    except (OSError, ValueError, RecursionError):  # the last: brackets nested deeper than the parser goes
        return empty
    content = {**empty, **content} if isinstance(content, dict) else content
    return content if isinstance(content, dict) and _is_well_formed(content) else empty


def _is_well_formed(content: dict[str, Any]) -> bool:
    saved, transients, schedules = content.get("saved"), content.get("transients"), content.get("schedules")
    if not isinstance(saved, dict) or not isinstance(transients, list) or not isinstance(schedules, dict):
        return False
    if not all(isinstance(one, dict) and one.keys() == {"forward", "backward", "saved"} for one in schedules.values()):
        return False
    sets = [
        *saved.values(),
        *(part for one in schedules.values() for part in one.values()),
        *(entry[0] for entry in transients if isinstance(entry, list) and len(entry) == 2),
    ]
    return all(isinstance(one, list) and all(isinstance(value, int) for value in one) for one in sets) and all(
        isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], int) for entry in transients
    )


def _write(key: str, content: dict[str, Any]) -> None:
    """Replace the file in one move. A store that cannot be written costs a search, never an error."""
    if key == NOT_KEPT:
        return
    content["saved"] = dict(list(content["saved"].items())[-MAX_ENTRIES:])
    content["schedules"] = dict(list(content["schedules"].items())[-MAX_SCHEDULES:])
    content["transients"] = content["transients"][-MAX_ENTRIES:]
    path = _path(key)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content))
        os.replace(temporary, path)
    except OSError as error:
        log.info("the plan store cannot be written: %s", error)
