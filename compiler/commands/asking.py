"""What the commands that trace a target share: its arguments, progress on stderr, the console."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from dyngran.compiler.budget import Budget, parse_bytes
from dyngran.compiler.options import LOSSY, Codegen, Outputs
from dyngran.compiler.plans.planfile import Settings
from dyngran.passes.devices import DEVICES, find_device, match_device
from dyngran.passes.errors import InvalidOption
from dyngran.passes.solvers.portfolio import SOLVERS

SECONDS_BETWEEN_LINES = 5.0  # of progress where there is no terminal
TARGET_HELP = "file.py:callable or module:callable, which returns (model, inputs) or a dict"
RETURNS = """\
the target returns (model, inputs), or a dict:
  model       a module in training mode, or a function that calls modules
  inputs      a tensor, a tuple of arguments or a dict of keywords
  loss        a function of the output, compiled with the model (optional)
  targets     further arguments of the loss (optional)
  optimizer   an optimizer, or a function of the parameters (optional)
  autocast    a dtype or its name, such as "bf16" (optional)
Nothing is allocated: tensors have shapes and no numbers. If the function
takes arguments named batch or dtype, --batch and --dtype are given to it."""


def add_target(command: argparse.ArgumentParser) -> None:
    """TARGET and everything that decides how it is traced and planned, but the budget."""
    command.add_argument("target", metavar="TARGET", help=TARGET_HELP)
    command.add_argument(
        "--device", metavar="NAME", help=f"plan for this device: {', '.join(DEVICES)} (default: the card that is here, else cpu)"
    )
    command.add_argument(
        "--profile", action="store_true", help="measure operators on the device that is here, instead of a table of devices"
    )
    command.add_argument(
        "--codegen",
        choices=[codegen.value for codegen in Codegen],
        default=Codegen.INDUCTOR.value,
        help="who will generate code (default: inductor)",
    )
    command.add_argument("--dtype", choices=["bf16", "fp16", "fp32", "fp64"], help="of parameters and inputs, instead of the target's own")
    command.add_argument("--dynamic", action="store_true", help="trace with symbolic sizes, as torch.compile(dynamic=True)")
    command.add_argument(
        "--outputs",
        choices=[outputs.value for outputs in Outputs],
        default=Outputs.HELD.value,
        help="whether the loop holds what the model returns (default: held)",
    )
    command.add_argument("--solver", choices=SOLVERS, default="auto", metavar="NAME", help=f"one of {', '.join(SOLVERS)} (default: auto)")
    command.add_argument(
        "--storage",
        choices=LOSSY,
        action="append",
        default=[],
        metavar="FORMAT",
        help=f"let values be stored rounded, once for each format: {', '.join(LOSSY)} (default: none)",
    )
    command.add_argument("--no-pack", action="store_true", help="store nothing as bits or narrow integers, which changes no number")
    command.add_argument("--no-slice", action="store_true", help="store whole values only, and no parts whose rest is made again")
    command.add_argument(
        "--offload",
        nargs="?",
        const="",
        metavar="SIZE",
        help="let values wait for backward in host memory, in at most so much of it if a size is given, such as 32GiB",
    )
    command.add_argument("--keep-below", metavar="SIZE", help="always keep values up to this size, such as 64KiB")


def add_batch(command: argparse.ArgumentParser) -> None:
    command.add_argument("--batch", type=positive, metavar="N", help="first dimension of the inputs, instead of the target's own")


def positive(text: str) -> int:
    """An argument that counts something."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 up")
    return int(text)


def settings_from(options: argparse.Namespace, *, budget: str | None, batch: int | None) -> Settings:
    """Settings of a command line. Raises InvalidOption and InvalidBudget by name."""
    keep_below = None if options.keep_below is None else parse_bytes(options.keep_below)
    if options.keep_below is not None and keep_below is None:
        raise InvalidOption(f"--keep-below {options.keep_below!r} is no size: write 64KiB or 1MB, say.")
    return Settings(
        batch=batch,
        budget=None if budget is None else str(Budget.parse(budget, source="--budget")),
        dtype=options.dtype,
        dynamic=options.dynamic,
        keep_below=keep_below,
        offload=_offload(options.offload),
        outputs=Outputs(options.outputs),
        pack=not options.no_pack,
        slice=not options.no_slice,
        profile=_profile(options.device, measures=options.profile),
        solver=options.solver,
        storage=tuple(name for name in LOSSY if name in options.storage),
    )


def _offload(text: str | None) -> bool | int:
    """``--offload`` alone, with a size, or left out."""
    if not text:
        return text is not None
    num_bytes = parse_bytes(text)
    if not num_bytes:
        raise InvalidOption(f"--offload {text!r} is no size: write 32GiB, say, or --offload alone.")
    return num_bytes


def _profile(device: str | None, *, measures: bool) -> str | None:
    """The device of the table to price for; None: measure here."""
    named = None if device is None else find_device(device).name
    if named is not None and not measures:
        return named
    import torch

    is_card = torch.cuda.is_available()
    if device is None and not is_card:
        error_console().print(
            f"No --device was named and no card is here: planning for the CPU. Others: {', '.join(DEVICES)}.", soft_wrap=True
        )
    here = match_device(torch.cuda.get_device_name() if is_card else "cpu")
    if measures:
        if named is not None and (here is None or here.name != named):
            raise InvalidOption(f"--profile measures on the device that is here, and {named} is not. Leave out --profile, or --device.")
        return None
    if here is None:
        raise InvalidOption(
            f"the card here ({torch.cuda.get_device_name()}) is in no table: add --profile to measure on it, or name a --device."
        )
    return here.name


@contextmanager
def telling(console: Console) -> Iterator[Callable[[str], None]]:
    """A function that shows a line of progress: a spinner in a terminal, now and then a line elsewhere."""
    if console.is_terminal:
        with console.status("tracing") as status:
            yield lambda line: status.update(line)
        return
    last = [time.monotonic()]

    def tell(line: str) -> None:
        if time.monotonic() - last[0] >= SECONDS_BETWEEN_LINES:
            last[0] = time.monotonic()
            console.print(line, markup=False)

    yield tell


def error_console() -> Console:
    """Standard error, for progress."""
    return Console(stderr=True, highlight=False)


def add_command(commands: Any, name: str, *, summary: str, description: str) -> argparse.ArgumentParser:
    """A subcommand whose help ends with what a target returns."""
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, epilog=RETURNS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return command
