"""dyngran: the fastest training step that fits a memory budget.

``torch.compile(model, backend="dyngran", options={"budget": "20GiB"})`` needs none of these names; they attach an optimizer, explain a
plan and set defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyngran.compiler.version import VERSION as __version__

if TYPE_CHECKING:
    from dyngran import errors
    from dyngran.compiler.explain import explain, frontier, save_plan
    from dyngran.compiler.options import set_defaults
    from dyngran.passes.plan import Plan
    from dyngran.runtime.optimizer_state import attach

__all__ = ["Plan", "__version__", "attach", "errors", "explain", "frontier", "save_plan", "set_defaults"]

_HOMES = {
    "Plan": "dyngran.passes.plan",
    "attach": "dyngran.runtime.optimizer_state",
    "explain": "dyngran.compiler.explain",
    "frontier": "dyngran.compiler.explain",
    "save_plan": "dyngran.compiler.explain",
    "set_defaults": "dyngran.compiler.options",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: ``import dyngran`` alone stays cheap."""
    from importlib import import_module

    if name == "errors":
        return import_module("dyngran.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'dyngran' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
