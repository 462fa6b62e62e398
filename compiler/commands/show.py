"""``dyngran-plan show``: a plan in the terminal, as a page, as pictures, and in the formats of other people's viewers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from dyngran.compiler.pictures.plan_picture import GraphPicture, pictures_of
from dyngran.compiler.pictures.plan_terminal import NUM_LARGEST, output_console, plain, print_document
from dyngran.compiler.plans.output_file import check_writable, write_file
from dyngran.compiler.plans.planfile import PlanDocument, dump_plan, load_plan
from dyngran.passes.errors import PlanFileError, format_bytes

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

Pictures = Sequence[GraphPicture]


@dataclass(frozen=True, slots=True)
class Export:
    """One kind of file: its option, what errors call it, and who makes it of a document, its pictures and its name."""

    option: str
    what: str
    help: str
    make: Callable[[PlanDocument, Pictures, str], bytes]


def add(commands: Commands) -> None:
    """Declare the command."""
    show = commands.add_parser(
        "show",
        help="print or draw a plan: prediction, memory over the step, decisions by region and size",
        description="Print a plan file, or draw it. With an option that names a file, that file is written and nothing else is printed.",
    )
    show.add_argument("file", metavar="FILE", help="the plan file")
    show.add_argument("--json", action="store_true", help="print the document as JSON")
    show.add_argument("--all", action="store_true", help=f"print every decision and region, not the {NUM_LARGEST} largest values")
    for export in EXPORTS:
        show.add_argument(f"--{export.option}", metavar="OUT", help=export.help)
    show.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console | None = None) -> int:
    """Show one plan file; returns the exit code. None: the console of every command.

    Raises:
        PlanFileError: the file is no plan, or one of the outputs cannot be written. ToolMissing: --png without matplotlib.
    """
    document = load_plan(options.file)
    outputs = [(export, path) for export in EXPORTS if (path := getattr(options, export.option)) is not None]
    _check_outputs(options.file, [(export.what, path) for export, path in outputs])
    if options.json:
        print(dump_plan(document), end="")
    if console is None:
        console = output_console()
    if outputs or not options.json:
        pictures = pictures_of(document, source=options.file)
        if not outputs:
            print_document(console, document, pictures, show_all=options.all)
        for export, path in outputs:
            content = export.make(document, pictures, os.path.basename(options.file))
            write_file(path, content, what=export.what)
            if not options.json:
                console.print(Text(plain(f"{export.what} written to {path} ({format_bytes(len(content))})")), soft_wrap=True)
    return 0


def _check_outputs(source: str, outputs: Sequence[tuple[str, str]]) -> None:
    """Refuse to write over the plan, and two outputs to one file."""
    taken = {os.path.realpath(source): "the plan file itself"}
    for what, path in outputs:
        place = os.path.realpath(path) if "\0" not in path else path  # which no file can have: `write_file` says so
        if place in taken:
            raise PlanFileError(f"{what} {path!r} cannot be written: that is {taken[place]}. Name another file.")
        taken[place] = f"where the {what} goes"
        if "\0" not in path:
            check_writable(path, what=what)


def _html(document: PlanDocument, pictures: Pictures, name: str) -> bytes:
    from dyngran.compiler.pictures.plan_html import page

    return page(document, pictures, name).encode()


def _png(document: PlanDocument, pictures: Pictures, name: str) -> bytes:
    from dyngran.compiler.pictures.plan_png import png

    return png(pictures, name)


def _trace(document: PlanDocument, pictures: Pictures, name: str) -> bytes:
    from dyngran.compiler.pictures.plan_trace import trace_text

    return trace_text(document, pictures, name).encode()


def _snapshot(document: PlanDocument, pictures: Pictures, name: str) -> bytes:
    from dyngran.compiler.pictures.plan_snapshot import snapshot_bytes

    return snapshot_bytes(pictures)


EXPORTS = (
    Export("html", "report", "write one page, without network: memory over the step with a cursor, frontier, regions, decisions", _html),
    Export("png", "picture", "write the same pictures; needs matplotlib", _png),
    Export("trace", "trace", "write the predicted step for ui.perfetto.dev or chrome://tracing, as JSON", _trace),
    Export("snapshot", "snapshot", "write the predicted step for pytorch.org/memory_viz, as a pickle of plain data", _snapshot),
)
