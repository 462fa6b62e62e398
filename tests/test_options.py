"""Options: what is accepted, who wins, and that every refusal names what would have been right."""

import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyngran.compiler.budget import MAX_BYTES, UNIT_BYTES, VALID_FORMS, BudgetForm, parse_bytes
from dyngran.compiler.options import (
    LOSSY,
    MODES,
    OPTION_NAMES,
    Budget,
    Codegen,
    Options,
    Outputs,
    PlanMismatchPolicy,
    current_defaults,
    parse_options,
    set_defaults,
)
from dyngran.passes.errors import DyngranError, InvalidBudget, InvalidOption
from dyngran.passes.solvers.portfolio import SOLVERS

GIB = 2**30
DEVICE = {"device_total_bytes": 80 * GIB, "device_free_bytes": 60 * GIB, "held_by_us_bytes": 5 * GIB}
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        (1, 1),
        (12345, 12345),
        ("8GiB", 8 * GIB),
        ("900MB", 900_000_000),
        ("1.5 GB", 1_500_000_000),
        (" .5 gib ", GIB // 2),
        ("4096", 4096),
        ("75%", 60 * GIB),
        ("12.5 %", 10 * GIB),
    ],
)
def test_budget_forms(written: object, num_bytes: int) -> None:
    assert Budget.parse(written).resolve(**DEVICE) == num_bytes


@pytest.mark.parametrize(
    "written",
    [
        *(0, -1, True, False, None, 1.5, float("nan"), float("inf"), b"8GiB", [], 10**400, -(10**400)),
        *("", " ", "0", "0GiB", "-8GiB", "+8GiB", "nan", "inf", "12 parsecs", "8 GiB!", "8 G iB", "1e9", "0x10", "1_000", "8,5GiB", "GiB"),
        *("0%", "-5%", "101%", "%", "0.1B", "٣GiB", "8GİB", "9" * 63 + "B", "9" * 5000, "9223372036854775808"),
    ],
)
def test_what_is_no_budget_is_refused_with_the_valid_forms(written: object) -> None:
    with pytest.raises(InvalidBudget) as caught:
        Budget.parse(written)
    assert VALID_FORMS in str(caught.value)
    assert len(str(caught.value)) < 400
    assert isinstance(caught.value, DyngranError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *(("8G", "'8GiB'"), ("8 gibs", "'8GiB'"), ("1.5GBB", "'1.5GB'"), ("900m", "'900MiB'")),
        *(("75", "'75GiB' or '75%'"), ("512", "'512GiB'")),
    ],
)
def test_the_nearest_form_is_named(written: str, meant: str) -> None:
    with pytest.raises(InvalidBudget) as caught:
        Budget.parse(written)
    assert f"; did you mean {meant}? Valid forms are" in str(caught.value)


@given(num_bytes=st.integers(1, MAX_BYTES))
def test_bytes_round_trip(num_bytes: int) -> None:
    budget = Budget.parse(num_bytes)
    assert Budget.parse(str(budget)) == budget
    assert Budget.parse(f" {num_bytes} b") == budget
    assert budget.resolve(**DEVICE) == num_bytes


@given(percent=st.decimals("0.0001", "100", places=4))
def test_percent_round_trip(percent: Decimal) -> None:
    budget = Budget.parse(f"{percent}%")
    assert Budget.parse(str(budget)) == budget
    assert budget.form is BudgetForm.PERCENT
    exact = Fraction(percent) * DEVICE["device_total_bytes"] / 100
    assert 0 <= exact - budget.resolve(**DEVICE) < 1


@given(amount=st.decimals("0", "999999", places=3), unit=st.sampled_from(sorted(UNITS)), space=st.sampled_from(["", " ", "  "]))
def test_units(amount: Decimal, unit: str, space: str) -> None:
    exact = Fraction(amount) * UNITS[unit]
    for text in (f"{amount}{space}{unit}", f"{amount}{space}{unit.lower()}", f"{amount}{space}{unit.upper()}"):
        assert parse_bytes(text) == exact.numerator // exact.denominator
    assert {name.lower(): size for name, size in UNITS.items()} == UNIT_BYTES


@given(text=st.text(max_size=80))
def test_any_text_is_a_budget_or_refused_by_name(text: str) -> None:
    try:
        budget = Budget.parse(text)
    except InvalidBudget:
        return
    assert budget.resolve(**DEVICE) >= 1


