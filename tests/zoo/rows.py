"""Rows of the zoo as lines of JSON, and what they were measured with."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch
from forks import run_jobs

import dyngran.compiler
import dyngran.passes
import dyngran.runtime
from zoo.trial import Row

LIBRARIES = ("torch", "triton", "transformers", "timm", "torchvision")


def versions(device: str) -> dict[str, str]:
    """What a row depends on: libraries, the product's sources (a hash), Python, device and day."""
    found = {"product": product_hash(), "python": platform.python_version(), "date": date.today().isoformat()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["machine"] = platform.machine()
    if device == "cuda":  # asked elsewhere: a process that has looked at a card cannot be forked
        ((_, name, _),) = run_jobs([("card", torch.cuda.get_device_name)], num_processes=1, timeout_s=120)
        found["machine"] = name or "unknown"
    return found


def product_hash() -> str:
    """Sixteen hexadecimal digits of the Python and C++ sources of dyngran."""
    digest = hashlib.sha256()
    for package in (dyngran, dyngran.compiler, dyngran.passes, dyngran.runtime):
        for folder in package.__path__:
            for path in sorted(p for p in Path(folder).rglob("*") if p.suffix in (".py", ".cpp", ".h")):
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, the newest of each model; none if there is no such file. A last line that was cut off is not there."""
    if not path.exists():
        return []
    found: dict[str, Row] = {}
    for line in path.read_text().splitlines():
        try:
            row = decode(line)
        except msgspec.DecodeError:
            continue
        found[row.name] = row
    return list(found.values())


def decode(line: str) -> Row:
    return msgspec.json.decode(line, type=Row)


def encode(row: Row) -> str:
    return msgspec.json.encode(row).decode()


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace a file of rows, sorted by name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(encode(row) + "\n" for row in sorted(rows, key=lambda row: row.name)))
