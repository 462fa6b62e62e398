"""Lightning: `torch.compile` of the LightningModule, which `Trainer.fit` takes.

python examples/lightning_fit.py [--budget 16MiB]
"""

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dyngran

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # `python -P` leaves the script's own folder out
from outcome import DEVICE, StepPeak, argument_parser, judge  # noqa: E402  # after the line above

ROWS = 64 if DEVICE.type == "cpu" else 4096


class Regressor(lightning.LightningModule):
    """Sums of a sequence's sines, from the sequence. `training_step` is what is compiled; logging belongs into a hook outside of it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)
        self.body = nn.Sequential(nn.Linear(1, 64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        self.head = nn.Linear(64, 1)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        sequences, sums = batch
        return nn.functional.mse_loss(self.head(self.body(sequences).mean(dim=1)), sums)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        dyngran.attach(self, optimizer)  # its state is planned for before the first step creates it
        return optimizer


class Sines(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 24 * ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sequence = torch.rand(32, 1)
        return sequence, (6 * sequence).sin().sum(dim=0)


def main() -> None:
    asked = argument_parser(__doc__, cpu="16MiB", cuda="2GiB").parse_args()
    lightning.seed_everything(0, verbose=False)
    model = Regressor()
    compiled = torch.compile(model, backend="dyngran", options={"budget": asked.budget, "codegen": asked.codegen})
    trainer = lightning.Trainer(
        accelerator=DEVICE.type if DEVICE.type == "cpu" else "gpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with StepPeak() as peak:
        trainer.fit(compiled, DataLoader(Sines(), batch_size=ROWS))
    judge(model.losses, model, peak)


if __name__ == "__main__":
    main()
