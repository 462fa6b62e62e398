"""The classic policies: what each keeps, the numbers of the papers they come from, and graphs that are no chains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from math import isqrt

import pytest
from brute_force import every_plan, naive_replay
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import Builder, chain, problems, transformer

from dyngran.passes.plan import Schedule
from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.regions import find_crossings
from dyngran.passes.schedule import check_schedule, replay_schedule
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers import dtr, every, mincut, mutwo, region, revolve, selective, sqrt
from dyngran.passes.solvers.boundaries import crossing_values, natural_boundaries, values_after

SLOW = [HealthCheck.too_slow]
POLICIES = {module.__name__.rsplit(".", 1)[1]: module for module in (dtr, every, mincut, mutwo, region, revolve, selective, sqrt)}


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(problem=problems(max_forward=6), slack=st.one_of(st.none(), st.integers(0, 12)), name=st.sampled_from(sorted(POLICIES)))
def test_whatever_is_proposed_can_run_and_is_never_better_than_the_optimum(problem: Problem, slack: int | None, name: str) -> None:
    simulator = Simulator(problem)
    optimum = every_plan(simulator)
    budget_bytes = None if slack is None else min(outcome.peak_bytes for outcome in optimum) + slack
    for proposal in POLICIES[name].propose(simulator, budget_bytes=budget_bytes):
        if isinstance(proposal, Schedule):
            assert not problem.fused
            check_schedule(problem, proposal)
            assert replay_schedule(problem, proposal).time_us >= min(outcome.time_us for outcome in optimum)
            continue
        outcome = simulator.evaluate(proposal)
        assert outcome.time_us >= min(other.time_us for other in optimum if other.peak_bytes <= outcome.peak_bytes)
        if not problem.fused:
            assert naive_replay(problem, proposal).peak_bytes == outcome.peak_bytes


def no_candidates() -> Problem:
    build = Builder()
    build.outputs.add(build.op([build.given(3, Kind.INPUT)], 2))
    build.gradients.add(build.op([build.given(1, Kind.TANGENT)], 1, side=Side.BACKWARD))
    return build.build()


def no_ops() -> Problem:
    return Builder().build()


def fan_out(width: int = 300) -> Problem:
    """One value read by many ops, all of whose results backward reads in the same order."""
    build = Builder()
    trunk = build.op([build.given(4, Kind.INPUT)], 4, cost_us=9.0)
    leaves = [build.op([trunk], 2) for _ in range(width)]
    build.outputs.add(build.op(leaves, 1))
    gradient = build.given(1, Kind.TANGENT)
    for leaf in leaves:
        gradient = build.op([leaf, gradient], 1, side=Side.BACKWARD, kind=Kind.TEMPORARY)
    build.gradients.add(gradient)
    return build.build()


def diamonds(count: int = 120) -> Problem:
    """2^count paths from the input to the end."""
    build = Builder()
    current = build.op([build.given(1, Kind.INPUT)], 4)
    tape = []
    for _ in range(count):
        left, right = build.op([current], 4, cost_us=2.0), build.op([current], 3)
        tape += [left, right]
        current = build.op([left, right], 4)
        tape.append(current)
    build.outputs.add(build.op([current], 1))
    gradient = build.given(1, Kind.TANGENT)
    for value in reversed(tape):
        gradient = build.op([value, gradient], 1, side=Side.BACKWARD, kind=Kind.TEMPORARY)
    build.gradients.add(gradient)
    return build.build()


def shared(num_layers: int = 80, *, pinned: bool = False) -> Problem:
    """A mask that every layer reads, and a value of no bytes between any two layers."""
    build = Builder()
    mask = build.op([build.given(1, Kind.INPUT)], 9, pinned="random" if pinned else "", never_saved=not pinned)
    current = build.given(2, Kind.INPUT)
    tape = []
    for _ in range(num_layers):
        nothing = build.op([current], 0, cost_us=0.0)
        current = build.op([nothing, mask], 5, cost_us=3.0)
        tape += [nothing, current]
    build.outputs.add(build.op([current], 1))
    gradient = build.given(1, Kind.TANGENT)
    for value in reversed(tape):
        gradient = build.op([value, mask, gradient], 2, side=Side.BACKWARD, kind=Kind.TEMPORARY)
    build.gradients |= {gradient, tape[7]}
    return build.build()


def late_skips(count: int = 60) -> Problem:
    """A U: the second half reads the first one's results in reverse, and only backward reads what FREE ops make of them."""
    build = Builder()
    current = build.given(1, Kind.INPUT)
    down = []
    for _ in range(count):
        current = build.op([current], 5)
        down.append(current)
    for skip in reversed(down):
        current = build.op([current, skip], 5)
    build.outputs.add(build.op([current], 0))
    masks = [build.op([skip], 1, side=Side.FREE) for skip in down]
    gradient = build.given(1, Kind.TANGENT)
    for mask in masks:
        gradient = build.op([mask, gradient], 5, side=Side.BACKWARD, kind=Kind.TEMPORARY)
    build.gradients |= {gradient, masks[3]}
    return build.build()


