"""The entry point: the parser of all commands, and the exit code and sentence of each error.

Only errors that Rekindle raises on purpose become a sentence. Any other exception is a bug, here or
in the user's model, and keeps its traceback.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from rekindle.cli import checks, demo, models, problems, profile_options, reports
from rekindle.cli.exit_codes import ExitCode
from rekindle.errors import BudgetInfeasible, RekindleError

GROUPS = (models, problems, checks, reports, profile_options, demo)


class Parser(argparse.ArgumentParser):
    """Like argparse, but an error is one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


class Version(argparse.Action):
    """Prints the version. It is looked up only then: reading package metadata takes time."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        try:
            text = version("rekindle")
        except PackageNotFoundError:
            text = "(not installed)"
        print(f"rekindle {text}")
        parser.exit()


def build_parser() -> Parser:
    """The parser with the commands of all groups."""
    parser = Parser(
        prog="rekindle",
        description="Train any PyTorch model inside the memory you have.",
        epilog="Exit codes: 0: done. 1: check or verification failed. 2: bad usage or input. 3: no "
        "schedule within the budget was found.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for group in GROUPS:
        group.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Errors of this package become one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A name in a problem file may hold characters that the terminal cannot encode.
            stream.reconfigure(errors="backslashreplace")
    try:
        arguments = build_parser().parse_args(argv)
        arguments.argv = sys.argv[1:] if argv is None else list(argv)
        code = arguments.run(arguments)
        sys.stdout.flush()
    except BudgetInfeasible as error:
        return _fail(error, ExitCode.INFEASIBLE)
    except RekindleError as error:
        return _fail(error, ExitCode.USAGE)
    except KeyboardInterrupt:
        return _fail("interrupted before a schedule was found", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`). The interpreter flushes stdout at exit and
        # would print "Exception ignored ... BrokenPipeError": give it a stdout that accepts all.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PIPE
    return int(code)


def _fail(error: object, code: ExitCode) -> int:
    sentence = " ".join(str(error).split())
    print(f"rekindle: {sentence}", file=sys.stderr)
    return code
