"""The pipeline: Options + model + sample -> PlanRecord + Captured, one call per stage.

Only this module knows all stages; no stage calls an earlier one. What a stage needs of an earlier
one (a plan for another backward, a model for a plan that was read from a file) is requested here.
docs/architecture.md shows the stages for one example.
"""

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from rekindle.capture import JointGraph, Tangent, capture
from rekindle.capture.gc_pause import collector_at_rest
from rekindle.capture.pytrees import split
from rekindle.core import (
    Problem,
    Schedule,
    Solution,
    check_schedule,
    is_fraction,
    keep_all,
    parse_budget,
    simulate,
)
from rekindle.core.disk import own_version
from rekindle.errors import BudgetInfeasible, PlanMismatch
from rekindle.plans.options import Options
from rekindle.plans.plan_record import (
    PlanRecord,
    Provenance,
    graph_hash,
    graph_structure,
    kept_options,
)
from rekindle.predict import DeviceBudget, Predictor, residents_of
from rekindle.predict import device_budget as device_budget_of
from rekindle.profile import OpProfile, Profile, device_name, load_device, profile_nodes
from rekindle.profile.measure import Bench, bench_for
from rekindle.profile.profiler import describe, is_there, with_measured
from rekindle.program import Program, analyse, charged_nodes
from rekindle.program.formulate import formulate
from rekindle.rewrite.passes import rewrite
from rekindle.runtime.lazy_runner import LateRunner
from rekindle.runtime.managed_module import captured_call
from rekindle.runtime.measured_step import measured_step, not_measured, resident_tensors
from rekindle.runtime.step_watch import NUM_CORRECTIONS, Excess, with_excess
from rekindle.solve.constraints import constrained_min_budget
from rekindle.solving import choose

Tensors = Mapping[fx.Node, torch.Tensor]  # of the placeholders of a joint graph
_SHARE_TO_FILL = 0.8  # of the device's free memory, by the first measured step
_CORRECTION_LIMIT_S = 5.0  # for a search between two steps of a training


@dataclass(frozen=True, slots=True)
class Captured:
    """What a plan knows of a model in this process, besides its record."""

    program: Program
    profile: Profile
    late_runner: LateRunner
    options: Options  # all of them; the record has only those that a plan file keeps
    device_budget: DeviceBudget | None = None  # how `device_budget=` was divided
    kept: bool = False  # the schedule is from the cache of solutions

    @property
    def joint(self) -> JointGraph:
        return self.program.joint


def plan_call(
    options: Options,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    first: PlanRecord | None = None,
) -> tuple[PlanRecord, Captured]:
    """A plan for one call. `first` is the plan for the first call of the same managed module, if
    there is one. A fractional budget is a fraction of this call's own keep-all peak, but at least
    the budget of the first plan: gradients are a larger share of a smaller batch's peak, so the
    fraction alone could be infeasible where the first budget is enough."""
    joint = captured(options, model, args, kwargs)
    given = None
    if options.device_budget is not None:
        given = device_budget(options, model, args, kwargs, joint.device)
    at_least = 0
    if first is not None and is_fraction(options.budget):
        at_least = first.budget_bytes or 0
    tensors = tensors_of(joint, model, args, kwargs)
    return plan_joint(options, joint, type(model).__name__, tensors, given, at_least)


def plan_again(
    options: Options,
    joint: JointGraph,
    old: PlanRecord,
    tensors: Tensors,
    given: DeviceBudget | None,
    same_ops: bool,
) -> tuple[PlanRecord, Captured]:
    """A plan for a backward with other gradients than the old plan's. The old schedule is reused if
    the ops are the same and its peak is still within the budget."""
    if same_ops:
        with contextlib.suppress(BudgetInfeasible):
            again = replace(options, schedule=old.schedule)
            record, captured = plan_joint(again, joint, old.problem.name, tensors, given)
            runner = _late_runner(options, captured.program, record)
            captured = replace(captured, options=options, late_runner=runner)
            return replace(record, solver=old.solver), captured
    return plan_joint(options, joint, old.problem.name, tensors, given)


def plan_joint(
    options: Options,
    joint: JointGraph,
    name: str,
    tensors: Tensors,
    given: DeviceBudget | None = None,
    at_least: int = 0,
) -> tuple[PlanRecord, Captured]:
    """The stages from the captured graph on. `tensors` are the sample's, by placeholder; `given` is
    the device budget, resolved."""
    with collector_at_rest():
        program, profile, problem = _formulated(options, joint, name, tensors)
        predictor = Predictor(program, profile, problem)
        budget = None if given is None else given.step_bytes
        if options.budget is not None:
            budget = max(at_least, parse_budget(options.budget, predictor.keep_all_bytes))
        solution, kept = choose(options, predictor, budget)
        record = _record(options, program, profile, problem, solution, budget)
    runner = _late_runner(options, program, record)
    return record, Captured(program, profile, runner, options, given, kept)


