"""dyngran-plan: what it prints for a known plan, and one sentence with exit code 2 for anything else."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dyngran.compiler.cli import main
from dyngran.compiler.planfile import PlanDocument, dump_plan, parse_plan, save_plan
from dyngran.compiler.version import VERSION
from dyngran.passes.plan import Action, Decision, Plan

MIB = 2**20


def decision(index: int, action: Action, size_mib: int, label: str, recompute_us: float = 0.0) -> Decision:
    return Decision(
        value=index,
        name=f"value_{index}",
        action=action,
        reason=f"reason {index}",
        size_bytes=size_mib * MIB,
        recompute_us=recompute_us,
        label=label,
    )


DECISIONS = (
    decision(0, Action.KEEP, 1, "layer 0"),
    *(decision(i, Action.RECOMPUTE, i, "layer 1", 10.0) for i in range(2, 30)),
    decision(30, Action.KEEP, 64, "layer 0"),
)
PLAN = Plan(
    budget_bytes=1024 * MIB,
    saved=frozenset({0, 30}),
    decisions=DECISIONS,
    peak_bytes=1000 * MIB,
    static_bytes=200 * MIB,
    saved_bytes=65 * MIB,
    time_us=5000.0,
    overhead_us=280.0,
    recompute_us=280.0,
    num_recomputed=28,
    solver="mutwo",
)
DOCUMENT = PlanDocument(
    plan=PLAN, fingerprint="ab12cd", codegen="inductor", torch_version="2.13.0", device="NVIDIA H100", dyngran_version="0.1.0"
)


def plan_of(*decisions: Decision) -> Plan:
    return replace(PLAN, decisions=decisions, saved=frozenset(one.value for one in decisions if one.action is not Action.RECOMPUTE))


@pytest.fixture
def plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "160")
    save_plan(tmp_path / "plan.json", DOCUMENT)
    return str(tmp_path / "plan.json")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace("┃", "│").strip("│").split("│")]


def test_show(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", plan_file]) == 0
    printed = capsys.readouterr().out
    for words in (
        "1 GiB",
        "1000 MiB, of which static 200 MiB",
        "65 MiB in 2 values",
        "280 us in 28 ops",
        "mutwo",
        "NVIDIA H100",
        "ab12cd",
    ):
        assert words in printed
    rows = [cells(line) for line in printed.splitlines()]
    named = [row[0] for row in rows if row[0].startswith("value_")]
    assert named == ["value_30", *(f"value_{i}" for i in range(29, 10, -1))], "the 20 largest, largest first"
    assert ["value_30", "keep", "layer 0", "reason 30", "64 MiB", "0 us"] in rows
    total_mib = sum(range(2, 30))
    assert ["keep", "2", "65 MiB", "65 MiB", "0 B", "0 us"] in rows
    assert ["recompute", "28", f"{total_mib} MiB", "0 B", f"{total_mib} MiB", "280 us"] in rows
    assert ["layer 0", "2", "65 MiB", "65 MiB", "0 B", "0 us"] in rows
    assert ["layer 1", "28", f"{total_mib} MiB", "0 B", f"{total_mib} MiB", "280 us"] in rows


def test_lines_are_not_folded_where_no_terminal_is(
    plan_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS")
    reason = "a reason that is a good deal longer than what a row of eighty columns leaves for one of its six cells"
    save_plan(plan_file, replace(DOCUMENT, plan=plan_of(replace(DECISIONS[0], reason=reason))))
    assert main(["show", plan_file]) == 0
    assert reason in capsys.readouterr().out


def test_show_all(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--all", plan_file]) == 0
    printed = capsys.readouterr().out
    assert {row[0] for row in map(cells, printed.splitlines()) if row[0].startswith("value_")} == {d.name for d in DECISIONS}


def test_show_json_is_the_document(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--json", plan_file]) == 0
    printed = capsys.readouterr().out
    assert printed == dump_plan(DOCUMENT)
    assert parse_plan(printed, source="stdout") == DOCUMENT


def test_text_of_a_plan_file_is_printed_as_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steering = replace(DECISIONS[0], name="[bold]x[/oops]", reason="\x1b[2Jgone", label="")
    path = tmp_path / "plan.json"
    save_plan(path, replace(DOCUMENT, plan=replace(plan_of(steering), truncated=True, budget_bytes=None)))
    assert main(["show", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "[bold]x[/oops]" in printed
    assert "\x1b" not in printed
    assert "truncated" in printed
    assert "(no label)" in printed


def test_parameters_of_an_action_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decisions = (
        replace(DECISIONS[0], action=Action.SLICE, dimension=0, fraction=0.5),
        replace(DECISIONS[1], action=Action.NARROW, format="bf16"),
    )
    save_plan(tmp_path / "plan.json", replace(DOCUMENT, plan=plan_of(*decisions)))
    assert main(["show", str(tmp_path / "plan.json")]) == 0
    printed = capsys.readouterr().out
    assert "slice dim 0, 50%" in printed
    assert "narrow bf16" in printed


def test_diff(plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    kept = replace(DECISIONS[1], action=Action.KEEP, recompute_us=0.0)
    plan = plan_of(kept, *DECISIONS[2:])
    plan = replace(plan, peak_bytes=1002 * MIB, saved_bytes=67 * MIB, time_us=4990.0, num_recomputed=27)
    save_plan(other, replace(DOCUMENT, plan=plan, device="NVIDIA H200"))
    assert main(["diff", plan_file, str(other)]) == 0
    printed = capsys.readouterr().out
    rows = [cells(line) for line in printed.splitlines()]
    assert ["peak", "1000 MiB", "1002 MiB", "+2 MiB"] in rows
    assert ["static", "200 MiB", "200 MiB", "same"] in rows
    assert ["saved", "65 MiB", "67 MiB", "+2 MiB"] in rows
    assert ["time", "5 ms", "4.99 ms", "-10 us"] in rows
    assert ["ops recomputed", "28", "27", "-1"] in rows
    assert ["values: keep", "2", "2", "same"] in rows
    assert ["values: recompute", "28", "27", "-1"] in rows
    assert "decisions that differ, largest first (2 of 2)" in printed
    changed = {row[0]: row[-3:-1] for row in rows if row and row[0] in (DECISIONS[0].name, DECISIONS[1].name)}
    assert changed == {DECISIONS[0].name: [DECISIONS[0].action.value, "-"], DECISIONS[1].name: [DECISIONS[1].action.value, "keep"]}
    assert "device differs: NVIDIA H100 and NVIDIA H200" in printed
    assert "equal" not in printed


def test_diff_of_equal_plans(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", plan_file, plan_file]) == 0
    assert "The plans are equal." in capsys.readouterr().out


@pytest.mark.parametrize("command", [["show"], ["show", "--json"], ["diff", "good"]])
@pytest.mark.parametrize(
    "content", [None, "", "{}", '{"schema": 2}', json.dumps({**json.loads(dump_plan(DOCUMENT)), "peak_bytes": "8GiB"})]
)
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


@pytest.mark.parametrize("arguments", [[], ["shw"], ["show"], ["diff", "one"], ["show", "--bogus", "x"]])
def test_bad_arguments_are_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage: dyngran-plan" in capsys.readouterr().err


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
