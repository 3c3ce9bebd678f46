"""The pipeline: Options + model + sample -> PlanRecord + Captured, one call per stage.

Only this module knows all stages; no stage calls an earlier one. What a stage needs of an earlier
one (a plan for another backward, a model for a plan that was read from a file) is requested here.
docs/architecture.md shows the stages for one example.
"""

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rekindle.capture import Follower, JointGraph, Names, Tangent, capture
from rekindle.capture.changing_capture import capture_changing
from rekindle.capture.changing_sizes import Sizes, SizesAt
from rekindle.capture.gc_pause import collector_at_rest
from rekindle.capture.module_hooks import ModuleHooks
from rekindle.capture.pytrees import named_tensors, path_names, split
from rekindle.core import (
    MIN_BUDGET,
    Problem,
    Schedule,
    Solution,
    Status,
    check_schedule,
    is_fraction,
    parse_budget,
)
from rekindle.core.disk import own_version
from rekindle.errors import BudgetInfeasible, DeviceProfileError, PlanMismatch
from rekindle.frontend import Marks, Reading, call_of, read
from rekindle.inductor import with_compiled_kernels
from rekindle.lower.emit import emit
from rekindle.lower.guards import Guards as DataGuards
from rekindle.measuring import measured_in_place
from rekindle.offloading import choose_moving, problem_of
from rekindle.plans.options import Options, parse_offload
from rekindle.plans.plan_record import (
    PlanRecord,
    Provenance,
    graph_hash,
    graph_structure,
    kept_options,
    python_call,
)
from rekindle.predict import DeviceBudget, Predictor, residents_of
from rekindle.predict import device_budget as device_budget_of
from rekindle.predict.device_budget import headroom_bytes, optimizer_class, total_bytes
from rekindle.profile import (
    DeviceDescription,
    Profile,
    ProfileListener,
    ProfileProgress,
    device_name,
    load_device,
    profile_nodes,
)
from rekindle.profile.changing import ChangingCosts
from rekindle.profile.host_rates import HostRates, spare_host_bytes
from rekindle.profile.measure_host import host_rates
from rekindle.profile.profiler import describe, is_there
from rekindle.program import Program, analyse, charged_nodes
from rekindle.program.formulate import Formulation, formulate, formulation
from rekindle.rewrite.passes import rewrite
from rekindle.runtime.lazy_runner import LateRunner
from rekindle.runtime.managed_module import plain_forward
from rekindle.runtime.measured_step import Sample, sample_of
from rekindle.runtime.rescue import empty_cache
from rekindle.runtime.step_watch import NUM_CORRECTIONS, Excess, with_excess
from rekindle.solve.progress import Progress, milestone, report
from rekindle.solving import Choice, choose

log = logging.getLogger("rekindle")

_CORRECTION_LIMIT_S = 5.0  # for a search between two steps of a training


@dataclass(frozen=True, slots=True)
class Captured:
    """What a plan knows of a model in this process, besides its record."""

    program: Program
    profile: Profile
    late_runner: LateRunner
    reading: Reading | None  # of the call that was captured, until a module runs the plan
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
    check_options(options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(model).__name__}: {str(model)[:60]}")
    _say_what_is_planned(model)
    if options.kernels == "auto":
        return _faster_plan(options, model, args, kwargs, first)
    return _plan_call(options, model, args, kwargs, first)


def _plan_call(
    options: Options,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    first: PlanRecord | None,
) -> tuple[PlanRecord, Captured]:
    joint, reading = _captured_told(options, model, args, kwargs)
    DataGuards(joint)  # what cannot be asked again at a call is refused before anything is measured
    given = None
    if options.device_budget is not None:
        given = device_budget(options, model, args, kwargs, joint.device)
    at_least = 0
    if first is not None and is_fraction(options.budget):
        at_least = first.budget_bytes or 0
    sample = _sample(joint, reading)
    name = type(model).__name__
    record, captured = plan_joint(options, joint, name, sample, given, at_least, reading)
    made = replace(record.provenance, **_circumstances(options, model, args, kwargs, joint.device))
    return replace(record, provenance=made), captured


