"""Planning a model in regions: a region out of a submodule's call, and one plan for all of a step.

The stages are those of `pipeline`, once per region; what is new is that the problem of the step is
put together from the regions' problems and from what was recorded between them.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from rekindle.capture import Follower, JointGraph, Names, Tangent, capture
from rekindle.capture.gc_pause import collector_at_rest
from rekindle.capture.joint import dense_stride
from rekindle.capture.module_hooks import ModuleHooks
from rekindle.capture.pytrees import named_tensors
from rekindle.capture.separate_uses import check_uses, separate_uses
from rekindle.core import (
    MIN_BUDGET,
    Problem,
    Schedule,
    Status,
    is_fraction,
    keep_all,
    parse_budget,
    simulate,
)
from rekindle.core.disk import own_version
from rekindle.errors import BudgetInfeasible, CaptureError
from rekindle.frontend import Call, read
from rekindle.lower.guards import Guards as DataGuards
from rekindle.pipeline import formulated, torch_release, with_backward
from rekindle.plans.options import Options
from rekindle.plans.plan_record import PlanRecord, Provenance, graph_hash, kept_options, python_call
from rekindle.profile import device_name
from rekindle.program import Program
from rekindle.report import format
from rekindle.rewrite.passes import rewrite
from rekindle.runtime.measured_step import sample_of
from rekindle.runtime.regions import MadeRegion, Recording, Regions
from rekindle.solve.regions import (
    Key,
    RegionOption,
    Step,
    StepProblem,
    fullest,
    menu_of,
    search_options,
)
from rekindle.solve.registry import find_solver
from rekindle.solving import NO_BUDGET

log = logging.getLogger("rekindle")

_MENU_LIMIT_S = 4.0  # for the options of one distinct region
_CHOICE_LIMIT_S = 10.0
_MOST_STEPS = 6  # ways through the model that are planned together


def region_of(options: Options, module: nn.Module, call: Call) -> MadeRegion:
    """A submodule's call through the stages of the line, up to its problem. Raises CaptureError for
    what cannot be read in one piece."""
    with _quiet():
        return _region_of(options, module, call)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What torch logs of an op that it cannot run on fake tensors: it is tried, and may fail."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _region_of(options: Options, module: nn.Module, call: Call) -> MadeRegion:
    options = replace(options, loss_fn=None, hold_outputs=False, cuda_graph=False, schedule=None)
    with collector_at_rest():
        follower = Follower(Names(module, named_tensors((call.args, call.keywords), "args")))
        reading, _ = read(call, follower.ask, ModuleHooks)
        given = [i.value for i in reading.inputs]
        uses = separate_uses(reading.graph.graph, given)
        inputs = [given[i] for i in uses]
        joint = capture(follower, reading.graph, [reading.inputs[i] for i in uses])
    if joint.forward_only:
        raise CaptureError("no gradient flows through it")
    if joint.made_to_require or joint.marked:
        raise CaptureError("it makes an argument require grad, or calls retain_grad()")
    if reading.guards.has_later_reads:
        raise CaptureError("a hook or a Function in it reads Python objects in the backward")
    check_uses(joint)
    joint = _with_all_tangents(joint)
    DataGuards(joint)
    joint = rewrite(joint, fuse=options.fuse)
    sample = sample_of(joint, inputs)
    name = type(module).__name__

    def formulate(joint: JointGraph) -> tuple[Program, Problem]:
        # Ops of another backward that were not measured are estimates: the sample is gone by then.
        with collector_at_rest():
            program, _, problem = formulated(options, joint, name, None)
        return program, problem

    with collector_at_rest():
        program, _, problem = formulated(options, joint, name, sample)
    joint.session.recorder.forget_inputs()
    return MadeRegion(
        reading,
        uses,
        program,
        problem,
        functools.partial(with_backward, options),
        formulate,
    )


def _with_all_tangents(joint: JointGraph) -> JointGraph:
    """A gradient is expected for each output that can have one: what follows is not known yet."""
    outputs = joint.session.outputs
    able = [i for i, t in enumerate(outputs) if t.requires_grad and t.grad_fn is not None]
    wanted = tuple(Tangent(i, dense_stride(outputs[i])) for i in able)
    return joint if wanted == joint.tangents else joint.with_tangents(wanted)


def plan_regions(
    options: Options,
    model: nn.Module,
    name: str,
    given_bytes: int | None,
    regions: Regions,
    recording: Recording,
) -> PlanRecord:
    """One schedule for the step that was recorded, and for those that were before; each region
    gets its part of it. Raises BudgetInfeasible."""
    begun = time.monotonic()
    step = _fullest(recording.step(options.hold_outputs), model, recording)
    problem = StepProblem(step.events, step.storages, step.calls, step.held, name)
    regions.steps = [problem, *_not_within(regions.steps, problem)][:_MOST_STEPS]
    whole = simulate(problem.problem, keep_all(problem.problem))
    budget = given_bytes
    if options.budget not in (None, MIN_BUDGET):
        budget = parse_budget(options.budget, whole.peak)
        if regions.plan is not None and is_fraction(options.budget):
            budget = max(budget, regions.plan.budget_bytes or 0)
    if budget is None and options.budget != MIN_BUDGET:
        raise TypeError(NO_BUDGET)
    menus = _menus(options, regions, recording)
    limit_s = min(_CHOICE_LIMIT_S, options.time_limit_s)
    best, smallest = search_options(regions.steps, menus, budget or 0, limit_s)
    if best is None and (budget is None or options.best_effort):
        best, budget = smallest, smallest.peak
    if best is None:
        raise BudgetInfeasible(
            f"{format.size(problem.problem, budget or 0)} cannot be met by the regions of {name}; "
            f"smallest found {format.size_rounded_up(problem.problem, smallest.peak)} "
            f"({smallest.peak:,} bytes). Give at least that, "
            'budget="min", or best_effort=True to take it',
            smallest.peak,
        )
    record = _record(options, problem, best.schedules[0], budget, recording)
    regions.planned = dict(best.options)
    log.warning(
        "planned %d regions in %.1f s: %s", len(step.calls), time.monotonic() - begun, record
    )
    return record


def _fullest(step: Step, model: nn.Module, recording: Recording) -> Step:
    """The step with the calls of all equal layers."""
    classes = {call.kind.cls for call in recording.calls}
    return fullest(step, [p for p, module in model.named_modules() if type(module) in classes])


def _not_within(steps: Sequence[StepProblem], new: StepProblem) -> list[StepProblem]:
    """Of earlier steps, those with a call that the new one has not."""
    keys = {call.key for call in new.calls}
    return [step for step in steps if not keys.issuperset(call.key for call in step.calls)]


def _menus(
    options: Options, regions: Regions, recording: Recording
) -> dict[Key, tuple[RegionOption, ...]]:
    """Per call; equal problems share theirs."""
    solver = find_solver(options.solver)
    new = {c.kind.hash: c.kind.problem for c in recording.calls if c.kind.hash not in regions.menus}
    limit_s = min(_MENU_LIMIT_S, options.time_limit_s / max(1, len(new)))
    for mark, problem in new.items():
        regions.menus[mark] = menu_of(problem, solver, limit_s)
    without_backward = {c.key: c.kind.default for c in recording.calls if not c.has_backward}
    menus = {}
    for step in regions.steps:
        for call in step.calls:
            default = without_backward.get(call.key)
            menus[call.key] = regions.menus[call.key[2]] if default is None else (default,)
    return menus


def _record(
    options: Options,
    step: StepProblem,
    schedule: Schedule,
    budget: int | None,
    recording: Recording,
) -> PlanRecord:
    problem = step.problem
    solver = options.solver if isinstance(options.solver, str) else options.solver.name
    return PlanRecord(
        problem=problem,
        schedule=schedule,
        status=Status.FEASIBLE,
        bound=None,
        budget_bytes=budget,
        solver=f"{solver}, in regions",
        options=kept_options(options, hold_outputs=options.hold_outputs),
        provenance=Provenance(
            torch=torch_release(),
            rekindle=own_version(),
            device=recording.device.type,
            graph=graph_hash(problem, (v.size for v in problem.values)),
            costs_device=device_name(recording.device),
            costs=(("measured", len(problem.ops)),),
            made_by=python_call(options),
        ),
    )
