"""The planning problem: names and numbers of one joint graph, without torch.

A *value* is one storage (views share their base's); an *op* produces values from values. Ops stand in the joint graph's order,
which is a topological order. Views and getitems are not ops: whoever reads a view reads its base.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from dyngran.passes.plan import Action


class Side(Enum):
    """Where an op may run."""

    FORWARD = "forward"  # a forward output needs it: it always runs in forward, and again in backward if recomputed
    FREE = "free"  # only backward needs it, but it reads no tangent: runs in forward if saved, otherwise lazily in backward
    BACKWARD = "backward"  # depends on a tangent


class Kind(Enum):
    """What a value is to the person who trains."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    OPTIMIZER = "optimizer state"
    OTHER = "other allocations"  # held by the process on the device, by nobody dyngran knows
    TANGENT = "tangent"
    ACTIVATION = "activation"
    OUTPUT = "output"
    GRADIENT = "gradient"
    TEMPORARY = "temporary"
    CARRIED = "outputs of the step before"  # held by the caller until forward has returned new ones

    @property
    def is_static(self) -> bool:
        """Held by the caller over the whole step: counted once in the static bytes, never planned."""
        return self in (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.OPTIMIZER, Kind.OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One storage. ``producer`` is the index of the op that makes it, or None for graph inputs and tangents."""

    index: int
    name: str
    size_bytes: int
    kind: Kind
    producer: int | None = None
    label: str = ""  # region and source line, for people

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise ValueError(f"{self.name}: size_bytes must be >= 0, got {self.size_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op. ``reads`` and ``writes`` are value indices; ``pinned`` says why it must not run twice ('' if it may).

    ``rerun_bytes`` are live beside ``workspace_bytes`` when the op runs in backward for the second time.
    """

    index: int
    name: str
    target: str
    side: Side
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    cost_us: float
    cost_source: str = "roofline"
    workspace_bytes: int = 0
    rerun_bytes: int = 0
    pinned: str = ""
    never_saved: bool = False  # made in a checkpoint region of the user's, or a constant: its results are recomputed, whatever the budget
    region: str = ""
    fusible: bool = False  # pointwise or reduction: a fusing code generator may inline it
    reduction: bool = False
    num_elements: int = 0  # iteration space of the op, for fusion groups

    def __post_init__(self) -> None:
        if self.cost_us < 0 or self.workspace_bytes < 0 or self.rerun_bytes < 0:
            raise ValueError(f"{self.name}: cost_us, workspace_bytes and rerun_bytes must be >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to store a value between forward and backward other than as it is.

    Attributes:
        value: what is stored; never an input, an output or a gradient.
        stored: the value that crosses instead. The op ``store`` makes it of ``value``; the op ``load`` reads it and makes ``value``
            again, in place of the op that made it in forward, beside which it stands. Both are `Side.FREE`, and ``ops[load].writes`` is
            empty, because a value has one producer: whoever replays a plan looks here. What ``load`` reads beside ``stored`` must be
            there in backward as well: what is missing of a slice is made of it.
        action, format: how; formats are named by those who offer them.
        again: ops of which ``load`` runs a part again: for what is ``barred``, each of them does.
        dimension, fraction: of a slice: along which dimension it is cut, and how much of the value is stored.
        evidence: how it is known that what is loaded serves its readers bit by bit, where that does not follow from the format.
        error: by how much what is loaded may differ, for people; "" if it serves its readers bit by bit.
        barred: ops that must not run again on what is loaded: where a plan lets one of them run in backward, the value itself is saved.
        fetch: the backward op just before which the value is loaded, if nobody needs it earlier; None: it is loaded when it is needed.
        copy_us: how long a copy takes that runs beside the kernels from the load on. Whoever reads the value first waits for what is left
            of it.
    """

    value: int
    stored: int
    store: int
    load: int
    action: Action
    format: str
    error: str = ""
    barred: frozenset[int] = frozenset()
    fetch: int | None = None
    copy_us: float = 0.0
    again: frozenset[int] = frozenset()
    dimension: int | None = None
    fraction: float | None = None
    evidence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything a planner may know.

    Attributes:
        values, ops: as above; ``values[i].index == i`` and ``ops[i].index == i``.
        forward_outputs: values the caller holds from their production to the end of backward.
        gradients: values that backward returns; live from their production to the end of backward.
        static_bytes: bytes held over the whole step by kind; not part of the timeline's transient.
        fused: True if the code generator fuses (Inductor); False if every op writes its results (eager).
        bytes_per_us: memory bandwidth; launch_us: cost of starting one kernel. Price fused pointwise work.
        stock: value sets that torch's own partitioners save, by name; seeds for the planners.
        keep_below_bytes: values at most this large are always kept if they break a chain of recompute (`keeps_as_small`); 0 keeps none.
        forms: how values may be stored other than as they are; of one value several. A plan that saves ``Form.stored`` loads the value
            in backward; of two forms that it names, and of a form and the value itself, the first counts, and the value before its forms.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    forward_outputs: frozenset[int]
    gradients: frozenset[int]
    static_bytes: dict[Kind, int] = field(default_factory=dict)
    fused: bool = False
    bytes_per_us: float = 1e4
    launch_us: float = 1.0
    stock: dict[str, frozenset[int]] = field(default_factory=dict)
    keep_below_bytes: int = 0
    forms: tuple[Form, ...] = ()
    form_of: dict[int, Form] = field(init=False, repr=False, compare=False)  # by ``Form.stored``

    def __post_init__(self) -> None:
        object.__setattr__(self, "form_of", {form.stored: form for form in self.forms})
        for position, value in enumerate(self.values):
            if value.index != position:
                raise ValueError(f"{value.name}: index {value.index} at position {position}")
        written: set[int] = {value.index for value in self.values if value.producer is None}
        written.update(self.form_of)  # a form may be stored long after the op that loads it, which runs in backward
        for position, op in enumerate(self.ops):
            if op.index != position:
                raise ValueError(f"{op.name}: index {op.index} at position {position}")
            missing = [self.values[read].name for read in op.reads if read not in written]
            if missing:
                raise ValueError(f"{op.name} reads {missing[0]} before it is produced: ops must stand in topological order")
            written.update(op.writes)

    def keeps_as_small(self, value: int) -> bool:
        """True if ``value`` is always kept: small, and made by an op that does not fuse, reduces, or reads something large, or saved by
        torch's own partition.

        Other small results of small operands cost nothing to make again, and each that is saved is one more operand of the fused loops
        in backward: Inductor writes an intermediate of more than four reads to memory instead of inlining it.
        """
        threshold = self.keep_below_bytes
        producer = self.values[value].producer
        if not threshold or producer is None or self.values[value].size_bytes > threshold or value in self.form_of:
            return False
        op = self.ops[producer]
        breaks_chain = not op.fusible or op.reduction or any(self.values[read].size_bytes > threshold for read in op.reads)
        return breaks_chain or (bool(self.stock) and value in self.stock[min(self.stock)])

    def drops_as_small(self, value: int) -> bool:
        """True if ``value`` is never saved although it could be: small, not one to keep, and not saved by torch's own partition.

        Which of a few bytes cross is no matter of memory. Left to a search it makes kernels that no partition of torch's makes, and that
        its compilers have not met.
        """
        is_small = 0 < self.values[value].size_bytes <= self.keep_below_bytes and value not in self.form_of
        return is_small and bool(self.stock) and self.values[value].producer is not None and not self.keeps_as_small(value)

    def parts_of(self, form: Form) -> tuple[int, ...]:
        """What is read beside what is stored where a form is loaded."""
        return tuple(read for read in self.ops[form.load].reads if read != form.stored)

    @property
    def total_static_bytes(self) -> int:
        return sum(self.static_bytes.values())
