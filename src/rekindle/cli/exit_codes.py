"""The exit codes of all commands."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process ends with. Scripts rely on these numbers."""

    DONE = 0
    CHECK_FAILED = 1  # check: invalid or over budget; verify, demo: not bitwise identical
    USAGE = 2  # bad usage, a file that cannot be understood, a solver that is not installed
    INFEASIBLE = 3  # the smallest peak found is printed
    INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
    PIPE = 141  # 128 + SIGPIPE: Python ignores that signal and raises BrokenPipeError instead
