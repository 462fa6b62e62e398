"""The backend that torch.compile finds under the name "dyngran"."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import fx

from dyngran.compiler import console, given_up, registry, torch_private
from dyngran.compiler.chain import StepChain
from dyngran.compiler.options import parse_options
from dyngran.compiler.planned_graph import PlannedGraph
from dyngran.passes.errors import DyngranError

log = logging.getLogger("dyngran")


def dyngran(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, object] | None = None
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's under a memory budget.

    Errors of dyngran's own are raised by the first call of what is returned, not here: Dynamo would wrap them in classes of its own, or
    swallow them under ``suppress_errors``.
    """
    given_up.watch(dyngran)
    try:
        graph = PlannedGraph(module, example_inputs, parse_options(options, mode=mode))
        graph.compile(example_inputs)
    except DyngranError as error:
        StepChain.leave()
        torch_private.note_planned()
        return _refuse(error)
    if graph.plan is not None:
        torch_private.note_planned()
    registry.remember(graph)
    return graph


def _refuse(error: DyngranError) -> Callable[..., Any]:
    bare = copy.copy(error)  # an error that was raised keeps the frames it came through; Dynamo and log handlers may keep it for ever
    log.info("refused: %s", bare)

    def refuse(*_: Any) -> NoReturn:
        raise copy.copy(bare)

    return refuse


console.listen()
given_up.watch(dyngran)  # here, since of a model that is given up as a whole this function never hears
