"""One graph of the user's step: captured, planned, rewritten, compiled, observed; compiled again where what the step holds has changed."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.accounting import WrapperAccount, wrapper_peak
from dyngran.compiler.chain import StepChain
from dyngran.compiler.error_check import (
    ErrorCheck,
    compared,
    held_bytes,
    parts_of_sample,
    placeholder_names,
    rounded_forms,
    sample_bytes,
    stores_of,
)
from dyngran.compiler.options import LOSSY, Codegen, Options, Outputs
from dyngran.compiler.partition import partition
from dyngran.compiler.progress import Heartbeat
from dyngran.compiler.returned_views import can_replay_views, detach_cut_views
from dyngran.compiler.room import LOSS_BYTES
from dyngran.compiler.situation import Situation, existing_gradient_bytes, gradients_to_come
from dyngran.compiler.static_memory import Carried, StaticMemory, input_kinds, measure_static, resolve_budget, storage_bytes
from dyngran.compiler.store import options_key
from dyngran.compiler.strategy import FILE_HINT, Strategy
from dyngran.kernels.steps import advance_step, step_tensor
from dyngran.passes.errors import BudgetTooSmall, DyngranError, GraphBroken, ToolMissing, format_bytes
from dyngran.passes.plan import Plan
from dyngran.passes.problem import Form, Kind
from dyngran.passes.signature import planned_sizes
from dyngran.runtime.identity import TensorMark
from dyngran.runtime.observe import StepObserver
from dyngran.runtime.optimizer_state import num_optimizers_seen
from dyngran.runtime.returned import PLAIN, ReturnedOutputs

log = logging.getLogger("dyngran")

Around = Callable[[torch_private.Boxed, bool], torch_private.Boxed]

MAX_COMPILES = 5  # plan, generate code, account for it; tighten and try again at most this often
UNREAD_NOTE = "the generated code could not be accounted for: the predicted peak is the simulator's, and may be a few per cent off"
BREAK_NOTE = (
    "a graph break follows this graph: it is planned to leave most to the graphs after it, and how often they run is not known. "
    "Find the break with torch.compile(..., fullgraph=True); without it the plan is exact and faster."
)
REPEAT_NOTE = (
    "this graph runs several times before its backward (a graph break in a loop, or several forwards per step): it is planned to save "
    "least, and the budget is checked for one run of it, not for all. Compile the whole step as one graph to have it kept."
)
HOOKS_NOTE = (
    "saved-tensor hooks are active: what they make of what is saved is not planned, and may keep the peak above the prediction or below it"
)
REMARKED_SHARE = 0.01  # of the predicted transient: outputs that are not held as planned, and larger than that, are worth a remark
WATCHED_CALLS = 6  # calls in which what is held is measured again: optimizer state and gradients appear during the first steps


@dataclass(slots=True, eq=False)
class BackwardCode:
    """The boxed callable of one backward, None until it has been compiled, and the names of what it is given."""

    run: torch_private.Boxed | None = None
    given: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """Compiled code, its plan with the peak that it predicts, what was held when that was made, and the code of backward alone."""

    run: Callable[..., Any]
    peak_bytes: int
    held_bytes: int
    plan: Plan | None = None
    backward: BackwardCode = field(default_factory=BackwardCode)


class PlannedGraph:
    """The callable that Dynamo gets for one graph.

    Attributes:
        plan: the plan in force, None for graphs without backward and before compilation.
        strategy: problem, planner and simulator behind it.
        is_offline: the graph is planned and never generated (`OfflineGraph`).
        num_runs: how often it ran in the step that was traced; 1 where that is not counted. runs_in_forward: since the step's
            first graph ran.
        graph_break: (reason, "file.py:12") of the break that follows this graph, if one does.
        frame_id: Dynamo's number of the code that the graph is of. held: storages of what the graph was called with, when that was looked
            at, at first with what its function held: bytes by identity.
        notes: sentences for `explain`. observer: what was measured while it ran.
    """

    is_offline = False
    num_runs = 1
    runs_in_forward = 0

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], options: Options) -> None:
        self.options = options
        self.graph_break = torch_private.break_reason(module)
        self.frame_id = torch_private.frame_id()
        self.chain = StepChain.join(self, inputs, continues=self._is_followed(module))
        self.notes: list[str] = []
        self.plan: Plan | None = None
        self.strategy: Strategy | None = None
        self.static: StaticMemory | None = None
        self.device = torch.device("cpu")
        self.budget_bytes: int | None = None
        self._in_frame = storage_bytes(torch_private.tensors_of_frame(), self.device)
        self._beside_bytes: int | None = None
        self._beside: frozenset[int] = frozenset()
        self.held: dict[int, int] = {}
        self.observer = StepObserver()
        self._returned = ReturnedOutputs(self._kinds_of_tensor())
        self._module = torch_private.keep_copy(module)
        detach_cut_views(self._module)
        self._replays_views = can_replay_views(self._module)
        self._fake_inputs = torch_private.fake_inputs(module)
        self._symbols = torch_private.size_symbols(module)
        self._kinds = input_kinds(inputs)
        self._trainable = gradients_to_come(inputs)
        self._probe = next((i for i in self._trainable if isinstance(inputs[i], torch.nn.Parameter)), None)
        self._leaves: tuple[TensorMark, ...] = ()
        self._follow(inputs)
        self._rungs: dict[Situation, Rung] = {}
        self._ran_with: dict[tuple[int, ...], Rung] = {}  # the latest, by sizes
        self._repeating = threading.local()  # backward runs in threads of its own
        self._num_calls = 0
        self._num_open = 0
        self._step_of_open = 0
        self._steps_repeated: set[int] = set()
        self._is_repeated = False
        self._optimizers_seen = 0
        self._held_bytes = 0
        self._reserve_bytes = 0
        self._sample_bytes = 0  # that a step which measures the gradient error holds besides
        self._carried = Carried()
        self._coming_gradient_bytes = 0
        self._errors = None if options.max_grad_error is None else ErrorCheck(options.max_grad_error)
        self._backward = BackwardCode()  # of the plan in force

    def _kinds_of_tensor(self) -> tuple[type, ...]:
        """What runs here: types of tensors whose storages can be told apart."""
        return PLAIN

    def _is_followed(self, module: fx.GraphModule) -> bool:
        """Whether more graphs of the same step are known to come."""
        return torch_private.ends_in_graph_break(module) or torch_private.is_awaited()

    def parameter_ids(self) -> set[int]:
        """``id()`` of the parameters of the latest call that are still alive."""
        return {leaf.id for leaf in self._leaves if leaf.is_alive()}

    def compile(self, inputs: Sequence[Any]) -> None:
        """First compilation, inside Dynamo. Raises what the plan refuses with, ToolMissing if the code generator lacks a compiler."""
        if self.options.codegen is Codegen.INDUCTOR:
            missing = torch_private.missing_tool({tensor.device.type for tensor in inputs if isinstance(tensor, torch.Tensor)} - {"meta"})
            if missing is not None:
                raise ToolMissing(f"{missing}; or use options={{'codegen': 'eager'}}, which runs the planned graphs op by op.")
        self._rungs[self._situation(inputs)] = self._rung(self._build(inputs, inputs))

    def __call__(self, *args: Any) -> Any:
        if self._probe is not None and not self._leaves[0].is_of(args[self._probe]):
            self._follow(args)  # the same code serves another instance of the model
        if self._optimizers_seen != num_optimizers_seen():
            self._optimizers_seen, self._num_calls = num_optimizers_seen(), 0
        situation = self._situation(args)
        if torch_private.is_in_backward() and (again := self._ran_with.get(situation.sizes)) is not None:
            return self._repeat(again, args)
        self._check_outputs()
        if self.plan is None and not torch_private.is_in_backward():
            self.chain.note_run(self)  # forward may begin with a graph that needs no backward
        if self._notice_carried() or self._num_calls < WATCHED_CALLS:
            self._num_calls += 1
            self._look(args, self._serving(situation))
        rung = self._rungs.get(situation) or self._rung_for(situation, args)
        if not torch_private.is_in_backward():  # else a checkpoint's first call with gradients, which repeats none of ours
            rung = self._ran_with[situation.sizes] = self._sampled(rung, situation, args)
        outputs = rung.run(*args)
        self._returned.watch(outputs, args)
        return outputs

    def _sampled(self, rung: Rung, situation: Situation, args: Sequence[Any]) -> Rung:
        """The rung, or one that measures how far its gradients are off, where values are stored rounded and it is time to look."""
        errors, strategy, plan = self._errors, self.strategy, rung.plan
        if errors is None or strategy is None or plan is None or rung.backward.run is None:
            return rung
        rounded = rounded_forms(strategy.problem, plan.saved)
        if not rounded:
            return rung
        room_bytes = None
        if self.budget_bytes is not None:
            room_bytes = self.budget_bytes - plan.peak_bytes + self._sample_bytes - held_bytes(strategy.simulator, plan.saved)
        part = errors.due_part(functools.partial(parts_of_sample, strategy.problem, rounded, room_bytes))
        if part is None:
            return rung
        if not part:
            self._take_back(rounded, "how far gradients are off cannot be measured within the budget")
            return self._rung_for(situation, args)
        return self._comparing(rung, part, rounded, situation, args)

    def _comparing(self, rung: Rung, taken: Sequence[Form], rounded: Sequence[Form], situation: Situation, args: Sequence[Any]) -> Rung:
        """A rung whose forward saves what is ``taken`` as it is, and whose backward runs with that and with what the plan stores."""
        errors, strategy, plan, backward = self._errors, self.strategy, rung.plan, rung.backward.run
        assert errors is not None and strategy is not None and plan is not None and backward is not None
        saved = plan.saved.difference(form.stored for form in taken).union(form.value for form in taken)
        given: list[str] = []

        def cut(
            joint: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, static_lifetime_input_indices: Any = None, **_: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            indices = tuple(static_lifetime_input_indices or ())
            if torch_private.is_nested_joint(joint):
                fused = self.options.codegen is Codegen.INDUCTOR
                return torch_private.stock_partition(
                    joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=indices, fused=fused
                )
            carried = replace(self._carried, planned_bytes=strategy.carried_bytes)  # as the plan has it
            here = Strategy.of(joint, num_fwd_outputs, indices, self._kinds, list(args), self.options, carried=carried, earlier=strategy)
            if here is not strategy:
                raise GraphBroken("the gradient error cannot be measured: the same function was traced to another graph this time")
            first, second = partition(strategy.captured, saved, codecs=strategy.codecs)
            given[:] = placeholder_names(second)
            return first, second

        def around(run: torch_private.Boxed, is_backward: bool) -> torch_private.Boxed:
            if is_backward:
                stores = stores_of(strategy.captured, taken, strategy.codecs)
                run = compared(run, given, backward, rung.backward.given, stores, note)
            return self._around(run, is_backward)

        def note(relative: float) -> None:
            error = errors.note(relative, taken, strategy.problem, rounded)
            if error is not None and error.relative > errors.limit:
                self._take_back(rounded, f"the gradient error is {error}, and at most {errors.limit:g} is allowed")

        sizes = dict(zip(self._symbols, situation.sizes, strict=True))
        with (
            torch_private.compile_lock(),
            torch_private.tracing_again(self._fake_inputs),
            _kept_random_state(self.device),
            planned_sizes(sizes),
            torch_private.tracing_here(),
        ):
            module = torch_private.keep_copy(self._module)
            run = self._noted(self._generate(module, self._fake_inputs, cut, WrapperAccount(), around=around))
        return replace(rung, run=run)

    def _take_back(self, rounded: Sequence[Form], reason: str) -> None:
        """Allow the coarsest of the formats in use no longer, because of the gradients."""
        assert self._errors is not None
        coarsest = max((form.format for form in rounded), key=LOSSY.index)
        self.options = replace(self.options, storage=tuple(name for name in self.options.storage if name != coarsest))
        self._errors.restart()
        self._plan_again(f"{reason}: nothing is stored as {coarsest} any more")

    def _repeat(self, rung: Rung, args: Sequence[Any]) -> Any:
        """What a checkpoint calls again in backward: it must save what the call saved that it repeats, and is no run of its own."""
        self._repeating.is_on = True
        try:
            return rung.run(*args)
        finally:
            self._repeating.is_on = False

    def _follow(self, args: Sequence[Any]) -> None:
        trainable = [] if self._probe is None else [args[self._probe]]
        self._leaves = tuple(TensorMark(t) for t in (*trainable, *args) if isinstance(t, torch.nn.Parameter))
        self._num_calls = 0

    def _situation(self, args: Sequence[Any]) -> Situation:
        sizes = tuple(torch_private.size_hint(read(args)) for read in self._symbols.values())
        return Situation(existing_gradient_bytes(self._trainable, args), sizes)

    def _look(self, args: Sequence[Any], rung: Rung | None) -> None:
        """Compare what is held now with what the plan in ``rung`` assumed, and what was measured with the budget; drop rungs that no
        longer hold. Without ``rung`` a plan for what is held now is made next, and the others stay."""
        self.held = storage_bytes(args, self.device)
        if self.plan is None or self.budget_bytes is None or not self.options.guard:
            return
        if len(self._steps_repeated) >= 2 and not self._is_repeated:  # once may be a forward whose loss was thrown away
            self._is_repeated = True
            self.notes.append(REPEAT_NOTE)
            log.warning(REPEAT_NOTE)
            self._rungs.clear()
            return
        held = self._measure_static(args).total_bytes + self.chain.bytes_before(self, args)
        newly_carried = self._newly_carried_bytes()
        overshoot = self.observer.overshoot_bytes(self.budget_bytes)
        grown = 0 if rung is None else held - rung.held_bytes + newly_carried
        if (rung is None or rung.peak_bytes + grown <= self.budget_bytes) and overshoot <= 0:
            return
        reason = f"what the step holds grew to {format_bytes(held)} from {format_bytes(held if rung is None else rung.held_bytes)}"
        if newly_carried:
            reason = f"{format_bytes(self._carried.planned_bytes)} that the step before returned is still held while forward runs"
        if overshoot > 0 and self.strategy is not None:
            reason = f"the step peaked {format_bytes(overshoot)} above the budget"
            self.strategy.margin_bytes += overshoot
            self.observer.forget()
        self._plan_again(reason)

    def _notice_carried(self) -> bool:
        """Look what is still held of the step before; True if it is more than ever."""
        present_bytes = self._returned.carried_bytes()
        if present_bytes == self._carried.present_bytes:
            return False
        is_new = present_bytes > self._carried.planned_bytes
        self._carried = Carried(present_bytes=present_bytes, planned_bytes=max(present_bytes, self._carried.planned_bytes))
        return is_new

    def _newly_carried_bytes(self) -> int:
        """More than the plan in force assumes to be carried."""
        return 0 if self.strategy is None else self._carried.planned_bytes - self.strategy.carried_bytes

    def _measure_static(self, tensors: Sequence[Any]) -> StaticMemory:
        return measure_static(tensors, self.device, carried_bytes=self._carried.present_bytes)

    def _check_outputs(self) -> None:
        """Outputs that were planned as dropped, but are held, and may lead past the budget: plan them as held."""
        held_bytes = self._returned.held_bytes
        if self.options.outputs is Outputs.HELD or self.plan is None or self.budget_bytes is None or not self.options.guard:
            return
        if held_bytes <= LOSS_BYTES or self.plan.peak_bytes + held_bytes <= self.budget_bytes or self._takes_file:
            return
        self.options = replace(self.options, outputs=Outputs.HELD)
        self.observer.forget()
        self._plan_again(
            f"{format_bytes(held_bytes)} of what the model returned was held while backward ran, although options say outputs='dropped': "
            "it is planned as held from now on"
        )

    def _plan_again(self, reason: str) -> None:
        log.warning("planning again: %s", reason)
        self.notes.append(f"planned again: {reason}")
        self._rungs.clear()

    def remarks(self) -> list[str]:
        """Sentences for `explain` about what was seen while training ran."""
        errors = self._errors
        measured = [] if errors is None or errors.latest is None else [f"gradient error: {errors.latest}, at most {errors.limit:g} allowed"]
        return measured + self._remarks_on_outputs()

    def _remarks_on_outputs(self) -> list[str]:
        if self.plan is None:
            return []
        worth_saying = REMARKED_SHARE * (self.plan.peak_bytes - self.plan.static_bytes)
        held_bytes, dropped_bytes = self._returned.held_bytes, self._returned.dropped_bytes
        newly_carried = self._newly_carried_bytes()
        if newly_carried > worth_saying:
            return [
                f"{format_bytes(newly_carried)} that the step before returned is still held while forward runs: the peak may be higher "
                "than predicted by that much"
            ]
        if self.options.outputs is Outputs.DROPPED and held_bytes > worth_saying:
            return [
                f"{format_bytes(held_bytes)} of what the model returned was held while backward ran, although options say "
                "outputs='dropped': the peak may be higher than predicted by that much"
            ]
        if self.options.outputs is Outputs.HELD and dropped_bytes > worth_saying:
            return [
                f"{format_bytes(dropped_bytes)} that the model returns is dropped before backward, and planned as held until backward "
                "ends: options={'outputs': 'dropped'} gives that memory to the plan"
            ]
        return []

    def _rung(self, run: Callable[..., Any]) -> Rung:
        """``run``, by the plan that was made last."""
        peak_bytes = 0 if self.plan is None else self.plan.peak_bytes
        return Rung(run=run, peak_bytes=peak_bytes, held_bytes=self._held_bytes, plan=self.plan, backward=self._backward)

    def _serving(self, situation: Situation) -> Rung | None:
        """The rung for ``situation``, or one whose plan covers it."""
        if situation not in self._rungs:
            for known, rung in tuple(self._rungs.items()):
                if known.covers(situation):
                    self._rungs[situation] = rung
                    break
        return self._rungs.get(situation)

    def _rung_for(self, situation: Situation, args: Sequence[Any]) -> Rung:
        """The callable for a situation not met before: one whose plan covers it, else one planned and compiled now, by one thread."""
        with torch_private.compile_lock():
            try:
                return self._serving(situation) or self._new_rung(situation, args)
            except DyngranError:
                StepChain.leave()
                raise

    def _new_rung(self, situation: Situation, args: Sequence[Any]) -> Rung:
        if any(known.gradient_bytes and known.sizes == situation.sizes for known in self._rungs):
            # gradients appear bit by bit, as in a mixture of experts: one plan for all of them instead of one for each set
            everything = replace(situation, gradient_bytes=sum(self._trainable.values()))
            self._coming_gradient_bytes = everything.gradient_bytes - situation.gradient_bytes
            try:
                self._rungs[everything] = self._compile_for(situation, args)
                return self._rungs.setdefault(situation, self._rungs[everything])
            except BudgetTooSmall:
                log.info("no plan fits with every gradient held: planning for those that are")
            finally:
                self._coming_gradient_bytes = 0
        return self._rungs.setdefault(situation, self._compile_for(situation, args))

    def _compile_for(self, situation: Situation, args: Sequence[Any]) -> Rung:
        sizes = dict(zip(self._symbols, situation.sizes, strict=True))
        with torch_private.tracing_again(self._fake_inputs), _kept_random_state(self.device), planned_sizes(sizes):
            return self._rung(self._build(self._fake_inputs, args))

    def _around_plan(self, code: BackwardCode) -> Around:
        """As `_around`, for the code of a plan, whose backward is noted."""

        def around(run: torch_private.Boxed, is_backward: bool) -> torch_private.Boxed:
            if is_backward:
                code.run = run
            return self._around(run, is_backward)

        return around

    def _around(self, run: torch_private.Boxed, is_backward: bool) -> torch_private.Boxed:
        """Count calls that wait for their backward, and let the observer measure."""
        observed = self.observer.around(run, is_backward)
        draws = self.strategy is not None and self.plan is not None and self.strategy.rounds_at_random(self.plan)
        if draws:
            step_tensor(self.device)  # made now: a CUDA graph that is captured later must find it

        def counted(args: list[Any]) -> Any:
            if not is_backward and getattr(self._repeating, "is_on", False):
                return run(args)
            if not is_backward:
                self.chain.note_run(self)
                if draws:
                    advance_step()
            results = observed(args)  # a forward may end the step before
            if self._step_of_open != self.observer.num_steps:  # forwards that never got a backward die with their step
                self._step_of_open, self._num_open = self.observer.num_steps, 0
            if is_backward and self._num_open > 1:
                self._steps_repeated.add(self.observer.num_steps)
            self._num_open = max(0, self._num_open - 1) if is_backward else self._num_open + 1
            if is_backward:
                self.chain.has_run_backward = True
                self._returned.end_backward()
            return results

        counted._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's mark of this calling convention
        return counted

    def _build(self, inputs: Sequence[Any], held: Sequence[Any]) -> Callable[..., Any]:
        """Plan, partition and generate code. ``inputs`` are what AOTAutograd traces with, ``held`` the real tensors of this call."""
        self.held = self._in_frame | storage_bytes(held, self.device)
        present = list(held)  # emptied below: compiled code keeps its partitioner, and with it this batch
        try:
            with torch_private.tracing_here():
                return self._noted(self._first_that_fits(inputs, present))
        finally:
            present.clear()

    def _noted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, by whose first results a graph that takes them knows this one."""
        is_noted = False

        def noted(*args: Any) -> Any:
            nonlocal is_noted
            outputs = run(*args)
            if not is_noted:
                StepChain.note_results(self, outputs)
                is_noted = True
            return outputs

        return noted

    def _first_that_fits(self, inputs: Sequence[Any], held: Sequence[Any]) -> Callable[..., Any]:
        refusal: list[DyngranError] = []
        failure: Exception | None = None
        cut = self._partitioner(held, refusal)
        for _ in range(MAX_COMPILES):
            account = WrapperAccount()
            self._backward = code = BackwardCode()
            run = None
            try:
                with Heartbeat("tracing, planning and generating code"):
                    module = torch_private.keep_copy(self._module)
                    run = self._generate(module, inputs, cut, account, around=self._around_plan(code))
            except torch_private.code_generation_error() as error:
                if refusal or not self._rules_out_plan(error):
                    raise
                failure = error
                continue
            finally:
                if run is None and refusal:  # code generators wrap what a partitioner raises: the refusal itself goes on
                    raise refusal[0]
            if self._fits(account):
                return run
            if self._takes_file and not self._leaves_file():
                break  # there is no other plan to try
        if failure is not None and self.strategy is not None and not self.strategy.is_any_code_known():
            raise failure
        raise self._refusal()

    def _rules_out_plan(self, error: Exception) -> bool:
        """Whether another plan may be compiled where the code generator failed on this one: then it is taken from now on."""
        if self.strategy is None or self.plan is None or not self.strategy.rule_out(self.plan):
            return False
        note = f"the code generator failed on the fastest plan, so a plainer one is taken ({str(error).strip().splitlines()[0][:200]})"
        if note not in self.notes:
            self.notes.append(note)
            log.warning(note)
        return True

    def _generate(
        self, module: fx.GraphModule, inputs: Sequence[Any], cut: torch_private.Partitioner, account: WrapperAccount, *, around: Around
    ) -> Callable[..., Any]:
        if self.options.codegen is Codegen.EAGER:
            return torch_private.compile_eager(module, inputs, partition=cut, around=around, replays_views=self._replays_views)
        options = {**torch_private.mode_options(self.options.mode or "default"), **self.options.inductor}
        return torch_private.compile_inductor(
            module,
            inputs,
            options=options,
            partition=cut,
            uuid=options_key(self.options),
            around=around,
            on_code=account.add,
            budget_bytes=self._tuning_budget_bytes,
            frees_at_once=self._frees_at_once,
            keeps_order=self._keeps_order,
            replays_views=self._replays_views,
        )

    @property
    def _takes_file(self) -> bool:
        return self.strategy is not None and self.strategy.takes_file

    def _frees_at_once(self) -> bool:
        """Inductor holds buffers that were read for later ones of their size, and its guess at what that adds to the peak is too low:
        by up to 6 % of a small ViT's transient on the CPU. Where torch's own partition is taken, and where the user chose, nothing is
        changed."""
        is_ours = self.strategy is not None and self.plan is not None and self.plan.saved != self.strategy.free.saved
        return is_ours and "allow_buffer_reuse" not in self.options.inductor

    def _keeps_order(self) -> bool:
        """Where a plan fetches copies ahead: to save memory Inductor would fetch them when they are read, and wait. Where the user chose,
        nothing is changed."""
        has_copies = self.strategy is not None and self.plan is not None and self.strategy.host_bytes_of(self.plan) > 0
        return has_copies and "reorder_for_peak_memory" not in self.options.inductor

    def _tuning_budget_bytes(self) -> int | None:
        """The budget on a card; None where there is none."""
        return None if self.plan is None or self.device.type == "cpu" else self.budget_bytes

    def _partitioner(self, held: Sequence[Any], refusal: list[DyngranError]) -> torch_private.Partitioner:
        """The partition function of one compilation; a refusal is kept because code generators hide the classes of errors."""

        def cut(
            joint: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, static_lifetime_input_indices: Any = None, **_: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            fused = self.options.codegen is Codegen.INDUCTOR
            if torch_private.is_nested_joint(joint):
                return torch_private.stock_partition(
                    joint,
                    joint_inputs,
                    num_fwd_outputs=num_fwd_outputs,
                    static_lifetime_input_indices=static_lifetime_input_indices,
                    fused=fused,
                )
            try:
                return self._plan_and_cut(joint, num_fwd_outputs, tuple(static_lifetime_input_indices or ()), held)
            except DyngranError as error:
                refusal.append(error)
                raise

        return cut

    def _plan_and_cut(
        self, joint: fx.GraphModule, num_fwd_outputs: int, static_indices: tuple[int, ...], held: Sequence[Any]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._plan_graph(joint, num_fwd_outputs, static_indices, held)
        assert self.strategy is not None and self.plan is not None
        forward, backward = partition(self.strategy.captured, self.plan.saved, self.plan.schedule, codecs=self.strategy.codecs)
        self._backward.given = placeholder_names(backward)
        return forward, backward

    def _plan_graph(self, joint: fx.GraphModule, num_fwd_outputs: int, static_indices: tuple[int, ...], held: Sequence[Any]) -> None:
        """Capture a joint graph and choose its plan."""
        strategy = Strategy.of(
            joint,
            num_fwd_outputs,
            static_indices,
            self._kinds,
            held,
            self.options,
            carried=self._carried,
            earlier=self.strategy,
            host_bytes_before=self._host_bytes_before(),
            is_offline=self.is_offline,
        )
        self.strategy, self.device = strategy, strategy.captured.device
        earlier = [graph.strategy for graph in self.chain.members_before(self)]
        strategy.num_equal_before = sum(one is not None and one.fingerprint == strategy.fingerprint for one in earlier)
        is_in_file = self.options.uses_plan_budget
        self.budget_bytes = strategy.document.plan.budget_bytes if is_in_file else resolve_budget(self.options.budget, self.device)
        self.static = self._measure_static(held)
        self._held_bytes = self.static.total_bytes + self._coming_gradient_bytes + self.chain.bytes_before(self, held)
        self._reserve_bytes = self.chain.bytes_after(self, held) if self.budget_bytes is not None else 0
        self._sample_bytes = 0
        self.plan = self._solve(strategy)
        if self._errors is not None and rounded_forms(strategy.problem, self.plan.saved):
            self._sample_bytes = sample_bytes(strategy.simulator, self.plan, self.budget_bytes)
            self.plan = self._solve(strategy)
        self.notes[:] = [*self.notes, *strategy.notes_of(self.plan)]
        outside = [BREAK_NOTE] * self.chain.continues(self) + [HOOKS_NOTE] * torch_private.are_saved_tensors_hooked()
        self.notes.extend(outside)
        if self.budget_bytes is not None:
            for note in outside:
                log.warning(note)
        self.observer.expect(self.device, static_bytes=self._held_bytes, peak_bytes=self.plan.peak_bytes)
        log.info(
            "planned %d ops: predicted peak %s%s, %d values saved, %d ops recomputed",
            len(strategy.problem.ops),
            format_bytes(self.plan.peak_bytes),
            "" if self.budget_bytes is None else f" of {format_bytes(self.budget_bytes)}",
            len(self.plan.saved),
            self.plan.num_recomputed,
        )

    def _host_bytes_before(self) -> int:
        """What graphs that run before this one in a step keep in host memory."""
        before = [graph for graph in self.chain.members_before(self) if graph.strategy is not None and graph.plan is not None]
        return sum(graph.strategy.host_bytes_of(graph.plan) for graph in before)

    def _solve(self, strategy: Strategy) -> Plan:
        """The plan for the budget beside what is held, what later graphs need, and what a sampled step holds besides."""
        return strategy.solve(
            self.budget_bytes,
            held_bytes=self._held_bytes + self._reserve_bytes + self._sample_bytes,
            gradient_bytes=self.static_of((Kind.GRADIENT,)) + self._coming_gradient_bytes,
            tight=self._is_repeated or self.chain.continues(self),
        )

    def _fits(self, account: WrapperAccount) -> bool:
        """Account for the generated code: the plan's prediction becomes what that code allocates."""
        if self.plan is None or self.strategy is None:
            return True
        transient_bytes = wrapper_peak(
            account, self.strategy.captured, self.plan, self.strategy.measure_workspace, problem=self.strategy.problem
        )
        if transient_bytes is None:
            if self.options.codegen is Codegen.EAGER or self.budget_bytes is None:
                return True
            if UNREAD_NOTE not in self.notes:
                self.notes.append(UNREAD_NOTE)
                log.warning(UNREAD_NOTE)
            self.strategy.is_code_read = False
            return self.strategy.fits(self.plan)
        self.plan = self.strategy.account(self.plan, transient_bytes)
        self.observer.expect(self.device, static_bytes=self._held_bytes, peak_bytes=self.plan.peak_bytes)
        return self.strategy.fits(self.plan)

    def _leaves_file(self) -> bool:
        """Whether plans are searched for, because the code of a plan file's plan needs more than the budget."""
        assert self.strategy is not None and self.plan is not None
        return self.strategy.leave_file(f"the code of its plan needs {format_bytes(self.plan.peak_bytes)} here")

    def _refusal(self) -> BudgetTooSmall:
        assert self.plan is not None and self.budget_bytes is not None and self.strategy is not None
        if self._takes_file:
            return BudgetTooSmall(
                budget_bytes=self.budget_bytes,
                least_peak_bytes=self.plan.peak_bytes + self.strategy.refusal_room_bytes,
                pinned=self.strategy.pinned_at_peak(self.plan),
                hint=f"Its code was read. {FILE_HINT}{self.strategy.hint_of_gradients()}",
                of_file=str(self.options.plan),
            )
        beside_step = self._held_bytes + self._reserve_bytes + self._sample_bytes
        besides = beside_step + self.strategy.margin_bytes + self.strategy.refusal_room_bytes
        least_bytes = self.strategy.least_need_bytes() + besides
        hint = "The code of every plan that was tried needs more than its simulation. Raise the budget or lower the batch size."
        return BudgetTooSmall(
            budget_bytes=self.budget_bytes,
            least_peak_bytes=least_bytes,
            pinned=self.strategy.pinned_at_peak(self.plan),
            hint=hint + self.strategy.hint_of_gradients() + self.strategy.hint_of_outputs(least_bytes),
        )

    def static_of(self, kinds: tuple[Kind, ...]) -> int:
        """Static bytes of these kinds when the plan was made."""
        return 0 if self.static is None else sum(self.static.bytes_by_kind.get(kind, 0) for kind in kinds)

    def bytes_beside(self, counted: Container[int]) -> int:
        """What the graph's function held when the graph was made, without the storages in ``counted``: parameters that nothing reads, an
        attention mask of ones. Another instance of the model is taken to hold as much."""
        if self._beside_bytes is None:
            beside = {storage: size for storage, size in self._in_frame.items() if storage not in counted}
            self._beside_bytes, self._beside = sum(beside.values()), frozenset(beside)
            self._in_frame = {}
        return self._beside_bytes

    def counted_storages(self) -> frozenset[int]:
        """By identity what is counted as held by the graph's function, and what lies beside it there."""
        return self._beside.union(self.held)

    def saved_outputs(self) -> dict[int, int]:
        """What the latest forward returned that the plan saves, as far as sizes tell: bytes by identity of the storage."""
        if self.plan is None or self.strategy is None:
            return {}
        problem, found = self.strategy.problem, {}
        saved = Counter(problem.values[value].size_bytes for value in self.plan.saved & problem.forward_outputs)
        for storage, size in self._returned.alive().items():
            if saved[size]:
                saved[size] -= 1
                found[storage] = size
        return found


class _kept_random_state:
    """Planning again between steps must not move the user's random stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
