"""The graphs of one step, in order: a graph break cuts a step in several, but the budget belongs to the step.

What an earlier graph saved is live during all of a later one; what a later one leaves behind (the gradients of its parameters) is live
during the backward of an earlier one.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Container, Sequence
from typing import Any, ClassVar, Protocol

import torch

from dyngran.compiler import torch_private
from dyngran.compiler.static_memory import storage_bytes
from dyngran.passes.plan import Plan
from dyngran.runtime.memory import device_memory
from dyngran.runtime.optimizer_state import find_optimizers


class Member(Protocol):
    """What a chain needs to know of a graph."""

    plan: Plan | None
    device: torch.device
    chain: StepChain
    frame_id: int | None
    held: dict[int, int]
    runs_in_forward: int

    def parameter_ids(self) -> set[int]: ...
    def saved_outputs(self) -> dict[int, int]: ...
    def bytes_beside(self, counted: Container[int]) -> int: ...
    def counted_storages(self) -> frozenset[int]: ...


class StepChain:
    """Graphs of one forward, in order: Dynamo compiled them one after the other because of breaks, or one takes what another returned.

    A graph after which no more are known to come ends a chain; it goes on if its results are taken.
    """

    _open = threading.local()
    _by_backward: ClassVar[weakref.WeakKeyDictionary[type, weakref.ref[Any]]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._members: list[weakref.ref[Any]] = []
        self._continues: list[bool] = []
        self.has_run_backward = False

    @classmethod
    def join(cls, member: Any, inputs: Sequence[Any], *, continues: bool) -> StepChain:
        """Put ``member`` after the graphs whose results are among its ``inputs``, and after the open chain of this thread.

        ``continues``: more graphs of the same step are known to follow.
        """
        chain = getattr(cls._open, "chain", None)
        if chain is None or chain._is_over(member):
            chain = cls()
        feeding = [one for producer in cls._producers(inputs) for one in (*producer.chain.members_before(producer), producer)]
        if set(map(id, feeding)) - set(map(id, chain.members())):
            chain = cls._of([*feeding, *chain.members()])
        chain._add(member, continues)
        cls._open.chain = chain if continues else None
        return chain

    @classmethod
    def _of(cls, members: Sequence[Any]) -> StepChain:
        """A chain of graphs that were in others; the last of those, if it has no more."""
        distinct = list({id(one): one for one in members}.values())
        last: StepChain = distinct[-1].chain
        if last.members() == distinct:
            last.has_run_backward = False
            return last
        chain = cls()
        for one in distinct:
            chain._add(one, one.chain.continues(one))
            one.chain = chain
        return chain

    def _is_over(self, member: Any) -> bool:
        """Whether ``member`` is of another forward: backward has begun, no compiled code runs, or its code was compiled for this one."""
        frames = [one.frame_id for one in self.members() if one.frame_id is not None]
        return self.has_run_backward or not torch_private.is_nested() or member.frame_id in frames

    @classmethod
    def leave(cls) -> None:
        """A forward ends here, by a refusal: what is compiled next is of another."""
        cls._open.chain = None

    def _add(self, member: Any, continues: bool) -> None:
        self._members.append(weakref.ref(member))
        self._continues.append(continues)

    @classmethod
    def note_results(cls, member: Any, outputs: Sequence[Any]) -> None:
        """``outputs`` of a compiled forward are those of ``member``: each such forward has a class of backward nodes of its own."""
        for node in torch_private.compiled_backwards(outputs):
            cls._by_backward.setdefault(type(node), weakref.ref(member))

    @classmethod
    def _producers(cls, inputs: Sequence[Any]) -> list[Any]:
        """Graphs that wait for the gradients of ``inputs``, in the order in which they ran."""
        refs = [cls._by_backward.get(type(node)) for node in torch_private.compiled_backwards(inputs)]
        return [member for ref in refs if ref is not None and (member := ref()) is not None]

    def continues(self, member: Any) -> bool:
        """True if more graphs of the same step follow."""
        return self._continues[self._position(member)]

    def members(self) -> list[Any]:
        """The graphs that are still alive, in order."""
        return [member for ref in self._members if (member := ref()) is not None]

    def members_before(self, member: Any) -> list[Any]:
        """Those that run before ``member``."""
        return [one for ref in self._members[: self._position(member)] if (one := ref()) is not None]

    def note_run(self, member: Any) -> None:
        """``member`` runs: forward begins with the first."""
        if self._position(member) == 0:
            for one in self.members():
                one.runs_in_forward = 0
        member.runs_in_forward += 1

    def bytes_before(self, member: Any, inputs: Sequence[Any]) -> int:
        """Bytes that earlier graphs, earlier runs of this one in the same forward and the function that ``member`` is of hold while it
        runs, without its ``inputs``. Where an allocator counts them already: 0."""
        memory = device_memory(member.device)
        if memory.allocated_bytes is not None:
            return 0
        earlier = self.members_before(member)
        total_bytes: int = sum(one.plan.saved_bytes * max(1, one.runs_in_forward) for one in earlier if one.plan is not None)
        if earlier and member.plan is not None:
            total_bytes += member.plan.saved_bytes * member.runs_in_forward
        if memory.held_bytes is not None:  # each graph counts what all of them hold
            return total_bytes
        counted = storage_bytes(inputs, member.device)
        for one in earlier:
            saved = one.saved_outputs()
            total_bytes -= sum(size for storage, size in saved.items() if storage in counted)
            counted |= saved
            total_bytes += sum(size for storage, size in one.held.items() if storage not in counted)
            counted |= one.held
        beside_bytes: int = member.bytes_beside(counted)
        return total_bytes + beside_bytes

    def bytes_after(self, member: Any, held: Sequence[Any]) -> int:
        """Bytes that later graphs will hold while backward of this one runs: gradients (where no allocator counts them, also the
        parameters themselves). Which parameters there are is asked of optimizers, and of the modules that are being called."""
        if not self.continues(member):
            return 0
        earlier = self.members_before(member)
        own = {id(tensor) for tensor in held}
        own.update(name for one in earlier for name in one.parameter_ids())  # theirs come later
        leaves = [t for t in held if isinstance(t, torch.nn.Parameter)]
        known = [p for optimizer in find_optimizers(leaves) for group in optimizer.param_groups for p in group["params"]]
        names = [p for module in torch_private.modules_being_called()[-1:] for _, p in module.named_parameters(remove_duplicate=False)]
        own.difference_update(name for name, times in Counter(map(id, names)).items() if times > 1)  # tied: a later graph may read it
        later = [p for p in {id(p): p for p in (*known, *names)}.values() if p.requires_grad and id(p) not in own]
        total_bytes: int = sum(p.numel() * p.element_size() for p in later)
        memory = device_memory(member.device)
        if memory.allocated_bytes is None and memory.held_bytes is None:
            counted = {storage for one in (*earlier, member) for storage in one.counted_storages()}
            total_bytes += sum(size for storage, size in storage_bytes(later, member.device).items() if storage not in counted)
        return total_bytes

    def _position(self, member: Any) -> int:
        return next(i for i, ref in enumerate(self._members) if ref() is member)
