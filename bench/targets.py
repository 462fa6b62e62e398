"""What `dyngran-plan` plans here: the demo's two models at two sizes, and the models of `fit.py`. Each takes a batch size.

``dyngran-plan build bench/targets.py:gpt --budget 60%`` for example; `plans/` has committed plans of the demo's models, which CI checks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from demo_models import GPT, NUM_BYTES, NUM_DIGITS, SIZES, ResNet
from models import CASES
from torch import nn

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


def gpt(batch: int | None = None, size: str = "cpu") -> dict[str, Any]:
    """The demo's byte-level GPT, which returns its loss."""
    num_layers, width, num_heads, context, usual = SIZES[size][0]
    model = GPT(num_layers=num_layers, width=width, num_heads=num_heads, context=context)
    tokens = torch.zeros(batch or usual, context, dtype=torch.long)
    assert model.bytes.num_embeddings == NUM_BYTES
    return {"model": model, "inputs": (tokens, torch.zeros_like(tokens)), "optimizer": adamw}


def resnet(batch: int | None = None, size: str = "cpu") -> dict[str, Any]:
    """The demo's ResNet over digits, which returns its loss."""
    widths, num_blocks, usual = SIZES[size][1]
    model: nn.Module = ResNet(widths=widths, num_blocks=num_blocks).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    labels = torch.zeros(batch or usual, dtype=torch.long)
    assert model.head.out_features == NUM_DIGITS
    return {"model": model, "inputs": (torch.zeros(len(labels), 1, 8, 8), labels), "optimizer": adamw}


def gpt_on_card(batch: int | None = None) -> dict[str, Any]:
    """`gpt` at its size for a card, under bf16 autocast."""
    return gpt(batch, size="cuda") | {"autocast": "bf16"}


def resnet_on_card(batch: int | None = None) -> dict[str, Any]:
    """`resnet` at its size for a card, under bf16 autocast."""
    return resnet(batch, size="cuda") | {"autocast": "bf16"}


def llama350m(batch: int | None = None) -> dict[str, Any]:
    """The Llama of `fit.py`, which returns loss and logits."""
    case = CASES["llama350m"]
    (tokens,) = case.inputs(batch or case.batch, torch.device("cpu"))
    return {"model": case.build(), "inputs": {"input_ids": tokens, "labels": tokens}, "optimizer": adamw, "autocast": "bf16"}


def llama70b(batch: int | None = None) -> dict[str, Any]:
    """Transformers' Llama with 70 billion parameters, for planning alone: no machine here holds it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        use_cache=False,
    )
    tokens = torch.zeros(batch or 8, 2048, dtype=torch.long)
    return {"model": LlamaForCausalLM(config), "inputs": {"input_ids": tokens, "labels": tokens}, "optimizer": adamw, "autocast": "bf16"}


def tiny(batch: int | None = None) -> dict[str, Any]:
    """The language model of ``fit.py --smoke``."""
    case = CASES["tiny"]
    return {"model": case.build(), "inputs": case.inputs(batch or case.batch, torch.device("cpu")), "optimizer": adamw}
