"""The fastest configuration of a kernel on one card, found by trying all candidates, and kept in the file that launches read.

Called by hand (``bench/storage_kernels.py --tune``), since it takes time. It allocates nothing but what the call itself does: it never
empties the L2 cache with a buffer of its own, as `triton.testing.do_bench` does. With tensors larger than that cache every run finds it
full of something else anyway.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dyngran.kernels import launch
from dyngran.kernels.launch import DEFAULTS, Configuration, tuning_file

BLOCK_FACTORS = (0.5, 1.0, 2.0, 4.0)  # of the default's block
NUM_WARPS = (2, 4, 8)
NUM_RUNS = 20
MIN_GAIN = 0.02  # of the default's time: a smaller one may be noise


@dataclass(frozen=True, slots=True)
class Trial:
    """One configuration of one kernel and the median time of a call with it, in microseconds."""

    key: str
    configuration: Configuration
    time_us: float


def tune(call: Callable[[], object], device: torch.device) -> list[Trial]:
    """Try all candidates for every kernel that ``call`` launches on a card, and use the fastest from now on. `save` keeps it.

    Raises RuntimeError if the device is no CUDA card.
    """
    if device.type != "cuda":
        raise RuntimeError(f"kernels are tuned on a card, got {device}")
    with torch.cuda.device(device):
        launch.asked.clear()
        call()
        return [trial for place in sorted(launch.asked, key=str) for trial in _try_all(call, *place)]


def save(device: torch.device) -> None:
    """Write what is known to be faster than the defaults on this card. Raises OSError if that cannot be written."""
    path = tuning_file(device)
    known = {key: best.pair for (other, key), best in launch.tuned.items() if other == device}
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.new")
    written.write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")
    written.replace(path)


def _try_all(call: Callable[[], object], device: torch.device, key: str) -> list[Trial]:
    default = DEFAULTS[key.partition(":")[0]]
    blocks = [int(default.block * factor) for factor in BLOCK_FACTORS]
    candidates = [default, *(Configuration(block, warps) for block in blocks for warps in NUM_WARPS if (block, warps) != default.pair)]
    trials = []
    for candidate in candidates:
        launch.tuned[device, key] = candidate
        trials.append(Trial(key, candidate, _median_us(call)))
    best = min(trials, key=lambda trial: trial.time_us)
    launch.tuned[device, key] = best.configuration if best.time_us < (1 - MIN_GAIN) * trials[0].time_us else default
    return trials


def _median_us(call: Callable[[], object]) -> float:
    """Device time of one call: the median over runs that lie between two events each. The first, which may compile, is not counted."""
    call()
    cuda: Any = torch.cuda  # events are not annotated
    events = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(NUM_RUNS)]
    cuda._sleep(NUM_RUNS * 200_000)  # some 100 us a run at 2 GHz: all launches are queued before the first one begins
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(1e3 * float(start.elapsed_time(stop)) for start, stop in events)
