"""Work in forked processes: each starts with everything that the parent has imported, and dies alone."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

OUT_OF_TIME = "not done after"


def end_on_sigterm() -> None:
    """From now on SIGTERM ends this process as an exit does, which takes its forked processes and its temporary folders with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@dataclass(slots=True)
class Running:
    name: str
    process: int
    pipe: int
    deadline: float
    answer: bytes = b""


def run_jobs(
    jobs: Iterable[tuple[str, Callable[[], str]]], *, num_processes: int, timeout_s: float
) -> Iterator[tuple[str, str | None, str]]:
    """Run ``(name, job)`` pairs, so many at a time; yields ``(name, what the job returned, "")`` as they end.

    What ends without an answer yields ``(name, None, why)``: a signal, an exit, or ``timeout_s`` seconds.
    """
    waiting, running = iter(jobs), list[Running]()
    try:
        while True:
            while len(running) < num_processes and (job := next(waiting, None)) is not None:
                with _sigterm_waits():
                    running.append(_start(*job, timeout_s))
            if not running:
                return
            ready, _, _ = select.select([one.pipe for one in running], [], [], 1.0)
            for one in list(running):
                if one.pipe in ready and (part := os.read(one.pipe, 1 << 16)):
                    one.answer += part
                elif one.pipe in ready:
                    running.remove(one)
                    yield _ended(one)
                elif time.monotonic() > one.deadline:
                    running.remove(one)
                    _kill(one)
                    yield one.name, None, _out_of_time(timeout_s)
    finally:
        for one in running:
            _kill(one)


class Answering:
    """Questions, a line each, that a forked process answers with a line each. Where it has died, the next question starts another one."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer = answer
        self._running: Running | None = None
        self._questions = -1  # where they are written to, while a process runs

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        if self._running is not None:
            _kill(self._forget())

    def ask(self, question: str, *, timeout_s: float) -> tuple[str | None, str]:
        """``(answer, "")``, or ``(None, why)`` where there is none: a signal, an exit, or ``timeout_s`` seconds."""
        one = self._running or self._begin(timeout_s)
        one.answer, one.deadline = b"", time.monotonic() + timeout_s
        with suppress(BrokenPipeError):  # it died after its last answer: its pipe is at its end
            os.write(self._questions, question.encode() + b"\n")
        while not one.answer.endswith(b"\n"):
            ready, _, _ = select.select([one.pipe], [], [], max(0.0, one.deadline - time.monotonic()))
            if not ready:
                _kill(self._forget())
                return None, _out_of_time(timeout_s)
            part = os.read(one.pipe, 1 << 16)
            if not part:
                one.answer = b""
                return _ended(self._forget())[1:]
            one.answer += part
        return one.answer.decode().removesuffix("\n"), ""

    def _begin(self, timeout_s: float) -> Running:
        reading, self._questions = os.pipe()

        def answer_all(pipe: TextIO) -> None:
            os.close(self._questions)  # so that the questions end when the parent does
            with os.fdopen(reading) as questions:
                for question in questions:
                    pipe.write(self._answer(question.removesuffix("\n")) + "\n")
                    pipe.flush()

        with _sigterm_waits():
            self._running = _fork("", answer_all, timeout_s)
        os.close(reading)
        return self._running

    def _forget(self) -> Running:
        assert self._running is not None
        one, self._running = self._running, None
        os.close(self._questions)
        return one


@contextmanager
def _sigterm_waits() -> Iterator[None]:
    """SIGTERM is heeded after the block: what has just been forked is not yet known to those who end it."""
    came = []
    heeded = signal.signal(signal.SIGTERM, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, heeded)
        if came:
            os.kill(os.getpid(), signal.SIGTERM)


def _start(name: str, job: Callable[[], str], timeout_s: float) -> Running:
    def run(pipe: TextIO) -> None:
        pipe.write(job())

    return _fork(name, run, timeout_s)


def _fork(name: str, run: Callable[[TextIO], None], timeout_s: float) -> Running:
    """A process that does nothing but ``run``, with a pipe for what it has to say."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.setsid()  # what it starts, compilers too, ends with it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(reading)
        try:
            with os.fdopen(writing, "w") as pipe:
                run(pipe)
        except BaseException:  # noqa: BLE001 - nothing may go on in the parent's code
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    return Running(name, process, reading, time.monotonic() + timeout_s)


def _ended(one: Running) -> tuple[str, str | None, str]:
    """What a process said that has closed its pipe, and so is about to end or has ended."""
    _, status = os.waitpid(one.process, 0)
    _end_group(one)
    if one.answer:
        return one.name, one.answer.decode(), ""
    return one.name, None, f"killed by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else "ended without an answer"


def _out_of_time(timeout_s: float) -> str:
    return f"{OUT_OF_TIME} {timeout_s:g} s"


def _kill(one: Running) -> None:
    _end_group(one)
    os.waitpid(one.process, 0)


def _end_group(one: Running) -> None:
    """Ends a process if it runs, and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(one.process, signal.SIGKILL)
    os.close(one.pipe)
