"""`Options`: the only list of options of a plan, and their defaults.

`rekindle.plan` and `rekindle.rematerialize` repeat the names for readers and type checkers; a test
compares them. The integrations and the command line fill in an `Options` by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from rekindle.core import MIN_BUDGET, Problem, Schedule, is_fraction, parse_budget
from rekindle.core.budget import refuse_tiny
from rekindle.errors import InvalidBudget, brief, no_such
from rekindle.solve.base import Solver
from rekindle.solve.constraints import Constraints, parse_constraints
from rekindle.solve.registry import find_solver

if TYPE_CHECKING:  # `rekindle solve` starts without torch
    import torch

Budget = int | float | str
Patterns = str | Sequence[str]
ScheduleSource = Schedule | Callable[[Problem], Schedule]
OnMiss = Literal["eager", "replan", "raise"]
Kernels = Literal["eager", "inductor", "auto"]
# Argument -> dimension -> the least and the largest size; or whether sizes may change at all.
Dynamic = bool | Mapping[str, Mapping[int, tuple[int, int]]]


_ANY_PEAK = 2**40  # to check how a budget is written, before there is a peak to be a fraction of


@dataclass(frozen=True, slots=True)
class Options:
    """How to make a plan and run it. A managed module keeps them for later plans."""

    budget: Budget | None = None  # of one step
    solver: str | Solver = "auto"
    time_limit_s: float = 60.0
    gap: float = 0.001  # of the optimum: the search ends where it is proven to be so near
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
    cache: bool = True  # costs and solutions kept on disk serve, and new ones are kept
    ranks: int = 1
    cuda_graph: bool = False
    fuse: bool = True
    arena: bool = False
    on_miss: OnMiss = "eager"  # a call that no plan covers
    max_plans: int = 8  # of one managed module
    kernels: Kernels = "eager"  # whose kernels run; "auto": the faster ones within the budget
    dynamic: Dynamic = False  # sizes that change: True for those that are seen to, or by name
    best_effort: bool = False  # where nothing fits, take the smallest peak that was found
    remeasure: bool = False  # costs kept on disk are measured anew and replaced
    offload: str | bool = False  # values moved to host memory; see `parse_offload`
    fullgraph: bool = False  # a model whose code cannot be read in one piece is refused
    count_gradients: bool = True  # else the gradients of parameters come on top of `budget`

    def __post_init__(self) -> None:
        # All of this is refused now, not after a minute of measuring.
        _ = self.wishes
        if isinstance(self.solver, str):
            find_solver(self.solver)
        offload = parse_offload(self.offload)
        if offload is not None and self.cuda_graph and self.offload != "auto":
            raise InvalidBudget(
                f"offload={self.offload!r} and cuda_graph=True were given; a CUDA graph cannot "
                "move values to the host: leave one of them out"
            )
        for name in ("budget", "device_budget", "headroom"):
            refuse_tiny(name, getattr(self, name))
        for name, word in (("budget", MIN_BUDGET), ("device_budget", "auto")):
            given = getattr(self, name)
            if given is not None and given != word:
                parse_budget(given, _ANY_PEAK)
        if self.kernels not in get_args(Kernels):
            raise ValueError(no_such("choice of kernels", self.kernels, get_args(Kernels)))
        if not 0 <= self.gap < 1:
            raise InvalidBudget(f"gap {self.gap!r} is not a share from 0 up to 1; 0.001 is 0.1 %")

    @property
    def wishes(self) -> Constraints:
        return parse_constraints(self.save, self.recompute)


@dataclass(frozen=True, slots=True)
class Offload:
    """What `offload` asks for."""

    host_budget: int | None  # bytes of host memory; None: what this machine has to spare
    only_on_gpu: bool  # elsewhere a move gains nothing, and no plan of before is to change


_HOST_BUDGET = "host_budget"


def parse_offload(given: str | bool) -> Offload | None:
    """None for False; "auto", or "host_budget 32GiB": with at most so many bytes."""
    if given is False:
        return None
    if given == "auto":
        return Offload(None, True)
    word, _, size = given.strip().partition(" ") if isinstance(given, str) else ("", "", "")
    if word != _HOST_BUDGET or not size:
        raise InvalidBudget(
            f"offload is {brief(given)!r}; expected 'auto', False, or 'host_budget 32GiB'"
        )
    refuse_tiny(_HOST_BUDGET, size.strip())
    if is_fraction(size.strip()):
        raise InvalidBudget(f"offload is {brief(given)!r}; a host budget is a number of bytes")
    return Offload(parse_budget(size.strip(), _ANY_PEAK), False)


DEFAULTS = Options()


def as_args(args: Any) -> tuple[Any, ...]:
    """The positional arguments of a call: a tensor, or anything else that is no tuple or list, is
    the only one."""
    if args is None:
        return ()
    return tuple(args) if isinstance(args, (tuple, list)) else (args,)
