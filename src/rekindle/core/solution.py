"""`Solution`: what a solver answers. Peak and cost come from `simulate`, never from the solver."""

import math
from dataclasses import dataclass
from enum import Enum

from rekindle.core.schedule import Schedule


class Status(Enum):
    """How a solve ended; the value is its sentence."""

    OPTIMAL = "proven optimal"
    FEASIBLE = "within the budget, not proven optimal"
    INFEASIBLE = "proven that no schedule is within the budget"
    # Also of a search that ended before its limit: what it said would take a proof.
    TIME_LIMIT = "no schedule within the budget was found"
    ERROR = "the solver failed"

    @property
    def has_schedule(self) -> bool:
        return self in (Status.OPTIMAL, Status.FEASIBLE)


def gap_sentence(cost: int, bound: int | None) -> str:
    """The optimality gap of a schedule as a sentence, the same in every report; `bound` is a proven
    lower bound on the cost. A large gap is a share of the schedule's own cost, as MILP solvers
    define it; up to 5 % it is a share of the bound: "within 2 % of optimal"."""
    if bound is None:
        return "optimality gap unknown"
    if cost <= bound:
        return "proven optimal"
    # Near the bound one number says all; far from it, that the bound may be what is weak.
    if bound > 0 and cost <= 1.05 * bound:
        return f"within {_percent(cost / bound - 1)} of optimal"
    return f"optimality gap at most {_percent(1 - bound / cost)}"


def _percent(share: float) -> str:
    """Two digits that count, rounded up: a proof must not promise too much."""
    digits = 2 if share < 0.01 else 1 if share < 0.1 else 0
    return f"{math.ceil(share * 100 * 10**digits - 1e-9) / 10**digits:.{digits}f} %"


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solver found. A failure is data too: a status and a sentence."""

    status: Status
    schedule: Schedule | None  # within the budget; None where the status has none
    solver: str
    seed: int = 0
    wall_s: float = 0.0
    bound: int | None = None  # proven lower bound on the cost of any schedule within the budget
    message: str = ""  # one sentence on top of the status: why, or what to try
    smallest: Schedule | None = None  # where the budget was not met: the smallest peak found
    stopped_by: str = (
        ""  # "proof", "gap", "time limit", "move limit", "no improvement", "interrupt"
    )
    notes: tuple[str, ...] = ()  # which method found what, limits of the method
