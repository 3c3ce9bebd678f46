"""A family of plans: one capture with symbols for the sizes that change, and a schedule for each.

For each call's sizes the problem is computed, not captured: sizes of values are expressions over
them, costs follow from those that are known. A schedule that is valid for the graph is valid for
all sizes, and only its peak has to be simulated. So a call that is seen for the first time gets the
cheapest schedule at hand that is within the budget: the one that keeps everything, one that was
searched for other sizes, or the one with the smallest peak. A thread in the background searches for
better ones, and writes their code, while training goes on.
"""

import atexit
import contextlib
import functools
import inspect
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rekindle import pipeline
from rekindle.capture import JointGraph
from rekindle.capture.changing_sizes import Sizes, as_refusal
from rekindle.capture.gc_pause import collector_at_rest
from rekindle.core import (
    MIN_BUDGET,
    Problem,
    Schedule,
    check_schedule,
    is_fraction,
    keep_all,
    parse_budget,
    simulate,
)
from rekindle.errors import BudgetInfeasible, InvalidSchedule
from rekindle.frontend import Call, Reading
from rekindle.plans.options import Dynamic, Options, parse_offload
from rekindle.predict import Predictor
from rekindle.profile.changing import ChangingCosts
from rekindle.program import Program
from rekindle.program.formulate import Formulation
from rekindle.rewrite.passes import rewrite
from rekindle.runtime.lazy_runner import LateRunner
from rekindle.runtime.managed_module import plain_forward
from rekindle.runtime.measured_step import Sample, sample_of
from rekindle.runtime.plan_corrections import shown_size
from rekindle.runtime.plan_table import input_tensors
from rekindle.runtime.shape_table import DynamicDims, ShapePlan
from rekindle.solve.constraints import constrained_min_budget
from rekindle.solving import choose

log = logging.getLogger("rekindle")

MOST_SHAPES = 4096  # whose choice is remembered
MOST_SCHEDULES = 24  # that are kept, with their code
_NEAR = (
    0.005  # of keep-all's cost: what a search in the background has to gain to be worth its code
)
_SEARCH_S = 1.0  # of a search in the background
_SMALLEST_S = 2.0  # for the schedule with the smallest peak, which is there from the start
_SHARES = (0.85, 0.7, 0.55)  # of the budget, that are searched for at once
_AHEAD = 4  # sizes between those at hand and the largest, that are searched for at once
_STEP = 1.03  # keep-all peaks that are nearer to each other share a search


# A thread that still searches when the interpreter ends would end it badly.
_ending = threading.Event()
_searching: "weakref.WeakSet[Family]" = weakref.WeakSet()


@atexit.register
def _end_searches() -> None:
    _ending.set()
    for family in list(_searching):
        family.wait()


class Rung:
    """A schedule with its code, and the sizes that it was searched for."""

    __slots__ = ("late_runner", "schedule", "searched_for")

    def __init__(self, schedule: Schedule, late_runner: LateRunner, searched_for: int) -> None:
        self.schedule = schedule
        self.late_runner = late_runner
        self.searched_for = searched_for  # the keep-all peak of those sizes; 0: for none


@dataclass(frozen=True, slots=True)
class AtSizes:
    """The problem for some sizes."""

    problem: Problem
    predictor: Predictor
    budget: int


