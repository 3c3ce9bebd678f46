"""Rekindle: train any PyTorch model inside the memory you have."""

from typing import TYPE_CHECKING, Any

from rekindle.errors import (
    BudgetInfeasible,
    CaptureError,
    InvalidBudget,
    InvalidProblem,
    InvalidSchedule,
    PlanMismatch,
    RekindleError,
    SolverUnavailable,
)

if TYPE_CHECKING:
    from rekindle.api import Plan, plan, rematerialize
    from rekindle.equality import Verdict, verify

__all__ = [
    "BudgetInfeasible",
    "CaptureError",
    "InvalidBudget",
    "InvalidProblem",
    "InvalidSchedule",
    "Plan",
    "PlanMismatch",
    "RekindleError",
    "SolverUnavailable",
    "Verdict",
    "plan",
    "rematerialize",
    "verify",
]

_LAZY = {
    "Plan": "rekindle.api",
    "Verdict": "rekindle.equality",
    "plan": "rekindle.api",
    "rematerialize": "rekindle.api",
    "verify": "rekindle.equality",
}


def __getattr__(name: str) -> Any:
    # Solving needs no torch: what needs it is imported when it is asked for.
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'rekindle' has no attribute {name!r}")
