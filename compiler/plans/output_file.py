"""Files that commands write: whole or not at all, and one sentence where that fails."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from dyngran.passes.errors import PlanFileError


def write_file(path: str, content: bytes, *, what: str) -> None:
    """Put ``content`` where ``path`` is, in one move; what stands there stays if that fails. ``what`` names it in errors.

    Raises:
        PlanFileError: the path is a folder or no file, or cannot be written.
    """
    where = f"{what} {path!r} cannot be written"
    try:
        target = Path(os.path.realpath(path))  # a link stays, and what it leads to is replaced
        if not os.path.basename(path) or target.is_dir():
            raise PlanFileError(f"{where}: it is a folder. Name a file.")
        if target.exists() and not target.is_file():
            raise PlanFileError(f"{where}: what is there is no file. Name another path.")
        if not target.parent.exists():
            raise PlanFileError(f"{where}: there is no folder {str(target.parent)!r}. Make it, or name another file.")
        _replace(target, content)
    except (OSError, ValueError) as error:  # ValueError: no path that a file can have
        if isinstance(error, PlanFileError):
            raise
        raise PlanFileError(f"{where}: {(error.strerror if isinstance(error, OSError) else None) or error}.") from error


def check_writable(path: str, *, what: str) -> None:
    """Raises PlanFileError now where `write_file` would fail after minutes of work: the folder is missing or read-only, or is the path."""
    folder = Path(os.path.realpath(path)).parent
    if Path(path).is_dir() or not os.path.basename(path):
        cause = "it is a folder"
    elif not folder.is_dir():
        cause = f"there is no folder {str(folder)!r}"
    elif not os.access(folder, os.W_OK):
        cause = f"the folder {str(folder)!r} is read-only"
    else:
        return
    raise PlanFileError(f"{what} {path!r} cannot be written: {cause}. Name another file.")


def _replace(target: Path, content: bytes) -> None:
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
