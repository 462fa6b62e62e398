"""``dyngran-plan doctor``: will dyngran work here, and if not, what is missing and what to type.

Nothing is imported before its check runs, so a missing library is a finding and not a crash. Looking changes nothing: the training step
runs in a process of its own with a store of its own, and a cache folder that is not there stays so.
"""

from __future__ import annotations

import operator
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib import import_module, metadata
from pathlib import Path

import dyngran
from dyngran.compiler.version import VERSION
from dyngran.passes.errors import InvalidBudget, format_bytes

SCHEMA = 1  # of `findings_json`
MIN_PYTHON = (3, 10)
TORCH_RANGE = "<2.14,>=2.11"  # where dyngran's own metadata is missing
LIBRARIES = ("networkx", "sympy", "pulp", "highspy", "rich", "scipy", "filelock", "msgspec")
CACHED = (("profiles", "ops-*.jsonl"), ("plans", "plans/*.json"))  # in the cache folder
DRIVER_FILE = Path("/proc/driver/nvidia/version")
OFF_SWITCHES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")  # "1": torch.compile returns what it was given
REINSTALL = "pip install . in dyngran's folder"
WRITABLE = "export DYNGRAN_CACHE_DIR=<a folder to write in>"
MAX_TEXT = 120  # characters of an exception

SMOKE_SECONDS = 120.0
SMOKE = """
import sys
try:
    import torch
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="dyngran", options={"codegen": "eager", "budget": None})
    compiled(torch.randn(4, 8, device=device)).square().mean().backward()
    optimizer.step()
    import dyngran
    dyngran.explain(compiled)  # raises if nothing was planned
except Exception as error:
    sys.exit(" ".join(f"{type(error).__name__}: {error}".splitlines()[:2]))
print(device)
"""


