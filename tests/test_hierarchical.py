"""The hierarchical planner: where it cuts, what it plans once, whether its budgets hold, and whether regions add up to the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random

import pytest
from brute_force import naive_replay
from hypothesis import HealthCheck, given, settings
from problems import Builder, chain, conv_net, densenet, encoder_decoder, layered, problems, transformer, two_towers, unet

from dyngran.passes.local import LocalProblem
from dyngran.passes.native.graph import NativeSearch
from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.regions import far_values, find_crossings, find_separators, nested_boundaries, region_numbers
from dyngran.passes.simulate import Simulator, free_transient
from dyngran.passes.solvers import hierarchical
from dyngran.passes.solvers.hierarchical import Hierarchy, propose

SLOW = [HealthCheck.too_slow]
FAMILIES: dict[str, Callable[[], Problem]] = {
    "transformer": lambda: transformer(3),
    "unet": lambda: unet(4),
    "encoder and decoder": lambda: encoder_decoder(3),
    "densenet": lambda: densenet(3, 6),
    "two towers": lambda: two_towers(3),
    "conv net": lambda: conv_net(6),
    "irregular": lambda: layered(0, 40),
    "chain": lambda: chain(40),
}


def region_at(problem: Problem, boundary: int) -> tuple[str, str]:
    """Labels on both sides of a boundary."""
    ops = find_crossings(problem).ops
    return problem.ops[ops[boundary]].region, problem.ops[ops[boundary + 1]].region


@cache
def hierarchy_of(name: str) -> tuple[Simulator, Hierarchy]:
    simulator = Simulator(FAMILIES[name]())
    return simulator, Hierarchy(simulator)


def test_a_unet_has_no_narrow_place_but_its_ends_so_that_its_regions_are_even_parts() -> None:
    """What its skips carry grows as fast as its levels shrink: no boundary is 1.5 times narrower than those on both of its sides."""
    problem = FAMILIES["unet"]()
    crossings = find_crossings(problem)
    assert len(find_separators(crossings)) == 1
    inside = crossings.num_bytes[4:-4]
    assert max(inside) <= 1.5 * min(inside[8:-8])
    regions = hierarchy_of("unet")[1].regions
    skips = {value for op in problem.ops if op.target == "concatenate" for value in op.reads[1:]}
    assert len(skips) == 4
    assert regions.num_regions >= 4
    assert sum(value in regions.far for value in skips) >= 2


@pytest.mark.parametrize("name", ["encoder and decoder", "two towers", "densenet", "conv net"])
def test_separators_stand_where_few_bytes_cross(name: str) -> None:
    problem = FAMILIES[name]()
    crossings = find_crossings(problem)
    separators = find_separators(crossings)
    labels = {op.region for op in problem.ops if op.side is Side.FORWARD and op.region}
    assert len(separators) >= 0.5 * len({label for label in labels if not label.startswith(("stem", "head", "transitions"))})
    around = [max(crossings.num_bytes[max(0, boundary - 6) : boundary + 7]) for boundary in separators]
    assert all(crossings.num_bytes[boundary] <= most / 1.5 for boundary, most in zip(separators, around, strict=True))


def test_between_the_layers_of_a_decoder_two_values_cross_of_which_one_comes_from_far_away() -> None:
    problem = FAMILIES["encoder and decoder"]()
    crossings = find_crossings(problem)
    regions = Hierarchy(Simulator(problem)).regions
    in_decoder = [
        b for b in find_separators(crossings) if region_at(problem, b)[1].startswith("decoder") and region_at(problem, b)[0] != ""
    ]
    in_decoder = [b for b in in_decoder if region_at(problem, b)[0].startswith("decoder")]
    assert len(in_decoder) >= 3
    for boundary in in_decoder[:-1]:
        assert sorted(value in regions.far for value in crossings.at(boundary)) in ([False, True], [True])


@pytest.mark.parametrize(("make", "few", "many"), [(transformer, 6, 24), (conv_net, 8, 24), (encoder_decoder, 4, 12)])
def test_layers_that_are_built_alike_are_planned_once(make: Callable[[int], Problem], few: int, many: int) -> None:
    small, large = Hierarchy(Simulator(make(few))), Hierarchy(Simulator(make(many)))
    assert large.regions.num_regions >= 2.5 * small.regions.num_regions
    assert large.num_kinds <= small.num_kinds + 1
    assert small.num_kinds < 4 * small.regions.num_regions


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_after_its_rounds_a_plan_keeps_the_budget(name: str, share: float) -> None:
    simulator, hierarchy = hierarchy_of(name)
    budget_bytes = int(share * free_transient(simulator))
    outcomes = [simulator.native.evaluate(mask)[1] for mask in hierarchy.plans(budget_bytes)]
    fitting = [outcome for outcome in outcomes if outcome.peak_bytes <= budget_bytes]
    assert fitting
    assert min(outcome.time_us for outcome in fitting) < simulator.evaluate(()).time_us
    assert max(outcome.peak_bytes for outcome in fitting) >= 0.85 * budget_bytes


def test_a_tight_plan_rebuilds_what_enters_a_region() -> None:
    """Nothing that crosses from one region to the next is saved there."""
    simulator, hierarchy = hierarchy_of("chain")
    crossings = find_crossings(simulator.problem)
    numbers = hierarchy.regions.numbers
    boundaries = [place for place, (op, after) in enumerate(pairwise(crossings.ops)) if numbers[op] != numbers[after]]
    plans = list(hierarchy.plans(free_transient(simulator) // 3))
    least = simulator.native.members(min(plans, key=lambda mask: simulator.native.evaluate(mask)[1].peak_bytes))
    rebuilt = [boundary for boundary in boundaries if not crossings.at(boundary) & least]
    assert 0 < len(rebuilt) < len(boundaries)


def no_candidates() -> Problem:
    build = Builder()
    build.outputs.add(build.op([build.given(3, Kind.INPUT)], 2))
    build.gradients.add(build.op([build.given(1, Kind.TANGENT)], 1, side=Side.BACKWARD))
    return build.build()


def one_region() -> Problem:
    build = Builder()
    made = build.op([build.given(3, Kind.INPUT)], 2)
    build.outputs.add(build.op([made], 0))
    build.gradients.add(build.op([made, build.given(1, Kind.TANGENT)], 1, side=Side.BACKWARD))
    return build.build()


@pytest.mark.parametrize("make", [no_candidates, one_region, lambda: Builder().build(), lambda: chain(1), lambda: chain(2)])
def test_very_small_problems_have_a_hierarchy(make: Callable[[], Problem]) -> None:
    simulator = Simulator(make())
    assert next(iter(propose(simulator))) == simulator.default_saved
    if simulator.candidates:
        hierarchy = Hierarchy(simulator)
        assert hierarchy.regions.num_regions >= 1
        free = free_transient(simulator)
        assert all(simulator.native.evaluate(mask)[1].peak_bytes >= 0 for mask in hierarchy.plans(free))


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(problem=problems(max_forward=7))
def test_any_problem_has_a_hierarchy(problem: Problem) -> None:
    simulator = Simulator(problem)
    if simulator.candidates:
        hierarchy = Hierarchy(simulator)
        masks = [mask for share in (1.0, 0.7) for mask in hierarchy.plans(int(share * free_transient(simulator)))]
        for mask in masks:
            saved = simulator.native.members(mask)
            assert simulator.normalize(saved) == saved


def local_sets(local: LocalProblem, made: list[int], seed: int) -> list[frozenset[int]]:
    """A few sets of the values that a region makes."""
    draw = Random(seed)
    return [frozenset(), frozenset(made), *(frozenset(value for value in made if draw.random() < 0.5) for _ in range(4))]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_two_options_of_a_region_differ_in_the_whole_step_as_they_do_in_the_region(name: str, size: int) -> None:
    """With everything else saved, what a region gains or loses is the same in its own problem and in the whole one."""
    simulator, hierarchy = hierarchy_of(name)
    problem, regions = simulator.problem, hierarchy.regions
    for first in range(regions.num_regions - size + 1):
        local = regions.local_problem(first, first + size)
        order = regions.values_in_order(first, first + size)
        ops = set(regions.group_ops(first, first + size))
        made = [place for place, value in enumerate(order) if problem.values[value].producer in ops]
        others = set(simulator.candidates) - {order[place] for place in made}
        search = NativeSearch(local.graph)
        differences = set()
        for saved in local_sets(local, made, first):
            crossing, found = search.evaluate(search.mask(saved))
            whole = simulator.evaluate(others | {order[place] for place in saved})
            differences.add(round(whole.time_us - found.time_us, 3))
            assert whole.saved & {order[place] for place in made} == {
                order[place] for place in search.members(crossing) - local.entering if place in set(made)
            }
        assert len(differences) == 1, (first, differences)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_local_problem_is_replayed_as_a_naive_replay_does(name: str) -> None:
    """What the whole problem was given counts no bytes in a local one, tangents neither."""
    regions = hierarchy_of(name)[1].regions
    for first in range(0, regions.num_regions, 3):
        local = regions.local_problem(first, min(first + 2, regions.num_regions))
        weightless = [replace(value, size_bytes=0) if value.kind is Kind.TANGENT else value for value in local.problem.values]
        plain = replace(local.problem, values=tuple(weightless))
        search = NativeSearch(local.graph)
        for saved in local_sets(local, [value.index for value in plain.values if value.producer is not None], first):
            found = search.evaluate(search.mask(saved))[1]
            truth = naive_replay(plain, saved)
            assert (found.peak_bytes, round(found.time_us, 6)) == (truth.peak_bytes, truth.time_us)
            assert found.num_recomputed == truth.num_recomputed
            assert max(found.forward_peak_bytes, found.backward_peak_bytes) == found.peak_bytes


def skipping_chain(length: int) -> Problem:
    """A chain of wide and narrow values; each of the first half is read again by its mirror image, as the skips of a U-Net are."""
    build = Builder()
    current, tape, skips = build.given(8, Kind.INPUT), [], []
    for place in range(length):
        reads = [current] if place < length // 2 else [current, skips.pop()]
        wide = build.op(reads, 64)
        current = build.op([wide], 8)
        tape.append((current, reads))
        if place < length // 2:
            skips.append(build.op([current], 64, target="skip", cost_us=0.1))
    build.outputs.add(current)
    gradient = build.given(8, Kind.TANGENT)
    for made, reads in reversed(tape):
        gradient = build.op([gradient, made, *reads], 8, side=Side.BACKWARD)
    build.gradients.add(gradient)
    return build.build()


def test_a_graph_whose_skips_pass_everywhere_is_cut_where_little_crosses_besides_them() -> None:
    problem = skipping_chain(24)
    crossings = find_crossings(problem)
    assert len(find_separators(crossings)) <= 2
    boundaries = nested_boundaries(problem, crossings, (), 45)
    assert len(boundaries) >= 12
    far = far_values(problem, region_numbers(problem, boundaries, crossings))
    assert {value for op in problem.ops if op.target == "skip" for value in op.writes} & far
    besides = [sum(problem.values[value].size_bytes for value in crossings.at(boundary) - far) for boundary in boundaries]
    assert sorted(besides)[len(besides) // 2] <= 8


def test_draws_that_lead_to_nothing_but_outputs_are_numbered() -> None:
    """What makes a random state stands outside of forward, and a draw that backward does not need reads it."""
    build = Builder()
    x = build.given(8, Kind.INPUT)
    gradient = build.given(8, Kind.TANGENT)
    state = build.op([], 2, side=Side.FREE, target="random state", pinned="drawn again from it")
    noise = build.op([x, state], 8)
    hidden = build.op([x], 8)
    last = build.op([hidden], 8)
    build.outputs |= {noise, last}
    build.gradients.add(build.op([gradient, hidden], 8, side=Side.BACKWARD))
    problem = build.build()
    crossings = find_crossings(problem)
    numbers = region_numbers(problem, (1,), crossings)
    assert len(numbers) == len(problem.ops)
    assert 0 in numbers and 1 in numbers


def test_only_large_regions_are_cut_again() -> None:
    problem = skipping_chain(24)
    crossings = find_crossings(problem)
    middle = (len(crossings.ops) // 2, len(crossings.ops) - 3)
    assert nested_boundaries(problem, crossings, middle, len(crossings.ops)) == middle
    assert set(nested_boundaries(problem, crossings, middle, 10)) > set(middle)


def test_a_budget_may_be_answered_without_values_from_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = skipping_chain(24)
    simulator = Simulator(problem)
    free = free_transient(simulator)
    fastest: dict[int, list[float]] = {}
    for max_drops in (0, 4):
        monkeypatch.setattr(hierarchical, "MAX_DROPS", max_drops)
        hierarchy = Hierarchy(simulator)
        for share in (0.9, 0.8, 0.7, 0.6, 0.5):
            outcomes = [simulator.native.evaluate(mask)[1] for mask in hierarchy.plans(int(share * free))]
            times = [one.time_us for one in outcomes if one.peak_bytes <= share * free]
            fastest.setdefault(max_drops, []).append(min(times, default=float("inf")))
    assert all(with_drops <= without for with_drops, without in zip(fastest[4], fastest[0], strict=True))
    assert fastest[4] != fastest[0], fastest
