"""The process that traces: it answers requests for plans of one target until its input ends.

Requests and answers are JSON objects, one to a line, over two pipes whose numbers are its arguments; what the user's code prints goes where
standard output goes. It is started by `compiler.offline.build` and shares nothing with its parent: emulating a card changes it for good.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from threading import Thread
from typing import Any, TextIO

from dyngran.compiler.options import Outputs
from dyngran.compiler.plans.planfile import Settings, dump_plan
from dyngran.passes.errors import BudgetTooSmall, DyngranError


def main(arguments: list[str]) -> None:
    """``arguments``: the descriptors of requests and answers, the target, and the device profile ('' for the device that is here)."""
    requests, answers = os.fdopen(int(arguments[0])), os.fdopen(int(arguments[1]), "w")
    Thread(target=_leave_with_parent, args=(requests.fileno(),), daemon=True).start()
    os.register_at_fork(after_in_child=partial(os.closerange, int(arguments[1]), int(arguments[1]) + 1))  # its end is our end to the parent
    warnings.simplefilter("ignore")  # of torch's, about tensors without data
    logging.getLogger("dyngran").setLevel(logging.INFO)
    logging.getLogger("dyngran").addHandler(_Progress(answers))
    tracer = None
    for line in requests:
        try:
            if tracer is None:
                tracer = _tracer(arguments[2], arguments[3] or None)
            request = json.loads(line)
            document = tracer.plan(read_settings(request["settings"]), codegen=request["codegen"])
            _answer(answers, {"document": dump_plan(document)})
        except DyngranError as error:
            _answer(answers, {"error": _fields_of(error)})
        except Exception as error:  # noqa: BLE001  # whatever went wrong here must reach the parent by name
            traceback.print_exc()
            _answer(answers, {"crash": _described(error)})


def _leave_with_parent(requests: int) -> None:
    """A parent that was killed waits for no plan: its end of the pipe is gone, whatever this process is in the middle of."""
    hang_up = select.poll()
    hang_up.register(requests, 0)
    hang_up.poll()
    os._exit(1)


def _tracer(target: str, profile: str | None) -> Any:
    from dyngran.compiler.offline.tracer import Tracer, find_place

    return Tracer(target, find_place(profile))


def _described(error: Exception) -> str:
    from dyngran.compiler.offline.target import described

    return described(error)


def written_settings(settings: Settings) -> dict[str, Any]:
    """Settings as JSON holds them."""
    return asdict(settings) | {"outputs": settings.outputs.value}


def read_settings(fields: Mapping[str, Any]) -> Settings:
    """The reverse of `written_settings`."""
    return Settings(**{**fields, "outputs": Outputs(fields["outputs"]), "storage": tuple(fields["storage"])})


def _fields_of(error: DyngranError) -> dict[str, Any]:
    if isinstance(error, BudgetTooSmall):
        fields = {"budget_bytes": error.budget_bytes, "least_peak_bytes": error.least_peak_bytes, "hint": error.hint}
        return {"class": "BudgetTooSmall", "fields": fields, "pinned": error.pinned}
    return {"class": type(error).__name__, "text": str(error)}


class _Progress(logging.Handler):
    def __init__(self, answers: TextIO) -> None:
        super().__init__()
        self._answers = answers

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            _answer(self._answers, {"progress": record.getMessage()})


def _answer(answers: TextIO, content: Mapping[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
