"""`Account`: everything that a report says about one schedule, counted once.

What is alive when, comes from `core.simulate`; here it is only sorted by module and kind. *Saved*
is what the forward leaves for the backward: copies that forward ops made and that are read, or
held, after the loss. In a problem without a loss nothing is called saved.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.core import (
    Copy,
    Problem,
    Schedule,
    Trace,
    copies,
    gap_sentence,
    keep_all,
    problem_hash,
    simulate,
)
from rekindle.report import format
from rekindle.report.module_paths import Place, joined_modules, places, starred

# What a copy is in memory for. A kind is a position in this tuple, also in the data of the page.
KINDS = (
    "saved for the backward",
    "in use, not saved",
    "recomputed",
    "gradients on their way",
    "gradients of parameters and inputs",
    "temporaries of the running op",
    "fetched from host memory",
)
SAVED, IN_USE, AGAIN, FLOWING, RESULT, TEMPORARY, FETCHED = range(len(KINDS))


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of the trade-off; `bound` is a proven lower bound on cost at this peak."""

    peak: int
    cost: int
    bound: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The peak and the time of one step, as predicted or as measured."""

    peak_bytes: int
    step_ns: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known about a schedule besides the schedule: solver, budget, bound, measurements."""

    budget: int | None = None
    bound: int | None = None  # proven lower bound on the cost within the budget
    optimal: bool = False
    solver: str = ""
    made_for: tuple[tuple[str, str], ...] = ()  # torch, device, origin of the costs, ...
    curve: tuple[CurvePoint, ...] = ()
    segments: tuple[CurvePoint, ...] = ()  # the same by cutting the model into equal segments
    predicted: Step | None = None
    measured: Step | None = None
    verified: str = ""  # the result of `verify`, as a sentence
    equal: bool | None = None
    commands: tuple[str, ...] = ()  # that reproduce the plan
    inputs: tuple[tuple[str, str], ...] = ()  # name, and dtype and shape
    residents: tuple[tuple[str, int], ...] = ()  # what is on the device beside the step
    device: str = ""
    device_bytes: int | None = None  # of the whole device
    advice: str = ""  # what would help further, a sentence a line


@dataclass(frozen=True, slots=True)
class Alive:
    """Copies of one kind and size that are alive at the peak, of identical layers together."""

    modules: str
    call: str
    kind: int
    count: int
    bytes_each: int
    again_cost: int | None  # of running the op that makes one; None where it must run once

    @property
    def num_bytes(self) -> int:
        return self.count * self.bytes_each


