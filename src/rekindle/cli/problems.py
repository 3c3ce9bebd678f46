"""`solve` and `pareto`: the commands that search, and need no model and no torch.

They read problem files, plan files and schedule files. Sizes and costs are printed in the units of
the problem; JSON records have the plain integers and name the units beside them.
"""

import argparse
from dataclasses import replace
from typing import Any

from rekindle.cli import printing
from rekindle.cli.arguments import (
    BUDGET_HELP,
    GAP_HELP,
    JSON_HELP,
    QUIET_HELP,
    SEED_HELP,
    TIME_LIMIT_HELP,
    add_save_and_recompute,
    check_writable,
    points,
    seconds,
    seed,
    share,
)
from rekindle.cli.exit_codes import ExitCode
from rekindle.cli.transfer_options import (
    add_transfer_options,
    improved,
    solver_seconds,
    transfer_lines,
    transfer_record,
    with_link,
)
from rekindle.core import (
    MIN_BUDGET,
    Problem,
    Solution,
    Status,
    Trace,
    gap_sentence,
    keep_all,
    parse_budget,
    read_problem,
    simulate,
    write_schedule,
)
from rekindle.core.disk import read_json
from rekindle.core.files import problem_from_record
from rekindle.planning_progress import shown_on_stderr
from rekindle.plans.plan_files import FORMAT as PLAN_FORMAT
from rekindle.report import Facts, account, verdict
from rekindle.solve import default_solver, find_solver
from rekindle.solve.constraints import (
    Constraints,
    constrained_min_budget,
    parse_constraints,
    run_constrained,
)
from rekindle.solve.deadline import TimeLeft
from rekindle.solve.pareto import pareto
from rekindle.solve.registry import with_gap

# Time for the smallest peak that is printed where the budget is infeasible. It comes on top of the
# solver's own limit, which is used up by then.
SMALLEST_PEAK_LIMIT_S = 5.0


def add_commands(commands: Any) -> None:
    """`rekindle solve`, `pareto`, `check` and `solvers`: the commands that work without torch."""
    solve = commands.add_parser(
        "solve",
        help="find a schedule for a problem within a budget",
        description="Finds the cheapest schedule whose simulated peak is within the budget.",
        allow_abbrev=False,
    )
    solve.add_argument("problem", metavar="PROBLEM.json")
    solve.add_argument("--budget", required=True, metavar="B", help=BUDGET_HELP)
    solve.add_argument("--solver", metavar="NAME", help="as listed by `rekindle solvers`")
    solve.add_argument(
        "--time-limit", type=seconds, default=60.0, metavar="S", help=TIME_LIMIT_HELP
    )
    solve.add_argument("--gap", type=share, metavar="G", help=GAP_HELP)
    solve.add_argument("--seed", type=seed, default=0, metavar="N", help=SEED_HELP)
    solve.add_argument("-o", "--output", metavar="SCHEDULE.json", help="write the schedule to")
    add_save_and_recompute(solve)
    add_transfer_options(solve)
    solve.add_argument("--json", action="store_true", help=JSON_HELP)
    solve.add_argument("-q", "--quiet", action="store_true", help=QUIET_HELP)
    solve.set_defaults(run=run_solve)

    curve = commands.add_parser(
        "pareto",
        help="compute the trade-off between memory and time",
        description="Computes the Pareto front of peak memory and cost, from the smallest peak to "
        "keep-all, in one shared search.",
        allow_abbrev=False,
    )
    curve.add_argument("problem", metavar="PROBLEM.json|PLAN.json")
    curve.add_argument("--points", type=points, default=12, metavar="N", help="points (default 12)")
    curve.add_argument(
        "--time-limit", type=seconds, default=60.0, metavar="S", help=TIME_LIMIT_HELP
    )
    curve.add_argument("--seed", type=seed, default=0, metavar="N", help=SEED_HELP)
    curve.add_argument("--json", action="store_true", help=JSON_HELP)
    curve.add_argument("-q", "--quiet", action="store_true", help=QUIET_HELP)
    curve.set_defaults(run=run_pareto)


def run_pareto(arguments: argparse.Namespace) -> ExitCode:
    """Prints the trade-off between peak and cost."""
    problem = problem_of_record(read_json(arguments.problem), arguments.problem)
    base = simulate(problem, keep_all(problem))
    with shown_on_stderr(problem, quiet=arguments.quiet or arguments.json):
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
        for point in reversed(curve)  # from keep-all to the smallest peak
    ]
    print(printing.table(("peak", "of keep-all", "overhead", "lower bound", ""), rows))
    return ExitCode.DONE


