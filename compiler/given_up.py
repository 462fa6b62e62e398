"""Functions that Dynamo gives up on and leaves to run as they stand: a backend hears nothing of them, and people who set a budget must."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dyngran.compiler import torch_private
from dyngran.compiler.options import parse_options
from dyngran.passes.errors import DyngranError

log = logging.getLogger("dyngran")

_watches: dict[object, torch_private.GivenUpWatch] = {}
_told: dict[str, None] = {}  # sentences of this process, in order


def watch(backend: object) -> None:
    """From now on, warn of functions that were to be compiled for ``backend`` under a budget, and that Dynamo gave up on; again after
    `torch.compiler.reset`."""
    found = _watches.get(backend)
    if found is None:
        found = torch_private.GivenUpWatch(lambda compiled_for, found: _tell(found) if _has_budget(compiled_for, backend) else None)
        _watches[backend] = found
    found.start()


def told() -> tuple[str, ...]:
    """What was said so far."""
    return tuple(_told)


def _has_budget(compiled_for: torch_private.CompiledFor, backend: object) -> bool:
    settings: Mapping[str, Any] = compiled_for.settings
    try:
        return compiled_for.backend is backend and parse_options(settings.get("options"), mode=settings.get("mode")).budget is not None
    except DyngranError:
        return False  # refused by the graphs of this model


def _tell(found: torch_private.GivenUp) -> None:
    sentence = (
        f"torch made no graph to plan of {found.function} ({found.place}): what it computes itself is not planned, and the budget does not "
        f"cover what that holds. The reason: {found.reason} torch.compile(..., fullgraph=True) stops there."
    )
    if sentence not in _told:
        _told[sentence] = None
        log.warning(sentence)