class Status(Enum):
    OK = "ok"
    WARNING = "warning"  # dyngran works, with less than it could have
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found, and what to type about it ("": nothing)."""

    check: str
    status: Status
    found: str
    advice: str = ""


Row = tuple[Status, str, str]  # a finding without the name of its check
Check = Callable[[], Iterator[Row]]


def examine(*, smoke: bool = True) -> tuple[Finding, ...]:
    """Run every check, in order; the training step, which takes seconds, only with ``smoke``. Never raises: a crash is a finding."""
    return tuple(finding for name, check in _checks(smoke=smoke) for finding in _findings(name, check))


def exit_code(findings: Sequence[Finding]) -> int:
    """0 if nothing failed, else 1; warnings do not count."""
    return int(any(finding.status is Status.FAILED for finding in findings))


def findings_json(findings: Sequence[Finding]) -> dict[str, object]:
    """The findings for programs, in the order of the checks."""
    rows = [{"check": one.check, "status": one.status.value, "found": one.found, "advice": one.advice} for one in findings]
    return {"schema": SCHEMA, "dyngran": VERSION, "ok": exit_code(findings) == 0, "findings": rows}


def _checks(*, smoke: bool) -> list[tuple[str, Check]]:
    alone: list[tuple[str, Check]] = [("python", _python), ("dyngran", _dyngran), ("native library", _native_library)]
    alone += [
        ("torch", _torch),
        ("backend", _backend),
        *((name, partial(_library, name)) for name in LIBRARIES),
        ("solver", _solver),
        ("driver", _driver),
    ]
    alone += [("environment", _environment), ("import path", _import_path)]
    on_torch: list[tuple[str, Check]] = [("C++ compiler", _cpp_compiler), ("triton", _triton), ("card", _cards)]
    on_torch += [("host memory", _host_memory), ("cache", _cache), *([("training step", _training_step)] if smoke else [])]
    return [*alone, *((name, partial(_with_torch, check)) for name, check in on_torch)]


def _findings(name: str, check: Check) -> Iterator[Finding]:
    try:
        for status, found, advice in check():
            yield Finding(check=name, status=status, found=found, advice=advice)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a machine is a finding
        yield Finding(check=name, status=Status.FAILED, found=_line(error), advice="mend what failed above; else report this")


def _with_torch(check: Check) -> Iterator[Row]:
    if sys.modules.get("torch") is not None:  # `_torch` has imported it
        yield from check()
    else:
        yield Status.WARNING, "not checked: torch cannot be imported", ""


def _judged(is_well: bool, found: str, advice: str, *, otherwise: Status = Status.FAILED) -> Row:
    return (Status.OK, found, "") if is_well else (otherwise, found, advice)


def _python() -> Iterator[Row]:
    found = f"{platform.python_version()}, {_short(sys.executable)}"
    yield _judged(sys.version_info >= MIN_PYTHON, found, "install Python 3.10 or later")


def _dyngran() -> Iterator[Row]:
    try:
        installed = metadata.version("dyngran")
    except metadata.PackageNotFoundError:
        installed = "not"
    found = f"{VERSION}, {_short(dyngran.__path__[0])}" + (f", {installed} installed" if installed != VERSION else "")
    yield _judged(installed == VERSION, found, REINSTALL, otherwise=Status.WARNING)


def _native_library() -> Iterator[Row]:
    from dyngran.passes.native import library

    try:
        yield Status.OK, f"loads, of sources {library().dyngran_version():08x}", ""
    except (ImportError, OSError, AttributeError) as error:  # not built or stale; of another machine; of another dyngran
        yield Status.FAILED, str(error).partition(": install")[0][:MAX_TEXT], f"{REINSTALL} (takes a C++17 compiler)"


def _torch() -> Iterator[Row]:
    try:
        import torch
    except (ImportError, OSError) as error:  # the latter: a shared library of another system
        yield Status.FAILED, f"cannot be imported: {_line(error)}", _pip("torch")
        return
    cuda, hip = torch.version.cuda, torch.version.hip
    yield _version("torch", str(torch.__version__), f", {f'CUDA {cuda}' if cuda else f'ROCm {hip}' if hip else 'CPU'} build")


def _backend() -> Iterator[Row]:
    is_known = bool(metadata.entry_points(group="torch_dynamo_backends", name="dyngran"))
    yield _judged(is_known, f"'dyngran' is {'' if is_known else 'not '}registered with torch", REINSTALL)


def _library(name: str) -> Iterator[Row]:
    try:
        version = metadata.version(name)
        import_module(name)
    except metadata.PackageNotFoundError:
        yield Status.FAILED, "not installed", _pip(name)
    except Exception as error:  # noqa: BLE001 - a library may raise anything while it is imported
        yield Status.FAILED, f"cannot be imported: {_line(error)}", f"pip install --force-reinstall {name}"
    else:
        yield _version(name, version)


def _solver() -> Iterator[Row]:
    import pulp

    from dyngran.passes.solvers.ilp import Limits, make_solver

    solver = make_solver(Limits(max_seconds=10.0))
    model = pulp.LpProblem("doctor", pulp.LpMaximize)
    add = getattr(model, "add_variable", pulp.LpVariable)  # as in ilp.py
    x, y = (add(name, lowBound=0, cat="Integer") for name in "xy")
    model += x + y
    model += 2 * x + y <= 5
    model += x + 2 * y <= 5
    model.solve(solver)
    if (best := pulp.value(model.objective)) is None or abs(best - 3) > 1e-6:
        yield Status.FAILED, f"{solver.name} answers {best} where 3 is right", "pip install --force-reinstall highspy pulp"
    else:
        found = f"{solver.name} solves a small program"
        yield _judged(isinstance(solver, pulp.HiGHS), found, "pip install --force-reinstall highspy", otherwise=Status.WARNING)


def _cpp_compiler() -> Iterator[Row]:
    from dyngran.compiler.torch_private import missing_tool

    if missing := missing_tool({"cpu"}):
        found, _, advice = missing.partition(": ")
        yield Status.FAILED, found, f"{advice}. codegen='eager' needs none"
        return
    compiler = _short(shutil.which(os.environ.get("CXX") or "g++") or "one that Inductor finds")
    has_header = (Path(sysconfig.get_path("include")) / "Python.h").exists()  # Inductor's code for the CPU and triton's include it
    yield _judged(has_header, compiler + ("" if has_header else ", but no Python.h"), "apt install python3-dev", otherwise=Status.WARNING)


def _triton() -> Iterator[Row]:
    import torch

    from dyngran.compiler.torch_private import missing_tool

    if not torch.cuda.is_available():
        yield Status.OK, "not needed without a card", ""
    elif missing := missing_tool({"cuda"}):
        yield Status.FAILED, missing.partition(": ")[0], "pip install triton. codegen='eager' needs none"
    else:
        yield Status.OK, str(import_module("triton").__version__), ""


def _cards() -> Iterator[Row]:
    import torch

    from dyngran.passes.devices import match_device
    from dyngran.runtime.memory import device_memory

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.device("cuda", index)
            name, memory = torch.cuda.get_device_name(device), device_memory(device)
            major, minor = torch.cuda.get_device_capability(device)
            spec = match_device(name)
            known = "not in the device table" if spec is None else spec.name
            room = f"{format_bytes(memory.free_bytes)} of {format_bytes(memory.total_bytes)} free"
            yield Status.OK, f"{index}: {name} ({known}), sm_{major}{minor}, {room}", ""
    elif (driver := _nvidia_driver()) is None:
        yield Status.OK, "none: models train on the CPU", "plans can be made for a card with --device"
    elif torch.version.cuda is None:
        yield (
            Status.WARNING,
            f"NVIDIA driver {driver}, but torch is no CUDA build",
            "install torch's CUDA build: https://pytorch.org/get-started",
        )
    else:
        yield (
            Status.WARNING,
            f"NVIDIA driver {driver}, but torch can use no card",
            f"nvidia-smi (must show a card and CUDA {torch.version.cuda})",
        )


def _driver() -> Iterator[Row]:
    yield Status.OK, f"NVIDIA {driver}" if (driver := _nvidia_driver()) else "none of NVIDIA's that tells its version", ""


def _nvidia_driver() -> str | None:
    """The version of NVIDIA's kernel driver; None if there is none, or nobody tells (WSL)."""
    try:
        match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", DRIVER_FILE.read_text())
    except OSError:
        return None
    return match[1] if match else None


