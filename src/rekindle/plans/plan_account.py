"""From a plan, made just now or read from a file, to the account that all reports print."""

import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.core import Problem, Schedule, Status, keep_all, simulate
from rekindle.report import Account, CurvePoint, Facts, Step, account, format
from rekindle.solve.baselines import segmentations
from rekindle.solve.lower_bound import cost_bound
from rekindle.solve.pareto import Point, envelope, pareto, point_of

if TYPE_CHECKING:  # torch takes seconds to import, and an account needs none
    from rekindle.pipeline import Plan
    from rekindle.plans.plan_files import StoredPlan
    from rekindle.predict import StepMeasurement
    from rekindle.verification import Verdict

CURVE_LIMIT_S = 20.0
BOUND_LIMIT_S = 2.0
SEGMENTS_LIMIT_S = 2.0


def account_of(plan: "Plan | StoredPlan", *, commands: Sequence[str] = ()) -> Account:
    """What a plan does and is known by."""
    from rekindle.pipeline import Plan

    bound: int | None = getattr(plan, "bound", None)
    facts = Facts(
        budget=plan.budget_bytes,
        bound=bound,
        optimal=getattr(plan, "status", None) is Status.OPTIMAL,
        solver=plan.solver,
        commands=tuple(commands),
    )
    if isinstance(plan, Plan):
        predicted = plan.predict()
        facts = replace(
            facts,
            predicted=Step(predicted.peak_bytes, predicted.step_ns),
            made_for=_made_for(plan),
            commands=facts.commands or (_call(plan),),
            advice=_advice(plan),
        )
    else:
        facts = replace(facts, made_for=_stored_for(plan))
    return with_bound(account(plan.problem, plan.schedule, facts))


def account_of_schedule(
    problem: Problem,
    schedule: Schedule,
    budget: int | None,
    solver: str = "",
    commands: Sequence[str] = (),
) -> Account:
    """The same from a problem and a schedule alone."""
    facts = Facts(budget=budget, solver=solver, commands=tuple(commands))
    return with_bound(account(problem, schedule, facts))


def with_bound(found: Account) -> Account:
    """With a proven bound, where none is known and one can be had quickly: for the budget, or else
    for the peak that the schedule has."""
    if found.facts.bound is not None or found.facts.optimal:
        return found
    memory = found.trace.peak if found.facts.budget is None else found.facts.budget
    if found.trace.peak > memory:
        return found
    bound = cost_bound(found.problem, memory, BOUND_LIMIT_S)
    return replace(found, facts=replace(found.facts, bound=bound))


def with_curve(found: Account, points: Sequence[Point]) -> Account:
    """With the trade-off: the best of the points, the schedule itself, and cutting the model into
    equal segments, which is shown beside it as well."""
    own = point_of(found.problem, found.schedule, found.facts.bound)
    equal = _in_segments(found.problem)
    curve = tuple(CurvePoint(p.peak, p.cost, p.bound) for p in envelope([*points, own, *equal]))
    segments = tuple(CurvePoint(p.peak, p.cost) for p in equal)
    return replace(found, facts=replace(found.facts, curve=curve, segments=segments))


def _in_segments(problem: Problem) -> tuple[Point, ...]:
    deadline = time.monotonic() + SEGMENTS_LIMIT_S
    tried = [point_of(problem, keep_all(problem))]
    for ops in segmentations(problem):
        tried.append(point_of(problem, Schedule(tuple(ops))))
        if time.monotonic() > deadline:
            break
    return envelope(tried)[:-1]  # the last is keep-all, which is no news


def with_measured(found: Account, measured: "StepMeasurement") -> Account:
    step = Step(measured.peak_bytes, measured.step_ns)
    return replace(found, facts=replace(found.facts, measured=step))


def with_verdict(found: Account, verdict: "Verdict") -> Account:
    """With what `verify` found: equal or not, predicted and measured."""
    if verdict.measured is not None:
        found = with_measured(found, verdict.measured)
    if verdict.predicted is not None:
        step = Step(verdict.predicted.peak_bytes, verdict.predicted.step_ns)
        found = replace(found, facts=replace(found.facts, predicted=step))
    text = str(verdict).partition("\npeak predicted")[0]
    sentence = f"Compared with the original model: {' '.join(text.split())}."
    return replace(found, facts=replace(found.facts, verified=sentence, equal=verdict.equal))


