"""Values of a stored graph and of one that differs are paired region by region; shares are counted by hand."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Builder, problems, transformer
from test_isomorphism import shuffled

from dyngran.passes.correspondence import MAX_NAMED_OPS, MAX_SENTENCES, Correspondence, correspondence
from dyngran.passes.isomorphism import isomorphism
from dyngran.passes.problem import Kind, Problem, Side

NORM, ATTENTION, MIX = 4, 8, 4  # bytes that a layer makes for backward
LAYER = NORM + ATTENTION + MIX


def layers(count: int, *, attention: Sequence[str] = (), names: str = "layers.{}", sizes: Sequence[int] = ()) -> Problem:
    """Layers of three forward ops and three backward ops; ``attention`` and ``sizes`` say for each what attends, and makes how much."""
    build = Builder()
    stream = build.given(4, Kind.INPUT)
    tape = []
    for layer in range(count):
        region = names.format(layer)
        target = attention[layer] if attention else "flash"
        normed = build.op([stream], NORM, target="norm", region=region)
        mixed = build.op([normed], sizes[layer] if sizes else ATTENTION, target=target, region=region)
        tape.append((region, target, stream, normed, mixed))
        stream = build.op([stream, mixed], MIX, target="add", region=region)
    build.outputs.add(build.op([stream], 0, target="loss", region="head"))
    tangent = build.given(0, Kind.TANGENT)
    gradient = build.op([stream, tangent], 0, target="loss_backward", side=Side.BACKWARD, region="head", kind=Kind.TEMPORARY)
    for region, target, before, normed, mixed in reversed(tape):
        for read, name in ((mixed, "add_backward"), (normed, f"{target}_backward"), (before, "norm_backward")):
            gradient = build.op([gradient, read], 0, target=name, side=Side.BACKWARD, region=region, kind=Kind.TEMPORARY)
    build.gradients.add(gradient)
    return build.build()


def made_in_forward(problem: Problem) -> list[int]:
    return [value.index for value in problem.values if value.producer is not None and problem.ops[value.producer].side is Side.FORWARD]


def compared(stored: Problem, here: Problem) -> Correspondence:
    """With everything that forward makes decided about. What holds of any two graphs is checked at once."""
    there, ours = made_in_forward(stored), made_in_forward(here)
    found = correspondence(stored, here, matter_there=there, matter_here=ours)
    partners = list(found.values.values())
    assert len(set(partners)) == len(partners)
    for left, right in found.values.items():
        assert stored.values[left].producer is not None and here.values[right].producer is not None
        assert stored.values[left].size_bytes == here.values[right].size_bytes
    shares = []
    for problem, matter, paired in ((stored, there, set(found.values)), (here, ours, set(partners))):
        total = sum(problem.values[value].size_bytes for value in matter)
        shares.append(sum(problem.values[value].size_bytes for value in matter if value in paired) / total if total else 1.0)
    assert found.share == pytest.approx(min(shares)) and 0 <= found.share <= 1
    assert len(found.mismatches) <= MAX_SENTENCES
    return found


def moves(found: Correspondence, stored: Problem, here: Problem) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """(region, target) of the makers of partners, where they are not the same."""
    pairs = []
    for left, right in found.values.items():
        makers = stored.values[left].producer, here.values[right].producer
        assert makers[0] is not None and makers[1] is not None
        mine, yours = stored.ops[makers[0]], here.ops[makers[1]]
        pairs.append(((mine.region, mine.target), (yours.region, yours.target)))
    return [(mine, yours) for mine, yours in pairs if mine != yours]


def with_regions(problem: Problem, regions: Sequence[str]) -> Problem:
    return replace(problem, ops=tuple(replace(op, region=regions[op.index % len(regions)]) for op in problem.ops))


def moved(problem: Problem, seed: int) -> Problem:
    """In another order, each op in the region that it was in."""
    other = shuffled(problem, seed)
    found = isomorphism(problem, other)
    assert found is not None
    regions = {there: problem.ops[here].region for here, there in enumerate(found.ops)}
    return replace(other, ops=tuple(replace(op, region=regions[op.index]) for op in other.ops))


REGIONS = st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=5)


@settings(max_examples=60)
@given(problem=problems(), regions=REGIONS, seed=st.integers(0, 99))
def test_equal_graphs_correspond_in_everything(problem: Problem, regions: list[str], seed: int) -> None:
    problem = with_regions(problem, regions)
    found = compared(problem, problem)
    assert found.values == {value.index: value.index for value in problem.values if value.producer is not None}
    assert (found.share, found.mismatches) == (1.0, ())
    again = compared(problem, moved(problem, seed))
    assert again.values.keys() == found.values.keys()
    assert (again.share, again.mismatches) == (1.0, ())


@settings(max_examples=100)
@given(data=st.data())
def test_of_any_two_graphs_values_of_one_size_are_paired(data: st.DataObject) -> None:
    """`compared` says what must hold of them; and regions of one name stay together."""
    one, two = (with_regions(data.draw(problems()), data.draw(REGIONS)) for _ in range(2))
    found, back = compared(one, two), compared(two, one)
    assert (not found.mismatches) == (not back.mismatches)
    both = {op.region for op in one.ops} & {op.region for op in two.ops}
    for (mine, _), (yours, _) in moves(found, one, two):
        assert mine not in both and yours not in both


def test_another_attention_in_one_layer_names_the_layer_and_both_ops() -> None:
    stored, here = layers(3), layers(3, attention=("flash", "cudnn", "flash"))
    found = compared(stored, here)
    assert found.mismatches == (
        "layers.1: 1 flash, 1 flash_backward only in the plan; 1 cudnn, 1 cudnn_backward only in the graph at hand",
    )
    assert found.share == (3 * LAYER - ATTENTION) / (3 * LAYER)
    assert moves(found, stored, here) == [], "the norm and the sum of layer 1 are where they were"
    missing = {
        stored.ops[maker].target for value in stored.values if (maker := value.producer) is not None and value.index not in found.values
    }
    assert missing == {"flash", "flash_backward"}
    every = compared(stored, layers(3, attention=("cudnn",) * 3))
    assert every.mismatches == (
        "layers.0, layers.1, layers.2: 1 flash, 1 flash_backward only in the plan; 1 cudnn, 1 cudnn_backward only in the graph at hand",
    )
    assert every.share == (LAYER - ATTENTION) / LAYER


def test_another_size_is_no_partner() -> None:
    """At hand the attention of layer 0 makes twice as much: the smaller share counts."""
    stored, here = layers(2), layers(2, sizes=(2 * ATTENTION, ATTENTION))
    found = compared(stored, here)
    assert found.mismatches == ("layers.0: the same ops with other sizes or connections",)
    assert found.share == (2 * LAYER - ATTENTION) / (2 * LAYER + ATTENTION)
    assert compared(here, stored).share == found.share


def test_renamed_regions_are_found_by_how_they_look() -> None:
    stored = layers(4, attention=("flash", "cudnn", "flash", "math"))
    here = layers(4, attention=("flash", "cudnn", "flash", "math"), names="model.blocks.{}.inner")
    found = compared(stored, here)
    assert (found.share, found.mismatches) == (1.0, ())
    assert found.values == {value.index: value.index for value in stored.values if value.producer is not None}


def test_renamed_and_changed_is_told_as_two_differences() -> None:
    stored, here = layers(2), layers(2, attention=("flash", "cudnn"), names="blocks.{}")
    found = compared(stored, here)
    assert found.mismatches == ("blocks.1: only in the graph at hand, 6 ops", "layers.1: only in the plan, 6 ops")
    assert found.share == LAYER / (2 * LAYER)


@pytest.mark.parametrize("more", [1, 5])
def test_a_layer_that_one_side_does_not_have(more: int) -> None:
    few, many = layers(3), layers(3 + more)
    names = "layers.3" if more == 1 else "layers.3, layers.4, layers.5 and 2 more"
    for stored, here, side in ((many, few, "plan"), (few, many, "graph at hand")):
        found = compared(stored, here)
        assert found.mismatches == (f"{names}: only in the {side}, 6 ops",)
        assert found.share == 3 / (3 + more)
        assert moves(found, stored, here) == []


def test_an_op_more_in_a_region_moves_nothing_else() -> None:
    """A norm more at the beginning of layer 1: what comes after it is aligned, not counted from the start."""
    build = Builder()
    stored = layers(3)
    place = next(op.index for op in stored.ops if op.region == "layers.1")
    last = len(stored.values)
    build.values = [*stored.values]
    build.given(32)
    scale = replace(stored.ops[place], index=place, name="scale", target="scale", writes=(last,))
    later = [replace(op, index=op.index + 1) for op in stored.ops[place:]]
    values = (
        *(replace(v, producer=v.producer + 1) if v.producer is not None and v.producer >= place else v for v in stored.values),
        replace(build.values[last], kind=Kind.ACTIVATION, producer=place),
    )
    here = replace(stored, values=values, ops=(*stored.ops[:place], scale, *later))
    found = compared(stored, here)
    assert found.mismatches == ("layers.1: 1 scale only in the graph at hand",)
    assert found.values == {value.index: value.index for value in stored.values if value.producer is not None}
    assert found.share == 3 * LAYER / (3 * LAYER + 32)


def test_sentences_are_few_and_short() -> None:
    count = MAX_SENTENCES + 4
    stored, here = layers(count), layers(count, attention=[f"kind {layer}" for layer in range(count)])
    found = compared(stored, here)
    assert len(found.mismatches) == MAX_SENTENCES
    assert found.mismatches[-1] == "and 5 more kinds of difference"
    assert [sentence.split(":")[0] for sentence in found.mismatches[:-1]] == [f"layers.{layer}" for layer in range(MAX_SENTENCES - 1)]
    exactly = compared(layers(MAX_SENTENCES), layers(MAX_SENTENCES, attention=[f"kind {layer}" for layer in range(MAX_SENTENCES)]))
    assert len(exactly.mismatches) == MAX_SENTENCES and "more kinds" not in exactly.mismatches[-1]
    nothing_alike = replace(stored, ops=tuple(replace(op, region="all", target=f"{op.target} {op.index}") for op in stored.ops))
    (sentence,) = compared(nothing_alike, replace(stored, ops=tuple(replace(op, region="all") for op in stored.ops))).mismatches
    assert f"and {len(stored.ops) - MAX_NAMED_OPS} more only in the plan" in sentence


def test_ops_without_a_region_are_a_region() -> None:
    stored = transformer(2)
    bare = [op.index for op in stored.ops if not op.region]
    assert bare
    here = replace(stored, ops=tuple(replace(op, target="sum") if op.index == bare[0] else op for op in stored.ops))
    found = compared(stored, here)
    assert found.mismatches == ("(no region): 1 add only in the plan; 1 sum only in the graph at hand",)
    assert len(found.values) == len(stored.ops) - 1


def test_nothing_that_matters_is_a_whole_share() -> None:
    one = layers(1)
    assert correspondence(one, layers(2), matter_there=(), matter_here=()).share == 1.0
    assert correspondence(one, layers(2), matter_there=made_in_forward(one), matter_here=()).share == 1.0


def test_only_what_a_plan_decides_about_counts() -> None:
    stored, here = layers(2), layers(2, attention=("flash", "cudnn"))
    attended = [value.index for value in stored.values if value.size_bytes == ATTENTION and value.producer is not None]
    others = [value for value in made_in_forward(stored) if value not in attended]
    assert correspondence(stored, here, matter_there=others, matter_here=others).share == 1.0
    assert correspondence(stored, here, matter_there=attended, matter_here=attended).share == 0.5
    assert correspondence(stored, here, matter_there=others, matter_here=attended).share == 0.5


def test_no_pairing_depends_on_the_order_of_hashes() -> None:
    program = (
        "from test_correspondence import compared, layers, moved\n"
        "from problems import layered\n"
        "print(compared(layers(5), moved(layers(6, attention='abcdef', names='b.{}'), 3)))\n"
        "print(compared(layered(1, 20), layered(2, 20)))\n"
    )
    printed = set()
    for seed in ("0", "1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.count("Correspondence(") == 2
        printed.add(done.stdout)
    assert len(printed) == 1
