"""What every test starts from: one thread per process, an empty store, no budget from outside, no compiled graph of an earlier test."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # pytest-xdist fills the cores; set before torch is imported

os.environ["DYNGRAN_CACHE_DIR"] = tempfile.mkdtemp(prefix="dyngran-tests-")  # plans found by an earlier version would hide changes

import pytest
from hypothesis import settings

settings.register_profile("dyngran", deadline=None, derandomize=True, print_blob=True)  # time decides no test, a rerun repeats it
settings.load_profile("dyngran")


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["DYNGRAN_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _untouched_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DYNGRAN_BUDGET", raising=False)
    yield
    if "dyngran.compiler.options" in sys.modules:
        sys.modules["dyngran.compiler.options"].set_defaults()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()
