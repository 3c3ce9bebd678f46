"""`Options`: the only list of what can be asked of a plan, with the defaults of each.

`rekindle.plan` and `rekindle.rematerialize` spell the same names out for their readers, with the
defaults of `DEFAULTS`; a test keeps the three in step. The adapters and the command line fill one
in by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rekindle.core import Problem, Schedule
from rekindle.solve.base import Solver
from rekindle.solve.constraints import Constraints, parse_constraints

if TYPE_CHECKING:  # `rekindle solve` starts without torch
    import torch

Budget = int | float | str
Patterns = str | Sequence[str]
ScheduleSource = Schedule | Callable[[Problem], Schedule]
OnMiss = Literal["eager", "replan", "raise"]


@dataclass(frozen=True, slots=True)
class Options:
    """How a plan is to be made and kept to; a managed module that plans again keeps it."""

    budget: Budget | None = None  # of one step
    solver: str | Solver = "auto"
    time_limit_s: float = 60.0
    seed: int = 0
    profile: Literal["estimate", "measure"] = "measure"
    loss_fn: Callable[..., Any] | None = None
    schedule: ScheduleSource | None = None  # instead of solving
    device_budget: Budget | None = None  # of the whole device, instead of `budget`
    headroom: float | int | str = 0.05  # of a device budget, kept free
    optimizer: "torch.optim.Optimizer | str | None" = None
    device_profile: str | None = None
    on_progress: Callable[[Any], None] | None = None  # called with a `ProfileProgress`
    hold_outputs: bool = True
    save: Patterns = ()
    recompute: Patterns = ()
    cache: bool = True  # solutions kept on disk serve, and new ones are kept
    ranks: int = 1
    cuda_graph: bool = False
    fuse: bool = True
    on_miss: OnMiss = "eager"  # a call that no plan covers
    max_plans: int = 8  # of one managed module

    def __post_init__(self) -> None:
        _ = self.wishes  # refused now, not after a minute of measuring

    @property
    def wishes(self) -> Constraints:
        return parse_constraints(self.save, self.recompute)


DEFAULTS = Options()
