"""Graphs made independent of how the code generator lays out images, and convolutions priced as it lays them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from dyngran.compiler.prepare import fix_layouts_under_strided_views
from dyngran.compiler.pricing import in_channels_last
from dyngran.passes.signature import TensorSpec, concrete


def strided(make: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> tuple[list[str], fx.Node]:
    """Operators of a graph whose ``make`` ends in `as_strided`, after its layouts were fixed, and the node that took its place."""
    module = make_fx(lambda y: make(y * 2), tracing_mode="fake")(torch.empty(shape))
    module.graph.eliminate_dead_code()
    fix_layouts_under_strided_views(module.graph)
    module.recompile()
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    real = torch.randn(shape)
    assert torch.equal(module(real), make(real * 2))
    return [str(node.target).removeprefix("aten.").split(".")[0] for node in calls], calls[-1]


def test_a_strided_view_that_renames_dimensions_becomes_a_view() -> None:
    assert strided(lambda y: y.as_strided((2, 16), (16, 1)), (2, 4, 4, 1))[0] == ["mul", "view"]


def test_a_strided_view_of_other_elements_looks_into_contiguous_memory() -> None:
    assert strided(lambda y: y.as_strided((2, 6), (16, 2)), (2, 4, 4, 1))[0] == ["mul", "clone", "as_strided"]
    names, node = strided(lambda y: y[:, 1:].as_strided((2, 12), (16, 1), 4), (2, 4, 4, 1))
    assert names[-2:] == ["clone", "as_strided"]
    assert node.args[3] == 4


def test_a_strided_view_beyond_a_chunk_is_left_alone() -> None:
    assert "clone" not in strided(lambda y: y.split(1)[0].as_strided((2, 8), (16, 1)), (2, 4, 4, 1))[0]


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.empty(2, 3, 4, 5), (60, 1, 15, 3)),
        (torch.empty(2, 8, 4, 5)[:, 2:5], (160, 1, 40, 8)),  # three channels of eight
        (torch.empty(2, 3, 4, 1).expand(2, 3, 4, 5), (60, 1, 15, 3)),
        (torch.empty(2, 3, 0, 5), torch.empty(2, 3, 0, 5).stride()),  # nothing to lay out
        (torch.empty(2, 3), (3, 1)),
    ],
)
def test_images_are_priced_channels_last(tensor: Tensor, stride: tuple[int, ...]) -> None:
    assert concrete(in_channels_last(tensor)) == replace(TensorSpec.of(tensor), stride=stride)
