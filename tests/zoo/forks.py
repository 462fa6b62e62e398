"""Jobs in forked processes: each starts with everything that the parent has imported, and dies alone."""

from __future__ import annotations

import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

OUT_OF_TIME = "not done after"


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
                    yield one.name, None, f"{OUT_OF_TIME} {timeout_s:g} s"
    finally:
        for one in running:
            _kill(one)


def _start(name: str, job: Callable[[], str], timeout_s: float) -> Running:
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.setsid()  # what it starts, compilers too, ends with it
        os.close(reading)
        try:
            with os.fdopen(writing, "w") as pipe:
                pipe.write(job())
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


def _kill(one: Running) -> None:
    _end_group(one)
    os.waitpid(one.process, 0)


def _end_group(one: Running) -> None:
    """Ends a process if it runs, and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(one.process, signal.SIGKILL)
    os.close(one.pipe)
