"""Options + model + sample -> what a plan is made of: the line itself, one call per stage.

The only module that knows all stages. What a later stage needs of an earlier one (a plan for
another backward, a model for a plan that is there already) is asked of it.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rekindle.capture import JointGraph, Tangent, capture
from rekindle.capture.gc_pause import collector_at_rest
from rekindle.core import Problem, Schedule, Solution, check_schedule, is_fraction, parse_budget
from rekindle.core.files import own_version
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
from rekindle.profile import Profile, device_name, load_device, profile_nodes
from rekindle.program import Program, analyse
from rekindle.program.formulate import formulate
from rekindle.rewrite.passes import rewrite
from rekindle.runtime.lazy_runner import LateRunner
from rekindle.runtime.managed_module import captured_call
from rekindle.solving import choose


@dataclass(frozen=True, slots=True)
class Captured:
    """What a plan holds of a model of this process, beside its record."""

    program: Program
    profile: Profile
    late_runner: LateRunner
    options: Options  # in full, as they were given
    device_budget: DeviceBudget | None = None  # the sum behind `device_budget=`
    kept: bool = False  # the schedule was found in an earlier run and kept on disk

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
    """`first`: the plan that the same module has for its first kind of call. A fraction is one of
    this call's own keep-all peak, but gives no less than that plan's budget: a smaller batch, of
    which gradients are a larger share, has what the first one had."""
    joint = captured(options, model, args, kwargs)
    given = None
    if options.device_budget is not None:
        given = device_budget(options, model, args, kwargs, joint.device)
    at_least = 0
    if first is not None and is_fraction(options.budget):
        at_least = first.budget_bytes or 0
    return plan_joint(options, joint, type(model).__name__, given, at_least)


def plan_again(
    options: Options, joint: JointGraph, old: PlanRecord, given: DeviceBudget | None, same_ops: bool
) -> tuple[PlanRecord, Captured]:
    """A plan for other gradients than the old one's; its schedule serves if the ops are the same
    and the budget still holds."""
    if same_ops:
        with contextlib.suppress(BudgetInfeasible):
            again = replace(options, schedule=old.schedule)
            record, captured = plan_joint(again, joint, old.problem.name, given)
            return replace(record, solver=old.solver), captured
    return plan_joint(options, joint, old.problem.name, given)


def plan_joint(
    options: Options,
    joint: JointGraph,
    name: str,
    given: DeviceBudget | None = None,
    at_least: int = 0,
) -> tuple[PlanRecord, Captured]:
    """From the graph on; `given`: what a device budget came to."""
    with collector_at_rest():
        program, profile, problem = _formulated(options, joint, name)
        predictor = Predictor(program, profile, problem)
        budget = None if given is None else given.step_bytes
        if options.budget is not None:
            budget = max(at_least, parse_budget(options.budget, predictor.keep_all_bytes))
        solution, kept = choose(options, predictor, budget)
        record = _record(options, program, profile, problem, solution, budget)
    runner = _late_runner(options, program, problem, record.schedule)
    return record, Captured(program, profile, runner, options, given, kept)


def capture_for(
    record: PlanRecord,
    options: Options,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Captured:
    """The model for a plan that is there; raises PlanMismatch where the plan is not for it."""
    made = record.provenance
    if made.torch != torch_release():
        raise PlanMismatch(
            f"the plan was made with torch {made.torch}, this is {torch_release()}; plan again"
        )
    where = {t.device.type for t in (*model.parameters(), *model.buffers())}
    if where and made.device not in where:
        raise PlanMismatch(
            f"the plan was made for {made.device}, the model is on {', '.join(sorted(where))}; "
            "plan again"
        )
    joint = captured(options, model, args, kwargs)
    with collector_at_rest():
        program, profile, problem = _formulated(options, joint, type(model).__name__)
    _check_match(record, program, problem)
    runner = _late_runner(options, program, problem, record.schedule)
    return Captured(program, profile, runner, options)


def _check_match(record: PlanRecord, program: Program, problem: Problem) -> None:
    made, device = record.provenance, program.joint.device
    if graph_structure(problem) != graph_structure(record.problem):
        raise PlanMismatch(
            f"the plan was made for another graph ({len(record.problem.ops)} ops, this model's "
            f"has {len(problem.ops)}): another model, input shape, dtype or mode; plan again"
        )
    check_schedule(problem, record.schedule)
    if device.type != made.device:
        raise PlanMismatch(
            f"the plan was made for {made.device}, the model is on {device}; plan again"
        )
    if made.measured and made.costs_device != device_name(device):
        raise PlanMismatch(
            f"the plan was measured on {made.costs_device}, this is {device_name(device)}: "
            "its kernels may need other memory; plan again"
        )
    if graph_hash(problem, (v.size_bytes for v in program.values)) != made.graph:
        raise PlanMismatch(
            "the plan was made for a model of the same ops and other sizes: other widths, "
            "input shapes or dtypes; plan again"
        )


def recorded(
    options: Options, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> JointGraph:
    """What eager runs."""
    return capture(model, args, kwargs, call=captured_call(options.loss_fn))


def captured(
    options: Options, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> JointGraph:
    """What a plan is made of: what eager runs, rewritten."""
    return rewrite(recorded(options, model, args, kwargs), fuse=options.fuse)


def with_backward(
    options: Options, joint: JointGraph, tangents: Sequence[Tangent], autocast: tuple[Any, ...]
) -> JointGraph:
    """A captured step with the backward for other gradients; its forward is the same, node by
    node."""
    other = joint.with_tangents(tangents, autocast)
    return rewrite(other, fuse=options.fuse, beside=joint)


def device_budget(
    options: Options,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> DeviceBudget:
    """What the device's budget leaves for one step."""
    assert options.device_budget is not None
    if options.budget is not None:
        raise TypeError("give budget (of a step) or device_budget (of the device), not both")
    residents = residents_of(model, (args, dict(kwargs)), options.optimizer, options.ranks)
    described = options.device_profile and load_device(options.device_profile).memory_bytes
    return device_budget_of(
        options.device_budget, device, residents, options.headroom, described or None
    )


def torch_release() -> str:
    """Major and minor: kernels and graphs may differ from one to the next."""
    return ".".join(torch.__version__.split("+")[0].split(".")[:2])


# ---- stages


def _formulated(options: Options, joint: JointGraph, name: str) -> tuple[Program, Profile, Problem]:
    if options.cuda_graph and joint.device.type != "cuda":
        raise ValueError(f"cuda_graph=True needs a CUDA device; the model is on {joint.device}")
    description = None if options.device_profile is None else load_device(options.device_profile)
    program = analyse(joint, hold_outputs=options.hold_outputs, random_once=options.cuda_graph)
    profile = profile_nodes(
        joint.nodes,
        joint.device,
        how=options.profile,
        description=description,
        on_progress=options.on_progress,
    )
    return program, profile, formulate(program, profile, name)


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
        # Where there is nothing to drop, a plan without its outputs is one that holds them.
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
    options: Options, program: Program, problem: Problem, schedule: Schedule
) -> LateRunner:
    again = functools.partial(with_backward, options)
    return LateRunner(program, problem, schedule, again, options.cuda_graph)
