"""Plans for a target that is traced in a process of its own, which no failure of can harm the one that asks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from dyngran.compiler.offline.trace_server import written_settings
from dyngran.compiler.plans.planfile import PlanDocument, Settings, parse_plan
from dyngran.passes import errors
from dyngran.passes.errors import BudgetTooSmall, DyngranError, TargetError

# Not `-m`: that puts the current folder first, where a folder named like one of ours would be taken for it.
START = "import sys; sys.path[:] = [p for p in sys.path if p]; from dyngran.compiler.offline.trace_server import main; main(sys.argv[1:])"
KEPT_OUTPUT_BYTES = 2000  # of what the target printed: shown if it fails


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What to plan: a target (``file.py:callable`` or ``module:callable``), how, and for which code generator."""

    target: str
    settings: Settings = field(default_factory=Settings)
    codegen: str = "inductor"


def build(request: BuildRequest, progress: Callable[[str], None] = lambda line: None) -> PlanDocument:
    """The plan of a step. No parameter is allocated, and no card is needed unless costs are to be measured (``settings.profile`` None).

    Raises:
        TargetError: the target cannot be loaded, called or traced. BudgetTooSmall: no plan fits. InvalidOption, InvalidBudget.
    """
    with TraceProcess(request.target, request.settings.profile, progress) as process:
        return process.plan(request.settings, codegen=request.codegen)


class TraceProcess:
    """A context manager: a process that traces one target for one device, as often as `plan` is called."""

    def __init__(self, target: str, profile: str | None, progress: Callable[[str], None] = lambda line: None) -> None:
        self._target = target
        self._profile = profile
        self._progress = progress

    def __enter__(self) -> TraceProcess:
        self._output = tempfile.TemporaryFile()
        requests_out, requests_in = os.pipe()
        answers_out, answers_in = os.pipe()
        command = [sys.executable, "-c", START, str(requests_out), str(answers_in), self._target, self._profile or ""]
        self._process = subprocess.Popen(
            command, pass_fds=(requests_out, answers_in), stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT
        )
        os.close(requests_out)
        os.close(answers_in)
        self._requests, self._answers = os.fdopen(requests_in, "w"), os.fdopen(answers_out)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._answers, self._output):
            stream.close()
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()

    def plan(self, settings: Settings, *, codegen: str) -> PlanDocument:
        """One plan; the process serves further calls whether or not this one raises. Raises as `build`."""
        try:
            self._requests.write(json.dumps({"settings": written_settings(settings), "codegen": codegen}) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            raise self._death() from None
        for line in self._answers:
            answer = json.loads(line)
            if "progress" in answer:
                self._progress(answer["progress"])
            elif "document" in answer:
                return parse_plan(answer["document"], source="the plan that was just made")
            elif "error" in answer:
                raise _error_of(answer["error"])
            else:
                raise TargetError(f"target {self._target!r}: planning failed: {answer['crash']}.{self._said()}")
        raise self._death()

    def _death(self) -> TargetError:
        code = self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        hint = " Not enough host memory, perhaps." if code == -signal.SIGKILL else ""
        return TargetError(f"target {self._target!r}: the process that traces it {how}.{hint}{self._said()}")

    def _said(self) -> str:
        """The end of what the target printed."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - KEPT_OUTPUT_BYTES))
        printed = self._output.read().decode(errors="replace").strip()
        text = "".join(one if one.isprintable() or one == "\n" else "\N{REPLACEMENT CHARACTER}" for one in printed)
        return f" It printed:\n{text}" if text else ""


def _error_of(fields: dict[str, Any]) -> DyngranError:
    if fields["class"] == "BudgetTooSmall":
        return BudgetTooSmall(pinned=tuple((name, size) for name, size in fields["pinned"]), **fields["fields"])
    kind: type[DyngranError] = getattr(errors, fields["class"], DyngranError)
    return kind(fields["text"])
