"""Training under a budget against stock torch.compile on one card: predicted and measured peak, step time, loss.

    python bench/fit.py --models llama350m vitl resnet152            # 90, 70, 50 and 30 % of the free transient
    python bench/fit.py --models llama350m --budgets 0.9 0.5
    python bench/fit.py --models resnet152 --batches 2 2.5 3         # larger batches under stock compile's peak
    python bench/fit.py --models vitl --storage none pack pack+bf16  # each budget with recompute alone, with lossless packing, with bf16
    python bench/fit.py --reference bench/results/fit-h100.jsonl     # budgets from stock's peak in rows of an earlier run
    python bench/fit.py --smoke                                      # a tiny model on the CPU, seconds

A configuration is ``stock`` (torch.compile), ``free`` (dyngran without a budget), ``f0.50`` (dyngran at static + 0.50 x (stock's
peak - static), followed by the storage formats if ``--storage`` names some) or ``x2.0`` (dyngran at stock's peak with twice the batch).
Each runs in a process of its own. Processes compile side by side, hand their cached memory back and wait; then they are timed in rounds
(A B C A B C), each while the others do nothing. Every row is appended to ``--out`` as soon as it exists: one when a configuration has
compiled (``"stage": "compiled"``: peaks, prediction, compile time, error of the first gradient against stock's) and one when it was timed
(``"stage": "timed"``: the same and step times over all rounds).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import IO

import torch
from torch import Tensor, nn

from dyngran.errors import DyngranError
from dyngran.passes.errors import format_bytes

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # `python -P` leaves the script's own folder out

from meter import Memory, measure_busy_ms, measure_memory, summary, synchronize, wall_times_ms  # noqa: E402  # found by the line above
from models import CASES, Case  # noqa: E402

ROW, ROUND = "@@row ", "@@round"  # what a worker says; it is told TIME for one round of steps, anything else to finish
TIME = "time"
NUM_LOSS_STEPS = 10  # every configuration reports its loss after this many steps
Row = dict[str, object]


class Trainer:
    """One configuration: model, optimizer, compiled function and its step."""

    def __init__(
        self, case: Case, *, batch: int, device: torch.device, backend: str, options: Mapping[str, object], drops_outputs: bool
    ) -> None:
        torch.manual_seed(0)
        self.case, self.device, self.drops_outputs = case, device, drops_outputs
        model = case.build().to(device).train()
        self.inputs = case.inputs(batch, device)
        if case.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.inputs = tuple(t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in self.inputs)
        self.model: nn.Module = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.compiled = torch.compile(model, backend=backend, dynamic=False, options=dict(options) or None)
        if backend == "dyngran":
            import dyngran

            dyngran.attach(model, self.optimizer)

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def step(self) -> Tensor:
        """Forward, loss, backward, optimizer step, gradients set to None; returns the loss without its graph."""
        with self._autocast():
            loss, output = self.case.loss(self.compiled, self.inputs)
        if self.drops_outputs:
            output = None
        loss.backward()  # type: ignore[no-untyped-call]
        del output
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def gradients(self) -> Iterator[Tensor]:
        """Forward and backward of the first batch without an optimizer step: each gradient in turn, freed before the next."""
        torch.manual_seed(1)
        with self._autocast():
            loss, output = self.case.loss(self.compiled, self.inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        del loss, output
        for parameter in self.model.parameters():
            gradient, parameter.grad = parameter.grad, None
            yield torch.zeros_like(parameter) if gradient is None else gradient

    def held(self) -> Iterable[Tensor]:
        yield from (*self.model.parameters(), *self.model.buffers(), *self.inputs)
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def prediction(trainer: Trainer) -> Row:
    """What dyngran says about the step, from `dyngran.explain`."""
    import dyngran

    report = dyngran.explain(trainer.compiled)
    return {
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "predicted_transient_bytes": report.predicted_peak_bytes - report.plan.static_bytes,
        "predicted_static_bytes": report.plan.static_bytes,
        "predicted_step_ms": round(report.plan.time_us / 1e3, 3),
        "predicted_overhead_ms": round(report.plan.overhead_us / 1e3, 3),
        "num_recomputed": report.plan.num_recomputed,
        "num_saved": len(report.plan.saved),
        "solver": report.plan.solver,
        "reported_peak_bytes": report.measured_peak_bytes,
        "reported_step_us": report.measured_step_us,
    }


def storage_options(formats: str) -> Row:
    """``"none"``, ``"pack"``, ``"pack+slice+offload+fp8"``: lossless packing, slices, host memory or not, and the lossy formats allowed."""
    names = [] if formats == "none" else formats.split("+")
    switches = ("pack", "slice", "offload")
    return {**{name: name in names for name in switches}, "storage": [name for name in names if name not in switches]}


def memory_row(memory: Memory) -> Row:
    return {
        "static_bytes": memory.static_bytes,
        "measured_peak_bytes": memory.peak_bytes,
        "measured_transient_bytes": memory.peak_bytes - memory.static_bytes,
        "reserved_bytes": memory.reserved_bytes,
    }


def emit(row: Row) -> None:
    print(ROW + json.dumps(row), flush=True)


def one(args: argparse.Namespace) -> int:
    """Compile one configuration and emit its row; then time it in rounds, told so on stdin (or once with ``--now``), and emit it again."""
    device = torch.device("cuda" if torch.cuda.is_available() and not args.smoke else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    case = CASES[args.models[0]]
    batch = int(case.batch * args.batch_factor)
    row: Row = {
        "model": args.models[0],
        "config": args.config,
        "batch": batch,
        "storage": args.storage[0] if args.storage else "pack+slice",
        "budget_bytes": args.budget_bytes,
        "outputs": "dropped" if args.drop_outputs else "held",
        "stage": "compiled",
        "status": "ok",
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": commit(),
        "command": args.command,
    }
    options: Row = {}
    if args.config != "stock":
        options = {"budget": args.budget_bytes, "outputs": row["outputs"], **({"codegen": "eager"} if args.smoke else {})}
        options |= storage_options(args.storage[0]) if args.storage else {}
    backend = "dyngran" if args.config != "stock" else ("aot_eager" if args.smoke else "inductor")
    try:
        drops = bool(args.drop_outputs)
        return run_one(args, row, Trainer(case, batch=batch, device=device, backend=backend, options=options, drops_outputs=drops))
    except (RuntimeError, ValueError, DyngranError) as error:  # out of memory, a budget that is refused: a result, written down as such
        least_bytes = getattr(error, "least_peak_bytes", None)
        emit({**row, "status": type(error).__name__, "error": str(error)[:600], "least_peak_bytes": least_bytes})
        return 1


def run_one(args: argparse.Namespace, row: Row, trainer: Trainer) -> int:
    device = trainer.device
    start = time.perf_counter()
    row["gradient_error"] = gradient_error(trainer, args)
    synchronize(device)
    row["compile_s"] = round(time.perf_counter() - start, 1)
    losses: list[Tensor] = []
    while len(losses) < NUM_LOSS_STEPS:
        losses.append(trainer.step())
    row["loss"] = losses[-1].item()
    row["loss_after_steps"] = NUM_LOSS_STEPS
    del losses
    row.update(memory_row(measure_memory(trainer.step, device, trainer.held(), num_steps=3)))
    if args.config != "stock":
        row.update(prediction(trainer))
    emit(row)
    times_ms: list[float] = []
    for _ in range(1) if args.now else rounds_asked_for():
        for _ in range(2):
            trainer.step()
        times_ms += wall_times_ms(trainer.step, device, num_steps=args.steps)
    row.update(summary(times_ms))
    row["device_busy_ms"] = measure_busy_ms(trainer.step, device, num_steps=3)
    row.update(memory_row(measure_memory(trainer.step, device, trainer.held(), num_steps=3)))
    row["samples_per_s"] = round(1e3 * int(str(row["batch"])) / float(str(row["step_ms"])), 2)
    emit({**row, "stage": "timed"})
    return 0


def gradient_error(trainer: Trainer, args: argparse.Namespace) -> float | None:
    """Norm of the first gradient's difference from stock's, relative to its norm; stock leaves its own in a file. None without one."""
    path = Path(tempfile.gettempdir()) / f"dyngran-fit-{args.run}-{args.models[0]}-{args.batch_factor:g}.pt"
    found = trainer.gradients()
    if args.config == "stock":
        torch.save([gradient.cpu() for gradient in found], path)
        return 0.0
    if not path.exists():
        for _ in found:
            pass
        return None
    difference = norm = 0.0
    for gradient, exact in zip(found, torch.load(path, mmap=True), strict=True):
        exact = exact.to(gradient.device)
        difference += float((gradient - exact).double().square().sum())
        norm += float(exact.double().square().sum())
    return (difference / norm) ** 0.5 if norm else None


def rounds_asked_for() -> Iterator[None]:
    """One item for each round of steps that stdin asks for. Between rounds the process hands its cached memory back and waits."""
    while True:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if sys.stdin.readline().strip() != TIME:
            return
        yield
        print(ROUND, flush=True)


def commit() -> str:
    """Commit that is measured: ``DYNGRAN_COMMIT`` (a copied tree has no history), else git's, else unknown."""
    if name := os.environ.get("DYNGRAN_COMMIT"):
        return name
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


