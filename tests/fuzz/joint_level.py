"""Programs through AOTAutograd, dyngran's capture, planners and partition, without Dynamo: several plans of each joint graph, run op by op.

One plan is trained with, by autograd, and compared with eager mode. The graphs of the others are run on what the first was given, and must
give what it gave; so one trace serves them all.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
from grammar import Program
from joint import unit_price
from measure import event_peak_bytes, storage_bytes
from net import Net, Rendered, Seen, execute, make_inputs, make_net, same_bits, tagged_checkpoint, train_step
from torch import Tensor, fx
from torch.utils.checkpoint import set_checkpoint_early_stop
from verdict import Outcome, Verdict, coarsest_eps, judge, named

from dyngran.compiler import capture as capturing
from dyngran.compiler import partition as partitioning
from dyngran.compiler import prepare as preparing
from dyngran.compiler import torch_private
from dyngran.compiler.capture import Captured, JointGraph
from dyngran.compiler.codecs import Codec
from dyngran.compiler.options import parse_options
from dyngran.compiler.pricing import device_spec, price_nodes
from dyngran.compiler.slice_forms import find_slices
from dyngran.compiler.slice_probe import SliceProbe
from dyngran.compiler.slices import Slice
from dyngran.compiler.static_memory import input_kinds
from dyngran.compiler.stored_forms import find_copies, find_forms
from dyngran.compiler.strategy import Strategy
from dyngran.passes import profile as profiling
from dyngran.passes.copies import HostLink
from dyngran.passes.errors import BudgetTooSmall
from dyngran.passes.plan import Action, Plan, Schedule
from dyngran.passes.problem import Kind
from dyngran.passes.profile_cache import Measurement

TRAIN_SEED = 11
ABOVE_BYTES = 64  # that a step may need more than predicted: scalars of the engine
LINK = HostLink(to_host_bytes_per_us=1e6, to_device_bytes_per_us=1e6, latency_us=0.0, source="made")
LEAST_COPIED_BYTES = 64  # less may be a state of a random generator, which lies on the host already
SLICE_STEP_BYTES = 256  # two or three slices of most values: each is tried on the CPU first
BELOW_BYTES = 32 << 10  # and less: a library's workspace is not needed every time, as with Fourier transforms


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plan by name: what crosses and, if order is prescribed, the schedule. ``peak_bytes`` is predicted."""

    name: str
    saved: frozenset[int]
    peak_bytes: int
    schedule: Schedule | None = None


@dataclass(slots=True)
class Ran:
    """One run of a graph: what it was given, as copies, the random state before, what it gave and the random state after."""

    inputs: list[Any]
    state: Tensor
    after: Tensor = field(default_factory=lambda: torch.empty(0))
    results: list[Any] = field(default_factory=list)
    inputs_after: list[Any] = field(default_factory=list)


