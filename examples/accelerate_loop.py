"""Accelerate: a plugin that names the backend and its options, so that `prepare` compiles after all that it wraps.

    python examples/accelerate_loop.py [--budget 20MiB]

`use_regional_compilation=True` trains too, but then each block is planned by itself, and the budget is checked for one block at a time.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import dyngran

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # `python -P` leaves the script's own folder out
from outcome import DEVICE, StepPeak, argument_parser, judge  # noqa: E402  # after the line above

ROWS = 16 if DEVICE.type == "cpu" else 512
VOCABULARY = 64


@dataclass
class Dyngran(TorchDynamoPlugin):
    """Accelerate's plugin accepts only backends of its own list (it raises "'DYNGRAN' is not a valid DynamoBackend"), but what
    reaches torch.compile is this dict."""

    backend: Any = "inductor"  # any but "no": compile at all

    def to_kwargs(self) -> dict[str, Any]:
        return super().to_kwargs() | {"backend": "dyngran"}


class Counting(torch.utils.data.Dataset[torch.Tensor]):
    """Sequences that count up from a random start, modulo the vocabulary."""

    def __len__(self) -> int:
        return 16 * ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.randint(VOCABULARY, ()) + torch.arange(64)) % VOCABULARY


def main() -> None:
    asked = argument_parser(__doc__, cpu="20MiB", cuda="1GiB").parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    accelerator = Accelerator(dynamo_plugin=Dyngran(options={"budget": asked.budget, "codegen": asked.codegen}))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Counting(), batch_size=ROWS))
    dyngran.attach(model, optimizer.optimizer)  # its state is planned for before the first step creates it
    losses = []
    with StepPeak() as peak:
        for tokens in loader:
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    judge(losses, model, peak)


if __name__ == "__main__":
    main()
