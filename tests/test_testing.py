"""The pytest helper: plans beside tests, written by --dyngran-update, checked by everyone else."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from problems import transformer

from dyngran.compiler.commands import check
from dyngran.compiler.plans.planfile import GraphPlan, PlanDocument, Settings, load_plan, save_plan
from dyngran.passes.decide import decide
from dyngran.passes.errors import InvalidBudget, InvalidOption
from dyngran.passes.fingerprint import fingerprint
from dyngran.passes.simulate import Simulator
from dyngran.testing import assert_plan

pytest_plugins = ["pytester"]

Failed = pytest.fail.Exception


def make() -> object:
    """A target: never called here, only named."""
    raise AssertionError("the test process must not make the model")


def document(num_layers: int, settings: Settings, codegen: str = "eager") -> PlanDocument:
    problem = transformer(num_layers)
    simulator = Simulator(problem)
    outcome = simulator.evaluate(simulator.default_saved)
    plan = decide(simulator, outcome, budget_bytes=None, fastest_us=outcome.time_us, solver="test")
    graph = GraphPlan(problem=problem, plan=plan, fingerprint=fingerprint(problem))
    return PlanDocument(graphs=(graph,), codegen=codegen, torch_version="2.13.0", device="h100", settings=settings)


Asked = list[tuple[str, Settings, str]]


class Workshop:
    """Stands for tracing: makes a model of ``num_layers`` and notes what it was asked for."""

    def __init__(self) -> None:
        self.num_layers = 2
        self.asked: Asked = []

    def build(self, target: str, settings: Settings, codegen: str) -> PlanDocument:
        self.asked.append((target, settings, codegen))
        return document(self.num_layers, settings, codegen)


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> Workshop:
    found = Workshop()
    monkeypatch.setattr(check, "build_fresh", found.build)
    return found


def test_a_missing_file_says_how_to_write_it(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(Failed, match="pytest --dyngran-update"):
        assert_plan(tmp_path / "plans" / "plan.json", make)
    assert not workshop.asked
    assert_plan(tmp_path / "plans" / "plan.json", make, budget="20 GiB", device="H100", codegen="eager", batch=4, update=True)
    target, settings, codegen = workshop.asked[0]
    assert target == f"{__file__}:make"
    assert (settings, codegen) == (Settings(budget="20GiB", profile="h100", batch=4), "eager")
    assert load_plan(tmp_path / "plans" / "plan.json").settings == settings


def test_the_committed_settings_are_asked_again(workshop: Workshop, tmp_path: Path) -> None:
    settings = Settings(profile="h100", batch=3)
    save_plan(tmp_path / "plan.json", document(2, settings))
    assert_plan(tmp_path / "plan.json", "net.py:make")
    assert workshop.asked == [("net.py:make", settings, "eager")]


def test_a_regression_fails_with_the_table_and_an_update_accepts_it(workshop: Workshop, tmp_path: Path) -> None:
    save_plan(tmp_path / "plan.json", document(2, Settings()))
    before = (tmp_path / "plan.json").read_text()
    workshop.num_layers = 3
    with pytest.raises(Failed) as failed:
        assert_plan(tmp_path / "plan.json", make)
    text = str(failed.value)
    for words in ("unplanned peak", "WORSE", "Regression: ", "pytest --dyngran-update"):
        assert words in text
    assert (tmp_path / "plan.json").read_text() == before
    assert_plan(tmp_path / "plan.json", make, max_peak="+1GiB", max_step="+90%", max_saved="+1GiB")
    assert_plan(tmp_path / "plan.json", make, update=True)
    assert_plan(tmp_path / "plan.json", make)


def test_an_update_leaves_a_file_that_says_the_same(workshop: Workshop, tmp_path: Path) -> None:
    same = document(2, Settings())
    save_plan(tmp_path / "plan.json", replace(same, extra={"note": "kept"}))
    assert_plan(tmp_path / "plan.json", make, update=True)
    assert load_plan(tmp_path / "plan.json").extra == {"note": "kept"}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"budget": "2GiB"}, "budget 1GiB, and this test asks for 2GiB"),
        ({"device": "h200"}, "device h100, and this test asks for h200"),
        ({"codegen": "inductor"}, "codegen eager, and this test asks for inductor"),
    ],
)
def test_a_file_made_with_other_settings_is_not_compared(workshop: Workshop, tmp_path: Path, asked: dict[str, str], words: str) -> None:
    save_plan(tmp_path / "plan.json", document(2, Settings(budget="1GiB", profile="h100")))
    with pytest.raises(Failed, match=words):
        assert_plan(tmp_path / "plan.json", make, **asked)
    assert not workshop.asked
    assert_plan(tmp_path / "plan.json", make, update=True, **asked)
    assert_plan(tmp_path / "plan.json", make, **asked)


class Holder:
    @staticmethod
    def make() -> None: ...


def _closure() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize("target", [lambda: None, _closure(), Holder.make, Holder(), len, pytest.param(Holder, id="class")])
def test_a_target_that_no_other_process_finds_is_refused(tmp_path: Path, target: Any) -> None:
    with pytest.raises(InvalidOption, match="top level of a file"):
        assert_plan(tmp_path / "plan.json", target, update=True)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"bach": 4}, InvalidOption),
        ({"codegen": "triton"}, InvalidOption),
        ({"budget": "lots"}, InvalidBudget),
        ({"max_peak": "1%"}, InvalidOption),
    ],
)
def test_settings_that_are_none_are_refused(tmp_path: Path, settings: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        assert_plan(tmp_path / "plan.json", make, update=True, **settings)


def test_importing_the_plugin_imports_no_torch() -> None:
    script = "import sys, dyngran.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


NET = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    return {"model": model, "inputs": torch.randn(4096, 64), "loss": lambda out: out.square().mean()}
"""
TEST = """
def test_step(dyngran_plan):
    dyngran_plan("plan.json", "net.py:make", device="h100", codegen="eager")
"""


def test_a_project_from_its_first_plan_to_a_regression(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    is_installed = bool(entry_points(group="pytest11", name="dyngran"))
    plugin = () if is_installed else ("-p", "dyngran.testing")
    pytester.makepyfile(net=NET, test_step=TEST)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider")

    def outcome(*words: str) -> pytest.RunResult:
        return pytester.runpytest_subprocess(*plugin, *words)

    missing = outcome()
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*there is no plan file*plan.json*pytest --dyngran-update*"])
    outcome("--dyngran-update").assert_outcomes(passed=1)
    written = (pytester.path / "plan.json").read_text()
    pytester.makepyfile(net=NET.replace("nn.GELU()", "nn.GELU(), nn.Dropout(0.1)"))
    worse = outcome()
    worse.assert_outcomes(failed=1)
    worse.stdout.fnmatch_lines(["*unplanned saved*WORSE*", "*new saved value: native_dropout*"])
    assert (pytester.path / "plan.json").read_text() == written
