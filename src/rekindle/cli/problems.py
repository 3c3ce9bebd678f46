"""`solve`, `check` and `solvers`: the commands over problem and schedule files."""

import argparse
import math
import os
from pathlib import Path
from typing import Any

from rekindle.cli import printing
from rekindle.cli.exit_codes import ExitCode
from rekindle.cli.progress import shown
from rekindle.cli.transfer_options import (
    add_transfer_options,
    improved,
    solver_seconds,
    step_name,
    transfer_lines,
    transfer_record,
    with_link,
)
from rekindle.core import (
    Problem,
    Schedule,
    Solution,
    Status,
    Trace,
    gap_sentence,
    keep_all,
    parse_budget,
    read_problem,
    read_schedule,
    simulate,
    write_schedule,
)
from rekindle.core.files import problem_from_record, read_json
from rekindle.errors import FileError, InvalidSchedule
from rekindle.plans.plan_files import FORMAT as PLAN_FORMAT
from rekindle.report import Facts, account, verdict
from rekindle.solve import SOLVERS, default_solver, find_solver
from rekindle.solve.base import unavailable
from rekindle.solve.constraints import Wishes, run_with_wishes, smallest_with_wishes, wishes_of
from rekindle.solve.pareto import pareto

SMALLEST_PEAK_LIMIT_S = 5.0  # for the number that answers a budget which cannot be met
MAX_SEED = 2**31 - 1  # what every solver library takes


def add_commands(commands: Any) -> None:
    solve = commands.add_parser(
        "solve",
        help="find a schedule of a problem within a budget",
        description="Finds a schedule within the budget, at the smallest cost the solver can find.",
        allow_abbrev=False,
    )
    solve.add_argument("problem", metavar="PROBLEM.json")
    solve.add_argument("--budget", required=True, metavar="B", help=BUDGET_HELP)
    solve.add_argument("--solver", metavar="NAME", help="see `rekindle solvers`")
    solve.add_argument("--time-limit", type=seconds, default=60.0, metavar="S", help="default 60")
    solve.add_argument("--seed", type=seed, default=0, metavar="N", help="default 0")
    solve.add_argument("-o", "--output", metavar="SCHEDULE.json", help="where to write it")
    add_wishes(solve)
    add_transfer_options(solve)
    solve.add_argument("--json", action="store_true", help="print one JSON object")
    solve.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    solve.set_defaults(run=run_solve)

    curve = commands.add_parser(
        "pareto",
        help="what each amount of memory costs in time",
        description="Finds the trade-off between memory and time from one shared search.",
        allow_abbrev=False,
    )
    curve.add_argument("problem", metavar="PROBLEM.json|PLAN.json")
    curve.add_argument("--points", type=points, default=12, metavar="N", help="default 12")
    curve.add_argument("--time-limit", type=seconds, default=60.0, metavar="S", help="default 60")
    curve.add_argument("--seed", type=seed, default=0, metavar="N", help="default 0")
    curve.add_argument("--json", action="store_true", help="print one JSON object")
    curve.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    curve.set_defaults(run=run_pareto)

    check = commands.add_parser(
        "check",
        help="check and simulate a schedule",
        description="Checks that a schedule can be executed, and simulates its peak and cost.",
        allow_abbrev=False,
    )
    check.add_argument("problem", metavar="PROBLEM.json")
    check.add_argument("schedule", metavar="SCHEDULE.json")
    check.add_argument("--budget", metavar="B", help=BUDGET_HELP)
    add_transfer_options(check)
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.set_defaults(run=run_check)

    solvers = commands.add_parser(
        "solvers", help="list the solvers, in order of preference", allow_abbrev=False
    )
    solvers.add_argument("--json", action="store_true", help="print one JSON object")
    solvers.set_defaults(run=run_solvers)


def add_wishes(parser: argparse.ArgumentParser) -> None:
    """A user's own word on what is saved and what is recomputed."""
    group = parser.add_argument_group(
        "your own word",
        'patterns of module paths ("blocks.*.mlp"), ops ("aten.mm*") or both ("blocks.*::mm"); '
        "each option may be given several times",
    )
    for name, help_text in (
        ("--save", "ops that run no more than once"),
        ("--recompute", "ops whose results are not kept for the backward"),
    ):
        group.add_argument(name, metavar="PATTERN", action="append", default=[], help=help_text)


BUDGET_HELP = (
    "bytes as a whole number, a size such as 8GiB or 8GB, or a fraction of the keep-all peak "
    "with a point, such as 0.5"
)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds above 0")
    return value


