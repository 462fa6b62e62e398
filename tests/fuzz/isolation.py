"""Programs run in another process, which a program may end or never leave: what that means is a verdict like others."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import TracebackType

import compile_level
import joint_level
import torch
from forks import OUT_OF_TIME, Answering
from grammar import Program, from_document, to_document
from verdict import Outcome, Verdict, named


@dataclass(frozen=True, slots=True)
class Level:
    """How programs are run: the check, and what it compares with by itself. One program in ``more_every`` is looked at more closely."""

    check: Callable[[Program, bool], Verdict]
    eager: Callable[[Program], object]
    stock: Callable[[Program, bool], object]
    more_every: int
    timeout_s: float

    def has_more(self, seed: int) -> bool:
        return seed % self.more_every == 0


LEVELS = {
    "joint": Level(  # more: peaks are measured
        check=lambda program, has_more: joint_level.check(program, is_measured=has_more),
        eager=joint_level.eager,
        stock=lambda program, _: joint_level.stock(program),
        more_every=20,
        timeout_s=300,
    ),
    "compile": Level(  # more: Inductor compiles it as well
        check=lambda program, has_more: compile_level.check(program, has_inductor=has_more),
        eager=compile_level.eager,
        stock=lambda program, has_more: compile_level.stock(program, has_inductor=has_more),
        more_every=20,
        timeout_s=600,
    ),
}


class Isolated:
    """Checks programs in one forked process after the other: a new one only where the last has died, so the parent must not run any."""

    def __init__(self, level: Level) -> None:
        self._level = level
        self._checks = Answering(self._answer)

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._checks.__exit__(kind, error, trace)

    def check(self, program: Program, *, has_more: bool) -> Verdict:
        """A death is dyngran's fault unless eager mode or stock dies on the program as well, alone in a process of its own."""
        verdict, why = self._ask(self._checks, "check", program, has_more)
        if verdict is not None:
            return verdict
        if has_more:  # a witness of what is more is none of the rest
            plain = self.check(program, has_more=False)
            if not plain.outcome.is_counted:
                return plain
        said = []
        for way in ("eager", "stock"):
            with Answering(self._answer) as alone:
                witness, end = self._ask(alone, way, program, has_more)
            if witness is None:
                return Verdict(Outcome.DISCARDED, f"{way}: {end}")
            said.append(f"{way}: {witness.reason or 'lives'}")
        return Verdict(Outcome.FAILED, why, "; ".join(said))

    def _ask(self, process: Answering, way: str, program: Program, has_more: bool) -> tuple[Verdict | None, str]:
        question = json.dumps([way, has_more, to_document(program)])
        answer, why = process.ask(question, timeout_s=self._level.timeout_s)
        if answer is None:
            return None, why
        outcome, reason, details = json.loads(answer)
        return Verdict(Outcome(outcome), reason, details), ""

    def _answer(self, question: str) -> str:
        torch.set_num_threads(1)
        way, has_more, document = json.loads(question)
        verdict = self._run(way, from_document(document), has_more)
        return json.dumps([verdict.outcome.value, verdict.reason, verdict.details])

    def _run(self, way: str, program: Program, has_more: bool) -> Verdict:
        try:
            if way == "check":
                return self._level.check(program, has_more)
            if way == "eager":
                self._level.eager(program)
            else:
                self._level.stock(program, has_more)
        except Exception as error:  # noqa: BLE001 - a check catches what a program may raise: this is another fault, and others go on
            return Verdict(Outcome.FAILED, f"{way} stops: {named(error)}", "".join(traceback.format_exception(error))[-2500:])
        return Verdict(Outcome.SAME)


def is_out_of_time(verdict: Verdict) -> bool:
    return OUT_OF_TIME in verdict.reason


def preload() -> None:
    """Imports what the first program would, once for all processes: 577 modules, about a second and a half."""
    for name in ("torch._functorch.aot_autograd", "torch._inductor.compile_fx", "dyngran.compiler.backend"):
        import_module(name)
