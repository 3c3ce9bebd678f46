"""Planning a model in regions: a region out of a submodule's call, and one plan for all of a step.

The stages are those of `pipeline`, once per region; what is new is that the problem of the step is
put together from the regions' problems and from what was recorded between them.
"""

import functools
import logging
import time
from dataclasses import replace

from torch import nn

from rekindle.capture import Follower, JointGraph, Names, Tangent, capture
from rekindle.capture.gc_pause import collector_at_rest
from rekindle.capture.joint import dense_stride
from rekindle.capture.pytrees import named_tensors
from rekindle.capture.separate_uses import check_uses, separate_uses
from rekindle.core import MIN_BUDGET, Status, keep_all, parse_budget, simulate
from rekindle.core.disk import own_version
from rekindle.errors import BudgetInfeasible, CaptureError
from rekindle.frontend import Call, read
from rekindle.lower.guards import Guards as DataGuards
from rekindle.pipeline import formulated, torch_release, with_backward
from rekindle.plans.options import Options
from rekindle.plans.plan_record import PlanRecord, Provenance, graph_hash, kept_options, python_call
from rekindle.profile import device_name
from rekindle.report import format
from rekindle.rewrite.passes import rewrite
from rekindle.runtime.measured_step import sample_of
from rekindle.runtime.plan_table import input_layouts
from rekindle.runtime.regions import MadeRegion, Recording, Regions
from rekindle.solve.regions import RegionOption, StepProblem, StepSchedule, menu_of, search_options
from rekindle.solve.registry import find_solver
from rekindle.solving import NO_BUDGET

log = logging.getLogger("rekindle")

_MENU_LIMIT_S = 4.0  # for the options of one distinct region
_CHOICE_LIMIT_S = 10.0


def region_of(options: Options, module: nn.Module, call: Call) -> MadeRegion:
    """A submodule's call through the stages of the line, up to its problem. Raises CaptureError for
    what cannot be read in one piece."""
    options = replace(options, loss_fn=None, hold_outputs=False, cuda_graph=False, schedule=None)
    with collector_at_rest():
        follower = Follower(Names(module, named_tensors((call.args, call.keywords), "args")))
        reading, _ = read(call, follower.ask)
        given = [i.value for i in reading.inputs]
        uses = separate_uses(reading.graph.graph, given)
        inputs = [given[i] for i in uses]
        joint = capture(follower, reading.graph, inputs)
    if joint.forward_only:
        raise CaptureError("no gradient flows through it")
    check_uses(joint)
    joint = _with_all_tangents(joint)
    DataGuards(joint)
    joint = rewrite(joint, fuse=options.fuse)
    sample = sample_of(joint, inputs)
    name = type(module).__name__
    with collector_at_rest():
        program, _, problem = formulated(options, joint, name, sample)
    empty = tuple(replace(i, value=None) for i in reading.inputs)
    return MadeRegion(
        replace(reading, inputs=empty),
        uses,
        program,
        problem,
        functools.partial(with_backward, options),
        input_layouts(call.args, call.keywords),
    )


def _with_all_tangents(joint: JointGraph) -> JointGraph:
    """A gradient is expected for each output that can have one: what follows is not known yet."""
    outputs = joint.session.outputs
    able = [i for i, t in enumerate(outputs) if t.requires_grad and t.grad_fn is not None]
    wanted = tuple(Tangent(i, dense_stride(outputs[i])) for i in able)
    return joint if wanted == joint.tangents else joint.with_tangents(wanted)


def plan_regions(
    options: Options, name: str, given_bytes: int | None, regions: Regions, recording: Recording
) -> PlanRecord:
    """One schedule for the step that was recorded; the regions are told their parts of it. Raises
    BudgetInfeasible."""
    begun = time.monotonic()
    step = recording.problem(name, options.hold_outputs)
    whole = simulate(step.problem, keep_all(step.problem))
    budget = given_bytes
    if options.budget not in (None, MIN_BUDGET):
        budget = parse_budget(options.budget, whole.peak)
    if budget is None and options.budget != MIN_BUDGET:
        raise TypeError(NO_BUDGET)
    menus = _menus(options, recording)
    best, smallest = search_options(
        step, menus, 0 if budget is None else budget, min(_CHOICE_LIMIT_S, options.time_limit_s)
    )
    if best is None and (budget is None or options.best_effort):
        best, budget = smallest, smallest.trace.peak
    if best is None:
        peak = smallest.trace.peak
        raise BudgetInfeasible(
            f"{format.size(step.problem, budget or 0)} cannot be met by the regions of {name}; "
            f"smallest found {format.size_rounded_up(step.problem, peak)} ({peak:,} bytes). Give "
            'at least that, budget="min", or best_effort=True to take it',
            peak,
        )
    record = _record(options, step, best, budget, recording)
    regions.planned = {
        call.key: (call.kind.hash, option)
        for call, option in zip(recording.calls, best.chosen, strict=True)
    }
    log.warning(
        "planned %d regions in %.1f s: %s", len(recording.calls), time.monotonic() - begun, record
    )
    return record


def _menus(options: Options, recording: Recording) -> list[tuple[RegionOption, ...]]:
    """Per call; equal problems share theirs."""
    solver = find_solver(options.solver)
    found: dict[str, tuple[RegionOption, ...]] = {}
    distinct = len({call.kind.hash for call in recording.calls})
    limit_s = min(_MENU_LIMIT_S, options.time_limit_s / max(1, distinct))
    for call in recording.calls:
        if call.kind.hash not in found:
            found[call.kind.hash] = menu_of(call.kind.problem, solver, limit_s)
    return [
        found[c.kind.hash] if c.has_backward else (c.kind.default,) for c in recording.calls
    ]


def _record(
    options: Options,
    step: StepProblem,
    best: StepSchedule,
    budget: int | None,
    recording: Recording,
) -> PlanRecord:
    problem = step.problem
    solver = options.solver if isinstance(options.solver, str) else options.solver.name
    return PlanRecord(
        problem=problem,
        schedule=best.schedule,
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
