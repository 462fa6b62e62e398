"""dyngran-plan check: what it fails on, what it lets pass, and what it tells a person, a script and a build server."""

import json
import re
import xml.etree.ElementTree as ElementTree
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from planted import FUSED_AWAY, HARMLESS, NET, NOT_SAVED, REGRESSIONS, Planner, edited

from dyngran.compiler.checks import check_output
from dyngran.compiler.checks.comparison import Comparison, Verdict, compare
from dyngran.compiler.checks.limits import Limits
from dyngran.compiler.commands import check
from dyngran.compiler.plans.planfile import PlanDocument, Settings, dump_plan, load_plan, save_plan
from dyngran.passes.errors import DyngranError, TargetError

LIMITS = Limits.parse()
DROPOUT, _ = REGRESSIONS["dropout"]


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planner]:
    folder = tmp_path_factory.mktemp("planted")
    with Planner.start(folder) as process:
        yield Planner(folder, process)


@pytest.fixture(scope="module")
def committed(planner: Planner) -> Callable[[str], PlanDocument]:
    return lambda codegen: planner.plan("committed", (), codegen=codegen)


CASES = [
    pytest.param(codegen, name, id=f"{codegen}, {name}")
    for codegen in ("eager", "inductor")
    for name in REGRESSIONS
    if name != {"eager": NOT_SAVED, "inductor": FUSED_AWAY}[codegen]
]


@pytest.mark.xdist_group("check")
@pytest.mark.parametrize(("codegen", "name"), CASES)
def test_a_regression_is_caught_and_its_line_is_named(
    planner: Planner, committed: Callable[[str], PlanDocument], codegen: str, name: str
) -> None:
    edit, words = REGRESSIONS[name]
    comparison = compare(committed(codegen), planner.plan(name, edit, codegen=codegen), LIMITS)
    assert comparison.is_regression
    lines = edited(edit).splitlines()
    named = [lines[one.line - 1] for one in check_output.blamed(comparison) if one.file == "net.py" and one.line is not None]
    assert any(words in line for line in named) or (words == "x.float()" and any("norm" in line for line in named))
    assert all(len(line) <= check_output.COLUMNS for line in check_output.as_text(comparison).splitlines())


@pytest.mark.xdist_group("check")
@pytest.mark.parametrize(("codegen", "name"), [*(("eager", name) for name in HARMLESS), ("inductor", "rename"), ("inductor", "reorder")])
def test_a_harmless_edit_changes_nothing(planner: Planner, committed: Callable[[str], PlanDocument], codegen: str, name: str) -> None:
    comparison = compare(committed(codegen), planner.plan(name, HARMLESS[name], codegen=codegen), LIMITS)
    assert not comparison.is_regression and not comparison.culprits
    if name != "unused parameter":  # on a card it is held, and shown as such
        assert comparison.is_same
        assert "Same as committed." in check_output.as_text(comparison)


@pytest.mark.xdist_group("check")
def test_a_budget_is_kept_by_more_recompute_and_the_growth_is_seen_all_the_same(planner: Planner) -> None:
    before, after = (
        planner.plan(name, edit, codegen="inductor", budget="122MiB") for name, edit in (("committed", ()), ("dropout", DROPOUT))
    )
    comparison = compare(before, after, LIMITS)
    verdicts = {metric.key: metric.verdict for metric in comparison.metrics}
    assert verdicts["planned_peak"] is not Verdict.WORSE
    assert verdicts["unplanned_peak"] is verdicts["unplanned_saved"] is Verdict.WORSE


@pytest.mark.xdist_group("check")
def test_a_budget_that_cannot_be_kept_any_more_is_a_regression(planner: Planner) -> None:
    before = planner.plan("committed", (), codegen="inductor", budget="122MiB")
    wider = (("hidden=512", "hidden=2048"),)

    def build(target: str, settings: Settings, codegen: str) -> PlanDocument:
        return planner.plan("far wider", wider, codegen=codegen, budget=settings.budget)

    checked = check.check_plan(before, "net.py:make", LIMITS, build)
    assert checked.fresh is None
    assert checked.comparison.worse[0].key == "planned_peak"
    text = check_output.as_text(checked.comparison)
    assert "cannot be kept any more: the least peak is" in text
    assert any("cannot be freed at the least peak" in one.text for one in checked.comparison.culprits)


Run = Callable[..., int]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "net.py").write_text(edited(DROPOUT))
    return tmp_path


