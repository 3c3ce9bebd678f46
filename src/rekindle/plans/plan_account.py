"""PlanRecord -> Account, the data of all reports.

`Plan.account` adds what only the captured model knows: the predicted step, advice, and all that the
plan was made for.
"""

import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rekindle.core import Problem, Schedule, Status, keep_all
from rekindle.plans.plan_record import PlanRecord
from rekindle.report import Account, CurvePoint, Facts, Step, account
from rekindle.solve.baselines import segmentations
from rekindle.solve.lower_bound import cost_bound
from rekindle.solve.pareto import Point, envelope, pareto, point_of

# A report is waited for: what takes longer than these is left out of it.
CURVE_LIMIT_S = 20.0
BOUND_LIMIT_S = 2.0
SEGMENTS_LIMIT_S = 2.0


def account_of(
    plan: PlanRecord,
    *,
    commands: Sequence[str] = (),
    made_for: tuple[tuple[str, str], ...] | None = None,
    predicted: Step | None = None,
    advice: str = "",
) -> Account:
    """The account of a plan. Without `made_for`, it is what a plan file says."""
    facts = Facts(
        budget=plan.budget_bytes,
        bound=plan.bound,
        optimal=plan.status is Status.OPTIMAL,
        solver=plan.solver,
        made_for=_made_for(plan) if made_for is None else made_for,
        predicted=predicted,
        commands=tuple(filter(None, (plan.provenance.made_by, *commands))),
        inputs=plan.provenance.inputs,
        residents=plan.provenance.residents,
        device=plan.provenance.costs_device,
        device_bytes=plan.provenance.device_bytes,
        advice=advice,
    )
    return with_bound(account(plan.problem, plan.schedule, facts))


def account_of_schedule(
    problem: Problem,
    schedule: Schedule,
    budget: int | None,
    solver: str = "",
    commands: Sequence[str] = (),
) -> Account:
    """The account of a problem and a schedule, without a plan."""
    facts = Facts(budget=budget, solver=solver, commands=tuple(commands))
    return with_bound(account(problem, schedule, facts))


def with_bound(found: Account) -> Account:
    """The account with a proven lower bound, if it has none and one can be computed in
    BOUND_LIMIT_S: for the budget, or else for the schedule's own peak."""
    if found.facts.bound is not None or found.facts.optimal:
        return found
    if found.schedule.transfers:  # the bound below is of recomputation alone
        return found
    memory = found.trace.peak if found.facts.budget is None else found.facts.budget
    # A bound holds for schedules within the budget; this one is not, so it says nothing about it.
    if found.trace.peak > memory:
        return found
    bound = cost_bound(found.problem, memory, BOUND_LIMIT_S)
    return replace(found, facts=replace(found.facts, bound=bound))


def with_curve(found: Account, points: Sequence[Point]) -> Account:
    """The account with a trade-off curve: the best of the given points, the schedule itself and
    checkpointing in equal segments. The latter is also a curve of its own."""
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
    return envelope(tried)[:-1]  # without the last point, which is keep-all


def with_step(
    found: Account, *, measured: Step | None = None, predicted: Step | None = None
) -> Account:
    """The account with a measured or predicted step; the other one stays."""
    facts = found.facts
    return replace(
        found,
        facts=replace(
            facts, measured=measured or facts.measured, predicted=predicted or facts.predicted
        ),
    )


def with_comparison(found: Account, comparison: str, *, equal: bool) -> Account:
    """The account with the result of `verify`."""
    sentence = f"Compared with the original model: {' '.join(comparison.split())}."
    return replace(found, facts=replace(found.facts, verified=sentence, equal=equal))


def write_report(found: Account, path: Any, time_limit_s: float = CURVE_LIMIT_S) -> Path:
    """Writes the HTML report, with a trade-off curve searched for `time_limit_s` (0: none)."""
    # jinja2 is slow to import, and most accounts are only printed.
    from rekindle.report.html import write_page

    if time_limit_s > 0:
        found = with_curve(found, pareto(found.problem, num_points=9, time_limit_s=time_limit_s))
    return write_page(found, path)


def _made_for(plan: PlanRecord) -> tuple[tuple[str, str], ...]:
    """What a plan file says it was made with."""
    made, options = plan.provenance, plan.options
    rows = (
        ("rekindle", made.rekindle),
        ("torch", made.torch),
        ("device", made.device),
        ("costs of", made.costs_device),
        ("seed", str(options.seed)),
        ("saved by request", ", ".join(options.save)),
        ("recomputed by request", ", ".join(options.recompute)),
    )
    return tuple((name, text) for name, text in rows if text)


def command(arguments: Sequence[str]) -> str:
    """A command line, quoted for a shell."""
    return shlex.join(["rekindle", *arguments])
