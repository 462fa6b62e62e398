"""``dyngran-plan``: plan without a card, look at plan files, compare them. Exit code 0; 1 where a command finds something worse; 2 with one
sentence on stderr for bad input and output that fails; 130 after Ctrl-C."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from dyngran.compiler.version import VERSION
from dyngran.passes.errors import DyngranError, InvalidOption

COMMANDS = ("build", "show", "frontier", "max_batch", "diff", "check", "doctor")  # modules of `compiler.commands`, as help lists them
INTERRUPTED = 130

DESCRIPTION = """\
Plan the memory of training steps: make plans without a card, look at them,
compare them, fail CI when they get worse."""
EPILOG = """\
a first plan:
  dyngran-plan build train.py:make --budget 20GiB --device h100 -o plan.json
  dyngran-plan show plan.json
  dyngran-plan check plan.json train.py:make

train.py:make is a function that returns (model, inputs); `dyngran-plan build
--help` says what else it may return."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. argparse leaves with 2 on arguments that it does not know."""
    given = sys.argv[1:] if arguments is None else arguments
    if sys.stdout is None:  # `>&-`
        print("dyngran-plan: cannot write the output: standard output is closed.", file=sys.stderr)
        return 2
    try:
        options, unknown = parser(given).parse_known_args(given)
        if unknown:
            raise InvalidOption(_unknown(options, unknown))
        code: int = options.run(options)
        sys.stdout.flush()
    except DyngranError as error:
        print(f"dyngran-plan: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dyngran-plan: interrupted; no file was changed.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has seen enough
        _drop_output()
        return 0
    except OSError as error:  # a full disk, say; what cannot be read is a PlanFileError
        _drop_output()
        print(f"dyngran-plan: cannot write the output: {error.strerror or error}.", file=sys.stderr)
        return 2
    return code


def _unknown(options: argparse.Namespace, arguments: Sequence[str]) -> str:
    """What is wrong with arguments that the command does not take, with the nearest that it does."""
    names = [f"--{name.replace('_', '-')}" for name in vars(options) if name != "run"]
    arguments = [argument for argument in arguments if argument.startswith("-")] or arguments  # what follows one may be its value
    near = difflib.get_close_matches(arguments[0].partition("=")[0], names, n=1)
    guess = f"; did you mean {near[0]}?" if near else "."
    return f"this command does not take {' '.join(arguments)!r}{guess} Its --help lists what it takes."


def _drop_output() -> None:
    """Let what is still buffered go nowhere: Python writes it once more on its way out, and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The command line. Where ``arguments`` name a command only its module is imported: `doctor` must run where libraries are missing."""
    whole = argparse.ArgumentParser(
        prog="dyngran-plan", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    whole.add_argument("--version", action="version", version=f"dyngran-plan {VERSION}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    named = arguments[0].replace("-", "_") if arguments else ""
    for name in (named,) if named in COMMANDS else COMMANDS:
        import_module(f"dyngran.compiler.commands.{name}").add(commands)
    return whole
