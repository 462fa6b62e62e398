"""dyngran's own store of plans: a warm start finds its plan without searching. One plan file per problem, limit and options."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import fields

import torch

from dyngran.compiler.options import Options
from dyngran.compiler.planfile import PlanDocument, load_plan, save_plan
from dyngran.compiler.version import VERSION
from dyngran.passes.errors import PlanFileError
from dyngran.passes.plan import Plan
from dyngran.passes.problem import Problem
from dyngran.passes.profile_cache import default_cache_dir

log = logging.getLogger("dyngran.store")


def options_key(options: Options) -> str:
    """A hash of every option and of dyngran's version; generated code that two different keys share is equal anyway."""
    parts = [VERSION, *(f"{field.name}={getattr(options, field.name)!s}" for field in fields(options) if field.name != "inductor")]
    parts += [f"{name}={value!r}" for name, value in sorted(options.inductor.items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]


def _key(mark: str, problem: Problem, limit_bytes: int | None, options: Options) -> str:
    """Everything that decides a plan: version, graph in its own order, costs, limit, options."""
    graph = [[op.target, op.side.value, op.reads, op.writes, round(op.cost_us, 3), op.workspace_bytes, op.pinned] for op in problem.ops]
    sizes = [[value.size_bytes, value.kind.value] for value in problem.values]
    text = json.dumps([VERSION, torch.__version__, mark, graph, sizes, problem.total_static_bytes, problem.keep_below_bytes, limit_bytes, options_key(options)])
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def recall_saved(mark: str, problem: Problem, limit_bytes: int | None, options: Options) -> frozenset[int] | None:
    """The saved set that was chosen for exactly this question before; None if there is none that can be read."""
    path = default_cache_dir() / "plans" / f"{_key(mark, problem, limit_bytes, options)}.json"
    if not path.exists():
        return None
    try:
        document = load_plan(path)
    except PlanFileError as error:
        log.info("stored plan is not used: %s", error)
        return None
    return document.plan.saved if document.fingerprint == mark else None


def remember_plan(mark: str, problem: Problem, limit_bytes: int | None, options: Options, plan: Plan) -> None:
    """Keep a plan for the next start. A store that cannot be written costs a search, never an error."""
    path = default_cache_dir() / "plans" / f"{_key(mark, problem, limit_bytes, options)}.json"
    document = PlanDocument(plan=plan, fingerprint=mark, codegen=options.codegen.value, torch_version=torch.__version__, device="")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_plan(path, document)
    except OSError as error:
        log.info("plan is not stored: %s", error)
