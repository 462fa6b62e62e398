"""``dyngran-plan doctor``: whether dyngran will work here. Prints without rich, which may be what is missing."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

WIDTH = 80


def add(commands: Any) -> None:
    """Declare the command."""
    doctor = commands.add_parser(
        "doctor",
        help="say whether dyngran will work here, and what is missing",
        description="Look at versions, libraries, compiler, card, memory and caches; train a tiny model. Exit code 1 if anything fails.",
    )
    doctor.add_argument("--no-step", action="store_true", help="do not train the tiny model (it takes a few seconds)")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Examine and print; 1 if a finding failed."""
    from dyngran.compiler.doctor import examine, exit_code, findings_json

    findings = examine(smoke=not options.no_step)
    if options.json:
        print(json.dumps(findings_json(findings), indent=1))
        return exit_code(findings)
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        lead = f"{finding.status.value:<8} {finding.check:<{width}}  "
        print(textwrap.fill(finding.found, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False))
        if finding.advice:
            print(textwrap.fill(f"-> {finding.advice}", WIDTH, initial_indent=" " * len(lead), subsequent_indent=" " * (len(lead) + 3)))
    return exit_code(findings)