def _host_memory() -> Iterator[Row]:
    import torch

    from dyngran.runtime.memory import device_memory

    memory = device_memory(torch.device("cpu"))
    yield Status.OK, f"{format_bytes(memory.free_bytes)} of {format_bytes(memory.total_bytes)} available", ""


def _cache() -> Iterator[Row]:
    """What the cache folder holds, and whether a file can be written there, or in what it would be made in."""
    from dyngran.passes.profile_cache import default_cache_dir

    folder = default_cache_dir()
    try:
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"x")
        held = [(kind, [path.stat().st_size for path in folder.glob(files)]) for kind, files in CACHED]
    except NotADirectoryError:
        yield Status.WARNING, f"{_short(nearest)} is a file, not a folder", f"remove it, or {WRITABLE}"
    except OSError as error:
        yield Status.WARNING, f"{_short(folder)} cannot be used: {error.strerror or error}", WRITABLE
    else:
        amounts = [f"{kind}: {len(sizes)} ({format_bytes(sum(sizes))})" for kind, sizes in held]
        yield Status.OK, ", ".join([_short(folder), *(amounts if folder.exists() else ["not there yet"])]), ""


def _environment() -> Iterator[Row]:
    from dyngran.compiler.budget import Budget
    from dyngran.compiler.options import BUDGET_VARIABLE, NO_BUDGET

    off = [name for name in OFF_SWITCHES if os.environ.get(name) == "1"]
    for name in off:
        yield Status.FAILED, f"{name}=1: torch.compile does nothing", f"unset {name}"
    budget = os.environ.get(BUDGET_VARIABLE, "")
    try:
        if budget.strip().lower() not in NO_BUDGET:
            Budget.parse(budget, source=BUDGET_VARIABLE)
    except InvalidBudget:
        yield Status.FAILED, f"{BUDGET_VARIABLE}={budget[:MAX_TEXT]!r} is no budget", f"export {BUDGET_VARIABLE}=8GiB, or unset it"
    else:
        given = [f"{name}={value}" for name in (BUDGET_VARIABLE, "DYNGRAN_CACHE_DIR") if (value := os.environ.get(name))]
        yield Status.OK, ", ".join(given) or "no variable of dyngran's is set", ""


