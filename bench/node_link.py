"""Published graphs to plan on: networkx node-link files of Checkmate's CNNs and of random layered graphs, as Moccasin distributes them.

    python bench/node_link.py GRAPH.json ... --fractions 0.9 0.8 --json rows.jsonl

Definitions, those of Moccasin (ICML 2023): the duration of a sequence is the sum of the durations of all its runs; its memory at a run
is what is live then, the operands and the result of the running op included; a value is live from its run to its last reader, and
nothing is held beside that. The initial order is the file's own (``order``, else the nodes as they stand), and a budget is a share of
the initial order's peak, rounded up. Graphs are one training step each but know no forward and backward: every op may run anywhere.

Units are the files': bytes and time units for Checkmate's graphs, numbers without a unit for random ones.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from dyngran.passes.plan import Schedule
from dyngran.passes.problem import Kind, Op, Problem, Side, Value
from dyngran.passes.schedule import replay_schedule
from dyngran.passes.solvers.order import MOVES, anneal_order

JsonObject = dict[str, Any]
PUBLISHED = Path(__file__).resolve().parent / "published.json"
_ENDS = (("source", "target"), ("0", "1"))  # what links call their ends
_COSTS = (("cost_cpu", "cost_ram"), ("duration", "out_cost"))  # what nodes call their duration and the size of their result


def load_problems(path: Path) -> list[Problem]:
    """The one planning problem in a file, ops in the file's order. Raises ValueError with what the file lacks."""
    document = json.loads(path.read_bytes())
    lacking = [key for key in ("nodes", "links") if not isinstance(document, dict) or not isinstance(document.get(key), list)]
    if lacking:
        raise ValueError(f"this is no node-link graph: there is no list {lacking[0]!r}")
    return [node_link_problem(document)]


def node_link_problem(document: JsonObject) -> Problem:
    """The problem of one node-link graph; sinks are held to the end. Raises ValueError for missing keys, unknown nodes and cycles."""
    nodes = {_name_of(node): node for node in document["nodes"]}
    if len(nodes) < len(document["nodes"]):
        raise ValueError("two nodes have the same name")
    operands: dict[Any, list[Any]] = {name: [] for name in nodes}
    read: set[Any] = set()
    for link in document["links"]:
        source, target = _keys(link, _ENDS, "a link")
        for end in (source, target):
            if end not in nodes:
                raise ValueError(f"a link names node {end!r}, which does not exist")
        operands[target].append(source)
        read.add(source)
    order = document.get("graph", {}).get("order") or list(nodes)
    place = {name: position for position, name in enumerate(order)}
    if set(place) != set(nodes) or len(order) != len(nodes):
        raise ValueError("the graph's order does not name every node once")
    values, ops = [], []
    for position, name in enumerate(order):
        cost, size = _keys(nodes[name], _COSTS, f"node {name!r}")
        reads = tuple(sorted({place[operand] for operand in operands[name]}))
        if any(operand >= position for operand in reads):
            raise ValueError(f"node {name!r} stands before an operand of its own: the order is not topological")
        label = str(nodes[name].get("name", name))
        values.append(Value(index=position, name=label, size_bytes=int(size), kind=Kind.ACTIVATION, producer=position))
        ops.append(
            Op(
                index=position,
                name=label,
                target="node",
                side=Side.FORWARD,
                reads=reads,
                writes=(position,),
                cost_us=float(cost),
                cost_source="file",
            )
        )
    sinks = frozenset(place[name] for name in nodes if name not in read)
    return Problem(values=tuple(values), ops=tuple(ops), forward_outputs=sinks, gradients=frozenset())


def initial_schedule(problem: Problem) -> Schedule:
    """Every op once, in the file's order."""
    return Schedule(tuple(range(len(problem.ops))), ())


