"""Every option of the backend in one checked object, whoever gave it: the call, `set_defaults` or the environment."""

from __future__ import annotations

import difflib
import math
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import get_origin

from dyngran.compiler.budget import Budget, parse_bytes
from dyngran.passes.errors import InvalidOption
from dyngran.passes.solvers.portfolio import SOLVERS

__all__ = [
    "BUDGET_VARIABLE",
    "MODES",
    "OPTION_NAMES",
    "Budget",
    "Codegen",
    "Options",
    "Outputs",
    "PlanMismatchPolicy",
    "current_defaults",
    "parse_options",
    "set_defaults",
]

BUDGET_VARIABLE = "DYNGRAN_BUDGET"
NO_BUDGET = ("", "none")  # in that variable, in any case
OPTION_NAMES = (
    "budget",
    "codegen",
    "device_profile",
    "guard",
    "keep_below",
    "max_grad_error",
    "mode",
    "offload",
    "outputs",
    "pack",
    "plan",
    "plan_mismatch",
    "slice",
    "solver",
    "storage",
)
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # torch.compile's
LOSSY = ("bf16", "fp16", "int8", "fp8", "fp8_e5m2", "int4")  # formats that round, the more exact first; `compiler.codecs` does it
OURS_IN_INDUCTOR = "custom_partitioner_fn"  # the door through which dyngran's own plan enters


class Codegen(Enum):
    """Who turns the two planned graphs into code."""

    INDUCTOR = "inductor"
    EAGER = "eager"  # runs the graphs op by op as they stand: order kept, memory exact


class Outputs(Enum):
    """What becomes of the tensors that a compiled module returns, by the time that backward begins."""

    HELD = "held"  # the loop has a name for them, as in ``output = model(...); output.loss.backward()``
    DROPPED = "dropped"  # nobody has, as in ``model(...).loss.backward()``


