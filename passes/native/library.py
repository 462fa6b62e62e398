"""The planners' inner loops in C++: how the shared library is found, and the types that cross into it.

The library is built when dyngran is installed (setup.py) and holds no Python: any interpreter loads it by ctypes. What it computes has
a readable truth in Python: `Simulator.timeline` with `passes/fuse.py`, and `passes/schedule.py`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from zlib import crc32

HERE = Path(__file__).resolve().parent


@cache
def library(*, holds_gil: bool = False) -> ctypes.CDLL:
    """The loaded library; its calls let other threads run, unless ``holds_gil``.

    Raises ImportError if it was not built, or from other sources than lie beside it.
    """
    path = next((found for suffix in EXTENSION_SUFFIXES if (found := HERE / f"_core{suffix}").exists()), None)
    if path is None:
        raise ImportError(f"dyngran's native library is missing in {HERE}: install dyngran again (building it takes a C++17 compiler)")
    loaded = ctypes.PyDLL(str(path)) if holds_gil else ctypes.CDLL(str(path))
    loaded.dyngran_version.restype = ctypes.c_uint32
    sources = [*sorted(HERE.glob("*.cpp")), *sorted(HERE.glob("*.h"))]
    if sources and loaded.dyngran_version() != crc32(b"".join(source.read_bytes() for source in sources)):
        raise ImportError(f"{path} was built from other sources than lie beside it: install dyngran again (pip install -e .)")
    return loaded