def least_peak_bytes(problem: Problem) -> int:
    """No order can have a lower peak: the largest sum of one op's operands and result."""
    sizes = [value.size_bytes for value in problem.values]
    return max((sum(sizes[value] for value in (*op.reads, *op.writes)) for op in problem.ops), default=0)


def published(name: str, fraction: float) -> JsonObject:
    """What others report for a graph and a budget, by planner: per cent of duration, per cent of the initial peak, seconds."""
    rows = json.loads(PUBLISHED.read_bytes())["rows"]
    found = [row for row in rows if row["graph"] == name and row["fraction"] == fraction]
    return {planner: row[planner] for row in found for planner in ("checkmate", "moccasin", "fastsa") if row[planner] is not None}


def row_of(name: str, problem: Problem, fraction: float, *, num_moves: int | None, max_seconds: float) -> JsonObject:
    """One graph at one budget: duration increase in per cent, peak, seconds. ``increase`` is None if nothing that fits was found."""
    start = initial_schedule(problem)
    initial = replay_schedule(problem, start)
    budget_bytes = math.ceil(fraction * initial.peak_bytes)
    began = time.perf_counter()
    found, truncated = anneal_order(problem, budget_bytes, start, num_moves=num_moves or MOVES, max_seconds=max_seconds)
    seconds = time.perf_counter() - began
    outcome = replay_schedule(problem, found)
    fits = outcome.peak_bytes <= budget_bytes
    return {
        "graph": name,
        "nodes": len(problem.ops),
        "fraction": fraction,
        "budget": budget_bytes,
        "peak": outcome.peak_bytes,
        "peak_percent": round(100 * outcome.peak_bytes / initial.peak_bytes, 2),
        "increase_percent": round(100 * (outcome.time_us / initial.time_us - 1), 3) if fits else None,
        "num_recomputed": outcome.num_recomputed,
        "floor_percent": round(100 * least_peak_bytes(problem) / initial.peak_bytes, 2),
        "seconds": round(seconds, 2),
        "truncated": truncated,
        "published": published(name, fraction),
    }


def _name_of(node: JsonObject) -> Any:
    if "id" in node:
        return node["id"]
    if "name" in node:
        return node["name"]
    raise ValueError("a node has neither an id nor a name")


def _keys(entry: JsonObject, spellings: tuple[tuple[str, str], ...], what: str) -> tuple[Any, Any]:
    for first, second in spellings:
        if first in entry and second in entry:
            return entry[first], entry[second]
    wanted = " or ".join(f"{first}, {second}" for first, second in spellings)
    raise ValueError(f"{what} has none of: {wanted}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="+", type=Path, metavar="GRAPH", help="graphs in networkx's node-link form")
    fractions = [0.9, 0.8, 0.7, 0.5, 0.25]
    parser.add_argument("--fractions", nargs="+", type=float, default=fractions, help="budgets as shares of the initial peak")
    parser.add_argument("--moves", type=int, help="moves of the annealing; by default as many as the planner's own")
    parser.add_argument("--limit-s", type=float, default=600.0, help="safety stop per budget")
    parser.add_argument("--json", type=Path, metavar="OUT", help="append every row to this file")
    args = parser.parse_args()
    for path in args.graphs:
        try:
            problems = load_problems(path)
        except (OSError, ValueError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        for problem in problems:
            for fraction in args.fractions:
                row = row_of(path.stem, problem, fraction, num_moves=args.moves, max_seconds=args.limit_s)
                shown = "no order fits" if row["increase_percent"] is None else f"{row['increase_percent']:+8.3f} %"
                print(
                    f"{path.stem[:32]:32} {row['nodes']:>5} ops {fraction:4.0%}  peak {row['peak_percent']:6.2f} %  duration {shown:>14}  "
                    f"{row['seconds']:7.2f} s  (floor {row['floor_percent']:.1f} %)"
                    + "".join(f"  {planner}: +{cost} % {took} s" for planner, (cost, _, took) in row["published"].items()),
                    flush=True,
                )
                if args.json is not None:
                    with args.json.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
