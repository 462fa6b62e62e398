"""What is known about one graph, and the choice of a plan for it: problem, planner, corrections from generated code and measurement."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from typing import Any

from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.accounting import Measure
from dyngran.compiler.capture import Captured, JointGraph, capture
from dyngran.compiler.codecs import STOCHASTIC
from dyngran.compiler.host_memory import NO_LINK_NOTE, host_limit_bytes, host_link
from dyngran.compiler.options import LOSSY, Codegen, Options, Outputs, PlanMismatchPolicy
from dyngran.compiler.order_rules import order_rules
from dyngran.compiler.partition import check_runnable
from dyngran.compiler.plans.applied_plan import REMEDY, AppliedPlan, apply_document, values_on_host
from dyngran.compiler.plans.planfile import PlanDocument, check_applicable, for_problem, load_plan, saved_for_problem
from dyngran.compiler.prepare import prepare
from dyngran.compiler.pricing import device_spec, price_nodes, workspace_meter
from dyngran.compiler.room import GUESSED_SLACK, KNOWN_SLACK, LOSS_BYTES, room_beside
from dyngran.compiler.situation import gradients_to_come
from dyngran.compiler.slice_forms import find_slices
from dyngran.compiler.slice_probe import SliceProbe
from dyngran.compiler.static_memory import Carried, measure_static, profiling_limit
from dyngran.compiler.storages import planned_device
from dyngran.compiler.store import (
    NOT_KEPT,
    recall_saved,
    recall_schedule,
    recall_schedules,
    recall_transients,
    remember_saved,
    remember_schedule,
    remember_transient,
    store_key,
)
from dyngran.compiler.stored_forms import StoredForm, find_copies, find_forms
from dyngran.kernels.host_copies import host_bytes
from dyngran.passes.bounds import bound_of
from dyngran.passes.decide import decide
from dyngran.passes.errors import BudgetTooSmall, PlanMismatch, format_bytes
from dyngran.passes.fingerprint import fingerprint
from dyngran.passes.forms import base_ops, with_forms
from dyngran.passes.order_rules import OrderRules, at_the_ends, check_order
from dyngran.passes.plan import Action, Plan, Schedule
from dyngran.passes.problem import Kind, Problem
from dyngran.passes.schedule import check_schedule, replay_schedule
from dyngran.passes.simulate import Outcome, Simulator
from dyngran.passes.solvers.portfolio import Planner
from dyngran.passes.solvers.repair import repair

log = logging.getLogger("dyngran.plan")

REFUSAL_ROOM_BYTES = 2 * 2**20  # on CUDA, for a second try: cuBLASLt keeps 1 MiB from the first recomputed product on
NAMED_SHARE = 0.01  # of the least peak: outputs from that size on are named in a refusal
PART_HINT = " It is the least peak of this graph, which is a part of the step: the other parts may need more."
SEARCHED = "auto"  # who made a plan that was searched for, before the name of the solver that found it
FILE_HINT = (
    "Raise the budget, build the plan for a smaller one, or search for another here: remove the option plan, or add "
    "options={'plan_mismatch': 'resolve'}."
)
STOCK = "min-cut"  # torch's default partition
PLAIN_SOLVERS = ("stock", "default", "region", "every", "selective")  # whose plans are taken once the code generator failed on another
MAX_DOUBTS = 2  # further plans whose code is generated before a refusal, where their simulations promise DOUBTED_SHARE less than is known
DOUBTED_SHARE = 0.05
MAX_MISSES = 2  # plans in a row whose generated code needed more than was guessed; then one that is known to fit is taken


class Strategy:
    """Planning of one graph. ``captured`` changes with every compilation, the planner stays while the graph is the same.

    Attributes:
        margin_bytes: by how much measured peaks were above accounted ones.
        correction_bytes: by how much the generated code needs more than the simulator said, for the last plan.
        accounted: peak with the problem's static bytes by generated code, per saved set.
        generated: the saved sets among them whose code was generated here, and not by an earlier process.
        graph_problem: the problem of the graph alone, without what the step before left to be held; a plan file refers to it.
        codecs: per stored form in `problem` the value that it stands for, and how it is stored.
        num_equal_before: graphs of the same step that are equal to this one and run before it.
        applied: the plan of a file in the numbers of this graph, once it was asked for. file_notes: what `explain` says of it.
        is_resolving: a plan file was asked for, turned out to be for another graph, and plans are searched for instead.
        num_misses: plans in a row whose generated code passed the limit although the guess did not.
        is_plain: True once the code generator failed on a plan: only plans that a person might write are proposed then, if any of them fits
            and it does not fail on that too.
        is_offline: no code will be generated. is_code_read: False then, and once generated code could not be accounted for: plans stand and
            fall by their simulation.
    """

    def __init__(
        self,
        captured: Captured,
        options: Options,
        mark: str,
        *,
        bare: Problem | None = None,
        forms: Sequence[StoredForm] = (),
        is_offline: bool = False,
    ) -> None:
        self.captured = captured
        self.options = options
        self.fingerprint = mark
        self.is_resolving = False
        self.file_notes: tuple[str, ...] = ()
        self.applied: AppliedPlan | None = None
        self.num_equal_before = 0
        self._extra_bytes = self.gradient_bytes = 0
        whole, bare = _with_stock(captured), bare or captured.problem
        moved = [form.moved(len(whole.ops) > len(bare.ops)) for form in forms]
        self.planner = Planner(with_forms(whole, [form.offer for form in moved]), progress=log.info, accepts=self._runnable)
        self.graph_problem = with_forms(replace(bare, stock=whole.stock), [form.offer for form in forms])
        self.codecs = {made.stored: (made.value, form.codec) for made, form in zip(self.problem.forms, moved, strict=True)}
        self._rules: OrderRules | None = None
        self.margin_bytes = 0
        self.correction_bytes = 0
        self.num_probes = 0
        self.num_doubts = 0
        self._meter: Measure | None = None
        self.num_misses = 0
        self.is_offline = is_offline
        self.is_code_read = not is_offline
        self.is_plain = False
        self._without_code: set[frozenset[int]] = set()
        self.store_key = NOT_KEPT if is_offline else store_key(mark, self.problem, options)
        static = captured.problem.total_static_bytes
        self.accounted = {saved: static + transient for saved, transient in recall_transients(self.store_key).items()}
        for saved in self.accounted:
            self.planner.add(saved, "stored")
        self.generated: set[frozenset[int]] = set()
        self.free: Outcome = self.planner.add(self.problem.stock.get(STOCK, self.simulator.default_saved), "stock")

    @classmethod
    def of(
        cls,
        joint: fx.GraphModule,
        num_fwd_outputs: int,
        static_indices: tuple[int, ...],
        kinds: tuple[Kind, ...],
        held: Sequence[Any],
        options: Options,
        *,
        carried: Carried,
        earlier: Strategy | None,
        host_bytes_before: int = 0,
        is_offline: bool = False,
    ) -> Strategy:
        """Capture a joint graph. ``earlier`` is kept, with its planner, if the graph and what is carried are still the same.

        ``host_bytes_before``: what graphs that run before this one in a step keep in host memory.
        ``is_offline``: no code is generated and nothing is remembered, so that the same graph always gets the same plan.
        """
        fused = options.codegen is Codegen.INDUCTOR
        channels_last = fused and torch_private.lays_out_channels_last(joint)
        prepare(joint, num_fwd_outputs, channels_last=channels_last)
        device = planned_device(joint.graph)
        spec = device_spec(device, options.device_profile)
        static = measure_static(held, device, carried_bytes=carried.present_bytes)
        limit = profiling_limit(options.budget, static, device)
        price = functools.partial(
            price_nodes,
            spec=spec,
            limit_bytes=limit,
            fused=fused,
            channels_last=channels_last,
            measure=options.device_profile is None,
            progress=log.info,
        )
        captured = capture(
            JointGraph(
                module=joint,
                num_fwd_outputs=num_fwd_outputs,
                static_input_indices=static_indices,
                input_kinds=kinds,
                leaves=frozenset(gradients_to_come(held)),
            ),
            price=price,
            fused=fused,
            static_bytes=static.bytes_by_kind,
            bytes_per_us=spec.bytes_per_us,
            launch_us=spec.launch_us,
            keep_below_bytes=options.keep_below,
            holds_outputs=options.outputs is Outputs.HELD,
        )
        bare_captured, bare = captured, captured.problem  # of the graph alone: a plan file serves whatever a loop holds
        mark = fingerprint(bare)
        captured = captured.carrying(carried.planned_bytes)
        is_same = earlier is not None and earlier.fingerprint == mark and earlier.options.storage == options.storage
        if earlier is not None and is_same and earlier.carried_bytes == carried.planned_bytes:
            earlier.captured = captured
            return earlier
        forms = find_forms(bare_captured, options.storage, price, pack=options.pack)
        if options.slice:
            is_probed = options.device_profile is None and device.type != "meta" and not is_offline
            forms += find_slices(bare_captured, SliceProbe(device, limit_bytes=limit) if is_probed else None)
        link = host_link(device, options, spec, is_offline=is_offline) if options.offload else None
        if link is not None:
            first = () if options.plan is None else values_on_host(load_plan(options.plan), bare, mark)
            limit_bytes = max(0, host_limit_bytes(options, is_offline=is_offline) - host_bytes_before)
            forms += find_copies(bare_captured, link, first=first, limit_bytes=limit_bytes)
        forms = tuple(sorted(forms, key=_rank))
        return cls(captured, options, mark, bare=bare, forms=forms, is_offline=is_offline)

    def measure_workspace(self, target: object, args: tuple[object, ...]) -> int | None:
        """Workspace in bytes of a library call of generated code; None if it cannot be run here, as when planning for another device."""
        device = self.captured.device
        if self.options.device_profile is not None or device.type == "meta":
            return None
        if self._meter is None:
            self._meter = workspace_meter(device, device_spec(device, None))
        return self._meter(target, args)

    @property
    def carried_bytes(self) -> int:
        """What the plan assumes to be held of the step before while forward runs."""
        return sum(value.size_bytes for value in self.problem.values if value.kind is Kind.CARRIED)

    @property
    def problem(self) -> Problem:
        return self.planner.problem

    @property
    def simulator(self) -> Simulator:
        return self.planner.simulator

    def _runnable(self, schedule: Schedule) -> Schedule | None:
        """A planner's schedule as it can run on this graph; None if the graph's own rules of order forbid it."""
        if self._rules is None:
            self._rules = order_rules(self.captured)
        mended = at_the_ends(self._rules, schedule)
        try:
            check_schedule(self.captured.problem, mended)
            check_order(self.captured.problem, self._rules, mended)
        except ValueError as error:
            log.info("a schedule was dropped: %s", error)
            return None
        return mended

    def solve(self, budget_bytes: int | None, *, held_bytes: int, gradient_bytes: int = 0, tight: bool) -> Plan:
        """The fastest known plan for a budget, given what the step holds besides; ``gradient_bytes`` of that are gradients.

        ``tight`` asks for the plan that leaves most to the graphs that follow in the same step.
        Raises BudgetTooSmall with the least peak of the whole step; PlanMismatch if a plan file was made for another graph.
        """
        self.gradient_bytes = gradient_bytes
        self._extra_bytes = extra = held_bytes - self.problem.total_static_bytes + self.margin_bytes
        limit = None if budget_bytes is None else budget_bytes - extra
        try:
            plan = self._choose(limit, tight=tight)
        except BudgetTooSmall as error:
            raise BudgetTooSmall(
                budget_bytes=budget_bytes or 0,
                least_peak_bytes=error.least_peak_bytes + extra + self.refusal_room_bytes,
                pinned=error.pinned,
                of_file=error.of_file,
                hint=error.hint
                + self.hint_of_gradients()
                + self._hint_of_room(error.least_peak_bytes)
                + (PART_HINT if tight else self.hint_of_outputs(error.least_peak_bytes)),
            ) from None
        peak_bytes = self._peak_of(plan.saved) if plan.schedule is None else plan.peak_bytes
        if not plan.bound and not self.takes_file:
            bound = bound_of(self.problem, plan.time_us, limit)
            plan = replace(plan, bound_us=bound.time_us, bound=bound.proof)
        return replace(plan, budget_bytes=budget_bytes, peak_bytes=peak_bytes + extra, static_bytes=held_bytes)

    def _peak_of(self, saved: frozenset[int]) -> int:
        """Peak by generated code where that is known, else the simulator's, moved by what generated code of another plan needed."""
        known = self.accounted.get(saved)
        return self.simulator.evaluate(saved).peak_bytes + max(0, self.correction_bytes) if known is None else known

    def need_of(self, saved: frozenset[int]) -> int:
        """Budget that a plan needs: its peak and, on CUDA, what the caching allocator rounds up and libraries keep."""
        peak = self._peak_of(saved)
        return peak + self._slack_bytes(peak, KNOWN_SLACK if saved in self.accounted else GUESSED_SLACK)

    def _need(self, outcome: Outcome) -> int:
        """As `need_of`; a schedule's peak is that of its replay, and not that of the values that it saves."""
        if outcome.schedule is None:
            return self.need_of(outcome.saved)
        return outcome.peak_bytes + self._slack_bytes(outcome.peak_bytes, GUESSED_SLACK)

    def _slack_bytes(self, peak_bytes: int, share: float) -> int:
        share, room_bytes = self._room(share)
        return int((peak_bytes - self.problem.total_static_bytes) * share) + room_bytes

    def _peak_within(self, need_bytes: int) -> int:
        """The largest peak of a schedule that does not need more; what is static at least."""
        static = self.problem.total_static_bytes
        share, room_bytes = self._room(GUESSED_SLACK)
        return max(static, int(static + (need_bytes - room_bytes - static) / (1 + share)))

    def _room(self, share: float) -> tuple[float, int]:
        return room_beside(self.captured.device.type, share=share, is_unread=self.problem.fused and self.is_offline)

    def fits(self, plan: Plan) -> bool:
        """Whether a plan whose code is known keeps its budget. One that was asked for by name or file is taken at its word: its peak."""
        if plan.budget_bytes is None:
            return True
        is_free_choice = not self.takes_file and self.options.solver == "auto"
        share = KNOWN_SLACK if plan.schedule is None and plan.saved in self.accounted else GUESSED_SLACK
        slack = self._slack_bytes(self._peak_of(plan.saved) if plan.schedule is None else plan.peak_bytes, share) if is_free_choice else 0
        return plan.peak_bytes + slack <= plan.budget_bytes

    def _choose(self, limit: int | None, *, tight: bool) -> Plan:
        if self.options.plan is not None and not self.is_resolving:
            try:
                return self._from_file(limit)
            except PlanMismatch as error:
                if not self.leave_file(str(error).removesuffix(f" {REMEDY}")):
                    raise
            except BudgetTooSmall as error:
                need, budget = (format_bytes(size + self._extra_bytes) for size in (error.least_peak_bytes, error.budget_bytes))
                if not self.leave_file(f"its plan needs {need} here, and the budget is {budget}"):
                    raise
        if self.options.solver != "auto":
            return self._by_name(limit)
        if limit is None:
            return self._plan_of(self.free, "stock")
        if tight:
            fitting = self._fitting(self._outcomes(), limit)
            if fitting:
                return self._plan_of(min(fitting, key=lambda outcome: (outcome.saved_bytes, outcome.time_us)), "tightest")
        elif self._fitting([self.free], limit):
            return self._plan_of(self.free, "stock")
        return self._fastest(limit)

    def _fastest(self, limit: int) -> Plan:
        stored = None if self.is_plain else self._stored(limit)
        if stored is not None:
            return self._plan_of(stored, "stored plan")
        if not self.problem.fused:
            self.planner.search_schedules(self._peak_within(limit))
            for schedule in recall_schedules(self.store_key):  # not before: walks would start from them, and find other plans
                self.planner.add_schedule(schedule, "stored")
        outcomes = self._outcomes()
        fitting = self._fitting(outcomes, limit)
        if not fitting and self.is_plain:
            self.is_plain = False
            return self._fastest(limit)
        if not fitting:
            return self._last_resort(limit, outcomes)
        return self._take_fastest(fitting, limit)

    def _stored(self, limit: int) -> Outcome | None:
        """What was chosen for this limit before, by this process or another."""
        saved = recall_saved(self.store_key, limit)
        if saved is not None and saved not in self._without_code and self.need_of(saved) <= limit:
            return self.planner.add(saved, "stored")
        schedule = None if self.problem.fused else recall_schedule(self.store_key, limit, "auto")
        outcome = None if schedule is None else self.planner.add_schedule(schedule, "stored")
        return outcome if outcome is not None and self._need(outcome) <= limit else None

    def _take_fastest(self, fitting: Sequence[Outcome], limit: int) -> Plan:
        fastest = min(fitting, key=lambda outcome: (outcome.time_us, outcome.peak_bytes))
        plan = self._plan_of(fastest, f"{SEARCHED} ({self.planner.finder_of(fastest)})")
        if plan.schedule is None:
            remember_saved(self.store_key, limit, plan.saved)
        else:
            remember_schedule(self.store_key, limit, plan.schedule, "auto")
        return plan

    def _by_name(self, limit: int | None) -> Plan:
        """The plan of the solver that was asked for; the one that it named as the least in an earlier refusal does count.

        Under Inductor a plan whose code needs more than its simulation said gives way to another of the same solver.
        """
        solver = self.options.solver
        if limit is not None and self.problem.fused:
            return self._by_name_in_code(limit)
        schedule = None if limit is None or self.problem.fused else recall_schedule(self.store_key, limit, solver)
        stored = None if schedule is None else self.planner.add_schedule(schedule, solver)
        if stored is not None and limit is not None and stored.peak_bytes <= limit:
            return self._plan_of(stored, f"stored plan, {solver}")
        try:
            return self.planner.solve(limit, solver=solver)
        except BudgetTooSmall as error:
            entry = self.planner.judge.by_solver[solver].least() if solver in self.planner.judge.by_solver else None
            if entry is None or entry.outcome.schedule is None:
                raise
            remember_schedule(self.store_key, entry.outcome.peak_bytes, entry.outcome.schedule, solver)
            raise BudgetTooSmall(
                budget_bytes=error.budget_bytes,
                least_peak_bytes=error.least_peak_bytes,
                pinned=self.pinned_at_peak(entry.outcome),
                hint=error.hint,
            ) from None

    def _by_name_in_code(self, limit: int) -> Plan:
        solver = self.options.solver
        with contextlib.suppress(BudgetTooSmall):  # by simulation
            self.planner.solve(limit - max(0, self.correction_bytes), solver=solver)
        outcomes = self._outcomes()
        fitting = self._fitting(outcomes, limit)
        if not fitting:
            return self._last_resort(limit, outcomes)
        return self._plan_of(min(fitting, key=lambda outcome: (outcome.time_us, outcome.peak_bytes)), solver)

    def rule_out(self, plan: Plan) -> bool:
        """The code generator failed on a plan: take others, at first those that people write, which it is used to. False if none may be."""
        if self.takes_file or self.options.solver != "auto" or plan.saved == self.free.saved:
            return False
        self._without_code.add(plan.saved)
        self.is_plain = len(self._without_code) == 1
        return True

    def host_bytes_of(self, plan: Plan) -> int:
        """What a plan takes of the host's memory."""
        forms = [form for stored in plan.saved if (form := self.problem.form_of.get(stored)) and form.action is Action.OFFLOAD]
        return sum(host_bytes(self.problem.values[form.value].size_bytes) for form in forms)

    def rounds_at_random(self, plan: Plan) -> bool:
        """Whether a plan stores values in a format that draws random numbers."""
        return any(self.codecs[value][1].format in STOCHASTIC for value in plan.saved if value in self.codecs)

    def is_any_code_known(self) -> bool:
        """Whether code was generated for any plan."""
        return bool(self._known())

    def _fitting(self, outcomes: Sequence[Outcome], limit: int) -> list[Outcome]:
        """The plans within the limit. Guesses are worth `MAX_MISSES` compilations in a row where generated code is known to fit."""
        fitting = [outcome for outcome in outcomes if self._need(outcome) <= limit]
        is_one_known = any(self.need_of(saved) <= limit for saved in self._known())
        if self.num_misses < MAX_MISSES or not is_one_known:
            return fitting
        return [outcome for outcome in fitting if self._is_known(outcome)]

    def _is_known(self, outcome: Outcome) -> bool:
        """Whether the generated code of this plan was accounted for."""
        return outcome.schedule is None and outcome.saved in self.accounted

    def _outcomes(self) -> list[Outcome]:
        """The planner's frontier and every plan whose code was generated: by its code it may need less than its simulation said. Of a
        solver that was asked for by name, what it has proposed."""
        if self.options.solver != "auto" or self.is_plain:
            names = PLAIN_SOLVERS if self.is_plain else (self.options.solver,)
            frontier = tuple(entry.outcome for name in names for entry in self.planner.found_by(name))
        else:
            frontier = self.planner.frontier()
        on_frontier = {outcome.saved for outcome in frontier if outcome.schedule is None}
        outcomes = [*frontier, *(self.simulator.evaluate(saved) for saved in self._known() if saved not in on_frontier)]
        return [outcome for outcome in outcomes if outcome.saved not in self._without_code]

    def _known(self) -> Collection[frozenset[int]]:
        """Plans whose code was accounted for; of a solver that was asked for by name, here: another process may have asked another."""
        known = self.accounted if self.options.solver == "auto" else self.generated
        return [saved for saved in known if saved not in self._without_code]

    def _last_resort(self, limit: int, outcomes: list[Outcome]) -> Plan:
        """Nothing fits by what is known. Before a refusal, code is generated for plans that might fit (half way down and the least by
        turns), and for plans that may need less than any whose code is known. Where order is ours, schedules are searched for instead.

        What generated code of one plan needed beyond its simulation says little of another's, and a refusal must say what is true.
        """
        unknown = sorted((one for one in outcomes if one.saved not in self.accounted), key=lambda one: one.peak_bytes)
        if self.problem.fused and self.is_code_read and unknown:
            hopeful = [one for one in unknown if one.peak_bytes <= limit]
            if hopeful:
                is_half_way = self.num_probes % 2 == 0 and len(hopeful) > 2
                self.num_probes += 1
                return self._plan_of(hopeful[len(hopeful) // 2 if is_half_way else 0], "probe")
            promising = self._promising(unknown, outcomes)
            if promising is not None:
                return self._plan_of(promising, "probe")
        if not self.problem.fused:
            self.planner.search_orders(self._peak_within(limit))
            outcomes = self._outcomes()
            fitting = self._fitting(outcomes, limit)
            if fitting:
                return self._take_fastest(fitting, limit)
        known = [one for one in outcomes if self._is_known(one)] if self.problem.fused else outcomes
        best = min(known or outcomes, key=self._need)
        if best.schedule is not None:
            remember_schedule(self.store_key, self._need(best), best.schedule, "auto")  # another search might not find it
        raise BudgetTooSmall(
            budget_bytes=limit,
            least_peak_bytes=self._need(best),
            pinned=self.pinned_at_peak(best),
            hint=self._hint(limit, best) + self._hint_of_forms(limit) + self._hint_of_carried(best),
        )

    def _hint(self, limit: int, best: Outcome) -> str:
        if best.schedule is None or limit <= self.problem.total_static_bytes:
            return self.planner.hint(limit, best, solver=self.options.solver)
        return "Values are made again there as often as it takes: raise the budget to the least peak or lower the batch size."

    def _hint_of_forms(self, limit: int) -> str:
        """Which ways to store values were not allowed, where that could help."""
        if limit <= self.problem.total_static_bytes:
            return ""
        ways = [] if self.options.storage else ["rounded, options={'storage': ['bf16', 'fp8']}"]
        if self.captured.device.type == "cuda" and not self.options.offload:
            ways.append("in host memory, options={'offload': True}")
        return f" Values that are stored {' or '.join(ways)} may need less." if ways else ""

    def hint_of_gradients(self) -> str:
        """What a loop needs that zeroes gradients after forward, or adds them up: the first call does not see it."""
        if self.gradient_bytes <= NAMED_SHARE * self.problem.total_static_bytes:
            return ""
        return (
            f" {format_bytes(self.gradient_bytes)} of that peak are gradients of earlier calls, which are there while forward runs: a loop "
            "that adds none up can call zero_grad() before it."
        )

    def _hint_of_carried(self, best: Outcome) -> str:
        """What a loop needs that binds the model's outputs to a name until the next call has returned new ones."""
        if self.carried_bytes:
            return (
                f" {format_bytes(self.carried_bytes)} that the step before returned is still held while forward runs: delete it before the "
                "model is called again."
            )
        outputs_bytes = self._outputs_bytes()
        timeline = self.planner.judge.timeline(best)
        in_forward = max(timeline.live_bytes[: timeline.num_forward], default=0) + outputs_bytes
        beyond_bytes = in_forward - (best.peak_bytes - self.problem.total_static_bytes)
        if beyond_bytes <= NAMED_SHARE * best.peak_bytes:
            return ""
        return (
            f" A loop that holds what the model returns ({format_bytes(outputs_bytes)}) until the next call has returned may need "
            f"{format_bytes(beyond_bytes)} more: delete it before the next call."
        )

    def _hint_of_room(self, need_bytes: int) -> str:
        """What of a need is room for what only the device can tell, where plans are made without it."""
        room_bytes = need_bytes - self._peak_within(need_bytes)
        if not self.is_offline or room_bytes <= LOSS_BYTES:
            return ""
        return f" {format_bytes(room_bytes)} of that are room for what only the device can tell."

    def _outputs_bytes(self) -> int:
        return sum(self.problem.values[value].size_bytes for value in self.problem.forward_outputs)

    def _promising(self, unknown: Sequence[Outcome], outcomes: Sequence[Outcome]) -> Outcome | None:
        """A plan without code that may need less than every plan with code: the least simulated one; then, where code needs far more than
        its simulation, `MAX_DOUBTS` between that and the least need that is known. None if nothing speaks for another compilation."""
        static = self.problem.total_static_bytes
        first = min(outcomes, key=lambda one: one.peak_bytes)
        least = min((self._peak_of(saved) for saved in self._known()), default=None)
        if least is None or (first.saved not in self.accounted and first.peak_bytes < least):
            return first
        better = [one for one in unknown if one.peak_bytes - static < (1 - DOUBTED_SHARE) * (least - static)]
        if not better or self.num_doubts == MAX_DOUBTS:
            return None
        self.num_doubts += 1
        return min(better, key=lambda one: abs(2 * one.peak_bytes - first.peak_bytes - least))

    def _plan_of(self, outcome: Outcome, solver: str) -> Plan:
        is_cut_off = self.planner.truncated and solver.startswith((SEARCHED, self.options.solver))
        return decide(self.simulator, outcome, budget_bytes=None, solver=solver, fastest_us=self.free.time_us, truncated=is_cut_off)

    @functools.cached_property
    def document(self) -> PlanDocument:
        """The plan file that was asked for. Raises as `load_plan`."""
        assert self.options.plan is not None
        return load_plan(self.options.plan)

    @property
    def takes_file(self) -> bool:
        """Whether a plan file says exactly what runs: then there is no other plan to try."""
        is_repaired = self.applied is not None and not self.applied.is_unchanged
        return self.options.plan is not None and not self.is_resolving and not is_repaired

    def leave_file(self, reason: str) -> bool:
        """Search for plans from now on, where the user allows that for a plan file that does not do; False if not."""
        if self.options.plan_mismatch is PlanMismatchPolicy.REFUSE:
            return False
        self.is_resolving = True
        self.file_notes = (f"planned afresh, and not by {self.options.plan}: {reason}",)
        log.warning("planning afresh, and not by %s: %s", self.options.plan, reason)
        return True

    def _from_file(self, limit: int | None) -> Plan:
        assert self.options.plan is not None
        if self.applied is None:
            check_applicable(self.document, codegen=self.options.codegen.value, source=self.options.plan, storage=self.options.storage)
            self.applied = apply_document(
                self.document,
                self.options.plan,
                problem=self.graph_problem,
                mark=self.fingerprint,
                default=self.free.saved,
                outputs=self.options.outputs,
                num_equal_before=self.num_equal_before,
            )
            self.file_notes = self.applied.notes
            for note in self.file_notes:
                log.warning("%s", note)
        applied = self.applied
        stored = applied.stored.plan
        if not applied.is_unchanged:
            return self._repaired(applied, limit)
        if applied.schedule is not None:
            plan = replace(stored, saved=applied.saved, schedule=applied.schedule)
            return self._prescribed(for_problem(plan, self.problem), limit)
        outcome = self.planner.add(saved_for_problem(applied.saved, self.problem), "file")
        peak_bytes = self._peak_of(outcome.saved)
        is_certain = not (self.problem.fused and self.is_code_read) or outcome.saved in self.accounted  # else its code will say
        if limit is not None and is_certain and peak_bytes > limit:
            raise self._file_needs_more(outcome, peak_bytes, limit)
        return self._plan_of(outcome, f"file, {stored.solver}")

    def _file_needs_more(self, outcome: Outcome, least_bytes: int, limit: int) -> BudgetTooSmall:
        return BudgetTooSmall(
            budget_bytes=limit,
            least_peak_bytes=least_bytes,
            pinned=self.pinned_at_peak(outcome),
            hint=FILE_HINT,
            of_file=str(self.options.plan),
        )

    def _repaired(self, applied: AppliedPlan, limit: int | None) -> Plan:
        """A portable plan whose regions differ here: as it was mapped if it fits, else the fastest that one walk from it meets."""
        stored = applied.stored.plan
        saved = saved_for_problem(applied.saved, self.problem)
        outcome = self.planner.add(saved, "file")
        if limit is None or self._need(outcome) <= limit:
            return self._plan_of(outcome, f"file, {stored.solver}")
        within = self._peak_within(limit) - max(0, self.correction_bytes)
        outcome = self.planner.add(repair(self.simulator, saved, within).saved, "file")
        known = [self.simulator.evaluate(saved) for saved in self.generated]  # earlier repairs of this plan, by their code
        outcome = min(
            [outcome, *known], key=lambda one: (self._need(one) > limit, one.time_us if self._need(one) <= limit else self._need(one))
        )
        if self._need(outcome) > limit:
            raise self._file_needs_more(outcome, self._need(outcome), limit)
        return self._plan_of(outcome, f"file, {stored.solver}, repaired")

    def _prescribed(self, plan: Plan, limit: int | None) -> Plan:
        """A file's plan that says in which order ops run, with the peak and the time that its schedule has here."""
        assert plan.schedule is not None
        try:
            check_runnable(self.captured, plan.schedule)
        except ValueError as error:
            raise PlanMismatch(
                f"{self.options.plan}: its schedule cannot run on this graph: {error}. Make the plan again, or remove the option."
            ) from error
        outcome = replay_schedule(self.captured.problem, plan.schedule)
        if outcome.saved != plan.saved:
            raise PlanMismatch(
                f"{self.options.plan}: its schedule saves {len(outcome.saved)} values, and not the {len(plan.saved)} of its field 'saved'. "
                "Make the plan again, or remove the option."
            )
        if limit is not None and outcome.peak_bytes > limit:
            raise BudgetTooSmall(
                budget_bytes=limit,
                least_peak_bytes=outcome.peak_bytes,
                pinned=self.pinned_at_peak(plan),
                hint=FILE_HINT,
                of_file=str(self.options.plan),
            )
        replayed = Outcome(schedule=plan.schedule, **{one.name: getattr(outcome, one.name) for one in fields(outcome)})
        return self._plan_of(replayed, f"file, {plan.solver}")

    def account(self, plan: Plan, transient_bytes: int) -> Plan:
        """The plan with the peak that its generated code really needs; what that differs by moves the guess for plans without code."""
        static = self.problem.total_static_bytes
        self.accounted[plan.saved] = static + transient_bytes
        self.generated.add(plan.saved)
        self.correction_bytes = static + transient_bytes - self.simulator.evaluate(plan.saved).peak_bytes
        remember_transient(self.store_key, plan.saved, transient_bytes)
        plan = replace(plan, peak_bytes=plan.static_bytes + transient_bytes + self.margin_bytes)
        self.num_misses = self.num_misses + 1 if plan.solver != "probe" and not self.fits(plan) else 0
        return plan

    def hint_of_outputs(self, least_peak_bytes: int) -> str:
        """What a loop that drops the model's outputs can do, where they are planned as held and matter."""
        outputs_bytes = self._outputs_bytes()
        if outputs_bytes < NAMED_SHARE * least_peak_bytes or self.takes_file:
            return ""
        return (
            f" If your loop does not hold what the model returns ({format_bytes(outputs_bytes)}) while backward runs, "
            "options={'outputs': 'dropped'} may need less."
        )

    @property
    def refusal_room_bytes(self) -> int:
        """What a refusal adds to the least peak, so that training at the peak that it names does work."""
        return 0 if self.captured.device.type == "cpu" else REFUSAL_ROOM_BYTES

    def least_need_bytes(self) -> int:
        """Least transient budget of any plan whose code was generated."""
        return min(self.need_of(saved) for saved in self._known()) - self.problem.total_static_bytes

    def frontier(self, plan: Plan) -> tuple[tuple[int, float], ...]:
        """(peak_bytes, time_us) of the plans found so far, least peak first; peaks of the step, as ``plan`` has its own."""
        beside = plan.static_bytes - self.problem.total_static_bytes
        entries = self.planner.judge.archive.frontier()
        return tuple((entry.outcome.peak_bytes + beside, entry.outcome.time_us) for entry in entries)

    def notes_of(self, plan: Plan) -> list[str]:
        """Sentences for `explain`."""
        sources = Counter(self.problem.ops[op].cost_source.split(":")[0] for op in base_ops(self.problem))
        notes = ["costs: " + ", ".join(f"{count} {source}" for source, count in sorted(sources.items()))]
        if plan.budget_bytes is not None and plan.saved == self.free.saved and plan.schedule is None:
            notes.append("already under budget: torch's own partition fits, so nothing was changed")
        notes.extend((*self.file_notes, *self.captured.guesses))
        if self.options.offload and self.captured.device.type == "cpu":
            notes.append(NO_LINK_NOTE)
        if not self.simulator.candidates:
            notes.append("nothing crosses from forward to backward that could be recomputed: torch's own partition is used")
        return notes

    def pinned_at_peak(self, plan: Plan | Outcome) -> tuple[tuple[str, int], ...]:
        """``(label, bytes)`` of the largest values live at the peak of a plan."""
        values = self.problem.values
        live = self.planner.judge.timeline(plan).live_at_peak
        return tuple((values[value].label or values[value].name, size) for value, size in live[:8])


def _rank(form: StoredForm) -> int:
    """The more exact first, and before what rounds what waits in host memory: a search with fewer kinds of forms comes before one with
    more, and of two forms of a value in one plan the first counts."""
    offer = form.offer
    return 2 + LOSSY.index(offer.format) if offer.error else int(offer.action is Action.OFFLOAD)


def _with_stock(captured: Captured) -> Problem:
    """The problem with what torch's partitioner for this code generator saves: as the default plan without fusion."""
    if not captured.problem.fused:
        return captured.problem
    nodes = torch_private.stock_saved_nodes(captured.joint.module, captured.node_info, 1.0)
    return replace(captured.problem, stock={STOCK: captured.values_of(nodes)})