def correct_plan(
    options: Options, old: PlanRecord, captured: Captured, seen: Excess | int, num_corrections: int
) -> tuple[PlanRecord, Captured]:
    """A plan by what was seen of a step, searched for from the old schedule: in which the ops of
    one section need what the section needed, or for a budget of so many bytes. It may be corrected
    so often again. Raises BudgetInfeasible."""
    program, profile = captured.program, captured.profile
    problem, budget = old.problem, old.budget_bytes
    if isinstance(seen, Excess):
        problem = with_excess(problem, old.schedule, seen)
    else:
        budget = seen
    limit_s = min(options.time_limit_s, _CORRECTION_LIMIT_S)
    again = replace(options, schedule=None, time_limit_s=limit_s)
    with collector_at_rest():
        predictor = Predictor(program, profile, problem)
        solution, kept = choose(again, predictor, budget, start=old.schedule)
        record = _record(options, program, profile, problem, solution, budget)
    runner = _late_runner(options, program, record, num_corrections)
    return record, replace(captured, late_runner=runner, kept=kept)


def capture_for(
    record: PlanRecord,
    options: Options,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Captured:
    """Captures the model that an existing plan is for; raises PlanMismatch if it is another one."""
    made = record.provenance
    if made.torch != torch_release():
        raise PlanMismatch(
            f"the plan was made with torch {made.torch} and torch {torch_release()} is installed; "
            "make a new plan"
        )
    where = {t.device.type for t in (*model.parameters(), *model.buffers())}
    if where and made.device not in where:
        raise PlanMismatch(
            f"the plan was made for {made.device} and the model is on {', '.join(sorted(where))}; "
            "move the model or make a new plan"
        )
    joint = captured(options, model, args, kwargs)
    tensors = tensors_of(joint, model, args, kwargs)
    with collector_at_rest():
        program, profile, problem = _formulated(options, joint, type(model).__name__, tensors)
    _check_match(record, program, problem)
    runner = _late_runner(options, program, replace(record, problem=problem))
    return Captured(program, profile, runner, options)


def _check_match(record: PlanRecord, program: Program, problem: Problem) -> None:
    made, device = record.provenance, program.joint.device
    if graph_structure(problem) != graph_structure(record.problem):
        raise PlanMismatch(
            f"the plan was made for another graph of {len(record.problem.ops)} ops, and this one "
            f"has {len(problem.ops)}: the model, an input shape, a dtype or train/eval mode "
            "differs; make a new plan"
        )
    check_schedule(problem, record.schedule)
    if device.type != made.device:
        raise PlanMismatch(
            f"the plan was made for {made.device} and the model is on {device}; move the model or "
            "make a new plan"
        )
    if made.measured and made.costs_device != device_name(device):
        raise PlanMismatch(
            f"the plan was measured on {made.costs_device} and this is {device_name(device)}, "
            "whose kernels may need other workspace; make a new plan"
        )
    if graph_hash(problem, (v.size_bytes for v in program.values)) != made.graph:
        raise PlanMismatch(
            "the plan was made for a model with the same ops and other sizes (layer widths, input "
            "shapes or dtypes); make a new plan"
        )


def recorded(
    options: Options, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> JointGraph:
    """The graph as eager runs it, before any rewrite."""
    return capture(model, args, kwargs, call=captured_call(options.loss_fn))


def captured(
    options: Options, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> JointGraph:
    """The graph that a plan is made for: as eager runs it, then rewritten."""
    return rewrite(recorded(options, model, args, kwargs), fuse=options.fuse)


def with_backward(
    options: Options, joint: JointGraph, tangents: Sequence[Tangent], autocast: tuple[Any, ...]
) -> JointGraph:
    """The captured graph with a backward for other gradients. The forward keeps its nodes, since it
    may have run already."""
    other = joint.with_tangents(tangents, autocast)
    return rewrite(other, fuse=options.fuse, beside=joint)


def device_budget(
    options: Options,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> DeviceBudget:
    """The part of a device budget that is left for one step."""
    assert options.device_budget is not None
    if options.budget is not None:
        raise TypeError(
            "both budget and device_budget were given; give budget (for a step) or device_budget "
            "(for the whole device)"
        )
    residents = residents_of(model, (args, dict(kwargs)), options.optimizer, options.ranks)
    described = options.device_profile and load_device(options.device_profile).memory_bytes
    return device_budget_of(
        options.device_budget, device, residents, options.headroom, described or None
    )


def torch_release() -> str:
    """Major and minor version: kernels and graphs may differ between minor releases."""
    return ".".join(torch.__version__.split("+")[0].split(".")[:2])


def tensors_of(
    joint: JointGraph, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[fx.Node, torch.Tensor]:
    """The sample's tensors, by the placeholders of the graph that was captured from it."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    state = [parameters[name] for name in joint.parameters]
    state += [buffers[name] for name in joint.buffers]
    return resident_tensors(joint, state, split((tuple(args), dict(kwargs)))[0])


# ---- stages


def _formulated(
    options: Options, joint: JointGraph, name: str, tensors: Tensors
) -> tuple[Program, Profile, Problem]:
    if options.cuda_graph and joint.device.type != "cuda":
        raise ValueError(
            f"cuda_graph=True needs a CUDA device and the model is on {joint.device}; move the "
            "model or leave cuda_graph out"
        )
    description = None if options.device_profile is None else load_device(options.device_profile)
    if description is None and options.profile == "estimate":
        description = describe(joint.device)
    program = analyse(joint, hold_outputs=options.hold_outputs, random_once=options.cuda_graph)
    charged = {name for names in charged_nodes(program) for name in names}
    nodes = [node for node in joint.nodes if node.name in charged]
    profile = profile_nodes(nodes, joint.device, description=description)
    if description is None and is_there(joint.device):
        profile = _measured_in_place(options, program, profile, tensors)
    return program, profile, formulate(program, profile, name)


def _measured_in_place(
    options: Options, program: Program, profile: Profile, tensors: Tensors
) -> Profile:
    """The profile with what a step on the sample shows of the ops that no earlier run has measured.
    Where the step does not fit the device as eager runs it, the schedule with the smallest peak
    that can be found by the estimates runs instead: it keeps least, and computes the rest again."""
    wanted = not_measured(program, profile)
    if not wanted:
        return profile
    start, device = time.perf_counter(), program.joint.device
    try:
        bench = bench_for(device)
    except RuntimeError as error:
        line = next(iter(str(error).splitlines()), "")
        return with_measured(profile, device, {}, f"the device cannot be used: {line}")
    found: dict[int, OpProfile] = {}
    why_not = "does not fit on the device"
    for schedule in _schedules_to_measure(options, program, profile, bench):
        step = measured_step(
            program,
            schedule,
            tensors,
            profile,
            wanted.difference(found),
            bench,
            options.on_progress,
        )
        found |= step.found
        why_not = step.why_not
        if step.device_lost:
            break
        bench.release()  # what the step had stays with nobody
        if not step.out_of_memory:
            break
    took_s = time.perf_counter() - start
    return with_measured(profile, device, found, why_not, wall_s=took_s)


def _schedules_to_measure(
    options: Options, program: Program, profile: Profile, bench: Bench
) -> Iterator[Schedule]:
    problem = formulate(program, profile)
    everything = keep_all(problem)
    free_bytes = bench.free_bytes()
    if simulate(problem, everything).peak <= _SHARE_TO_FILL * free_bytes:
        yield everything
    smallest = constrained_min_budget(problem, options.wishes)
    # A CPU that runs out of memory raises nothing: the system ends a process.
    if simulate(problem, smallest).peak <= free_bytes:
        yield smallest


def _record(
    options: Options,
    program: Program,
    profile: Profile,
    problem: Problem,
    solution: Solution,
    budget: int | None,
) -> PlanRecord:
    assert isinstance(solution.schedule, Schedule)
    return PlanRecord(
        problem=problem,
        schedule=solution.schedule,
        status=solution.status,
        bound=solution.bound,
        budget_bytes=budget,
        solver=solution.solver,
        # If the loss is the only output, `hold_outputs=False` drops nothing and plans the same
        # step: record it as held, so that plan files of equal steps are equal.
        options=kept_options(options, hold_outputs=program.held == program.given),
        provenance=Provenance(
            torch=torch_release(),
            rekindle=own_version(),
            device=program.joint.device.type,
            graph=graph_hash(problem, (v.size_bytes for v in program.values)),
            costs_device=profile.device,
            costs=tuple((source.value, n) for source, n in profile.num_by_source.items()),
        ),
    )


def _late_runner(
    options: Options,
    program: Program,
    record: PlanRecord,
    num_corrections: int = NUM_CORRECTIONS,
) -> LateRunner:
    again = functools.partial(with_backward, options)
    # "All of the peak" is no limit but the wish that nothing runs twice.
    everything = is_fraction(options.budget) and float(options.budget or 0) >= 1
    limit = None if everything or options.schedule is not None else record.budget_bytes
    return LateRunner(
        program,
        record.problem,
        record.schedule,
        again,
        options.cuda_graph,
        limit,
        num_corrections,
    )
