"""Blocks of seeds, what came of them, and the file that remembers it."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corpus import Case, versions, write_case
from grammar import Program, program_of, to_document
from isolation import LEVELS, Isolated, Level, is_out_of_time
from shrink import shrink
from verdict import Outcome, Verdict

SHRUNK_PER_REASON = 1  # of one reason one program is shrunk and kept; the others are counted
TRIES = {"joint": 250, "compile": 80}
TRIES_OUT_OF_TIME = 10  # of a program that does not end: one try may take minutes


def show_seed(level: str, seed: int) -> int:
    """One program and what came of it; 1 if that is a failure."""
    program = program_of(seed)
    print(json.dumps(to_document(program), indent=1), flush=True)
    with Isolated(LEVELS[level]) as isolated:
        verdict = isolated.check(program, has_more=LEVELS[level].has_more(seed))
    print(f"{verdict.outcome.value}: {verdict.reason}\n{verdict.details}")
    return 1 if verdict.outcome is Outcome.FAILED else 0


@dataclass(slots=True)
class Campaign:
    level: str
    state: Path | None
    shrinks: bool = True
    lines: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=versions)
    kept: Counter[str] = field(default_factory=Counter)
    runs: Level = field(init=False)

    def __post_init__(self) -> None:
        self.runs = LEVELS[self.level]
        if self.state is not None and self.state.exists():
            self.lines = [json.loads(line) for line in self.state.read_text().splitlines()]

    def mine(self) -> list[dict[str, Any]]:
        """Blocks of this level that ran on these versions."""
        return [line for line in self.lines if line["level"] == self.level and line["versions"] == self.versions]

    def is_done(self, first: int, end: int) -> bool:
        return any(line["first"] <= first and end <= line["end"] for line in self.mine())

    def run_block(self, first: int, end: int) -> None:
        """Runs these seeds in one process, and in another from where it dies."""
        started = time.monotonic()
        outcomes: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        seeds: dict[str, list[int]] = {}
        with Isolated(self.runs) as isolated:
            for seed in range(first, end):
                verdict = isolated.check(program_of(seed), has_more=self.runs.has_more(seed))
                outcomes[verdict.outcome.value] += 1
                if verdict.reason:
                    reason = f"{verdict.outcome.value}: {verdict.reason}"
                    reasons[reason] += 1
                    if verdict.outcome in (Outcome.FAILED, Outcome.FINDING):
                        seeds.setdefault(reason, []).append(seed)
                        print(f"seed {seed}: {reason}: {verdict.details[:300]}", flush=True)
                        self._keep(seed, verdict, isolated)
        line = {
            "level": self.level,
            "first": first,
            "end": end,
            "versions": self.versions,
            "outcomes": dict(outcomes),
            "reasons": dict(reasons),
            "seeds": seeds,
            "seconds": round(time.monotonic() - started, 1),
        }
        self.lines.append(line)
        if self.state is not None:
            with self.state.open("a") as file:
                file.write(json.dumps(line) + "\n")
        print(f"{self.level} {first}..{end - 1}: {dict(outcomes)} in {line['seconds']} s", flush=True)

    def _keep(self, seed: int, verdict: Verdict, isolated: Isolated) -> None:
        self.kept[verdict.reason] += 1
        if not self.shrinks or self.kept[verdict.reason] > SHRUNK_PER_REASON:
            return

        def still_fails(program: Program) -> bool:
            found = isolated.check(program, has_more=self.runs.has_more(seed))
            return (found.outcome, found.reason) == (verdict.outcome, verdict.reason)

        max_tries = TRIES_OUT_OF_TIME if is_out_of_time(verdict) else TRIES[self.level]
        small = shrink(program_of(seed), still_fails, max_tries=max_tries)
        words = re.sub(r"[^a-z0-9]+", "-", verdict.reason.lower()).strip("-")[:60]
        case = Case(f"{self.level}-{seed}-{words}", self.level, f"{verdict.outcome.value}: {verdict.reason}", self.versions, small)
        print(f"kept {write_case(case)}: {len(small.steps)} steps", flush=True)

    def summary(self) -> int:
        """Prints the counts of all blocks that are done on these versions; 1 if any program failed."""
        outcomes: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        widest = {line["first"]: line for line in sorted(self.mine(), key=lambda line: line["end"])}
        for line in widest.values():
            outcomes.update(line["outcomes"])
            reasons.update(line["reasons"])
        num = sum(outcomes.values())
        print(f"{self.level}: {num} programs on {self.versions}")
        for name, amount in outcomes.most_common():
            print(f"  {amount:6d}  {amount / num:6.1%}  {name}")
        for name, amount in reasons.most_common():
            print(f"  {amount:6d}  {name}")
        return 1 if outcomes[Outcome.FAILED.value] else 0
