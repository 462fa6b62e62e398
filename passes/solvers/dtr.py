"""Dynamic tensor rematerialization (Kirisame et al., ICLR 2021), simulated ahead of time on the joint graph's order.

The step is run op by op under a limit on live bytes. When an op needs room, values are evicted, the one of least

    h(v) = (cost of v + cost of its evicted neighbourhood) / (bytes of v * time since it was last used)

first; an operand that is not there is made again from what is, as deep as need be. The neighbourhood is the paper's union-find
approximation, ``h_DTR^eq``: evicted values that are connected belong to one class with the sum of their costs; a value made again leaves
its class, which keeps the others together. Costs are op times, and time is the time spent so far, recompute included.

As in the paper's prototype, a value of which the program holds no more references (no op ahead in the joint graph's order reads it) is
evicted at once (eager eviction), and can be made again if something that needs it is. Never evicted: results of ops that must not run
twice, what depends on a tangent (here, unlike in the paper: only forward is recomputed), what the caller holds, values of no bytes, and
operands while they are in use. What the user's checkpoint regions make is evicted when forward ends.

DTR looks at no future: it stops where it cannot make room, and a limit on runs (``MAX_RUNS`` times the ops) ends thrashing. What comes
out is the order of runs, a `Schedule`; there a copy dies after its last reader, so its peak is at most the limit. Proposed as well is
the saved set that results: what backward read from the copy that forward made. With fusion order is not ours and op-by-op bytes say
little about those of fused loops, so there only saved sets are proposed, of limits that approach the budget by bisection.
"""

from __future__ import annotations

from collections.abc import Iterator

from dyngran.passes.plan import Plan, Schedule
from dyngran.passes.problem import Kind, Problem, Side
from dyngran.passes.simulate import Simulator
from dyngran.passes.solvers.solving import solve_with

MAX_RUNS = 2  # times the number of ops
SMALL_SHARE = 0.01  # of the mean bytes of a value: what is smaller is not worth looking at (as in the paper's prototype)
SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2)  # of the default plan's transient: limits that are tried if no budget says which
MAX_TRIES = 6
CLOSE = 0.02  # of a limit: nearer ones are not told apart
THRASHES = 1.1  # times the limit: peak of a saved set of a run that thrashed
TICK_US = 1e-3  # each run takes at least that, so that what was just used is never infinitely stale nor infinitely fresh


def propose(simulator: Simulator, *, budget_bytes: int | None = None) -> Iterator[frozenset[int] | Schedule]:
    """Schedules (without fusion) and saved sets for the budget, or for ``SHARES`` of the default plan's transient."""
    problem = simulator.problem
    yield simulator.default_saved
    if budget_bytes is not None and problem.fused:
        yield from _approach(simulator, budget_bytes)
        return
    if budget_bytes is None:
        full_bytes = _op_by_op_bytes(problem)
        limits = [int(share * full_bytes) for share in SHARES]
    else:
        limits = [budget_bytes - problem.total_static_bytes]
    for limit_bytes in limits:
        found = run(problem, limit_bytes)
        if found is not None:
            yield found[1]
            if not problem.fused:
                yield found[0]


def _approach(simulator: Simulator, budget_bytes: int) -> Iterator[frozenset[int]]:
    """Saved sets of limits around the one whose plan just fits. A limit is too low if DTR stops, or if it thrashes: then values are made
    many times, and a plan that makes them once cannot keep the limit either."""
    room_bytes = budget_bytes - simulator.problem.total_static_bytes
    low, high, limit_bytes = 0, 0, room_bytes
    for _ in range(MAX_TRIES):
        found = run(simulator.problem, limit_bytes)
        peak_bytes = 0
        if found is not None:
            yield found[1]
            peak_bytes = simulator.evaluate(found[1]).peak_bytes - simulator.problem.total_static_bytes
        if found is None or peak_bytes <= room_bytes or peak_bytes > THRASHES * limit_bytes:
            low = limit_bytes
            limit_bytes = (low + high) // 2 if high else limit_bytes * 5 // 4
        else:
            high = limit_bytes
            limit_bytes = (low + high) // 2 if low else int(limit_bytes * 0.99 * room_bytes / peak_bytes)
        if limit_bytes <= 0 or (high and high - low < CLOSE * high):
            return


def run(problem: Problem, limit_bytes: int) -> tuple[Schedule, frozenset[int]] | None:
    """The order of runs and the saved set under a limit on live bytes, static ones excluded; None where DTR stops."""
    machine = _Machine(problem, limit_bytes)
    return (machine.schedule(), machine.saved()) if machine.step() else None


def _op_by_op_bytes(problem: Problem) -> int:
    """Peak without a limit: nothing is evicted for room."""
    machine = _Machine(problem, 1 << 62)
    machine.step()
    return machine.peak_bytes


