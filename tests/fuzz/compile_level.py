"""Programs through torch.compile: free, at a middle and at the least budget, each trained for two steps and compared with eager mode.

The least budget is what a refusal names: it must train, and keep it. With Inductor's code numbers are compared with a tolerance.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from grammar import Program
from joint_level import small_calls_measured
from measure import event_peak_bytes, storage_bytes
from net import Net, Seen, make_inputs, make_net, relative_error, train_step
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._functorch.partitioners import default_partition
from torch.utils.checkpoint import set_checkpoint_early_stop
from verdict import Outcome, Verdict, coarsest_eps, judge, named

import dyngran
from dyngran.errors import BudgetTooSmall, NothingCompiled

TRAIN_SEED = 11
ROOM_BYTES = 64  # scalars of eager code outside of the graph
MAX_REFUSALS = 3  # of a program whose second step holds more
INDUCTOR_TOLERANCE = 2e-3  # relative to a tensor's largest number: another mask or another element's value is above 1e-1


class PeakAboveBudget(AssertionError):
    """A step allocated more than its budget."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How dyngran is asked to compile."""

    codegen: str
    budget_bytes: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        more = {"fallback_random": True} if self.codegen == "inductor" else {}
        return {"codegen": self.codegen, "budget": self.budget_bytes, "keep_below": 0, **more}


def check(program: Program, *, has_inductor: bool = False) -> Verdict:
    """Every budget under eager code, and free and least under Inductor's if ``has_inductor``."""
    with small_calls_measured():
        return _check(program, has_inductor=has_inductor)


def _check(program: Program, *, has_inductor: bool) -> Verdict:
    try:
        want = eager(program)
    except Exception as error:  # noqa: BLE001 - whatever eager mode rejects is no program
        return Verdict(Outcome.DISCARDED, f"eager: {named(error)}")
    witness: list[Seen] = []
    peaks: list[int] = []

    def aot_eager() -> Seen:
        if not witness:
            witness.append(stock_with(Setting("eager"), program))
        return witness[0]

    verdict = Verdict(Outcome.SAME)
    setting = Setting("eager")
    try:
        for setting in settings_of(program, peaks, has_inductor=has_inductor):
            got = train_within(program, setting, peaks)
            if setting.codegen == "inductor":
                one = judge_loosely(want, got, program)
            else:
                one = judge(want, got, aot_eager, eps=coarsest_eps(want, program))
                if one.outcome is Outcome.FAILED:
                    one = judge_by_default_partition(want, got, program) or one
            if one.outcome is Outcome.FAILED or verdict.outcome is Outcome.SAME:
                verdict = replace(one, details=f"{one.details}; {setting}" if one.details else "")
            if verdict.outcome in (Outcome.FAILED, Outcome.FINDING):
                return verdict
    except Exception as error:  # noqa: BLE001 - sorted by what stock says
        if not isinstance(error, PeakAboveBudget):
            try:
                stock_with(setting, program)
            except Exception as other:  # noqa: BLE001 - whatever stops stock
                return Verdict(Outcome.DISCARDED, f"stock: {named(other)}")
        details = f"{setting}: " + "".join(traceback.format_exception(error))[-2500:]
        return Verdict(
            Outcome.FAILED, f"stops: {named(error).split(': ')[0] if isinstance(error, PeakAboveBudget) else named(error)}", details
        )
    return verdict


def eager(program: Program) -> Seen:
    """The truth."""
    with set_checkpoint_early_stop(False):  # as at the level of graphs
        return trained(program, lambda net: net)


def stock(program: Program, *, has_inductor: bool = False) -> None:
    """All witnesses that a check may call."""
    stock_with(Setting("eager"), program)
    if has_inductor:
        stock_with(Setting("inductor"), program)


def stock_with(setting: Setting, program: Program) -> Seen:
    if setting.codegen == "inductor":
        options = {"fallback_random": True}
        return trained(program, lambda net: torch.compile(net, fullgraph=True, options=options))
    return trained(program, lambda net: torch.compile(net, backend="aot_eager", fullgraph=True))


