"""`explain`, `report` and `export`: views of a plan, or of a problem and a schedule.

All three read a plan file, or a problem file and a schedule file. A problem file alone means its
keep-all schedule.
"""

import argparse
from pathlib import Path
from typing import Any

from rekindle.cli import printing
from rekindle.cli.arguments import (
    BUDGET_HELP,
    JSON_HELP,
    QUIET_HELP,
    check_writable,
    points,
    seconds,
)
from rekindle.cli.exit_codes import ExitCode
from rekindle.core import keep_all, parse_budget, simulate
from rekindle.core.disk import read_json, write_bytes, write_json
from rekindle.core.files import problem_from_record, schedule_from_record
from rekindle.errors import RekindleError
from rekindle.planning_progress import shown_on_stderr
from rekindle.plans.plan_account import (
    CURVE_LIMIT_S,
    account_of,
    account_of_schedule,
    command,
    with_comparison,
    with_curve,
    with_step,
)
from rekindle.plans.plan_files import FORMAT as PLAN_FORMAT
from rekindle.plans.plan_files import plan_from_json
from rekindle.plans.plan_record import PlanRecord
from rekindle.report import Account, Step, explain, explain_module, verdict
from rekindle.report.exports import chrome_trace, snapshot_bytes
from rekindle.report.text import explain_record
from rekindle.solve.pareto import pareto

_SUFFIXES = {"memory-viz": ".pickle", "chrome-trace": ".trace.json"}


def add_commands(commands: Any) -> None:
    """`rekindle explain`, `report` and `export`."""
    # `explain`, without the underscore, is the function that is imported above.
    explain_ = commands.add_parser(
        "explain",
        help="show what is saved and recomputed, by module, and why",
        description="Shows what a plan saves for the backward and what it recomputes, by module, "
        "and why, and what is alive at the peak. Identical layers share a line.",
        allow_abbrev=False,
    )
    _inputs(explain_)
    explain_.add_argument(
        "--module", metavar="PATH", help="describe this module only, in one sentence"
    )
    explain_.set_defaults(run=run_explain)

    report = commands.add_parser(
        "report",
        help="write an HTML report",
        description="Writes one self-contained HTML page: memory over the step, the trade-off "
        "between memory and time, what is alive at the peak, and the table by module.",
        allow_abbrev=False,
    )
    _inputs(report)
    report.add_argument(
        "-o", "--output", metavar="FILE.html", default="report.html", help="default report.html"
    )
    report.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="also run the plan on its model: measure a step and compare it with the original",
    )
    report.add_argument(
        "--time-limit",
        type=seconds,
        default=CURVE_LIMIT_S,
        metavar="S",
        help="seconds for the trade-off curve (default 20)",
    )
    report.add_argument(
        "--points", type=points, default=9, metavar="N", help="points of the curve (default 9)"
    )
    report.add_argument("--no-curve", action="store_true", help="leave the trade-off curve out")
    report.add_argument("-q", "--quiet", action="store_true", help=QUIET_HELP)
    report.set_defaults(run=run_report)

    export = commands.add_parser(
        "export",
        help="write the step for PyTorch's memory_viz or for Perfetto",
        description="Writes the simulated step in another tool's format. memory-viz: a PyTorch "
        "memory snapshot, for pytorch.org/memory_viz. chrome-trace: JSON for ui.perfetto.dev or "
        "chrome://tracing.",
        allow_abbrev=False,
    )
    _inputs(export)
    export.add_argument("--format", required=True, choices=tuple(_SUFFIXES))
    export.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="default: the name of the input with the suffix of the format",
    )
    export.set_defaults(run=run_export)


def _inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="PLAN.json|PROBLEM.json")
    parser.add_argument(
        "schedule", nargs="?", metavar="SCHEDULE.json", help="only with a problem file"
    )
    parser.add_argument("--budget", metavar="B", help=f"only with a problem file: {BUDGET_HELP}")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def run_explain(arguments: argparse.Namespace) -> ExitCode:
    """Prints what is saved and recomputed, by module."""
    found, _ = read_account(arguments)
    if arguments.module is not None:
        sentence = explain_module(found, arguments.module)
        if arguments.json:
            printing.print_json({"module": arguments.module, "sentence": sentence})
        else:
            print(sentence)
    elif arguments.json:
        printing.print_json(explain_record(found))
    else:
        print(explain(found))
    return ExitCode.DONE


