"""Which operator F.scaled_dot_product_attention runs on a CUDA card of a given compute capability, for tensors on the CPU.

Sources, read in copies of pytorch/pytorch from late 2025 on, none of them exactly a release: the choice is
``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (priority_order, can_use_cudnn_attention, can_use_flash_attention,
can_use_mem_efficient_attention) with the checks of ``aten/src/ATen/native/transformers/sdp_utils_cpp.h``; what is done to the arguments
is ``attention.cpp`` beside that (scaled_dot_product_attention). On an H200 with torch 2.11 ``torch._fused_sdp_choice`` agreed on 15,584
combinations of arguments. Assumed is cuDNN 9.15.1 or newer, as the wheels of CUDA 13 bring it: with an older one a card prefers flash
attention. The newest copy, of a later main, differs: grouped queries in efficient attention, no cuDNN dropout but multiples of 1/16,
cuDNN's largest head by its version, storage offsets of efficient attention aligned. Nested tensors are not handled.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

_HALF = (torch.float16, torch.bfloat16)
_SUPPORTED = ((8, 0), (12, 1))  # cards of flash attention and cuDNN's; memory-efficient attention begins at 5.0
_MATH, _FLASH, _EFFICIENT, _CUDNN = range(4)  # torch.nn.attention.SDPBackend
_MASK_ALIGNMENT = 8  # elements, of every row of a mask that efficient attention reads
_HEAD_ALIGNMENT = 8  # elements, of the head size that flash attention computes with


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments that decide: query (batch, heads, length, head size), key and value likewise, and the card."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool
    capability: tuple[int, int]

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def install(register: Callable[[str, Callable[..., Any], str], None], capability: tuple[int, int]) -> None:
    """Make F.scaled_dot_product_attention choose what CUDA would on a card of ``capability``, in forward and so in backward."""
    if _prefers_cudnn(capability):
        torch._C._set_sdp_priority_order([_CUDNN, _FLASH, _EFFICIENT, _MATH])

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        call = Call(
            query=query,
            key=key,
            value=value,
            mask=attn_mask,
            dropout=dropout_p,
            causal=is_causal,
            grouped=enable_gqa,
            capability=capability,
        )
        _validate(call)
        return _RUN[choose(call)](call, scale)

    register("scaled_dot_product_attention", kernel, "CompositeImplicitAutograd")


def choose(call: Call) -> int:
    """The first backend in torch's order of priority that is enabled and takes the call.

    Raises RuntimeError if there is none.
    """
    allowed: dict[int, Callable[[Call], bool]] = {
        _CUDNN: _takes_cudnn,
        _FLASH: _takes_flash,
        _EFFICIENT: _takes_efficient,
        _MATH: lambda _: torch._C._get_math_sdp_enabled(),
    }
    for backend in torch._C._get_sdp_priority_order():
        if backend in allowed and allowed[backend](call):
            return int(backend)
    raise RuntimeError("no enabled backend of scaled_dot_product_attention takes these arguments on this card")


def _prefers_cudnn(capability: tuple[int, int]) -> bool:
    return os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1" and capability in ((9, 0), (10, 0), (10, 3))


def _takes_cudnn(call: Call) -> bool:
    deterministic = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return (
        torch._C._get_cudnn_sdp_enabled()
        and not deterministic
        and _is_four_dimensional(call)
        and _has_half(call)
        and _SUPPORTED[0] <= call.capability <= _SUPPORTED[1]
        and _mask_fits(call)
        and _is_dense(call, singleton=True)
        and _heads_fit(call, grouped=True)
        and _fits_cudnn(call)
    )


def _takes_flash(call: Call) -> bool:
    return (
        torch._C._get_flash_sdp_enabled()
        and _is_four_dimensional(call)
        and call.mask is None
        and len({t.shape[-1] for t in (call.query, call.key, call.value)}) == 1
        and call.query.shape[-1] <= 256
        and _SUPPORTED[0] <= call.capability <= _SUPPORTED[1]
        and _has_flash_backward(call)
        and (not call.causal or call.query.shape[-2] == call.key.shape[-2])
        and _has_half(call)
        and _is_dense(call, singleton=True)
        and _heads_fit(call, grouped=True)
    )


def _takes_efficient(call: Call) -> bool:
    dtypes = {torch.float16, torch.float32} | ({torch.bfloat16} if call.capability[0] >= 8 else set())
    alignment = _gemm_alignment(call)
    heads = (call.query.shape[-1], call.value.shape[-1])
    return (
        torch._C._get_mem_efficient_sdp_enabled()
        and (5, 0) <= call.capability <= _SUPPORTED[1]
        and _is_four_dimensional(call)
        and call.query.shape[-1] == call.key.shape[-1]
        and all(size > 0 and size % alignment == 0 for size in heads)
        and _is_dense(call, singleton=False)
        and _heads_fit(call, grouped=False)
        and _has_dtype(call, dtypes)
    )


def _is_four_dimensional(call: Call) -> bool:
    return call.query.dim() == call.key.dim() == call.value.dim() == 4


def _has_dtype(call: Call, dtypes: set[torch.dtype]) -> bool:
    return call.query.dtype == call.key.dtype == call.value.dtype and call.query.dtype in dtypes


def _has_half(call: Call) -> bool:
    return _has_dtype(call, set(_HALF) if call.capability[0] >= 8 else {torch.float16})


def _is_dense(call: Call, *, singleton: bool) -> bool:
    """No empty sequence, and last dimensions contiguous; a head size of one counts as that if ``singleton``."""
    if call.query.shape[-2] == 0 or call.key.shape[-2] == 0:
        return False
    strides = all(t.stride(-1) == 1 for t in (call.query, call.key, call.value)) or (singleton and call.query.shape[-1] == 1)
    return strides and (call.mask is None or call.mask.stride(-1) == 1)


def _heads_fit(call: Call, *, grouped: bool) -> bool:
    """Equal batches, and equal numbers of heads or, if the backend is ``grouped``, groups of query heads for each of key and value."""
    if not call.query.shape[0] == call.key.shape[0] == call.value.shape[0]:
        return False
    queries, keys, values = (t.shape[-3] for t in (call.query, call.key, call.value))
    if call.grouped and grouped:
        return bool(keys == values and queries % keys == 0)
    return bool(queries == keys == values)


def _mask_fits(call: Call) -> bool:
    """A mask without gradient of (length or 1, key length or 1), perhaps below (batch or 1, heads or 1)."""
    mask = call.mask
    if mask is None:
        return True
    whole = (*call.query.shape[:3], call.key.shape[2])
    sizes = zip(mask.shape[::-1], whole[::-1], strict=False)
    return not mask.requires_grad and mask.dim() in (2, 4) and all(size in (1, full) for size, full in sizes)


def _fits_cudnn(call: Call) -> bool:
    heads = (call.query.shape[3], call.value.shape[3])
    limit = 256 if call.capability == (9, 0) else 192 if call.capability[0] == 10 and heads == (192, 128) else 128
    if not all(size <= limit and size % 8 == 0 for size in heads):
        return False
    return bool(call.key.shape[2] != 1 and (call.query.shape[2] != 1 or call.dropout == 0.0))


def _has_flash_backward(call: Call) -> bool:
    """Cards with little shared memory have no backward for large heads."""
    small = (8, 6) <= call.capability <= (8, 9) or (12, 0) <= call.capability <= (12, 1)
    head = call.query.shape[-1]
    return not (small and call.needs_grad and (192 < head <= 224 or (head > 224 and call.dropout > 0)))


def _gemm_alignment(call: Call) -> int:
    """Elements that head sizes of efficient attention are multiples of."""
    half = call.query.dtype in _HALF
    tensor_cores = call.capability[0] >= 8 or (call.capability[0] >= 7 and half)
    least = 4 if call.capability[0] >= 8 else 1
    return max(least, 128 // (16 if half else 32)) if tensor_cores else least


def _validate(call: Call) -> None:
    if call.causal and call.mask is not None:
        raise RuntimeError("scaled_dot_product_attention: is_causal=True excludes attn_mask")
    if not call.query.dtype == call.key.dtype == call.value.dtype:
        raise RuntimeError(f"scaled_dot_product_attention: dtypes {call.query.dtype}, {call.key.dtype}, {call.value.dtype} differ")


def _additive(call: Call, excluded: float) -> torch.Tensor | None:
    """The mask as what is added to the scores: ``excluded`` where a boolean one is False."""
    mask = call.mask
    if mask is None or mask.dtype != torch.bool:
        return mask
    other = torch.ops.aten.scalar_tensor.default(excluded, dtype=call.query.dtype, device=mask.device)
    return torch.ops.aten.where.ScalarSelf(mask, 0.0, other)  # type: ignore[no-any-return]  # an operator is not annotated


def _run_cudnn(call: Call, scale: float | None) -> Any:
    mask = _additive(call, -65504.0)  # cuDNN takes no infinity
    return torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        call.query, call.key, call.value, mask, call.needs_grad, call.dropout, call.causal, False, scale=scale
    )[0]


def _run_flash(call: Call, scale: float | None) -> Any:
    head = call.query.shape[-1]
    padding = -head % _HEAD_ALIGNMENT
    padded = [F.pad(t, (0, padding)) if padding else t for t in (call.query, call.key, call.value)]
    scale = float(1.0 / math.sqrt(head)) if scale is None else scale
    out = torch.ops.aten._scaled_dot_product_flash_attention.default(*padded, call.dropout, call.causal, False, scale=scale)[0]
    return out[..., :head] if padding else out


def _run_efficient(call: Call, scale: float | None) -> Any:
    mask = _additive(call, -math.inf)
    if mask is not None:
        mask = _aligned(mask).expand(*call.query.shape[:3], call.key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention.default(
        call.query, call.key, call.value, mask, call.needs_grad, call.dropout, call.causal, scale=scale
    )[0]


def _run_math(call: Call, scale: float | None) -> Any:
    return torch.ops.aten._scaled_dot_product_attention_math.default(
        call.query,
        call.key,
        call.value,
        _additive(call, -math.inf),
        call.dropout,
        call.causal,
        None,
        scale=scale,
        enable_gqa=call.grouped,
    )[0]


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """The mask, in rows that begin at multiples of the alignment; an unknown stride counts as unaligned."""
    rows = mask.stride()[:-1]
    if mask.stride(-1) == 1 and all(isinstance(step, int) and step % _MASK_ALIGNMENT == 0 for step in rows):
        return mask
    length = mask.shape[-1]
    return F.pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]


_RUN: dict[int, Callable[[Call, float | None], Any]] = {
    _MATH: _run_math,
    _FLASH: _run_flash,
    _EFFICIENT: _run_efficient,
    _CUDNN: _run_cudnn,
}