def _faster_plan(
    options: Options,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    first: PlanRecord | None,
) -> tuple[PlanRecord, Captured]:
    """Of the plans with eager's and with compiled kernels, the one whose step is predicted to be
    faster. A fraction is of the peak with eager's kernels, for both. For the smallest budget, the
    one with the smaller peak."""
    found: list[tuple[PlanRecord, Captured]] = []
    refused: BudgetInfeasible | None = None
    for kernels in ("eager", "inductor"):
        again = replace(options, kernels=kernels)
        if found and is_fraction(options.budget):
            again = replace(again, budget=found[0][0].budget_bytes)
        try:
            made = _plan_call(again, model, args, kwargs, first)
        except BudgetInfeasible as error:
            refused = refused or error
            continue
        if made[1].joint.kernels == kernels:  # else there are no compiled ones
            found.append(made)
    if not found:
        assert refused is not None
        raise refused

    def rank(made: tuple[PlanRecord, Captured]) -> tuple[int, int]:
        record, captured = made
        predictor = Predictor(captured.program, captured.profile, record.problem)
        peak = predictor.peak_bytes(record.schedule) if options.budget == MIN_BUDGET else 0
        return peak, predictor.step_ns(record.schedule)

    best = min(found, key=rank)
    milestone(f"{best[1].joint.kernels} kernels are taken")
    return best


def _circumstances(
    options: Options,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    """What a report says about a plan besides the plan: its call and what else is on the device."""
    nest = (tuple(args), dict(kwargs))
    tensors, _ = split(nest)
    names = path_names(nest, "")
    shapes = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors]
    residents = residents_of(model, nest, options.optimizer, options.ranks)
    if options.device_profile is not None:
        device_bytes: int | None = load_device(options.device_profile).memory_bytes
    else:
        device_bytes = total_bytes(device) if device.type == "cuda" else None
    return {
        "made_by": python_call(options),
        "inputs": tuple((_input_name(n), s) for n, s in zip(names, shapes, strict=True)),
        "residents": residents.rows(),
        "device_bytes": device_bytes,
    }


def _input_name(path: str) -> str:
    """`args[0]` of "[0][0]", `kwargs['mask']` of "[1]['mask']"."""
    return ("args" if path.startswith("[0]") else "kwargs") + path[3:]


def check_options(options: Options) -> None:
    """Refuses, before any work, what `Options` itself cannot know to be wrong."""
    if options.device_profile is not None:
        load_device(options.device_profile)
    if isinstance(options.optimizer, str):
        optimizer_class(options.optimizer)
    headroom_bytes(options.headroom, 2**40)


def _say_what_is_planned(model: nn.Module) -> None:
    """A plan is for the mode in which it was made, which need not be the one that was meant."""
    name = type(model).__name__
    if not torch.is_grad_enabled():
        log.warning(
            "planning %s under no_grad: this plan is for inference, no training step is planned",
            name,
        )
    elif not model.training:
        log.warning(
            "planning a training step of %s in eval mode: in train mode it would be another step; "
            "call model.train() before planning if that is what you mean",
            name,
        )


def plan_again(
    options: Options,
    joint: JointGraph,
    old: PlanRecord,
    sample: Sample | None,
    given: DeviceBudget | None,
    same_ops: bool,
) -> tuple[PlanRecord, Captured]:
    """A plan for a backward with other gradients than the old plan's. The old schedule is reused if
    the ops are the same and its peak is still within the budget."""
    if same_ops:
        with contextlib.suppress(BudgetInfeasible):
            again = replace(options, schedule=old.schedule)
            record, captured = plan_joint(again, joint, old.problem.name, sample, given, like=old)
            runner = _late_runner(options, captured.program, record)
            captured = replace(captured, options=options, late_runner=runner)
            return _made_like(replace(record, solver=old.solver), old), captured
    record, captured = plan_joint(options, joint, old.problem.name, sample, given)
    return _made_like(record, old), captured


def _made_like(record: PlanRecord, old: PlanRecord) -> PlanRecord:
    """The record with the circumstances of the old one: another backward of the same call."""
    names = ("made_by", "inputs", "residents", "device_bytes")
    same = {name: getattr(old.provenance, name) for name in names}
    return replace(record, provenance=replace(record.provenance, **same))


def plan_joint(
    options: Options,
    joint: JointGraph,
    name: str,
    sample: Sample | None,
    given: DeviceBudget | None = None,
    at_least: int = 0,
    reading: Reading | None = None,
    like: PlanRecord | None = None,
) -> tuple[PlanRecord, Captured]:
    """The stages from the captured graph on. `sample` is what a step can be measured on; `given` is
    the device budget, resolved; `like` is a plan whose link to the host this one has too."""
    with collector_at_rest():
        program, profile, problem = formulated(options, joint, name, sample)
        if like is not None:
            problem = replace(problem, transfers=like.problem.transfers)
        predictor = _predictor(options, program, profile, problem)
        budget = None if given is None else given.step_bytes
        if options.budget not in (None, MIN_BUDGET):
            on_top = 0 if options.count_gradients else predictor.parameter_gradients_bytes
            rest = max(1, predictor.keep_all_bytes - on_top)
            budget = max(at_least, parse_budget(options.budget, rest) + on_top)
        problem, choice = _chosen(options, predictor, budget)
        record = _record(options, program, profile, problem, choice)
        milestone(f"planned {record}{', a solution from the cache' if choice.kept else ''}")
    runner = _late_runner(options, program, record)
    return record, Captured(program, profile, runner, reading, options, given, choice.kept)


