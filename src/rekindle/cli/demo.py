"""`demo`: trains a small GPT at several budgets; with `--graph`, solves a bundled training graph at
several budgets, which needs no torch."""

import argparse
from typing import Any

from rekindle.cli import printing
from rekindle.cli.arguments import JSON_HELP, check_writable, steps
from rekindle.cli.exit_codes import ExitCode
from rekindle.core import Problem, Solution, Trace, keep_all, parse_budget, simulate
from rekindle.core.generate import transformer
from rekindle.planning_progress import shown_on_stderr
from rekindle.solve import default_solver, run_solver
from rekindle.solve.min_budget import min_budget

BUDGETS = ("1.0", "0.9", "0.8", "0.7", "0.6", "0.5", "0.4", "0.3", "0.2")
TIME_LIMIT_S = 5.0  # for each budget; the problem is small enough to be solved in less


def add_commands(commands: Any) -> None:
    """`rekindle demo`."""
    parser = commands.add_parser(
        "demo",
        help="train a small GPT at 100, 50 and 30 %% of its activation memory",
        description="Trains a small GPT on the CPU at several budgets. Prints loss, measured peak, "
        "time per step, and whether the gradients are bitwise identical to eager PyTorch's. Writes "
        "an HTML report.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--graph",
        action="store_true",
        help="solve a bundled problem at several budgets instead, and print the trade-off",
    )
    parser.add_argument(
        "--steps", type=steps, default=5, metavar="N", help="training steps (default 5)"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE.html", default="report.html", help="default report.html"
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.set_defaults(run=run_demo)


def run_demo(arguments: argparse.Namespace) -> ExitCode:
    """Trains at several budgets, or solves a bundled problem at several of them."""
    if not arguments.graph:
        # torch is imported here: `--graph` runs without it.
        from rekindle.cli.demo_training import run_training

        check_writable(arguments.output)
        return run_training(arguments.steps, arguments.output, as_json=arguments.json)
    problem = transformer(6, batch=8, sequence=512, width=256, vocabulary=4096)
    base = simulate(problem, keep_all(problem))
    with shown_on_stderr(problem, quiet=arguments.json):
        records, smallest = _trade_off(problem, base)
    if arguments.json:
        printing.print_json(
            {
                "problem": problem.name,
                "keep_all_peak": base.peak,
                "keep_all_cost": base.cost,
                "smallest_peak": smallest,
                "points": records,
            }
        )
        return ExitCode.DONE
    print(
        f"One training step of a small transformer ({len(problem.ops)} ops) has "
        f"a keep-all peak of {printing.size(problem, base.peak)}.\n"
        "Within a smaller budget, some values are freed early and recomputed:\n"
    )
    print(printing.table(("budget", "", "peak", "overhead", "ops recomputed"), map(_row, records)))
    if smallest is not None:
        print(
            f"\nThe smallest peak found is {printing.size(problem, smallest)} "
            f"({printing.percent(smallest / base.peak)}). Every row was simulated op by op."
        )
    return ExitCode.DONE


def _trade_off(problem: Problem, base: Trace) -> tuple[list[dict[str, Any]], int | None]:
    """A record per budget, and the smallest peak found; fewer records after an interrupt."""
    records: list[dict[str, Any]] = []
    try:
        for budget in BUDGETS:
            solution, record = _solve(problem, budget, base.peak, base.cost)
            records.append(record)
            # The first Ctrl-C ends the search of this budget; it should end the demo as well.
            if solution.stopped_by == "interrupt":
                return records, None
        return records, simulate(problem, min_budget(problem)).peak
    except KeyboardInterrupt:
        return records, None


def _solve(
    problem: Problem, text: str, keep_all_peak: int, keep_all_cost: int
) -> tuple[Solution, dict[str, Any]]:
    budget = parse_budget(text, keep_all_peak)
    solution = run_solver(default_solver(problem), problem, budget, time_limit_s=TIME_LIMIT_S)
    trace = None if solution.schedule is None else simulate(problem, solution.schedule)
    return solution, {
        "fraction": float(text),
        "budget": budget,
        "budget_text": printing.size(problem, budget),
        "status": solution.status.name,
        "solver": solution.solver,
        "peak": trace and trace.peak,
        "peak_text": trace and printing.size(problem, trace.peak),
        "cost": trace and trace.cost,
        "overhead": trace and printing.overhead(trace.cost, keep_all_cost),
        "num_recomputed": trace and trace.num_recomputed,
    }


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    head = (printing.percent(record["fraction"]), record["budget_text"])
    if record["peak"] is None:
        return (*head, "-", "infeasible", "-")
    extra = f"{100 * record['overhead']:+.1f} %"
    return (*head, record["peak_text"], extra, str(record["num_recomputed"]))
