"""The fuzzer in small: kept failures are replayed, a few hundred programs are drawn anew, and planted faults are found and shrunk.

``python tests/fuzz/run.py`` runs as many programs as one likes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import compile_level
import joint_level
import pytest
import torch
from campaign import Campaign
from corpus import Case, read_case, read_cases, write_case
from grammar import Draw, Program, Step, draw_program, from_document, program_of, to_document
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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
    assert failed(joint_level.check(case.program)) == ""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kept_program_is_right_under_torch_compile(case: Case) -> None:
    assert failed(compile_level.check(case.program)) == ""


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

    def losing(captured: Captured, saved: Sequence[int], schedule: Schedule | None = None) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = cut(captured, saved, schedule)
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

    def writing(captured: Captured, saved: Sequence[int], schedule: Schedule | None = None) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = cut(captured, saved, schedule)
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
    seen: list[int] = []

    def check(_level: str, seed: int) -> Verdict:
        seen.append(seed)
        return Verdict(Outcome.DISCARDED, "eager: no") if seed == 1 else Verdict(Outcome.SAME)

    Campaign("joint", state).run_block(0, 3, check)
    again = Campaign("joint", state)
    assert seen == [0, 1, 2]
    assert again.is_done(0) and not again.is_done(3)
    assert not Campaign("compile", state).is_done(0)
    assert again.summary() == 0
    assert "3 programs" in capsys.readouterr().out
    assert not Campaign("joint", state, versions={"torch": "0", "product": "another"}).is_done(0)


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
