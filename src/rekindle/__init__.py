"""Rekindle: train any PyTorch model inside the memory you have."""

from typing import TYPE_CHECKING, Any

from rekindle.errors import (
    BudgetInfeasible,
    CaptureError,
    ChangedInPlace,
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
    from rekindle.nn_sequential.managed_sequential import sequential
    from rekindle.plan_object import Plan
    from rekindle.predict import measure_step as measure
    from rekindle.verification import Verdict, verify

__all__ = [
    "BudgetInfeasible",
    "CaptureError",
    "ChangedInPlace",
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
    "Plan": ("rekindle.plan_object", "Plan"),
    "Verdict": ("rekindle.verification", "Verdict"),
    "measure": ("rekindle.predict", "measure_step"),
    "plan": ("rekindle.api", "plan"),
    "rematerialize": ("rekindle.api", "rematerialize"),
    "sequential": ("rekindle.nn_sequential.managed_sequential", "sequential"),
    "verify": ("rekindle.verification", "verify"),
}


def __getattr__(name: str) -> Any:
    # Solving needs no torch: what needs it is imported when it is asked for.
    if name in _LAZY:
        import importlib

        module, own_name = _LAZY[name]
        return getattr(importlib.import_module(module), own_name)
    raise AttributeError(f"module 'rekindle' has no attribute {name!r}")
