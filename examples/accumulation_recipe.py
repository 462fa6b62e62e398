"""A recipe in torchtune's style: micro-batches, clipped gradients, a learning-rate schedule, a checkpoint that training resumes from.

    python examples/accumulation_recipe.py [--budget 9MiB] [--per-layer]

torchtune compiles each layer by itself, by the backend that TORCH_COMPILE_BACKEND names and without options. `--per-layer` does the same.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import dyngran

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # `python -P` leaves the script's own folder out
from outcome import DEVICE, StepPeak, argument_parser, judge  # noqa: E402  # after the line above

ROWS = 8 if DEVICE.type == "cpu" else 512
VOCABULARY, LENGTH, WIDTH = 64, 64, 96
STEPS, MICRO_BATCHES = 16, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Returns its loss: compiled as one graph, model and loss are planned as one, and the budget is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.Sequential(*[Layer() for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.layers(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Recipe:
    def __init__(self, per_layer: bool) -> None:
        self.model = Decoder().to(DEVICE)
        for module in self.model.layers if per_layer else [self.model]:
            module.compile(backend="dyngran")  # in place: names in the state_dict stay as they are
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-3)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=4e-3, total_steps=STEPS)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        dyngran.attach(self.model, self.optimizer)  # its state is planned for before the first step creates it

    def step(self) -> float:
        total = 0.0
        for _ in range(MICRO_BATCHES):  # from the second on gradients exist: each of the two cases has a plan
            tokens = (torch.randint(VOCABULARY, (ROWS, 1)) + torch.arange(LENGTH)) % VOCABULARY  # counts up
            loss = self.model(tokens.to(DEVICE)) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return total

    def save(self, path: Path) -> None:
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, path)

    def resume(self, path: Path) -> None:
        saved = torch.load(path, map_location=DEVICE, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])


def main() -> None:
    parser = argument_parser(__doc__, cpu="9MiB", cuda="600MiB")
    parser.add_argument("--per-layer", action="store_true", help="compile layer by layer: each is planned by itself")
    asked = parser.parse_args()
    torch.manual_seed(0)
    dyngran.set_defaults(budget=asked.budget, codegen=asked.codegen)  # for those who pass on nothing but the backend's name
    with tempfile.TemporaryDirectory() as folder, StepPeak() as peak:
        first = Recipe(asked.per_layer)
        losses = [first.step() for _ in range(STEPS // 2)]
        first.save(Path(folder) / "checkpoint.pt")
        del first
        second = Recipe(asked.per_layer)
        second.resume(Path(folder) / "checkpoint.pt")
        losses += [second.step() for _ in range(STEPS // 2)]
    judge(losses, second.model, peak)


if __name__ == "__main__":
    main()
