"""Random training programs as data: what is drawn, shrunk, kept in the corpus and rendered by `net.py`.

A program is a flat list of steps that all have the same four fields, and every combination of numbers means something (`operations.py`
brings operands into shape, counts refer to the latest values). So any step can be dropped and any number made smaller, and what is left is
still a program: it shrinks well, by hypothesis or by `shrink.py`.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import msgspec
from operations import OPERATIONS, REGIONS, WEIGHTS

DTYPES = ("float32", "float64", "bfloat16")
INPUT_KINDS = ("leaf", "plain", "computed", "overlapping", "permuted")
OUTPUT_FORMS = ("value", "view", "again", "input", "detached")
ROWS = (4, 1, 2, 3, 6, 16)
WIDTHS = (8, 4, 16)


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on the values before it. ``a`` and ``b`` count back from the latest value of the kind that is wanted; ``k`` chooses
    among variants; a region (`REGIONS`) covers the ``1 + k % 4`` steps that follow."""

    op: str
    a: int = 0
    b: int = 0
    k: int = 0

    def __post_init__(self) -> None:
        if self.op not in OPERATIONS and self.op not in REGIONS:
            raise ValueError(f"{self.op} is no operation of this fuzzer: it was renamed or removed since the program was kept")


@dataclass(frozen=True, slots=True)
class Output:
    """What is returned: the value ``ref`` before the last, as it is, as a view of it, or an input. The loss is made of those that are used,
    and of the first; those that are not may be of any dtype."""

    ref: int = 0
    form: str = "value"
    is_used: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A module, its inputs and how it is trained.

    Attributes:
        data_seed: of weights, inputs and random masks.
        inputs: kinds; ids (integers) and a mask come with every program. ``overlapping`` inputs are views of one memory.
        steps: the body. outputs: what is returned beside the loss.
        frozen: the parameters whose slot has this bit need no gradient.
        flag: a Python bool that the module branches on.
        is_loss_inside: the module returns its loss first; else it is made outside, from the outputs that are used.
        later_rows: rows of the second step, 0 for the same. is_marked: the batch dimension is marked dynamic.
        accumulates: gradients of the first step stay for the second.
    """

    data_seed: int = 0
    rows: int = 4
    width: int = 8
    dtype: str = "float32"
    inputs: tuple[str, ...] = ("leaf",)
    steps: tuple[Step, ...] = ()
    outputs: tuple[Output, ...] = (Output(),)
    frozen: int = 0
    flag: bool = False
    is_loss_inside: bool = True
    later_rows: int = 0
    is_marked: bool = False
    accumulates: bool = False


class Draw(Protocol):
    """A source of choices: a seeded generator, or hypothesis. Small numbers are the simple ones."""

    def number(self, below: int) -> int:
        """From 0 to ``below`` - 1."""


@dataclass(frozen=True, slots=True)
class SeededDraw:
    random: random.Random

    def number(self, below: int) -> int:
        return self.random.randrange(below)


def program_of(seed: int) -> Program:
    """The program of a seed: the same in every process, as long as the grammar stays as it is."""
    return draw_program(SeededDraw(random.Random(f"dyngran {seed}")))


def draw_program(draw: Draw) -> Program:
    inputs = ("leaf", *(INPUT_KINDS[draw.number(len(INPUT_KINDS))] for _ in range(draw.number(3))))
    return Program(
        data_seed=draw.number(1000),
        rows=ROWS[draw.number(len(ROWS))],
        width=WIDTHS[draw.number(len(WIDTHS))],
        dtype=DTYPES[max(0, draw.number(12) - 9)],
        inputs=inputs,
        steps=tuple(_draw_step(draw) for _ in range(1 + draw.number(14))),
        outputs=tuple(_draw_output(draw) for _ in range(1 + draw.number(3))),
        frozen=draw.number(16) if draw.number(4) == 3 else 0,
        flag=draw.number(2) == 1,
        is_loss_inside=draw.number(3) != 2,
        later_rows=ROWS[draw.number(len(ROWS))] if draw.number(3) == 2 else 0,
        is_marked=draw.number(2) == 1,
        accumulates=draw.number(4) == 3,
    )


def _draw_step(draw: Draw) -> Step:
    place = draw.number(sum(WEIGHTS.values()))
    for name, weight in WEIGHTS.items():
        if place < weight:
            return Step(name, a=_draw_ref(draw), b=draw.number(8), k=draw.number(16))
        place -= weight
    raise AssertionError("weights changed while they were read")


def _draw_ref(draw: Draw) -> int:
    """Mostly the latest value, so that steps build on one another."""
    return max(0, draw.number(10) - 5)


def _draw_output(draw: Draw) -> Output:
    return Output(ref=draw.number(4), form=OUTPUT_FORMS[max(0, draw.number(len(OUTPUT_FORMS) + 3) - 3)], is_used=draw.number(4) != 3)


def to_document(program: Program) -> dict[str, Any]:
    return asdict(program)


def from_document(document: dict[str, Any]) -> Program:
    """Raises `msgspec.ValidationError` for what is no program, ValueError for an unknown operation."""
    return msgspec.convert(document, Program)


def without_step(program: Program, position: int) -> Program:
    return replace(program, steps=program.steps[:position] + program.steps[position + 1 :])
