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
    WishRefused,
)

if TYPE_CHECKING:
    from rekindle.api import plan, rematerialize
    from rekindle.equality import Verdict, verify
    from rekindle.lower.sequential import sequential
    from rekindle.planning import Plan
    from rekindle.profile import measure_step as measure

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
    "WishRefused",
    "measure",
    "plan",
    "rematerialize",
    "sequential",
    "verify",
]

_LAZY = {
    "Plan": ("rekindle.planning", "Plan"),
    "Verdict": ("rekindle.equality", "Verdict"),
    "measure": ("rekindle.profile", "measure_step"),
    "plan": ("rekindle.api", "plan"),
    "rematerialize": ("rekindle.api", "rematerialize"),
    "sequential": ("rekindle.lower.sequential", "sequential"),
    "verify": ("rekindle.equality", "verify"),
}


def __getattr__(name: str) -> Any:
    # Solving needs no torch: what needs it is imported when it is asked for.
    if name in _LAZY:
        import importlib

        module, own_name = _LAZY[name]
        return getattr(importlib.import_module(module), own_name)
    raise AttributeError(f"module 'rekindle' has no attribute {name!r}")
