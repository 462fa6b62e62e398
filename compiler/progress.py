"""A line every two seconds while something takes long: planning and code generation never look like a hang."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType

log = logging.getLogger("dyngran")

INTERVAL_S = 1.8


class Heartbeat:
    """Logs ``what`` and the seconds it has taken, at level INFO, every two seconds while the context is open."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="dyngran progress", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._since = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._done.wait(INTERVAL_S):
            log.info("%s: %.0f s so far", self._what, time.monotonic() - self._since)
