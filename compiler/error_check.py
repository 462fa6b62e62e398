"""Whether gradients stay close enough to the exact ones where values are stored rounded, measured in sampled steps.

In a sampled step forward saves as it is what is otherwise rounded. Backward then runs twice, with what the plan would have stored and
with the values themselves, and the user gets the second, exact gradients; of the first only sketches are kept
(`runtime/gradient_error.py`). So a sampled step holds the rounded values whole beside the plan's peak. Where the budget has no room for all
of them, several steps in a row measure a part each, the others stay rounded on both sides, and the squares are added: errors of different
values are independent noise. Where the parts would be more than `MAX_PARTS`, the rest is estimated.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, fx

from dyngran.compiler import torch_private
from dyngran.compiler.capture import Captured
from dyngran.compiler.codecs import Codec, Writer
from dyngran.compiler.options import LOSSY
from dyngran.compiler.slices import Slice
from dyngran.passes.classes import value_classes
from dyngran.passes.forms import stored_name
from dyngran.passes.plan import Plan
from dyngran.passes.problem import Form, Problem
from dyngran.passes.simulate import Simulator
from dyngran.runtime.gradient_error import relative_error, sketches

log = logging.getLogger("dyngran")

EVERY, FIRST = 1000, 3  # calls between samples, and the first one of a plan: in eager code backward is compiled when it first runs
RETRY = 20  # calls until the next sample after one whose gradients were not finite, as while a loss is scaled down
SAMPLE_SHARE = 0.1
MAX_PARTS = 8  # each is compiled

Store = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientError:
    """``relative``: norm of the difference over the norm of the exact gradients, measured for ``num_values`` of ``of_values`` rounded ones;
    if those are fewer, estimated for all, or above the limit already. ``formats``: those that the plan used."""

    relative: float
    num_values: int
    of_values: int
    formats: tuple[str, ...]

    @property
    def is_estimate(self) -> bool:
        return self.num_values < self.of_values

    def __str__(self) -> str:
        how = f"estimated from {self.num_values} of {self.of_values} rounded values" if self.is_estimate else "measured"
        return f"{self.relative:.2g} with {', '.join(self.formats)} ({how})"


class ErrorCheck:
    """Samples and results of one graph. ``limit``: the relative error that the user allows."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.latest: GradientError | None = None
        self.restart()

    def restart(self) -> None:
        """Another plan is in force."""
        self._num_calls = 0
        self._parts: list[list[Form]] = []
        self._measured: list[Form] = []
        self._square = 0.0

    def due_part(self, split: Callable[[], list[list[Form]]]) -> list[Form] | None:
        """To be asked once for each call of a plan that rounds: the values that this call is to measure, None if it is no sample, none of
        them if ``split``, which gives the parts of a sample, finds no room for any."""
        self._num_calls += 1
        if self._num_calls % EVERY == FIRST:
            self._parts, self._measured, self._square = split(), [], 0.0
            if not self._parts:
                return []
        return self._parts.pop(0) if self._parts else None

    def note(self, relative: float, part: Sequence[Form], problem: Problem, rounded: Sequence[Form]) -> GradientError | None:
        """Adds what one step has measured of ``part`` of the ``rounded`` values. The error, once it is known or above the limit."""
        if math.isnan(relative):
            log.info("the gradient error was not measured: gradients of this step are not finite")
            self._parts, self._num_calls = [], FIRST - RETRY
            return None
        self._square += relative**2
        self._measured += part
        if self._parts and math.sqrt(self._square) <= self.limit:
            return None
        self._parts = []
        part_bytes, whole_bytes = (sum(problem.values[form.value].size_bytes for form in forms) for forms in (self._measured, rounded))
        is_enough = math.sqrt(self._square) > self.limit
        self.latest = GradientError(
            relative=math.sqrt(self._square * (1 if is_enough else whole_bytes / part_bytes)),
            num_values=len(self._measured),
            of_values=len(rounded),
            formats=tuple(name for name in LOSSY if any(form.format == name for form in rounded)),
        )
        log.info("gradient error: %s, at most %g allowed", self.latest, self.limit)
        return self.latest


def rounded_forms(problem: Problem, saved: frozenset[int]) -> list[Form]:
    """The forms of a plan whose values come back rounded."""
    return [form for stored in sorted(saved) if (form := problem.form_of.get(stored)) is not None and form.error]


