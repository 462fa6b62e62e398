"""The cut against every saved set of small problems, the sweep against the envelope of all their lines, and shapes that are hard to cut."""

from __future__ import annotations

from itertools import combinations

import pytest
from brute_force import every_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import Builder, chain, problems, transformer

from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers import mincut
from dyngran.passes.solvers.mincut import Cut, Network, Sweeps, blend, make_terms, sweep

SLOW = [HealthCheck.too_slow]


def every_cut(simulator: Simulator, network: Network) -> list[Cut]:
    candidates = simulator.candidates
    return [network.line_of(frozenset(chosen)) for count in range(len(candidates) + 1) for chosen in combinations(candidates, count)]


def objective(simulator: Simulator, saved: frozenset[int]) -> tuple[int, float]:
    """Bytes and cost of what the simulator's own schedule saves and runs again: without fusion, by its rules alone."""
    problem = simulator.problem
    crossing = simulator.normalize(saved)
    _, backward = simulator.schedule(saved)
    num_bytes = sum(problem.values[value].size_bytes for value in crossing - problem.forward_outputs)
    return num_bytes, sum(problem.ops[index].cost_us for index in backward if problem.ops[index].side is Side.FORWARD)


@settings(max_examples=80, deadline=None, suppress_health_check=SLOW)
@given(problem=problems(max_forward=6), weight_bytes=st.integers(0, 9), weight_us=st.integers(0, 9))
def test_a_cut_is_the_cheapest_of_all_saved_sets(problem: Problem, weight_bytes: int, weight_us: int) -> None:
    simulator = Simulator(problem)
    network = Network(simulator, make_terms(simulator))
    least = min(cut.price(weight_bytes, weight_us) for cut in every_cut(simulator, network))
    found = network.solve(float(weight_bytes), float(weight_us))
    assert network.line_of(found.saved).price(weight_bytes, weight_us) == pytest.approx(least, rel=1e-5, abs=1e-9)


@settings(max_examples=80, deadline=None, suppress_health_check=SLOW)
@given(problem=problems(max_forward=7, fused=False), data=st.data())
def test_a_line_is_what_the_schedule_saves_and_runs_again(problem: Problem, data: st.DataObject) -> None:
    simulator = Simulator(problem)
    saved = data.draw(st.frozensets(st.sampled_from(simulator.candidates))) if simulator.candidates else frozenset()
    line = Network(simulator, make_terms(simulator)).line_of(saved)
    assert line.saved == simulator.normalize(saved)
    assert (line.num_bytes, line.cost_us) == objective(simulator, saved)


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(problem=problems(max_forward=6), prices=st.lists(st.floats(0.001, 1000), min_size=3, max_size=3))
def test_a_sweep_is_the_lower_envelope_of_all_lines(problem: Problem, prices: list[float]) -> None:
    simulator = Simulator(problem)
    network = Network(simulator, make_terms(simulator))
    found = sweep(network, max_cuts=1000)
    everything = every_cut(simulator, network)
    for price in prices:
        least = min(cut.price(price, 1.0) for cut in everything)
        assert min(cut.price(price, 1.0) for cut in found) == pytest.approx(least, rel=1e-4, abs=1e-9)
    assert [cut.num_bytes for cut in found] == sorted((cut.num_bytes for cut in found), reverse=True)


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(problem=problems(max_forward=6), slack=st.integers(0, 12))
def test_repair_never_leaves_the_budget_and_never_beats_the_optimum(problem: Problem, slack: int) -> None:
    simulator = Simulator(problem)
    optimum = every_plan(simulator)
    budget_bytes = min(outcome.peak_bytes for outcome in optimum) + slack
    best = min(outcome.time_us for outcome in optimum if outcome.peak_bytes <= budget_bytes)
    known = Sweeps(simulator)
    if any(simulator.native.evaluate(mask)[1].peak_bytes + problem.total_static_bytes <= budget_bytes for mask in known.masks()):
        for mask in known.near(budget_bytes, num_sweeps=3):
            outcome = simulator.evaluate(simulator.native.members(mask))
            assert outcome.peak_bytes <= budget_bytes
            assert outcome.time_us >= best


