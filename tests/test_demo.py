"""The demo runs end to end as people run it: a script in its own process, from another folder, without the repository importable."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parent.parent / "bench" / "demo.py"


def run_demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(DEMO), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


def to_bytes(text: str) -> float:
    amount, unit = text.split()
    return float(amount) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = run_demo(tmp_path_factory.mktemp("elsewhere"), "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_says_what_it_trains_on(output: str) -> None:
    assert re.search(r"sympy's sources, \d+ files, sha256 [0-9a-f]{64}", output)
    assert "scikit-learn's digits, 1797 images" in output


def test_each_table_has_an_equal_run_within_its_budget(output: str) -> None:
    size = r"([\d.]+ (?:B|[KMG]iB))"
    rows = re.findall(rf"{size} \(\d+% of the way\)\s+{size}\s+{size}\s+[\d.]+ \w+\s+(\d+)\s+[\d.]+, (.*)", output)
    assert len(rows) == 2
    for budget, predicted, measured, num_recomputed, loss in rows:
        assert loss.strip() == "equal"
        assert to_bytes(predicted) <= to_bytes(budget) * 1.001  # printed with four digits
        assert to_bytes(measured) <= to_bytes(budget) * 1.001
        assert int(num_recomputed) > 0


def test_too_few_steps_are_refused_by_name(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--steps", "2")
    assert done.returncode == 2
    assert "--steps must be at least 3" in done.stderr
