"""dyngran-plan as a command: help that fits a terminal, exit codes, and one sentence for whatever is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shown_plans import document_of, graph_plan, layers

from dyngran.compiler.cli import COMMANDS, main
from dyngran.compiler.plans.planfile import dump_plan, save_plan
from dyngran.compiler.version import VERSION

DOCUMENT = document_of(graph_plan(layers(3)))


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    save_plan(tmp_path / "plan.json", DOCUMENT)
    return str(tmp_path / "plan.json")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_terminal_and_says_what_to_type(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main([command.replace("_", "-"), "--help"] if command else ["--help"])
    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert shown.startswith(f"usage: dyngran-plan {command.replace('_', '-')}".rstrip())
    assert max(map(len, shown.splitlines())) <= 80
    if not command:
        assert all(f" {name.replace('_', '-')}" in shown for name in COMMANDS)


def test_one_command_imports_no_other(tmp_path: Path) -> None:
    """So that `doctor` runs where a library is missing."""
    script = "import sys; from dyngran.compiler.cli import parser; parser(['doctor']); print('rich' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True).stdout == "False False\n"


@pytest.mark.parametrize("command", [["show"], ["show", "--json"], ["diff", "good"]])
@pytest.mark.parametrize("content", [None, "", "{}", '{"schema": 2}', json.dumps({**json.loads(dump_plan(DOCUMENT)), "torch": 2.13})])
def test_bad_input_is_one_sentence_and_exit_code_2(
    plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], content: str | None
) -> None:
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    assert main([*[plan_file if word == "good" else word for word in command], str(bad)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dyngran-plan: plan file ")
    assert "bad.json" in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["shw"], ["show"], ["diff", "one"]])
def test_bad_arguments_are_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage: dyngran-plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "--htlm", "out.html", "x"], "does not take '--htlm'; did you mean --html? Its --help lists what it takes."),
        (["build", "a.py:b", "-o", "c", "--budgte=1GiB"], "does not take '--budgte=1GiB'; did you mean --budget? Its"),
        (["show", "--bogus", "x"], "does not take '--bogus'. Its --help lists what it takes."),
    ],
)
def test_an_unknown_option_is_one_line_with_the_nearest(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"dyngran-plan {VERSION}\n"


def in_a_process(arguments: list[str], stdout: int) -> subprocess.CompletedProcess[str]:
    script = "import sys; from dyngran.compiler.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=Path(arguments[-1]).parent, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.parametrize("arguments", [["show"], ["show", "--json"]])
def test_a_reader_that_leaves_early_sees_no_traceback(plan_file: str, arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = in_a_process([*arguments, plan_file], write_end)
    os.close(write_end)
    assert done.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [["show"], ["show", "--json"], ["diff", "."]])
def test_output_that_cannot_be_written_is_one_sentence_and_exit_code_2(plan_file: str, arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = in_a_process([plan_file if word == "." else word for word in [*arguments, plan_file]], full.fileno())
    assert done.stderr == "dyngran-plan: cannot write the output: No space left on device.\n"
    assert done.returncode == 2


def test_no_output_at_all_is_one_sentence_and_exit_code_2(
    plan_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", None)  # as Python starts under `>&-`
    assert main(["show", plan_file]) == 2
    assert capsys.readouterr().err == "dyngran-plan: cannot write the output: standard output is closed.\n"


def test_ctrl_c_is_one_sentence(plan_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dyngran.compiler.commands.show.load_plan", stopped)
    assert main(["show", plan_file]) == 130
    assert capsys.readouterr().err == "dyngran-plan: interrupted; no file was changed.\n"


def test_the_command_is_installed() -> None:
    done = subprocess.run([Path(sys.executable).parent / "dyngran-plan", "--version"], capture_output=True, text=True)
    assert done.stdout == f"dyngran-plan {VERSION}\n"
