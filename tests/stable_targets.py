"""Targets whose plans must not change from run to run, and a driver with which one tracing process plans them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dyngran.compiler.offline.build import TraceProcess
from dyngran.compiler.plans.planfile import PlanDocument, Settings

WIDTH, BATCH = 32, 8
HUGE_WIDTH, NUM_HUGE = 71_680, 4  # 20.6 GB a layer


def dropout() -> Any:
    layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, *[nn.Linear(WIDTH, WIDTH), nn.Tanh()])
    return {"model": model, "inputs": torch.randn(BATCH, 16, WIDTH), "loss": squared, "optimizer": torch.optim.AdamW(model.parameters())}


def squared(output: torch.Tensor) -> torch.Tensor:
    mean: torch.Tensor = output.square().mean()
    return mean


def convolutions() -> Any:
    parts = [part for width in (3, 8, 8) for part in (nn.Conv2d(width, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)), torch.randn(BATCH, 3, 16, 16)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(BATCH, -1, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + y


def attention() -> Any:
    return {"model": nn.Sequential(Attention(), Attention()), "inputs": torch.randn(BATCH, 24, WIDTH), "autocast": "bf16"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return squared(self.second(x))


def graph_break() -> Any:
    return Broken(), torch.randn(BATCH, WIDTH)


class Around(nn.Module):
    """Goes on after a call that is broken."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Broken(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return squared(torch.tanh(self.head(self.inner(x) * x)))


def around_break() -> Any:
    return Around(), torch.randn(BATCH, WIDTH)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(60, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 60, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(F.gelu(self.mix(self.embed(tokens))))
        return logits.logsumexp(-1).mean()


def tied() -> Any:
    return Tied(), torch.randint(0, 60, (BATCH, 9))


class Own(nn.Module):
    """Casts its matmuls itself, as the code of many models does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            y: torch.Tensor = self.linear(x)
        return y.float().sum()


def own_autocast() -> Any:
    return Own(), torch.randn(BATCH, WIDTH)


class Drops(nn.Module):
    """Leaves layers out at random, and stops at numbers that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if torch.rand([]) < 0.1:
            x = x * 2
        y: torch.Tensor = self.second(x)
        return y.sum()


def layer_drop() -> Any:
    return Drops(), torch.randn(BATCH, WIDTH)


_made_once = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))  # with data, as a checkpoint


def made_once() -> Any:
    return {"model": _made_once, "inputs": torch.randn(BATCH, WIDTH), "optimizer": torch.optim.AdamW(_made_once.parameters())}


def huge() -> Any:
    model = nn.Sequential(*[nn.Linear(HUGE_WIDTH, HUGE_WIDTH, bias=False) for _ in range(NUM_HUGE)])
    return {"model": model, "inputs": torch.randn(16, HUGE_WIDTH), "loss": squared, "optimizer": torch.optim.AdamW}


STABLE: Mapping[str, Callable[[], Any]] = {one.__name__: one for one in (dropout, convolutions, attention, graph_break, around_break, tied)}

_DRIVER = """\
import sys
from pathlib import Path

sys.path.insert(0, {tests!r})
import stable_targets


def make():
    return getattr(stable_targets, Path(__file__).with_name("which.txt").read_text())()
"""


class Planner:
    """Plans targets of this file one after another in one process, as `dyngran-plan build` plans one."""

    def __init__(self, folder: Path, profile: str) -> None:
        folder.joinpath("driver.py").write_text(_DRIVER.format(tests=str(Path(__file__).parent)))
        self._which = folder / "which.txt"
        self._profile = profile
        self.process = TraceProcess(f"{folder / 'driver.py'}:make", profile)

    def plan(self, name: str, *, codegen: str = "eager", budget: str | None = None) -> PlanDocument:
        self._which.write_text(name)
        return self.process.plan(Settings(profile=self._profile, budget=budget), codegen=codegen)
