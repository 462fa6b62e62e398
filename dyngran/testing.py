"""Plans under test: a pytest plugin that fails when a training step needs more memory or time than a committed plan says.

    def test_step(dyngran_plan):
        dyngran_plan("plans/step.json", "train.py:make", budget="20GiB", device="h100")

``pytest --dyngran-update`` writes the plans that are missing or have changed. `assert_plan` does the same without the fixture.
Importing this module is cheap: torch is imported by the process that traces.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dyngran.compiler.plans.planfile import PlanDocument, Settings

Target = str | Callable[..., Any]

_UPDATE = "--dyngran-update"
_updating: list[bool] = []  # of this pytest run and those around it, for calls without the fixture


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dyngran")
    group.addoption(_UPDATE, action="store_true", help="write dyngran's plan files anew where a step changed, and pass")


def pytest_configure(config: pytest.Config) -> None:
    _updating.append(bool(config.getoption(_UPDATE)))


def pytest_unconfigure() -> None:
    _updating.pop()


@pytest.fixture
def dyngran_plan(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`assert_plan`, with paths from the folder of the test's file on."""
    folder = request.path.parent

    def check(path: str | os.PathLike[str], target: Target, **arguments: Any) -> None:
        __tracebackhide__ = True
        file, colon, name = target.rpartition(":") if isinstance(target, str) else ("", "", "")
        found: Target = f"{folder / file}{colon}{name}" if file.endswith(".py") else target
        assert_plan(folder / path, found, **arguments)

    return check


def assert_plan(
    path: str | os.PathLike[str],
    target: Target,
    *,
    budget: str | int | None = None,
    device: str | None = None,
    max_peak: str | None = None,
    max_step: str | None = None,
    max_saved: str | None = None,
    max_graph_breaks: int | None = None,
    update: bool | None = None,
    **settings: Any,
) -> None:
    """Fail if ``target`` needs more than the plan in ``path`` says.

    Args:
        path: the committed plan file.
        target: ``"file.py:make"``, ``"module:make"`` or a function at the top level of a file.
        budget, device: as ``dyngran-plan build`` takes them. None: as committed, and for a new file none and the CPU.
        max_peak, max_step, max_saved, max_graph_breaks: as ``dyngran-plan check`` takes them; None: its defaults.
        update: write the file if it is missing or differs; None: what ``pytest --dyngran-update`` says.
        settings: ``codegen``, ``batch``, ``dtype``, ``dynamic``, ``outputs``, ``keep_below``, ``pack``, ``solver`` or ``storage``, as
            ``dyngran-plan build`` takes them.

    Raises:
        AssertionError: a regression, a file that is missing, or one that was made with other settings.
        DyngranError: the target cannot be traced, the file cannot be read, or the two cannot be compared.
    """
    __tracebackhide__ = True
    from dyngran.compiler.checks import check_output
    from dyngran.compiler.checks.limits import Limits
    from dyngran.compiler.commands.check import check_plan
    from dyngran.compiler.plans.planfile import load_plan, save_plan

    name, is_updating = _named(target), any(_updating[-1:]) if update is None else update
    limits = Limits.parse(max_peak=max_peak, max_step=max_step, max_saved=max_saved, max_graph_breaks=max_graph_breaks)
    asked = _asked(budget=budget, device=device, **settings)
    if not Path(path).exists():
        if not is_updating:
            pytest.fail(f"there is no plan file {os.fspath(path)!r}. Run `pytest {_UPDATE}` to write it, and commit it.", pytrace=False)
        document = _build(name, None, asked)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_plan(path, document)
        return
    committed = load_plan(path)
    if changed := _changed(committed, asked):
        if not is_updating:
            pytest.fail(f"{os.fspath(path)} was made with {changed}. Run `pytest {_UPDATE}` if that is intended.", pytrace=False)
        save_plan(path, _build(name, committed, asked))
        return
    checked = check_plan(committed, name, limits)
    if is_updating and checked.fresh is not None:
        if not checked.comparison.is_same:
            save_plan(path, checked.fresh)
    elif checked.comparison.is_regression:
        page = check_output.as_text(checked.comparison)
        advice = "Raise the budget, or make the step smaller" if checked.fresh is None else f"Run `pytest {_UPDATE}` to accept it"
        pytest.fail(f"{os.fspath(path)}, {name}\n{page}{advice}.", pytrace=False)


def _named(target: Target) -> str:
    """``file.py:name`` of a function. Raises InvalidOption for one that another process cannot find."""
    from dyngran.passes.errors import InvalidOption

    if isinstance(target, str):
        return target
    name, file = getattr(target, "__name__", ""), None
    if inspect.isfunction(target):
        file = inspect.getsourcefile(target)
    if file is None or target.__qualname__ != name or target.__globals__.get(name) is not target:
        raise InvalidOption(
            f"target {target!r} is no function at the top level of a file, and another process must find it by name: move it there, or "
            'write "file.py:name".'
        )
    return f"{file}:{name}"


def _asked(*, budget: str | int | None, device: str | None, **settings: Any) -> dict[str, Any]:
    """The settings that were given, as plan files hold them, and ``codegen``. Raises InvalidOption."""
    from dataclasses import fields

    from dyngran.compiler.budget import Budget, parse_bytes
    from dyngran.compiler.options import Codegen, Outputs
    from dyngran.compiler.plans.planfile import Settings
    from dyngran.passes.devices import find_device
    from dyngran.passes.errors import InvalidOption

    known = {"codegen", *(one.name for one in fields(Settings))} - {"budget", "profile"}
    if unknown := settings.keys() - known:
        raise InvalidOption(f"{min(unknown)!r} is no setting of a plan. Settings are budget, device, {', '.join(sorted(known))}.")
    asked = {name: value for name, value in settings.items() if value is not None}
    if budget is not None:
        asked["budget"] = str(Budget.parse(budget))
    if device is not None:
        asked["profile"] = find_device(device).name
    if isinstance(asked.get("keep_below"), str):
        asked["keep_below"] = parse_bytes(asked["keep_below"])
    for name, kind in (("outputs", Outputs), ("codegen", Codegen)):
        if name in asked and asked[name] not in [*kind, *(one.value for one in kind)]:
            raise InvalidOption(f"{name} = {asked[name]!r} is none of {', '.join(one.value for one in kind)}.")
    if "outputs" in asked:
        asked["outputs"] = Outputs(asked["outputs"])
    if "storage" in asked:
        asked["storage"] = tuple(asked["storage"])
    if "codegen" in asked:
        asked["codegen"] = Codegen(asked["codegen"]).value
    return asked


def _changed(committed: PlanDocument, asked: dict[str, Any]) -> str:
    """``budget 20GiB, and this test asks for 24GiB``; '' if the file was made as the test asks."""
    from dyngran.compiler.commands.check import settings_of

    made = settings_of(committed)
    for name, value in asked.items():
        before = committed.codegen if name == "codegen" else getattr(made, name)
        if before != value:
            shown = [getattr(one, "value", one) for one in (before, value)]
            return f"{'device' if name == 'profile' else name} {shown[0]}, and this test asks for {shown[1]}"
    return ""


def _build(target: str, committed: PlanDocument | None, asked: dict[str, Any]) -> PlanDocument:
    from dyngran.compiler.commands.check import build_fresh, settings_of
    from dyngran.compiler.plans.planfile import Settings

    base: Settings = settings_of(committed) if committed is not None else Settings(profile="cpu")
    codegen = asked.get("codegen", committed.codegen if committed is not None else "inductor")
    return build_fresh(target, replace(base, **{name: value for name, value in asked.items() if name != "codegen"}), codegen)
