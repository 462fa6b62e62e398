"""The planned step as a memory snapshot that PyTorch's viewer reads (https://pytorch.org/memory_viz, torch.cuda._memory_viz).

Each graph of the step is a device of the snapshot: one segment, what is held allocated at the start, then each allocation and free of the
simulated step in order. Addresses are made up by a first-fit allocator, so blocks do not overlap; the segment is as large as they need.
What the caller holds when backward has ended (outputs, gradients) stays allocated.

The viewer unpickles in JavaScript: plain data, and a protocol of at most 4.
"""

from __future__ import annotations

import pickle
import re
from bisect import insort
from collections.abc import Sequence
from typing import Any

from dyngran.compiler.pictures.plan_picture import WORKSPACE, GraphPicture
from dyngran.compiler.pictures.plan_terminal import plain

PROTOCOL = 4
BASE_ADDRESS, DEVICE_STRIDE = 0x7F0000000000, 1 << 44
ALIGNMENT_BYTES, SEGMENT_BYTES = 512, 2 * 2**20  # as the CUDA caching allocator rounds
_LABEL = re.compile(r"(?:(?P<module>[^:]*): )?(?P<op>.*?)(?: \((?P<file>[^():]+):(?P<line>\d+)\))?")

Frames = list[dict[str, Any]]


class FirstFit:
    """Hands out addresses from ``base``: the lowest gap that is large enough."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.end = base  # beyond everything handed out so far
        self.live: list[tuple[int, int]] = []  # (address, bytes) by address

    def take(self, size_bytes: int) -> int:
        """The address of a new block."""
        address = self.base
        for start, held_bytes in self.live:
            if start - address >= size_bytes:
                break
            address = _rounded(start + held_bytes, ALIGNMENT_BYTES)
        insort(self.live, (address, size_bytes))
        self.end = max(self.end, address + size_bytes)
        return address

    def give_back(self, address: int, size_bytes: int) -> None:
        """Free a block."""
        self.live.remove((address, size_bytes))


def snapshot_bytes(pictures: Sequence[GraphPicture]) -> bytes:
    """The pickled snapshot."""
    return pickle.dumps(snapshot(pictures), protocol=PROTOCOL)


def snapshot(pictures: Sequence[GraphPicture]) -> dict[str, Any]:
    """The snapshot as ``torch.cuda.memory._snapshot()`` gives it."""
    recorders = [_Recorder(picture, device) for device, picture in enumerate(pictures)]
    return {"segments": [one.segment() for one in recorders], "device_traces": [one.trace() for one in recorders]}


class _Recorder:
    """The events of one graph's step, recorded when it is made."""

    def __init__(self, picture: GraphPicture, device: int) -> None:
        self._picture = picture
        self._device = device
        self._memory = FirstFit(BASE_ADDRESS + device * DEVICE_STRIDE)
        self._events: list[dict[str, Any]] = []
        self._blocks: dict[int, tuple[int, Frames]] = {}  # live ones by address
        self._run()

    def _run(self) -> None:
        picture, live = self._picture, self._picture.after.live
        starts, length = picture.after.starts_us, len(live.ops)
        for band, size in picture.after.held:
            self._alloc(size, [_frame(f"held over the whole step: {band}", "", 0)], 0)
        problem = picture.problem
        stays = problem.forward_outputs | problem.gradients
        beginning: list[list[int]] = [[] for _ in range(length)]
        for place, one in enumerate(live.ranges):
            beginning[one.first].append(place)
        ending: list[list[int]] = [[] for _ in range(length)]
        for position in range(length):
            now = int(starts[position])
            for place in beginning[position]:
                one = live.ranges[place]
                address = self._alloc(one.size_bytes, self._frames(place), now)
                if one.last < length - 1 or one.value not in stays:
                    ending[one.last].append(address)
            if live.beside_bytes[position]:
                name = f"{problem.ops[live.ops[position]].name} ({WORKSPACE})"
                ending[position].append(self._alloc(live.beside_bytes[position], [_frame(name, "", 0)], now))
            for address in ending[position]:
                self._free(address, int(starts[position + 1]))

    def _alloc(self, size_bytes: int, frames: Frames, time_us: int) -> int:
        address = self._memory.take(size_bytes)
        self._blocks[address] = (size_bytes, frames)
        self._record("alloc", address, size_bytes, frames, time_us)
        return address

    def _free(self, address: int, time_us: int) -> None:
        size_bytes, frames = self._blocks.pop(address)
        self._memory.give_back(address, size_bytes)
        for action in ("free_requested", "free_completed"):
            self._record(action, address, size_bytes, frames, time_us)

    def _record(self, action: str, address: int, size_bytes: int, frames: Frames, time_us: int) -> None:
        event = {"action": action, "addr": address, "size": size_bytes, "stream": 0, "time_us": time_us, "frames": frames}
        self._events.append(event)

    def _frames(self, place: int) -> Frames:
        """Innermost first: the value and its kind, the line of the user's program, the module, the side of the step."""
        after = self._picture.after
        one = after.live.ranges[place]
        value = self._picture.problem.values[one.value]
        found = _LABEL.fullmatch(plain(value.label))
        parts = {} if found is None else found.groupdict()
        file, line = parts["file"] or "", int(parts["line"] or 0)
        side = "forward" if one.first < after.live.num_forward else "backward"
        return [
            _frame(f"{value.name} ({after.range_bands[place]})", "", 0),
            _frame(parts["op"] or value.name, file, line),
            _frame(parts["module"] or "(outside of any module)", "", 0),
            _frame(side, "", 0),
        ]

    def trace(self) -> list[dict[str, Any]]:
        """Every event, the segment's own first."""
        size_bytes = self._reserved_bytes
        segment = {"action": "segment_alloc", "addr": self._memory.base, "size": size_bytes, "stream": 0, "time_us": 0, "frames": []}
        return [segment, *self._events]

    @property
    def _reserved_bytes(self) -> int:
        return max(SEGMENT_BYTES, _rounded(self._memory.end - self._memory.base, SEGMENT_BYTES))

    def segment(self) -> dict[str, Any]:
        """The segment as the step leaves it."""
        blocks: list[dict[str, Any]] = []
        reached = self._memory.base
        for address in sorted(self._blocks):
            size_bytes, frames = self._blocks[address]
            if address > reached:
                blocks.append(_inactive(reached, address - reached))
            state = {"state": "active_allocated", "frames": frames}
            blocks.append({"address": address, "size": size_bytes, "requested_size": size_bytes, **state})
            reached = address + size_bytes
        rest_bytes = self._memory.base + self._reserved_bytes - reached
        if rest_bytes:
            blocks.append(_inactive(reached, rest_bytes))
        active_bytes = sum(size_bytes for size_bytes, _ in self._blocks.values())
        return {
            "device": self._device,
            "address": self._memory.base,
            "total_size": self._reserved_bytes,
            "allocated_size": active_bytes,
            "active_size": active_bytes,
            "requested_size": active_bytes,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": [0, 0],
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }


def _inactive(address: int, size_bytes: int) -> dict[str, Any]:
    return {"address": address, "size": size_bytes, "requested_size": 0, "state": "inactive", "frames": []}


def _frame(name: str, filename: str, line: int) -> dict[str, Any]:
    return {"name": plain(name), "filename": filename, "line": line}


def _rounded(size_bytes: int, unit_bytes: int) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes
