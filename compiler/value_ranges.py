"""The least and the greatest number that an integer tensor of a graph can hold, read off what makes it and who has read it in forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx

from dyngran.compiler import torch_private
from dyngran.compiler.storages import aliased_argument
from dyngran.passes.costs import base_name

Range = tuple[int, int]

MAX_STEPS = 32  # back along copies and choices of elements

_POSITIONS_ALONG = frozenset({"max", "min", "topk", "sort", "median", "nanmedian", "mode", "kthvalue", "cummax", "cummin"})  # member 1
_POSITIONS = frozenset({"argmax", "argmin", "argsort"})
_POOLS = {"max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3, "adaptive_max_pool2d": 2, "adaptive_max_pool3d": 3,
          "fractional_max_pool2d": 2, "fractional_max_pool3d": 3}  # fmt: skip
_CHOOSE_ELEMENTS = frozenset(
    {"clone", "gather", "index_select", "index", "flip", "roll", "repeat", "alias", "take_along_dim", "masked_select"}
)
_CASTS = frozenset({"_to_copy", "convert_element_type"})


def value_range(node: fx.Node, readers: Iterable[fx.Node]) -> Range | None:
    """(least, greatest) of what an integer tensor may hold, both included; None if only its type says something.

    Of memory that views share ``node`` is what made it. ``readers`` are those that have run before backward begins: they speak as well,
    since an embedding that has run was given indices that it has rows for. Sizes that are not known make no range.
    """
    found = [made] if (made := _made(node, 0)) is not None else []
    found += [read for reader in readers if (read := _read_as(node, reader)) is not None]
    if not found:
        return None
    return max(least for least, _ in found), min(greatest for _, greatest in found)


def _made(node: fx.Node, num_steps: int) -> Range | None:
    """By what makes the numbers."""
    if num_steps > MAX_STEPS or node.op != "call_function":
        return None
    if torch_private.is_getitem(node):
        owner, member = node.args
        return _member(owner, member) if isinstance(owner, fx.Node) and isinstance(member, int) else None
    if (below := aliased_argument(node)) is not None:
        return _made(below, num_steps + 1) if _dtype(below) is _dtype(node) else None  # else other numbers of the same bytes
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = base_name(node.target)
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if name in _POSITIONS and source is not None:
        return _positions(_size_along(source, _argument(node, "dim", 1, None)))
    if name in _CHOOSE_ELEMENTS and source is not None:
        return _made(source, num_steps + 1)
    if name in _CASTS and source is not None:
        return _cast(source, _dtype(node), num_steps)
    if name in ("randint", "randperm"):
        return _drawn(node)
    return None


def _member(owner: fx.Node, member: int) -> Range | None:
    if not isinstance(owner.target, torch._ops.OpOverload) or member != 1 or not owner.args or not isinstance(owner.args[0], fx.Node):
        return None
    name, source = base_name(owner.target), owner.args[0]
    if name in _POOLS:
        sizes = source.meta["val"].shape[-_POOLS[name] :]
        return _positions(torch.Size(sizes).numel() if all(isinstance(size, int) for size in sizes) else None)
    if name in _POSITIONS_ALONG:
        place = 2 if name in ("topk", "kthvalue") else 1
        return _positions(_size_along(source, _argument(owner, "dim", place, -1)))
    return None


def _argument(node: fx.Node, name: str, place: int, default: object) -> object:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _size_along(source: fx.Node, dim: object) -> int | None:
    """Elements along a dimension, or all of them for no dimension; None if that is not known."""
    tensor = source.meta["val"]
    if not all(isinstance(size, int) for size in tensor.shape) or not (dim is None or isinstance(dim, int)):
        return None
    return int(tensor.numel()) if dim is None else (int(tensor.shape[dim]) if tensor.dim() else 1)


def _positions(count: int | None) -> Range | None:
    return None if count is None else (0, max(count - 1, 0))


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _cast(source: fx.Node, target: torch.dtype, num_steps: int) -> Range | None:
    """Numbers that the new type has not become others: then nothing is known but that type."""
    dtype = _dtype(source)
    if dtype is torch.bool:
        return 0, 1
    if dtype.is_floating_point or dtype.is_complex or target.is_floating_point or target.is_complex or target is torch.bool:
        return None
    least, greatest = _made(source, num_steps + 1) or (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    limits = torch.iinfo(target)
    return (least, greatest) if limits.min <= least and greatest <= limits.max else (limits.min, limits.max)


def _drawn(node: fx.Node) -> Range | None:
    """Of ``randint(high, size)``, ``randint(low, high, size)`` and ``randperm(n)``."""
    bounds = [arg for arg in node.args if isinstance(arg, int)]
    if len(bounds) != len([arg for arg in node.args if not isinstance(arg, (list, tuple))]) or not 0 < len(bounds) < 3:
        return None
    return (0, bounds[0] - 1) if len(bounds) == 1 else (bounds[0], bounds[1] - 1)


def _read_as(node: fx.Node, user: fx.Node) -> Range | None:
    """By a reader that would have refused any other number."""
    if not isinstance(user.target, torch._ops.OpOverload):
        return None
    reads = _INDICES_OF.get(base_name(user.target))
    return None if reads is None else reads(node, user)


def _of_embedding(node: fx.Node, user: fx.Node) -> Range | None:
    weight, indices = user.args[:2]
    if indices is not node or not isinstance(weight, fx.Node):
        return None
    return _positions(_size_along(weight, 0))


def _of_dimension(node: fx.Node, user: fx.Node) -> Range | None:
    """``gather(x, dim, index)`` and its like."""
    if len(user.args) < 3:
        return None
    source, dim, indices = user.args[:3]
    if indices is not node or not isinstance(source, fx.Node) or not isinstance(dim, int):
        return None
    return _positions(_size_along(source, dim))


_INDICES_OF: dict[str, Callable[[fx.Node, fx.Node], Range | None]] = {
    "embedding": _of_embedding,
    "gather": _of_dimension,
    "index_select": _of_dimension,
    "scatter": _of_dimension,
    "scatter_add": _of_dimension,
}
