"""Programs that failed once, as JSON files: what failed, on which versions, and the program."""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from grammar import Program, from_document, to_document

FOLDER = Path(__file__).parent / "corpus"
ROOT = Path(__file__).parents[2]
PRODUCT = ("compiler", "passes", "runtime", "kernels", "dyngran")


@dataclass(frozen=True, slots=True)
class Case:
    """``level`` is where it failed; it is replayed at both. ``remark`` says what the fault was, once somebody knows."""

    name: str
    level: str
    reason: str
    versions: dict[str, str]
    program: Program
    remark: str = ""


def versions() -> dict[str, str]:
    """Of torch, and a hash of the product."""
    return {"torch": torch.__version__, "product": product_tree()}


def product_tree() -> str:
    """A hash of the product's folders as they are now, changes that are not committed included; "unknown" outside a checkout."""
    head, changes = _git("rev-parse", *(f"HEAD:{folder}" for folder in PRODUCT)), _git("diff", "HEAD", "--", *PRODUCT)
    if head is None or changes is None:
        return "unknown"
    tree = hashlib.sha256(head.encode()).hexdigest()[:12]
    return tree if not changes else f"{tree}+{hashlib.sha256(changes.encode()).hexdigest()[:12]}"


def _git(*args: str) -> str | None:
    done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def write_case(case: Case) -> Path:
    path = FOLDER / f"{case.name}.json"
    document: dict[str, Any] = {
        "level": case.level,
        "reason": case.reason,
        "remark": case.remark,
        "versions": case.versions,
        "program": to_document(case.program),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def read_cases() -> list[Case]:
    return [read_case(path) for path in sorted(FOLDER.glob("*.json"))]


def read_case(path: Path) -> Case:
    document = json.loads(path.read_text())
    return Case(
        name=path.stem,
        level=document["level"],
        reason=document["reason"],
        versions=document["versions"],
        program=from_document(document["program"]),
        remark=document["remark"],
    )
