"""Twelve model families in miniature: each module returns its own scalar loss, so that one compiled region is the whole step.

Every family has enough repeated blocks that recompute matters, runs forward and backward in a fraction of a second on one core, and
is seeded: two calls of ``make()`` give the same parameters and the same inputs. ``make(checkpoint=True)`` is the plan a person would
write by hand, `torch.utils.checkpoint` around each block.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

Made = tuple[nn.Module, tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family. ``make(checkpoint=..., shallow=...)`` builds a seeded module and its inputs; ``shallow`` means fewer layers.

    Attributes:
        random: the step draws random numbers (dropout masks).
        buffers: the step updates buffers (batch-norm statistics).
        has_blocks: ``checkpoint=True`` changes something.
        eps: unit round-off of the arithmetic inside (bf16 under autocast, else fp32).
    """

    make: Callable[..., Made]
    random: bool = False
    buffers: bool = False
    has_blocks: bool = True
    eps: float = torch.finfo(torch.float32).eps


class Blocks(nn.ModuleList):
    """A list of blocks called one after the other, each under `torch.utils.checkpoint` if that was asked for."""

    def __init__(self, blocks: list[nn.Module], *, checkpoint: bool) -> None:
        super().__init__(blocks)
        self.checkpoint = checkpoint

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        for block in self:
            x = torch_checkpoint(block, x, *context, use_reentrant=False) if self.checkpoint else block(x, *context)
        return x


class MlpBlock(nn.Module):
    def __init__(self, width: int, ratio: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width * ratio)
        self.down = nn.Linear(width * ratio, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(F.gelu(self.up(self.norm(x))))
        return x + F.dropout(hidden, self.dropout, self.training)


class Attention(nn.Module):
    """Multi-head attention over ``x`` (self) or from ``x`` to ``memory`` (cross); shapes (batch, tokens, width)."""

    def __init__(self, width: int, num_heads: int, *, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.causal = num_heads, dropout, causal
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        key, value = self.key_value(memory).chunk(2, dim=-1)
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            self._heads(self.query(x)), self._heads(key), self._heads(value), mask, dropout_p=rate, is_causal=self.causal
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A pre-norm transformer layer: self attention, optional cross attention to ``memory``, MLP."""

    def __init__(self, width: int, *, dropout: float = 0.0, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, 4, dropout=dropout, causal=causal)
        self.cross_norm = nn.LayerNorm(width) if cross else None
        self.cross = Attention(width, 4, dropout=dropout) if cross else None
        self.mlp = MlpBlock(width, 4, dropout)
        self.dropout = dropout

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        x = x + F.dropout(self.attention(normed, normed), self.dropout, self.training)
        if self.cross is not None and self.cross_norm is not None and memory is not None:
            x = x + F.dropout(self.cross(self.cross_norm(x), memory), self.dropout, self.training)
        return self.mlp(x)


class PostNormLayer(nn.Module):
    """BERT's layer: post-norm, attention under a padding mask of shape (batch, 1, 1, tokens), True where a token is real."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, 4, dropout=dropout)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x + F.dropout(self.attention(x, x, mask), self.dropout, self.training))
        return self.second(x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training))


class Regressor(nn.Module):
    """Blocks between an input and an output projection; mean squared error against ``target``."""

    def __init__(self, blocks: Blocks, num_in: int, width: int) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(num_in, width), blocks, nn.Linear(width, num_in)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.blocks(self.embed(x))), target)


class Mlp(nn.Module):
    """Three residual-free blocks of width 64, (rows, 64) → mean square: the smallest model whose plans differ."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out.square().mean()


class LanguageModel(nn.Module):
    """Tokens (batch, tokens) → mean cross-entropy of the next token. ``tied`` shares the embedding with the output layer."""

    def __init__(self, blocks: Blocks, *, vocabulary: int, width: int, num_tokens: int, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(num_tokens, width)
        self.blocks, self.norm = blocks, nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.dropout = dropout

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        x = self.blocks(F.dropout(x, self.dropout, self.training))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), target.flatten())


class Autocast(nn.Module):
    """Runs a module under bf16 autocast."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=next(self.parameters()).dtype is torch.float32):
            loss: Tensor = self.module(*inputs)
        return loss


