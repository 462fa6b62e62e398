"""The tests of `test_kernels_triton.py` in Triton's interpreter, where there is no card to compile for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_kernels_triton.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-8000:]
