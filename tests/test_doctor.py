"""dyngran-plan doctor: every state in which dyngran would not work is found and named, and looking changes nothing."""

from __future__ import annotations

import importlib.metadata
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pulp
import pytest
import torch

from dyngran.compiler import doctor, torch_private
from dyngran.compiler.doctor import Finding, Status, examine, exit_code, findings_json
from dyngran.compiler.version import VERSION
from dyngran.runtime import memory

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
NO_COMPILER = "Inductor needs a C++ compiler on the CPU and finds none: install one (apt install g++), or set CXX to it"
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Fri Jan 10 04:41:35 UTC 2025\nGCC version: gcc version 12.2.0\n"
CHECKS = (
    *("python", "dyngran", "native library", "torch", "backend"),
    *("networkx", "sympy", "pulp", "highspy", "rich", "scipy", "filelock", "msgspec"),
    *("solver", "driver", "environment", "import path", "C++ compiler", "triton", "card", "host memory", "cache", "training step"),
)
FUNCTIONS = [name for name, value in vars(doctor).items() if getattr(value, "__annotations__", {}).get("return") == "Iterator[Row]"]


def findings_of(name: str) -> tuple[Finding, ...]:
    checks = dict(doctor._checks(smoke=True))
    return tuple(doctor._findings(name, checks[name]))


def finding_of(name: str) -> Finding:
    (finding,) = findings_of(name)
    return finding


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_args: object, **_named: object) -> Any:
        raise error

    return call


