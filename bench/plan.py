"""Planners side by side on graphs from files: what each finds for a budget, how fast the step is, how long the planner took.

    python bench/plan.py llama350m.json.gz --fractions 0.9 0.5                     # every solver
    python bench/plan.py resnet152.json.gz --solver auto mutwo --json rows.jsonl
    python bench/plan.py VGG16.json --solver auto --fractions 0.9 0.8              # node-link: beside published figures
    python bench/plan.py vitl.json.gz --solver auto --frontier 50                  # 50 budgets from the least peak up
    python bench/plan.py --synthetic 10000 --layers 24 100 --solver auto           # Llamas of that many ops, of that many layers
    python bench/plan.py vitl.json.gz --solver auto --profile                      # where the planner's time goes
    python bench/plan.py vitl.json.gz --solver auto --anneal 1000000 --update-best # lower bench/best_known.json

A budget is a share of the free transient: the peak of torch's own partition, static bytes excluded; of the peak of the file's order for
node-link graphs. What rows mean is in bench/rows.py. Every solver starts from the problem alone; its first budget pays for its search.
Leaves with 2 and one sentence if something given cannot be used.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # `python -P` leaves the script's own folder out

import long_anneal  # noqa: E402  # found by the line above
from layered import layered_problem, layers_for  # noqa: E402
from plan_table import StageClock, shown, shown_frontier, shown_saved, side_by_side  # noqa: E402
from rows import BestKnown, Case, MakePlanner, Notes, Row, frontier_row, load_cases, load_saved, replay_line, rows_of, saved_row  # noqa: E402

from dyngran.passes.solvers.portfolio import MAX_SECONDS, SOLVERS, Planner  # noqa: E402

SYNTHETIC = "layered-"  # what synthetic graphs are called, before the number of layers
HERE = Path(__file__).resolve().parent
NATIVE = "Threads are not profiled: what native walks take stands under the call that waits for them (lock.acquire, result)."


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        cases = list(find_cases(args))
        for path in args.saved:
            check_saved(path, cases)
        notes = Notes(BestKnown(args.best))
        if args.json is not None:
            args.json.open("a").close()  # before an hour is spent
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    run = Run(args, notes)
    for case in cases:
        run.plan(case)
    run.finish()
    return 0


class Run:
    """Plans cases, prints and writes rows as they come, and keeps them for the tables at the end."""

    def __init__(self, args: argparse.Namespace, notes: Notes) -> None:
        self._args = args
        self._notes = notes
        self._rows: list[Row] = []
        self._stages: list[str] = []
        self._profile = cProfile.Profile()
        self._from = {"python": platform.python_version(), "cpus": os.cpu_count(), "commit": commit(), "limit_s": args.limit_s}

    def plan(self, case: Case) -> None:
        """Every solver's rows of one case."""
        fractions, notes, count = self._args.fractions, self._notes, self._args.anneal

        def frontier(planner: MakePlanner, solver: str) -> Iterator[Row]:
            yield frontier_row(case, solver, self._args.frontier, planner=planner)

        def budgets(planner: MakePlanner, solver: str) -> Iterator[Row]:
            return rows_of(case, solver, fractions, planner=planner, notes=notes, num_annealed=count if solver == long_anneal.NAME else 0)

        for solver in self._args.solver or SOLVERS:
            self._timed(case, solver, frontier if self._args.frontier else budgets)
        if count:
            self._timed(case, long_anneal.NAME, budgets)
        if self._args.profile:
            self._stages.append(replay_line(case))
        for path in self._args.saved:
            if path.name.startswith(case.graph):
                self._keep(saved_row(case, path, planner=lambda problem: Planner(problem, max_seconds=self._args.limit_s)))

    def _timed(self, case: Case, solver: str, rows: Callable[[MakePlanner, str], Iterator[Row]]) -> None:
        clock = StageClock()
        if self._args.profile:
            clock.start("first plans")
            self._profile.enable()
        for row in rows(lambda problem: Planner(problem, progress=clock, max_seconds=self._args.limit_s), solver):
            self._profile.disable()
            self._keep(row)
            if self._args.profile:
                self._profile.enable()
        self._profile.disable()
        clock.start("")
        self._stages.append(clock.table(f"{case.graph}, {solver}"))

    def _keep(self, row: Row) -> None:
        show = shown_frontier if "frontier" in row else shown_saved if "saved_by" in row else shown
        print(show(row), flush=True)
        self._rows.append(row)
        if self._args.json is not None:
            with self._args.json.open("a") as file:
                file.write(json.dumps({**row, **self._from}) + "\n")
        if self._args.update_best and "fraction" in row and self._notes.best.lower(row):
            self._notes.best.write()

    def finish(self) -> None:
        """The tables."""
        planned = [row for row in self._rows if "fraction" in row]
        for graph in dict.fromkeys(row["graph"] for row in planned):
            print("\n" + side_by_side([row for row in planned if row["graph"] == graph], self._notes))
        for line in growth(planned):
            print(line)
        print(f"\nmost memory of this process: {self._rows[-1]['max_rss_bytes'] / 2**20:.0f} MiB, torch and loading included")
        if self._args.profile:
            print("\n" + "\n".join(self._stages) + "\n\n" + NATIVE)
            pstats.Stats(self._profile).strip_dirs().sort_stats("cumulative").print_stats(25)


