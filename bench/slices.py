"""What slices are worth on a model of few large values: ``python bench/slices.py --output rows.jsonl``.

Two MLPs with a norm between them, under budgets of shares of the free transient, with and without slices, with every operator a
kernel. Each pair is timed in turns (A B A B ...), after both are compiled; peaks are those of allocations in a step.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dyngran

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # what a step really allocates is measured by one function
from measure import forward_backward, held_tensors, measured_peak

from plan import commit  # isort: skip


class Mlps(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (
            nn.Linear(*sizes) for sizes in ((width, 4 * width), (4 * width, width), (width, 4 * width), (4 * width, width))
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.second(F.gelu(self.first(x))) + x)
        return self.fourth(F.silu(self.third(x)) * 1.5).square().mean()


def compiled(module: nn.Module, inputs: tuple[Tensor, ...], **options: object) -> Callable[..., Tensor]:
    step: Callable[..., Tensor] = torch.compile(module, backend="dyngran", options={"codegen": "eager", **options})
    forward_backward(step, inputs)
    return step


Steps = dict[bool, Callable[..., Tensor]]  # with slices and without


def timed(steps: Steps, modules: dict[bool, Mlps], inputs: tuple[Tensor, ...], num_rounds: int) -> dict[bool, list[float]]:
    """Milliseconds of each step, in turns."""
    taken: dict[bool, list[float]] = {allowed: [] for allowed in steps}
    for _ in range(num_rounds):
        for allowed, step in steps.items():
            modules[allowed].zero_grad()
            begin = time.perf_counter()
            forward_backward(step, inputs)
            taken[allowed].append(1e3 * (time.perf_counter() - begin))
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.95, 0.85, 0.75], help="of the free transient")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    module, inputs = Mlps(args.width), (torch.randn(args.rows, args.width),)
    free = dyngran.explain(compiled(module, inputs, budget=None))
    static_bytes = free.plan.static_bytes
    for share in args.shares:
        budget = int(static_bytes + share * (free.predicted_peak_bytes - static_bytes))
        torch._dynamo.reset()
        modules = {allowed: copy.deepcopy(module) for allowed in (False, True)}
        steps = {allowed: compiled(one, inputs, budget=budget, slice=allowed) for allowed, one in modules.items()}
        taken = timed(steps, modules, inputs, args.rounds)
        for allowed, step in steps.items():
            plan = dyngran.explain(step).plan
            modules[allowed].zero_grad()
            held = held_tensors(modules[allowed], inputs)
            row = {
                "share": share,
                "slice": allowed,
                "budget_bytes": budget,
                "predicted_peak_bytes": plan.peak_bytes,
                "measured_peak_bytes": measured_peak(lambda step=step: forward_backward(step, inputs), held),
                "predicted_overhead_ms": round(plan.overhead_us / 1e3, 2),
                "step_ms": round(statistics.median(taken[allowed]), 2),
                "step_ms_quartiles": [round(one, 2) for one in statistics.quantiles(taken[allowed], n=4)[::2]],
                "slices": [one.format for one in plan.decisions if one.fraction is not None],
                "device": f"cpu {torch.backends.cpu.get_cpu_capability()}",
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "commit": commit(),
                "command": " ".join(["python", "bench/slices.py", *sys.argv[1:]]),
            }
            print(json.dumps(row), flush=True)
            if args.output:
                with args.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
