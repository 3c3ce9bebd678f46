"""`Options`: the only list of options of a plan, and their defaults.

`rekindle.plan` and `rekindle.rematerialize` repeat the names for readers and type checkers; a test
compares them. The integrations and the command line fill in an `Options` by name.
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
    """How to make a plan and run it. A managed module keeps them for later plans."""

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
