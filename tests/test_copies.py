"""Slots on the link between device and host: free ones are found, copies meet their times, and the first to choose get theirs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Tape, problems, storable

from dyngran.passes.copies import HostLink, _Link, plan_copies
from dyngran.passes.forms import Offer, Transfer, with_forms
from dyngran.passes.plan import Action
from dyngran.passes.problem import Problem, Side
from dyngran.passes.simulate import Simulator

SLOTS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4)), max_size=6)


def link_of(bytes_per_us: float = 1.0) -> HostLink:
    return HostLink(to_host_bytes_per_us=bytes_per_us, to_device_bytes_per_us=bytes_per_us, latency_us=0.0, source="test")


@settings(max_examples=500, deadline=None)
@given(slots=SLOTS, time=st.integers(0, 25), length=st.integers(1, 5))
def test_the_slot_found_is_the_first_and_the_last_that_is_free(slots: Sequence[tuple[int, int]], time: int, length: int) -> None:
    link, busy = _Link(0.0, 25.0), set()
    for begin, taken in slots:
        span = set(range(begin, begin + taken))
        if busy.isdisjoint(span):
            busy |= span
            link.take(begin, begin + taken)

    def is_free(begin: int) -> bool:
        return begin >= 0 and begin + length <= 25 and busy.isdisjoint(range(begin, begin + length))

    assert link.first_after(time, length) == next((begin for begin in range(time, 26) if is_free(begin)), None)
    assert link.last_before(time, length) == next((end for end in range(time, -1, -1) if is_free(end - length)), None)


@settings(max_examples=300, deadline=None)
@given(problem=problems(), speed=st.floats(0.2, 20.0), limit=st.integers(0, 30), data=st.data())
def test_copies_keep_to_the_graph_and_to_the_memory_of_the_host(problem: Problem, speed: float, limit: int, data: st.DataObject) -> None:
    simulator = Simulator(problem)
    values = data.draw(st.permutations([value for value in storable(problem) if problem.values[value].size_bytes]))
    host_bytes = {value: 2 * problem.values[value].size_bytes for value in values}
    copies = plan_copies(simulator, values, link_of(speed), host_bytes=host_bytes, limit_bytes=limit)
    assert sum(host_bytes[copy.value] for copy in copies) <= limit
    assert len({copy.value for copy in copies}) == len(copies)
    for copy in copies:
        producer = problem.values[copy.value].producer
        assert producer is not None and producer <= copy.start <= copy.done
        assert problem.ops[copy.done].side is not Side.BACKWARD and problem.ops[copy.fetch].side is Side.BACKWARD
        assert copy.copy_us > 0
    nothing = Transfer(cost_us=0.0)
    offers = [
        Offer(
            value=copy.value,
            action=Action.OFFLOAD,
            format="host",
            size_bytes=0,
            store=nothing,
            load=nothing,
            stored_after=copy.done,
            fetch=copy.fetch,
            copy_us=copy.copy_us,
        )
        for copy in copies
    ]
    formed = with_forms(problem, offers)
    moved = Simulator(formed).evaluate({*simulator.default_saved.difference(copy.value for copy in copies), *formed.form_of})
    assert moved.saved_bytes <= simulator.evaluate(simulator.default_saved).saved_bytes
    assert all(formed.values[form.stored].size_bytes == 0 for form in formed.forms)


def chain(num_layers: int) -> Problem:
    """Layers that each make a value of 8 bytes in 2 us, and read it again in backward."""
    tape = Tape()
    value = tape.build.given(8)
    for _ in range(num_layers):
        value = tape.op("mm", [value], 8, cost_us=2.0, weight=tape.build.given(1))
    return tape.finish([value])


def test_a_slow_link_has_time_for_as_many_as_fit_beside_the_kernels() -> None:
    problem = chain(8)
    values = storable(problem)
    simulator = Simulator(problem)
    plenty = dict.fromkeys(values, 8)

    def offered(speed: float, order: Sequence[int]) -> list[int]:
        return sorted(copy.value for copy in plan_copies(simulator, order, link_of(speed), host_bytes=plenty, limit_bytes=1000))

    fast, slow = offered(1000.0, values), offered(2.0, values)
    assert len(fast) == len(values) - 1 and max(values) not in fast  # the last one is made when forward ends
    assert 0 < len(slow) < len(fast)
    late = values[len(values) // 2]
    assert late in offered(2.0, [late, *values])  # who chooses first
    assert not offered(0.01, values)


@pytest.mark.parametrize("limit", [0, 7, 8, 16])
def test_the_host_s_memory_is_a_limit(limit: int) -> None:
    problem = chain(8)
    values = storable(problem)
    copies = plan_copies(Simulator(problem), values, link_of(1000.0), host_bytes=dict.fromkeys(values, 8), limit_bytes=limit)
    assert len(copies) == limit // 8
