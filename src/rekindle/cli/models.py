"""`capture`, `plan` and `verify`: the commands that take a model.

A model is named MODULE:FACTORY, or FILE.py:FACTORY. The factory takes no arguments and returns
(model, args, kwargs), (model, args) or the model alone. torch is imported inside the `run`
functions, so that `--help` and a mistyped option answer at once.
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from rekindle.cli import printing
from rekindle.cli.arguments import (
    BUDGET_HELP,
    GAP_HELP,
    JSON_HELP,
    QUIET_HELP,
    add_save_and_recompute,
    ranks,
    seconds,
    seed,
    share,
)
from rekindle.cli.exit_codes import ExitCode
from rekindle.cli.profile_options import (
    add_budget_options,
    add_profile_options,
    options_of,
    profile_lines,
    profile_record,
)
from rekindle.core import keep_all, write_problem
from rekindle.errors import FileError, RekindleError
from rekindle.planning_progress import shown_on_stderr
from rekindle.plans.options import DEFAULTS, Kernels, as_args
from rekindle.plans.plan_account import command
from rekindle.report import verdict

FACTORY_HELP = "MODULE:FACTORY or FILE.py:FACTORY; FACTORY() -> (model, args, kwargs)"


def add_commands(commands: Any) -> None:
    """`rekindle capture`, `plan` and `verify`: the commands that import a model."""
    capture = commands.add_parser(
        "capture",
        help="write a model's training step as a problem file",
        description="Captures the joint forward and backward graph of a model, profiles its ops "
        "and writes them as a problem file, which `rekindle solve` reads without torch.",
        allow_abbrev=False,
    )
    capture.add_argument("factory", metavar="MODULE:FACTORY", help=FACTORY_HELP)
    capture.add_argument("-o", "--output", required=True, metavar="PROBLEM.json", help="write to")
    _common(capture)
    capture.set_defaults(run=run_capture)

    plan = commands.add_parser(
        "plan",
        help="plan a model's training step within a budget",
        description="Captures a model, profiles its ops and solves for a schedule within the "
        "budget. The plan file is read by rekindle.Plan.load.",
        allow_abbrev=False,
    )
    plan.add_argument("factory", metavar="MODULE:FACTORY", help=FACTORY_HELP)
    plan.add_argument("--budget", metavar="B", help=BUDGET_HELP)
    _search(plan)
    plan.add_argument(
        "--seed",
        type=seed,
        default=DEFAULTS.seed,
        metavar="N",
        help=f"seed of the solver (default {DEFAULTS.seed})",
    )
    plan.add_argument("-o", "--output", metavar="PLAN.json", help="write the plan to")
    plan.add_argument(
        "--ranks",
        type=ranks,
        default=DEFAULTS.ranks,
        metavar="N",
        help="ranks of a data-parallel run; the budget is for each rank, whose device also holds "
        f"gradient buckets (default {DEFAULTS.ranks})",
    )
    plan.add_argument(
        "--no-cache",
        dest="cache",
        action="store_false",
        help="neither read nor write costs and solutions cached on disk",
    )
    add_budget_options(plan)
    add_save_and_recompute(plan)
    _common(plan)
    plan.set_defaults(run=run_plan)

    verify = commands.add_parser(
        "verify",
        help="check that a managed model is bitwise identical to the original",
        description="Runs one training step of both from the same state and compares outputs, "
        "gradients, buffers and random number generators. Exit code 1 if any of them differs.",
        allow_abbrev=False,
    )
    verify.add_argument("factory", metavar="MODULE:FACTORY", help=FACTORY_HELP)
    choice = verify.add_mutually_exclusive_group(required=True)
    choice.add_argument("--budget", metavar="B", help=BUDGET_HELP)
    choice.add_argument("--plan", metavar="PLAN.json", help="apply this plan file")
    _search(verify)
    add_save_and_recompute(verify)
    _common(verify)
    verify.set_defaults(run=run_verify)


def _search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--solver", default=DEFAULTS.solver, metavar="NAME", help="as listed by `rekindle solvers`"
    )
    parser.add_argument(
        "--time-limit",
        dest="time_limit_s",
        type=seconds,
        default=DEFAULTS.time_limit_s,
        metavar="S",
        help=f"seconds for all searches together (default {DEFAULTS.time_limit_s:g})",
    )
    parser.add_argument(
        "--gap",
        type=share,
        default=DEFAULTS.gap,
        metavar="G",
        help=GAP_HELP,
    )
    parser.add_argument(
        "--no-count-gradients",
        dest="count_gradients",
        action="store_false",
        help="the gradients of parameters come on top of the budget",
    )
    parser.add_argument(
        "--kernels",
        choices=get_args(Kernels),
        default=DEFAULTS.kernels,
        help="whose kernels run: eager's, torch.compile's, or the faster ones within the budget "
        f"(default {DEFAULTS.kernels})",
    )
    parser.add_argument(
        "--best-effort",
        action="store_true",
        help="where the budget cannot be met, take the smallest peak found and say so",
    )


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.add_argument("-q", "--quiet", action="store_true", help=QUIET_HELP)
    for name, help_text in (
        (
            "--no-hold-outputs",
            "assume that the caller drops all outputs but the loss before the backward",
        ),
        ("--outputs-dropped", argparse.SUPPRESS),  # as it was called in 0.1
    ):
        parser.add_argument(name, dest="hold_outputs", action="store_false", help=help_text)
    add_profile_options(parser)


def run_capture(arguments: argparse.Namespace) -> ExitCode:
    """Captures and profiles a model; writes its problem."""
    from rekindle.pipeline import check_options
    from rekindle.plan_object import make_plan

    # A given schedule instead of a budget: everything but solving is done.
    options = options_of(arguments, schedule=keep_all)
    check_options(options)
    model, args, kwargs = load_sample(arguments.factory)
    with shown_on_stderr(quiet=arguments.quiet or arguments.json):
        found = make_plan(options, model, args, kwargs)
    write_problem(arguments.output, found.problem)
    record = {
        "problem": arguments.output,
        "name": found.problem.name,
        "num_ops": len(found.problem.ops),
        "num_values": len(found.problem.values),
        "keep_all_peak": found.keep_all_peak_bytes,
        "keep_all_cost": found.keep_all_cost_ns,
    }
    if arguments.json:
        printing.print_json(record)
    else:
        peak = printing.size(found.problem, found.keep_all_peak_bytes)
        print(
            f"{arguments.output}: {found.problem.name}, {len(found.problem.ops)} ops, "
            f"{len(found.problem.values)} values; keep-all peak {peak}"
        )
    return ExitCode.DONE


def run_plan(arguments: argparse.Namespace) -> ExitCode:
    """Plans a model within a budget; writes the plan, if a path was given."""
    from rekindle.pipeline import check_options
    from rekindle.plan_object import make_plan

    if arguments.budget is None and arguments.device_budget is None:
        raise RekindleError(
            "no budget was given; give --budget (for a step) or --device-budget (for the device)"
        )
    options = options_of(arguments)
    check_options(options)
    model, args, kwargs = load_sample(arguments.factory)
    with shown_on_stderr(quiet=arguments.quiet or arguments.json):
        found = make_plan(options, model, args, kwargs).made_by(command(arguments.argv))
    if arguments.output:  # first of all: an interrupt of what follows must not lose the plan
        found.save(arguments.output)
    account = found.account()
    trace, predicted = account.trace, found.predict()
    buckets = bucket_bytes(model) if arguments.ranks > 1 else 0
    if arguments.json:
        printing.print_json(
            {
                "status": found.status.name,
                "solver": found.solver,
                "peak": found.peak_bytes,
                "cost": found.cost_ns,
                "overhead": found.overhead,
                "keep_all_peak": found.keep_all_peak_bytes,
                "keep_all_cost": found.keep_all_cost_ns,
                "budget": found.budget_bytes,
                "ranks": arguments.ranks,
                "bucket_bytes": buckets,
                "bound": found.bound,
                "gap": found.gap,
                "verdict": verdict(account),
                "num_recomputed": trace.num_recomputed,
                "kept": found.kept,
                "kernels": found.record.options.kernels,
                "plan": arguments.output,
                "predicted_peak": predicted.peak_bytes,
                "predicted_ns": predicted.step_ns,
                **profile_record(found),
            }
        )
        return ExitCode.DONE
    problem = found.problem
    print(verdict(account))
    kept = ", from the cache of solutions" if found.kept else ""
    kernels = "" if found.joint.kernels == "eager" else ", with compiled kernels"
    print(f"{problem.name}, planned by {found.solver}: {found.status.value}{kernels}{kept}")
    print(
        f"predicted on the device: peak {printing.size(problem, predicted.peak_bytes)}, "
        f"step {printing.cost(problem, predicted.step_ns)}"
    )
    if arguments.ranks > 1:
        print(
            f"each of {arguments.ranks} ranks: {printing.size(problem, found.budget_bytes or 0)} "
            f"for a step, plus {printing.size(problem, buckets)} of gradient buckets (0 with "
            "gradient_as_bucket_view=True)"
        )
    for line in profile_lines(found):
        print(line)
    if arguments.output:
        print(f"written to {arguments.output}")
    return ExitCode.DONE


def run_verify(arguments: argparse.Namespace) -> ExitCode:
    """Compares one step of a managed model with the original."""
    from rekindle.pipeline import check_options
    from rekindle.plan_object import Plan, make_plan, manage_plan
    from rekindle.verification import verify

    # on_miss="raise" in both: a call that runs eagerly would compare eager with itself
    options = options_of(arguments, on_miss="raise")
    check_options(options)
    model, args, kwargs = load_sample(arguments.factory)
    if arguments.plan is not None:
        managed = Plan.load(arguments.plan).apply(model, args, kwargs, on_miss="raise")
    else:
        with shown_on_stderr(quiet=arguments.quiet or arguments.json):
            plan = make_plan(options, model, args, kwargs)
            managed = manage_plan(options, plan, model, args, kwargs)
    answer = verify(model, managed, args, kwargs, costs=True)
    predicted, measured = answer.predicted, answer.measured
    # `costs=True` asked for both.
    assert predicted is not None
    assert measured is not None
    if arguments.json:
        printing.print_json(
            {
                "equal": answer.equal,
                "num_compared": len(answer.items),
                "differences": list(answer.differences),
                "predicted_peak": predicted.peak_bytes,
                "measured_peak": measured.peak_bytes,
                "predicted_ns": predicted.step_ns,
                "measured_ns": measured.step_ns,
            }
        )
    else:
        print(answer)
    return ExitCode.DONE if answer.equal else ExitCode.CHECK_FAILED


def bucket_bytes(model: Any) -> int:
    """Bytes of the buckets of DistributedDataParallel, which hold a copy of the gradients."""
    from rekindle.predict import residents_of

    return residents_of(model, ranks=2).buckets_bytes


def load_sample(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Imports the factory and calls it."""
    from torch import nn

    # Errors of the factory itself keep their traceback: it is the user's code.
    made = _factory(name)()
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        raise FileError(
            f"{name} returned a {type(made).__name__}; expected (model, args, kwargs) with an "
            "nn.Module first"
        )
    args = parts[1] if len(parts) > 1 else ()
    kwargs = parts[2] if len(parts) > 2 else {}
    if not isinstance(kwargs, dict):
        raise FileError(
            f"{name} returned kwargs as a {type(kwargs).__name__}; expected (model, args, kwargs) "
            "with a dict at the end"
        )
    return parts[0], as_args(args), dict(kwargs)


def _factory(name: str) -> Callable[[], Any]:
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise FileError(f"{name!r} does not name a factory; expected {FACTORY_HELP}")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise FileError(f"there is no file {where}; expected {FACTORY_HELP}")
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Registered before it runs: dataclasses and pickle look a class's module up by name.
        # A module that is already there under this name, such as `json`, is not replaced.
        sys.modules.setdefault(spec.name, module)
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")  # the current folder, as `python -m` has it
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:  # of this module, or of one that it imports
            raise FileError(f"module {where!r} cannot be imported: {error}") from None
        finally:
            sys.path.remove("")
    found = getattr(module, attribute, None)
    if not callable(found):
        raise FileError(f"{where} has no function {attribute!r}; expected {FACTORY_HELP}")
    return found  # type: ignore[no-any-return]