ADVERSARIAL: dict[str, Callable[[], Problem]] = {
    "no candidates": no_candidates,
    "no ops": no_ops,
    "fan out": fan_out,
    "diamonds": diamonds,
    "shared": shared,
    "shared and pinned": lambda: shared(pinned=True),
    "late skips": late_skips,
    "chain": lambda: chain(400),
}


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("shape", sorted(ADVERSARIAL))
def test_adversarial_graphs_are_planned_in_bounded_work(shape: str, name: str) -> None:
    problem = ADVERSARIAL[shape]()
    simulator = Simulator(problem)
    full_bytes = simulator.evaluate(simulator.default_saved).peak_bytes
    for budget_bytes in (None, full_bytes // 2):
        proposals = list(POLICIES[name].propose(simulator, budget_bytes=budget_bytes))
        assert len(proposals) < 700
        for proposal in proposals:
            if isinstance(proposal, Schedule):
                check_schedule(problem, proposal)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_every_nth_block_is_what_a_person_writes(stride: int) -> None:
    """The block's input is kept: with blocks by label, that is the residual stream after every N-th block."""
    problem = transformer(7)
    last = {op.region: op for op in problem.ops if op.side is Side.FORWARD and op.region != "head"}
    streams = [op.writes[0] for op in last.values()]
    proposed = list(every.propose(Simulator(problem)))
    assert frozenset(streams[stride - 1 :: stride]) in proposed
    assert len(proposed) == 2 * 7


def test_many_regions_are_thinned() -> None:
    assert len(list(every.propose(Simulator(chain(2000))))) < 8 * isqrt(2000)


@pytest.mark.parametrize("length", [16, 30, 100])
def test_sqrt_keeps_about_sqrt_boundaries(length: int) -> None:
    simulator = Simulator(chain(length))
    root = isqrt(length)
    outcomes = [simulator.evaluate(saved) for saved in sqrt.propose(simulator)]
    assert all(root // 2 <= len(outcome.saved) <= 2 * root for outcome in outcomes)
    assert min(outcome.peak_bytes for outcome in outcomes) <= 2 * root + 2
    assert all(outcome.num_recomputed <= length for outcome in outcomes)


def test_the_plan_with_budget_keeps_a_boundary_once_enough_was_made() -> None:
    problem = chain(12)
    crossings = find_crossings(problem)
    boundaries = tuple(range(12))
    chosen, kept_bytes, largest_bytes = sqrt._plan_with_budget(crossings, boundaries, [1] * 12 + [0], 3)
    assert chosen == (3, 7, 11)  # four unit values exceed three
    assert (kept_bytes, largest_bytes) == (3, 4)


@settings(max_examples=60, deadline=None)
@given(problem=problems(max_forward=7), data=st.data())
def test_kept_values_are_those_that_cross(problem: Problem, data: st.DataObject) -> None:
    crossings = find_crossings(problem)
    boundaries = data.draw(st.lists(st.integers(0, max(0, len(crossings.ops) - 2)), unique=True))
    assert crossing_values(crossings, boundaries) == frozenset[int]().union(*(crossings.at(boundary) for boundary in boundaries))
    simulator = Simulator(problem)
    assert values_after(simulator, crossings, -1) | _constants(problem, simulator) == simulator.default_saved


def _constants(problem: Problem, simulator: Simulator) -> frozenset[int]:
    """What FREE ops make of nothing that forward makes."""
    free = {write for op in problem.ops if op.side is Side.FREE for write in op.writes}
    return simulator.default_saved & free


def test_leaving_the_last_regions_out_costs_less_with_every_region() -> None:
    problem = transformer(6)
    simulator = Simulator(problem)
    crossings = find_crossings(problem)
    boundaries = natural_boundaries(problem, crossings)
    times = [
        simulator.evaluate(crossing_values(crossings, boundaries[:end]) | values_after(simulator, crossings, boundaries[end - 1])).time_us
        for end in range(1, len(boundaries) + 1)
    ]
    assert all(earlier < later for earlier, later in pairwise(times))


def test_selective_keeps_all_matmuls_or_every_second() -> None:
    problem = transformer(3)
    simulator = Simulator(problem)
    matmuls = sorted(
        op.writes[0] for op in problem.ops if op.side is Side.FORWARD and op.target == "mm" and op.writes[0] in simulator.candidates
    )
    others = {op.writes[0] for op in problem.ops if op.side is Side.FORWARD and op.target == "attention"}
    small = region.small_values(simulator)
    proposed = set(selective.propose(simulator))
    assert frozenset(matmuls) | others | small in proposed
    assert frozenset(matmuls[::2]) | others | small in proposed


@cache
def least_advances(length: int, slots: int) -> int:
    """Regions run forward by the best of all reversals: try every place for the next state."""
    if length == 1:
        return 0
    if slots == 1:
        return length * (length - 1) // 2
    return min(middle + least_advances(length - middle, slots - 1) + least_advances(middle, slots) for middle in range(1, length))


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 7])
def test_the_binomial_split_is_the_best_of_all(slots: int) -> None:
    def advances(length: int, free: int) -> int:
        if length == 1 or free == 1:
            return length * (length - 1) // 2
        middle = revolve.split(length, free)
        assert 1 <= middle < length
        return middle + advances(length - middle, free - 1) + advances(middle, free)

    for length in range(1, 40):
        assert revolve.num_advances(length, slots) == least_advances(length, slots) == advances(length, slots)


