"""Real data that dependencies ship: Python source text from sympy and handwritten digits from scikit-learn. No download."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

TEXT_FOLDERS = ("core", "solvers")


@dataclass(frozen=True, slots=True)
class Text:
    """``data`` are the bytes, uint8 ``[num_bytes]``; ``sha256`` is theirs."""

    data: Tensor
    num_files: int
    sha256: str


def read_text() -> Text:
    """The ``.py`` files directly in sympy's ``core`` and ``solvers`` folders, joined in the order of their paths."""
    spec = find_spec("sympy")
    if spec is None or spec.origin is None:
        raise SystemExit("The demo trains on the sources of sympy, which is not installed: run `make install` or `pip install sympy`.")
    root = Path(spec.origin).parent
    paths = sorted(path for folder in TEXT_FOLDERS for path in (root / folder).glob("*.py"))
    data = b"".join(path.read_bytes() for path in paths)
    return Text(torch.frombuffer(bytearray(data), dtype=torch.uint8), len(paths), hashlib.sha256(data).hexdigest())


def text_batch(data: Tensor, *, step: int, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Random windows of the text and the same shifted by one byte: two int64 ``[batch, context]``; the same for the same step."""
    generator = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(len(data) - context - 1, (batch, 1), generator=generator)
    windows = data[starts + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def read_digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits: float32 images ``[1797, 1, 8, 8]`` in 0..1 and int64 labels ``[1797]``."""
    if find_spec("sklearn") is None:
        raise SystemExit(
            "The demo's digits come with scikit-learn, which is not installed: run `make install` or `pip install scikit-learn`."
        )
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target, dtype=torch.int64)


def digits_batch(images: Tensor, labels: Tensor, *, step: int, batch: int) -> tuple[Tensor, Tensor]:
    """A random batch in channels-last layout; the same for the same step."""
    chosen = torch.randint(len(images), (batch,), generator=torch.Generator().manual_seed(2000 + step))
    return images[chosen].contiguous(memory_format=torch.channels_last), labels[chosen]
