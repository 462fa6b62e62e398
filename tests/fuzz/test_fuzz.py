"""The fuzzer in small: kept failures are replayed, a few hundred programs are drawn anew, and planted faults are found and shrunk.

``python tests/fuzz/run.py`` runs as many programs as one likes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compile_level
import joint_level
import pytest
import torch
from campaign import Campaign, show_seed
from corpus import Case, read_case, read_cases, write_case
from forks import Answering
from grammar import Draw, Program, Step, draw_program, from_document, program_of, to_document
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from isolation import LEVELS, Isolated, Level
from net import make_inputs, make_net, train_step
from operations import OPERATIONS, REGIONS, WEIGHTS
from shrink import shrink
from torch import fx
from verdict import Outcome, Verdict

from dyngran.compiler import partition as partitioning
from dyngran.compiler import planned_graph, torch_private
from dyngran.compiler import prepare as preparing
from dyngran.compiler.capture import Captured
from dyngran.passes.plan import Schedule

CASES = read_cases()
MAX_DISCARDED = 0.12
JOINT_EXAMPLES, COMPILED_EXAMPLES = 15, 2
MAX_SEEDS_TO_A_FAULT = 120
MAX_SHRUNK_STEPS = 3
MAX_TRIES = 40

no_checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@dataclass(frozen=True, slots=True)
class HypothesisDraw:
    draw: Callable[[st.SearchStrategy[int]], int]

    def number(self, below: int) -> int:
        return self.draw(st.integers(0, below - 1))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    return draw_program(HypothesisDraw(draw))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def failed(verdict: Verdict) -> str:
    """What to say of a program that dyngran gets wrong; empty if it does not."""
    return f"{verdict.reason}: {verdict.details}" if verdict.outcome is Outcome.FAILED else ""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kept_program_is_right_at_the_level_of_graphs(case: Case) -> None:
    assert replayed("joint", case) == ""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kept_program_is_right_under_torch_compile(case: Case) -> None:
    assert replayed("compile", case) == ""


def replayed(level: str, case: Case) -> str:
    """What to say of a kept program, which may have killed its process."""
    with Isolated(LEVELS[level]) as isolated:
        return failed(isolated.check(case.program, has_more=False))


@settings(max_examples=JOINT_EXAMPLES, suppress_health_check=no_checks)
@given(program=programs())
def test_any_program_is_right_at_the_level_of_graphs(program: Program) -> None:
    assert failed(joint_level.check(program)) == ""


@settings(max_examples=COMPILED_EXAMPLES, suppress_health_check=no_checks)
@given(program=programs())
def test_any_program_is_right_under_torch_compile(program: Program) -> None:
    assert failed(compile_level.check(program)) == ""


def test_few_programs_are_rejected_by_eager_mode_and_all_operations_are_drawn() -> None:
    num, rejected, drawn = 400, 0, Counter[str]()
    for seed in range(num):
        program = program_of(seed)
        drawn.update(step.op for step in program.steps)
        try:
            net = make_net(program)
            train_step(program, net, net, make_inputs(program, program.rows))
        except Exception:  # noqa: BLE001 - eager mode raises many kinds
            rejected += 1
    assert rejected <= MAX_DISCARDED * num
    assert set(drawn) == {*OPERATIONS, *REGIONS} == set(WEIGHTS)


def test_a_seed_is_one_program_and_a_program_is_json() -> None:
    for seed in range(50):
        program = program_of(seed)
        assert program == program_of(seed)
        assert from_document(json.loads(json.dumps(to_document(program)))) == program
    with pytest.raises(ValueError, match="no operation of this fuzzer"):
        Step("frobnicate")


# Faults that a partitioner could have, and has had


def other_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward draws its masks anew."""
    monkeypatch.setattr(torch_private, "replay_random_state", lambda _joint, forward, backward, *_: (forward, backward))


