"""Device time of the storage kernels against a copy of the same number of bytes, and against the same formula in ATen under Inductor.

    python bench/storage_kernels.py --output rows.jsonl          # on a card, under 4 minutes with compilation
    python bench/storage_kernels.py --only quantize --no-aten    # some kernels, Triton alone
    python bench/storage_kernels.py --tune                       # first find the fastest configurations of this card, and keep them
    python bench/storage_kernels.py --smoke                      # anywhere, on the CPU, tiny tensors: that it runs, not how fast

A row is one kernel on one size: median and quartiles of device time per call over replays of a CUDA graph (on a CPU wall time). A graph
calls it on several inputs in turn, and keeps the results, so that a replay touches more memory than the L2 cache holds. ``share`` is (bytes
read + bytes written) / time over that of a clone which reads and writes as many bytes, measured alike. Of a slice only the slice is read.
The ATen formulas know nothing of infinities and NaN, which is to their advantage.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dyngran.kernels import tuning
from dyngran.kernels.float8 import FLOAT8
from dyngran.kernels.groups import FORMATS, default_group
from dyngran.kernels.launch import triton
from dyngran.kernels.operators import register
from dyngran.kernels.steps import step_tensor
from dyngran.passes.errors import format_bytes

MIB = 2**20
SIZES_BYTES = (64 * MIB, 256 * MIB)  # of the wider side; the ATen formulas are measured at the last
ROTATED_BYTES = 384 * MIB  # of inputs in one graph: several times the L2 cache
NUM_REPLAYS = 30
LIMIT_S = 210  # after which the ATen formulas that are left are not compiled any more
DTYPES = (torch.float32, torch.bfloat16)
Call = Callable[..., Any]
Row = dict[str, Any]
ops = register()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel. ``make`` gives its tensors for a number of bytes on the wider side; ``goal`` is the share of a copy's bandwidth to reach.

    ``aten`` is the formula on the same tensors. ``reads_result``: what is read is as large as the result, whatever the arguments are.
    """

    kernel: str
    dtype: str
    goal: float
    make: Callable[[int], tuple[Tensor, ...]]
    run: Call
    aten: Call | None = None
    reads_result: bool = False


