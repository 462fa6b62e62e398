"""Ways to store values between forward and backward other than as they are, put into a planning problem.

A form is a second value that may cross to backward instead of the first: an op stores it in forward, right after the value is made or
where a copy of it has arrived, and an op loads the value from it in backward, where the value would otherwise be kept or recomputed, or
some time before (`Problem.forms`). So a saved set says everything: it names the value (KEEP), the stored form (PACK, NARROW, OFFLOAD) or
neither (RECOMPUTE). Values of the problem without forms
keep their numbers, and a set of them means the same in both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from dyngran.passes.plan import Action
from dyngran.passes.problem import Form, Kind, Op, Problem, Side, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What storing, or loading, costs: device time (us) and where that is from, workspace (bytes), and whether a fusing code generator may
    inline it as one loop over ``num_elements``. ``target``: the operator that does it, for people and for whoever reads generated code."""

    cost_us: float
    cost_source: str = "roofline"
    workspace_bytes: int = 0
    fusible: bool = False
    reduction: bool = False
    num_elements: int = 0
    target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One way to store ``value`` in ``size_bytes``; `Form` says what the other fields mean. ``parts``: values, made before ``value``, of
    which loading makes what is not stored. ``stored_after``: the op after which it has been stored, and up to which the value is held;
    None: the one that makes it."""

    value: int
    action: Action
    format: str
    size_bytes: int
    store: Transfer
    load: Transfer
    error: str = ""
    barred: frozenset[int] = frozenset()
    stored_after: int | None = None
    fetch: int | None = None
    copy_us: float = 0.0
    parts: tuple[int, ...] = ()
    again: frozenset[int] = frozenset()
    dimension: int | None = None
    fraction: float | None = None
    evidence: str = ""


def with_forms(problem: Problem, offers: Sequence[Offer]) -> Problem:
    """The problem with every offer as a form; stored values come after all others, in the order of the offers.

    Raises ValueError for a problem that has forms, for an offer of what no op makes, what the caller holds, or what depends on a tangent,
    for one that is stored before it is made or in backward, or fetched in forward, and for one whose parts are not made before it.
    """
    if problem.forms:
        raise ValueError("the problem has forms already: offer all of them at once")
    made_by, stored_by = [_producer_of(problem, offer) for offer in offers], [_stored_by(problem, offer) for offer in offers]
    following: dict[int, list[int]] = defaultdict(list)
    for place in range(len(offers)):
        for after in {made_by[place], stored_by[place]}:
            following[after].append(place)
    ops: list[Op] = []
    moved_to: list[int] = []
    stores, loads = [0] * len(offers), [0] * len(offers)
    for op in problem.ops:
        moved_to.append(len(ops))
        ops.append(op if op.index == len(ops) else replace(op, index=len(ops)))
        for place in following.get(op.index, ()):
            offer, stored = offers[place], len(problem.values) + place
            name = problem.values[offer.value].name
            if stored_by[place] == op.index:
                stores[place] = len(ops)
                ops.append(_op(offer.store, len(ops), stored_name(name, offer.format), (offer.value,), (stored,), op.region))
            if made_by[place] == op.index:
                loads[place] = len(ops)
                ops.append(_op(offer.load, len(ops), loaded_name(name, offer.format), (stored, *offer.parts), (), op.region))
    values = [value if value.producer is None else replace(value, producer=moved_to[value.producer]) for value in problem.values]
    for place, offer in enumerate(offers):
        whole = problem.values[offer.value]
        values.append(
            Value(
                index=len(values),
                name=stored_name(whole.name, offer.format),
                size_bytes=offer.size_bytes,
                kind=Kind.ACTIVATION,
                producer=stores[place],
                label=f"{whole.label or whole.name} as {offer.format}",
            )
        )
    forms = tuple(
        Form(
            value=offer.value,
            stored=len(problem.values) + place,
            store=stores[place],
            load=loads[place],
            action=offer.action,
            format=offer.format,
            error=offer.error,
            barred=frozenset(moved_to[op] for op in offer.barred),
            fetch=None if offer.fetch is None else moved_to[offer.fetch],
            copy_us=offer.copy_us,
            again=frozenset(moved_to[op] for op in offer.again),
            dimension=offer.dimension,
            fraction=offer.fraction,
            evidence=offer.evidence,
        )
        for place, offer in enumerate(offers)
    )
    return replace(problem, values=tuple(values), ops=tuple(ops), forms=forms)


def stored_name(value: str, format: str) -> str:
    """The name of the op that stores a value, and of what it makes."""
    return f"{value}_as_{format}"


def loaded_name(value: str, format: str) -> str:
    """The name of the op that loads a value."""
    return f"{value}_from_{format}"


def _producer_of(problem: Problem, offer: Offer) -> int:
    value = problem.values[offer.value]
    is_held = offer.value in problem.forward_outputs or offer.value in problem.gradients
    if value.producer is None or is_held or problem.ops[value.producer].side is Side.BACKWARD:
        raise ValueError(f"{value.name} cannot be stored as {offer.format}: it is an input, an output, a gradient, or made in backward")
    for part in offer.parts:
        made_by = problem.values[part].producer
        if problem.values[part].kind is Kind.TANGENT or (made_by is not None and made_by >= value.producer):
            raise ValueError(f"{value.name} cannot be made of {problem.values[part].name}, which is not there before it")
    return value.producer


def _stored_by(problem: Problem, offer: Offer) -> int:
    made_by = _producer_of(problem, offer)
    after = made_by if offer.stored_after is None else offer.stored_after
    if after < made_by or problem.ops[after].side is Side.BACKWARD:
        raise ValueError(f"{problem.values[offer.value].name} cannot be stored after {problem.ops[after].name}")
    if offer.fetch is not None and problem.ops[offer.fetch].side is not Side.BACKWARD:
        raise ValueError(f"{problem.values[offer.value].name} cannot be fetched before {problem.ops[offer.fetch].name}")
    return after


def _op(transfer: Transfer, index: int, name: str, reads: tuple[int, ...], writes: tuple[int, ...], region: str) -> Op:
    return Op(
        index=index,
        name=name,
        target=transfer.target or name,
        side=Side.FREE,
        reads=reads,
        writes=writes,
        cost_us=transfer.cost_us,
        cost_source=transfer.cost_source,
        workspace_bytes=transfer.workspace_bytes,
        region=region,
        fusible=transfer.fusible,
        reduction=transfer.reduction,
        num_elements=transfer.num_elements,
    )


def offers_of(problem: Problem) -> tuple[Offer, ...]:
    """What `with_forms` was given, in the numbers of the problem without forms."""
    base = base_ops(problem)
    number = {index: place for place, index in enumerate(base)}

    def stored_after(form: Form) -> int | None:
        after, producer = bisect_left(base, form.store) - 1, problem.values[form.value].producer
        return None if base[after] == producer else after

    def transfer(op: Op) -> Transfer:
        return Transfer(**{one.name: getattr(op, one.name) for one in fields(Transfer)})

    return tuple(
        Offer(
            value=form.value,
            action=form.action,
            format=form.format,
            size_bytes=problem.values[form.stored].size_bytes,
            store=transfer(problem.ops[form.store]),
            load=transfer(problem.ops[form.load]),
            error=form.error,
            barred=frozenset(number[op] for op in form.barred),
            stored_after=stored_after(form),
            fetch=None if form.fetch is None else number[form.fetch],
            copy_us=form.copy_us,
            parts=problem.parts_of(form),
            again=frozenset(number[op] for op in form.again),
            dimension=form.dimension,
            fraction=form.fraction,
            evidence=form.evidence,
        )
        for form in problem.forms
    )


def without_forms(problem: Problem) -> Problem:
    """The problem that `with_forms` was given."""
    if not problem.forms:
        return problem
    order = base_ops(problem)
    number = {index: place for place, index in enumerate(order)}
    ops = tuple(replace(problem.ops[index], index=place) for place, index in enumerate(order))
    base = [value for value in problem.values if value.index not in problem.form_of]  # those that stand after all others
    values = tuple(value if value.producer is None else replace(value, producer=number[value.producer]) for value in base)
    return replace(problem, values=values, ops=ops, forms=())


def with_fewer_forms(problem: Problem) -> Problem:
    """The problem without its last kind of forms: kinds are what is exact and stays on the device, what waits in host memory, and each
    format that rounds, as they follow each other in the problem. What remains keeps its numbers."""
    kinds = [kind_of(form) for form in problem.forms]
    num_left = len(kinds) - next((place for place, kind in enumerate(reversed(kinds)) if kind != kinds[-1]), len(kinds))
    return with_forms(without_forms(problem), offers_of(problem)[:num_left])


def kind_of(form: Form | Offer) -> str:
    """What a user allows to get such forms: "" for what is allowed by default."""
    return form.format if form.error or form.action is Action.OFFLOAD else ""


def base_ops(problem: Problem) -> tuple[int, ...]:
    """The ops that neither store nor load a form, in order: the number of each op of the problem without forms in this one."""
    transfers = {index for form in problem.forms for index in (form.store, form.load)}
    return tuple(op.index for op in problem.ops if op.index not in transfers)


def crossing_values(problem: Problem, saved: Iterable[int]) -> frozenset[int]:
    """The values that a saved set keeps in whatever form: itself, with stored forms replaced by the values that they stand for."""
    return frozenset(problem.form_of[value].value if value in problem.form_of else value for value in saved)
