"""What `dyngran-plan` plans: a callable that makes a model and example inputs, named as ``file.py:callable`` or ``module:callable``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dyngran.compiler.torch_private import mapped_tensors
from dyngran.passes.errors import TargetError

FORMS = "Name the target as file.py:callable or module:callable, for example train.py:make"
KEYS = ("model", "inputs", "loss", "targets", "optimizer", "autocast")
RETURNS = "It must return (model, inputs), or a dict of them with, if they matter, " + ", ".join(KEYS[2:])
DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One training step, as the callable describes it.

    Attributes:
        model: what is compiled, a module or a function of the inputs. inputs, keywords: what it is called with.
        loss: of the model's output and ``targets``, compiled with it; None if the loss is computed outside, or by the model.
        optimizer: whose state counts; or a function of the parameters that makes one. autocast: its dtype, if the call is under one.
    """

    model: Callable[..., Any]
    inputs: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[..., Any] | None = None
    targets: tuple[Any, ...] = ()
    optimizer: Any = None
    autocast: torch.dtype | None = None

    @property
    def module(self) -> nn.Module | None:
        """The model, if it is a module."""
        return self.model if isinstance(self.model, nn.Module) else None

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Target:
        """The same with other tensors as inputs and targets."""
        inputs, keywords, targets = mapped_tensors(change, (self.inputs, dict(self.keywords), self.targets))
        return Target(
            model=self.model,
            inputs=inputs,
            keywords=keywords,
            loss=self.loss,
            targets=targets,
            optimizer=self.optimizer,
            autocast=self.autocast,
        )


def load_callable(spec: str) -> Callable[..., Any]:
    """The callable that ``spec`` names. Raises TargetError: no such file, module or callable, or importing it fails."""
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise TargetError(f"target {spec!r} names no callable. {FORMS}.")
    module = _from_file(Path(source), spec) if source.endswith(".py") else _from_module(source, spec)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [one for one, value in vars(found).items() if callable(value)], n=1)
            guess = f"; did you mean {near[0]!r}?" if near else "."
            raise TargetError(f"target {spec!r}: {source} has no {part!r}{guess}")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"target {spec!r}: {name} is a {type(found).__name__}, and must be a function that makes the model. {RETURNS}.")
    made: Callable[..., Any] = found
    return made


def _from_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"target {spec!r}: there is no file {str(path)!r} in {str(Path.cwd())!r}. {FORMS}.")
    sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` has it
    found = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module  # dataclasses and pickle look for it there
    _importing(spec, lambda: found.loader.exec_module(module))  # type: ignore[union-attr]  # asserted above
    return module


def _from_module(name: str, spec: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    imported: list[ModuleType] = []
    try:
        _importing(spec, lambda: imported.append(importlib.import_module(name)))
    except TargetError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == name:
            raise TargetError(f"target {spec!r}: no module is called {name!r} here. {FORMS}.") from error.__cause__
        raise
    return imported[0]


def _importing(spec: str, run: Callable[[], object]) -> None:
    try:
        run()
    except (Exception, SystemExit) as error:  # whatever the user's module raises is told by name
        raise TargetError(f"target {spec!r} cannot be imported: {described(error)}.") from error


def described(error: BaseException) -> str:
    """Class, first line and the user's place of an error: ``ValueError: no such size (train.py:12)``."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' + text[0][:300] if text else ''}{where}".rstrip(".")


def _is_ours(filename: str) -> bool:
    roots = (Path(torch.__file__).parent, Path(__file__).parent)
    return filename.startswith("<") or any(str(root) in filename for root in roots)


def call_target(make: Callable[..., Any], spec: str, *, batch: int | None, dtype: str | None) -> tuple[Target, frozenset[str]]:
    """What the callable returns, checked, and which of batch and dtype it was given because it takes an argument of that name.

    Raises TargetError: it raises, or returns something else.
    """
    try:
        takes = inspect.signature(make).parameters
    except (TypeError, ValueError):
        takes = {}  # type: ignore[assignment]  # a callable without a signature takes none
    overrides = {"batch": batch, "dtype": None if dtype is None else DTYPES[dtype]}
    given = {name: value for name, value in overrides.items() if value is not None and name in takes}
    try:
        made = make(**given)
    except (Exception, SystemExit) as error:  # whatever the user's function raises is told by name
        hint = _hint_of(error)
        raise TargetError(f"target {spec!r} failed: {described(error)}.{hint}") from error
    return _checked(made, spec), frozenset(given)


def _hint_of(error: BaseException) -> str:
    if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException") or "fake tensor" in str(error).lower():
        return " It runs without data: make inputs with torch.zeros, torch.randn or torch.randint, and do not look at their numbers."
    return ""


def _checked(made: Any, spec: str) -> Target:
    if isinstance(made, tuple) and len(made) == 2:
        made = {"model": made[0], "inputs": made[1]}
    if not isinstance(made, Mapping) or not {"model", "inputs"} <= made.keys():
        raise TargetError(f"target {spec!r} returned a {type(made).__name__}. {RETURNS}.")
    for key in made:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            raise TargetError(f"target {spec!r} returned the key {key!r}{f' (did you mean {near[0]!r}?)' if near else ''}. {RETURNS}.")
    for key in ("model", "loss"):
        if made.get(key) is not None and not callable(made[key]):
            raise TargetError(f"target {spec!r}: its {key} is a {type(made[key]).__name__}, and must be callable.")
    positional, keywords = _arguments(made["inputs"])
    return Target(
        model=made["model"],
        inputs=positional,
        keywords=keywords,
        loss=made.get("loss"),
        targets=_arguments(made.get("targets", ()))[0],
        optimizer=made.get("optimizer"),
        autocast=_autocast(made.get("autocast"), spec),
    )


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return tuple(inputs), {}
    return (inputs,), {}


def _autocast(value: Any, spec: str) -> torch.dtype | None:
    if value is None or value is False:
        return None
    if isinstance(value, torch.dtype):
        return value
    if isinstance(value, str) and value.lower() in DTYPES:
        return DTYPES[value.lower()]
    if isinstance(value, torch.autocast):
        return value.fast_dtype if value._enabled else None
    raise TargetError(f"target {spec!r}: autocast must be a dtype, a name such as 'bf16', or torch.autocast(...), got {value!r}.")
