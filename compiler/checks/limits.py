"""How much a step may grow before `dyngran-plan check` fails: ``+1%``, ``+200MiB`` or ``+3ms`` beyond the committed plan, or ``20GiB``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from dyngran.compiler.budget import parse_bytes
from dyngran.passes.errors import InvalidOption, format_bytes, format_us

# A mask of one byte an element, saved once more in one layer of a bf16 transformer of 48 layers, is 0.06 % of what the step saves. What
# harmless edits change is nothing, and the statistics of a further norm (4 bytes a row) are below 0.001 %.
MAX_SAVED = "+0.05%"
MAX_PEAK = "+1%"
MAX_STEP = "+2%"

_US = {"us": 1.0, "ms": 1e3, "s": 1e6}
_PERCENT = re.compile(r"\+\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*%", re.ASCII)
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(us|ms|s)", re.ASCII)


class Unit(Enum):
    BYTES = "bytes"
    TIME = "us"
    COUNT = "count"

    def show(self, amount: float) -> str:
        """For people."""
        if self is Unit.COUNT:
            return f"{amount:.0f}"
        return format_bytes(amount) if self is Unit.BYTES else format_us(amount)


@dataclass(frozen=True, slots=True)
class Limit:
    """``share`` and ``extra`` are what may come on top of the committed amount; ``absolute`` is the most, whatever was committed."""

    text: str
    share: float = 0.0
    extra: float = 0.0
    absolute: float | None = None

    @classmethod
    def parse(cls, text: str, unit: Unit, *, source: str) -> Limit:
        """Raises InvalidOption, naming ``source``, if ``text`` is no limit of that unit."""
        stripped = text.strip()
        if percent := _PERCENT.fullmatch(stripped):
            return cls(stripped, share=float(percent[1]) / 100)
        amount = _amount(stripped.removeprefix("+").strip(), unit)
        if amount is None:
            forms = '"+1%", "+200MiB" or "20GiB"' if unit is Unit.BYTES else '"+2%", "+3ms" or "120ms"'
            raise InvalidOption(
                f"{source} = {text!r} is no limit. Valid forms are {forms}; + is what may come on top of the committed plan."
            )
        return cls(stripped, extra=amount) if stripped.startswith("+") else cls(stripped, absolute=amount)

    def allowed(self, committed: float) -> float:
        """The most that passes where ``committed`` is what the plan file says."""
        return self.absolute if self.absolute is not None else committed * (1 + self.share) + self.extra


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may change. ``graph_breaks`` is how many a step may have; None: as many as committed."""

    peak: Limit
    step: Limit
    saved: Limit
    graph_breaks: int | None = None

    @classmethod
    def parse(
        cls,
        *,
        max_peak: str | None = None,
        max_step: str | None = None,
        max_saved: str | None = None,
        max_graph_breaks: int | None = None,
    ) -> Limits:
        """As people write them; None: the default. Raises InvalidOption."""
        if max_graph_breaks is not None and max_graph_breaks < 0:
            raise InvalidOption(f"max_graph_breaks = {max_graph_breaks} is no limit: it must be 0 or more.")
        return cls(
            peak=Limit.parse(max_peak or MAX_PEAK, Unit.BYTES, source="max_peak"),
            step=Limit.parse(max_step or MAX_STEP, Unit.TIME, source="max_step"),
            saved=Limit.parse(max_saved or MAX_SAVED, Unit.BYTES, source="max_saved"),
            graph_breaks=max_graph_breaks,
        )


def _amount(text: str, unit: Unit) -> float | None:
    if unit is Unit.BYTES:
        return parse_bytes(text)
    match = _TIME.fullmatch(text)
    return float(match[1]) * _US[match[2]] if match else None
