"""`cache`, and what the commands that profile share: their options.

The options of a command are stored under the names of the fields of `Options`, so that `options_of`
needs no list of its own.
"""

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rekindle.cli import printing
from rekindle.cli.exit_codes import ExitCode
from rekindle.plans.options import DEFAULTS, Options

if TYPE_CHECKING:  # torch takes seconds to import: only commands that need it do
    from rekindle.plan_object import Plan


def add_commands(commands: Any) -> None:
    """`rekindle cache`."""
    cache = commands.add_parser(
        "cache",
        help="show or clear cached measurements and solutions",
        description="Measured ops and solved problems are cached on disk, in $REKINDLE_CACHE_DIR "
        "or else the user's cache folder, so that a model is profiled and solved once.",
        allow_abbrev=False,
    )
    actions = cache.add_subparsers(metavar="info|clear", required=True)
    info = actions.add_parser(
        "info", help="show where the cache is and what it holds", allow_abbrev=False
    )
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(run=run_info)
    clear = actions.add_parser(
        "clear", help="remove all cached measurements and solutions", allow_abbrev=False
    )
    clear.add_argument("--json", action="store_true", help="print one JSON object")
    clear.set_defaults(run=run_clear)


def add_profile_options(parser: argparse.ArgumentParser) -> None:
    """For commands that plan or capture a model."""
    group = parser.add_argument_group("costs of ops")
    # Another device cannot be measured from here: --device-profile implies estimates.
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--profile",
        choices=("measure", "estimate"),
        default=DEFAULTS.profile,
        help="measure each distinct op on this machine's device (default), or estimate its cost "
        "from the device's bandwidth and FLOP rate",
    )
    choice.add_argument(
        "--device-profile",
        metavar="NAME",
        help="estimate for another device: a100, h100, h200, rtx4090, cpu, or a FILE.toml of your "
        "own",
    )
    group.add_argument(
        "--remeasure",
        action="store_true",
        help="measure all costs anew and replace the cached ones, as after a busy hour",
    )


def add_budget_options(parser: argparse.ArgumentParser) -> None:
    """A budget for the whole device, beside `--budget` for the step."""
    group = parser.add_argument_group("budget of the whole device")
    group.add_argument(
        "--device-budget",
        metavar="B",
        help='a size, a fraction of the device, or "auto": what is free on the device now',
    )
    group.add_argument(
        "--headroom",
        type=headroom,
        metavar="H",
        default=DEFAULTS.headroom,
        help=f"a fraction or a size to keep free (default {DEFAULTS.headroom})",
    )
    group.add_argument(
        "--optimizer", metavar="NAME", help="count the state of this optimizer too, such as adamw"
    )
    moving = parser.add_argument_group("moving values to host memory")
    moving.add_argument(
        "--offload",
        metavar="WHAT",
        default=DEFAULTS.offload,
        help='"auto": where the device\'s link is known and it is faster than recomputing; '
        '"host_budget 32GiB": with at most so much host memory (default: nothing is moved)',
    )


def headroom(text: str) -> float | int | str:
    """A number with a point is a fraction; 0 is 0; anything else is a size, as in a budget."""
    if text == "0":
        return 0
    if "." in text and text.replace(".", "", 1).isdigit():
        return float(text)
    return text


def options_of(arguments: argparse.Namespace, **others: Any) -> Options:
    """The `Options` that a command was given; `others` are set by the command itself."""
    given = {f.name: getattr(arguments, f.name) for f in fields(Options) if f.name in arguments}
    return Options(**{**given, **others})


def profile_record(plan: "Plan") -> dict[str, Any]:
    """Where a plan's costs and its budget are from, as JSON data."""
    profile = plan.profile
    record: dict[str, Any] = {
        "device": profile.device,
        "costs": {source.value: count for source, count in profile.num_by_source.items()},
        "not_measured": [list(item) for item in profile.not_measured],
    }
    if plan.device_budget is not None:
        record["device_budget"] = dict(plan.device_budget.rows())
    return record


def profile_lines(plan: "Plan") -> list[str]:
    """The same as lines of text: which costs were not measured, and the sum behind the budget."""
    lines = [f"costs: {plan.profile.summary()}"]
    # Ten are enough to see the reason; --json has all of them.
    lines += [f"not measured: {target}: {why}" for target, why in plan.profile.not_measured[:10]]
    if len(plan.profile.not_measured) > 10:
        lines.append(f"and {len(plan.profile.not_measured) - 10} more")
    if plan.device_budget is not None:
        lines.append(f"device budget {plan.device_budget}")
    return lines


def run_info(arguments: argparse.Namespace) -> int:
    """Prints where the cache is and what it holds."""
    from rekindle.profile.cache import cache_dir, cache_info
    from rekindle.solve.solution_cache import solutions_dir, solutions_info

    files = cache_info()
    num_solutions, solution_bytes = solutions_info()
    if arguments.json:
        printing.print_json(
            {
                "path": str(cache_dir()),
                "num_ops": sum(f.num_ops for f in files),
                "num_bytes": sum(f.num_bytes for f in files),
                "solutions_path": str(solutions_dir()),
                "num_solutions": num_solutions,
                "solutions_bytes": solution_bytes,
                "environments": [
                    {
                        "device": f.device,
                        "torch": f.torch_version,
                        "num_ops": f.num_ops,
                        "num_bytes": f.num_bytes,
                    }
                    for f in files
                ],
            }
        )
        return ExitCode.DONE
    print(cache_dir())
    if files:
        rows = [(f.device, f.torch_version, f"{f.num_ops:,}", f"{f.num_bytes:,}") for f in files]
        print(printing.table(("device", "torch", "ops", "bytes"), rows, left=2))
    else:
        print("no cached measurements")
    print(solutions_dir())
    print(f"{num_solutions:,} cached solutions, {solution_bytes:,} bytes")
    return ExitCode.DONE


def run_clear(arguments: argparse.Namespace) -> int:
    """Empties the cache; prints what was removed."""
    # Counted before: afterwards there is nothing to count.
    from rekindle.profile.cache import cache_clear, cache_info
    from rekindle.solve.solution_cache import solutions_clear

    num_ops = sum(f.num_ops for f in cache_info())
    num_files = cache_clear()
    num_solutions = solutions_clear()
    if arguments.json:
        printing.print_json(
            {"num_ops": num_ops, "num_files": num_files, "num_solutions": num_solutions}
        )
    else:
        print(
            f"{num_ops:,} measurements of {num_files} environments and {num_solutions:,} "
            "solutions removed"
        )
    return ExitCode.DONE
