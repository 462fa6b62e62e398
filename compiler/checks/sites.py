"""Where a value of a graph comes from in the user's program, read back from its label (`compiler/labels.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_MODULES = 2  # named; the others are counted

_LABEL = re.compile(r"(?:(?P<module>[^:()]*): )?(?P<op>[^(]*?)(?: \((?P<file>[^()]*):(?P<line>\d+)\))?")


Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Site:
    """A module, an op, and the line of the program; "" and None for what is not known."""

    module: str
    op: str
    file: str
    line: int | None

    @classmethod
    def of(cls, label: str) -> Site:
        match = _LABEL.fullmatch(label)
        if match is None:
            return cls("", label, "", None)
        return cls(match["module"] or "", match["op"], match["file"] or "", int(match["line"]) if match["line"] else None)

    @property
    def key(self) -> Key:
        """Equal for the same place of a repeated block, and where only lines moved; outside modules the file is the place."""
        return re.sub(r"\d+", "*", self.module) or self.file, self.op

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""


@dataclass(slots=True)
class SiteGroup:
    """What stands at one place of the program, in all repetitions of a block; ``amount`` is bytes or microseconds."""

    first: Site
    amount: float = 0.0
    count: int = 0
    modules: dict[str, None] = field(default_factory=dict)

    def __str__(self) -> str:
        """``native_dropout (net.py:14) in blocks.0, blocks.1 and 2 more``."""
        names = [name for name in self.modules if name]
        shown = ", ".join(names[:MAX_MODULES]) + (f" and {len(names) - MAX_MODULES} more" if len(names) > MAX_MODULES else "")
        where = f" ({self.first.where})" if self.first.where else ""
        return f"{self.first.op}{where}" + (f" in {shown}" if shown else "")


Groups = dict[Key, SiteGroup]


def grouped(items: Iterable[tuple[Key, Site, float]]) -> Groups:
    """``(key, site, amount)`` by key, in order."""
    groups: Groups = {}
    for key, site, amount in items:
        group = groups.setdefault(key, SiteGroup(site))
        group.amount += amount
        group.count += 1
        group.modules[site.module] = None
    return groups
