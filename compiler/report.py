"""The explanation of a plan: every decision with its reason, bytes and microseconds; predicted beside measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

from dyngran.compiler.report_html import render_html
from dyngran.compiler.report_rows import AtPeak, RegionRow, ValueRow, largest_rows, peak_rows, region_rows
from dyngran.compiler.report_sheet import Sheet, render_rich, render_text
from dyngran.compiler.report_tables import report_sheet, step_sheet
from dyngran.passes.plan import Plan
from dyngran.passes.problem import Problem
from dyngran.passes.schedule import timeline_of
from dyngran.passes.simulate import Simulator
from dyngran.runtime.observe import Observation

if TYPE_CHECKING:
    from rich.console import Group

NUM_LARGEST = 12
Item = TypeVar("Item")


class _Renders:
    """One sheet, three faces: text, a rich table in a terminal, HTML in a notebook."""

    __slots__ = ()

    def sheet(self) -> Sheet:
        raise NotImplementedError

    def __str__(self) -> str:
        return render_text(self.sheet())

    def __rich__(self) -> Group:
        return render_rich(self.sheet())

    def _repr_html_(self) -> str:
        return render_html(self.sheet())


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(_Renders):
    """One compiled region.

    Attributes:
        plan: the plan that runs. regions, largest, at_peak: see `compiler/report_rows.py`.
        measured_peak_bytes, measured_step_us: of the whole step; None until a step has been observed. ``peak_is_exact`` is False
            where the peak was sampled or computed instead of counted by the allocator. measured_static_bytes: held between steps.
        unplanned: ``(what, bytes, what to do)`` of bytes at the peak that lie outside of the compiled graphs.
        drift: where observation and prediction disagree. notes: everything else that people should know.
    """

    plan: Plan
    device: str
    torch_version: str
    codegen: str
    num_steps: int
    measured_peak_bytes: int | None
    peak_is_exact: bool
    measured_static_bytes: int | None
    measured_step_us: float | None
    regions: tuple[RegionRow, ...]
    largest: tuple[ValueRow, ...]
    at_peak: AtPeak
    unplanned: tuple[tuple[str, int, str], ...]
    drift: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """As in `StepReport`: one plan per compiled region."""
        return (self.plan,)

    @property
    def predicted_peak_bytes(self) -> int:
        """Of the step, held bytes included."""
        return self.plan.peak_bytes

    @property
    def predicted_step_us(self) -> float:
        """Device time of forward and backward; the optimizer is not part of it."""
        return self.plan.time_us

    def sheet(self) -> Sheet:
        """The report as headings, sentences and tables of text."""
        return report_sheet(self)

    def to_dict(self) -> dict[str, object]:
        """Everything in the report as JSON-able values; bytes and microseconds as numbers."""
        return _as_dict(self) | {
            "solver": self.plan.solver,
            "truncated": self.plan.truncated,
            "budget_bytes": self.plan.budget_bytes,
            "num_recomputed": self.plan.num_recomputed,
            "recompute_us": self.plan.recompute_us,
            "overhead_us": self.plan.overhead_us,
            "saved_bytes": self.plan.saved_bytes,
            "static_bytes": self.plan.static_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(_Renders):
    """Several compiled regions of one step (graph breaks): one report per region, in the order in which forward runs them.

    The peak of a step is the largest of its parts' (each part's prediction already holds what earlier parts saved); times add up.
    What is measured belongs to the whole step and is the same observation in every part, so it is never added.
    """

    parts: tuple[Report, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a StepReport needs at least one Report")

    @property
    def _peak_part(self) -> Report:
        return max(self.parts, key=lambda part: part.predicted_peak_bytes)

    @property
    def plan(self) -> Plan:
        """The plan of the part that sets the peak; every part has its own in ``parts``."""
        return self._peak_part.plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(part.plan for part in self.parts)

    @property
    def device(self) -> str:
        return self.parts[0].device

    @property
    def torch_version(self) -> str:
        return self.parts[0].torch_version

    @property
    def codegen(self) -> str:
        return ", ".join(_unique(part.codegen for part in self.parts))

    @property
    def num_steps(self) -> int:
        return max(part.num_steps for part in self.parts)

    @property
    def predicted_peak_bytes(self) -> int:
        return self._peak_part.predicted_peak_bytes

    @property
    def measured_peak_bytes(self) -> int | None:
        return max((part.measured_peak_bytes for part in self.parts if part.measured_peak_bytes is not None), default=None)

    @property
    def peak_is_exact(self) -> bool:
        return all(part.peak_is_exact for part in self.parts)

    @property
    def measured_static_bytes(self) -> int | None:
        return max((part.measured_static_bytes for part in self.parts if part.measured_static_bytes is not None), default=None)

    @property
    def predicted_step_us(self) -> float:
        return sum(part.predicted_step_us for part in self.parts)

    @property
    def measured_step_us(self) -> float | None:
        return max((part.measured_step_us for part in self.parts if part.measured_step_us is not None), default=None)

    @property
    def regions(self) -> tuple[RegionRow, ...]:
        return tuple(row for part in self.parts for row in part.regions)

    @property
    def largest(self) -> tuple[ValueRow, ...]:
        return tuple(sorted((row for part in self.parts for row in part.largest), key=lambda row: -row.size_bytes)[:NUM_LARGEST])

    @property
    def at_peak(self) -> AtPeak:
        return self._peak_part.at_peak

    @property
    def unplanned(self) -> tuple[tuple[str, int, str], ...]:
        return _unique(row for part in self.parts for row in part.unplanned)

    @property
    def drift(self) -> tuple[str, ...]:
        return _unique(sentence for part in self.parts for sentence in part.drift)

    @property
    def notes(self) -> tuple[str, ...]:
        return _unique(note for part in self.parts for note in part.notes)

    def sheet(self) -> Sheet:
        """A summary of the step, then every part."""
        return step_sheet(self)

    def to_dict(self) -> dict[str, object]:
        """The step's numbers and, under ``parts``, every part's."""
        return _as_dict(self) | {"parts": [part.to_dict() for part in self.parts]}


def build_report(
    *,
    problem: Problem,
    plan: Plan,
    simulator: Simulator,
    observation: Observation | None,
    notes: tuple[str, ...],
    device: str,
    torch_version: str,
    codegen: str,
    unplanned: tuple[tuple[str, int, str], ...],
) -> Report:
    """Explain ``plan`` for ``problem``; ``observation`` is None before the first step has ended. Looking changes nothing."""
    return Report(
        plan=plan,
        device=device,
        torch_version=torch_version,
        codegen=codegen,
        num_steps=observation.num_steps if observation else 0,
        measured_peak_bytes=observation.peak_bytes if observation else None,
        peak_is_exact=observation.peak_is_exact if observation else True,
        measured_static_bytes=observation.static_bytes if observation else None,
        measured_step_us=observation.step_us if observation else None,
        regions=region_rows(problem, plan),
        largest=largest_rows(problem, plan, num_rows=NUM_LARGEST),
        at_peak=peak_rows(problem, plan, timeline_of(simulator, plan), num_rows=NUM_LARGEST),
        unplanned=unplanned,
        drift=observation.drift if observation else (),
        notes=_unique(notes),
    )


def _unique(items: Iterable[Item]) -> tuple[Item, ...]:
    return tuple(dict.fromkeys(items))


def _as_dict(report: Report | StepReport) -> dict[str, object]:
    return {
        "device": report.device,
        "torch_version": report.torch_version,
        "codegen": report.codegen,
        "num_steps": report.num_steps,
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "measured_peak_bytes": report.measured_peak_bytes,
        "peak_is_exact": report.peak_is_exact,
        "measured_static_bytes": report.measured_static_bytes,
        "predicted_step_us": report.predicted_step_us,
        "measured_step_us": report.measured_step_us,
        "regions": [asdict(row) | {"actions": {action.value: count for action, count in row.actions}} for row in report.regions],
        "largest": [asdict(row) | {"action": row.action.value} for row in report.largest],
        "at_peak": asdict(report.at_peak),
        "unplanned": [{"what": what, "size_bytes": size, "advice": advice} for what, size, advice in report.unplanned],
        "drift": list(report.drift),
        "notes": list(report.notes),
    }