class Bert(nn.Module):
    """Masked language model over padded batches; padding is ignored by attention and by the loss."""

    def __init__(self, blocks: Blocks, *, vocabulary: int, width: int, num_tokens: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(num_tokens, width)
        self.norm, self.blocks, self.head = nn.LayerNorm(width), blocks, nn.Linear(width, vocabulary)
        self.dropout = dropout

    def forward(self, tokens: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        position = torch.arange(tokens.shape[1], device=tokens.device)
        real = position[None, :] < lengths[:, None]
        x = self.norm(self.tokens(tokens) + self.positions(position))
        x = self.blocks(F.dropout(x, self.dropout, self.training), real[:, None, None, :])
        target = torch.where(real, target, -100)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten(), ignore_index=-100)


class Seq2Seq(nn.Module):
    """Encoder, then a causal decoder that looks at the encoder's output in every layer."""

    def __init__(self, encoder: Blocks, decoder: Blocks, *, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.encoder, self.decoder, self.norm = encoder, decoder, nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, tokens: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.tokens(source))
        x = self.norm(self.decoder(self.tokens(tokens), memory))
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class Vit(nn.Module):
    def __init__(self, blocks: Blocks, *, width: int, patch: int, num_patches: int, num_classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, num_patches + 1, width) * 0.02)
        self.blocks, self.norm, self.head = blocks, nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.positions
        return F.cross_entropy(self.head(self.norm(self.blocks(x))[:, 0]), target)


class Residual(nn.Module):
    """ResNet's basic block with batch norm; ``stride`` halves the image and ``widen`` changes the channels."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(num_out), nn.BatchNorm2d(num_out)
        self.short = nn.Conv2d(num_in, num_out, 1, stride, bias=False) if num_in != num_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self, blocks: Blocks, *, stem: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, stem, 3, 1, 1, bias=False), nn.BatchNorm2d(stem)
        self.blocks, self.head = blocks, nn.Linear(width, num_classes)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.conv(image))))
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), target)


class DoubleConv(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, 1, 1, bias=False)  # a bias before a norm cancels: its gradient is mostly rounding
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(4, num_out), nn.GroupNorm(4, num_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    """Down, bottom and up with a concatenated skip per level; per-pixel mean squared error."""

    def __init__(self, widths: tuple[int, ...], *, checkpoint: bool) -> None:
        super().__init__()
        self.down = nn.ModuleList(DoubleConv(num_in, num_out) for num_in, num_out in zip((3, *widths[:-1]), widths, strict=True))
        self.up = nn.ModuleList(DoubleConv(low + high, high) for low, high in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.head = nn.Conv2d(widths[0], 3, 1)
        self.checkpoint = checkpoint

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = torch_checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
        return out

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        skips, x = [], image
        for block in self.down:
            x = self._run(block, x if not skips else F.max_pool2d(x, 2))
            skips.append(x)
        for block, skip in zip(self.up, skips[-2::-1], strict=True):
            x = self._run(block, torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), skip], dim=1))
        return F.mse_loss(self.head(x), target)


class LstmLoop(nn.Module):
    """An LSTM cell written out and looped over time in Python: (batch, time, features) → mean squared error at every step."""

    def __init__(self, num_in: int, width: int, *, checkpoint: bool) -> None:
        super().__init__()
        self.from_input, self.from_state = nn.Linear(num_in, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.head = nn.Linear(width, num_in)
        self.width, self.checkpoint = width, checkpoint

    def cell(self, x: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        enter, forget, update, leave = (self.from_input(x) + self.from_state(hidden)).chunk(4, dim=-1)
        memory = torch.sigmoid(forget) * memory + torch.sigmoid(enter) * torch.tanh(update)
        return torch.sigmoid(leave) * torch.tanh(memory), memory

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = memory = x.new_zeros(len(x), self.width)
        loss = x.new_zeros(())
        for time in range(x.shape[1]):
            if self.checkpoint:
                hidden, memory = torch_checkpoint(self.cell, x[:, time], hidden, memory, use_reentrant=False)
            else:
                hidden, memory = self.cell(x[:, time], hidden, memory)
            loss = loss + F.mse_loss(self.head(hidden), target[:, time])
        return loss / x.shape[1]


class Experts(nn.Module):
    """Top-2 mixture of experts with a fixed capacity: each expert gathers its heaviest tokens and adds its result back by index."""

    def __init__(self, width: int, num_experts: int, capacity: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(num_experts)
        )
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        odds = self.router(normed).softmax(dim=-1)
        chosen = odds.topk(2, dim=-1).indices
        weight = odds * torch.zeros_like(odds).scatter(1, chosen, 1.0)
        out = x
        for number, expert in enumerate(self.experts):
            share, rows = weight[:, number].topk(self.capacity)
            out = out.index_add(0, rows, expert(normed[rows]) * share[:, None])
        return out


class DenseBlock(nn.Module):
    """DenseNet's growth: every step reads the concatenation of all earlier ones, the classic case of cheap, large concatenations."""

    def __init__(self, num_in: int, growth: int, num_steps: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(num_in + growth * step) for step in range(num_steps))
        self.convs = nn.ModuleList(nn.Conv2d(num_in + growth * step, growth, 3, 1, 1, bias=False) for step in range(num_steps))

    def forward(self, x: Tensor) -> Tensor:
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, conv(F.relu(norm(x)))], dim=1)
        return x