def settings_of(program: Program, peaks: list[int], *, has_inductor: bool) -> Iterator[Setting]:
    """Free, least, middle. ``peaks`` gets the predicted peak of what is trained before the next setting is asked for."""
    yield Setting("eager")
    least_bytes = refused_at(program, "eager")
    if least_bytes is not None:
        yield Setting("eager", least_bytes)
        if peaks and peaks[0] > least_bytes:
            yield Setting("eager", (least_bytes + peaks[0]) // 2)
    if has_inductor:
        yield Setting("inductor")
        least_bytes = refused_at(program, "inductor")
        if least_bytes is not None:
            yield Setting("inductor", least_bytes)


def refused_at(program: Program, codegen: str) -> int | None:
    """The least peak that a refusal of one byte names; None for a program without a backward graph, where nothing is planned."""
    net, given = make_net(program, has_cond=True), make_inputs(program, program.rows)
    try:
        compiled(net, Setting(codegen, 1).options)(*given.tensors)
    except BudgetTooSmall as refusal:
        return refusal.least_peak_bytes
    finally:
        torch.compiler.reset()
    return None


def train_within(program: Program, setting: Setting, peaks: list[int]) -> Seen:
    """Trained by dyngran. A second step that holds more (other rows, gradients of the first) may be refused; what that refusal names must
    be granted, and its own budget never."""
    limit, refusals = setting, 0
    while True:
        try:
            return trained(
                program,
                lambda net: compiled(net, limit.options),  # noqa: B023 - called before the next round
                budget_bytes=limit.budget_bytes if is_budget_kept(program, limit) else None,
                peaks=peaks,
            )
        except BudgetTooSmall as refusal:
            refusals += 1
            if not holds_more_later(program) or refusals > MAX_REFUSALS or refusal.least_peak_bytes <= (limit.budget_bytes or 0):
                raise
            limit = replace(setting, budget_bytes=refusal.least_peak_bytes)


def holds_more_later(program: Program) -> bool:
    return program.accumulates or program.later_rows > 0


def compiled(net: Net, options: dict[str, Any]) -> Callable[..., Any]:
    return torch.compile(net, backend="dyngran", options=options, fullgraph=True)


def is_budget_kept(program: Program, setting: Setting) -> bool:
    """Whether the budget covers all that a step allocates: what is not compiled, a loss outside for example, cannot be planned."""
    return program.is_loss_inside and setting.codegen == "eager" and not holds_more_later(program)


def trained(
    program: Program, compile_: Callable[[Net], Callable[..., Any]], *, budget_bytes: int | None = None, peaks: list[int] | None = None
) -> Seen:
    """Two steps, the second with other rows if the program says so, and maybe with the gradients of the first; with a budget a third, which
    is measured. ``peaks`` gets what dyngran predicts."""
    net = make_net(program, has_cond=True)
    step = compile_(net)
    torch.manual_seed(TRAIN_SEED)
    seen: Seen = {}
    try:
        for number, rows in enumerate((program.rows, program.later_rows or program.rows)):
            given = make_inputs(program, rows)
            if program.is_marked and program.later_rows and program.rows > 1:
                for tensor in given.tensors:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            seen |= {f"step {number}: {name}": value for name, value in train_step(program, net, step, given).items()}
            if number == 0 and not program.accumulates:
                net.zero_grad()
        if peaks is not None:
            with suppress(NothingCompiled):  # nothing needs a gradient
                peaks.append(dyngran.explain(step).predicted_peak_bytes)
        if budget_bytes is not None:
            check_peak(program, net, step, budget_bytes)
    finally:
        torch.compiler.reset()
    return seen


def check_peak(program: Program, net: Net, step: Callable[..., Any], budget_bytes: int) -> None:
    """A step of the same kind again, measured; results are held as the plan expects."""
    net.zero_grad()
    given = make_inputs(program, program.rows)
    kept: list[Any] = []

    def measured() -> None:
        outputs = step(*given.tensors)
        outputs[0].backward()
        kept.append(outputs)

    held = [*net.parameters(), *net.buffers(), *given.tensors]
    peak_bytes = storage_bytes(held) + event_peak_bytes(measured)
    if peak_bytes > budget_bytes + ROOM_BYTES:
        raise PeakAboveBudget(f"measured {peak_bytes} bytes at a budget of {budget_bytes}")


def judge_by_default_partition(want: Seen, got: Seen, program: Program) -> Verdict | None:
    """The verdict with the default partition's graphs as the witness, to which bits are promised; None if they cannot be run.

    torch's min-cut, which aot_eager has, may recompute from a view that lies otherwise, and a sine rounds by how its operand lies.
    """
    cut = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=default_partition, keep_inference_input_mutations=True)
    try:
        witness = trained(program, lambda net: torch.compile(net, backend=cut, fullgraph=True))
    except (RuntimeError, AssertionError):  # how torch stops: then it is no witness
        return None
    return judge(want, got, lambda: witness, eps=coarsest_eps(want, program))


def judge_loosely(want: Seen, got: Seen, program: Program) -> Verdict:
    """Under Inductor: as stock Inductor, wherever that is close to eager mode."""
    tolerance = max(INDUCTOR_TOLERANCE, 64 * coarsest_eps(want, program))
    wrong = [name for name in want if relative_error(want[name], got[name]) > tolerance]
    if not wrong:
        return Verdict(Outcome.SAME)
    details = f"{', '.join(wrong)}: relative error {max(relative_error(want[name], got[name]) for name in wrong):.1e}"
    try:
        witness = stock_with(Setting("inductor"), program)
    except Exception as error:  # noqa: BLE001 - whatever stops the witness, there is none
        return Verdict(Outcome.FINDING, "Inductor: differs from eager mode, and stock stops", f"{details}; stock: {named(error)}")
    if all(relative_error(witness[name], got[name]) <= tolerance for name in wrong):
        return Verdict(Outcome.FINDING, "Inductor: stock differs from eager mode in the same way", details)
    if any(relative_error(want[name], witness[name]) > tolerance for name in wrong):
        return Verdict(Outcome.FINDING, "Inductor: stock differs from eager mode in another way", details)
    return Verdict(Outcome.FAILED, "Inductor: other numbers", details)