@pytest.fixture
def run(folder: Path, planner: Planner, committed: Callable[[str], PlanDocument], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command line over a committed plan and a target that now has a dropout."""
    save_plan(folder / "plan.json", committed("eager"))
    fresh = planner.plan("dropout", DROPOUT, codegen="eager")
    monkeypatch.setattr(check, "build_fresh", lambda target, settings, codegen: fresh)
    return lambda *words: run_command("plan.json", "model/net.py:make", *words)


def run_command(*words: str) -> int:
    parser = ArgumentParser()
    check.add(parser.add_subparsers())
    options = parser.parse_args(["check", *words])
    code: int = options.run(options)
    return code


@pytest.mark.xdist_group("check")
def test_what_a_person_reads(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 1
    printed = capsys.readouterr().out
    assert re.search(r"unplanned saved +[\d.]+ MiB +[\d.]+ MiB +\+[\d.]+% +\+0.05% +WORSE", printed)
    assert "- new saved value: native_dropout (net.py:25) in blocks.0, blocks.1" in printed
    assert "Regression: " in printed
    assert "::error" not in printed


@pytest.mark.xdist_group("check")
def test_limits_are_options(run: Run) -> None:
    wide = ("--max-peak", "+10%", "--max-step", "+10%", "--max-saved", "+100MiB")
    assert run(*wide) == 0
    assert run(*wide, "--max-peak", "100MiB") == 1
    assert run(*wide, "--max-step", "1us") == 1


@pytest.mark.xdist_group("check")
@pytest.mark.parametrize("word", ["1%", "-1%", "", "many", "+1ms", "nan", "+1e400%"])
def test_a_limit_that_is_none_cannot_be_compared_with(run: Run, word: str) -> None:
    with pytest.raises(DyngranError, match="max_peak"):
        run(f"--max-peak={word or ' '}")


@pytest.mark.xdist_group("check")
def test_json(run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert run("--json") == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["regression"] is True
    saved = next(one for one in found["metrics"] if one["metric"] == "unplanned_saved")
    assert saved["committed"] < saved["limit"] < saved["now"]
    assert (saved["unit"], saved["rule"], saved["verdict"]) == ("bytes", "+0.05%", "worse")
    first = next(one for one in found["culprits"] if one["blamed"])
    assert (first["topic"], first["file"], first["line"]) == ("saved for backward", "net.py", 25)
    assert "::error" in captured.err


@pytest.mark.xdist_group("check")
def test_junit(run: Run, folder: Path) -> None:
    assert run("--junit", "report.xml") == 1
    root = ElementTree.parse(folder / "report.xml").getroot()
    cases = root.findall("testsuite/testcase")
    failed = [case.get("name") for case in cases if case.find("failure") is not None]
    assert root.tag == "testsuites"
    assert int(root.attrib["tests"]) == len(cases) == 8
    assert int(root.attrib["failures"]) == len(failed)
    assert "unplanned saved" in failed
    assert "static" not in failed
    assert "native_dropout (net.py:25)" in "".join(root.itertext())


@pytest.mark.xdist_group("check")
def test_annotations_point_at_the_line_in_the_repository(
    run: Run, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder / "summary.md"))
    (folder / "summary.md").write_text("before\n")
    assert run() == 1
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::")]
    assert commands[0].startswith("::error file=plan.json,title=dyngran-plan check::planned peak: ")
    assert any(line.startswith("::error file=model/net.py,line=25,title=dyngran-plan check::new saved value") for line in commands)
    assert not any(re.search(r"%(?!25|0A|0D|3A|2C)", line) for line in commands)
    summary = (folder / "summary.md").read_text()
    assert summary.startswith("before\n### dyngran-plan check: plan.json\n")
    assert "| unplanned saved |" in summary


@pytest.mark.xdist_group("check")
def test_update_writes_the_fresh_plan(run: Run, folder: Path) -> None:
    assert run("--update") == 0
    assert run() == 0
    assert load_plan(folder / "plan.json").peak_bytes > 0


@pytest.mark.xdist_group("check")
@pytest.mark.parametrize("content", [None, "{}"])
def test_a_plan_that_cannot_be_read(run: Run, folder: Path, content: str | None) -> None:
    (folder / "plan.json").unlink()
    if content is not None:
        (folder / "plan.json").write_text(content)
    with pytest.raises(DyngranError, match=r"plan\.json"):
        run("--junit", "report.xml")
    root = ElementTree.parse(folder / "report.xml").getroot()
    assert root.attrib["errors"] == "1"
    assert root.find("testsuite/testcase/error") is not None


def test_a_committed_plan_and_a_file_from_one_end_to_the_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is replaced here: two processes trace two targets."""
    small = NET.replace("depth=2", "depth=1").replace("(16, 256, 256", "(16, 64, 256")
    (folder / "model" / "net.py").write_text(small)
    settings = Settings(profile="h100")
    save_plan(folder / "plan.json", check.build_fresh("model/net.py:make", settings, "eager"))
    text = (folder / "plan.json").read_text()
    assert run_command("plan.json", "model/net.py:make") == 0
    assert "Same as committed." in capsys.readouterr().out
    (folder / "model" / "net.py").write_text(small + "\nraise RuntimeError('broken')\n")
    with pytest.raises(TargetError, match="broken"):
        run_command("plan.json", "model/net.py:make", "--update")
    assert (folder / "plan.json").read_text() == text == dump_plan(load_plan(folder / "plan.json"))


def test_what_github_reads_as_its_syntax_is_escaped() -> None:
    assert (
        check_output.annotation("a:b,c.py", 3, "50% of\r\nit")
        == "::error file=a%3Ab%2Cc.py,line=3,title=dyngran-plan check::50%25 of%0D%0Ait"
    )


def test_nothing_to_say_is_no_annotation() -> None:
    nothing = Comparison(metrics=())
    assert check_output.github_annotations(nothing, plan="p", sources=check_output.SourceFiles("x.py:make")) == []
