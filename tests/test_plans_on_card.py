"""Plans made without training, on the card that they are for: the committed portable one of the demo's GPT, and three made there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dyngran.passes.devices import match_device

BENCH = Path(__file__).resolve().parent.parent / "bench"
MATCHED = 0.95

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card"),
    pytest.mark.xdist_group("plans on a card"),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `bench/offline.py` finds, by how the plan was made."""
    folder = tmp_path_factory.mktemp("plans")
    shutil.copy(BENCH / "plans" / "gpt.json", folder)
    card = match_device(torch.cuda.get_device_name())
    assert card is not None
    command = [sys.executable, str(BENCH / "offline.py"), "train", "--models", "gpt", "--device", card.name, "--plans", str(folder)]
    done = subprocess.run([*command, "--side-by-side"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["plan"]: row for row in found}


@pytest.mark.parametrize("name", ["portable", "card-hidden", "card-there", "profiled", "training"])
def test_the_peak_is_within_the_budget(rows: dict[str, dict[str, Any]], name: str) -> None:
    assert rows[name]["peak_bytes"] <= rows[name]["budget_bytes"], rows[name]


@pytest.mark.parametrize("name", ["card-hidden", "card-there", "profiled"])
def test_a_plan_by_the_same_torch_is_taken_unchanged(rows: dict[str, dict[str, Any]], name: str) -> None:
    assert rows[name]["is_unchanged"], rows[name]


def test_a_plan_by_the_processor_build_is_found_again(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["portable"]["share_matched"] >= MATCHED, rows["portable"]
    assert rows["portable"]["made_with"].endswith("+cpu")


def test_hiding_the_card_changes_no_plan(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["card-hidden"]["hidden_and_there_are_equal"]