@pytest.mark.parametrize(("slots", "repeats"), [(1, 4), (2, 1), (2, 3), (3, 2), (3, 3), (4, 3), (6, 2)])
def test_revolve_reverses_the_longest_chain_with_its_slots_and_repeats(slots: int, repeats: int) -> None:
    """C(s + r, s) links, none run more than r times; s - 1 links are held (the input is static) beside the two of the link at hand."""
    length = revolve.longest_chain(slots, repeats)
    problem = chain(length)
    crossings = find_crossings(problem)
    schedule = revolve._Chain(problem, crossings, natural_boundaries(problem, crossings)).schedule(slots)
    check_schedule(problem, schedule)
    outcome = replay_schedule(problem, schedule)
    runs = Counter((*schedule.forward, *schedule.backward))
    assert max(runs[index] for index in range(length)) == repeats
    assert outcome.num_recomputed == revolve.num_advances(length, slots) - (length - 1)  # the first sweep is forward itself
    assert outcome.peak_bytes == slots + 1
    assert revolve.repeats_for(length + 1, slots) == repeats + 1


def test_revolve_needs_less_than_any_plan_that_makes_values_once() -> None:
    problem = chain(35)
    simulator = Simulator(problem)
    outcomes = [replay_schedule(problem, found) for found in revolve.propose(simulator) if isinstance(found, Schedule)]
    once = min(simulator.evaluate(saved).peak_bytes for saved in sqrt.propose(simulator))
    assert min(outcome.peak_bytes for outcome in outcomes) < once


