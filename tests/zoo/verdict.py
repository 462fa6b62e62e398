"""What a row of the zoo means: which of dyngran's promises it breaks."""

from __future__ import annotations

from forks import OUT_OF_TIME

from zoo.trial import Row, Way

BUDGETS = ("free", "middle", "floor")


def faults(row: Row) -> list[str]:
    """Every promise that a row breaks, empty if none; a model that stock torch does not train either breaks none by failing."""
    if not trains(row.eager) or not trains(row.stock):
        return []
    found = []
    for budget in BUDGETS:
        way = row.ways.get(budget)
        if way is None:
            continue
        if not way.trains:
            found.append(f"{budget}: {way.status}: {way.detail}")
        if not way.is_within:
            said = f" (said not to be planned: {', '.join(way.not_planned[:3])})" if way.not_planned else ""
            found.append(f"{budget}: measured {way.peak_bytes} of {way.budget_bytes} bytes{said}")
    if "free" not in row.ways:
        found.append("not run")
    elif not found and {"floor", "middle"} - set(row.ways):
        found.append("no budget was tried")
    return found


def is_irreducible(row: Row) -> bool:
    """Whether no plan needs less than the free one: nothing is recomputed at the floor."""
    floor, free = row.ways.get("floor"), row.ways.get("free")
    return floor is not None and free is not None and not floor.num_recomputed and floor.trains


def is_whole(row: Row) -> bool:
    """Whether the model came to its end: what was stopped for its time is trained again, with more of it perhaps."""
    return row.eager is not None and not row.eager.detail.startswith(OUT_OF_TIME)


def cut_share(row: Row) -> float | None:
    """By how much of what the free step adds to the static bytes the measured peak at the floor is lower."""
    floor, free = row.ways.get("floor"), row.ways.get("free")
    if floor is None or free is None or floor.peak_bytes is None or free.peak_bytes is None or free.peak_bytes <= row.static_bytes:
        return None
    return (free.peak_bytes - floor.peak_bytes) / (free.peak_bytes - row.static_bytes)


def trains(way: Way | None) -> bool:
    return way is not None and way.trains