@pytest.mark.parametrize("fused", [False, True])
def test_budgets_of_a_transformer_are_met_and_used(fused: bool) -> None:
    simulator = Simulator(transformer(8, fused=fused))
    static = simulator.problem.total_static_bytes
    free = simulator.evaluate(simulator.default_saved)
    times = []
    for share in (0.9, 0.7, 0.5):
        budget_bytes = static + int(share * (free.peak_bytes - static))
        times.append(mincut.solve(simulator.problem, budget_bytes).time_us)
    everything = simulator.evaluate(frozenset()).time_us
    assert times == sorted(times)
    assert times[-1] < (free.time_us + everything) / 2


def test_sweeps_depend_on_no_budget() -> None:
    simulator = Simulator(transformer(3))
    known = Sweeps(simulator)
    assert list(known.masks()) == list(Sweeps(simulator).masks())
    budget_bytes = simulator.evaluate(simulator.default_saved).peak_bytes * 3 // 4
    again = list(mincut.propose(simulator, budget_bytes=budget_bytes, known=known))
    assert again == list(mincut.propose(simulator, budget_bytes=budget_bytes))


def test_few_flows_leave_out_small_corners_only() -> None:
    simulator = Simulator(transformer(4, fused=True))
    network = Network(simulator, make_terms(simulator))
    everything, some = sweep(network, max_cuts=500), sweep(network, max_cuts=6)
    assert len(some) <= 6 <= len(everything)
    assert (some[0].num_bytes, some[-1].num_bytes) == (everything[0].num_bytes, everything[-1].num_bytes)
    for price in (1e-9, 1e-6, 1e-3):
        assert min(cut.price(price, 1.0) for cut in some) <= 1.5 * min(cut.price(price, 1.0) for cut in everything)


@settings(max_examples=50, deadline=None)
@given(masks=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=10, max_size=10), end=st.integers(0, 10))
def test_a_blend_changes_sides_once(masks: list[tuple[bool, bool]], end: int) -> None:
    low, high = (bytes(mask) for mask in zip(*masks, strict=True))
    assert list(blend(low, high, end)) == [low[v] if v < end else high[v] for v in range(10)]


@pytest.mark.parametrize(("huge", "tiny"), [(2**60, 1), (10**15, 0), (1, 1)])
def test_capacities_of_any_scale_fit_the_flow(huge: int, tiny: int) -> None:
    build = Builder()
    current = build.given(0, Kind.INPUT)
    made = []
    for place in range(6):
        current = build.op([current], huge if place % 2 else tiny, cost_us=1e9 if place % 3 else 1e-6)
        made.append(current)
    build.outputs.add(build.op([current], 0))
    gradient = build.given(0, Kind.TANGENT)
    for value in reversed(made):
        gradient = build.op([value, gradient], 0, side=Side.BACKWARD, kind=Kind.TEMPORARY)
    build.gradients.add(gradient)
    simulator = Simulator(build.build())
    network = Network(simulator, make_terms(simulator))
    everything = every_cut(simulator, network)
    for cut in sweep(network):
        assert network.line_of(cut.saved) == cut
    for price in (1e-12, 1e-6, 1.0):
        least = min(cut.price(price, 1.0) for cut in everything)
        assert network.solve(price, 1.0).price(price, 1.0) == pytest.approx(least, rel=1e-5)


def test_long_chains_are_cut_quickly_enough_to_count() -> None:
    simulator = Simulator(chain(600))
    network = Network(simulator, make_terms(simulator))
    assert sweep(network)[-1].num_bytes == 0
    assert sum(1 for _ in mincut.propose(simulator, budget_bytes=300)) < 400