def _mlp(*, checkpoint: bool = False, shallow: bool = False) -> Made:
    torch.manual_seed(0)
    num_blocks = 3 if shallow else 6
    blocks = Blocks([MlpBlock(128, 4) for _ in range(num_blocks)], checkpoint=checkpoint)
    return Regressor(blocks, 32, 128), (torch.randn(512, 32), torch.randn(512, 32))


def _tokens(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape)


def _gpt(*, checkpoint: bool = False, shallow: bool = False) -> Made:
    torch.manual_seed(1)
    batch, tokens, num_layers = 8, 64, 2 if shallow else 4
    blocks = Blocks([Layer(96, dropout=0.1, causal=True) for _ in range(num_layers)], checkpoint=checkpoint)
    model = LanguageModel(blocks, vocabulary=256, width=96, num_tokens=tokens, dropout=0.1)
    return model, (_tokens(batch, tokens), _tokens(batch, tokens))


def _bert(*, checkpoint: bool = False, shallow: bool = False) -> Made:
    torch.manual_seed(2)
    batch, tokens, num_layers = 8, 64, 2 if shallow else 4
    blocks = Blocks([PostNormLayer(96, 0.1) for _ in range(num_layers)], checkpoint=checkpoint)
    model = Bert(blocks, vocabulary=256, width=96, num_tokens=tokens, dropout=0.1)
    lengths = torch.randint(tokens // 4, tokens + 1, (batch,))
    return model, (_tokens(batch, tokens), lengths, _tokens(batch, tokens))


def _resnet(*, checkpoint: bool = False, shallow: bool = False) -> Made:
    torch.manual_seed(3)
    batch, size, depth = 8, 32, 1 if shallow else 3
    widths = [(16, 16, 1)] * depth + [(16, 32, 2)] + [(32, 32, 1)] * (depth - 1) + [(32, 64, 2)] + [(64, 64, 1)] * (depth - 1)
    model = ResNet(Blocks([Residual(*shape) for shape in widths], checkpoint=checkpoint), stem=16, width=64, num_classes=10)
    model = model.to(memory_format=torch.channels_last)
    image = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    return model, (image, torch.randint(0, 10, (batch,)))


def _unet(*, checkpoint: bool = False, shallow: bool = False) -> Made:
    torch.manual_seed(4)
    batch, size, widths = 2, 64, (8, 16) if shallow else (8, 16, 32, 64)
    return UNet(widths, checkpoint=checkpoint), (torch.randn(batch, 3, size, size), torch.randn(batch, 3, size, size))


def _vit(*, checkpoint: bool = False, shallow: bool = False) -> Made:
    torch.manual_seed(5)
    batch, size, num_layers = 8, 32, 2 if shallow else 4
    blocks = Blocks([Layer(96) for _ in range(num_layers)], checkpoint=checkpoint)
    model = Vit(blocks, width=96, patch=4, num_patches=(size // 4) ** 2, num_classes=10)
    return model, (torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,)))


def _lstm(*, checkpoint: bool = False, shallow: bool = False) -> Made:
    torch.manual_seed(6)
    batch, time = 160, 5 if shallow else 12
    return LstmLoop(32, 128, checkpoint=checkpoint), (torch.randn(batch, time, 32), torch.randn(batch, time, 32))


def _moe(*, checkpoint: bool = False, shallow: bool = False) -> Made:
    torch.manual_seed(7)
    num_rows, num_layers = 768, 2 if shallow else 3
    blocks = Blocks([Experts(64, 4, num_rows // 2) for _ in range(num_layers)], checkpoint=checkpoint)
    return Regressor(blocks, 32, 64), (torch.randn(num_rows, 32), torch.randn(num_rows, 32))


def _seq2seq(*, checkpoint: bool = False, shallow: bool = False) -> Made:
    torch.manual_seed(8)
    batch, tokens, num_layers = 8, 64, 1 if shallow else 2
    encoder = Blocks([Layer(64, dropout=0.1) for _ in range(num_layers)], checkpoint=checkpoint)
    decoder = Blocks([Layer(64, dropout=0.1, causal=True, cross=True) for _ in range(num_layers)], checkpoint=checkpoint)
    model = Seq2Seq(encoder, decoder, vocabulary=256, width=64)
    return model, (_tokens(batch, tokens), _tokens(batch, tokens), _tokens(batch, tokens))


def _tied(*, checkpoint: bool = False, shallow: bool = False) -> Made:
    torch.manual_seed(9)
    batch, tokens, num_layers = 8, 64, 2 if shallow else 4
    blocks = Blocks([Layer(96, causal=True) for _ in range(num_layers)], checkpoint=checkpoint)
    model = LanguageModel(blocks, vocabulary=256, width=96, num_tokens=tokens, tied=True)
    return Autocast(model), (_tokens(batch, tokens), _tokens(batch, tokens))


def _densenet(*, checkpoint: bool = False, shallow: bool = False) -> Made:
    torch.manual_seed(10)
    batch, size, steps = 8, 32, 2 if shallow else 4
    blocks: list[nn.Module] = []
    width = 16
    for _ in range(2 if shallow else 3):
        blocks.append(DenseBlock(width, 8, steps))
        blocks.append(nn.Conv2d(width + 8 * steps, width, 1))
    return ResNet(Blocks(blocks, checkpoint=checkpoint), stem=16, width=width, num_classes=10), (
        torch.randn(batch, 3, size, size),
        torch.randint(0, 10, (batch,)),
    )


def _albert(*, checkpoint: bool = False, shallow: bool = False) -> Made:
    torch.manual_seed(11)
    batch, tokens, num_layers = 8, 64, 2 if shallow else 4
    shared = Layer(64, dropout=0.1)
    model = LanguageModel(
        Blocks([shared] * num_layers, checkpoint=checkpoint), vocabulary=256, width=64, num_tokens=tokens, dropout=0.1, tied=True
    )
    return model, (_tokens(batch, tokens), _tokens(batch, tokens))


FAMILIES: dict[str, Family] = {
    "mlp": Family(make=_mlp),
    "gpt_dropout": Family(make=_gpt, random=True),
    "bert_masks": Family(make=_bert, random=True),
    "resnet_channels_last": Family(make=_resnet, buffers=True),
    "unet": Family(make=_unet),
    "vit": Family(make=_vit),
    "lstm_loop": Family(make=_lstm),
    "mixture_of_experts": Family(make=_moe),
    "encoder_decoder": Family(make=_seq2seq, random=True),
    "tied_autocast": Family(make=_tied, eps=torch.finfo(torch.bfloat16).eps),
    "densenet": Family(make=_densenet, buffers=True),
    "shared_layers": Family(make=_albert, random=True),
}

CUDA_SCALE = 128  # times the batch: the caching allocator hands out blocks up to 1 MiB too large, which would drown peaks of 5-20 MiB
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def family_on(name: str, device: str, *, shallow: bool = False) -> Made:
    """A family's module and inputs on a device; on a card with `CUDA_SCALE` times the batch."""
    module, inputs = FAMILIES[name].make(shallow=shallow)
    if device == "cpu":
        return module, inputs
    return module.to(device), tuple(torch.cat([t] * CUDA_SCALE).to(device) for t in inputs)


@contextmanager
def repeatable(device: str) -> Iterator[None]:
    """On a card: deterministic algorithms where there are such, and fp32 convolutions in fp32. CPU steps repeat bit for bit as they are."""
    if device == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    strict, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    tf32 = torch.backends.cudnn.allow_tf32
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warn_only)
        torch.backends.cudnn.allow_tf32 = tf32
