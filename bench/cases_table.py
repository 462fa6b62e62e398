"""The table of docs/cases.md: python bench/cases_table.py RESULTS.json, which the cases' own runner writes:

python ../shared/cases/run.py --fractions 0.5 0 --json RESULTS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEADER = "| case | result | free peak | half: budget, peak | floor: budget, peak | what differs |"


def main() -> None:
    results: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    print(f"{sum(one['status'] == 'ok' for one in results)} of {len(results)} are right at every budget, within the runner's tolerance.\n")
    print(HEADER)
    print("|" + "---|" * (HEADER.count("|") - 1))
    for one in sorted(results, key=lambda one: (one["status"] == "ok", one["case"])):
        print(line(one))


def line(one: dict[str, Any]) -> str:
    """One case. A budget that was refused stands as the least that the refusal names."""
    rows = one["rows"]
    cells = [one["case"], "right" if one["status"] == "ok" else "see above", str(rows[0]["peak"]) if rows else ""]
    for number in (1, 2):
        cells.append(budget_and_peak(rows[number]) if len(rows) > number else "")
    differs = one.get("error") or "; ".join(str(row["bad"]) for row in rows if row["bad"])
    cells.append(differs.splitlines()[0][:160].replace("|", "/") if differs else "")
    return f"| {' | '.join(cells)} |"


def budget_and_peak(row: dict[str, Any]) -> str:
    least = row.get("refused_least")
    return f"{row['budget'] if least is None else f'refused, {least}'}, {row['peak']}"


if __name__ == "__main__":
    main()
