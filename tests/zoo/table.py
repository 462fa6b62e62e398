"""The zoo's rows as a table for people: python tests/zoo/table.py [FILE ...] [-o docs/zoo.md]

Without files: all in results/ beside this script.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zoo.rows import read_rows
from zoo.trial import Row, Way
from zoo.verdict import cut_share, faults, is_irreducible, trains

FOLDER = Path(__file__).resolve().parent
HEADER = "| model | parameters | eager | stock | free | middle | floor | runs again | transient cut | peak of budget: middle, floor |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    files = arguments.files or sorted((FOLDER / "results").glob("*.jsonl"))
    text = "# The zoo\n\n" + INTRODUCTION + "".join(section(read_rows(path)) for path in files)
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.write_text(text)


INTRODUCTION = """One training step of every model, in smallest configuration and with random weights, trained plainly, by stock torch
and by dyngran: without a budget, at the least budget that is not refused, and halfway between. `keep_below` is 0: small values count
too. Compared are the loss, every gradient, every buffer and the state of the random generator: "equal" is bit for bit (under
`codegen="eager"` against stock's `aot_eager` where that differs from plain torch), "close" is within 0.2 % of a tensor's largest entry.
"Runs again" counts operators at the floor; "transient cut" is the share of what the free step adds to parameters, buffers and inputs. Peaks
are measured: allocation events on the CPU, the allocator's counter on a card, where cuBLAS's workspaces count too. `make zoo` trains it;
`python tests/zoo/table.py -o docs/zoo.md` makes this page.

"""


def section(rows: Sequence[Row]) -> str:
    """One file's rows: with what, how many, and each."""
    if not rows:
        return ""
    trained = [row for row in rows if row.stock is not None and row.stock.trains]
    bad = [row for row in trained if faults(row)]
    stock = "inductor" if rows[0].codegen == "inductor" else "aot_eager"
    lines = [
        f'## `codegen="{rows[0].codegen}"` on {rows[0].versions.get("machine", rows[0].device)}',
        "",
        *_versions(rows),
        "",
        f"{len(rows)} models: {sum(trains(row.eager) for row in rows)} are trained by plain torch, {len(trained)} by stock "
        f"(`{stock}`), {len(trained) - len(bad)} of these by dyngran at every budget, within it. "
        f"{sum(map(is_irreducible, trained))} are irreducible: no plan needs less than the free one.",
        "",
        *(f"- **{row.name}**: {'; '.join(faults(row))}" for row in bad),
        *([""] if bad else []),
        HEADER,
        "|" + "---|" * (HEADER.count("|") - 1),
        *(_line(row) for row in rows if trains(row.eager)),
        "",
        *_not_trained(rows),
        "",
    ]
    return "\n".join(lines) + "\n"


def _versions(rows: Iterable[Row]) -> list[str]:
    found = sorted({", ".join(f"{name} {value}" for name, value in row.versions.items()) for row in rows})
    return [f"- {one}" for one in found]


def _line(row: Row) -> str:
    floor, middle = row.ways.get("floor"), row.ways.get("middle")
    share = cut_share(row)
    again = "" if floor is None or floor.num_recomputed is None else str(floor.num_recomputed or "irreducible")
    cells = [
        row.name,
        f"{row.num_parameters:,}",
        _status(row.eager),
        _status(row.stock),
        *(_status(row.ways.get(budget)) for budget in ("free", "middle", "floor")),
        again,
        "" if share is None else f"{share:.0%}",
        ", ".join(_used(way) for way in (middle, floor) if way is not None and way.peak_bytes is not None),
    ]
    return "| " + " | ".join(cells) + " |"


def _status(way: Way | None) -> str:
    return "" if way is None else way.status


def _used(way: Way) -> str:
    return "" if way.peak_bytes is None or not way.budget_bytes else f"{way.peak_bytes / way.budget_bytes:.2%}"


def _not_trained(rows: Iterable[Row]) -> list[str]:
    """What plain torch does not train as it was built here: not counted anywhere."""
    left = [row for row in rows if not trains(row.eager)]
    if not left:
        return []
    told = [f"- {row.name}: {row.eager.detail.replace('|', '/')[:160] if row.eager is not None else ''}" for row in left]
    return ["Not built, or not trained by plain torch, in the configuration that shrinking gave:", "", *told]


if __name__ == "__main__":
    main()
