"""What a program's runs say: eager mode is the truth, torch's own AOTAutograd without a plan the witness.

What eager mode or the witness rejects tells nothing about dyngran. Where dyngran differs from eager mode bit for bit as the witness does,
tracing has moved a rounding (a write to a view becomes a scatter, and a sum runs over other strides); where it does so by more, the witness
is wrong too, which is kept as a finding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from grammar import Program
from net import Seen, differences, relative_error

ROUNDING_EPS = (
    2048  # how far rounding that tracing moves may carry, in eps of the coarsest dtype of the program: another mask is above 1e-1
)

HALF = ("autocast", "cast")  # operations after which numbers may have passed through bfloat16


class Outcome(Enum):
    SAME = "same"
    ROUNDED = "rounded as stock does"
    DISCARDED = "discarded"
    FINDING = "finding"
    FAILED = "failed"

    @property
    def is_counted(self) -> bool:
        """Whether dyngran was really compared with eager mode."""
        return self in (Outcome.SAME, Outcome.ROUNDED)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reason`` is short and the same for the same kind of fault, so that it can be counted and shrunk against; ``details`` are not."""

    outcome: Outcome
    reason: str = ""
    details: str = ""


SAME = Verdict(Outcome.SAME)


def named(error: BaseException) -> str:
    """An error's class and the beginning of its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:100] if lines else ''}"


def judge(want: Seen, got: Seen, stock: Callable[[], Seen], *, eps: float) -> Verdict:
    """What it means that dyngran gave ``got`` where eager mode gave ``want``. ``stock`` runs the witness, which may raise."""
    wrong = differences(want, got)
    if not wrong:
        return SAME
    details = f"{', '.join(wrong)}: relative error {max(relative_error(want[name], got[name]) for name in wrong):.1e}"
    is_rounding = all(relative_error(want[name], got[name]) <= ROUNDING_EPS * eps for name in wrong)
    try:
        witness = stock()
    except Exception as error:  # noqa: BLE001 - whatever stops the witness, there is none
        if is_rounding:
            return Verdict(Outcome.ROUNDED, "stock stops", f"{details}; stock: {named(error)}")
        return Verdict(Outcome.FINDING, "differs from eager mode, and stock stops", f"{details}; stock: {named(error)}")
    if not {*differences(witness, got)}.intersection(wrong):  # elsewhere the witness may be wrong alone: its backward can move the stream
        if is_rounding:
            return Verdict(Outcome.ROUNDED, "", details)
        return Verdict(Outcome.FINDING, "stock differs from eager mode in the same way", details)
    kinds = sorted({name.split(" of ")[0].rstrip("0123456789 ") for name in wrong})
    kind = "a rounding of its own" if is_rounding else "other numbers"
    return Verdict(Outcome.FAILED, f"{kind} in {', '.join(kinds)}", details)


def coarsest_eps(seen: Seen, program: Program) -> float:
    """Of what the step gave, and of the half precision that the program passes through."""
    dtypes = {value.dtype for value in seen.values() if value is not None and value.is_floating_point()}
    if any(step.op in HALF for step in program.steps):
        dtypes.add(torch.bfloat16)
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