def test_auto_leaves_what_others_hold_and_a_margin() -> None:
    auto = Budget.parse(" Auto ")
    assert str(auto) == "auto"
    assert Budget.parse("auto") == auto
    others_bytes = 80 * GIB - 60 * GIB - 5 * GIB
    assert auto.resolve(**DEVICE) == 80 * GIB - others_bytes - 80 * GIB * 3 // 100
    assert auto.resolve(device_total_bytes=8 * GIB, device_free_bytes=8 * GIB, held_by_us_bytes=0) == 8 * GIB - GIB // 2
    with pytest.raises(InvalidBudget, match="leaves nothing"):
        auto.resolve(device_total_bytes=8 * GIB, device_free_bytes=0, held_by_us_bytes=0)


def test_no_options_are_the_defaults() -> None:
    assert parse_options(None, environ={}) == parse_options({}, environ={}) == Options()


def test_every_option() -> None:
    given_options = {
        "budget": "8GiB",
        "codegen": "inductor",
        "solver": "ilp",
        "storage": ["int8", "bf16"],
        "pack": False,
        "slice": False,
        "offload": "2GiB",
        "max_grad_error": None,
        "plan": "plans/gpt.json",
        "plan_mismatch": "resolve",
        "guard": False,
        "device_profile": "H100",
        "keep_below": "64KiB",
        "outputs": "dropped",
        "mode": "reduce-overhead",
        "max-autotune": True,
        "triton.cudagraphs": False,
    }
    assert set(OPTION_NAMES) < set(given_options)
    assert parse_options(given_options, environ={}) == Options(
        budget=Budget.parse(8 * GIB),
        codegen=Codegen.INDUCTOR,
        solver="ilp",
        storage=("bf16", "int8"),
        offload=2 * GIB,
        pack=False,
        slice=False,
        plan=Path("plans/gpt.json"),
        plan_mismatch=PlanMismatchPolicy.RESOLVE,
        guard=False,
        device_profile="H100",
        keep_below=64 * 1024,
        outputs=Outputs.DROPPED,
        mode="reduce-overhead",
        inductor={"max_autotune": True, "triton.cudagraphs": False},
    )
    assert parse_options({"codegen": Codegen.EAGER, "keep_below": 0}, environ={}) == Options(codegen=Codegen.EAGER, keep_below=0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budgett": 1}, ["'budgett'", "did you mean 'budget'", *OPTION_NAMES]),
        ({"Budget": 1}, ["did you mean 'budget'"]),
        ({"max_autotun": True}, ["did you mean 'max_autotune'"]),
        ({"qqqq": 1}, ["'qqqq'", *OPTION_NAMES]),
        ({1: 2}, ["strings"]),
        ({"codegen": "enductor"}, ["did you mean 'inductor'", "'eager'"]),
        ({"codegen": None}, ["'inductor'", "'eager'"]),
        ({"solver": "mutow"}, ["did you mean 'mutwo'", *SOLVERS]),
        ({"solver": 3}, [*SOLVERS]),
        ({"mode": "reduce_overhead"}, ["did you mean 'reduce-overhead'", *MODES]),
        ({"storage": ["bf17"]}, ["did you mean 'bf16'", *LOSSY]),
        ({"storage": "fp8"}, ["'fp8'", "list", "storage=['bf16']", *LOSSY]),
        ({"storage": ["bits"]}, ["'bits'", "needs no name"]),
        ({"pack": 1}, ["pack", "True or False"]),
        ({"slice": "no"}, ["slice", "True or False"]),
        ({"plan": ""}, ["path"]),
        ({"plan": 3}, ["path"]),
        ({"guard": 1}, ["True or False"]),
        ({"device_profile": ""}, ["name of a device"]),
        ({"device_profile": 80}, ["name of a device"]),
        ({"keep_below": -1}, ["64KiB"]),
        ({"keep_below": "75%"}, ["64KiB"]),
        ({"keep_below": True}, ["64KiB"]),
        ({"keep_below": 1.5}, ["64KiB"]),
        ({"budget": "12 parsecs"}, [VALID_FORMS, "budget = '12 parsecs'"]),
        ({"max_autotune": "yes"}, ["'max_autotune'", "str", "bool"]),
        ({"custom_partitioner_fn": None}, ["set by dyngran itself"]),
        ({"codegen": "eager", "max_autotune": True}, ["'max_autotune'", "Inductor"]),
        ({"codegen": "eager", "mode": "max-autotune"}, ["'mode'", "Inductor"]),
        (["budget"], ["dict"]),
    ],
)
def test_refusals_name_what_would_be_right(options: dict[str, object], said: list[str]) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_options(options, environ={})
    for words in said:
        assert words in str(caught.value)