def parts_of_sample(problem: Problem, rounded: Sequence[Form], room_bytes: int | None) -> list[list[Form]]:
    """What each step of a sample keeps whole, at most ``room_bytes`` (None: no limit): of each kind of values one, then another, ..."""
    forms = {form.value: form for form in rounded}
    kinds = value_classes(problem, forms)
    turns = [forms[kind[turn]] for turn in range(max(map(len, kinds), default=0)) for kind in kinds if turn < len(kind)]
    parts: list[list[Form]] = []
    left_bytes = 0
    for form in turns:
        size_bytes = problem.values[form.value].size_bytes
        if room_bytes is not None and size_bytes > room_bytes:
            continue
        if not parts or (room_bytes is not None and size_bytes > left_bytes):
            parts.append([])
            left_bytes = room_bytes or 0
        parts[-1].append(form)
        left_bytes -= size_bytes
    return parts[:MAX_PARTS]


def held_bytes(simulator: Simulator, saved: frozenset[int]) -> int:
    """By how much the peak grows where what is saved stays to the end of backward, for a second one to read."""
    replay = simulator.replay(saved)
    begin, kernels = len(replay.forward), replay.forward + replay.backward
    values = simulator.problem.values
    crossing = simulator.normalize(saved)
    change = [0] * (len(kernels) + 1)
    for value, first, last in replay.intervals:
        if value not in crossing and not values[value].kind.is_static:
            change[first] += values[value].size_bytes
            change[(len(kernels) - 1 if last is None else last) + 1] -= values[value].size_bytes
    live = [live + kernel.workspace_bytes for live, kernel in zip(accumulate(change[:-1]), kernels, strict=True)]
    all_saved = sum(values[value].size_bytes for value in crossing)
    peak_bytes = simulator.evaluate(saved).peak_bytes - simulator.problem.total_static_bytes
    return max(0, all_saved + max(live[begin:], default=0) - peak_bytes)


def sample_bytes(simulator: Simulator, plan: Plan, budget_bytes: int | None) -> int:
    """What a sample is given of the budget: that what is saved stays, and one value of each kind, those at most `SAMPLE_SHARE` of what is
    not held anyway, but the smallest at least."""
    if budget_bytes is None:
        return 0
    problem, rounded = simulator.problem, rounded_forms(simulator.problem, plan.saved)
    sizes = [problem.values[kind[0]].size_bytes for kind in value_classes(problem, [form.value for form in rounded])]
    most_bytes = int(SAMPLE_SHARE * (budget_bytes - problem.total_static_bytes))
    return held_bytes(simulator, plan.saved) + max(min(sizes), min(sum(sizes), most_bytes))


def stores_of(captured: Captured, forms: Sequence[Form], codecs: Mapping[int, tuple[int, Codec | Slice]]) -> dict[str, tuple[str, Store]]:
    """By the name of what is stored, the name of the value and what stores it."""
    stores: dict[str, tuple[str, Store]] = {}
    for form in forms:
        node, codec = captured.nodes[form.value], codecs[form.stored][1]
        assert node is not None
        graph, like = fx.Graph(), node.meta["val"]
        value = graph.placeholder(node.name)
        value.meta["val"] = like
        graph.output(codec.store(Writer(graph, like, fused=False), value))
        stores[stored_name(node.name, codec.format)] = (node.name, fx.GraphModule({}, graph))
    return stores


def placeholder_names(module: fx.GraphModule) -> tuple[str, ...]:
    """What a graph is given, in order."""
    return tuple(node.name for node in module.graph.nodes if node.op == "placeholder")


def compared(
    exact: torch_private.Boxed,
    exact_given: Sequence[str],
    rounded: torch_private.Boxed,
    rounded_given: Sequence[str],
    stores: Mapping[str, tuple[str, Store]],
    note: Callable[[float], None],
) -> torch_private.Boxed:
    """A backward that runs ``rounded`` and then ``exact``, notes the relative error, and returns what ``exact`` does.

    ``exact_given`` and ``rounded_given`` name what the two are given, in order.
    """

    def run(args: list[Any]) -> Any:
        values = dict(zip(exact_given, args, strict=True))
        given = [values[name] if name in values else _stored(stores[name], values) for name in rounded_given]
        del values
        found = sketches(rounded(given))
        results = exact(args)
        note(relative_error(found, sketches(results)))
        return results

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's mark of this calling convention
    return run


def _stored(store: tuple[str, Store], values: Mapping[str, Any]) -> Tensor:
    name, run = store
    return run(values[name])