class _Machine:
    """A device with little memory that runs one step."""

    def __init__(self, problem: Problem, limit_bytes: int) -> None:
        self._problem = problem
        self._ops = problem.ops
        self._producer = [value.producer for value in problem.values]
        self._sizes = [0 if value.kind.is_static else value.size_bytes for value in problem.values]
        counted = [size for size in self._sizes if size]
        self._small_bytes = SMALL_SHARE * sum(counted) / max(len(counted), 1)
        self._limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._live_bytes = 0
        self._now_us = 0.0
        self._forward: list[int] = []
        self._backward: list[int] = []
        self._runs = self._forward
        self._ran: set[int] = set()
        self._from_forward: set[int] = set()  # values whose copy is the one that forward made
        self._crossed: set[int] = set()
        self._is_there = [producer is None for producer in self._producer]
        self._last_used_us = [0.0] * len(problem.values)
        self._locks = [0] * len(problem.values)
        self._ahead = self._count_readers()
        held = problem.forward_outputs | problem.gradients
        self._evictable = [
            producer is not None
            and value not in held
            and problem.ops[producer].side is not Side.BACKWARD
            and not problem.ops[producer].pinned
            for value, producer in enumerate(self._producer)
        ]
        self._held = held | {  # results that cannot be made again but may be needed for what can
            read
            for op in problem.ops
            if op.side is not Side.BACKWARD and not op.pinned
            for read in op.reads
            if (producer := self._producer[read]) is not None and problem.ops[producer].pinned
        }
        self._choice: dict[int, None] = {}  # evictable values of some bytes that are there
        self._neighbourhood = _Neighbourhood(problem, self._evictable)

    def step(self) -> bool:
        """Run forward and backward; False if room could not be made or it took too many runs."""
        problem = self._problem
        for op in self._ops:
            if op.side is Side.FORWARD and not self._make(op.index):
                return False
        self._runs = self._backward
        self._from_forward = {value for value, there in enumerate(self._is_there) if there and self._producer[value] is not None}
        for value in sorted(self._from_forward):
            self._drop_if_never_saved(value)
        self._live_bytes += sum(value.size_bytes for value in problem.values if value.kind is Kind.TANGENT)
        for op in self._ops:
            if op.side is Side.BACKWARD and not self._make(op.index):
                return False
        for value in sorted(problem.gradients):
            producer = self._producer[value]
            if producer is not None and not self._is_there[value] and not self._make(producer):
                return False
        self._crossed |= problem.gradients & self._from_forward
        return True

    def schedule(self) -> Schedule:
        return Schedule(forward=tuple(self._forward), backward=tuple(self._backward))

    def saved(self) -> frozenset[int]:
        """Values that backward read from the copy that forward made, and never made again."""
        again = {write for index in self._backward for write in self._ops[index].writes}
        return frozenset(self._crossed - again)

    def _count_readers(self) -> list[int]:
        """How often the program itself reads each value: ops of forward and of backward, and those that only backward needs."""
        ops = self._ops
        wanted = {read for op in ops if op.side is Side.BACKWARD for read in op.reads} | self._problem.gradients
        ahead = [0] * len(self._problem.values)
        for op in reversed(ops):
            if op.side is Side.FREE and wanted.isdisjoint(op.writes):
                continue
            if op.side is Side.FREE:
                wanted.update(op.reads)
            for read in op.reads:
                ahead[read] += 1
        return ahead

    def _make(self, index: int) -> bool:
        """Run an op, and before it whatever makes operands that are not there."""
        stack = [index]
        self._lock(index)
        while stack:
            index = stack[-1]
            missing = next((read for read in self._ops[index].reads if not self._is_there[read]), None)
            if missing is None:
                if not self._run(index):
                    return False
                stack.pop()
                continue
            producer = self._producer[missing]
            assert producer is not None
            stack.append(producer)
            self._lock(producer)
        return True

    def _lock(self, index: int) -> None:
        for read in self._ops[index].reads:
            self._locks[read] += 1

    def _run(self, index: int) -> bool:
        op, sizes = self._ops[index], self._sizes
        again = index in self._ran
        new_bytes = sum(sizes[write] for write in op.writes if not self._is_there[write])
        beside_bytes = op.workspace_bytes + (op.rerun_bytes if again and self._runs is self._backward else 0)
        if len(self._forward) + len(self._backward) >= MAX_RUNS * len(self._ops) or not self._make_room(new_bytes + beside_bytes):
            return False
        self._live_bytes += new_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes + beside_bytes)
        self._runs.append(index)
        self._now_us += max(op.cost_us, TICK_US)
        for read in op.reads:
            self._last_used_us[read] = self._now_us
            self._locks[read] -= 1
            if not again:
                self._ahead[read] -= 1
            if read in self._from_forward:
                self._crossed.add(read)
        self._ran.add(index)
        for write in op.writes:
            self._last_used_us[write] = self._now_us
            self._from_forward.discard(write)
            if not self._is_there[write]:
                self._is_there[write] = True
                if self._evictable[write]:
                    self._neighbourhood.arrive(write)
                    if sizes[write] and sizes[write] >= self._small_bytes:
                        self._choice[write] = None
        for value in (*op.reads, *op.writes):
            self._drop_if_dead(value)
        return True

    def _drop_if_dead(self, value: int) -> None:
        if self._ahead[value] or self._locks[value] or not self._is_there[value] or value in self._held:
            return
        if self._evictable[value]:
            self._evict(value)
        elif self._producer[value] is not None:
            self._is_there[value] = False
            self._live_bytes -= self._sizes[value]

    def _drop_if_never_saved(self, value: int) -> None:
        """Backward makes its own copy of a value that is never saved; the caller's stays with the caller."""
        producer = self._producer[value]
        if producer is None or not self._ops[producer].never_saved or self._ops[producer].pinned:
            return
        self._from_forward.discard(value)
        if self._evictable[value]:
            self._evict(value)
            return
        self._is_there[value] = False
        if value not in self._problem.forward_outputs:
            self._live_bytes -= self._sizes[value]

    def _make_room(self, num_bytes: int) -> bool:
        last_used_us, sizes, cost_us = self._last_used_us, self._sizes, self._neighbourhood.cost_us
        while self._live_bytes + num_bytes > self._limit_bytes:
            now_us = self._now_us + TICK_US
            locks = self._locks
            self._neighbourhood.refresh()
            best = min(
                (value for value in self._choice if not locks[value]),
                key=lambda value: cost_us[value] / (sizes[value] * (now_us - last_used_us[value])),
                default=None,
            )
            if best is None:
                return False
            self._evict(best)
        return True

    def _evict(self, value: int) -> None:
        self._is_there[value] = False
        self._live_bytes -= self._sizes[value]
        self._choice.pop(value, None)
        self._neighbourhood.leave(value)


