"""Plans that were made without the card, applied on it: what of them was found there, and predicted beside measured peaks.

    python bench/offline.py build --models gpt_on_card llama350m --device h200 --plans plans/     # anywhere, with the CPU build of torch
    python bench/offline.py train --models gpt_on_card llama350m --device h200 --plans plans/ --out rows.jsonl     # on the card

`train` makes three more plans for the same budget, with the card hidden, with the card there and with operators measured on it, and one in
training itself, and trains by each in a process of its own. Models are functions of `targets.py`. The budget leaves 70 % of the unplanned
step's transient.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

import dyngran
from dyngran.compiler import registry
from dyngran.compiler.offline.target import Target, call_target, load_callable
from dyngran.compiler.plans.planfile import load_plan
from dyngran.compiler.plans.unplanned import unplanned_step

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]  # `python -P` leaves the script's own folder out

from meter import measure_memory, wall_times_ms  # noqa: E402  # found by the line above

Row = dict[str, Any]
SHARE = 0.7
NUM_WARM, NUM_STEPS = 3, 10


def plan(model: str, device: str, path: Path, *, budget: str | None, hides_card: bool = True, measures: bool = False) -> None:
    """Make one plan file with the command line that people use."""
    command = [sys.executable, "-c", "import sys; from dyngran.compiler.cli import main; sys.exit(main())", "build"]
    command += [f"{HERE / 'targets.py'}:{model}", "--device", device, "-o", str(path), *(["--budget", budget] if budget else [])]
    command += ["--profile"] if measures else []
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if hides_card else {}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **hidden})


def build(args: argparse.Namespace) -> None:
    """A portable plan for each model, at a budget from its own unplanned step."""
    args.plans.mkdir(parents=True, exist_ok=True)
    for model in args.models:
        path = args.plans / f"{model}.json"
        plan(model, args.device, path, budget=None)
        document = load_plan(path)
        static = document.plan.static_bytes
        budget_bytes = static + int(SHARE * (unplanned_step(document).peak_bytes - static))
        plan(model, args.device, path, budget=f"{budget_bytes}B")
        print(f"{path}: {load_plan(path).peak_bytes / 2**20:.0f} of {budget_bytes / 2**20:.0f} MiB")


def train(args: argparse.Namespace) -> None:
    """Rows for the portable plan, the three exact ones, and a plan made in training."""
    for model in args.models:
        portable = args.plans / f"{model}.json"
        budget_bytes = load_plan(portable).plan.budget_bytes
        exact = {name: args.plans / f"{model}-{name}.json" for name in ("card-hidden", "card-there", "profiled")}
        files = {"portable": portable, "training": None, **exact}
        with ThreadPoolExecutor(len(files) if args.side_by_side else 1) as pool:
            planned = [
                pool.submit(
                    plan, model, args.device, path, budget=f"{budget_bytes}B", hides_card=name == "card-hidden", measures=name == "profiled"
                )
                for name, path in exact.items()
            ]
            for done in planned:
                done.result()
            hidden, there = exact["card-hidden"].read_bytes(), exact["card-there"].read_bytes()
            found = pool.map(partial(_trained, model, budget_bytes), files.values())
            for name, row in zip(files, found, strict=True):
                head = {"model": model, "plan": name, "commit": os.environ.get("DYNGRAN_COMMIT", ""), "side_by_side": args.side_by_side}
                head["hidden_and_there_are_equal"] = hidden == there
                line = json.dumps(head | row)
                print(line, flush=True)
                if args.out is not None:
                    with open(args.out, "a", encoding="utf-8") as file:
                        file.write(line + "\n")


def _trained(model: str, budget_bytes: int | None, path: Path | None) -> Row:
    """The row of one process."""
    command = [sys.executable, str(Path(__file__).resolve()), "one", model, str(budget_bytes), *([str(path)] if path else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def one(args: argparse.Namespace) -> None:
    """Train a model by one plan, or without one, within a budget; print a row."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target, _ = call_target(load_callable(f"{HERE / 'targets.py'}:{args.model}"), args.model, batch=None, dtype=None)
    assert target.module is not None
    model = target.module.to(device)
    target = target.mapped(lambda tensor: tensor.to(device))
    optimizer = target.optimizer(model.parameters())
    options: dict[str, Any] = {"budget": args.budget_bytes} if args.plan is None else {"plan": args.plan}
    compiled = torch.compile(model, backend="dyngran", options=options)
    dyngran.attach(model, optimizer)

    def step() -> None:
        with _autocast(target, device):
            found = compiled(*target.inputs, **target.keywords)
        loss = found if isinstance(found, torch.Tensor) else found.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(NUM_WARM):
        step()
    held = [*model.parameters(), *model.buffers(), *target.inputs]
    memory = measure_memory(step, device, [one for one in held if isinstance(one, torch.Tensor)], num_steps=NUM_STEPS)
    times_ms = wall_times_ms(step, device, num_steps=NUM_STEPS)
    print(json.dumps(_row(args, compiled, memory.peak_bytes, memory.static_bytes, times_ms)))


def _autocast(target: Target, device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if target.autocast is None else torch.autocast(device.type, dtype=target.autocast)


def _row(args: argparse.Namespace, compiled: Any, peak_bytes: int, static_bytes: int, times_ms: list[float]) -> Row:
    graph = registry.graphs_of(compiled)[-1]
    assert graph.plan is not None and graph.strategy is not None
    applied = graph.strategy.applied
    document = None if args.plan is None else load_plan(args.plan)
    return {
        "budget_bytes": args.budget_bytes,
        "share_matched": None if applied is None else applied.share,
        "is_unchanged": None if applied is None else applied.is_unchanged,
        "solver": graph.plan.solver,
        "predicted_in_file_bytes": None if document is None else document.peak_bytes,
        "predicted_bytes": graph.plan.peak_bytes,
        "peak_bytes": peak_bytes,
        "static_bytes": static_bytes,
        "predicted_ms": graph.plan.time_us / 1e3,
        "step_ms": statistics.median(times_ms),
        "step_quartiles_ms": statistics.quantiles(times_ms, n=4)[::2],
        "made_with": None if document is None else document.torch_version,
        "torch": str(torch.__version__),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "differences": list(graph.strategy.file_notes),
    }


def main() -> None:
    """Build, train, or (for itself) train one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(required=True)
    for name, run in (("build", build), ("train", train)):
        command = commands.add_parser(name)
        command.add_argument("--models", nargs="+", required=True)
        command.add_argument("--device", required=True)
        command.add_argument("--plans", type=Path, required=True)
        command.add_argument("--out", type=Path)
        command.add_argument("--side-by-side", action="store_true", help="all plans of a model at once: step times then say nothing")
        command.set_defaults(run=run)
    single = commands.add_parser("one")
    single.add_argument("model")
    single.add_argument("budget_bytes", type=int)
    single.add_argument("plan", nargs="?")
    single.set_defaults(run=one)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
