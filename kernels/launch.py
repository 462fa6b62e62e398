"""How a kernel runs: Triton if it is installed, on the card of its tensors, in a configuration that is known beforehand.

A configuration is not searched for at the first call, as `triton.autotune` does. Its search allocates a buffer of the size of the L2 cache
beside a model that barely fits, waits for the device, and cannot happen in a CUDA graph's capture; and two ranks may choose differently.
`DEFAULTS` holds for every card; `dyngran.kernels.tuning`, called by hand, finds what is faster on one card and writes it to a file that is
read here once per process.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a card: the references are all that runs there
    triton = tl = None

__all__ = ["DEFAULTS", "Configuration", "asked", "configuration", "kernel", "launch", "tl", "triton", "tuned", "tuning_file"]

# Triton compiles anew for integers that are 1 or divisible by 16. Not for these: nothing in a kernel becomes faster by it.
NOT_SPECIALIZED = (
    *("value_id", "num_tail", "num_rows", "num_chosen", "num_maps"),
    *("run_units", "stride_units", "start_units", "num_column_blocks", "num_row_blocks"),
)


@dataclass(frozen=True, slots=True)
class Configuration:
    """How much one program does: ``block`` elements, words or bytes (the kernel says which) with ``num_warps`` warps."""

    block: int
    num_warps: int

    def __post_init__(self) -> None:
        if self.block < 1 or self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two, got {self.block}")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps must be a power of two up to 16, got {self.num_warps}")

    @property
    def pair(self) -> tuple[int, int]:
        return self.block, self.num_warps


# 32 to 64 bytes of loads in flight per thread: a Hopper card needs about 25 KiB per multiprocessor to saturate its memory.
DEFAULTS = {
    "pack_bits": Configuration(1024, 4),  # words of eight flags
    "unpack_bits": Configuration(1024, 4),
    "pack_sign": Configuration(512, 4),  # bytes of eight signs
    "unpack_sign": Configuration(512, 4),
    "quantize": Configuration(4096, 4),  # elements, whole groups
    "dequantize": Configuration(4096, 4),
    "cast": Configuration(8192, 4),  # bytes of the wider type
    "slice": Configuration(4096, 4),  # bytes
    "gather": Configuration(4096, 4),
    "scatter": Configuration(4096, 4),
}

tuned: dict[tuple[torch.device, str], Configuration] = {}
"""What is known to be faster than `DEFAULTS`, by card and key; filled from the card's file when the card is first used."""

asked: set[tuple[torch.device, str]] = set()
"""Cards and keys for which a configuration was looked up: what there is to tune."""


class _NoTriton:
    """Stands for a kernel where Triton is not installed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: object) -> Callable[..., None]:
        raise RuntimeError(f"{self.name} needs Triton to run on a card, and it is not installed: pip install triton")


def kernel(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or where there is no Triton a stand-in that says so when it is launched."""
    return _NoTriton(function.__name__) if triton is None else triton.jit(function, do_not_specialize=NOT_SPECIALIZED)


def launch(function: Any, num_programs: int, arguments: tuple[Any, ...], *, on: Tensor, num_warps: int, **constants: Any) -> None:
    """Run ``num_programs`` programs of a kernel on the card of ``on``, in its current stream.

    A product and a sum are never fused: a fused one rounds once, and would differ from the reference in one element of some ten thousand.
    """
    card: AbstractContextManager[Any] = torch.cuda.device(on.device) if on.is_cuda else nullcontext()  # a CPU: Triton's interpreter
    with card:
        function[(num_programs,)](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=False)


def configuration(key: str, device: torch.device) -> Configuration:
    """What to run a kernel with. ``key`` is its family, a name of `DEFAULTS`, and after colons the types that matter to its speed."""
    if device.type == "cuda":
        _read_tuned(device)
        asked.add((device, key))
        known = tuned.get((device, key))
        if known is not None:
            return known
    return DEFAULTS[key.partition(":")[0]]


def tuning_file(device: torch.device) -> Path:
    """``kernels-<card>-triton-<version>.json`` in ``$DYNGRAN_CACHE_DIR``, else ``$XDG_CACHE_HOME/dyngran``, else ``~/.cache/dyngran``."""
    card = "".join(letter if letter.isalnum() else "-" for letter in torch.cuda.get_device_name(device))
    own, shared = os.environ.get("DYNGRAN_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(own) if own else Path(shared or "~/.cache") / "dyngran"
    return folder.expanduser() / f"kernels-{card}-triton-{triton.__version__}.json"


@functools.cache
def _read_tuned(device: torch.device) -> None:
    """A file that cannot be read, or holds something else, is as good as none: the defaults are correct too."""
    try:
        entries = json.loads(tuning_file(device).read_text(encoding="utf-8"))
        tuned.update({(device, key): Configuration(*entry) for key, entry in entries.items() if key.partition(":")[0] in DEFAULTS})
    except (OSError, ValueError, TypeError, AttributeError):
        return
