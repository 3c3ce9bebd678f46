"""`check` and `solvers`: what a schedule needs, and the solvers that find one."""

import argparse
from dataclasses import asdict
from typing import Any

from rekindle.cli import printing
from rekindle.cli.arguments import BUDGET_HELP, JSON_HELP
from rekindle.cli.exit_codes import ExitCode
from rekindle.cli.problems import percent_of
from rekindle.cli.transfer_options import (
    add_transfer_options,
    step_name,
    transfer_lines,
    transfer_record,
    with_link,
)
from rekindle.core import (
    Problem,
    Schedule,
    keep_all,
    parse_budget,
    read_problem,
    read_schedule,
    simulate,
)
from rekindle.errors import InvalidSchedule
from rekindle.solve import SOLVERS
from rekindle.solve.base import unavailable
from rekindle.solve.origins import ORIGINS, UNKNOWN


def add_commands(commands: Any) -> None:
    """The parsers of `check` and `solvers`."""
    check = commands.add_parser(
        "check",
        help="check and simulate a schedule",
        description="Checks that a schedule can be executed and simulates its peak and cost. Exit "
        "code 1 if it cannot be executed or its peak is above the budget.",
        allow_abbrev=False,
    )
    check.add_argument("problem", metavar="PROBLEM.json")
    check.add_argument("schedule", metavar="SCHEDULE.json")
    check.add_argument("--budget", metavar="B", help=BUDGET_HELP)
    add_transfer_options(check)
    check.add_argument("--json", action="store_true", help=JSON_HELP)
    check.set_defaults(run=run_check)

    solvers = commands.add_parser(
        "solvers",
        help="list the solvers, in order of preference",
        description="Lists the solvers in order of preference, and what to install for each.",
        allow_abbrev=False,
    )
    solvers.add_argument("--json", action="store_true", help=JSON_HELP)
    solvers.set_defaults(run=run_solvers)


def run_check(arguments: argparse.Namespace) -> ExitCode:
    """Simulates a schedule and prints what it needs."""
    problem = with_link(read_problem(arguments.problem), arguments)
    schedule = read_schedule(arguments.schedule, problem)
    base = simulate(problem, keep_all(problem))
    budget = None if arguments.budget is None else parse_budget(arguments.budget, base.peak)
    record: dict[str, Any] = {
        "problem": problem.name,
        "valid": True,
        "message": "",
        "budget": budget,
        "within_budget": None,
        "peak": None,
        "peak_step": None,
        "cost": None,
        "overhead": None,
        "num_recomputed": None,
        "num_steps": len(schedule),
        "keep_all_peak": base.peak,
        "keep_all_cost": base.cost,
        "size_unit": problem.size_unit,
        "cost_unit": problem.cost_unit,
    }
    # An invalid schedule is the answer of `check`, not an error: it has exit code 1 and a record.
    try:
        trace = simulate(problem, schedule)
    except InvalidSchedule as error:
        record |= {"valid": False, "message": str(error)}
    else:
        record |= {
            "within_budget": None if budget is None else trace.peak <= budget,
            "peak": trace.peak,
            "peak_step": trace.peak_step,
            "cost": trace.cost,
            "overhead": printing.overhead(trace.cost, base.cost),
            "num_recomputed": trace.num_recomputed,
            **transfer_record(problem, schedule, trace),
        }
    if arguments.json:
        printing.print_json(record)
    else:
        print(_check_text(problem, schedule, record))
    good = record["valid"] and record["within_budget"] is not False
    return ExitCode.DONE if good else ExitCode.CHECK_FAILED


def _check_text(problem: Problem, schedule: Schedule, record: dict[str, Any]) -> str:
    if not record["valid"]:
        return f"invalid   {record['message']}"
    peak = record["peak"]
    where = ""
    if record["peak_step"] >= 0:  # -1: the schedule is empty
        step = record["peak_step"]
        where = f", first at step {step} ({step_name(problem, schedule, step)})"
    lines = [
        f"valid     {record['num_steps']} steps, {record['num_recomputed']} ops recomputed",
        f"peak      {printing.size(problem, peak)} "
        f"({peak}, {percent_of(peak, record['keep_all_peak'])} of keep-all{where})",
        f"cost      {printing.cost(problem, record['cost'])} ({100 * record['overhead']:+.2f} %)",
        *transfer_lines(problem, record),
    ]
    if record["budget"] is not None:
        verdict = "within" if record["within_budget"] else "over"
        lines.append(f"budget    {verdict} {record['budget']}")
    return "\n".join(lines)


def run_solvers(arguments: argparse.Namespace) -> ExitCode:
    """Lists the solvers and whether each can run here."""
    records = [
        {
            "name": solver.name,
            "exact": solver.exact,
            # Probed without importing: solver libraries are slow to load.
            "available": (reason := unavailable(solver)) is None,
            "requires": list(solver.requires),
            "message": reason or "",
            **asdict(ORIGINS.get(solver.name, UNKNOWN)),
        }
        for solver in SOLVERS
    ]
    if arguments.json:
        printing.print_json({"solvers": records})
        return ExitCode.DONE
    rows = [
        (
            str(record["name"]),
            "exact" if record["exact"] else "heuristic",
            "available" if record["available"] else str(record["message"]),
            str(record["paper"]),
        )
        for record in records
    ]
    print(printing.table(("solver", "kind", "state", "from"), rows, left=4))
    return ExitCode.DONE