class _Neighbourhood:
    """``h_DTR^eq``: classes of connected evicted values by union-find; ``cost_us[v]`` is v's own cost and that of the classes around it."""

    def __init__(self, problem: Problem, evictable: list[bool]) -> None:
        made_us = [0.0 if value.producer is None else problem.ops[value.producer].cost_us for value in problem.values]
        self.cost_us = list(made_us)
        self._made_us = made_us
        self._near: list[set[int]] = [set() for _ in problem.values]
        for op in problem.ops:
            for write in op.writes:
                for read in op.reads:
                    if evictable[read] and evictable[write]:
                        self._near[read].add(write)
                        self._near[write].add(read)
        self._stale: set[int] = set()  # values around classes that have changed
        self._node: dict[int, int] = {}  # of evicted values
        self._parent: list[int] = []
        self._class_us: list[float] = []
        self._around: list[set[int]] = []  # of a class: values that are there beside it, or were

    def leave(self, value: int) -> None:
        """``value`` is evicted: it joins the classes around it."""
        root = len(self._parent)
        self._parent.append(root)
        self._class_us.append(self._made_us[value])
        self._around.append(set())
        self._node[value] = root
        for near in self._near[value]:
            if near not in self._node:
                self._around[root].add(near)
                continue
            other = self._root(self._node[near])
            if other != root:
                if len(self._around[other]) > len(self._around[root]):
                    root, other = other, root
                self._parent[other] = root
                self._class_us[root] += self._class_us[other]
                self._around[root] |= self._around[other]
        self._around[root].discard(value)
        self._stale |= self._around[root]

    def arrive(self, value: int) -> None:
        """``value`` is there: it leaves its class, if it was in one."""
        node = self._node.pop(value, None)
        if node is not None:
            root = self._root(node)
            self._class_us[root] -= self._made_us[value]
            self._stale |= self._around[root]
        for near in self._near[value]:
            if near in self._node:
                self._around[self._root(self._node[near])].add(value)
        self._stale.add(value)

    def refresh(self) -> None:
        """Bring `cost_us` up to date for the values that are there."""
        for value in self._stale - self._node.keys():
            roots = {self._root(self._node[near]) for near in self._near[value] if near in self._node}
            self.cost_us[value] = self._made_us[value] + sum(self._class_us[root] for root in sorted(roots))
        self._stale.clear()

    def _root(self, node: int) -> int:
        parent = self._parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node


def solve(problem: Problem, budget_bytes: int | None) -> Plan:
    """The fastest of these plans for a budget (bytes, static bytes included; None: no limit). Raises BudgetTooSmall if none fits."""
    return solve_with(propose, "dtr", problem, budget_bytes)