class Worker:
    """A configuration's process, seen from the parent."""

    def __init__(
        self, args: argparse.Namespace, model: str, config: str, *, budget_bytes: int | None, batch_factor: float, storage: str = ""
    ) -> None:
        command = [sys.executable, str(Path(__file__)), "--one", "--models", model, "--config", config, "--steps", str(args.steps)]
        command += ["--batch-factor", str(batch_factor), "--command", args.command, "--run", args.run]
        command += ["--storage", storage] if storage else []
        command += [] if budget_bytes is None else ["--budget-bytes", str(budget_bytes)]
        command += [flag for flag, is_set in (("--smoke", args.smoke), ("--drop-outputs", args.drop_outputs)) if is_set]
        self.name = f"{model} {config}"
        self._args = args
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def row(self) -> Row | None:
        """Wait for the next row and append it to ``--out``; None if a round is over or the process has ended before there is one."""
        output = self._process.stdout
        assert output is not None
        for line in output:
            if line.startswith(ROUND):
                return None
            if line.startswith(ROW):
                row: Row = json.loads(line[len(ROW) :])
                with Path(self._args.out).open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(shown(row), flush=True)
                return row
        return None

    def time(self) -> None:
        """One round of steps, alone; returns when it is over. If it fails, its row says so."""
        self._tell(TIME)
        self.row()

    def finish(self) -> Row | None:
        """Its last row, from the times of all rounds; None if it ended before."""
        self._tell("finish")
        row = self.row()
        self._process.wait()
        return row

    def _tell(self, word: str) -> None:
        stdin: IO[str] | None = self._process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # it has ended: a row says why
            stdin.write(f"{word}\n")
            stdin.flush()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def shown(row: Row) -> str:
    """One line for a person: what was allowed, predicted, measured, and how long a step took."""

    def amount(name: str) -> str:
        value = row.get(name)
        return format_bytes(value) if isinstance(value, int) else "-"

    times = f"step {row.get('step_ms', '-')} ms  busy {row.get('device_busy_ms', '-')} ms  compile {row.get('compile_s', '-')} s"
    peaks = (
        f"budget {amount('budget_bytes'):>10}  predicted {amount('predicted_peak_bytes'):>10}  measured {amount('measured_peak_bytes'):>10}"
    )
    said = f"loss {row.get('loss', '-')}  gradient error {row.get('gradient_error', '-')}"
    return f"{row['model']:10} {row['config']:6} {row['status']:8} {peaks}  {times}  {said}"


