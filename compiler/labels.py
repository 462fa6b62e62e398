"""What people call an op: its module, its region and its source line."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch import fx

_OURS = f"{Path(__file__).resolve().parent}{os.sep}"  # a step that is planned without training is called from here
_SOURCE_LINE = re.compile(r'File "([^"]+)", line (\d+), in')


def module_path(node: fx.Node) -> str:
    """Dotted path of the module that the op belongs to, as the user named it ('' if unknown)."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"^L\['args'\]\[0\]\.?", "", path)  # a method under a decorator, as in transformers: its module
    path = re.sub(r"L\['(\w+)'\]\.?", "", path)
    return re.sub(r"(?:_modules)?\[['\"]?(\w+)['\"]?\]", r".\1", path).replace("._modules", "").strip(".")


def region_of(node: fx.Node) -> str:
    """The repeated block that an op belongs to: the module path up to its first number (``layers.3``), else its first name."""
    parts = module_path(node).split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return parts[0]


def label_of(node: fx.Node) -> str:
    """Module path, op and source line, for people."""
    op = str(node.target).removeprefix("aten.").removesuffix(".default")
    lines = [line for line in _SOURCE_LINE.findall(node.meta.get("stack_trace") or "") if not line[0].startswith(_OURS)]
    where = f" ({lines[-1][0].rsplit('/', 1)[-1]}:{lines[-1][1]})" if lines else ""
    path = module_path(node)
    return f"{path + ': ' if path else ''}{op}{where}"