class PlanMismatchPolicy(Enum):
    """What happens where a plan file was made for another graph."""

    REFUSE = "refuse"
    RESOLVE = "resolve"  # warn, and search for a plan as without a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for, checked.

    Attributes:
        budget: peak of one step; None sets no limit. uses_plan_budget: none was named, so the one that the plan file was made for counts.
        codegen: who generates code. solver: one of `SOLVERS`.
        storage: lossy formats (of `LOSSY`) that values may be stored in between forward and backward; none without a name.
        max_grad_error: relative error of gradients that rounded values may cause, measured and enforced; None: whatever the formats imply.
        pack: whether values may be stored in lossless formats (bits, narrow integers).
        slice: whether a part of a value may be stored, and the rest of it made again.
        offload: how many bytes of host memory, page-locked, may hold values between forward and backward. True: half of what the host can
            spare; False: none.
        plan: file to take the plan from instead of solving; not opened here. plan_mismatch: what to do if it is for another graph.
        guard: watch memory and time while training runs.
        device_profile: name of the device to plan for; None is the one the model is on.
        outputs: whether the loop holds what the module returns while backward runs.
        keep_below: bytes; values at most this large are always kept; None scales with the graph.
        mode: mode of torch.compile, passed on to Inductor. inductor: further Inductor options by name.
    """

    budget: Budget | None = None
    uses_plan_budget: bool = False
    codegen: Codegen = Codegen.INDUCTOR
    solver: str = "auto"
    storage: tuple[str, ...] = ()
    max_grad_error: float | None = None
    pack: bool = True
    slice: bool = True
    offload: bool | int = False
    plan: Path | None = None
    plan_mismatch: PlanMismatchPolicy = PlanMismatchPolicy.REFUSE
    guard: bool = True
    device_profile: str | None = None
    keep_below: int | None = None
    outputs: Outputs = Outputs.HELD
    mode: str | None = None
    inductor: Mapping[str, object] = field(default_factory=dict)


_lock = threading.Lock()
_defaults: dict[str, object] = {}


def set_defaults(**options: object) -> None:
    """Options for every later compilation that does not name them itself. Replaces earlier defaults; without arguments, clears them.

    Raises:
        InvalidOption: as `parse_options`, at once; the earlier defaults then stay.
    """
    global _defaults
    _read(options, sources={})
    with _lock:
        _defaults = dict(options)


def current_defaults() -> dict[str, object]:
    """A copy of what `set_defaults` was given last."""
    with _lock:
        return dict(_defaults)


def parse_options(options: Mapping[str, object] | None, *, mode: str | None = None, environ: Mapping[str, str] | None = None) -> Options:
    """Check and merge ``options``, then `set_defaults`, then the budget in ``DYNGRAN_BUDGET``: the first that names an option wins. A
    budget that none of them names is that of the plan file, if there is one.

    Args:
        options: what torch.compile was given; ``{"budget": None}`` means no budget, whatever the defaults or a plan file say.
        mode: the mode that torch.compile was given, if any.
        environ: os.environ unless given; "none" in that variable, in any case, sets no limit, and an empty one names no budget.

    Raises:
        InvalidOption: a name or value that dyngran does not know; says the nearest name and the valid ones.
        InvalidBudget: a budget that is no amount of memory; says the valid forms.
    """
    given = _named(options)
    if mode is not None and given.setdefault("mode", mode) != mode:
        raise InvalidOption(f"mode is given twice: mode={mode!r} and options['mode']={given['mode']!r}. Give it once.")
    defaults = current_defaults()
    if given.get("codegen") in (Codegen.EAGER, Codegen.EAGER.value):
        defaults = {name: value for name, value in defaults.items() if name in OPTION_NAMES and name != "mode"}
    merged = {**defaults, **given}
    text = (os.environ if environ is None else environ).get(BUDGET_VARIABLE, "")
    if text.strip() and "budget" not in merged:
        named = None if text.strip().lower() in NO_BUDGET else text
        return _read({**merged, "budget": named}, sources={"budget": BUDGET_VARIABLE})
    return _read(merged, sources={})


def _named(options: Mapping[str, object] | None) -> dict[str, object]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise InvalidOption(f"options must be a dict of names and values, got {type(options).__name__}.")
    for name in options:
        if not isinstance(name, str):
            raise InvalidOption(f"option names are strings, got {name!r}.")
    return dict(options)


def _read(options: Mapping[str, object], *, sources: Mapping[str, str]) -> Options:
    inductor = _inductor_options({name: value for name, value in options.items() if name not in OPTION_NAMES})
    budget = options.get("budget")
    codegen = Codegen(_choice("codegen", options.get("codegen", Codegen.INDUCTOR), [codegen.value for codegen in Codegen]))
    mode = options.get("mode")
    read = Options(
        budget=None if budget is None else Budget.parse(budget, source=sources.get("budget", "budget")),
        uses_plan_budget="budget" not in options and options.get("plan") is not None,
        codegen=codegen,
        solver=_choice("solver", options.get("solver", "auto"), SOLVERS),
        storage=_storage(options.get("storage", ())),
        max_grad_error=_max_grad_error(options.get("max_grad_error")),
        pack=_switch("pack", options.get("pack", True)),
        slice=_switch("slice", options.get("slice", True)),
        offload=_offload(options.get("offload")),
        plan=_plan(options.get("plan")),
        plan_mismatch=PlanMismatchPolicy(
            _choice(
                "plan_mismatch", options.get("plan_mismatch", PlanMismatchPolicy.REFUSE), [policy.value for policy in PlanMismatchPolicy]
            )
        ),
        guard=_switch("guard", options.get("guard", True)),
        device_profile=_device_profile(options.get("device_profile")),
        keep_below=_keep_below(options.get("keep_below")),
        outputs=Outputs(_choice("outputs", options.get("outputs", Outputs.HELD), [outputs.value for outputs in Outputs])),
        mode=None if mode is None else _choice("mode", mode, MODES),
        inductor=inductor,
    )
    _check_error_limit(read)
    if read.codegen is Codegen.EAGER and (inductor or read.mode not in (None, "default")):
        named = next(iter(inductor), "mode")
        raise InvalidOption(f"option {named!r} is for Inductor, but codegen is 'eager'. Remove it, or use codegen='inductor'.")
    return read


def _choice(name: str, value: object, valid: Iterable[str]) -> str:
    text = value.value if isinstance(value, Enum) else value
    names = tuple(valid)
    if isinstance(text, str) and text in names:
        return text
    raise InvalidOption(f"{name} = {value!r} is not known{_nearest(text, names)}. Valid values are {_names_of(names)}.")


def _names_of(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _nearest(text: object, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(text.lower().replace("-", "_"), list(names), n=1) if isinstance(text, str) else []
    return f" (did you mean {near[0]!r}?)" if near else ""


def _storage(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, (tuple, list, set, frozenset)):
        raise InvalidOption(f"storage = {value!r} must be a list of formats, as storage=['bf16']. Valid formats are {_names_of(LOSSY)}.")
    for name in value:
        if not isinstance(name, str) or name not in LOSSY:
            raise InvalidOption(
                f"storage: {name!r} is no format{_nearest(name, LOSSY)}. Valid formats are {_names_of(LOSSY)}; what changes no gradient "
                "(bits, narrow integers) needs no name."
            )
    return tuple(name for name in LOSSY if name in value)


def _max_grad_error(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise InvalidOption(f"max_grad_error = {value!r} must be a relative error above 0, as 0.01 for 1 %, or None.")


def _check_error_limit(options: Options) -> None:
    if options.max_grad_error is None:
        return
    if not options.storage:
        raise InvalidOption(
            f"max_grad_error = {options.max_grad_error} limits what rounding does, and storage names no format: name some, or remove it."
        )
    if options.plan is not None:
        raise InvalidOption(
            "max_grad_error takes formats away from plans that are searched for, and plan names a file: remove one of the two."
        )
    if options.mode in ("reduce-overhead", "max-autotune") or options.inductor.get("triton.cudagraphs"):
        raise InvalidOption(
            "max_grad_error runs backward twice in a sampled step, which CUDA graphs cannot: use another mode, or remove it."
        )


def _offload(value: object) -> bool | int:
    if value is None or isinstance(value, bool):
        return bool(value)
    num_bytes = parse_bytes(value) if isinstance(value, str) else value
    if isinstance(num_bytes, int) and num_bytes > 0:
        return num_bytes
    raise InvalidOption(
        f'offload = {value!r} must be True, False, or the host memory that may be used: a number of bytes above 0, or "32GiB".'
    )


def _plan(value: object) -> Path | None:
    if value is None:
        return None
    if isinstance(value, (str, os.PathLike)) and isinstance(path := os.fspath(value), str) and path:
        return Path(path)
    raise InvalidOption(f"plan = {value!r} must be the path of a plan file.")


def _switch(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidOption(f"{name} = {value!r} must be True or False.")


def _device_profile(value: object) -> str | None:
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    raise InvalidOption(f"device_profile = {value!r} must be the name of a device, or None for the one the model is on.")


def _keep_below(value: object) -> int | None:
    if value is None:
        return None
    num_bytes = parse_bytes(value) if isinstance(value, str) else value
    if isinstance(num_bytes, int) and not isinstance(num_bytes, bool) and num_bytes >= 0:
        return num_bytes
    raise InvalidOption(
        f'keep_below = {value!r} must be a number of bytes from 0 up: an int, "64KiB" or "1.5 MB"; None scales with the graph.'
    )


def _inductor_options(options: Mapping[str, object]) -> dict[str, object]:
    """The options that belong to Inductor, under its own names and types (``max-autotune`` is ``max_autotune``)."""
    if not options:
        return {}
    from torch._inductor import config  # late: torch is slow to import, and most people name no Inductor option

    known = config.get_config_copy()
    read: dict[str, object] = {}
    for given, value in options.items():
        name = given.replace("-", "_")
        if name == OURS_IN_INDUCTOR:
            raise InvalidOption(f"option {given!r} is set by dyngran itself: its plan enters Inductor there. Remove the option.")
        if name not in known:
            raise InvalidOption(
                f"option {given!r} is not known{_nearest(given, (*OPTION_NAMES, *known))}. dyngran's options are "
                f"{', '.join(OPTION_NAMES)}; any option of torch._inductor.config is passed on."
            )
        wanted = config.get_type(name)  # type: ignore[attr-defined]  # torch installs it on the module at run time
        if get_origin(wanted) is None and not isinstance(value, wanted):
            raise InvalidOption(f"option {given!r} = {value!r} has type {type(value).__name__}, but Inductor wants {wanted}.")
        read[name] = value
    return read