def _import_path() -> Iterator[Row]:
    """Whether dyngran's kernels are a top-level module as well, on this path or on that of a ``python -m`` in this folder."""
    own = Path(import_module("dyngran.kernels").__path__[0]).resolve()
    is_safe = bool(os.environ.get("PYTHONSAFEPATH")) and sys.version_info >= (3, 11)
    places = [Path(place or ".").absolute() for place in [*sys.path, *([] if is_safe else ["."])]]
    exposed = next((place for place in places if (place / "kernels").resolve() == own), None)
    found = "nothing of dyngran's is top-level" if exposed is None else f"{_short(exposed)} has a 'kernels' that transformers may take"
    yield _judged(exposed is None, found, "export PYTHONSAFEPATH=1, or another folder", otherwise=Status.WARNING)


def _training_step() -> Iterator[Row]:
    """One training step of two small layers, on the card if there is one, in a process of its own."""
    command = [sys.executable, "-c", SMOKE]
    with tempfile.TemporaryDirectory(prefix="dyngran-doctor-") as folder:
        environ = {**os.environ, "DYNGRAN_CACHE_DIR": folder, "PYTHONSAFEPATH": "1"}
        try:
            done = subprocess.run(command, env=environ, timeout=SMOKE_SECONDS, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        except subprocess.TimeoutExpired:
            yield Status.FAILED, f"no end within {SMOKE_SECONDS:.0f} s", "try again when the machine is less busy"
            return
    printed, errors = (text.decode(errors="replace").strip() for text in (done.stdout, done.stderr))
    if done.returncode == 0:
        yield Status.OK, f"two layers trained on {printed}, codegen='eager'", ""
    else:
        last = errors.splitlines()[-1] if errors and done.returncode > 0 else f"ended with exit code {done.returncode}"
        yield Status.FAILED, last[:MAX_TEXT], "mend what failed above; else report this"


def _version(name: str, version: str, note: str = "") -> Row:
    ranges = _ranges().get(name, "")
    is_within = _is_within(version, ranges)
    return _judged(is_within, f"{version}{note}" + ("" if is_within else f", outside {ranges}"), _pip(name))


def _pip(name: str) -> str:
    return f"pip install '{name}{_ranges().get(name, '')}'"


def _ranges() -> dict[str, str]:
    """The versions that dyngran's metadata asks for, by distribution."""
    try:
        required = [one for one in metadata.requires("dyngran") or () if "extra ==" not in one]
    except metadata.PackageNotFoundError:
        required = [f"torch{TORCH_RANGE}"]
    matches = (re.match(r"([\w.-]+)\s*\(?([^;)]*)", one) for one in required)
    return {match[1].lower(): match[2].strip() for match in matches if match}


def _is_within(version: str, ranges: str) -> bool:
    """Whether a version is in ranges like ``>=2.8,<4``: by ``packaging``, which neither torch nor dyngran requires, else by numbers."""
    try:
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(ranges).contains(version, prereleases=True)
    except (ImportError, ValueError):  # the latter: a version of nobody's standard
        compare = {">=": operator.ge, "<=": operator.le, "<": operator.lt, ">": operator.gt, "==": operator.eq, "!=": operator.ne}
        clauses = re.findall(r"([<>=!]=|[<>])\s*([\d.]+)", ranges)
        return all(compare[sign](_release(version), _release(limit)) for sign, limit in clauses)


def _release(version: str) -> list[int]:
    """``2.13.0+cpu`` as [2, 13, 0, 0]."""
    match = re.match(r"[\d.]*\d", version)
    numbers = [int(number) for number in match[0].split(".")] if match else []
    return (numbers + [0] * 4)[:4]


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_TEXT]


def _short(path: str | Path) -> str:
    """A path with ``~`` for the home folder."""
    text, home = str(path), os.path.expanduser("~")
    return "~" + text.removeprefix(home) if text.startswith(home + os.sep) else text
