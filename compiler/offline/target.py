"""What `dyngran-plan` plans: a callable that makes a model and example inputs, named as ``file.py:callable`` or ``module:callable``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
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

MAX_TEXT = 300  # characters of what a library says, in a sentence of ours

_OURS = (
    Path(torch.__file__).parent,
    *(Path(__file__).resolve().parents[2] / floor for floor in ("compiler", "runtime", "passes", "kernels")),
)
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
_READS_NUMBERS = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")
_USER_CODE = re.compile(r'File "(.+?)", line (\d+), in ')
_FAKE_CALL = re.compile(r"failed to run FX node with fake tensors: .*: got (?P<kind>\w+)\((?P<quote>['\"])(?P<text>.*)(?P=quote)\)")
_NO_CARD = ("support for cuda", "cuda enabled", "nvidia driver", "no cuda gpus")


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


def without_data(target: Target, fake: Callable[[torch.Tensor], torch.Tensor]) -> Target:
    """The same with what ``fake`` makes of its tensors, those of the model and of its optimizer included: a checkpoint has brought data."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the first is kept alive, or its id would be given away

    def faked(tensor: torch.Tensor) -> torch.Tensor:
        return made.setdefault(id(tensor), (tensor, fake(tensor)))[1]

    for module in target.module.modules() if target.module is not None else ():
        for held in (vars(module)["_parameters"], vars(module)["_buffers"]):
            held.update({name: faked(tensor) for name, tensor in held.items() if tensor is not None})
    for group in getattr(target.optimizer, "param_groups", ()):
        group["params"] = [faked(tensor) for tensor in group["params"]]
    return target.mapped(faked)


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
    name = path.stem if path.stem not in sys.modules else f"target_{path.stem}"  # a file named copy.py is not the module copy
    found = importlib.util.spec_from_file_location(name, path.resolve())
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[module.__name__] = module  # dataclasses and pickle look for it there
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
    """What is wrong and where in the user's program, without a full stop: ``ValueError: no such size (train.py:12)``."""
    text = str(error).strip()
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames += [(file, int(line)) for file, line in _USER_CODE.findall(text.partition("\nfrom user code:")[2])]
    file, line = user_place(frames)
    if reads_numbers(error):
        what = "it reads the numbers of a tensor"
    elif (raised := _FAKE_CALL.search(text)) is not None:
        what = f"{raised['kind']}: {raised['text']}"
    else:
        what = f"{type(error).__name__}{': ' + text.splitlines()[0] if text else ''}"
    what = what[:MAX_TEXT].rstrip(". ")
    return f"{what} ({Path(file).name}:{line})" if file else what


def reads_numbers(error: BaseException) -> bool:
    """Whether it says that what comes next depends on numbers, which tensors do not have here."""
    return type(error).__name__ in _READS_NUMBERS


def user_place(frames: Sequence[tuple[str, int | None]]) -> tuple[str, int | None]:
    """The innermost (file, line) that is the user's own, else a library's; ("", None) if all are torch's or dyngran's."""
    foreign = [frame for frame in frames if not frame[0].startswith("<") and not _is_in(frame[0], _OURS)]
    own = [frame for frame in foreign if not _is_in(frame[0], _LIBRARIES)]
    return (own or foreign or [("", None)])[-1]


def _is_in(file: str, folders: Sequence[Path]) -> bool:
    return any(folder in Path(file).parents for folder in folders)


def hint_of(error: BaseException, *, advice: str) -> str:
    """What to do about an error that running without data, or without a card, brings about; ``advice`` is about data."""
    text = str(error).lower()
    if reads_numbers(error) or ".numpy() is not supported" in text:
        return f" Tensors have shapes and no numbers here: {advice}"
    if not torch.cuda.is_available() and any(sign in text for sign in _NO_CARD):
        return " No card is here: name the one to plan for, as in --device h100, and call nothing of torch.cuda."
    return ""


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
        hint = hint_of(error, advice="make inputs with torch.zeros, torch.randn or torch.randint, and do not look at their numbers.")
        raise TargetError(f"target {spec!r} failed: {described(error)}.{hint}") from error
    return _checked(made, spec), frozenset(given)


def _checked(made: Any, spec: str) -> Target:
    if isinstance(made, tuple) and len(made) == 2:
        made = {"model": made[0], "inputs": made[1]}
    if not isinstance(made, Mapping):
        raise TargetError(f"target {spec!r} returned a {type(made).__name__}. {RETURNS}.")
    for key in made:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            raise TargetError(f"target {spec!r} returned the key {key!r}{f' (did you mean {near[0]!r}?)' if near else ''}. {RETURNS}.")
    for key in ("model", "inputs"):
        if key not in made:
            raise TargetError(f"target {spec!r} returned a {type(made).__name__} without {key!r}. {RETURNS}.")
    for key in ("model", "loss"):
        if made.get(key) is not None and not callable(made[key]):
            raise TargetError(f"target {spec!r}: its {key} is a {type(made[key]).__name__}, and must be callable.")
    parts = made["model"].named_modules() if isinstance(made["model"], nn.Module) else ()
    if (scripted := next((name for name, part in parts if isinstance(part, torch.jit.ScriptModule)), None)) is not None:
        which = f"the module {scripted!r} of its model" if scripted else "its model"
        raise TargetError(
            f"target {spec!r}: {which} is a torch.jit.ScriptModule, which torch.compile does not trace. Use the module that was scripted."
        )
    optimizer = made.get("optimizer")
    if optimizer is not None and not callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        raise TargetError(
            f"target {spec!r}: its optimizer is a {type(optimizer).__name__}, and must be a torch.optim.Optimizer or a function of the "
            "parameters that makes one."
        )
    positional, keywords = _arguments(made["inputs"])
    return Target(
        model=made["model"],
        inputs=positional,
        keywords=keywords,
        loss=made.get("loss"),
        targets=_arguments(made.get("targets", ()))[0],
        optimizer=optimizer,
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