def distributions(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Let these distributions have other versions; None: not installed."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        found = versions.get(name, real(name))
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_this_machine_is_well_and_looking_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DYNGRAN_CACHE_DIR", str(tmp_path / "store"))
    before = torch.get_rng_state(), random.getstate()
    findings = examine()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert list(tmp_path.iterdir()) == [], "no store and no file"
    assert [finding for finding in findings if finding.status is Status.FAILED] == []
    assert exit_code(findings) == 0
    assert list(dict.fromkeys(finding.check for finding in findings)) == list(CHECKS)
    by_name = {finding.check: finding for finding in findings}
    assert by_name["training step"].found == f"two layers trained on {'cuda' if torch.cuda.is_available() else 'cpu'}, codegen='eager'"
    assert by_name["torch"].found.startswith(f"{torch.__version__}, ")
    assert by_name["dyngran"].found.startswith(VERSION)
    assert json.loads(json.dumps(findings_json(findings)))["ok"] is True


def test_the_training_step_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", raising(AssertionError("no process is needed")))
    monkeypatch.setattr(doctor, "_cpp_compiler", lambda: iter(()))  # torch asks g++ for its version
    monkeypatch.setattr(doctor, "_cards", lambda: iter(()))
    assert "training step" not in {finding.check for finding in examine(smoke=False)}


@pytest.mark.parametrize("has_packaging", [True, False])
@pytest.mark.parametrize(
    ("version", "is_inside"),
    [
        ("2.10.1", False),
        ("2.11.0", True),
        ("2.11", True),
        ("2.13.1+cu130", True),
        ("2.14.0", False),
        ("2.14.0+rocm7", False),
        ("3.0", False),
    ],
)
def test_a_torch_out_of_range(version: str, is_inside: bool, has_packaging: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_packaging:
        monkeypatch.setitem(sys.modules, "packaging.specifiers", None)
    monkeypatch.setattr(torch, "__version__", version)
    finding = finding_of("torch")
    assert finding.status is (Status.OK if is_inside else Status.FAILED)
    assert finding.found.startswith(f"{version}, ")
    assert ("outside" in finding.found) != is_inside
    assert is_inside or re.fullmatch(r"pip install 'torch(<2\.14,>=2\.11|>=2\.11,<2\.14)'", finding.advice)


@pytest.mark.parametrize(
    ("cuda", "hip", "build"), [("13.0", None, "CUDA 13.0 build"), (None, "7.1.2", "ROCm 7.1.2 build"), (None, None, "CPU build")]
)
def test_the_build_of_torch(cuda: str | None, hip: str | None, build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert finding_of("torch").found == f"{torch.__version__}, {build}"


def test_no_torch_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch", None)
        by_name = {finding.check: finding for finding in examine()}
    assert by_name["torch"].status is Status.FAILED
    assert by_name["torch"].advice.startswith("pip install 'torch")
    skipped = [name for name, finding in by_name.items() if finding.found == "not checked: torch cannot be imported"]
    assert skipped == ["C++ compiler", "triton", "card", "host memory", "cache", "training step"]
    assert [name for name, finding in by_name.items() if finding.status is Status.FAILED] == ["torch"]


def test_a_machine_without_any_library(tmp_path: Path) -> None:
    script = f"""
import json, sys
for name in ("torch", *{doctor.LIBRARIES}):
    sys.modules[name] = None
from dyngran.compiler import doctor
print(json.dumps([[finding.check, finding.status.value] for finding in doctor.examine()]))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True)
    status = dict(json.loads(done.stdout))
    assert list(status) == list(CHECKS)
    assert {"torch", "solver", *doctor.LIBRARIES} <= {name for name, value in status.items() if value == "failed"}
    assert (status["python"], status["native library"], status["import path"]) == ("ok", "ok", "ok")


def test_the_range_of_torch_without_metadata_and_the_libraries_are_those_of_pyproject() -> None:
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert listed is not None
    required = dict(re.findall(r"^\s*[\"']([\w-]+)([^;\"']*)", listed[1], re.MULTILINE))
    assert set(required.pop("torch").split(",")) == set(doctor.TORCH_RANGE.split(","))
    assert required.keys() - {"triton"} <= set(doctor.LIBRARIES)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "missing_tool", lambda _devices: NO_COMPILER)
    finding = finding_of("C++ compiler")
    assert finding.status is Status.FAILED
    assert finding.found == "Inductor needs a C++ compiler on the CPU and finds none"
    assert "apt install g++" in finding.advice
    assert "codegen='eager'" in finding.advice


def test_no_headers_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "missing_tool", lambda _devices: None)
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    finding = finding_of("C++ compiler")
    assert (finding.status, finding.advice) == (Status.WARNING, "apt install python3-dev")
    (tmp_path / "Python.h").touch()
    assert finding_of("C++ compiler").status is Status.OK


@pytest.mark.parametrize(
    ("version", "found"),
    [(None, "not installed"), ("2.7.0", "2.7.0, outside <4,>=2.8"), ("4.0", "4.0, outside <4,>=2.8"), ("3.9.9", "3.9.9")],
)
def test_a_library_that_is_missing_or_out_of_range(version: str | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    distributions(monkeypatch, pulp=version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _name: ["pulp<4,>=2.8", 'ruff>99; extra == "dev"'])
    finding = finding_of("pulp")
    assert finding.found == found
    assert finding.status is (Status.OK if version == "3.9.9" else Status.FAILED)
    assert finding.advice == ("" if version == "3.9.9" else "pip install 'pulp<4,>=2.8'")
    assert finding_of("scipy").status is Status.OK


def test_a_library_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    finding = finding_of("networkx")
    assert finding.status is Status.FAILED
    assert finding.found.startswith("cannot be imported: ModuleNotFoundError: ")
    assert finding.advice == "pip install --force-reinstall networkx"


def test_dyngran_that_is_not_installed_or_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    distributions(monkeypatch, dyngran="0.0.7")
    assert finding_of("dyngran").status is Status.WARNING
    assert finding_of("dyngran").found.endswith(", 0.0.7 installed")
    distributions(monkeypatch, dyngran=None)
    monkeypatch.setattr(importlib.metadata, "requires", raising(importlib.metadata.PackageNotFoundError("dyngran")))
    assert finding_of("dyngran").found.endswith(", not installed")
    assert finding_of("scipy").status is Status.OK, "without metadata any version will do"
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    assert finding_of("torch").status is Status.FAILED, "but not of torch"


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that loads the native library, which forgets what it has loaded."""
    import dyngran.passes.native

    module = sys.modules["dyngran.passes.native.library"]
    dyngran.passes.native.library.cache_clear()
    yield module
    monkeypatch.undo()
    dyngran.passes.native.library.cache_clear()


def test_a_native_library_that_was_not_built_or_does_not_load(native: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "HERE", tmp_path)
    finding = finding_of("native library")
    assert finding.status is Status.FAILED
    assert finding.found == f"dyngran's native library is missing in {tmp_path}"[: doctor.MAX_TEXT]
    assert finding.advice.startswith("pip install .")
    (tmp_path / f"_core{native.EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    assert finding_of("native library").status is Status.FAILED


def test_a_backend_that_torch_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_which: ())
    finding = finding_of("backend")
    assert (finding.status, finding.found) == (Status.FAILED, "'dyngran' is not registered with torch")
    assert finding.advice.startswith("pip install .")


def test_solvers(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert finding_of("solver").status is Status.OK
    assert capfd.readouterr() == ("", ""), "the finding is returned, nothing is printed"
    monkeypatch.setattr(pulp, "value", lambda _objective: 2.0)
    assert finding_of("solver").status is Status.FAILED
    monkeypatch.undo()
    monkeypatch.setattr(pulp.HiGHS, "available", lambda _self: False)
    if pulp.PULP_CBC_CMD(msg=False).available():
        finding = finding_of("solver")
        assert (finding.status, finding.advice) == (Status.WARNING, "pip install --force-reinstall highspy")


@pytest.mark.parametrize("inside", ["", "below/it"])
def test_a_file_where_the_cache_folder_should_be(inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").write_text("not a folder")
    monkeypatch.setenv("DYNGRAN_CACHE_DIR", str(tmp_path / "store" / inside))
    finding = finding_of("cache")
    assert (finding.status, finding.found) == (Status.WARNING, f"{tmp_path / 'store'} is a file, not a folder")
    assert "DYNGRAN_CACHE_DIR" in finding.advice
    assert exit_code([finding]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, in which not even root can write")
def test_a_cache_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNGRAN_CACHE_DIR", "/proc/dyngran")
    finding = finding_of("cache")
    assert finding.status is Status.WARNING
    assert finding.found.startswith("/proc/dyngran cannot be used: ")
    assert "DYNGRAN_CACHE_DIR" in finding.advice


def test_a_read_only_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNGRAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.TemporaryFile", raising(OSError(30, "Read-only file system")))
    finding = finding_of("cache")
    assert (finding.status, finding.found) == (Status.WARNING, f"{tmp_path} cannot be used: Read-only file system")


def test_what_the_cache_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNGRAN_CACHE_DIR", str(tmp_path / "store"))
    assert finding_of("cache").found == f"{tmp_path / 'store'}, not there yet"
    assert not (tmp_path / "store").exists()
    (tmp_path / "store" / "plans").mkdir(parents=True)
    for name, size in (("ops-v3-a.jsonl", 1000), ("ops-v3-a.lock", 5), ("plans/a.json", 24), ("plans/b.json", 1000)):
        (tmp_path / "store" / name).write_bytes(b"x" * size)
    assert finding_of("cache") == Finding(
        check="cache", status=Status.OK, found=f"{tmp_path / 'store'}, profiles: 1 (1000 B), plans: 2 (1 KiB)", advice=""
    )
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 4, "the file that was tried is gone"


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("DYNGRAN_BUDGET", "8GiB", Status.OK),
        ("DYNGRAN_BUDGET", "75%", Status.OK),
        ("DYNGRAN_BUDGET", "None", Status.OK),
        ("DYNGRAN_BUDGET", "plenty", Status.FAILED),
        ("TORCH_COMPILE_DISABLE", "1", Status.FAILED),
        ("TORCHDYNAMO_DISABLE", "1", Status.FAILED),
        ("TORCHDYNAMO_DISABLE", "0", Status.OK),
    ],
)
def test_environment(name: str, value: str, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    findings = findings_of("environment")
    worst = next((finding for finding in findings if finding.status is Status.FAILED), findings[0])
    assert worst.status is status
    assert name in worst.found or value == "0"
    assert name in worst.advice or status is Status.OK


def test_kernels_as_a_top_level_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [place for place in sys.path if Path(place or ".").resolve() != ROOT])
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    assert finding_of("import path").status is Status.OK
    monkeypatch.chdir(ROOT)
    assert finding_of("import path").status is Status.WARNING, "python -m here would find it"
    assert "PYTHONSAFEPATH" in finding_of("import path").advice
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert finding_of("import path").status is (Status.OK if sys.version_info >= (3, 11) else Status.WARNING)
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    assert finding_of("import path").status is Status.WARNING


def with_cards(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    bytes_of = SimpleNamespace(total_bytes=80 * GIB, free_bytes=79 * GIB)
    monkeypatch.setattr(memory, "device_memory", lambda _device: bytes_of)


def test_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, "NVIDIA H100 80GB HBM3", "NVIDIA Titan Z")
    known, unknown = findings_of("card")
    assert known.found == "0: NVIDIA H100 80GB HBM3 (h100), sm_90, 79 GiB of 80 GiB free"
    assert unknown.found == "1: NVIDIA Titan Z (not in the device table), sm_90, 79 GiB of 80 GiB free"
    assert {known.status, unknown.status} == {Status.OK}


def test_triton_is_needed_with_a_card_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "missing_tool", lambda devices: "no triton: install it" if "cuda" in devices else None)
    with_cards(monkeypatch)
    assert finding_of("triton").status is Status.OK
    with_cards(monkeypatch, "NVIDIA H100")
    finding = finding_of("triton")
    assert (finding.status, finding.found) == (Status.FAILED, "no triton")
    assert "pip install triton" in finding.advice


def test_no_card_and_a_card_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch)
    monkeypatch.setattr(doctor, "DRIVER_FILE", tmp_path / "version")
    assert finding_of("card").status is Status.OK
    assert "--device" in finding_of("card").advice
    (tmp_path / "version").write_text(DRIVER)
    assert finding_of("driver").found == "NVIDIA 570.86.15"
    for cuda, words in ((None, "CUDA build"), ("13.0", "nvidia-smi")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        finding = finding_of("card")
        assert finding.status is Status.WARNING
        assert "570.86.15" in finding.found
        assert words in finding.advice


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("import sys; print('noise', file=sys.stderr); sys.exit('ToolMissing: no tool')", "ToolMissing: no tool"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended with exit code -9"),
        ("import os; os._exit(3)", "ended with exit code 3"),
        ("import time; time.sleep(60)", "no end within 1 s"),
    ],
)
def test_a_training_step_that_fails(script: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SMOKE", script)
    monkeypatch.setattr(doctor, "SMOKE_SECONDS", 1.0 if "sleep" in script else 60.0)
    finding = finding_of("training step")
    assert (finding.status, finding.found) == (Status.FAILED, found)
    assert finding.advice


def test_a_training_step_that_nobody_plans_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    finding = finding_of("training step")
    assert finding.status is Status.FAILED
    assert finding.found.startswith("NothingCompiled: ")


def test_a_check_that_crashes_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(FUNCTIONS) == len(CHECKS) - len(doctor.LIBRARIES) + 2, "one for all libraries, and what asks for torch"
    for name in FUNCTIONS:
        monkeypatch.setattr(doctor, name, raising(RuntimeError("first line\nsecond " + "word " * 100)))
    findings = examine()
    assert [finding.check for finding in findings] == list(CHECKS)
    assert {finding.status for finding in findings} == {Status.FAILED}
    assert all(finding.found.startswith("RuntimeError: first line second word") for finding in findings)
    assert all("\n" not in finding.found and len(finding.found) <= doctor.MAX_TEXT for finding in findings)
    assert exit_code(findings) == 1


def test_a_crash_does_not_take_back_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, "NVIDIA H100", "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ["NVIDIA H100"][device.index])
    assert [finding.status for finding in findings_of("card")] == [Status.OK, Status.FAILED]


def test_exit_codes_and_json() -> None:
    well = Finding(check="a", status=Status.OK, found="1.2")
    warned = Finding(check="b", status=Status.WARNING, found="slow", advice="buy another")
    failed = Finding(check="c", status=Status.FAILED, found="none", advice="pip install c")
    assert [exit_code(rows) for rows in ((), (well,), (well, warned), (failed, well))] == [0, 0, 0, 1]
    assert json.dumps(findings_json((well, warned, failed))) == (
        f'{{"schema": 1, "dyngran": "{VERSION}", "ok": false, "findings": ['
        '{"check": "a", "status": "ok", "found": "1.2", "advice": ""}, '
        '{"check": "b", "status": "warning", "found": "slow", "advice": "buy another"}, '
        '{"check": "c", "status": "failed", "found": "none", "advice": "pip install c"}]}'
    )