def explain_plan(plan: "Plan | StoredPlan", module: str | None = None) -> str:
    """What the plan saves and computes again, by module and why; or one module in a sentence."""
    from rekindle.report import explain, explain_module

    found = account_of(plan)
    return explain(found) if module is None else explain_module(found, module)


def report_plan(
    plan: "Plan | StoredPlan",
    path: Any,
    measured: "StepMeasurement | None" = None,
    time_limit_s: float = CURVE_LIMIT_S,
) -> Path:
    """Writes the page, with a trade-off curve searched for `time_limit_s` (0: none)."""
    from rekindle.report.html import write_page

    found = account_of(plan)
    if measured is not None:
        found = with_measured(found, measured)
    if time_limit_s > 0:
        found = with_curve(found, pareto(plan.problem, num_points=9, time_limit_s=time_limit_s))
    return write_page(found, path)


HOST_IS_SLOW = 1.1  # times the device's time
LOSS_MAKES = 2  # times the outputs, beside their gradients: cross-entropy, of what is common


def _advice(plan: "Plan") -> str:
    return "\n".join(filter(None, (_slow_host(plan), _loss_outside(plan))))


def _loss_outside(plan: "Plan") -> str:
    """That the caller's loss, which no plan counts, may need more than there is."""
    problem, loss = plan.problem, plan.problem.loss_op
    outputs = [plan.joint.outputs[t.output].meta["val"] for t in plan.joint.tangents]
    makes = LOSS_MAKES * sum(o.numel() * o.element_size() for o in outputs if o.dim())
    if loss is None or not makes:
        return ""
    memory = simulate(problem, plan.schedule).memory[plan.schedule.ops.index(loss)]
    limit = plan.peak_bytes if plan.budget_bytes is None else plan.budget_bytes
    if memory + makes <= limit:
        return ""
    return (
        f"The loss is outside the plan. One such as cross-entropy makes "
        f"{format.size(problem, makes)} for itself, which comes to "
        f"{format.size(problem, memory + makes)} then, with {format.size(problem, limit)} to "
        f"stay within: loss_fn= takes the loss into the plan."
    )


def _slow_host(plan: "Plan") -> str:
    """That a GPU waits for the host, where it does."""
    from rekindle.predict.predictor import Predictor

    if plan.profile.kind != "cuda" or plan.options.cuda_graph:
        return ""
    predictor = Predictor(plan.program, plan.profile, plan.problem)
    issued, done = predictor.stream_sums(plan.schedule)
    if issued <= HOST_IS_SLOW * done:
        return ""
    return (
        f"The host needs {issued / 1e6:.3g} ms to issue a step that the GPU runs in "
        f"{done / 1e6:.3g} ms: cuda_graph=True records the step and takes the difference away."
    )


def _made_for(plan: "Plan") -> tuple[tuple[str, str], ...]:
    import torch

    facts = [
        ("torch", torch.__version__),
        ("device", str(plan.joint.device)),
        ("costs", plan.profile.summary()),
    ]
    if plan.device_budget is not None:
        facts.append(("device budget", str(plan.device_budget)))
    return tuple(facts)


def _stored_for(plan: "StoredPlan") -> tuple[tuple[str, str], ...]:
    """What a plan file says of its making; files of other releases may say less."""
    said = (
        ("rekindle", "rekindle"),
        ("torch", "torch"),
        ("device", "device"),
        ("costs of", "costs_device"),
        ("seed", "seed"),
        ("saved by request", "save"),
        ("recomputed by request", "recompute"),
    )
    found = []
    for name, field in said:
        value = getattr(plan, field, None)
        if value not in (None, "", ()):
            found.append((name, ", ".join(value) if isinstance(value, tuple) else str(value)))
    return tuple(found)


def _call(plan: "Plan") -> str:
    options = plan.options
    solver = options.solver if isinstance(options.solver, str) else options.solver.name
    return (
        f"rekindle.plan(model, args, kwargs, budget={plan.budget_bytes}, solver={solver!r}, "
        f"time_limit_s={options.time_limit_s:g}, seed={options.seed}, profile={options.profile!r})"
    )


def command(arguments: Sequence[str]) -> str:
    """A command line as one would type it."""
    return shlex.join(["rekindle", *arguments])
