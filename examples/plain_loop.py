"""A plain training loop: the budget is an option of torch.compile.

python examples/plain_loop.py [--budget 24MiB]
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import dyngran

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # `python -P` leaves the script's own folder out
from outcome import DEVICE, StepPeak, argument_parser, judge  # noqa: E402  # after the line above

ROWS = 32 if DEVICE.type == "cpu" else 1024


class Classifier(nn.Module):
    """The loss is part of the module: what is not compiled cannot be planned."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(6)]
        self.body = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(width, 4)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.body(images)), labels)


def batch() -> tuple[Tensor, Tensor]:
    """Noisy stripes of four widths, which are the classes."""
    labels = torch.randint(4, (ROWS,))
    phases = torch.arange(24)[None, :] * (labels[:, None] + 1) * 0.6
    images = phases.sin()[:, None, None, :] + 0.3 * torch.randn(ROWS, 1, 24, 24)
    return images.to(DEVICE), labels.to(DEVICE)


def main() -> None:
    asked = argument_parser(__doc__, cpu="24MiB", cuda="2GiB").parse_args()
    torch.manual_seed(0)
    model = Classifier().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    compiled = torch.compile(model, backend="dyngran", options={"budget": asked.budget, "codegen": asked.codegen})
    dyngran.attach(compiled, optimizer)  # its state is planned for before the first step creates it
    losses = []
    with StepPeak() as peak:
        for _ in range(16):
            loss = compiled(*batch())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    judge(losses, compiled, peak)


if __name__ == "__main__":
    main()