def stock_peak(args: argparse.Namespace, model: str, waiting: list[Worker]) -> tuple[int, int] | None:
    """(static, peak) bytes of stock compile, which budgets are shares of: of this run, or read from ``--reference``."""
    found: Row | None = None
    if args.reference:
        rows: list[Row] = [json.loads(line) for line in Path(args.reference).read_text().splitlines()]
        wanted = {"model": model, "config": "stock", "status": "ok", "batch": CASES[model].batch}
        found = next((row for row in rows if wanted.items() <= row.items()), None)
    if found is None:
        worker = Worker(args, model, "stock", budget_bytes=None, batch_factor=1.0)
        waiting.append(worker)
        found = worker.row()
    if found is None or found["status"] != "ok":
        return None
    return int(str(found["static_bytes"])), int(str(found["measured_peak_bytes"]))


def compiled(args: argparse.Namespace, model: str, waiting: list[Worker]) -> None:
    """Compile all configurations of one model: stock, dyngran's free plan, the budgets, larger batches."""
    found = stock_peak(args, model, waiting)
    if found is None:
        return
    static, peak = found
    todo: list[tuple[str, int | None, float, str]] = [] if waiting else [("stock", None, 1.0, "")]
    if not args.skip_free:  # alone: what it measures of operators is what the others plan with
        free = Worker(args, model, "free", budget_bytes=None, batch_factor=1.0)
        waiting.append(free)
        free.row()
    for share in args.budgets:
        budget = static + int(share * (peak - static))
        todo += [(f"f{share:.2f} {storage}".strip(), budget, 1.0, storage) for storage in args.storage or [""]]
    todo += [(f"x{factor:g}", peak, factor, "") for factor in args.batches]
    while todo:
        group, todo = todo[: args.at_once], todo[args.at_once :]
        workers = [
            Worker(args, model, name, budget_bytes=budget, batch_factor=factor, storage=storage) for name, budget, factor, storage in group
        ]
        waiting += workers
        for worker in workers:
            worker.row()


