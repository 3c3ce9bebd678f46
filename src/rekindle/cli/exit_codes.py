"""The exit codes of all commands."""

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    NO = 1  # check: invalid or over budget; verify: not equal
    USAGE = 2  # bad usage, a file that cannot be understood, a solver that is not installed
    INFEASIBLE = 3  # the smallest peak found is printed
    INTERRUPTED = 130
    PIPE = 141  # as a shell reports SIGPIPE
