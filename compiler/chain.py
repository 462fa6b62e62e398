"""The graphs of one step, in order: a graph break cuts a step in several, but the budget belongs to the step.

What an earlier graph saved is live during all of a later one; what a later one leaves behind (the gradients of its parameters) is live
during the backward of an earlier one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from dyngran.passes.plan import Plan
from dyngran.passes.problem import Kind
from dyngran.runtime.memory import device_memory
from dyngran.runtime.optimizer_state import find_optimizers


class Member(Protocol):
    """What a chain needs to know of a graph."""

    plan: Plan | None
    device: torch.device

    def parameters(self) -> list[torch.nn.Parameter]: ...
    def static_of(self, kinds: tuple[Kind, ...]) -> int: ...


class StepChain:
    """Graphs that Dynamo compiled one after the other because of breaks. A graph that no break follows ends the chain."""

    _open = threading.local()

    def __init__(self) -> None:
        self._members: list[weakref.ref[Any]] = []
        self._continues: list[bool] = []

    @classmethod
    def join(cls, member: Any, *, continues: bool) -> StepChain:
        """Put ``member`` at the end of the open chain of this thread; ``continues`` says that a graph break follows it."""
        chain = getattr(cls._open, "chain", None) or cls()
        chain._members.append(weakref.ref(member))
        chain._continues.append(continues)
        cls._open.chain = chain if continues else None
        return chain

    def continues(self, member: Any) -> bool:
        """True if more graphs of the same step follow."""
        return self._continues[self._position(member)]

    def members(self) -> list[Any]:
        """The graphs that are still alive, in order."""
        return [member for ref in self._members if (member := ref()) is not None]

    def members_before(self, member: Any) -> list[Any]:
        """Those that run before ``member``."""
        return [one for ref in self._members[: self._position(member)] if (one := ref()) is not None]

    def bytes_before(self, member: Any) -> int:
        """Bytes that earlier graphs of the step hold while this one runs. Where an allocator counts them already: 0."""
        memory = device_memory(member.device)
        if memory.allocated_bytes is not None:
            return 0
        earlier = [m for m in self.members_before(member) if m.plan is not None]
        kinds = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT) if memory.held_bytes is None else ()  # else each graph counts what all hold
        return sum(m.plan.saved_bytes + m.static_of(kinds) for m in earlier)

    def bytes_after(self, member: Any, held: Sequence[Any]) -> int:
        """Bytes that later graphs will hold while backward of this one runs: gradients (where no allocator counts them, also the
        parameters themselves)."""
        if not self.continues(member):
            return 0
        own = {id(tensor) for tensor in held}
        leaves = [t for t in held if isinstance(t, torch.nn.Parameter)]
        later: dict[int, int] = {
            id(p): p.numel() * p.element_size()
            for optimizer in find_optimizers(leaves)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and id(p) not in own
        }
        memory = device_memory(member.device)
        times = 2 if memory.allocated_bytes is None and memory.held_bytes is None else 1
        return times * sum(later.values())

    def _position(self, member: Any) -> int:
        return next(i for i, ref in enumerate(self._members) if ref() is member)
