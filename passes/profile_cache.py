"""Measurements on disk, so that an operator is timed once per device, torch release and settings.

Format: JSON lines, one measurement a line, appended with a single write (``O_APPEND``), so writers in several processes do not tear
each other's lines; a line that cannot be read is skipped, and of two lines for one key the last counts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

MAX_WAIT_S = 30.0  # for another process to measure; its own measurements take a tenth of it at most

_log = logging.getLogger("dyngran.profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one operator call costs.

    Attributes:
        cost_us: device time on CUDA, wall time on the CPU.
        workspace_bytes: most bytes that are live inside the call beyond the results that outlive it.
        source: where the numbers come from, for people: ``measured: median of 5`` or ``roofline: <why>``.
        result_bytes: bytes of storage of each result tensor as the call really allocates it, 0 for a result that shares storage with
            an argument or an earlier result; None if it was not run.
        result_strides: strides in elements of each result tensor as the call really lays it out; None if it was not run.
    """

    cost_us: float
    workspace_bytes: int
    source: str
    result_bytes: tuple[int, ...] | None = None
    result_strides: tuple[tuple[int, ...], ...] | None = None

    @property
    def is_measured(self) -> bool:
        return self.source.startswith("measured")


def default_cache_dir() -> Path:
    """``$DYNGRAN_CACHE_DIR``, else ``$XDG_CACHE_HOME/dyngran``, else ``~/.cache/dyngran``."""
    own = os.environ.get("DYNGRAN_CACHE_DIR")
    if own:
        return Path(os.path.expanduser(own))  # "~/x" reaches us where no shell has expanded it
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "dyngran"


def device_settings(device: torch.device) -> str:
    """Everything besides the call itself that changes its time or workspace, as one line of text."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    settings: dict[str, object] = {
        "device": name,
        "torch": torch.__version__,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        cudnn: Any = torch.backends.cudnn  # its submodules are not annotated
        settings |= {
            "matmul": torch.backends.cuda.matmul.fp32_precision,
            "conv": cudnn.conv.fp32_precision,
            "cudnn": (cudnn.version(), cudnn.benchmark, cudnn.deterministic),
        }
    else:
        settings |= {"threads": torch.get_num_threads(), "mkldnn": torch.backends.mkldnn.enabled}
    return json.dumps(settings, sort_keys=True, default=str)


class ProfileCache:
    """Measurements by key, in memory and in ``<directory>/<name>.jsonl``. Never raises because of the disk.

    ``directory=None`` keeps everything in memory. A directory that cannot be written is reported once to the ``dyngran.profile`` logger.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._tables: dict[str, dict[str, Measurement]] = {}
        self._lock = threading.Lock()
        self._is_reported = False

    @classmethod
    def default(cls) -> ProfileCache:
        return cls(default_cache_dir())

    def get(self, settings: str, key: str) -> Measurement | None:
        with self._lock:
            return self._table(settings).get(key)

    def put(self, settings: str, measurements: Iterable[tuple[str, Measurement]]) -> None:
        """Remember measurements taken under ``settings``; one append to disk for all of them."""
        with self._lock:
            table, lines = self._table(settings), []
            for key, measurement in measurements:
                table[key] = measurement
                lines.append(json.dumps({"key": key, **_to_json(measurement)}) + "\n")
            path = self._path(settings)
            if not lines or path is None:
                return
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                try:
                    # a torn last line of a writer that died is closed off by the leading newline
                    os.write(descriptor, ("\n" + "".join(lines)).encode())
                finally:
                    os.close(descriptor)
            except OSError as error:
                self._report(error)

    @contextmanager
    def alone(self, settings: str) -> Iterator[None]:
        """While no other process measures under these settings; what one has measured meanwhile is known inside.

        Operators that run beside those of another process are timed too long, and processes that train together (one for each card) then
        plan with the same costs. After `MAX_WAIT_S`, or where the directory cannot be written, the caller is not alone.
        """
        path = self._path(settings)
        if path is None:
            yield
            return
        lock = FileLock(path.with_suffix(".lock"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=MAX_WAIT_S)
        except (OSError, NotImplementedError, Timeout) as error:
            _log.info("measuring beside other processes: %s", error)
        try:
            with self._lock:
                self._table(settings).update(self._read(path))
            yield
        finally:
            lock.release()

    def _path(self, settings: str) -> Path | None:
        if self._directory is None:
            return None
        return self._directory / f"ops-v3-{hashlib.sha256(settings.encode()).hexdigest()[:16]}.jsonl"

    def _table(self, settings: str) -> dict[str, Measurement]:
        if settings not in self._tables:
            self._tables[settings] = self._read(self._path(settings))
        return self._tables[settings]

    def _read(self, path: Path | None) -> dict[str, Measurement]:
        if path is None:
            return {}
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._report(error)
            return {}
        table = {}
        for line in text.splitlines():
            entry = _from_json(line)
            if entry is not None:
                table[entry[0]] = entry[1]
        return table

    def _report(self, error: OSError) -> None:
        if not self._is_reported:
            self._is_reported = True
            _log.warning("measurements are kept in memory only: %s. Set DYNGRAN_CACHE_DIR to a directory that can be written.", error)


def _to_json(measurement: Measurement) -> dict[str, object]:
    return {
        "cost_us": measurement.cost_us,
        "workspace_bytes": measurement.workspace_bytes,
        "source": measurement.source,
        "result_bytes": None if measurement.result_bytes is None else list(measurement.result_bytes),
        "result_strides": None if measurement.result_strides is None else [list(stride) for stride in measurement.result_strides],
    }


def _from_json(line: str) -> tuple[str, Measurement] | None:
    if not line.strip():
        return None
    try:
        entry = json.loads(line)
        results, strides = entry["result_bytes"], entry["result_strides"]
        measurement = Measurement(
            cost_us=float(entry["cost_us"]),
            workspace_bytes=int(entry["workspace_bytes"]),
            source=str(entry["source"]),
            result_bytes=None if results is None else tuple(int(size) for size in results),
            result_strides=None if strides is None else tuple(tuple(int(step) for step in stride) for stride in strides),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    sizes = (measurement.workspace_bytes, *(measurement.result_bytes or ()))
    if not (math.isfinite(measurement.cost_us) and measurement.cost_us >= 0 and min(sizes) >= 0):
        return None
    return str(entry.get("key")), measurement