def test_options_win_over_defaults_and_defaults_over_the_environment() -> None:
    environ = {"DYNGRAN_BUDGET": "1GiB"}
    assert parse_options(None, environ=environ).budget == Budget.parse(GIB)
    set_defaults(budget="2GiB", solver="ilp")
    assert current_defaults() == {"budget": "2GiB", "solver": "ilp"}
    assert parse_options(None, environ=environ).budget == Budget.parse(2 * GIB)
    both = parse_options({"budget": "3GiB"}, environ=environ)
    assert (both.budget, both.solver) == (Budget.parse(3 * GIB), "ilp")
    assert parse_options({"budget": None}, environ=environ).budget is None
    set_defaults(solver="ilp")
    assert parse_options(None, environ=environ).budget == Budget.parse(GIB)
    set_defaults()
    assert current_defaults() == {}


def test_only_the_budget_comes_from_the_environment() -> None:
    assert parse_options(None, environ={"DYNGRAN_SOLVER": "ilp", "DYNGRAN_BUDGET": " "}) == Options()
    with pytest.raises(InvalidBudget, match="DYNGRAN_BUDGET = 'lots'"):
        parse_options(None, environ={"DYNGRAN_BUDGET": "lots"})
    assert parse_options({"budget": 5}, environ={"DYNGRAN_BUDGET": "lots"}).budget == Budget.parse(5)


@pytest.mark.parametrize("written", ["none", "None", " NONE "])
def test_none_in_the_environment_sets_no_limit(written: str) -> None:
    assert parse_options(None, environ={"DYNGRAN_BUDGET": written}) == Options()
    assert parse_options({"budget": 5}, environ={"DYNGRAN_BUDGET": written}).budget == Budget.parse(5)


def test_the_process_environment_is_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNGRAN_BUDGET", "7GiB")
    assert parse_options(None).budget == Budget.parse(7 * GIB)


def test_defaults_are_checked_at_once_and_a_refused_one_changes_nothing() -> None:
    set_defaults(solver="ilp")
    with pytest.raises(InvalidBudget):
        set_defaults(budget="12 parsecs")
    with pytest.raises(InvalidOption, match="did you mean 'solver'"):
        set_defaults(solvr="ilp")
    assert current_defaults() == {"solver": "ilp"}


def test_defaults_for_inductor_do_not_stand_in_the_way_of_eager() -> None:
    set_defaults(mode="max-autotune", max_autotune=True, budget=5)
    assert parse_options({"codegen": "eager"}, environ={}) == Options(codegen=Codegen.EAGER, budget=Budget.parse(5))
    assert parse_options(None, environ={}).mode == "max-autotune"


def test_mode_of_torch_compile() -> None:
    assert parse_options(None, mode="reduce-overhead", environ={}).mode == "reduce-overhead"
    assert parse_options({"mode": "max-autotune"}, mode="max-autotune", environ={}).mode == "max-autotune"
    with pytest.raises(InvalidOption, match="twice"):
        parse_options({"mode": "max-autotune"}, mode="default", environ={})


def test_options_need_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from dyngran.compiler.options import parse_options;"
        "parse_options({'budget': '8GiB', 'mode': 'max-autotune'}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)


@pytest.mark.parametrize(
    ("options", "variable", "counts"),
    [
        ({}, "", False),
        ({"plan": "plan.json"}, "", True),
        ({"plan": "plan.json"}, "none", False),
        ({"plan": "plan.json"}, "1GiB", False),
        ({"plan": "plan.json", "budget": None}, "", False),
    ],
)
def test_the_budget_of_a_plan_file_counts_where_nothing_names_one(options: dict[str, object], variable: str, counts: bool) -> None:
    read = parse_options(options, environ={"DYNGRAN_BUDGET": variable})
    assert read.uses_plan_budget is counts
    assert (read.budget is None) is (variable != "1GiB")
