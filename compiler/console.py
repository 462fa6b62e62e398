"""What people see of dyngran's log who have set up no logging: warnings on stderr, with the name of who speaks, each of them once."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("dyngran")


class Console(logging.Handler):
    """In place of `logging.lastResort`, which writes a bare sentence each time it is said. Silent where any other handler listens."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("dyngran: %(message)s"))
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        sentence = record.getMessage()
        if sys.stderr is not None and sentence not in self._said and self._is_alone(logging.getLogger(record.name)):
            self._said.add(sentence)
            try:
                sys.stderr.write(f"{self.format(record)}\n")
            except (OSError, ValueError):  # nobody reads it any more, or it is closed
                self.handleError(record)

    def _is_alone(self, logger: logging.Logger | None) -> bool:
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True


def listen() -> None:
    """Let warnings reach people; a second call adds nothing."""
    if not any(isinstance(handler, Console) for handler in log.handlers):
        log.addHandler(Console())
