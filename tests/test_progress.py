"""Long work is never silent: a line at least every two seconds, on the logger that the README names; and warnings say who speaks."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dyngran.compiler import progress
from dyngran.compiler.progress import Heartbeat


def test_a_heartbeat_logs_while_work_goes_on_and_stops_with_it(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert progress.INTERVAL_S <= 2
    monkeypatch.setattr(progress, "INTERVAL_S", 0.01)
    seen = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.set()

    logger = logging.getLogger("dyngran")
    watch = Watch()
    logger.addHandler(watch)
    caplog.set_level(logging.INFO, logger="dyngran")
    try:
        with Heartbeat("working") as beat:
            assert seen.wait(30)
    finally:
        logger.removeHandler(watch)
    assert not beat._thread.is_alive()
    assert any("working" in message for message in caplog.messages)


WARNS = """
import logging
from dyngran.compiler import console
console.listen()
console.listen()
log = logging.getLogger("dyngran.plan")
log.info("planned")
for budget in (1, 1, 2):
    log.warning("budget %s", budget)
logging.basicConfig(format="theirs: %(message)s")
log.warning("budget %s", 1)
log.warning("budget %s", 3)
"""


def test_warnings_say_who_speaks_once_each_and_leave_it_to_logging_where_that_is_set_up(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WARNS], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stderr.splitlines() == ["dyngran: budget 1", "dyngran: budget 2", "theirs: budget 1", "theirs: budget 3"]
