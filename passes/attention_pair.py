"""Inputs for measuring a backward of attention: its saved results come from a real forward call.

Fused attention kernels hand their backward random seeds, offsets and sequence tables that are addresses and sizes to the kernel: made-up
ones make it read outside of its tensors. So the forward is run on the same queries, keys and values, and what it returns is passed on.
"""

from __future__ import annotations

from typing import Any

import torch

# Names of forward's results where backward calls them otherwise.
_RENAMED = {"output": "out", "log_sumexp": "logsumexp", "rng_state": "philox_seed", "unused": "philox_offset"}


def is_attention_backward(target: torch._ops.OpOverload) -> bool:
    """True for the backward of `scaled_dot_product_attention`'s fused kernels."""
    name = target._schema.name
    return name.startswith("aten::_scaled_dot_product_") and name.endswith("_attention_backward")


def with_real_forward(
    target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with out, logsumexp, seeds and sequence tables from a forward call on its query, key and value."""
    schema = target._schema
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    forward = getattr(torch.ops.aten, schema.name.removeprefix("aten::").removesuffix("_backward")).default
    wanted = {argument.name: given[argument.name] for argument in forward._schema.arguments if argument.name in given}
    if any(argument.name == "compute_log_sumexp" for argument in forward._schema.arguments):
        wanted["compute_log_sumexp"] = True
    results = forward(**wanted)
    named = {_RENAMED.get(r.name, r.name): value for r, value in zip(forward._schema.returns, results, strict=True)}
    given |= {name: value for name, value in named.items() if name in given}
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    keywords = {argument.name: given[argument.name] for argument in schema.arguments if argument.kwarg_only and argument.name in given}
    return tuple(given[name] for name in positional if name in given), keywords
