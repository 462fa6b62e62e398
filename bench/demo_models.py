"""The demo's two models, written plainly: a byte-level GPT with dropout and a ResNet with batch norm. Both return their loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from demo_data import digits_batch, read_digits, read_text, text_batch
from torch import Tensor, nn
from torch.nn import functional

DROPOUT = 0.1
NUM_BYTES = 256  # the vocabulary
NUM_DIGITS = 10


class Block(nn.Module):
    """Causal attention and an MLP, both with a residual and dropout."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, context, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        dropout = DROPOUT if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True, dropout_p=dropout)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, context, width)))
        out: Tensor = x + self.dropout(self.mlp(self.norm_2(x)))
        return out


class GPT(nn.Module):
    """Bytes in, cross-entropy of the next byte out."""

    def __init__(self, *, num_layers: int, width: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.dropout(self.bytes(tokens) + self.positions)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm beside a shortcut."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(num_out)
        self.conv_2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(num_out)
        same = num_in == num_out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_2(self.conv_2(self.norm_1(self.conv_1(x)).relu()))
        out: Tensor = (y + self.shortcut(x)).relu()
        return out


class ResNet(nn.Module):
    """8x8 images in, cross-entropy of the digit out."""

    def __init__(self, *, widths: tuple[int, ...], num_blocks: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
        previous = widths[0]
        for stage, width in enumerate(widths):
            for block in range(num_blocks):
                layers.append(Residual(previous, width, 2 if stage and not block else 1))
                previous = width
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(previous, NUM_DIGITS)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.layers(images).mean((2, 3))), labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model to train: ``batch(step)`` gives CPU tensors; ``source`` says what the data are."""

    name: str
    source: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]


SIZES = {  # GPT: layers, width, heads, context, batch; ResNet: widths, blocks in a stage, batch
    "quick": ((2, 64, 2, 64, 8), ((16, 32), 1, 64)),
    "cpu": ((3, 128, 4, 128, 8), ((32, 64, 128), 1, 256)),
    "cuda": ((8, 512, 8, 256, 64), ((64, 128, 256), 3, 1024)),
}


def make_workloads(size: str) -> tuple[Workload, ...]:
    """The GPT and the ResNet in one of `SIZES`."""
    (num_layers, width, num_heads, context, batch), (widths, num_blocks, num_images) = SIZES[size]
    text = read_text()
    images, labels = read_digits()
    gpt = Workload(
        name=f"GPT, {num_layers} layers x {width}, {batch} x {context} bytes",
        source=f"{len(text.data)} bytes of sympy's sources, {text.num_files} files, sha256 {text.sha256}",
        make=lambda: GPT(num_layers=num_layers, width=width, num_heads=num_heads, context=context),
        batch=lambda step: text_batch(text.data, step=step, batch=batch, context=context),
    )
    resnet = Workload(
        name=f"ResNet, {num_blocks * len(widths)} blocks, {num_images} images, channels last",
        source=f"scikit-learn's digits, {len(images)} images of 8x8",
        make=lambda: ResNet(widths=widths, num_blocks=num_blocks).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        batch=lambda step: digits_batch(images, labels, step=step, batch=num_images),
    )
    return gpt, resnet