class Traced:
    """One trace of a program: its joint graph, the plans of it and what the plan that was trained with was given and gave."""

    def __init__(self, program: Program, net: Net, *, is_measured: bool = False, is_stock: bool = False) -> None:
        from torch._functorch.aot_autograd import aot_function
        from torch._functorch.partitioners import default_partition

        self.program, self.net, self.is_measured = program, net, is_measured
        self.given = make_inputs(program, program.rows)
        self.captured: Captured | None = None
        self.plans: list[Chosen] = []
        self.cuts: list[tuple[fx.GraphModule, fx.GraphModule]] = []  # of each plan, made while the trace is open
        self.trained = 0
        self.num_outputs = 0
        self.written_back: set[int] = set()  # places of forward's outputs that are new contents of inputs
        self.static_bytes = 0
        self.modules: list[fx.GraphModule] = []
        self.runs: list[Ran] = []
        self._state = [*net.parameters(), *net.buffers()]
        self._names = [name.removeprefix("weights.") for name, _ in (*net.named_parameters(), *net.named_buffers())]
        self._rendered = Rendered.of(program)
        plain = lambda gm, _inputs: torch_private.boxed(gm)  # noqa: E731 - the same for both sides
        self._run = aot_function(
            self._function,
            fw_compiler=plain if is_stock else self._recorded,
            bw_compiler=plain if is_stock else self._recorded,
            inference_compiler=plain,
            partition_fn=default_partition if is_stock else self._cut,
            keep_inference_input_mutations=True,
            dynamic=program.is_marked and program.later_rows > 0,  # one in six: symbolic sizes take long to trace
            num_params_buffers=len(self._state),
            _disable_torch_fn_metadata_mode=True,  # names of torch functions, which nothing here reads, at a quarter of the time
        )

    def train(self) -> Seen:
        torch.manual_seed(TRAIN_SEED)
        return train_step(self.program, self.net, lambda *tensors: self._run(*self._state, *tensors), self.given)

    def _function(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        state = dict(zip(self._names, tensors, strict=False))
        return execute(self._rendered, lambda name, _: state[name], tensors[len(state) :], checkpointed=tagged_checkpoint)

    def _cut(
        self, joint: fx.GraphModule, _inputs: Sequence[Any], *, num_fwd_outputs: int, static_lifetime_input_indices: Any = None, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        given = [*self._state, *self.given.tensors]
        self.static_bytes = storage_bytes(given)
        preparing.prepare(joint, num_fwd_outputs, channels_last=False)
        self.captured = capturing.capture(
            JointGraph(
                module=joint,
                num_fwd_outputs=num_fwd_outputs,
                static_input_indices=tuple(static_lifetime_input_indices or ()),
                input_kinds=input_kinds(given),
            ),
            price=measured_price if self.is_measured else unit_price,
            fused=False,
            static_bytes={Kind.INPUT: self.static_bytes},
            bytes_per_us=1e3,
            launch_us=1.0,
            keep_below_bytes=0,
        )
        descriptors = torch_private.split_outputs(joint, num_fwd_outputs)[2]
        mutated = {*map(id, torch_private.mutated_input_descriptors(descriptors))}
        self.num_outputs = num_fwd_outputs
        self.written_back = {place for place, one in enumerate(descriptors) if id(getattr(one, "mutated_input", None)) in mutated}
        self.plans, codecs = plans_of(self.captured, random.Random(self.program.data_seed))
        self.trained = self.program.data_seed % len(self.plans)
        self.cuts = [partitioning.partition(self.captured, plan.saved, plan.schedule, codecs=codecs) for plan in self.plans]
        return self.cuts[self.trained]

    def _recorded(self, graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        run = torch_private.boxed(graph)
        self.modules.append(graph)

        def recorded(args: list[Any]) -> Any:
            given = list(args)
            one = Ran(inputs=copies(args), state=torch.get_rng_state())
            results = run(args)
            one.results, one.inputs_after, one.after = copies(results), copies(given), torch.get_rng_state()
            self.runs.append(one)
            return results

        recorded._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for this attribute
        return recorded


def copies(values: Sequence[Any]) -> list[Any]:
    """Copies that share memory among themselves where the originals do."""
    storages: dict[int, torch.UntypedStorage] = {}
    found: list[Any] = []
    for value in values:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            found.append(value)
            continue
        storage = value.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        copy = torch.empty(0, dtype=value.dtype).set_(storages[storage._cdata], value.storage_offset(), value.shape, value.stride())
        found.append(copy)
    return found


def measured_price(nodes: Sequence[fx.Node], device: torch.device) -> list[Measurement]:
    spec = device_spec(device, None)
    return price_nodes(
        nodes, device, spec=spec, limit_bytes=None, fused=False, channels_last=False, measure=True, progress=lambda _line: None
    )


def plans_of(captured: Captured, draw: random.Random) -> tuple[list[Chosen], Mapping[int, tuple[int, Codec | Slice]]]:
    """Save all, save least, all of it stored in lossless forms, in host memory, or in part, a saved set that no planner would choose, and
    what planners answer at the middle and at the least budget; and how forms are stored.

    Orders of ops are searched for one graph in eight only: that takes as long as all the rest.
    """
    packed = find_forms(captured, (), unit_price, min_saved_bytes=1)
    copied = find_copies(captured, LINK, min_bytes=LEAST_COPIED_BYTES, limit_bytes=2**40)
    cut = find_slices(captured, SliceProbe(captured.device, limit_bytes=None), min_bytes=2 * SLICE_STEP_BYTES, step_bytes=SLICE_STEP_BYTES)
    forms = (*packed, *copied, *cut)
    strategy = Strategy(captured, parse_options({"codegen": "eager", "keep_below": 0}), "fuzz", forms=forms, is_offline=True)
    stored = {form.value: form.stored for form in reversed(strategy.problem.forms) if form.action in (Action.PACK, Action.NARROW)}
    on_host = {form.value: form.stored for form in strategy.problem.forms if form.action is Action.OFFLOAD}
    slices: dict[int, list[int]] = {}
    for form in strategy.problem.forms:
        if form.action is Action.SLICE:
            slices.setdefault(form.value, []).append(form.stored)
    sliced = {value: draw.choice(found) for value, found in slices.items()}
    simulator = strategy.simulator
    share, has_orders = draw.random(), draw.random() < 0.125
    drawn = [value for value in simulator.candidates if draw.random() < share]
    plans = [
        Chosen(name, saved, simulator.evaluate(saved).peak_bytes)
        for name, saved in (
            ("save all", simulator.default_saved),
            ("save least", simulator.normalize(())),
            ("stored", simulator.normalize(stored.get(value, value) for value in simulator.default_saved)),
            ("offloaded", simulator.normalize(on_host.get(value, value) for value in simulator.default_saved)),
            ("sliced", simulator.normalize(sliced.get(value, value) for value in simulator.default_saved)),
            ("drawn", simulator.normalize(drawn)),
        )
    ]
    frontier = strategy.planner.frontier()
    least_bytes = frontier[0].peak_bytes
    for name, budget_bytes in (("middle", (least_bytes + strategy.free.peak_bytes) // 2), ("least", least_bytes)):
        if has_orders:
            plan = planned_within(strategy, budget_bytes)
            plans.append(Chosen(name, plan.saved, plan.peak_bytes, plan.schedule))
        else:
            best = min((one for one in frontier if one.peak_bytes <= budget_bytes), key=lambda one: one.time_us, default=frontier[0])
            plans.append(Chosen(name, best.saved, best.peak_bytes, best.schedule))
    return plans, strategy.codecs


def planned_within(strategy: Strategy, budget_bytes: int) -> Plan:
    """The plan for a budget; if it is refused, for the least peak that the refusal names, which must be granted."""
    static_bytes = strategy.problem.total_static_bytes
    try:
        return strategy.solve(budget_bytes, held_bytes=static_bytes, tight=False)
    except BudgetTooSmall as refusal:
        return strategy.solve(refusal.least_peak_bytes, held_bytes=static_bytes, tight=False)


@contextmanager
def small_calls_measured() -> Iterator[None]:
    """Operators on less than 4 KiB are not measured, since their workspaces do not matter; in programs of that size they do."""
    with patch.object(profiling, "MEASURE_FROM_BYTES", 0):
        yield


def check(program: Program, *, is_measured: bool = False) -> Verdict:
    """All plans of one program. ``is_measured``: their peaks as well, which takes longer."""
    with draws_as_effects(program), small_calls_measured():
        return _check(program, is_measured=is_measured)


def eager(program: Program) -> Seen:
    """The truth."""
    net = make_net(program)
    torch.manual_seed(TRAIN_SEED)
    with set_checkpoint_early_stop(False):  # stopped early, rrelu's noise is read before it is drawn (pytorch issue 193671)
        return train_step(program, net, net, make_inputs(program, program.rows))


def stock(program: Program) -> Seen:
    """The witness: AOTAutograd without a plan."""
    with draws_as_effects(program):
        return Traced(program, make_net(program), is_stock=True).train()


def draws_as_effects(program: Program) -> AbstractContextManager[None]:
    """Whether torch takes a random draw for an effect, and so leaves it where nobody reads it, is an option of Inductor's: both occur."""
    return torch._inductor.config.patch(fallback_random=program.data_seed % 2 == 0)


def _check(program: Program, *, is_measured: bool) -> Verdict:
    try:
        want = eager(program)
    except Exception as error:  # noqa: BLE001 - whatever eager mode rejects is no program
        return Verdict(Outcome.DISCARDED, f"eager: {named(error)}")
    try:
        traced = Traced(program, make_net(program), is_measured=is_measured)
        got = traced.train()
    except Exception as error:  # noqa: BLE001 - sorted by what stock says
        try:
            stock(program)
        except Exception as other:  # noqa: BLE001 - whatever stops stock
            return Verdict(Outcome.DISCARDED, f"stock: {named(other)}")
        return Verdict(Outcome.FAILED, f"stops: {named(error)}", "".join(traceback.format_exception(error))[-2000:])
    verdict = judge(want, got, partial(stock, program), eps=coarsest_eps(want, program))
    if not verdict.outcome.is_counted:
        verdict = replace(verdict, details=f"{verdict.details}; plan: {traced.plans[traced.trained].name if traced.plans else 'none'}")
    if verdict.outcome is Outcome.FAILED:
        return verdict
    if len(traced.runs) < 2:  # nothing that needs a gradient, or no gradient that arrives
        return replace(verdict, reason="no backward graph") if verdict.outcome.is_counted else verdict
    for place, (plan, cut) in enumerate(zip(traced.plans, traced.cuts, strict=True)):
        if place != traced.trained and (bad := differences_of_cut(traced, *cut)):
            return Verdict(Outcome.FAILED, f"plans differ: {bad[0].split(':')[0]}", f"{plan.name}: {', '.join(bad)}")
    if is_measured:
        for plan, cut in zip(traced.plans, traced.cuts, strict=True):
            peak_bytes = measured_peak_of(traced, *cut)
            if not plan.peak_bytes - BELOW_BYTES <= peak_bytes <= plan.peak_bytes + ABOVE_BYTES:
                return Verdict(
                    Outcome.FAILED, "measured peak is not the predicted one", f"{plan.name}: {peak_bytes} instead of {plan.peak_bytes}"
                )
    return verdict


def differences_of_cut(traced: Traced, forward: fx.GraphModule, backward: fx.GraphModule) -> list[str]:
    """What another plan's graphs give that those of the plan that was trained with did not, from the same inputs and random state."""
    first, last = traced.runs
    num_outputs = traced.num_outputs
    torch.set_rng_state(first.state)
    inputs = copies(first.inputs)
    results = torch_private.boxed(forward)(list(inputs))
    bad = [f"output: {i}" for i in range(num_outputs) if not same(first.results[i], results[i])]
    bad += [
        f"input after forward: {i}" for i, (one, other) in enumerate(zip(first.inputs_after, inputs, strict=True)) if not same(one, other)
    ]
    bad += ["random state after forward: "] * (not torch.equal(first.after, torch.get_rng_state()))
    tangents = dict(zip(placeholders(traced.modules[1]), copies(last.inputs), strict=True))
    args = backward_args(forward, backward, num_outputs, results, tangents)
    torch.set_rng_state(last.state)
    gradients = torch_private.boxed(backward)(args)
    bad += [f"gradient: {i}" for i, (one, other) in enumerate(zip(last.results, gradients, strict=True)) if not same(one, other)]
    bad += ["random state after backward: "] * (not torch.equal(last.after, torch.get_rng_state()))
    return bad


def same(one: Any, other: Any) -> bool:
    return same_bits(one, other) if isinstance(one, Tensor) else type(one) is type(other) and one == other


def placeholders(module: fx.GraphModule) -> list[str]:
    return [node.target for node in module.graph.nodes if node.op == "placeholder"]


def returned_names(module: fx.GraphModule) -> list[str]:
    outputs = next(node for node in module.graph.nodes if node.op == "output").args[0]
    return [node.name if isinstance(node, fx.Node) else f"constant {place}" for place, node in enumerate(outputs)]


def backward_args(
    forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, results: Sequence[Any], tangents: dict[str, Any]
) -> list[Any]:
    """What backward is given: by name what forward saved, then ``tangents``. Random states are renamed on the way, in their order."""
    wanted = placeholders(backward)
    saved = dict(list(zip(returned_names(forward), results, strict=True))[num_outputs:])
    renamed = iter([value for name, value in saved.items() if name not in wanted])
    return [saved[name] if name in saved else tangents[name] if name.startswith("tangents") else next(renamed) for name in wanted]


def measured_peak_of(traced: Traced, forward: fx.GraphModule, backward: fx.GraphModule) -> int:
    """Both graphs of a plan run as autograd runs them: what is saved is held for backward, which frees as it reads. The gradients of the
    outputs come between the two, and whoever calls backward holds them until it returns. What forward makes for inputs that it changes is
    written back and dropped."""
    first, last = traced.runs
    num_outputs = traced.num_outputs
    run_forward, run_backward = torch_private.boxed(forward), torch_private.boxed(backward)
    inputs = copies(first.inputs)
    given = {name: value for name, value in zip(placeholders(traced.modules[1]), last.inputs, strict=True) if name.startswith("tangents")}
    kept: list[Any] = []

    def step() -> None:
        results = run_forward(list(inputs))
        kept.extend(results[place] for place in range(num_outputs) if place not in traced.written_back)
        tangents = dict(zip(given, copies(list(given.values())), strict=True))
        args = backward_args(forward, backward, num_outputs, results, tangents)
        del results
        kept.extend(run_backward(args))

    return traced.static_bytes + event_peak_bytes(step)
