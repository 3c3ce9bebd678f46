"""`Solution`: what a solver answers. Peak and cost come from `simulate`, never from the solver."""

from dataclasses import dataclass
from enum import Enum

from rekindle.core.schedule import Schedule


class Status(Enum):
    """How a solve ended; the value is its sentence."""

    OPTIMAL = "proven optimal"
    FEASIBLE = "within the budget, not proven optimal"
    INFEASIBLE = "no schedule within the budget"
    TIME_LIMIT = "nothing found within the time limit"
    ERROR = "the solver failed"

    @property
    def has_schedule(self) -> bool:
        return self in (Status.OPTIMAL, Status.FEASIBLE)


@dataclass(frozen=True, slots=True)
class Solution:
    status: Status
    schedule: Schedule | None  # within the budget; None where the status has none
    solver: str
    seed: int = 0
    wall_s: float = 0.0
    bound: int | None = None  # proven lower bound on the cost of any schedule within the budget
    message: str = ""  # one sentence on top of the status: why, or what to try
    smallest: Schedule | None = None  # where the budget was not met: the smallest peak found
    stopped_by: str = ""  # "proof", "time limit", "move limit", "no improvement", "interrupt", ""
    notes: tuple[str, ...] = ()  # which method found what, limits of the method