def run_report(arguments: argparse.Namespace) -> ExitCode:
    """Writes the HTML page, with a measured step and a trade-off curve where they are wanted."""
    from rekindle.report.html import write_page  # jinja2: only this command needs it

    check_writable(arguments.output)
    found, plan = read_account(arguments)
    if arguments.model is not None:
        if plan is None:
            raise RekindleError(
                f"{arguments.input} is a problem file, and --model needs a plan file; make one "
                "with `rekindle plan`"
            )
        found = _measured(found, plan, arguments)
    if not arguments.no_curve:
        with shown_on_stderr(found.problem, quiet=arguments.quiet or arguments.json):
            curve = pareto(
                found.problem, num_points=arguments.points, time_limit_s=arguments.time_limit
            )
        found = with_curve(found, curve)
    path = write_page(found, arguments.output)
    if arguments.json:
        printing.print_json({**found.record(), "verdict": verdict(found), "report": str(path)})
    else:
        print(verdict(found))
        print(f"written to {path}")
    # None, without --model, is no failure.
    return ExitCode.CHECK_FAILED if found.facts.equal is False else ExitCode.DONE


def _measured(found: Account, plan: PlanRecord, arguments: argparse.Namespace) -> Account:
    from rekindle.cli.models import load_sample
    from rekindle.plan_object import Plan
    from rekindle.verification import verify

    model, args, kwargs = load_sample(arguments.model)
    managed = Plan(plan).apply(model, args, kwargs, on_miss="raise")
    answer = verify(model, managed, args, kwargs, costs=True)
    predicted, measured = answer.predicted, answer.measured
    assert predicted is not None
    assert measured is not None
    found = with_step(
        found,
        measured=Step(measured.peak_bytes, measured.step_ns),
        predicted=Step(predicted.peak_bytes, predicted.step_ns),
    )
    return with_comparison(found, answer.comparison, equal=answer.equal)


def run_export(arguments: argparse.Namespace) -> ExitCode:
    """Writes the simulated step in another tool's format."""
    output = arguments.output or f"{Path(arguments.input).stem}{_SUFFIXES[arguments.format]}"
    check_writable(output)
    found, _ = read_account(arguments)
    # memory_viz reads only pickles; `snapshot_bytes` writes plain lists and dicts.
    if arguments.format == "memory-viz":
        write_bytes(output, snapshot_bytes(found))
        where = "open it at pytorch.org/memory_viz"
    else:
        write_json(output, chrome_trace(found))
        where = "open it at ui.perfetto.dev or chrome://tracing"
    if arguments.json:
        printing.print_json({**found.record(), "format": arguments.format, "output": output})
    else:
        print(verdict(found))
        print(f"written to {output}: {where}")
    return ExitCode.DONE


def read_account(arguments: argparse.Namespace) -> tuple[Account, PlanRecord | None]:
    """The account of a plan file, and its record; or of a problem and a schedule, and None."""
    record = read_json(arguments.input)
    commands = [command(arguments.argv)]  # shown in the report: what made it
    if isinstance(record, dict) and record.get("format") == PLAN_FORMAT:
        if arguments.schedule is not None or arguments.budget is not None:
            raise RekindleError(
                f"{arguments.input} is a plan file, which has its own schedule and budget; give it "
                "without a schedule and without --budget"
            )
        plan = plan_from_json(record, arguments.input)
        return account_of(plan, commands=commands), plan
    problem = problem_from_record(record, arguments.input)
    # The solver's name is optional in a schedule file.
    schedule, solver = keep_all(problem), "keep-all"
    if arguments.schedule is not None:
        given = read_json(arguments.schedule)
        schedule = schedule_from_record(given, problem, arguments.schedule)
        solver = str(given.get("solver", ""))
    budget = None
    if arguments.budget is not None:
        budget = parse_budget(arguments.budget, simulate(problem, keep_all(problem)).peak)
    return account_of_schedule(problem, schedule, budget, solver, commands), None
