"""Where a source file of the user's lies: the labels of a graph hold only its name."""

from __future__ import annotations

import os
from pathlib import Path

_SKIPPED = frozenset({"node_modules", "site-packages", "__pycache__", "build", "dist"})
MAX_FOLDERS = 5_000  # searched under the current folder


class SourceFiles:
    """Files by name: beside the target first, then anywhere under the current folder. Paths are relative to that folder."""

    def __init__(self, target: str) -> None:
        self._target = Path(target.rpartition(":")[0] or target)
        self._found: dict[str, set[Path]] | None = None

    def find(self, name: str) -> str | None:
        """None if there is no such file, or more than one. A whole path under the current folder is taken as it is."""
        if Path(name).is_absolute() and Path(name).is_file() and Path(name).is_relative_to(Path.cwd()):
            return _relative(Path(name))
        beside = self._target.parent / Path(name).name
        if beside.is_file():
            return _relative(beside)
        if self._found is None:
            self._found = _search(Path.cwd())
        paths = self._found.get(Path(name).name, set())
        return _relative(next(iter(paths))) if len(paths) == 1 else None


def _search(root: Path) -> dict[str, set[Path]]:
    found: dict[str, set[Path]] = {}
    for position, (folder, folders, files) in enumerate(os.walk(root)):
        if position >= MAX_FOLDERS:
            break
        folders[:] = [one for one in folders if not one.startswith(".") and one not in _SKIPPED]
        for name in files:
            if name.endswith(".py"):
                found.setdefault(name, set()).add(Path(folder) / name)
    return found


def _relative(path: Path) -> str:
    return Path(os.path.relpath(path)).as_posix()
