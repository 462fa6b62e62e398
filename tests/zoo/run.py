"""Train the zoo: python tests/zoo/run.py [--codegen eager|inductor] [--device cpu|cuda] [--rows FILE] [--shard 1/2] [-j 2]
[--only NAME ...] [--fast] [--keep] [--seconds S]

One line of JSON per model in FILE. What is there already, from the same sources and libraries, is not trained again, so that a run
that was cut off goes on. Each model runs in a process of its own, forked from one that has imported everything. Exit status 1 if a model
that stock torch trains is not trained, or a peak is above its budget. `python tests/zoo/table.py` makes the table.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from itertools import takewhile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the cores are filled with models
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asks whether there is a card without looking at it
if "cuda" in sys.argv:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the usual 32 MiB for each thread are more than these models need
else:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a card that has been looked at cannot be forked
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests, which import one another by name

import torch
from forks import end_on_sigterm, run_jobs
from shards import shard

from zoo.entries import FAST, installed, make_of, names
from zoo.rows import decode, encode, read_rows, versions, write_rows
from zoo.trial import Row, Trial, Way
from zoo.verdict import BUDGETS, faults, is_whole
from zoo.vision_models import import_torchvision

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    end_on_sigterm()
    arguments = parsed()
    path = arguments.rows or RESULTS / f"{arguments.device}-{arguments.codegen}.jsonl"
    found = versions(arguments.device)
    chosen = [name for name in names() if not arguments.only or name.startswith(tuple(arguments.only))]
    chosen = [name for name in chosen if not arguments.fast or name in FAST]
    if not chosen:
        near = get_close_matches(arguments.only[0], names(), n=3) if arguments.only else []
        sys.exit(f"no model's name begins with {' or '.join(arguments.only)}" + f"; did you mean {' or '.join(near)}?" * bool(near))
    part, parts = arguments.shard
    chosen = chosen[part - 1 :: parts]
    before = {row.name: row for row in read_rows(path)}
    done = {name for name, row in before.items() if is_whole(row) and (arguments.keep or same(row.versions, found))}
    jobs = [(name, partial(train, name, arguments.device, arguments.codegen, found)) for name in chosen if name not in done]
    ends = time.monotonic() + arguments.seconds
    print(f"{len(chosen)} models, {len(chosen) - len(jobs)} done before; {', '.join(f'{k} {v}' for k, v in found.items())}", flush=True)
    preload(arguments.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with path.open("a") as file:
        for number, (name, answer, why) in enumerate(
            run_jobs(takewhile(lambda _: time.monotonic() < ends, jobs), num_processes=arguments.j, timeout_s=arguments.timeout), 1
        ):
            if answer is None:
                answer = encode(Row(name, arguments.device, arguments.codegen, found, eager=Way("fails", why)))
            file.write(answer + "\n")
            file.flush()
            print(f"{number}/{len(jobs)} {time.monotonic() - started:.0f} s  {line(decode(answer))}", flush=True)
    rows = read_rows(path)
    write_rows(path, rows)
    mine = [row for row in rows if row.name in chosen]
    bad = [row for row in mine if faults(row)]
    trained = sum(bool(row.stock and row.stock.trains) for row in mine)
    print(f"{len(mine)} models: {trained} are trained by stock, {len(bad)} of these break a promise")
    return int(bool(bad))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codegen", choices=["eager", "inductor"], default="eager")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", type=Path, help="file of rows; default: results/DEVICE-CODEGEN.jsonl beside this script")
    parser.add_argument("--shard", type=shard, default="1/1", help="which part of the zoo: 2/4 is the second of four")
    parser.add_argument("--only", nargs="*", action="extend", default=[], help="what names begin with, as timm/ or transformers/llama")
    parser.add_argument("--fast", action="store_true", help="the subset that CI trains")
    parser.add_argument(
        "--keep", action="store_true", help="do not train again what another version of dyngran or of a library has trained"
    )
    parser.add_argument("--timeout", type=float, default=600, help="seconds per model")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no more models after so long; a later run goes on")
    parser.add_argument("-j", type=int, default=2, help="models at a time")
    return parser.parse_args()


def train(name: str, device: str, codegen: str, found: dict[str, str]) -> str:
    """One entry, in a process of its own; the row as JSON."""
    torch.set_num_threads(1)
    return encode(Trial(make_of(name), device, codegen, Row(name, device, codegen, found)).run())


def same(left: dict[str, str], right: dict[str, str]) -> bool:
    """Whether rows of the two were measured with the same things, on whatever day."""
    return {**left, "date": ""} == {**right, "date": ""}


def preload(device: str) -> None:
    """Import what every model needs, once, before the processes are forked; what may look at a card is left to them."""
    if device == "cpu":
        import_module("torch._inductor.compile_fx")
        import_module("dyngran.compiler.backend")
    if "torchvision" in installed():
        import_torchvision()
    if "transformers" in installed():
        import_module("transformers").logging.set_verbosity_error()
    assert not torch.cuda.is_initialized()


def line(row: Row) -> str:
    """One model for a person who watches."""
    ways = [("eager", row.eager), ("stock", row.stock), *((budget, row.ways.get(budget)) for budget in BUDGETS)]
    told = " ".join(f"{name} {way.status}" for name, way in ways if way is not None)
    peaks = " ".join(f"{way.peak_bytes / 2**20:.2f}" for _, way in ways if way is not None and way.peak_bytes is not None)
    why = "; ".join(faults(row)) or next((way.detail for _, way in ways if way is not None and way.status == "fails"), "")
    return f"{row.name}  {told}  [{peaks} MiB]  {sum(way.seconds for _, way in ways if way is not None):.0f} s  {why[:300]}"


if __name__ == "__main__":
    sys.exit(main())