def seed(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 10 or int(text) > MAX_SEED:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number, 0 to {MAX_SEED}")
    return int(text)


def points(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 2 <= int(text[:9]) <= 1000:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number, 2 to 1000")
    return int(text)


def run_pareto(arguments: argparse.Namespace) -> ExitCode:
    problem = problem_in(read_json(arguments.problem), arguments.problem)
    base = simulate(problem, keep_all(problem))
    with shown(problem, quiet=arguments.quiet or arguments.json):
        curve = pareto(
            problem,
            num_points=arguments.points,
            time_limit_s=arguments.time_limit,
            seed=arguments.seed,
        )
    if arguments.json:
        printing.print_json(
            {
                "problem": problem.name,
                "keep_all_peak": base.peak,
                "keep_all_cost": base.cost,
                "size_unit": problem.size_unit,
                "cost_unit": problem.cost_unit,
                "points": [
                    {
                        "peak": point.peak,
                        "cost": point.cost,
                        "overhead": printing.overhead(point.cost, base.cost),
                        "bound": point.bound,
                        "gap": gap_sentence(point.cost, point.bound),
                        "ops": list(point.schedule.ops),
                    }
                    for point in curve
                ],
            }
        )
        return ExitCode.DONE
    rows = [
        (
            printing.size(problem, point.peak),
            percent_of(point.peak, base.peak),
            f"{100 * printing.overhead(point.cost, base.cost):+.2f} %",
            ""
            if point.bound is None
            else f"{100 * printing.overhead(point.bound, base.cost):+.2f} %",
            gap_sentence(point.cost, point.bound),
        )
        for point in reversed(curve)
    ]
    print(printing.table(("peak", "of keep-all", "extra time", "proven at least", ""), rows))
    return ExitCode.DONE


def problem_in(record: Any, path: str) -> Problem:
    """The problem that a problem file is, or that a plan file holds."""
    if isinstance(record, dict) and record.get("format") == PLAN_FORMAT:
        return problem_from_record(record.get("problem"), f"{path}: problem")
    return problem_from_record(record, path)


def run_solve(arguments: argparse.Namespace) -> ExitCode:
    problem = with_link(read_problem(arguments.problem), arguments)
    base = simulate(problem, keep_all(problem))
    budget = parse_budget(arguments.budget, base.peak)
    solver = find_solver(arguments.solver) if arguments.solver else default_solver(problem)
    if arguments.output is not None:
        check_writable(arguments.output)
    wishes = wishes_of(arguments.save, arguments.recompute)
    with shown(problem, quiet=arguments.quiet):
        solution = run_with_wishes(
            solver,
            problem,
            budget,
            wishes,
            time_limit_s=solver_seconds(problem, arguments),
            seed=arguments.seed,
        )
        solution = improved(solver, problem, budget, solution, wishes, arguments)
    record = _solve_record(problem, budget, base, solution)
    if solution.schedule is not None:
        if arguments.output is not None:
            write_schedule(
                arguments.output, problem, solution.schedule, solution.solver, solution.seed
            )
    elif solution.status is not Status.ERROR:
        smallest = _smallest(problem, solution, arguments.time_limit, wishes)
        record["smallest_peak"] = smallest
    if arguments.json:
        printing.print_json(record)
    else:
        print(_solve_text(problem, arguments, record, solution))
    if solution.schedule is not None:
        return ExitCode.DONE
    return ExitCode.USAGE if solution.status is Status.ERROR else ExitCode.INFEASIBLE


def check_writable(path: str) -> None:
    """Before the solver starts: minutes of work must not end at a folder that is not there."""
    folder = Path(path).parent
    if Path(path).is_dir():
        raise FileError(f"{path} is a folder; give the name of a file to write")
    if not folder.is_dir():
        raise FileError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise FileError(f"{path} cannot be written: the folder {folder} is read-only")


def _smallest(problem: Problem, solution: Solution, time_limit_s: float, wishes: Wishes) -> int:
    """The smallest peak that the solver, or else the baselines in a few seconds, can reach."""
    found = smallest_with_wishes(problem, wishes, min(SMALLEST_PEAK_LIMIT_S, time_limit_s))
    peak = simulate(problem, found).peak
    if solution.smallest is not None:
        peak = min(peak, simulate(problem, solution.smallest).peak)
    return peak


def _solve_record(problem: Problem, budget: int, base: Trace, solution: Solution) -> dict[str, Any]:
    trace = None if solution.schedule is None else simulate(problem, solution.schedule)
    return {
        "problem": problem.name,
        "status": solution.status.name,
        "message": solution.message,
        "solver": solution.solver,
        "seed": solution.seed,
        "budget": budget,
        "peak": trace and trace.peak,
        "cost": trace and trace.cost,
        "overhead": trace and printing.overhead(trace.cost, base.cost),
        "bound": solution.bound,
        "gap": trace and gap_sentence(trace.cost, solution.bound),
        "keep_all_peak": base.peak,
        "keep_all_cost": base.cost,
        "num_recomputed": trace and trace.num_recomputed,
        "smallest_peak": None,
        "size_unit": problem.size_unit,
        "cost_unit": problem.cost_unit,
        "wall_s": round(solution.wall_s, 6),
        "stopped_by": solution.stopped_by,
        "notes": list(solution.notes),
        **transfer_record(problem, solution.schedule, trace),
    }


def _solve_text(
    problem: Problem, arguments: argparse.Namespace, record: dict[str, Any], solution: Solution
) -> str:
    base_peak = record["keep_all_peak"]

    def peak(amount: int) -> str:
        share = f", {percent_of(amount, base_peak)} of keep-all"
        return f"{printing.size(problem, amount)} ({amount}{share})"

    lines = []
    if solution.schedule is not None:
        facts = Facts(
            budget=record["budget"],
            bound=solution.bound,
            optimal=solution.status is Status.OPTIMAL,
        )
        lines.append(verdict(account(problem, solution.schedule, facts)))
    lines += [
        f"problem   {problem.name or arguments.problem}: {len(problem.ops)} ops, "
        f"{len(problem.values)} values",
        f"keep-all  peak {printing.size(problem, base_peak)}, "
        f"cost {printing.cost(problem, record['keep_all_cost'])}",
        f"budget    {peak(record['budget'])}",
        f"answer    {record['status']}: {solution.status.value}, by {solution.solver} "
        f"in {solution.wall_s:.2f} s{_ended(solution)}",
    ]
    if solution.message:
        lines.append(f"          {solution.message}")
    if record["smallest_peak"] is not None:
        lines.append(f"          the smallest peak found is {peak(record['smallest_peak'])}")
        if record["smallest_peak"] <= record["budget"]:
            lines.append("          so another solver can do it: see `rekindle solvers`")
    if solution.schedule is not None:
        lines.append(f"peak      {peak(record['peak'])}")
        lines.append(
            f"cost      {printing.cost(problem, record['cost'])} "
            f"({100 * record['overhead']:+.2f} %), {record['num_recomputed']} ops run again"
        )
        lines += transfer_lines(problem, record)
        if record["bound"] is not None:
            lines.append(
                f"bound     {printing.cost(problem, record['bound'])}: no schedule costs less"
            )
        lines.append(f"          {record['gap']}")
        if arguments.output is not None:
            lines.append(f"written   {arguments.output}")
    lines.extend(f"note      {note}" for note in solution.notes)
    return "\n".join(lines)


def percent_of(amount: int, whole: int) -> str:
    return printing.percent(amount / whole) if whole else "-"


def _ended(solution: Solution) -> str:
    return f", ended by {solution.stopped_by}" if solution.stopped_by else ""


def run_check(arguments: argparse.Namespace) -> ExitCode:
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
    return ExitCode.DONE if good else ExitCode.NO


def _check_text(problem: Problem, schedule: Schedule, record: dict[str, Any]) -> str:
    if not record["valid"]:
        return f"invalid   {record['message']}"
    peak = record["peak"]
    where = ""
    if record["peak_step"] >= 0:
        step = record["peak_step"]
        where = f", first at step {step} ({step_name(problem, schedule, step)})"
    lines = [
        f"valid     {record['num_steps']} steps, {record['num_recomputed']} ops run again",
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
    records = [
        {
            "name": solver.name,
            "exact": solver.exact,
            "available": (reason := unavailable(solver)) is None,
            "requires": list(solver.requires),
            "message": reason or "",
        }
        for solver in SOLVERS
    ]
    if arguments.json:
        printing.print_json({"solvers": records})
        return ExitCode.DONE
    rows = [
        (
            str(record["name"]),
            "proves" if record["exact"] else "searches",
            "ready" if record["available"] else str(record["message"]),
        )
        for record in records
    ]
    print(printing.table(("solver", "kind", "state"), rows, left=3))
    return ExitCode.DONE
