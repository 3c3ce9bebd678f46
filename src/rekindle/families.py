"""A family of plans: one capture with symbols for the sizes that change, and a schedule for each.

For each call's sizes the problem is computed, not captured: sizes of values are expressions over
them, costs are told from those that are known. A schedule that is valid for the graph is valid for
all sizes, and only its peak has to be simulated. So a call that is seen for the first time gets the
cheapest schedule at hand that is within the budget: the one that keeps everything, one that was
searched for other sizes, or the one with the smallest peak. A thread in the background searches for
better ones, and writes their code, while training goes on.
"""

import contextlib
import inspect
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
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
    is_fraction,
    keep_all,
    parse_budget,
    simulate,
)
from rekindle.errors import BudgetInfeasible
from rekindle.frontend import Call, Reading
from rekindle.plans.options import Options
from rekindle.predict import Predictor
from rekindle.profile.changing import ChangingCosts
from rekindle.program import Program
from rekindle.program.formulate import Formulation
from rekindle.rewrite.passes import rewrite
from rekindle.runtime.lazy_runner import LateRunner
from rekindle.runtime.managed_module import plain_forward
from rekindle.runtime.measured_step import Sample, sample_of
from rekindle.runtime.plan_table import input_tensors
from rekindle.runtime.shape_table import DynamicDims, ShapePlan
from rekindle.solve.constraints import constrained_min_budget
from rekindle.solving import choose

log = logging.getLogger("rekindle")

MOST_SHAPES = 4096  # whose choice is remembered
MOST_SCHEDULES = 24  # that are kept, with their code
_NEAR = 0.005  # of keep-all's cost: what a search in the background has to gain to be worth its code
_SEARCH_S = 1.0  # of a search in the background
_SMALLEST_S = 2.0  # for the schedule with the smallest peak, which is there from the start
_STEP = 1.03  # keep-all peaks that are nearer to each other share a search


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
    ) -> None:
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
        self._wanted: list[Sizes] = []  # to be searched for in the background
        self._searched: list[int] = []  # keep-all peaks of sizes that were
        self._thread: threading.Thread | None = None
        self._conditions = changing.conditions()
        self._num_decisions = changing.num_decisions

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
        return self._conditions.hold(sizes)

    @property
    def conditions(self) -> tuple[str, ...]:
        """Where the family ends."""
        return self._conditions.texts

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
        if not is_fraction(self.options.budget):
            return self.first_budget
        own = parse_budget(self.options.budget, predictor.keep_all_bytes)
        return max(self.first_budget, own)

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
            if plan.overhead > _NEAR and self._is_new(plan):
                self._wanted.append(sizes)
                self._work()
            return plan

    def _remember(self, plan: ShapePlan) -> None:
        self.plans[plan.sizes] = plan
        if len(self.plans) > MOST_SHAPES:
            self.plans.popitem(last=False)

    def _cheapest(self, sizes: Sizes, at: AtSizes) -> ShapePlan | None:
        """The cheapest schedule at hand that is within the budget."""
        everything = simulate(at.problem, keep_all(at.problem))
        best: tuple[int, int, Rung] | None = None
        for rung in self.rungs:
            trace = simulate(at.problem, rung.schedule)
            if trace.peak > at.budget or (best is not None and trace.cost >= best[0]):
                continue
            if at.predictor.peak_bytes(rung.schedule) <= at.budget:
                best = (trace.cost, trace.peak, rung)
        if best is None:
            return None
        cost, peak, rung = best
        return ShapePlan(
            self, sizes, rung, peak, everything.peak, cost, everything.cost, at.budget
        )

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

    def _work(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._search, name="rekindle", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until nothing is searched for any more."""
        while (thread := self._thread) is not None and thread.is_alive():
            thread.join()

    def _search(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._thread = None
                    return
                sizes = self._wanted.pop(0)
            try:
                self._improve(sizes)
            except Exception as error:  # training goes on with the schedule that it has
                log.warning("a search for a better schedule broke off: %s", error)

    def _improve(self, sizes: Sizes) -> None:
        plan = self.plans.get(sizes)
        if plan is None:
            return
        at = self.at(sizes)
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
    return options.budget != MIN_BUDGET  # which is each shape's own


def named_dims(model: nn.Module, dynamic: Any) -> dict[str, tuple[int, ...]]:
    """The dimensions that were said to change, by the name of the argument in a call."""
    if isinstance(dynamic, bool):
        return {}
    names = list(inspect.signature(plain_forward(model)).parameters)
    found = {}
    for name, dims in dynamic.items():
        if name not in names:
            raise ValueError(
                f"dynamic names {name!r}, and {type(model).__name__}.forward has the arguments "
                f"{', '.join(names)}"
            )
        # A call may give it by its position.
        for word in (name, str(names.index(name))):
            found[f"input {word}"] = tuple(dims)
    return found


def family_for(
    options: Options,
    as_plan: Callable[..., Any],
    model: nn.Module,
    call: Call,
    marks: DynamicDims,
    entries: Sequence[Any],
    first: Any,
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
    family = make_family(
        *(options, rewrite(joint, fuse=options.fuse), type(model).__name__, sizes, sample),
        *(first.plan.budget_bytes, as_plan),
    )
    log.warning(
        "%s changes: one family of plans for all sizes, captured in %.1f s; it ends where not %s",
        _shown(marks),
        time.monotonic() - begun,
        " and ".join(family.conditions),
    )
    return family, reading, sizes


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
) -> Family:
    """The family of a graph that was captured with symbols, for the sizes of a call."""
    assert joint.changing is not None
    program, costs, problems = pipeline.formulated_family(options, joint, name, sizes, sample)
    family = Family(options, program, costs, problems, first_budget, as_plan)
    at = family.at(sizes)
    if not options.wishes:
        family.add(keep_all(at.problem), None)
    family.add(constrained_min_budget(at.problem, options.wishes, _SMALLEST_S), None)
    if at.predictor.keep_all_bytes > at.budget or options.wishes:
        with contextlib.suppress(BudgetInfeasible):  # for these sizes; others may be smaller
            found = choose(options, at.predictor, at.budget).solution.schedule
            assert found is not None
            family.add(found, at)
    return family
