"""`make demo`: trains a byte-level GPT and a ResNet without a budget, then at three budgets, and prints what came of it.

Everything is exact under ``codegen="eager"``: the losses are those of the run without a budget, bit for bit. One row per model shows
Inductor at the middle budget, if there is a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # equal losses need it, and cuBLAS reads it once
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would write over the progress bar
sys.path[:0] = [str(Path(__file__).resolve().parent)]  # `python -P` leaves the script's own folder out

from demo_progress import Ticker  # noqa: E402  # after the settings above
from rich.console import Console  # noqa: E402

MIN_STEPS = 3  # the first two compile and see the optimizer's state for the first time: they are not timed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, help="training steps per row (default 8, with --quick 4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--codegen", choices=("eager", "inductor"), default="eager", help="code generator of the table (default eager)")
    parser.add_argument("--quick", action="store_true", help="tiny models, one budget, no Inductor row")
    parser.add_argument("--explain", action="store_true", help="print dyngran.explain() of the tightest budget")
    arguments = parser.parse_args()
    if arguments.steps is None:
        arguments.steps = 4 if arguments.quick else 8
    if arguments.steps < MIN_STEPS:
        parser.error(f"--steps must be at least {MIN_STEPS}: the first two steps are not timed")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    began = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 140)
    with Ticker(console, total=0) as ticker:
        ticker.stage("loading torch, the text and the images")
        import torch
        from demo_models import make_workloads
        from demo_table import Demo

        if arguments.device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("--device cuda, but torch sees no CUDA device. Leave the option out to train on the CPU.")
        device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        workloads = make_workloads("quick" if arguments.quick else device.type)
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)  # two runs can only be equal where the kernels are
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    console.print(f"dyngran demo on {where}, torch {torch.__version__}, {arguments.steps} steps a row", highlight=False)
    for workload in workloads:
        Demo(arguments, device, workload, console).show()
    console.print(
        f"Losses are compared over all steps. dyngran.explain(model) says why; {time.monotonic() - began:.0f} s.", highlight=False
    )


if __name__ == "__main__":
    main()