def line(num_bytes: int, dtype: torch.dtype, device: str) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(num_bytes, device=device) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (num_bytes // dtype.itemsize,), device=device, dtype=dtype)
    return torch.randn(num_bytes // dtype.itemsize, device=device, dtype=dtype)


# ------------------------------------------------------------------------------------------------------- the formulas, for Inductor to fuse


def aten_pack_bits(x: Tensor) -> Tensor:
    return (x.view(-1, 8).to(torch.int32) << torch.arange(8, device=x.device, dtype=torch.int32)).sum(1).to(torch.uint8)


def aten_unpack_bits(stored: Tensor) -> Tensor:
    return ((stored[:, None] >> torch.arange(8, device=stored.device, dtype=torch.uint8)) & 1).to(torch.bool).view(-1)


def aten_pack_sign(x: Tensor) -> Tensor:
    return aten_pack_bits((x <= 0.0).logical_not())


def aten_unpack_sign(stored: Tensor, *, dtype: torch.dtype) -> Tensor:
    return aten_unpack_bits(stored).to(dtype)


def aten_quantize(x: Tensor, *, format: str, is_stochastic: bool) -> tuple[Tensor, Tensor]:
    known = FORMATS[format]
    groups = x.view(-1, default_group(format)).to(torch.float32)
    scale = (groups.abs().amax(1, keepdim=True) * (1 / known.top * (1 + 2.0**-8))).to(torch.bfloat16).to(torch.float32).clamp(min=2.0**-126)
    scaled = groups * scale.reciprocal()
    if not known.is_integer:
        return scaled.to(FLOAT8[format]), scale.to(torch.bfloat16)
    code = (torch.floor(scaled + torch.rand_like(scaled)) if is_stochastic else scaled.round()).to(torch.int8)
    if known.bits == 4:
        pairs = code.view(torch.uint8).view(-1, 2)
        code = (pairs[:, 0] & 15) | (pairs[:, 1] << 4)
    return code, scale.to(torch.bfloat16)


def aten_dequantize(stored: Tensor, *, format: str, dtype: torch.dtype) -> Tensor:
    known, group = FORMATS[format], default_group(format)
    group_bytes = group * known.bits // 8
    num_groups = len(stored) // (group_bytes + 2)
    codes, scale = stored[: num_groups * group_bytes].view(num_groups, -1), stored[num_groups * group_bytes :].view(torch.bfloat16)
    if known.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=2).view(num_groups, group)
        values = ((codes ^ 8).to(torch.int32) - 8).to(torch.float32)
    else:
        values = codes.view(torch.int8 if known.is_integer else FLOAT8[format]).to(torch.float32)
    return (values * scale.to(torch.float32)[:, None]).to(dtype)


def aten_cast(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    if not x.is_floating_point() or torch.finfo(x.dtype).max <= torch.finfo(dtype).max:
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return torch.where(x.isinf(), x, x.clamp(-limit, limit)).to(dtype)


# ------------------------------------------------------------------------------------------------------------------------------ the cases


def bit_cases(device: str) -> Iterator[Case]:
    yield Case(
        kernel="pack_bits",
        dtype="bool",
        goal=0.85,
        make=lambda num_bytes: (line(num_bytes, torch.bool, device),),
        run=lambda x: ops.pack_bits(x, (1,)),
        aten=aten_pack_bits,
    )
    yield Case(
        kernel="unpack_bits",
        dtype="bool",
        goal=0.85,
        make=lambda num_bytes: (line(num_bytes // 8, torch.uint8, device),),
        run=lambda stored: ops.unpack_bits(stored, (8 * len(stored),), (1,)),
        aten=aten_unpack_bits,
    )
    for dtype in DTYPES:
        yield Case(
            kernel="pack_sign",
            dtype=name(dtype),
            goal=0.85,
            make=lambda num_bytes, dtype=dtype: (line(num_bytes, dtype, device),),
            run=lambda x: ops.pack_sign(x, (1,), 0.0),
            aten=aten_pack_sign,
        )
        yield Case(
            kernel="unpack_sign",
            dtype=name(dtype),
            goal=0.85,
            make=lambda num_bytes, dtype=dtype: (line(num_bytes // dtype.itemsize // 8, torch.uint8, device),),
            run=lambda stored, dtype=dtype: ops.unpack_sign(stored, (8 * len(stored),), (1,), 0.0, dtype),
            aten=functools.partial(aten_unpack_sign, dtype=dtype),
        )


def quantize_cases(device: str) -> Iterator[Case]:
    for dtype in DTYPES:
        for format, known in FORMATS.items():
            group, goal = default_group(format), 0.75 if known.bits == 4 else 0.85
            for is_stochastic in (False, True) if known.is_integer else (False,):

                def pack(x: Tensor, how: tuple[Any, ...] = (format, group, is_stochastic, 0)) -> Tensor:
                    return ops.quantize(x, (1,), *how)

                yield Case(
                    kernel=f"quantize {format}{' stochastic' if is_stochastic else ''}",
                    dtype=name(dtype),
                    goal=0.9 * goal if is_stochastic else goal,
                    make=lambda num_bytes, dtype=dtype: (line(num_bytes, dtype, device),),
                    run=pack,
                    aten=functools.partial(aten_quantize, format=format, is_stochastic=is_stochastic),
                )

            def stored(num_bytes: int, dtype: torch.dtype = dtype, how: tuple[Any, ...] = (format, group, False, 0)) -> tuple[Tensor, ...]:
                return (ops.quantize(line(num_bytes, dtype, device), (1,), *how),)

            def unpack(stored: Tensor, dtype: torch.dtype = dtype, format: str = format, group: int = group) -> Tensor:
                num = len(stored) // (group * FORMATS[format].bits // 8 + 2) * group
                return ops.dequantize(stored, (num,), (1,), dtype, format, group)

            aten = functools.partial(aten_dequantize, format=format, dtype=dtype)
            yield Case(kernel=f"dequantize {format}", dtype=name(dtype), goal=goal, make=stored, run=unpack, aten=aten)


def cast_cases(device: str) -> Iterator[Case]:
    floats = [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.float16, torch.float32),
    ]
    for source, target in (*floats, (torch.int64, torch.int32), (torch.int64, torch.uint8), (torch.uint8, torch.int64)):
        per_byte = source.itemsize / max(source.itemsize, target.itemsize)
        yield Case(
            kernel=f"cast to {name(target)}",
            dtype=name(source),
            goal=0.85,
            make=lambda num_bytes, source=source, part=per_byte: (line(int(num_bytes * part), source, device),),
            run=lambda x, target=target: ops.cast(x, (1,), target),
            aten=functools.partial(aten_cast, dtype=target),
        )


def slice_cases(device: str) -> Iterator[Case]:
    """Half of each row, which is one run; and half of 64 feature maps."""
    for run_bytes in (128, 136, 1024, 6272, 65536):

        def make(num_bytes: int, run_bytes: int = run_bytes) -> tuple[Tensor, ...]:
            x = line(num_bytes, torch.bfloat16, device)
            return (x[: len(x) // run_bytes * run_bytes].view(-1, run_bytes),)  # rows of twice the run, since elements have two bytes

        yield Case(
            kernel=f"pack_slice {run_bytes} B",
            dtype="bfloat16",
            goal=0.9,
            make=make,
            run=lambda x: ops.pack_slice(x, 1, 0, x.shape[1] // 2),
            aten=lambda x: x[:, : x.shape[1] // 2].clone(memory_format=torch.contiguous_format),
            reads_result=True,
        )

    def maps(num_bytes: int) -> tuple[Tensor, ...]:
        side = 28 if num_bytes >= MIB else 4
        x = line(num_bytes, torch.bfloat16, device)
        x = x[: len(x) // (64 * side * side) * 64 * side * side].view(-1, 64, side, side)
        index = torch.randperm(64, device=device)[:32]
        return x, index, x[:, :32].clone()

    for kernel, run, aten in (
        ("gather_maps", lambda x, index, _: ops.gather_maps(x, index, 1), lambda x, index, _: x.index_select(1, index)),
        ("scatter_maps", lambda x, index, part: ops.scatter_maps(x, part, index, 1), lambda x, index, part: x.index_copy(1, index, part)),
    ):
        yield Case(kernel=kernel, dtype="bfloat16", goal=0.9, make=maps, run=run, aten=aten, reads_result=True)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -------------------------------------------------------------------------------------------------------------------------- the measuring


@dataclass(frozen=True, slots=True)
class Times:
    """Quartiles of the time of one call in microseconds, and how many replays they are of."""

    q1_us: float
    median_us: float
    q3_us: float
    num_replays: int


def measure(call: Call, inputs: Sequence[tuple[Tensor, ...]]) -> Times:
    """Time of one call: of each replay of all inputs in turn, divided by how many they are."""
    for given in inputs:
        call(*given)
    replay = _graph(call, inputs) if inputs[0][0].is_cuda else None
    times_us = []
    for _ in range(NUM_REPLAYS):
        if replay is None:
            begin = time.perf_counter()
            for given in inputs:
                call(*given)
            times_us.append(1e6 * (time.perf_counter() - begin) / len(inputs))
        else:
            times_us.append(1e3 * replay() / len(inputs))
    q1, median, q3 = statistics.quantiles(times_us, n=4)
    return Times(q1, median, q3, NUM_REPLAYS)


def _graph(call: Call, inputs: Sequence[tuple[Tensor, ...]]) -> Callable[[], float]:
    """Replays the calls and returns milliseconds between an event before and one after them."""
    cuda: Any = torch.cuda  # graphs and events are not annotated
    torch.cuda.synchronize()
    graph, start, stop = cuda.CUDAGraph(), cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    with cuda.graph(graph):
        results = [call(*given) for given in inputs]

    def replay() -> float:
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop))

    replay()
    replay.results = results  # type: ignore[attr-defined]  # each call writes to memory of its own
    return replay


def bytes_of(value: Any) -> int:
    """Of a tensor, or of the tensors of a tuple."""
    return value.numel() * value.element_size() if isinstance(value, Tensor) else sum(bytes_of(part) for part in value)


class Bench:
    """Measures cases and writes rows, each as soon as it exists."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self._args, self._device, self._begin = args, device, time.perf_counter()
        self._copy_us: dict[int, float] = {}
        card = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        versions = {"torch": torch.__version__, "triton": triton.__version__ if triton else None}
        self._head: Row = {"card": card, **versions, "commit": commit(), "command": " ".join(sys.argv)}
        self.rows: list[Row] = []

    def run(self, case: Case, num_bytes: int, *, aten: bool) -> None:
        inputs = self._inputs(case, num_bytes)
        if self._args.tune and self._device == "cuda" and num_bytes == self._args.sizes[-1]:
            tuning.tune(lambda: case.run(*inputs[0]), torch.device("cuda", torch.cuda.current_device()))
        self._measure(case, case.run, inputs, num_bytes, "triton" if self._device == "cuda" else "reference")
        if aten and case.aten is not None:
            if time.perf_counter() - self._begin > LIMIT_S:
                print(f"{case.kernel} {case.dtype}: {LIMIT_S} s are over, not compared with ATen", file=sys.stderr)
                return
            torch.compiler.reset()
            self._measure(case, torch.compile(case.aten, dynamic=False), inputs, num_bytes, "inductor")

    def _inputs(self, case: Case, num_bytes: int) -> list[tuple[Tensor, ...]]:
        first = case.make(num_bytes)
        num = 1 if self._args.smoke else max(2, -(-ROTATED_BYTES // bytes_of(first)))
        return [first, *(case.make(num_bytes) for _ in range(min(num, 16) - 1))]

    def _measure(self, case: Case, call: Call, inputs: Sequence[tuple[Tensor, ...]], num_bytes: int, implementation: str) -> None:
        written_bytes = bytes_of(call(*inputs[0]))
        read_bytes = written_bytes if case.reads_result else bytes_of(inputs[0])
        times = measure(call, inputs)
        copy_us = self._copy(read_bytes + written_bytes)
        share = copy_us / times.median_us
        row: Row = {"kernel": case.kernel, "dtype": case.dtype, "implementation": implementation, "size_bytes": num_bytes}
        row |= {"read_bytes": read_bytes, "written_bytes": written_bytes, "num_inputs": len(inputs), "num_replays": times.num_replays}
        row |= {"median_us": round(times.median_us, 3), "q1_us": round(times.q1_us, 3), "q3_us": round(times.q3_us, 3)}
        row |= {"gb_per_s": round((read_bytes + written_bytes) / times.median_us / 1e3, 1), "copy_us": round(copy_us, 3)}
        self.rows.append({**row, "share": round(share, 4), "goal": round(case.goal, 4), **self._head})
        if self._args.output is not None:
            with self._args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")

    def _copy(self, moved_bytes: int) -> float:
        """Microseconds of a clone that reads half of these bytes and writes the other half."""
        if moved_bytes not in self._copy_us:
            half_bytes = max(4, moved_bytes // 8 * 4)
            num = 1 if self._args.smoke else max(2, min(16, ROTATED_BYTES // half_bytes))
            inputs = [(torch.zeros(half_bytes // 4, device=self._device),) for _ in range(num)]
            self._copy_us[moved_bytes] = measure(torch.clone, inputs).median_us
        return self._copy_us[moved_bytes]

    def table(self) -> Table:
        table = Table(title=f"{self._head['card']}, torch {self._head['torch']}, triton {self._head['triton']}")
        for column in ("kernel", "from", "size", "by"):
            table.add_column(column)
        for column in ("us", "q1 .. q3", "GB/s", "of a copy", "goal"):
            table.add_column(column, justify="right")
        for row in self.rows:
            is_reached = row["share"] >= row["goal"] or row["implementation"] != "triton"
            table.add_row(
                *(row["kernel"], row["dtype"], format_bytes(row["size_bytes"]), row["implementation"]),
                *(f"{row['median_us']:.1f}", f"{row['q1_us']:.1f} .. {row['q3_us']:.1f}", f"{row['gb_per_s']:.0f}"),
                *(f"{row['share']:.1%}", f"{row['goal']:.0%}"),
                style=None if is_reached else "red",
            )
        return table


def commit() -> str:
    """Commit that is measured: ``DYNGRAN_COMMIT`` (a copied tree has no history), else git's, else unknown."""
    if named := os.environ.get("DYNGRAN_COMMIT"):
        return named
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FILE", help="append rows as JSON lines")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="kernels whose name has one of these in it")
    parser.add_argument("--no-aten", action="store_true", help="do not compile and measure the ATen formulas")
    parser.add_argument(
        "--tune", action="store_true", help="first find the fastest configuration of each kernel, and keep them for this card"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny tensors on the CPU")
    args = parser.parse_args(arguments)
    args.sizes = (64 * 1024,) if args.smoke else SIZES_BYTES
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if not args.smoke and not torch.cuda.is_available():
        print("there is no card to measure on; --smoke runs tiny tensors on the CPU", file=sys.stderr)
        return 2
    device = "cpu" if args.smoke else "cuda"
    torch.manual_seed(0)
    step_tensor(torch.device(device))
    bench = Bench(args, device)
    cases = [case for made in (bit_cases, quantize_cases, cast_cases, slice_cases) for case in made(device)]
    cases = [case for case in cases if not args.only or any(word in case.kernel for word in args.only)]
    for num_bytes in args.sizes:
        for case in cases:
            bench.run(case, num_bytes, aten=not args.no_aten and num_bytes == args.sizes[-1])
    if args.tune and device == "cuda":
        tuning.save(torch.device("cuda", torch.cuda.current_device()))
    Console(width=None if sys.stdout.isatty() else 140).print(bench.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