def problem_of_record(record: Any, path: str) -> Problem:
    """The problem of a problem file or of a plan file."""
    if isinstance(record, dict) and record.get("format") == PLAN_FORMAT:
        return problem_from_record(record.get("problem"), f"{path}: problem")
    return problem_from_record(record, path)


def run_solve(arguments: argparse.Namespace) -> ExitCode:
    """Solves a problem within a budget; writes the schedule, if a path was given."""
    problem = with_link(read_problem(arguments.problem), arguments)
    base = simulate(problem, keep_all(problem))
    wants_smallest = arguments.budget == MIN_BUDGET
    budget = 0 if wants_smallest else parse_budget(arguments.budget, base.peak)
    solver = find_solver(arguments.solver) if arguments.solver else default_solver(problem)
    if arguments.gap is not None:
        solver = with_gap(solver, arguments.gap)
    # Everything that can be wrong with the arguments is checked before minutes of solving.
    if arguments.output is not None:
        check_writable(arguments.output)
    constraints = parse_constraints(arguments.save, arguments.recompute)
    with shown_on_stderr(problem, quiet=arguments.quiet):
        left = TimeLeft(solver_seconds(problem, arguments))
        smallest = None
        if wants_smallest:
            smallest = constrained_min_budget(problem, constraints, left() / 2)
            budget = simulate(problem, smallest).peak
        solution = run_constrained(
            solver,
            problem,
            budget,
            constraints,
            time_limit_s=left(),
            seed=arguments.seed,
            warm_start=smallest,
        )
        if smallest is not None and solution.schedule is None:  # not every solver starts from it
            solution = replace(solution, status=Status.FEASIBLE, schedule=smallest, smallest=None)
        solution = improved(solver, problem, budget, solution, constraints, arguments)
    record = _solve_record(problem, budget, base, solution)
    if solution.schedule is not None:
        if arguments.output is not None:
            write_schedule(
                arguments.output, problem, solution.schedule, solution.solver, solution.seed
            )
    # After an error nothing is known about the problem, so no smallest peak is searched.
    elif solution.status is not Status.ERROR:
        record["smallest_peak"] = _smallest(problem, solution, arguments.time_limit, constraints)
    if arguments.json:
        printing.print_json(record)
    else:
        print(_solve_text(problem, arguments, record, solution))
    if solution.schedule is not None:
        return ExitCode.DONE
    # TIME_LIMIT counts as infeasible: in both cases no schedule within the budget was found.
    return ExitCode.USAGE if solution.status is Status.ERROR else ExitCode.INFEASIBLE


def _smallest(
    problem: Problem, solution: Solution, time_limit_s: float, constraints: Constraints
) -> int:
    """The smallest peak found: by the solver, or by the baselines in a few seconds."""
    found = constrained_min_budget(problem, constraints, min(SMALLEST_PEAK_LIMIT_S, time_limit_s))
    peak = simulate(problem, found).peak
    if solution.smallest is not None:
        peak = min(peak, simulate(problem, solution.smallest).peak)
    return peak


def _solve_record(problem: Problem, budget: int, base: Trace, solution: Solution) -> dict[str, Any]:
    trace = None if solution.schedule is None else simulate(problem, solution.schedule)
    # `trace and ...`: null where there is no schedule. All keys are always there, so that scripts
    # need no default.
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
        "wall_s": round(solution.wall_s, 6),  # of the solver alone, without reading files
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
        f"result    {record['status']}: {solution.status.value}, by {solution.solver} "
        f"in {solution.wall_s:.2f} s{_ended(solution)}",
    ]
    if solution.message:
        lines.append(f"          {solution.message}")
    if record["smallest_peak"] is not None:
        lines.append(f"          the smallest peak found is {peak(record['smallest_peak'])}")
        if record["smallest_peak"] <= record["budget"]:
            lines.append("          which is within the budget: try another --solver")
    if solution.schedule is not None:
        lines.append(f"peak      {peak(record['peak'])}")
        lines.append(
            f"cost      {printing.cost(problem, record['cost'])} "
            f"({100 * record['overhead']:+.2f} %), {record['num_recomputed']} ops recomputed"
        )
        lines += transfer_lines(problem, record)
        if record["bound"] is not None:
            bound = printing.cost(problem, record["bound"])
            lines.append(f"bound     {bound}: proven lower bound on the cost")
        lines.append(f"          {record['gap']}")
        if arguments.output is not None:
            lines.append(f"written   {arguments.output}")
    # Each method that contributed says in a note what it found.
    lines.extend(f"note      {note}" for note in solution.notes)
    return "\n".join(lines)


def percent_of(amount: int, whole: int) -> str:
    """A share, as a percentage."""
    return printing.percent(amount / whole) if whole else "-"  # a problem without memory


def _ended(solution: Solution) -> str:
    return f", ended by {solution.stopped_by}" if solution.stopped_by else ""
