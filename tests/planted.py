"""A small transformer in a file, and edits of it: what a reviewer would want to be told, and what nobody should hear about."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dyngran.compiler.offline.build import TraceProcess
from dyngran.compiler.plans.planfile import PlanDocument, Settings

NET = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.gate = nn.Linear(width, hidden)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = torch.bmm(q, k.transpose(1, 2))
        weights = scores.softmax(-1)
        x = x + self.proj(torch.bmm(weights, v))
        h = self.norm2(x)
        gate = self.gate(h)
        up = self.up(h)
        h = nn.functional.gelu(gate) * up
        return x + self.down(h)


class Net(nn.Module):
    def __init__(self, width=256, hidden=512, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, hidden) for _ in range(depth)])
        self.head = nn.Linear(width, width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def make():
    return {"model": Net(), "inputs": torch.randn(16, 256, 256, dtype=torch.bfloat16), "autocast": "bf16"}
"""

Edit = tuple[tuple[str, str], ...]

# By name: the edit, and what its line holds afterwards.
REGRESSIONS: Mapping[str, tuple[Edit, str]] = {
    "dropout": ((("* up\n", "* up\n        h = nn.functional.dropout(h, 0.1)\n"),), "dropout"),
    "upcast of a branch": ((("gelu(gate)", "gelu(gate.float())"),), "gate.float()"),
    "upcast of the stream": ((("x = x + self.proj", "x = x.float() + self.proj"),), "x.float()"),
    "copy for a view": ((("k.transpose(1, 2))", "k.transpose(1, 2).contiguous())"),), "contiguous"),
    "graph break": ((("return self.head(x)", "torch._dynamo.graph_break()\n        return self.head(x)"),), "graph_break"),
    "wider layer": ((("hidden=512", "hidden=640"),), "self.up(h)"),
}
FUSED_AWAY = "upcast of a branch"  # Inductor casts in registers
NOT_SAVED = "upcast of the stream"  # without fusion the norms save fp32 copies either way
HARMLESS: Mapping[str, Edit] = {
    "rename": (("blocks", "layers"), ("self.up", "self.wide"), ("up = ", "wide = "), ("* up", "* wide"), ("gate", "door")),
    "reorder": (
        ("        gate = self.gate(h)\n        up = self.up(h)\n", "        up = self.up(h)\n        gate = self.gate(h)\n"),
        ("        self.norm2 = nn.LayerNorm(width)\n", ""),
        (
            "        self.norm = nn.LayerNorm(width)\n",
            "        self.norm2 = nn.LayerNorm(width)\n        self.norm = nn.LayerNorm(width)\n",
        ),
    ),
    "comment": (("        h = self.norm2(x)", "        # a comment\n\n        h = self.norm2(x)  # another"),),
    "docstring": (("class Block(nn.Module):\n", 'class Block(nn.Module):\n    """A block.\n\n    Of many.\n    """\n\n'),),
    "unused parameter": (("self.head = ", "self.unused = nn.Parameter(torch.zeros(1024, 1024))\n        self.head = "),),
}

_DRIVER = """\
import importlib.util
from pathlib import Path


def make():
    path = Path(__file__).with_name("which.txt").read_text()
    spec = importlib.util.spec_from_file_location("net", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make()
"""


def edited(edit: Edit) -> str:
    """The file with an edit; each of its parts must be there."""
    text = NET
    for before, after in edit:
        assert before in text, before
        text = text.replace(before, after)
    return text


class Planner:
    """Plans edits of the file one after another in one process, as `dyngran-plan build` plans a file."""

    def __init__(self, folder: Path, process: TraceProcess) -> None:
        self.folder = folder
        self._process = process
        self._made: dict[tuple[Edit, str, str | None], PlanDocument] = {}

    @staticmethod
    def start(folder: Path) -> TraceProcess:
        (folder / "driver.py").write_text(_DRIVER)
        return TraceProcess(f"{folder / 'driver.py'}:make", "h100")

    def plan(self, name: str, edit: Edit, *, codegen: str, budget: str | None = None) -> PlanDocument:
        """Once for each edit; ``name`` is the folder that its file is put in."""
        if (edit, codegen, budget) not in self._made:
            self._made[edit, codegen, budget] = self._plan(name, edit, codegen=codegen, budget=budget)
        return self._made[edit, codegen, budget]

    def _plan(self, name: str, edit: Edit, *, codegen: str, budget: str | None) -> PlanDocument:
        path = self.folder / name / "net.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(edited(edit))
        (self.folder / "which.txt").write_text(str(path))
        return self._process.plan(Settings(profile="h100", budget=budget), codegen=codegen)
