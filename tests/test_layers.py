"""The house stands: imports go down the floors, torch's private modules have one door, importing changes nothing."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dyngran.compiler.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("kernels", "passes", "runtime", "compiler", "dyngran")  # each may import itself and what stands before it
PRIVATE_TORCH = ("torch._functorch", "torch._inductor", "torch._dynamo", "torch._subclasses", "torch._prims")
MAY_IMPORT_PRIVATE = {
    "compiler/torch_private.py": PRIVATE_TORCH,
    "compiler/offline/torch_emulation.py": PRIVATE_TORCH,  # and its two parts: private to the process that traces without a card
    "compiler/offline/torch_attention.py": PRIVATE_TORCH,
    "compiler/offline/torch_autocast.py": PRIVATE_TORCH,
    "compiler/offline/torch_fakes.py": PRIVATE_TORCH,
    "compiler/options.py": ("torch._inductor",),
}
NO_TORCH = ("passes/problem.py", "passes/plan.py", "passes/simulate.py", "passes/fuse.py", "passes/fingerprint.py", "passes/errors.py")
FILES = sorted(path.relative_to(ROOT).as_posix() for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that a file names: imports, what they import from it, ``torch._x`` attributes, import_module of a constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield f"torch.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant) and isinstance(argument.value, str))


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def faults(file: str, source: str) -> list[str]:
    """What ``source``, standing at ``file``, imports that it must not."""
    floor = FLOORS.index(file.split("/")[0])
    allowed = MAY_IMPORT_PRIVATE.get(file, ())
    found = []
    for module in imports(ast.parse(source)):
        if module.startswith("."):
            found.append(f"{module}: relative import")
        if module.split(".")[0] in FLOORS[:-1]:
            found.append(f"{module}: a floor is imported as dyngran.{module}")
        if within(module, "dyngran"):
            part = module.removeprefix("dyngran").removeprefix(".").split(".")[0]
            target = FLOORS.index(part) if part in FLOORS else FLOORS.index("dyngran")
            is_package_of_floor = module == "dyngran" and floor < FLOORS.index("dyngran")
            if target > floor and not is_package_of_floor:
                found.append(f"{module}: up from {FLOORS[floor]}")
        if any(within(module, private) for private in PRIVATE_TORCH) and not any(within(module, package) for package in allowed):
            found.append(f"{module}: private torch API")
        if within(module, "torch") and (file in NO_TORCH or file.startswith("passes/solvers/")):
            found.append(f"{module}: planners see numbers, not torch")
    return found


@pytest.mark.parametrize("file", FILES)
def test_arrows_go_down(file: str) -> None:
    assert faults(file, (ROOT / file).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("file", "source", "is_fault"),
    [
        ("passes/x.py", "from dyngran.compiler import options", True),
        ("passes/x.py", "from dyngran import compiler", True),
        ("passes/x.py", "def f():\n    import dyngran.runtime.guard", True),
        ("passes/x.py", "from dyngran.errors import DyngranError", True),
        ("passes/x.py", "from passes.plan import Plan", True),
        ("passes/x.py", "from .plan import Plan", True),
        ("passes/x.py", "from dyngran.kernels import pack", False),
        ("compiler/x.py", "from dyngran.runtime.guard import Guard", False),
        ("dyngran/x.py", "from dyngran.compiler.backend import dyngran", False),
        ("compiler/x.py", "from torch._inductor import config", True),
        ("compiler/x.py", "from torch import _dynamo", True),
        ("compiler/x.py", "import torch\ntorch._functorch.config", True),
        ("compiler/x.py", "importlib.import_module('torch._prims')", True),
        ("compiler/x.py", "from torch.fx import GraphModule", False),
        ("compiler/torch_private.py", "from torch._functorch import partitioners", False),
        ("compiler/options.py", "from torch._inductor import config", False),
        ("compiler/options.py", "from torch._dynamo import config", True),
        ("passes/solvers/x.py", "import torch", True),
        ("passes/problem.py", "from torch import fx", True),
        ("passes/x.py", "import torch", False),
    ],
)
def test_the_check_itself(file: str, source: str, is_fault: bool) -> None:
    assert bool(faults(file, source)) == is_fault


def run(script: str, folder: Path) -> str:
    return subprocess.run([sys.executable, "-c", script], cwd=folder, check=True, capture_output=True, text=True).stdout


SNAPSHOT = """
import logging, os, random, sys, threading, warnings
import torch
def state():
    return dict(
        operators={name for name in torch._C._dispatch_get_all_op_names() if "dyngran" in name},
        environment=dict(os.environ),
        path=list(sys.path),
        meta_path=list(sys.meta_path),
        hooks=(sys.excepthook, threading.excepthook),
        threads=threading.active_count(),
        warnings=list(warnings.filters),
        handlers=(list(logging.root.handlers), logging.root.level, logging.getLogger("dyngran").handlers),
        random=random.getstate(),
        seed=torch.initial_seed(),
        dtype=torch.get_default_dtype(),
        threads_of_torch=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
before = state()
"""


def test_importing_dyngran_registers_nothing_and_changes_nothing(tmp_path: Path) -> None:
    script = SNAPSHOT + (
        "import dyngran, dyngran.errors\n"
        "after = state()\n"
        "assert after == before, [name for name in before if before[name] != after[name]]\n"
        "assert not torch.cuda.is_initialized()\n"
        "from torch._dynamo.backends import registry\n"
        "assert registry._COMPILER_FNS.get('dyngran') is None, 'registered by import, not by entry point'\n"
    )
    assert run(script, tmp_path) == "", "importing prints nothing"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no safe path")
def test_no_top_level_module_kernels_under_a_safe_path() -> None:
    """transformers probes for a package of that very name, which the repository's root would be."""
    script = "import dyngran, importlib.util; print([importlib.util.find_spec(n) for n in ('kernels', 'passes', 'compiler', 'runtime')])"
    done = subprocess.run([sys.executable, "-P", "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == f"{[None] * 4}\n"


def test_package_init_files_only_import_and_name() -> None:
    for file in (file for file in FILES if file.endswith("/__init__.py") and not file.startswith("dyngran/")):
        statements = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        assert all(isinstance(node, (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign)) for node in statements), file
        assert not [node for node in statements if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)], file


@pytest.mark.skipif(shutil.which("make") is None or importlib.util.find_spec("mypy") is None, reason="needs make and mypy")
def test_mypy_sees_the_mapped_packages(tmp_path: Path) -> None:
    """A wrong argument for a function of passes/ is found through the tree that `make lint` checks; a right one is not."""
    tree = tmp_path / "typing"
    subprocess.run(["make", "-s", "-C", str(ROOT), "typing", f"TYPING={tree / 'dyngran'}"], check=True)
    (tree / "dyngran" / "__init__.py").unlink()
    (tree / "dyngran" / "__init__.py").touch()  # the face imports torch, which takes mypy a minute
    probe = "from dyngran.passes.errors import format_bytes\nformat_bytes(1)\nformat_bytes('one')\n"
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "-c", probe]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(tree)}, capture_output=True, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if line.startswith("<string>")] == [
        '<string>:3: error: Argument 1 to "format_bytes" has incompatible type "str"; expected "float"  [arg-type]'
    ], done.stdout + done.stderr


def test_every_package_is_in_the_distribution_and_the_version_is_one() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    mapped = dict(re.findall(r'^"(dyngran[.\w]*)" = "([/\w]+)"$', text, flags=re.MULTILINE))
    folders = {Path(file).parent.as_posix() for file in FILES}
    assert set(mapped.values()) == folders
    listed = re.search(r"^packages = \[(.*)\]$", text, flags=re.MULTILINE)
    assert listed is not None
    assert set(re.findall(r'"([^"]+)"', listed[1])) == set(mapped)
    assert f'\nversion = "{VERSION}"\n' in text
