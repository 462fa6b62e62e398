"""The errors that dyngran raises on purpose, under the names that users catch."""

from dyngran.passes.errors import (
    BudgetTooSmall,
    DyngranError,
    GraphBroken,
    InvalidBudget,
    InvalidOption,
    NothingCompiled,
    PlanFileError,
    PlanMismatch,
    TargetError,
    ToolMissing,
    UnknownSize,
)

__all__ = [
    "BudgetTooSmall",
    "DyngranError",
    "GraphBroken",
    "InvalidBudget",
    "InvalidOption",
    "NothingCompiled",
    "PlanFileError",
    "PlanMismatch",
    "TargetError",
    "ToolMissing",
    "UnknownSize",
]

for _name in __all__:
    globals()[_name].__module__ = __name__  # as a traceback shows it