def correct_plan(
    options: Options, old: PlanRecord, captured: Captured, seen: Excess | int, num_corrections: int
) -> tuple[PlanRecord, Captured]:
    """A plan by what was seen of a step, searched for from the old schedule: in which the ops of
    one section need what the section needed, or for a budget of so many bytes. It may be corrected
    so often again. A budget does not grow, unless it was to be the smallest. Raises
    BudgetInfeasible."""
    program, profile = captured.program, captured.profile
    problem, budget = old.problem, old.budget_bytes
    again = replace(options, schedule=None)
    if isinstance(seen, Excess):
        problem = with_excess(problem, old.schedule, seen)
        if options.budget != MIN_BUDGET:
            again = replace(again, budget=budget)
    else:
        budget = seen
        again = replace(again, budget=budget, best_effort=False)
    limit_s = min(options.time_limit_s, _CORRECTION_LIMIT_S)
    again = replace(again, time_limit_s=limit_s)
    with collector_at_rest():
        predictor = _predictor(options, program, profile, problem)
        problem, choice = _chosen(again, predictor, budget, start=old.schedule)
        record = _made_like(_record(options, program, profile, problem, choice), old)
    runner = _late_runner(options, program, record, num_corrections)
    return record, replace(captured, late_runner=runner, kept=choice.kept)


def _chosen(
    options: Options, predictor: Predictor, budget: int | None, start: Schedule | None = None
) -> tuple[Problem, Choice]:
    """The schedule, and the problem that it is of: with a link where it moves values."""
    if predictor.problem.transfers is None:
        return predictor.problem, choose(options, predictor, budget, start)
    choice = choose_moving(options, predictor, budget, start)
    return problem_of(predictor, choice), choice


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
    options = replace(options, kernels=record.options.kernels)
    joint, reading = captured(options, model, args, kwargs)
    sample = _sample(joint, reading)
    with collector_at_rest():
        program, profile, problem = formulated(options, joint, type(model).__name__, sample)
    problem = replace(problem, transfers=record.problem.transfers)
    _check_match(record, program, problem)
    runner = _late_runner(options, program, replace(record, problem=problem))
    return Captured(program, profile, runner, reading, options)


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


# What was recorded of calls of a model, while it lives: a call that the guards of one hold for is
# not read again.
_recorded: weakref.WeakKeyDictionary[nn.Module, list[tuple[bool, Reading, JointGraph]]] = (
    weakref.WeakKeyDictionary()
)
_MOST_RECORDED = 4  # of one model


