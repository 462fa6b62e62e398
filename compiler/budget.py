"""The budget of one training step: how people write it, and how many bytes it means on a device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from enum import Enum
from fractions import Fraction

from dyngran.passes.errors import InvalidBudget, format_bytes

UNIT_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
VALID_FORMS = 'an int of bytes, "8GiB", "900MB", "1.5 GB", "75%" (of the device\'s memory) or "auto"'

_UNITS = {"b": "B", **{unit: f"{unit[0].upper()}{unit[1:-1]}B" for unit in UNIT_BYTES if unit != "b"}}  # as people write them
NO_UNIT_FROM_BYTES = 1024  # text without a unit that means fewer bytes: the unit was forgotten

MAX_TEXT = 64  # no amount of memory needs more characters
MAX_BYTES = 2**63 - 1
MARGIN_FRACTION = Fraction(3, 100)  # "auto" leaves this much of the device free, or MIN_MARGIN_BYTES if that is more
MIN_MARGIN_BYTES = 512 * 2**20

_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*|%)", re.ASCII)


def parse_bytes(text: str) -> int | None:
    """The bytes that ``text`` (``"64KiB"``, ``"1.5 GB"``, ``"4096"``) means, rounded down; None if it is not an amount."""
    match = _match(text)
    if match is None or match[2] == "%" or (match[2] and match[2] not in UNIT_BYTES):
        return None
    num_bytes = int(Fraction(Decimal(match[1])) * UNIT_BYTES[match[2] or "b"])
    return num_bytes if num_bytes <= MAX_BYTES else None


def _match(text: str) -> re.Match[str] | None:
    stripped = text.strip().lower()
    return _AMOUNT.fullmatch(stripped) if len(stripped) <= MAX_TEXT else None


class BudgetForm(Enum):
    BYTES = "bytes"
    PERCENT = "percent"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Budget:
    """The peak that one step may reach. ``amount`` is bytes, percent of the device, or 0 for AUTO.

    ``str(budget)`` is a form that `parse` reads back as an equal budget.
    """

    form: BudgetForm
    amount: Decimal = Decimal(0)

    @classmethod
    def parse(cls, value: object, *, source: str = "budget") -> Budget:
        """Read a budget. ``source`` is where it was written, for the message.

        Raises:
            InvalidBudget: it is none of the valid forms, or not above zero; the message lists the forms.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return cls._of_bytes(value, value, source)
        if not isinstance(value, str):
            raise _invalid(value, source, f"{type(value).__name__} is not an amount of memory")
        if value.strip().lower() == "auto":
            return cls(BudgetForm.AUTO)
        match = _match(value)
        if match is not None and match[2] == "%":
            percent = Decimal(match[1])
            if not 0 < percent <= 100:
                raise _invalid(value, source, "a percentage must be above 0% and at most 100%")
            return cls(BudgetForm.PERCENT, percent)
        num_bytes = parse_bytes(value)
        if num_bytes is None:
            raise _invalid(value, source, "it cannot be read as an amount of memory" + _nearest(match))
        if match is not None and not match[2] and 0 < num_bytes < NO_UNIT_FROM_BYTES:
            raise _invalid(value, source, f"it has no unit; did you mean '{match[1]}GiB'{_or_percent(match[1])}?")
        return cls._of_bytes(num_bytes, value, source)

    @classmethod
    def _of_bytes(cls, num_bytes: int, value: object, source: str) -> Budget:
        if num_bytes <= 0:
            raise _invalid(value, source, "it must be at least one byte")
        if num_bytes > MAX_BYTES:
            raise _invalid(value, source, "it is more than any device has")
        return cls(BudgetForm.BYTES, Decimal(num_bytes))

    def __str__(self) -> str:
        if self.form is BudgetForm.AUTO:
            return "auto"
        if self.form is BudgetForm.PERCENT:
            return f"{self.amount:f}%"
        num_bytes = int(self.amount)
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if num_bytes % UNIT_BYTES[unit.lower()] == 0:
                return f"{num_bytes // UNIT_BYTES[unit.lower()]}{unit}"
        return f"{num_bytes}B"

    def resolve(self, *, device_total_bytes: int, device_free_bytes: int, held_by_us_bytes: int) -> int:
        """The budget in bytes on a device of ``device_total_bytes``, of which ``device_free_bytes`` are free now.

        ``held_by_us_bytes`` is what this process holds there; "auto" leaves out what others hold, and a margin of 3 % of the
        device or 512 MiB, whichever is more.

        Raises:
            InvalidBudget: "auto" on a device of which others leave nothing.
        """
        if self.form is BudgetForm.BYTES:
            return int(self.amount)
        if self.form is BudgetForm.PERCENT:
            return max(1, int(Fraction(self.amount) / 100 * device_total_bytes))
        others_bytes = max(0, device_total_bytes - device_free_bytes - held_by_us_bytes)
        margin_bytes = max(int(MARGIN_FRACTION * device_total_bytes), MIN_MARGIN_BYTES)
        num_bytes = device_total_bytes - others_bytes - margin_bytes
        if num_bytes <= 0:
            raise InvalidBudget(
                f'budget "auto" leaves nothing to train with: the device has {format_bytes(device_total_bytes)}, others hold '
                f"{format_bytes(others_bytes)} and the safety margin is {format_bytes(margin_bytes)}. "
                f"Free memory there or name a budget: {VALID_FORMS}."
            )
        return num_bytes


def _nearest(match: re.Match[str] | None) -> str:
    """A suggestion for an amount whose unit is no unit."""
    if match is None:
        return ""
    near = [f"{match[2]}ib"] if f"{match[2]}ib" in UNIT_BYTES else get_close_matches(match[2], UNIT_BYTES.keys() - {"b"}, n=1)
    return f"; did you mean '{match[1]}{_UNITS[near[0]]}'?" if near else ""


def _or_percent(amount: str) -> str:
    return f" or '{amount}%'" if Decimal(amount) <= 100 else ""


def _invalid(value: object, source: str, problem: str) -> InvalidBudget:
    if isinstance(value, int) and abs(value) > MAX_BYTES:
        shown = f"an int of {value.bit_length()} bits"
    else:
        shown = repr(value)
    shown = shown if len(shown) <= MAX_TEXT else shown[: MAX_TEXT - 3] + "..."
    end = "" if problem.endswith("?") else "."
    return InvalidBudget(f"{source} = {shown}: {problem}{end} Valid forms are {VALID_FORMS}.")