# Not slotted: cached properties need a `__dict__`. A report uses only a few of them.
@dataclass(frozen=True)
class Account:
    """All that reports say about one schedule of one problem, computed when it is asked for."""

    problem: Problem
    schedule: Schedule
    facts: Facts

    # ---- the verdict

    @functools.cached_property
    def trace(self) -> Trace:
        return simulate(self.problem, self.schedule)

    @functools.cached_property
    def base(self) -> Trace:
        return simulate(self.problem, keep_all(self.problem))

    @property
    def fits(self) -> bool | None:
        """None where no budget is known."""
        return None if self.facts.budget is None else self.trace.peak <= self.facts.budget

    @property
    def overhead(self) -> float:
        return format.overhead(self.trace.cost, self.base.cost)

    @property
    def gap(self) -> str:
        """How far above the least possible cost this one is at most."""
        # OPTIMAL proves the cost itself, also where no bound was recorded.
        least = self.trace.cost if self.facts.optimal else self.facts.bound
        return gap_sentence(self.trace.cost, least)

    # ---- steps and copies

    @functools.cached_property
    def places(self) -> tuple[Place, ...]:
        return places(self.problem)

    @functools.cached_property
    def turn(self) -> int | None:
        """The step of the loss."""
        return turn(self.problem, self.schedule)

    @functools.cached_property
    def op_of_step(self) -> tuple[int, ...]:
        """Per step: the op that runs; of a transfer, the op that makes the value."""
        producer = self.problem.producer
        steps = self.schedule.steps
        return tuple(step if isinstance(step, int) else producer[step[1]] for step in steps)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Per step: when it begins, by the ops that run and what they wait for; then the end."""
        lanes = self.trace.lanes
        if lanes is None:
            costs = (self.problem.ops[i].cost for i in self.schedule.ops)
            return tuple(itertools.accumulate(costs, initial=0))
        found, now = [], 0
        for t, step in enumerate(self.schedule.steps):
            if isinstance(step, int):
                now = lanes.start[t]
            found.append(now)
            if isinstance(step, int) or step[0] == "drop":
                now = lanes.finish[t]
        return (*found, now)

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes that are sent to host memory, and that are fetched from it."""
        sizes = {"send": 0, "fetch": 0}
        for transfer in self.schedule.transfers:
            if transfer.kind in sizes:
                sizes[transfer.kind] += self.problem.values[transfer.value_id].size
        return sizes["send"], sizes["fetch"]

    @functools.cached_property
    def copies(self) -> tuple[Copy, ...]:
        return copies(self.problem, self.schedule)

    @functools.cached_property
    def run_before(self) -> tuple[bool, ...]:
        """Per step: whether its op has run before; a transfer runs none."""
        seen: set[int] = set()
        found = []
        for step in self.schedule.steps:
            found.append(isinstance(step, int) and step in seen)
            if isinstance(step, int):
                seen.add(step)
        return tuple(found)

    @functools.cached_property
    def kinds(self) -> tuple[int, ...]:
        """Per copy: its kind."""
        results = set(self.problem.outputs)
        return tuple(self._kind(copy, results) for copy in self.copies)

    def _kind(self, copy: Copy, results: set[int]) -> int:
        op = self.problem.ops[self.op_of_step[copy.first]]
        if not isinstance(self.schedule.steps[copy.first], int):
            return FETCHED
        if op.phase in ("backward", "loss"):
            ends = copy.last == len(self.schedule)
            # An earlier copy of a gradient that is recomputed later is not the result itself.
            return RESULT if ends and copy.value_id in results else FLOWING
        if spans(copy, self.turn):
            return SAVED
        return AGAIN if self.run_before[copy.first] else IN_USE

    @functools.cached_property
    def dying(self) -> tuple[tuple[int, ...], ...]:
        """Per step: the copies (positions in `copies`) that it writes over a dying input, and that
        therefore take no room of their own at this step."""
        current: dict[int, int] = {}
        found: list[tuple[int, ...]] = []
        position = 0
        for step, what in enumerate(self.schedule.steps):
            if not isinstance(what, int):
                if what[0] == "fetch":
                    current[what[1]] = position
                    position += 1
                found.append(())
                continue
            op = self.problem.ops[what]
            # The simulator's rule: in place holds only where the input's copy has its last use.
            over = {o for i, o in op.inplace if self.copies[current[i]].last == step}
            free = []
            for v in op.outputs:
                current[v] = position
                if v in over:
                    free.append(position)
                position += 1
            found.append(tuple(free))
        return tuple(found)

    # ---- what stands in the tables

    @functools.cached_property
    def saved(self) -> tuple[int, ...]:
        """Per op: the bytes it leaves for the backward."""
        return saved_bytes(self.problem, self.op_of_step, self.turn, self.copies)

    @functools.cached_property
    def base_saved(self) -> tuple[int, ...]:
        """The same when everything is kept."""
        plain = keep_all(self.problem)
        return saved_bytes(
            self.problem, plain.ops, turn(self.problem, plain), copies(self.problem, plain)
        )

    @functools.cached_property
    def alive_at_peak(self) -> tuple[Alive, ...]:
        """By falling size; their sum is the peak."""
        step = self.trace.peak_step
        if step < 0:
            return ()
        groups: dict[tuple[str, str, int, int], list[int]] = {}
        shared = set(self.dying[step])
        for k, copy in enumerate(self.copies):
            size = self.problem.values[copy.value_id].size
            # Tokens, which only order ops, have size 0 and are no memory.
            if copy.first <= step <= copy.last and size and k not in shared:
                op_id = self.op_of_step[copy.first]
                place = self.places[op_id]
                key = (starred(place.module), place.call, self.kinds[k], size)
                groups.setdefault(key, []).append(op_id)
        ops = self.problem.ops
        found = [
            Alive(
                modules=joined_modules(self.places[i].module for i in made),
                call=call,
                kind=kind,
                count=len(made),
                bytes_each=size,
                again_cost=None
                if any(ops[i].once for i in made)
                else max(ops[i].cost for i in made),
            )
            for (_, call, kind, size), made in groups.items()
        ]
        op_id = self.op_of_step[step]
        # Workspace belongs to no value, and without it the rows would not sum to the peak.
        if isinstance(self.schedule.steps[step], int) and ops[op_id].workspace:
            place = self.places[op_id]
            label = joined_modules([place.module])
            found.append(Alive(label, place.call, TEMPORARY, 1, ops[op_id].workspace, None))
        return tuple(sorted(found, key=lambda a: (-a.num_bytes, a.modules, a.call)))

    def record(self) -> dict[str, Any]:
        """The verdict as JSON data."""
        return {
            "problem": self.problem.name,
            "problem_hash": problem_hash(self.problem),
            "fits": self.fits,
            "budget": self.facts.budget,
            "peak": self.trace.peak,
            "peak_step": self.trace.peak_step,
            "keep_all_peak": self.base.peak,
            "cost": self.trace.cost,
            "keep_all_cost": self.base.cost,
            "overhead": self.overhead,
            "bound": self.facts.bound,
            "gap": self.gap,
            "solver": self.facts.solver,
            "num_steps": len(self.schedule),
            "num_ops": len(self.problem.ops),
            "num_recomputed": self.trace.num_recomputed,
            **self._of_host(),
            "saved": sum(self.saved),
            "keep_all_saved": sum(self.base_saved),
            "size_unit": self.problem.size_unit,
            "cost_unit": self.problem.cost_unit,
        }

    def _of_host(self) -> dict[str, Any]:
        if not self.schedule.transfers:
            return {}
        sent, fetched = self.moved
        return {"sent": sent, "fetched": fetched, "host_peak": self.trace.host_peak}


def account(problem: Problem, schedule: Schedule, facts: Facts | None = None) -> Account:
    """The account of a valid schedule; raises InvalidSchedule for any other."""
    found = Account(problem, schedule, facts or Facts())
    assert found.trace.peak >= 0  # simulates now, so that an invalid schedule fails here
    return found


def turn(problem: Problem, schedule: Schedule) -> int | None:
    """The step of the loss op, with which the forward ends; None where there is no loss op."""
    loss = problem.loss_op
    return None if loss is None else schedule.steps.index(loss)


def spans(copy: Copy, at: int | None) -> bool:
    """Whether a copy made before the loss is needed after it."""
    # Strictly: what the loss op itself reads last is not saved for the backward.
    return at is not None and copy.first < at < copy.last


def saved_bytes(
    problem: Problem, op_of_step: Sequence[int], at: int | None, made: Sequence[Copy]
) -> tuple[int, ...]:
    """Per op: the bytes of its copies that the forward leaves for the backward, on the device;
    `at` is the step of the loss."""
    found = [0] * len(problem.ops)
    for copy in made:
        op_id = op_of_step[copy.first]
        if spans(copy, at) and problem.ops[op_id].phase != "backward":
            found[op_id] += problem.values[copy.value_id].size
    return tuple(found)