def recorded(
    options: Options, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[JointGraph, Reading]:
    """The graph as eager runs it, before any rewrite."""
    call = call_of(plain_forward(model), tuple(args), kwargs, options.loss_fn)
    known = _recorded.setdefault(model, [])
    has_loss = call.loss_fn is not None  # what was read without one has no guard on it
    for with_loss, reading, joint in known:
        # Answers that the data gave may be others by now.
        if (
            with_loss is has_loss
            and reading.is_there
            and not DataGuards(joint).scalars
            and reading.guards.check(call.scope)
        ):
            return joint, reading
    with collector_at_rest():
        follower = Follower(Names(model, named_tensors((call.args, call.keywords), "args")))
        reading, returned = read(call, follower.ask, ModuleHooks)
        follower.returned, follower.losses = returned.tensors, returned.losses
        joint = capture(follower, reading.graph, reading.inputs)
    known[:] = [(has_loss, reading, joint), *known[: _MOST_RECORDED - 1]]
    return joint, reading


def _sample(joint: JointGraph, reading: Reading) -> Sample | None:
    """What a step of the call that was read can be measured on; the reading lets go of it."""
    sample = sample_of(joint, [given.value for given in reading.inputs])
    reading.held.clear()
    return sample


def recorded_changing(
    options: Options,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    marks: Marks,
    others: Sequence[JointGraph],
) -> tuple[JointGraph, Reading]:
    """The graph as eager runs it, before any rewrite, with symbols for the sizes that are marked.
    `others`: captures of the same model for other sizes, with which it must agree."""
    call = call_of(plain_forward(model), tuple(args), kwargs, options.loss_fn)
    names = Names(model, named_tensors((call.args, call.keywords), "args"))
    with collector_at_rest():
        follower = Follower(names, with_symbols=True)
        reading, returned = read(call, follower.ask, ModuleHooks, marks)
        follower.returned, follower.losses = returned.tensors, returned.losses

        def plain() -> Follower:
            other = Follower(names)
            other.returned, other.losses = returned.tensors, returned.losses
            return other

        joint = capture_changing(follower, reading, plain, tuple(others))
    return joint, reading


def formulated_family(
    options: Options, joint: JointGraph, name: str, sizes: Sizes, sample: Sample | None
) -> tuple[Program, ChangingCosts, Formulation]:
    """What `_formulated` gives, of a graph whose sizes change; measured for these sizes."""
    assert joint.changing is not None
    at = joint.changing.at(sizes)
    program, profile = _profiled(options, joint, sample, at)
    charged = {name for names in charged_nodes(program) for name in names}
    nodes = [node for node in joint.nodes if node.name in charged]
    costs = ChangingCosts(nodes, _description(options, joint.device) or describe(joint.device))
    costs.add(profile, at)
    return program, costs, formulation(program, profile, name, at)


def runner_of_family(
    options: Options, program: Program, problems: Formulation, schedule: Schedule
) -> LateRunner:
    """The code of one schedule, for all sizes."""
    again = functools.partial(with_backward, options)
    return LateRunner(program, problems.problem, schedule, again)


def plan_of_family(
    options: Options,
    predictor: Predictor,
    schedule: Schedule,
    runner: LateRunner,
    budget: int,
    at: SizesAt,
) -> tuple[PlanRecord, Captured]:
    """The plan for one shape of a family."""
    program, profile = predictor.program, predictor.profile
    solution = Solution(status=Status.FEASIBLE, schedule=schedule, solver="family")
    choice = Choice(solution, False, budget)
    record = _record(options, program, profile, predictor.problem, choice, at)
    return record, Captured(program, profile, runner, None, options)


def _captured_told(
    options: Options, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[JointGraph, Reading]:
    begun = time.monotonic()
    milestone(f"capturing {type(model).__name__}")
    joint, reading = captured(options, model, args, kwargs)
    milestone(f"captured {len(joint.nodes):,} nodes in {time.monotonic() - begun:.1f} s")
    return joint, reading


def captured(
    options: Options, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[JointGraph, Reading]:
    """The graph that a plan is made for: as eager runs it, then rewritten."""
    joint, reading = recorded(options, model, args, kwargs)
    if options.kernels != "eager":
        compiled = with_compiled_kernels(model, joint, _lowered_in_order)
        if compiled is not None:
            return compiled, reading
    return rewrite(joint, fuse=options.fuse), reading


def _lowered_in_order(joint: JointGraph) -> None:
    """Raises where the later stages cannot do with a graph."""
    program = analyse(joint)
    emit(program, Schedule(tuple(range(len(program.ops)))))


def with_backward(
    options: Options,
    joint: JointGraph,
    tangents: Sequence[Tangent],
    autocast: tuple[Any, ...],
    retained: tuple[int, ...] = (),
) -> JointGraph:
    """The captured graph with a backward for other gradients. The forward keeps its nodes, since it
    may have run already."""
    other = joint.with_tangents(tangents, autocast, retained)
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


# ---- stages


def formulated(
    options: Options, joint: JointGraph, name: str, sample: Sample | None
) -> tuple[Program, Profile, Problem]:
    """The stages from a graph to its problem; ops that no earlier run has measured are measured on
    the sample."""
    if options.cuda_graph and joint.device.type != "cuda":
        raise ValueError(
            f"cuda_graph=True needs a CUDA device and the model is on {joint.device}; move the "
            "model or leave cuda_graph out"
        )
    program, profile = _profiled(options, joint, sample)
    description = _description(options, joint.device)
    profile = replace(profile, host=_host_rates(options, joint.device, description))
    problem = formulate(program, profile, name)
    if profile.host is not None:
        problem = replace(problem, transfers=profile.host.link(_host_budget(options)))
    return program, profile, problem


def _description(options: Options, device: torch.device) -> DeviceDescription | None:
    """The device that costs are estimated for; None where they are measured."""
    if options.device_profile is not None:
        return load_device(options.device_profile)
    return describe(device) if options.profile == "estimate" else None


def _profiled(
    options: Options, joint: JointGraph, sample: Sample | None, at: SizesAt | None = None
) -> tuple[Program, Profile]:
    description = _description(options, joint.device)
    program = analyse(joint, hold_outputs=options.hold_outputs, random_once=options.cuda_graph)
    charged = {name for names in charged_nodes(program) for name in names}
    listener = functools.partial(_tell_profiling, options.on_progress)
    profile = profile_nodes(
        [node for node in joint.nodes if node.name in charged],
        joint.device,
        description=description,
        cache=options.cache,
        remeasure=options.remeasure,
        on_progress=listener,
        at=at,
    )
    if description is None and is_there(joint.device):
        known = profile
        profile = measured_in_place(options, program, profile, sample, listener, at)
        if profile is not known:
            empty_cache(joint.device)  # of what measuring made
    milestone(f"profiled {profile.summary()}")
    if profile.is_noisy:
        log.warning(
            "the machine is busy: repeats of an op differ by %.0f %% in the median; plan again "
            "with remeasure=True when it is quiet",
            100 * profile.spread,
        )
    return program, profile


def _host_rates(
    options: Options, device: torch.device, description: DeviceDescription | None
) -> HostRates | None:
    """The link to host memory that a plan may use; None where it is to use none."""
    wish = parse_offload(options.offload)
    if wish is None or options.cuda_graph or (wish.only_on_gpu and device.type != "cuda"):
        return None
    if description is None and device.type == "cuda":
        found = host_rates(device, cache=options.cache, remeasure=options.remeasure)
        if found is None:
            log.warning("the link to host memory cannot be measured now: values are not moved")
        return found
    where = description or describe(device)
    if where.host is None and not wish.only_on_gpu:
        raise DeviceProfileError(
            f"the device description {where.name!r} has no rates to and from host memory, which "
            f"offload={options.offload!r} needs: add a table host to it"
        )
    return where.host


def _host_budget(options: Options) -> int:
    wish = parse_offload(options.offload)
    assert wish is not None
    return spare_host_bytes() if wish.host_budget is None else wish.host_budget


def _predictor(options: Options, program: Program, profile: Profile, problem: Problem) -> Predictor:
    has_arena = options.arena and not options.cuda_graph
    # Of the whole device it counts what the allocator takes. Without an arena that is up to twice
    # what a step needs where the device is full: the allocator gives back segments then.
    in_reserved = has_arena and options.device_budget is not None
    return Predictor(program, profile, problem, has_arena, in_reserved)


def _tell_profiling(listener: ProfileListener | None, seen: ProfileProgress) -> None:
    """To the caller's own listener, and to whoever hears the progress of planning."""
    if listener is not None:
        listener(seen)
    if seen.num_done == 0 and seen.expected_s:
        milestone(f"measuring {seen.num_total} distinct ops, about {seen.expected_s:.0f} s")
    elif seen.num_done < seen.num_total:
        # The expected time is an estimate; what is done tells more as it grows.
        so_far_s = seen.elapsed_s * seen.num_total / max(1, seen.num_done)
        expected_s = max(seen.expected_s, so_far_s)
        text = (
            f"measuring ops: {seen.num_done} of {seen.num_total}, {seen.elapsed_s:.0f} s of about "
            f"{expected_s:.0f}, {seen.op}"
        )
        report(Progress("", seen.elapsed_s, text=text))


def _record(
    options: Options,
    program: Program,
    profile: Profile,
    problem: Problem,
    choice: Choice,
    at: SizesAt | None = None,
) -> PlanRecord:
    solution = choice.solution
    assert isinstance(solution.schedule, Schedule)
    return PlanRecord(
        problem=problem,
        schedule=solution.schedule,
        status=solution.status,
        bound=solution.bound,
        budget_bytes=choice.budget_bytes,
        solver=solution.solver,
        # If the loss is the only output, `hold_outputs=False` drops nothing and plans the same
        # step: record it as held, so that plan files of equal steps are equal.
        options=kept_options(
            replace(options, kernels=program.joint.kernels),
            hold_outputs=program.held == program.given,
        ),
        provenance=Provenance(
            torch=torch_release(),
            rekindle=own_version(),
            device=program.joint.device.type,
            graph=graph_hash(
                problem,
                (v.size_bytes if at is None else at.number(v.size_bytes) for v in program.values),
            ),
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
        options.arena,
    )
