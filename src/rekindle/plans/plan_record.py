"""`PlanRecord`: the part of a plan that is data, and that a plan file contains.

Nothing here needs torch. The other part, the captured model and its runner, is `pipeline.Captured`.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from rekindle.core import Problem, Schedule, Status, gap_sentence, keep_all, simulate
from rekindle.plans.options import Options
from rekindle.report.format import signed_percent, size

# Of the options, those that a plan file keeps. The others are of one run (limits, progress, caches)
# or cannot be data (a loss function, an optimizer).
KEPT_OPTIONS = (
    *("seed", "hold_outputs", "cuda_graph", "fuse", "save", "recompute", "offload", "kernels"),
)


class Source(StrEnum):
    """How the cost of an op was obtained."""

    MEASURED = "measured"  # run on the device just now
    CACHED = "cached"  # measured earlier, in the same environment
    ESTIMATED = "estimated"  # computed from a device description


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a plan was made with, and for."""

    torch: str  # release, such as "2.13"
    rekindle: str
    device: str  # type, such as "cuda"
    graph: str  # `graph_hash` of the captured model
    costs_device: str  # whose costs these are, by name
    costs: tuple[tuple[str, int], ...]  # how many ops' costs are of each `Source`
    made_by: str = ""  # the call or the command that makes the same plan
    inputs: tuple[tuple[str, str], ...] = ()  # name, and dtype and shape
    residents: tuple[tuple[str, int], ...] = ()  # what is on the device beside the step, in bytes
    device_bytes: int | None = None  # of the whole device, where it has memory of its own

    @property
    def measured(self) -> bool:
        """Whether the costs are those of a real device."""
        return any(name != Source.ESTIMATED.value and count for name, count in self.costs)


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A schedule for one problem, what it costs, and how it was come by.

    The numbers that follow from problem and schedule are never given, so they cannot contradict
    them: making a record simulates both this schedule and keep-all.
    """

    problem: Problem
    schedule: Schedule
    status: Status  # OPTIMAL (proven) or FEASIBLE
    bound: int | None  # no schedule within the budget costs less, where that is known
    budget_bytes: int | None
    solver: str  # the one that found the schedule
    options: Options  # of which only KEPT_OPTIONS differ from the defaults
    provenance: Provenance
    peak_bytes: int = field(init=False)
    cost_ns: int = field(init=False)
    keep_all_peak_bytes: int = field(init=False)
    keep_all_cost_ns: int = field(init=False)
    host_peak_bytes: int = field(init=False)  # in host memory at one time

    def __post_init__(self) -> None:
        trace = simulate(self.problem, self.schedule)  # raises InvalidSchedule
        everything = simulate(self.problem, keep_all(self.problem))
        for name, number in (
            ("peak_bytes", trace.peak),
            ("cost_ns", trace.cost),
            ("keep_all_peak_bytes", everything.peak),
            ("keep_all_cost_ns", everything.cost),
            ("host_peak_bytes", trace.host_peak),
        ):
            object.__setattr__(self, name, number)

    def __repr__(self) -> str:
        return f"<PlanRecord {self}>"

    def __str__(self) -> str:
        """Peak, overhead and optimality gap in one line."""
        peak, keep_all = (
            size(self.problem, n) for n in (self.peak_bytes, self.keep_all_peak_bytes)
        )
        kernels = "" if self.options.kernels == "eager" else ", with compiled kernels"
        return (
            f"{self.problem.name}: peak {peak} (keep-all {keep_all}), overhead "
            f"{signed_percent(self.overhead)}, {self.gap}{self._moved}; by {self.solver}{kernels}"
        )

    @property
    def moved_bytes(self) -> int:
        """What a step sends to host memory."""
        sent = (t.value_id for t in self.schedule.transfers if t.kind == "send")
        return sum(self.problem.values[v].size for v in sent)

    @property
    def _moved(self) -> str:
        if not self.schedule.transfers:
            return ""
        moved, host = (size(self.problem, n) for n in (self.moved_bytes, self.host_peak_bytes))
        return f", {moved} to the host and back ({host} there)"

    @property
    def overhead(self) -> float:
        """Cost increase over keep-all: 0.07 is 7 %."""
        if not self.keep_all_cost_ns:
            return 0.0
        return self.cost_ns / self.keep_all_cost_ns - 1

    @property
    def gap(self) -> str:
        """How far from the cheapest schedule this one can be, in a sentence."""
        return gap_sentence(self.cost_ns, self.bound)


def kept_options(options: Options, *, hold_outputs: bool) -> Options:
    """Of the options, what a plan file keeps."""
    kept = {name: getattr(options, name) for name in KEPT_OPTIONS}
    wishes = options.wishes
    return Options(
        **{
            **kept,
            "hold_outputs": hold_outputs,
            "save": wishes.save,
            "recompute": wishes.recompute,
        }
    )


def python_call(options: Options) -> str:
    """The call that makes a plan with these options: those that are not the defaults."""
    words = ["model", "args", "kwargs"]
    for field_ in fields(Options):
        value = getattr(options, field_.name)
        if value == field_.default or field_.name in _OF_ONE_RUN:
            continue
        text = repr(value)
        if field_.name == "optimizer" and not isinstance(value, str):
            text = type(value).__name__
        elif callable(value):
            text = getattr(value, "__name__", type(value).__name__)
        elif field_.name == "schedule":
            text = "schedule"
        words.append(f"{field_.name}={text}")
    return f"rekindle.plan({', '.join(words)})"


# Options that say how a plan is made or run, and not which one it is.
_OF_ONE_RUN = ("on_progress", "on_miss", "max_plans", "dynamic", "remeasure", "fullgraph")


def graph_structure(problem: Problem) -> list[Any]:
    """What a problem is apart from its costs and the sizes of blocks, which vary by machine."""
    record = [
        [op.name, op.inputs, op.outputs, op.recomputable, op.inplace, op.phase]
        for op in problem.ops
    ]
    return [record, problem.resident, problem.outputs, problem.held]


def graph_hash(problem: Problem, storage_bytes: Iterable[int]) -> str:
    """Of the structure and of each value's bytes before any rounding to blocks."""
    text = json.dumps([graph_structure(problem), list(storage_bytes)])
    return hashlib.sha256(text.encode()).hexdigest()