def growth(rows: Sequence[Row]) -> Iterator[str]:
    """How planning from scratch grows from the shallowest synthetic graph to the deeper ones."""
    first: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row["nodes"]):
        if row["first_budget"] and row["graph"].startswith(SYNTHETIC):
            known = first.setdefault(row["solver"], row)
            if known is not row:
                times = f"{row['seconds'] / max(known['seconds'], 1e-3):.2f} x the seconds of {known['graph']} from scratch"
                yield f"{row['solver']}: {row['graph']} takes {times} ({row['seconds']} and {known['seconds']} s)"


def find_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Files first, then synthetic ones. Raises OSError or ValueError, which names the file."""
    seen: set[str] = set()
    for path in args.graphs:
        try:
            cases = load_cases(path, fused=not args.eager)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not JSON ({error})") from error
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        for case in cases:
            if case.graph in seen:
                raise ValueError(f"{path}: a graph called {case.graph!r} was there already, and rows could not tell them apart")
            seen.add(case.graph)
            yield case
    for num_layers in dict.fromkeys([*map(layers_for, args.synthetic), *args.layers]):
        yield Case(graph=f"{SYNTHETIC}{num_layers}", problem=layered_problem(num_layers, fused=not args.eager))


def check_saved(path: Path, cases: Sequence[Case]) -> None:
    """Raises OSError or ValueError, which names the file, if it holds no saved set of a graph of this run."""
    if not path.exists():
        raise ValueError(f"{path}: there is no such file")
    own = [case for case in cases if path.name.startswith(case.graph)]
    if not own:
        raise ValueError(f"{path}: its name begins with that of no graph of this run")
    for case in own:
        load_saved(path, case)


def commit() -> str:
    """Commit that is measured: ``DYNGRAN_COMMIT``, else git's, else unknown."""
    if name := os.environ.get("DYNGRAN_COMMIT"):
        return name
    try:
        found = subprocess.run(["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="*", type=Path, metavar="GRAPH", help="joint graphs as JSON or node-link graphs, gzipped or not")
    parser.add_argument(
        "--solver", action="extend", nargs="+", choices=SOLVERS, metavar="NAME", help=f"of {', '.join(SOLVERS)}; all by default"
    )
    parser.add_argument("--fractions", nargs="+", type=share, default=[0.9, 0.7, 0.5, 0.3, 0.2], metavar="F", help="budgets, as shares")
    parser.add_argument(
        "--limit-s", type=positive, default=MAX_SECONDS, metavar="S", help="safety stop of each search (default %(default)s)"
    )
    parser.add_argument(
        "--frontier", type=at_least(2), metavar="N", help="instead: N budgets evenly between the least peak and the free one"
    )
    parser.add_argument(
        "--eager", action="store_true", help="every op is a kernel, as under codegen='eager'; else ops fuse, as under Inductor"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="append every row to this file")
    parser.add_argument(
        "--profile", action="store_true", help="print seconds per stage of each search and which functions the time went into"
    )
    parser.add_argument("--synthetic", nargs="+", type=at_least(1), default=[], metavar="OPS", help="Llamas of about that many ops")
    parser.add_argument("--layers", nargs="+", type=at_least(1), default=[], metavar="L", help="Llamas of that many layers")
    parser.add_argument("--anneal", type=at_least(1), metavar="N", help="rows of long-anneal as well: N more plans per budget, from auto's")
    parser.add_argument(
        "--saved",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help='saved sets from elsewhere, beside auto at the peaks that they reach: {"saved": [names]} in a file named after its graph',
    )
    parser.add_argument(
        "--best", type=Path, default=HERE / "best_known.json", metavar="FILE", help="least costs known (default %(default)s)"
    )
    parser.add_argument("--update-best", action="store_true", help="lower the entries of that file that this run beats")
    args = parser.parse_args(arguments)
    if not (args.graphs or args.synthetic or args.layers):
        parser.error("nothing to plan: give a GRAPH, --synthetic or --layers")
    return args


def share(text: str) -> float:
    if not 0.0 < (value := float(text)) <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is no share above 0 and up to 1")
    return value


def positive(text: str) -> float:
    if not 0.0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