class Family:
    """The plans for all sizes that one capture covers."""

    def __init__(
        self,
        options: Options,
        program: Program,
        costs: ChangingCosts,
        formulation: Formulation,
        first_budget: int,
        as_plan: Callable[..., Any],
        limits: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """`limits`: the least and the largest of sizes, by the names of their symbols."""
        changing = program.joint.changing
        assert changing is not None
        self.as_plan = as_plan
        self.infeasible: dict[Sizes, BudgetInfeasible] = {}
        self.options = options
        self.program = program
        self.changing = changing
        self.costs = costs
        self.formulation = formulation
        self.first_budget = first_budget  # bytes of the first plan
        self.rungs: list[Rung] = []
        self.plans: OrderedDict[Sizes, ShapePlan] = OrderedDict()
        self._lock = threading.RLock()
        # To be searched for in the background: sizes, and how many bytes where not their budget.
        self._wanted: list[tuple[Sizes, int | None]] = []
        self._searched: list[int] = []  # keep-all peaks of sizes that were
        self._thread: threading.Thread | None = None
        self._conditions = changing.conditions()
        self._num_decisions = changing.num_decisions
        self._limits = dict(limits or {})
        self._margin = 0  # bytes that steps have needed above what was planned
        self._largest: dict[int, int] = {}  # rung -> the largest peak that it was watched at

    def full(self) -> Any:
        """The plan for the sizes of the last call."""
        return self.full_plan(next(reversed(self.plans.values())))

    def full_plan(self, plan: ShapePlan) -> Any:
        """The plan for one shape, with its problem."""
        at = self.at(plan.sizes)
        numbers = self.changing.at(plan.sizes)
        return self.as_plan(
            *pipeline.plan_of_family(
                self.options, at.predictor, plan.schedule, plan.late_runner, at.budget, numbers
            )
        )

    @property
    def joint(self) -> JointGraph:
        return self.program.joint

    # ---- which sizes

    def covers(self, sizes: Sizes) -> bool:
        """Whether all that was decided at capture, and since, is decided alike for these sizes."""
        if self._num_decisions != self.changing.num_decisions:
            self._num_decisions = self.changing.num_decisions
            self._conditions = self.changing.conditions()
        return self._conditions.hold(sizes) and self._within_limits(sizes)

    def _within_limits(self, sizes: Sizes) -> bool:
        pairs = zip(self.changing.names, sizes, strict=True)
        limits = [(size, self._limits[name]) for name, size in pairs if name in self._limits]
        return all(least <= size <= most for size, (least, most) in limits)

    @property
    def conditions(self) -> tuple[str, ...]:
        """Where the family ends."""
        found = [f"{n} in {least} to {most}" for n, (least, most) in self._limits.items()]
        return (*self._conditions.texts, *found)

    def at(self, sizes: Sizes) -> AtSizes:
        """The problem for these sizes, and what a step may need."""
        numbers = self.changing.at(sizes)
        profile = self.costs.at(numbers)
        problem = self.formulation.at(profile, numbers)
        predictor = Predictor(self.program, profile, problem)
        return AtSizes(problem, predictor, self._budget(predictor))

    def _budget(self, predictor: Predictor) -> int:
        """A fraction is one of the keep-all peak for these sizes, but at least the first plan's
        bytes."""
        budget = self.first_budget
        if self.options.budget is not None and is_fraction(self.options.budget):
            budget = max(budget, parse_budget(self.options.budget, predictor.keep_all_bytes))
        return budget - self._margin

    # ---- which schedule

    def plan_at(self, sizes: Sizes) -> ShapePlan:
        """The plan for these sizes. Raises BudgetInfeasible."""
        found = self.plans.get(sizes)
        return self._first_sight(sizes) if found is None else found

    def _first_sight(self, sizes: Sizes) -> ShapePlan:
        with self._lock, collector_at_rest():
            at = self.at(sizes)
            plan = self._cheapest(sizes, at)
            if plan is None:
                self.add(self._searched_now(sizes, at), at)
                plan = self._cheapest(sizes, at)
                assert plan is not None
            self._remember(plan)
            self._watch(plan)
            if plan.overhead > _NEAR and self._is_new(plan):
                self._wanted.append((sizes, None))
                self._work()
            return plan

    def _watch(self, plan: ShapePlan) -> None:
        """The first steps of the largest shapes are watched, where the device tells of them."""
        if plan.peak_bytes > self._largest.get(id(plan.rung), 0):
            self._largest[id(plan.rung)] = plan.peak_bytes
            plan.rung.late_runner.watch_again()

    def follow_watch(self, plan: ShapePlan) -> None:
        """Where a step needed more than its budget, every budget is that much smaller from now on.
        Called before a call."""
        runner = plan.runner
        runner.replacement = None
        watch = runner.watch
        if watch is None:
            return
        runner.smaller_plan = functools.partial(self._smaller, plan)
        excess = watch.take()
        if excess is None:
            if watch.is_over:
                runner.watch = None
            return
        self._margin += excess.peak_bytes - watch.limit_bytes
        log.warning(
            "a step used %s in %s, with a budget of %s; planned again for %s less",
            *(shown_size(excess.peak_bytes), excess.section, shown_size(watch.limit_bytes)),
            shown_size(self._margin),
        )
        with self._lock:
            self.plans.clear()
            self.infeasible.clear()

    def _smaller(self, plan: ShapePlan, limit_bytes: int) -> ShapePlan | None:
        """For a step that ran out of memory."""
        at = self.at(plan.sizes)
        return self._cheapest(plan.sizes, replace(at, budget=limit_bytes))

    def for_gradients(self, joint: JointGraph, sizes: Sizes, sample: Sample | None) -> "Family":
        """The family of the same calls, whose backward begins with other gradients."""
        name = self.formulation.problem.name
        return make_family(
            *(self.options, joint, name, sizes, sample),
            *(self.first_budget, self.as_plan, self._limits),
        )

    def _remember(self, plan: ShapePlan) -> None:
        self.plans[plan.sizes] = plan
        if len(self.plans) > MOST_SHAPES:
            self.plans.popitem(last=False)

    def _cheapest(self, sizes: Sizes, at: AtSizes) -> ShapePlan | None:
        """The cheapest schedule at hand that is within the budget."""
        everything = simulate(at.problem, keep_all(at.problem))
        found = []
        for k, rung in enumerate(self.rungs):
            trace = simulate(at.problem, rung.schedule)
            if trace.peak <= at.budget:
                found.append((trace.cost, trace.peak, k, rung))
        for cost, peak, _, rung in sorted(found):
            # What the allocator's blocks take above that is counted only where it decides.
            if at.predictor.peak_bytes(rung.schedule) <= at.budget:
                return ShapePlan(
                    *(self, sizes, rung, peak, everything.peak, cost, everything.cost, at.budget)
                )
        return None

    def _searched_now(self, sizes: Sizes, at: AtSizes) -> Schedule:
        """None at hand fits: a search while the step waits. What it does not find it does not find
        again."""
        if sizes in self.infeasible:
            raise self.infeasible[sizes]
        options = replace(self.options, time_limit_s=min(self.options.time_limit_s, 4 * _SEARCH_S))
        try:
            found = choose(options, at.predictor, at.budget).solution.schedule
        except BudgetInfeasible as error:
            if len(self.infeasible) < MOST_SHAPES:
                self.infeasible[sizes] = error
            raise
        assert found is not None
        return found

    def add(self, schedule: Schedule, at: AtSizes | None) -> Rung:
        """A schedule more. Beyond a number, the one that fewest calls use is dropped."""
        for rung in self.rungs:
            if rung.schedule == schedule:
                return rung
        searched_for = 0 if at is None else at.predictor.keep_all_bytes
        runner = pipeline.runner_of_family(self.options, self.program, self.formulation, schedule)
        rung = Rung(schedule, runner, searched_for)
        with self._lock:
            self.rungs.append(rung)
            if len(self.rungs) > MOST_SCHEDULES:
                self._drop_one()
        return rung

    def _drop_one(self) -> None:
        """Of those searched for, the one that the fewest remembered shapes use."""
        uses = {id(rung): 0 for rung in self.rungs}
        for plan in self.plans.values():
            uses[id(plan.rung)] = uses.get(id(plan.rung), 0) + 1
        kept = self.rungs[:2] + self.rungs[-1:]  # everything, the smallest, and the new one
        droppable = [rung for rung in self.rungs if rung not in kept]
        least = min(droppable, key=lambda rung: uses[id(rung)])
        self.rungs.remove(least)
        for sizes in [s for s, plan in self.plans.items() if plan.rung is least]:
            del self.plans[sizes]  # chosen anew when they are seen again

    # ---- in the background

    def _is_new(self, plan: ShapePlan) -> bool:
        """Whether nothing was searched for sizes like these."""
        peak = plan.keep_all_peak_bytes
        if any(peak <= known <= _STEP * peak for known in self._searched):
            return False
        self._searched.append(peak)
        return True

    def search_ahead(self, sizes: Sizes) -> None:
        """In the background: for larger sizes that were said to come, and for smaller budgets at
        these, since what fits those at these sizes fits the budget at larger ones."""
        budget = self.at(sizes).budget
        self._wanted += [(sizes, int(share * budget)) for share in _SHARES]
        for k in range(_AHEAD if self._limits else 0):
            ahead = []
            for name, size in zip(self.changing.names, sizes, strict=True):
                most = self._limits.get(name, (size, size))[1]
                ahead.append(max(size, round(most - (most - size) * k / _AHEAD)))
            if self.covers(tuple(ahead)):
                self._wanted.append((tuple(ahead), None))
        self._work()

    def _work(self) -> None:
        if _ending.is_set():
            return
        if self._thread is None or not self._thread.is_alive():
            _searching.add(self)
            self._thread = threading.Thread(target=self._search, name="rekindle", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until nothing is searched for any more."""
        while (thread := self._thread) is not None and thread.is_alive():
            thread.join()

    def _search(self) -> None:
        while True:
            with self._lock:
                if not self._wanted or _ending.is_set():
                    self._thread = None
                    return
                sizes, budget = self._wanted.pop(0)
            try:
                self._improve(sizes, budget)
            except Exception as error:  # training goes on with the schedule that it has
                log.warning("a search for a better schedule broke off: %s", error)

    def _improve(self, sizes: Sizes, budget: int | None) -> None:
        at = self.at(sizes)
        if budget is not None:
            at = replace(at, budget=budget)
        plan = self._cheapest(sizes, at)
        if plan is None:
            return
        options = replace(self.options, time_limit_s=min(_SEARCH_S, self.options.time_limit_s))
        try:
            found = choose(options, at.predictor, at.budget, start=plan.rung.schedule).solution
        except BudgetInfeasible:
            return
        assert found.schedule is not None
        gain = plan.cost_ns - simulate(at.problem, found.schedule).cost
        if gain <= _NEAR * plan.keep_all_cost_ns:
            return
        rung = self.add(found.schedule, at)
        rung.late_runner.get()  # its code is there before a step asks for it
        self._choose_anew(at.predictor.keep_all_bytes)

    def _choose_anew(self, limit: int) -> None:
        """For the remembered sizes that need as much as those just searched for, or less."""
        for sizes, plan in list(self.plans.items()):
            if plan.overhead > 0 and plan.keep_all_peak_bytes <= _STEP * limit:
                better = self._cheapest(sizes, self.at(sizes))
                if better is not None and better.cost_ns < plan.cost_ns and sizes in self.plans:
                    self.plans[sizes] = better


def has_families(options: Options) -> bool:
    """Whether plans of these options can cover sizes that change."""
    if options.dynamic is False or options.cuda_graph or options.schedule is not None:
        return False
    if parse_offload(options.offload) is not None or options.arena:
        return False  # transfers, and the segments of an arena, are planned for one shape
    if options.kernels != "eager":
        return False  # kernels are compiled for one shape
    return options.budget != MIN_BUDGET  # which is each shape's own


NamedDims = dict[str, dict[int, tuple[int, int]]]  # argument -> dimension -> least and largest


def named_dims(model: nn.Module, dynamic: Dynamic) -> NamedDims:
    """The dimensions that were said to change, by the name of the argument in a call."""
    if isinstance(dynamic, bool):
        return {}
    names = list(inspect.signature(plain_forward(model)).parameters)
    found: NamedDims = {}
    for name, dims in dynamic.items():
        if name not in names:
            raise ValueError(
                f"dynamic names {name!r}, and {type(model).__name__}.forward has the arguments "
                f"{', '.join(names)}"
            )
        # A call may give it by its position.
        for word in (name, str(names.index(name))):
            found[f"input {word}"] = {d: (int(a), int(b)) for d, (a, b) in dims.items()}
    return found


def family_for(
    options: Options,
    as_plan: Callable[..., Any],
    model: nn.Module,
    call: Call,
    marks: DynamicDims,
    entries: Sequence[Any],
    first: Any,
    dynamic: NamedDims,
) -> tuple[Family, Reading, Sizes] | None:
    """A family that covers a call, in which these sizes change; None where there can be none, and a
    line of the log says why."""
    tensors = input_tensors(call.args, call.keywords)
    dims: dict[int, set[int]] = {}
    for name, given in marks.items():
        dims.setdefault(id(tensors[name]), set()).update(given)
    by_id = {id(tensor): tensor for tensor in tensors.values()}
    marked = [(by_id[i], sorted(given)) for i, given in dims.items()]
    others = [e.plan.joint.recorded for e in entries if e.plan.joint.changing is None]
    begun = time.monotonic()
    try:
        joint, reading = pipeline.recorded_changing(
            options, model, call.args, call.keywords, marked, others
        )
    except Exception as error:
        log.warning(
            "%s changes, and each shape is planned alone: %s", _shown(marks), as_refusal(error)
        )
        return None
    assert joint.changing is not None
    sizes = joint.changing.traced
    sample = sample_of(joint, [given.value for given in reading.inputs])
    limits = _limits(joint, reading, tensors, dynamic)
    reading.held.clear()
    planned = [e.plan.schedule for e in entries if e.plan.joint.changing is None]
    family = make_family(
        *(options, rewrite(joint, fuse=options.fuse), type(model).__name__, sizes, sample),
        *(first.plan.budget_bytes, as_plan, limits),
        planned=planned,
    )
    log.warning(
        "%s changes: one family of plans for all sizes, captured in %.1f s; it ends where not %s",
        _shown(marks),
        time.monotonic() - begun,
        " and ".join(family.conditions),
    )
    return family, reading, sizes


def _limits(
    joint: JointGraph, reading: Reading, tensors: Mapping[str, Any], dynamic: NamedDims
) -> dict[str, tuple[int, int]]:
    """The least and the largest of sizes that were said, by the names of their symbols."""
    assert joint.changing is not None
    found = {}
    for symbol, (i, dim) in zip(joint.changing.names, joint.changing.places, strict=True):
        for name, dims in dynamic.items():
            if dim in dims and tensors.get(name) is reading.inputs[i].value:
                found[symbol] = dims[dim]
    return found


def _shown(marks: DynamicDims) -> str:
    return ", ".join(f"{name} in dimension {d}" for name, dims in marks.items() for d in dims)


def make_family(
    options: Options,
    joint: JointGraph,
    name: str,
    sizes: Sizes,
    sample: Sample | None,
    first_budget: int,
    as_plan: Callable[..., Any],
    limits: Mapping[str, tuple[int, int]] | None = None,
    planned: Sequence[Schedule] = (),
) -> Family:
    """The family of a graph that was captured with symbols, for the sizes of a call. `planned`:
    schedules of the same model for other sizes, which may be of the same ops."""
    assert joint.changing is not None
    program, costs, problems = pipeline.formulated_family(options, joint, name, sizes, sample)
    family = Family(options, program, costs, problems, first_budget, as_plan, limits)
    at = family.at(sizes)
    if not options.wishes:
        family.add(keep_all(at.problem), None)
    family.add(constrained_min_budget(at.problem, options.wishes, _SMALLEST_S), None)
    if at.predictor.keep_all_bytes > at.budget or options.wishes:
        with contextlib.suppress(BudgetInfeasible):  # for these sizes; others may be smaller
            found = choose(options, at.predictor, at.budget).solution.schedule
            assert found is not None
            family.add(found, at)
    for schedule in planned:
        with contextlib.suppress(InvalidSchedule):  # a graph with other ops
            check_schedule(at.problem, schedule)
            family.add(schedule, None)
    family.search_ahead(sizes)
    return family