def test_with_fusion_revolve_keeps_the_states_of_its_first_sweep() -> None:
    assert revolve.first_states(10, 2) == [4] or revolve.first_states(10, 2) == [6]
    simulator = Simulator(transformer(9, fused=True))
    proposed = list(revolve.propose(simulator))
    assert all(isinstance(saved, frozenset) for saved in proposed)
    assert len(set(map(len, proposed))) > 5


@settings(max_examples=80, deadline=None, suppress_health_check=SLOW)
@given(problem=problems(max_forward=8, fused=False), share=st.integers(1, 12))
def test_dtr_keeps_its_limit_or_stops(problem: Problem, share: int) -> None:
    simulator = Simulator(problem)
    static_bytes = problem.total_static_bytes
    full_bytes = simulator.evaluate(simulator.default_saved).peak_bytes - static_bytes
    limit_bytes = full_bytes * share // 10
    assert dtr.run(problem, 1 << 50) is not None
    found = dtr.run(problem, limit_bytes)
    if found is None:
        return
    schedule, saved = found
    check_schedule(problem, schedule)
    outcome = replay_schedule(problem, schedule)
    assert outcome.peak_bytes - static_bytes <= limit_bytes
    assert saved <= outcome.saved


def test_dtr_without_pressure_makes_everything_once() -> None:
    problem = transformer(3)
    simulator = Simulator(problem)
    found = dtr.run(problem, 1 << 50)
    assert found is not None
    assert replay_schedule(problem, found[0]).num_recomputed == 0
    assert simulator.normalize(found[1]) == simulator.default_saved


def test_dtr_evicts_as_worked_out_by_hand() -> None:
    """After three links of 4, 4 and 8 bytes and 1, 8 and 2 us under 14 bytes, the third needs room: of the first (1 us / 4 bytes, idle for
    8 us) and the second, which is in use, the first goes. In backward it is made again for the last gradient."""
    build = Builder()
    source = build.given(1, Kind.INPUT)
    a = build.op([source], 4, cost_us=1.0)
    b = build.op([a], 4, cost_us=8.0)
    c = build.op([b], 8, cost_us=2.0)
    build.outputs.add(build.op([c], 0, cost_us=1.0))
    gradient = build.given(0, Kind.TANGENT)
    for value in (c, b, a):
        gradient = build.op([value, gradient], 1, side=Side.BACKWARD, kind=Kind.TEMPORARY)
    build.gradients.add(gradient)
    problem = build.build()
    found = dtr.run(problem, 14)
    assert found is not None
    assert found[1] == {b, c}
    assert found[0].backward == (4, 5, 0, 6)
    assert dtr.run(problem, 11) is None  # b and c must be there at once


def test_neighbourhoods_grow_and_shrink() -> None:
    """In a chain a - b - c - d of 1 us each: with b evicted its neighbours cost 2; with c too, a and d cost 3; b made again leaves 1."""
    problem = chain(4)
    near = dtr._Neighbourhood(problem, [value.producer is not None for value in problem.values])
    a, b, c, d = (op.writes[0] for op in problem.ops[:4])
    near.leave(b)
    near.refresh()
    assert (near.cost_us[a], near.cost_us[c], near.cost_us[d]) == (2.0, 2.0, 1.0)
    near.leave(c)
    near.refresh()
    assert (near.cost_us[a], near.cost_us[d]) == (3.0, 3.0)
    near.arrive(b)
    near.refresh()
    assert (near.cost_us[a], near.cost_us[b], near.cost_us[d]) == (1.0, 2.0, 2.0)
