"""Long work is never silent: a line at least every two seconds, on the logger that the README names."""

from __future__ import annotations

import logging
import threading

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
