"""A failing program made smaller, for as long as it fails in the same way: steps dropped, then numbers and fields made simple.

Programs stay valid whatever is dropped (`grammar.py`), so this needs neither hypothesis nor the choices that a program was drawn by; a
kept program shrinks as well as a drawn one. Where fewer steps do, the rest is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from grammar import Output, Program, Step, without_step

MAX_TRIES = 400


def shrink(program: Program, still_fails: Callable[[Program], bool], *, max_tries: int = MAX_TRIES) -> Program:
    """The smallest program that was found within so many tries; ``program`` itself must fail."""
    tries = 0
    found = True
    while found:
        found = False
        for candidate in simpler(program):
            if tries >= max_tries:
                return program
            tries += 1
            if still_fails(candidate):
                program, found = candidate, True
                break
    return program


def simpler(program: Program) -> Iterator[Program]:
    """Programs that are one change away, those with fewer steps first."""
    num_steps = len(program.steps)
    for half in (num_steps // 2, num_steps // 4):
        if half > 1:
            yield replace(program, steps=program.steps[half:])
            yield replace(program, steps=program.steps[:-half])
    for position in reversed(range(num_steps)):
        yield without_step(program, position)
    for place in reversed(range(len(program.outputs))):
        if len(program.outputs) > 1:
            yield replace(program, outputs=program.outputs[:place] + program.outputs[place + 1 :])
    for place in reversed(range(1, len(program.inputs))):
        yield replace(program, inputs=program.inputs[:place] + program.inputs[place + 1 :])
    plain = Program()
    for field in fields(Program):
        if field.name not in ("steps", "outputs", "inputs") and getattr(program, field.name) != getattr(plain, field.name):
            yield replace(program, **{field.name: getattr(plain, field.name)})
    for place, output in enumerate(program.outputs):
        for plainer in (Output(), replace(output, ref=0), replace(output, form="value")):
            if plainer != output:
                yield replace(program, outputs=(*program.outputs[:place], plainer, *program.outputs[place + 1 :]))
    for position, step in enumerate(program.steps):
        for less in simpler_steps(step):
            yield replace(program, steps=(*program.steps[:position], less, *program.steps[position + 1 :]))


def simpler_steps(step: Step) -> Iterator[Step]:
    if step != Step(step.op):
        yield Step(step.op)
    for name in ("a", "b", "k"):
        value = getattr(step, name)
        for less in sorted({0, value // 2, value - 1}):
            if 0 <= less < value:
                yield replace(step, **{name: less})
