"""Progress that never falls silent: a bar with a spinner in a terminal, a line every 1.5 seconds anywhere else."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

SILENCE_S = 1.5


class Ticker(logging.Handler):
    """Shows the current stage, what dyngran logs, and how many of ``total`` steps are done, while it is entered."""

    def __init__(self, console: Console, *, total: int) -> None:
        super().__init__(logging.INFO)
        self._console = console
        self._total = total
        self._done = 0
        self._stage, self._detail = "starting", ""
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(self._stage, total=total or None)

    def stage(self, text: str) -> None:
        """Say what begins now."""
        self._stage, self._detail, self._began = text, "", time.monotonic()
        self._bar.update(self._task, description=escape(text))

    def advance(self, num_steps: int = 1) -> None:
        """Count training steps."""
        self._done += num_steps
        self._bar.advance(self._task, num_steps)

    def emit(self, record: logging.LogRecord) -> None:
        """What dyngran logs at INFO and above is shown beside the stage."""
        self._detail = ": " + record.getMessage().partition("\n")[0][:80]
        self._bar.update(self._task, description=escape(self._stage + self._detail))

    def __enter__(self) -> Ticker:
        logger = logging.getLogger("dyngran")
        logger.addHandler(self)
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)
        if self._console.is_terminal:
            self._bar.start()
        else:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._bar.stop()
        logging.getLogger("dyngran").removeHandler(self)
        if self._thread.is_alive():
            self._thread.join()

    def _tick(self) -> None:
        while not self._stop.wait(SILENCE_S):
            elapsed_s = time.monotonic() - self._began
            steps = f"[{self._done}/{self._total} steps] " if self._total else ""
            line = f"  {steps}{self._stage}, {elapsed_s:.0f} s{self._detail}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