def fit(args: argparse.Namespace, models: list[str]) -> None:
    """Compile the models' configurations side by side, then time each alone, in rounds."""
    waiting: list[list[Worker]] = [[] for _ in models]
    try:
        with ThreadPoolExecutor(len(models)) as pool:
            list(pool.map(lambda model, workers: compiled(args, model, workers), models, waiting))
        for workers in waiting:
            for _ in range(args.rounds):
                for worker in workers:
                    worker.time()
            for worker in workers:
                worker.finish()
    finally:
        for workers in waiting:
            for worker in workers:
                worker.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama350m", "vitl", "resnet152"], choices=list(CASES))
    parser.add_argument("--budgets", nargs="*", type=float, default=[0.9, 0.7, 0.5, 0.3], help="shares of the free transient")
    parser.add_argument("--storage", nargs="*", default=[], help='for each budget: "none", "pack+slice", "pack+slice+bf16", ...')
    parser.add_argument("--batches", nargs="*", type=float, default=[], help="multiples of the batch, under stock compile's peak")
    parser.add_argument("--skip-free", action="store_true", help="leave out dyngran without a budget")
    parser.add_argument("--side-by-side", action="store_true", help="compile all models at the same time; the card must hold them")
    parser.add_argument("--at-once", type=int, default=3, help="processes that compile side by side")
    parser.add_argument(
        "--reference", help="file of rows: budgets are shares of the peak of its stock rows, so that nothing waits for stock"
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a round")
    parser.add_argument("--rounds", type=int, default=2, help="times that the timing goes round all configurations of a model")
    parser.add_argument("--out", default=str(Path(os.environ.get("OUT", ".")) / "fit.jsonl"))
    parser.add_argument("--drop-outputs", action="store_true", help="a loop that drops what the model returns before backward, and says so")
    parser.add_argument("--smoke", action="store_true", help="the tiny model on the CPU, eager code generation")
    parser.add_argument("--one", action="store_true", help="run a single configuration in this process")
    parser.add_argument("--now", action="store_true", help="with --one: time at once instead of waiting for a line on stdin")
    parser.add_argument("--config", default="stock", help="with --one: stock, free, or a name for the row")
    parser.add_argument("--budget-bytes", type=int, help="with --one")
    parser.add_argument("--batch-factor", type=float, default=1.0, help="with --one")
    parser.add_argument("--run", default=str(os.getpid()), help=argparse.SUPPRESS)
    parser.add_argument("--command", default=" ".join(["python", *sys.argv]), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.models, args.steps = ["tiny"], min(args.steps, 5)
        torch.set_num_threads(1)
    if args.one:
        return one(args)
    for models in [args.models] if args.side_by_side else [[model] for model in args.models]:
        fit(args, models)
    return 0


if __name__ == "__main__":
    sys.exit(main())