def overwritten_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward reads inputs and buffers that forward has written to since."""
    monkeypatch.setattr(preparing, "_copy_overwritten_inputs", lambda _joint, _num: None)


def lost_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several gradients the last is not returned where everything is recomputed."""
    cut = partitioning.partition

    def losing(
        captured: Captured, saved: Sequence[int], schedule: Schedule | None = None, **how: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = cut(captured, saved, schedule, **how)
        output = next(node for node in backward.graph.nodes if node.op == "output")
        gradients = list(output.args[0])
        given = [place for place, gradient in enumerate(gradients) if gradient is not None]
        if len(given) > 1 and len(saved) < len(captured.problem.values) // 4:
            gradients[given[-1]] = None
            output.args = (tuple(gradients),)
            backward.recompile()
        return forward, backward

    monkeypatch.setattr(partitioning, "partition", losing)


def saved_value_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward writes over a value that it has saved."""
    cut = partitioning.partition

    def writing(
        captured: Captured, saved: Sequence[int], schedule: Schedule | None = None, **how: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = cut(captured, saved, schedule, **how)
        output = next(node for node in forward.graph.nodes if node.op == "output")
        num_outputs = captured.joint.num_fwd_outputs
        returned = set(output.args[0][:num_outputs])
        saved_ones = [
            node
            for node in output.args[0][num_outputs:]
            if isinstance(node, fx.Node) and node not in returned and node.target is torch.ops.aten.sigmoid.default
        ]
        if saved_ones:
            with forward.graph.inserting_before(output):
                forward.graph.call_function(torch.ops.aten.mul_.Scalar, (saved_ones[-1], 0.5))
            forward.recompile()
        return forward, backward

    for module in (partitioning, planned_graph):
        monkeypatch.setattr(module, "partition", writing)


FAULTS = [other_masks, overwritten_inputs, lost_gradient, saved_value_written_over]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found_and_shrunk_to_a_few_steps(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        found = next((seed for seed in range(MAX_SEEDS_TO_A_FAULT) if is_wrong(program_of(seed))), None)
        assert found is not None
        small = shrink(program_of(found), is_wrong, max_tries=MAX_TRIES)
        assert len(small.steps) <= MAX_SHRUNK_STEPS
        assert is_wrong(small)
    assert not is_wrong(small)


def is_wrong(program: Program) -> bool:
    return joint_level.check(program).outcome is Outcome.FAILED


def test_a_planted_fault_is_found_under_torch_compile() -> None:
    program = Program(steps=(Step("lstm_cell"),))
    assert failed(compile_level.check(program)) == ""
    with pytest.MonkeyPatch.context() as patch:
        saved_value_written_over(patch)
        assert compile_level.check(program).outcome is Outcome.FAILED


def test_a_campaign_goes_on_where_it_stopped_and_starts_anew_for_another_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state.jsonl"

    def check(program: Program, _has_more: bool) -> Verdict:
        return Verdict(Outcome.DISCARDED, "eager: no") if program == program_of(1) else Verdict(Outcome.SAME)

    plant(monkeypatch, check)
    Campaign("joint", state).run_block(0, 3)
    again = Campaign("joint", state)
    assert again.lines[0]["outcomes"] == {"same": 2, "discarded": 1}
    assert again.is_done(0, 3) and not again.is_done(3, 5)
    assert not Campaign("compile", state).is_done(0, 3)
    assert again.summary() == 0
    assert "3 programs" in capsys.readouterr().out
    assert not Campaign("joint", state, versions={"torch": "0", "product": "another"}).is_done(0, 3)


def test_a_block_that_was_cut_short_is_run_again_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, lambda _program, _has_more: Verdict(Outcome.SAME))
    campaign = Campaign("joint", tmp_path / "state.jsonl")
    campaign.run_block(0, 2)
    assert not campaign.is_done(0, 5)
    campaign.run_block(0, 5)
    assert campaign.is_done(0, 5)
    assert campaign.summary() == 0
    assert "5 programs" in capsys.readouterr().out.splitlines()[-2]


# Programs that end their process, or never end. The fatal one is the fourth of a block


FATAL_SEED = 3
FATAL = program_of(FATAL_SEED)


def plant(
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[[Program, bool], Verdict],
    *,
    eager: Callable[[Program], object] = repr,
    stock: Callable[[Program, bool], object] = lambda program, _has_more: repr(program),
    timeout_s: float = 60,
) -> None:
    """Programs at the level of graphs are run by these from now on."""
    monkeypatch.setitem(LEVELS, "joint", Level(check, eager, stock, more_every=20, timeout_s=timeout_s))


def is_fatal(program: Program) -> bool:
    """The fatal program, and what is left of it while it is shrunk."""
    return program.data_seed == FATAL.data_seed


def dies(program: Program, _has_more: bool = False) -> Verdict:
    if is_fatal(program):
        faulthandler.disable()  # pytest's would write where
        os.kill(os.getpid(), signal.SIGSEGV)
    return Verdict(Outcome.SAME)


def exits(program: Program, _has_more: bool) -> Verdict:
    if is_fatal(program):
        os._exit(0)
    return Verdict(Outcome.SAME)


def hangs(program: Program, _has_more: bool) -> Verdict:
    while is_fatal(program):
        signal.pause()
    return Verdict(Outcome.SAME)


def raises(program: Program, _has_more: bool) -> Verdict:
    if is_fatal(program):
        raise ZeroDivisionError("by zero")
    return Verdict(Outcome.SAME)


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (dies, "killed by SIGSEGV"),
        (exits, "ended without an answer"),
        (hangs, "not done after 1 s"),
        (raises, "check stops: ZeroDivisionError: by zero"),
    ],
)
def test_a_block_goes_on_after_a_program_that_ends_its_process(
    check: Callable[[Program, bool], Verdict], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, check, timeout_s=1 if check is hangs else 60)
    campaign = Campaign("joint", None, shrinks=False)
    campaign.run_block(0, 5)
    assert campaign.lines[0]["outcomes"] == {"same": 4, "failed": 1}
    assert campaign.lines[0]["seeds"] == {f"failed: {reason}": [FATAL_SEED]}
    assert campaign.summary() == 1
    assert show_seed("joint", FATAL_SEED) == 1 and show_seed("joint", 0) == 0
    assert f"failed: {reason}" in capsys.readouterr().out


def test_a_program_that_eager_mode_or_stock_dies_of_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    for planted, reason in ({"stock": dies}, "stock: killed by SIGSEGV"), ({"eager": dies}, "eager: killed by SIGSEGV"):
        plant(monkeypatch, dies, **planted)
        campaign = Campaign("joint", None)
        campaign.run_block(0, 5)
        assert campaign.lines[0]["outcomes"] == {"same": 4, "discarded": 1}
        assert campaign.lines[0]["reasons"] == {f"discarded: {reason}": 1}
        assert show_seed("joint", FATAL_SEED) == 0


def test_a_witness_that_raises_excuses_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, dies, stock=raises)
    with Isolated(LEVELS["joint"]) as isolated:
        verdict = isolated.check(FATAL, has_more=False)
    assert verdict == Verdict(Outcome.FAILED, "killed by SIGSEGV", "eager: lives; stock: stock stops: ZeroDivisionError: by zero")


def test_a_witness_that_dies_of_more_excuses_only_what_dies_of_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies_of_more(program: Program, has_more: bool) -> Verdict:
        return dies(program) if has_more else Verdict(Outcome.SAME)

    for check, outcome in (dies, Outcome.FAILED), (dies_of_more, Outcome.DISCARDED):
        plant(monkeypatch, check, stock=dies_of_more)
        with Isolated(LEVELS["joint"]) as isolated:
            assert isolated.check(FATAL, has_more=True).outcome is outcome


def test_a_program_that_kills_its_process_is_shrunk_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it kills it, and stock lives: less than two steps kill stock too."""

    def stock(program: Program, _has_more: bool) -> Verdict:
        return dies(program) if len(program.steps) < 2 else Verdict(Outcome.SAME)

    plant(monkeypatch, dies, stock=stock)
    monkeypatch.setattr("corpus.FOLDER", tmp_path)
    Campaign("joint", None).run_block(FATAL_SEED, FATAL_SEED + 1)
    (path,) = tmp_path.iterdir()
    case = read_case(path)
    assert len(FATAL.steps) > len(case.program.steps) == 2
    assert case.reason == "failed: killed by SIGSEGV"


def test_one_process_answers_until_it_dies() -> None:
    def answer(question: str) -> str:
        if question == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return f"{question} {os.getpid()}" + "." * 100_000

    with Answering(answer) as process:
        first, second = (process.ask(question, timeout_s=60)[0] for question in ("one", "two"))
        assert process.ask("die", timeout_s=60) == (None, "killed by SIGKILL")
        third, _ = process.ask("three", timeout_s=60)
    assert first and second and third
    assert first.removeprefix("one") == second.removeprefix("two") != third.removeprefix("three")


def test_a_case_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corpus.FOLDER", tmp_path)
    case = Case("one", "joint", "failed: other numbers", {"torch": "2.13.0"}, program_of(3), "what it was")
    assert read_case(write_case(case)) == case


def test_hypothesis_draws_what_seeds_draw() -> None:
    """Both go through one grammar: a source of zeros gives the plainest program."""

    class Zeros:
        def number(self, _below: int) -> int:
            return 0

    zeros: Draw = Zeros()
    assert draw_program(zeros) == Program(steps=(Step(next(iter(WEIGHTS))),))
