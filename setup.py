"""The planners' inner loops are C++: one shared library without Python in it, loaded by ctypes. The rest is in pyproject.toml."""

from pathlib import Path
from zlib import crc32

from setuptools import Extension, setup

HERE = Path("passes/native")
SOURCES = sorted(HERE.glob("*.cpp"))
HEADERS = sorted(HERE.glob("*.h"))
CONTENT = b"".join(path.read_bytes() for path in [*SOURCES, *HEADERS])  # in the order in which passes/native/__init__.py reads them

setup(
    ext_modules=[
        Extension(
            "dyngran.passes.native._core",
            [str(path) for path in SOURCES],
            depends=[str(path) for path in HEADERS],
            define_macros=[("DYNGRAN_NATIVE_VERSION", f"{crc32(CONTENT)}u")],
            # No fused multiply-add: plans are the same on every machine. Hidden symbols can be inlined.
            extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", "-ffp-contract=off"],
            language="c++",
        )
    ]
)
